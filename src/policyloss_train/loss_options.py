"""`--loss` and `--loss.SLOT.OPTION VALUE`: from the words of a command line to a `LossSpec`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from policyloss.catalogue import as_spec, read_loss
from policyloss.errors import InputError
from policyloss.spec import SLOTS, LossSpec
from policyloss_train.user_code import is_reference, load_loss


def read_spec(loss: str, changes: Sequence[tuple[str, str]] = ()) -> LossSpec:
    """A preset or the JSON file of a spec, with changes such as `("trust.eps_high", "0.28")`."""
    if is_reference(loss) and not loss.endswith(".json"):
        spec = load_loss(loss)
        if changes and not spec.is_data:
            raise InputError(
                f"--loss {loss} is code; change it there, not by --loss.{changes[0][0]}."
            )
        return change_spec(spec, changes)
    return change_spec(as_spec(read_loss(loss)), changes)


def change_spec(spec: LossSpec, changes: Sequence[tuple[str, str]]) -> LossSpec:
    """The loss with changes such as `("trust.eps_high", "0.28")`."""
    if not changes:
        return spec
    data = spec.to_dict()
    for path, text in changes:
        _change(data, path, text)
    try:
        changed = LossSpec.from_dict(data)
    except OverflowError as error:
        raise InputError(f"a number of the loss is too large: {error}.") from None
    return made_from(spec, changed)


def made_from(spec: LossSpec, changed: LossSpec) -> LossSpec:
    """`changed` as a change of `spec`: the preset that it was made from is still known."""
    return spec.replace(**{slot: getattr(changed, slot) for slot in SLOTS})


def split_loss_options(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The arguments without `--loss.SLOT.OPTION VALUE`, and these as (path, text)."""
    rest: list[str] = []
    changes: list[tuple[str, str]] = []
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith("--loss."):
            rest.append(argument)
            continue
        path, equals, value = argument.removeprefix("--loss.").partition("=")
        if not equals:
            following = next(waiting, None)
            if following is None:
                raise InputError(f"{argument} needs a value.")
            value = following
        changes.append((path.replace("-", "_"), value))
    return rest, changes


def _change(data: dict[str, Any], path: str, text: str) -> None:
    """Set one entry of a spec's dictionary: numbers, true, false and null as JSON, else words."""
    *slots, name = path.split(".")
    place: Any = data
    for slot in slots:
        if not isinstance(place, dict) or slot not in place:
            valid = sorted(place) if isinstance(place, dict) else []
            raise InputError(
                f"--loss.{path}: the loss has no part {slot!r} here; valid are "
                f"{', '.join(valid) or 'none'}."
            )
        place = place[slot]
    if not isinstance(place, dict):
        raise InputError(
            f"--loss.{path}: this loss has nothing at {'.'.join(slots)!r} whose options could be "
            "set."
        )
    try:
        place[name] = json.loads(text)
    except ValueError:
        place[name] = text
