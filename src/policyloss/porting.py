"""The options of one framework as those of another (`policyloss port`), through the spec.

Nobody inverts a framework's options by hand: a search sets the options of the target, reads each
combination with its adapter, and keeps the one whose loss is nearest to the wanted loss.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from itertools import product
from typing import Any, NamedTuple

from policyloss.catalogue import read_json
from policyloss.catalogue.nearest import GUARDS, ROUNDING
from policyloss.compat.options import FRAMEWORKS, NEVER, Numbers
from policyloss.errors import PolicyLossError
from policyloss.explanations import diff
from policyloss.explanations.difference import entry
from policyloss.explanations.traits import describe_slot
from policyloss.parts.correction import Truncate
from policyloss.parts.data import VARIANTS, kind
from policyloss.parts.trust import Clip, TwoSidedClip
from policyloss.spec import LossSpec

DIGITS = 7  # of a float32, to which some frameworks round their options
# The price of a wrong part; a wrong field costs 1, a guard next to nothing.
PRICES = {"trust": 100.0, "ratio": 50.0, "correction": 20.0, "kl": 20.0, "aggregate": 20.0}


class Reading(NamedTuple):
    """A loss, the function of `policyloss.advantage` that goes with it, and remarks on it."""

    spec: LossSpec
    advantage: str | None = None
    remarks: tuple[str, ...] = ()


class Port(NamedTuple):
    """A loss in a framework.

    options: those that differ from the framework's defaults. lost: a sentence on each difference
    between the framework's loss and the wanted one.
    """

    options: dict[str, Any]
    lost: tuple[str, ...]


def read_options(name: str, options: Mapping[str, Any]) -> Reading:
    """The loss that the options of a framework describe; an option left out has its default."""
    framework = FRAMEWORKS[name]
    known = framework.defaults
    known |= {option: x for option, x in options.items() if option in known}
    remarks = tuple(text for text, holds in framework.remarks(known).items() if holds)
    return Reading(framework.read(known), framework.advantage(known), remarks)


def port_loss(wanted: Reading, to: str) -> Port:
    """The options of the framework `to` whose loss is nearest to the wanted one."""
    framework, data = FRAMEWORKS[to], _as_data(wanted.spec)
    defaults = options = framework.defaults
    least = (math.inf, 0)
    for step in framework.steps * 2:  # the second round sees the options that were set later
        for values in product(*(_values(x, data) for x in step.values())):
            candidate = {**options, **dict(zip(step, values, strict=True))}
            with suppress(PolicyLossError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numbers that are tried
                got = read_options(to, candidate)
                gap = _gap(data, _as_data(got.spec), wanted.spec.reads_ratio)
                gap += wanted.advantage not in (None, got.advantage)
                gap += 0.3 * len(set(got.remarks) - set(wanted.remarks))
                price = gap, sum(candidate[name] != x for name, x in defaults.items())
                if price < least:
                    options, least = candidate, price
    written = {name: x for name, x in options.items() if x != defaults[name]}
    return Port(written, tuple(_losses(wanted, read_options(to, options), to)))


def _as_data(spec: LossSpec) -> dict[str, Any]:
    """`spec` as plain data, in one form for losses with the same numbers.

    For example, a bound that never binds is no bound.
    """
    clip = spec.trust
    if isinstance(clip, TwoSidedClip) and clip.delta >= 1 + clip.eps_high:
        # Only a negative advantage reaches such a delta: it is a dual clip.
        clip = Clip(clip.eps_low, clip.eps_high, clip.delta)
    if isinstance(clip, Clip) and clip.dual is not None and clip.dual >= NEVER:
        clip = dataclasses.replace(clip, dual=None)
    plain = spec.replace(
        trust=clip,
        correction=[
            dataclasses.replace(part, high=math.inf)
            if isinstance(part, Truncate) and part.high >= NEVER
            else part
            for part in spec.correction
        ],
        kl=[_library_part(part) for part in spec.kl_parts],
        aggregate=_library_part(spec.aggregate),
    )
    return {slot: _round_numbers(part) for slot, part in plain.to_dict().items()}


def _library_part(part: Any) -> Any:
    """The library's part for a framework's part that only rounds otherwise."""
    ours: Any = kind(part)
    shared = {f.name: getattr(part, f.name) for f in dataclasses.fields(ours)}
    added = [f for f in dataclasses.fields(part) if f.name not in shared]
    rounds = all(f.name in ROUNDING or getattr(part, f.name) == f.default for f in added)
    return ours(**shared) if rounds else part


def _round_numbers(data: Any) -> Any:
    """Plain data with numbers of `DIGITS` digits."""
    if isinstance(data, Mapping):
        return {key: _round_numbers(x) for key, x in data.items()}
    if isinstance(data, list):
        return [_round_numbers(x) for x in data]
    return float(f"{data:.{DIGITS}g}") if isinstance(data, float) else data


def _numbers(data: Any) -> set[float]:
    """The finite numbers in plain data, without guards."""
    if isinstance(data, (Mapping, list)):
        named = data.items() if isinstance(data, Mapping) else enumerate(data)
        return {x for name, part in named if name not in GUARDS for x in _numbers(part)}
    is_number = isinstance(data, (int, float)) and not isinstance(data, bool)
    return {data} if is_number and math.isfinite(data) else set()


def _values(values: Any, wanted: dict[str, Any]) -> list[Any]:
    """The values to try for an option, the default first."""
    if not isinstance(values, Numbers):
        return list(values)
    numbers = sorted(_numbers(wanted[values.slot]))
    if values.form == "distance":
        numbers = [_round_numbers(abs(1.0 - x)) for x in numbers] + numbers
    tried: list[Any] = [*numbers]
    if values.form in ("pair", "joined"):
        tried = [[low, high] for low in (0.0, *numbers) for high in numbers if low <= high]
    if values.form == "joined":
        logs = [[_round_numbers(math.exp(x)) for x in pair] for pair in tried if pair[1] < 100]
        tried = [f"{low}_{high}" for low, high in (*tried, *logs) if low > 0]
        tried += [x for x in numbers if x > 0]
    return [values.default, *tried, *values.also]


def _gap(wanted: dict[str, Any], got: dict[str, Any], reads_ratio: bool) -> Any:
    """The price of the differences between two losses as plain data."""
    total = float(wanted["entropy_coef"] != got["entropy_coef"])
    total += wanted["rejected"] != got["rejected"]
    for slot in VARIANTS if reads_ratio else VARIANTS.keys() - {"ratio"}:
        mine, theirs = (
            [part for part in (x if isinstance(x, list) else [x]) if part is not None]
            for x in (wanted[slot], got[slot])
        )
        unmatched = 0
        for part in mine:
            twin = next((x for x in theirs if x["type"] == part["type"]), None)
            if twin is None:
                unmatched += 1
                continue
            theirs.remove(twin)
            for name in (name for name, x in part.items() if x != twin[name]):
                # A pull to another model is worse than no pull.
                other_model = slot == "kl" and name == "anchor"
                total += 0.01 if name in GUARDS else 2 * PRICES[slot] if other_model else 1.0
        total += PRICES[slot] * max(unmatched, len(theirs)) + 0.5 * min(unmatched, len(theirs))
    return total


def _losses(wanted: Reading, got: Reading, to: str) -> Iterator[str]:
    """A sentence on each difference, the guards last."""
    a, b = (LossSpec.from_dict(_as_data(x.spec)) for x in (wanted, got))
    horizon = getattr(b.aggregate, "horizon", None)
    a = a if horizon is None else a.for_run(horizon)
    guards = []
    for change in diff(a, b).changes:
        if change.slot == "ratio" and not (a.reads_ratio or b.reads_ratio):
            continue
        for name, mine, theirs in change.fields:
            text = f"{change.slot}, {name}: {entry(mine)} becomes {entry(theirs)} in {to}"
            if name in GUARDS:
                guards.append(f"{text} (a guard: it acts on extreme log-ratios alone)")
            else:
                yield text
        if change.slot not in VARIANTS:
            yield f"{change.slot}: {change.a} becomes {change.b} in {to}"
        elif not change.fields:
            mine, theirs = (describe_slot(spec, change.slot) or "nothing" for spec in (a, b))
            yield f"{change.slot}: {to} has no {change.a} ({mine}); it has {change.b} ({theirs})"
    if wanted.advantage not in (None, got.advantage):
        yield f"advantage: {to} has no advantage.{wanted.advantage}; it has {got.advantage}"
    yield from (text for text in wanted.remarks if text not in got.remarks)
    yield from (text for text in got.remarks if text not in wanted.remarks)
    yield from guards


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of options by their dotted names."""
    flat: dict[str, Any] = {}
    for name, x in options.items():
        flat |= _flat(x, f"{prefix}{name}.") if isinstance(x, Mapping) else {f"{prefix}{name}": x}
    return flat


def read_option_file(path: str, known: Iterable[str]) -> dict[str, Any]:
    """The options in a JSON file by their dotted names; an error if one is nearly a known name."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise PolicyLossError(f"{path} must hold one JSON object, options by name.")
    options = _flat(data)
    for name in options.keys() - set(known):
        folder, _, last = name.rpartition(".")
        others = [x.rpartition(".")[2] for x in known if x.rpartition(".")[0] == folder]
        if meant := get_close_matches(last, others, 1, cutoff=0.88):
            raise PolicyLossError(f"{path}: unknown option {name!r}; did you mean {meant[0]!r}?")
    return options


def as_text(style: str, options: Mapping[str, Any]) -> str:
    """Options as a framework takes them: JSON, or the words of its command line."""
    if style == "json":
        return json.dumps(options, indent=2)
    lines = []
    for name, value in options.items():
        if style == "hydra":
            lines.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
        else:
            numbers = value if isinstance(value, list) else [value]
            lines.append(" ".join([f"--{name}", *(str(x) for x in numbers if x is not True)]))
    return "\n".join(lines)
