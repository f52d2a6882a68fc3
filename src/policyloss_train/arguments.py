"""From a command line to the options and the loss of a run.

Options come from `--like RUN`, from `--config FILE` and from the command line; the later ones win.
A run directory is data: code that it names is refused, unless the user names the same code on the
command line or in the file.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from policyloss.catalogue import as_spec
from policyloss.commands import arguments_of, read_words
from policyloss.errors import InputError, unknown_name
from policyloss.mixture import read_loss
from policyloss.spec import LossSpec
from policyloss_train.config import TrainConfig, convert_types, defaults_of, model_defaults
from policyloss_train.run import resume
from policyloss_train.user_code import is_reference, load_loss

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Changes = list[tuple[str, str]]  # changes to the loss: (path, text)


class Start(NamedTuple):
    """How a run starts. named: the options that the user named."""

    config: TrainConfig
    spec: LossSpec
    named: frozenset[str]


def read_arguments(arguments: Sequence[str]) -> Start:
    """Read the command line after `policyloss train`."""
    named, changes = named_options(arguments)
    stored: dict[str, Any] = {}
    stored_spec, run = None, named.get("like")
    if named.get("resume"):
        if run is not None:
            raise InputError(f"--like {run} starts a new run; --resume goes on with an old.")
        run = named.get("out", TrainConfig.out)
        config, stored_spec = resume.stored_options(run)
        stored = vars(config)
    elif run is not None:
        stored, stored_spec = _starting_point(run)
    config = TrainConfig(**{**stored, **named})
    if run is not None:
        resume.refuse_unnamed_code(replace(config, out=run), frozenset(named), resume.MAY_BE_CODE)
    if stored_spec is None or "loss" in named:
        spec = read_spec(config.loss, changes)
    else:
        spec = change_spec(stored_spec, changes)
    spec = spec.for_run(config.max_new_tokens)
    return Start(config.with_loss(spec), spec, frozenset(named))


def named_options(arguments: Sequence[str]) -> tuple[dict[str, Any], Changes]:
    """The options on a command line and in its `--config` file, by field, and the changes to the
    loss: each `--loss.SLOT.OPTION VALUE` as (path, text).
    """
    words, changes = split_loss_options(arguments)
    named = read_words("train", arguments_of(TrainConfig), words)
    if "config" not in named:
        return named, changes
    in_file, earlier = _in_file(named["config"])
    return {**in_file, **named}, [*earlier, *changes]


def _in_file(path: Path) -> tuple[dict[str, Any], Changes]:
    """The options in a TOML file, and the changes to the loss, `"loss.trust.eps-high" = 0.3`."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read --config {path}: {error}.") from None
    known = {field.name for field in dataclasses.fields(TrainConfig)} - set(resume.OF_A_START)
    values: dict[str, Any] = {}
    changes: Changes = []
    for key, value in data.items():
        name = key.replace("-", "_")
        if name.startswith("loss."):
            changes.append((name.removeprefix("loss."), json.dumps(value, default=str)))
        elif name in known:
            values[name] = value
        else:
            raise InputError(f"--config {path}: {unknown_name('option', key, known)}")
    try:
        return convert_types(TrainConfig, values), changes
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None


def _starting_point(run: Path) -> tuple[dict[str, Any], LossSpec | None]:
    """The options and the loss of a run, without its directory, for a new run. Defaults that depend
    on the model, the loss or the longest completion are left out: the new run computes its own.
    """
    stored, spec = resume.stored_options(run)
    follows = model_defaults(stored) if spec is None else defaults_of(stored, spec)
    if spec is not None and getattr(spec.aggregate, "horizon", None) == stored.max_new_tokens:
        spec = spec.replace(aggregate=replace(spec.aggregate, horizon=None))
    values = {
        name: value
        for name, value in vars(stored).items()
        if name not in ("out", *resume.OF_A_START) and (name, value) not in follows.items()
    }
    return values, spec


def read_spec(loss: str, changes: Sequence[tuple[str, str]] = ()) -> LossSpec:
    """A preset or the JSON file of a spec, with changes such as `("trust.eps_high", "0.28")`."""
    if is_reference(loss) and not loss.endswith(".json"):
        spec = load_loss(loss)
        if changes and not spec.is_data:
            raise InputError(f"--loss {loss} is code: change that, not --loss.{changes[0][0]}.")
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
    return resume.keep_preset(spec, changed)


def split_loss_options(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The arguments without `--loss.SLOT.OPTION VALUE`, and these options as (path, text)."""
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
    """Set one entry of a spec's dictionary: a number, true, false or null, else a string."""
    *slots, name = path.split(".")
    for slot in slots:
        if not isinstance(data.get(slot), dict):
            valid = ", ".join(sorted(key for key, x in data.items() if isinstance(x, dict)))
            raise InputError(f"--loss.{path}: no part {slot!r}; valid are {valid or 'none'}.")
        data = data[slot]
    try:
        data[name] = json.loads(text)
    except ValueError:
        data[name] = text
