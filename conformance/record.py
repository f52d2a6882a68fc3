"""Recorded cases: a few small ones for each function, with the framework's numbers, to be replayed
where it is not installed.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance import release
from conformance.cases import Case, Side, cases, count, run_side
from conformance.compare import TOLERANCE, compare
from conformance.environments import ROOT, Peer
from conformance.inputs import draw
from conformance.runner import DELIBERATE, covers, declared_defects, everything
from conformance.suite import Function, Inputs

RECORDED = ROOT / "tests" / "recorded"
SIGNATURES = RECORDED / "signatures.json"
TOKENS = 12  # rows × width of a recorded batch, at most
CANDIDATES = 300  # cases of one function among which the recorded ones are chosen
# Cases of one function at the pinned release; of one with thousands of cases.
MOST, MOST_OF_MANY = (
    8,
    24,
)
# At another release: only cases whose numbers are not those of the pinned release.
MOST_ELSEWHERE = 2
RAISES = "raises"

Record = dict[str, Any]


def record(function: Function, pinned: str, peer: str = "") -> list[Record]:
    """The recorded cases of a function at the release under test; empty if our side needs the
    framework, too.
    """
    version = release.current()
    candidates = list(_candidates(function))
    with without(peer):
        if needs_framework(function):
            return []
    if version != pinned:
        candidates = [case for case in candidates if _differs(function, case, pinned)]
    made = []
    most = MOST_ELSEWHERE if version != pinned else MOST_OF_MANY if count(function) > 2000 else MOST
    for case in spread(candidates, most):
        made.append(_record_case(function, case) | {"release": version})
    return made


def replay(function: Function, recorded: Record) -> dict[str, float]:
    """Our side of a recorded case: the difference of each output and gradient
    from the framework's recorded numbers.

    An output that is missing on one side, or an error on one side only, is infinitely far away.
    """
    release.set_current(recorded["release"])
    side = run_side(
        function.ours, function, decode(recorded["inputs"]), recorded["options"], recorded["seed"]
    )
    if RAISES in recorded:
        return {RAISES: 0.0 if isinstance(side.error, DELIBERATE) else math.inf}
    if side.error is not None:
        return {RAISES: math.inf}
    ours, theirs = everything(side), decode(recorded["outputs"])
    ours = {name: value for name, value in ours.items() if name not in recorded["left_out"]}
    return {
        name: compare(ours[name], theirs[name]).worst
        if name in ours and name in theirs
        else math.inf
        for name in ours | theirs
    }


@contextmanager
def without(package: str) -> Iterator[None]:
    """Make imports of this package fail, loaded or not."""
    loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    sys.modules.update(dict.fromkeys([package, *loaded]))  # type: ignore[arg-type]  # None says that there is no such module
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(loaded)


def is_recordable(function: Function) -> bool:
    """Whether any case may be recorded: cases are float64, which a framework may not compute in."""
    return next(_candidates(function), None) is not None


def needs_framework(function: Function) -> bool:
    """Whether our side imports the framework, as a hook in it does, where its import fails."""
    case = next(cases(function))
    side = run_side(function.ours, function, case.inputs(function), case.options, case.seed)
    return isinstance(side.error, ImportError)


def spread(candidates: list[Case], most: int) -> list[Case]:
    """At most this many cases: those that show the most values of options and kinds of batch,
    and then pairs of them.
    """
    kept: list[Case] = []
    seen: set[frozenset[str]] = set()
    features = {id(case): _features(case) for case in candidates}
    while candidates and len(kept) < most:
        best = max(
            candidates,
            key=lambda case: sum(100 if len(f) == 1 else 1 for f in features[id(case)] - seen),
        )
        if not features[id(best)] - seen:
            break
        seen |= features[id(best)]
        kept.append(best)
    return kept


def _features(case: Case) -> set[frozenset[str]]:
    """The case's choices and pairs of choices."""
    words = [
        f"{key}={json.dumps(value, sort_keys=True, default=str)}"
        for key, value in {**case.options, "kind": case.kind}.items()
    ]
    return {frozenset({word}) for word in words} | {
        frozenset(pair) for pair in combinations(words, 2)
    }


def _candidates(function: Function) -> Iterator[Case]:
    """Some of the function's cases, each on a small batch, where there is something to compare."""
    dtypes = function.dtypes or ("float64",)
    every, chance = list(cases(function, dtypes=dtypes)), random.Random(function.name)
    for case in chance.sample(every, min(CANDIDATES, len(every))):
        small = Case(chance.choice(_small_seeds()), case.kind, case.dtype, case.options)
        if all(
            defect.outputs is not None
            for defect in declared_defects(function, small, small.inputs(function))
        ):
            yield small


@cache
def _small_seeds() -> list[int]:
    """Seeds whose batches are small; the size is drawn first, whatever the kind."""
    return [
        seed for seed in range(400) if draw(seed, "ragged", torch.float64).mask.numel() <= TOKENS
    ]


def _differs(function: Function, case: Case, pinned: str) -> bool:
    """Whether our numbers at the release under test differ from the pinned release."""
    version, inputs = release.current(), case.inputs(function)
    here = run_side(function.ours, function, inputs, case.options, case.seed)
    release.set_current(pinned)
    there = run_side(function.ours, function, inputs, case.options, case.seed)
    release.set_current(version)
    if here.error or there.error:
        return (here.error is None) is not (there.error is None)
    a, b = everything(here), everything(there)
    return a.keys() != b.keys() or any(
        compare(a[name], b[name]).worst > TOLERANCE[torch.float64] for name in a
    )


def _record_case(function: Function, case: Case) -> Record:
    inputs = case.inputs(function)
    theirs = run_side(function.theirs, function, inputs, case.options, case.seed)
    words: Record = {
        "seed": case.seed,
        "kind": case.kind,
        "options": case.options,
        "inputs": encode(inputs),
    }
    if theirs.error is not None:
        return words | {RAISES: theirs.refusal}
    defects = declared_defects(function, case, inputs)
    ours: Side = run_side(function.ours, function, inputs, case.options, case.seed)
    left_out = [
        name
        for name in everything(theirs) | everything(ours)
        if any(covers(defect, name) for defect in defects)
    ]
    outputs = {name: value for name, value in everything(theirs).items() if name not in left_out}
    return words | {"left_out": left_out, "outputs": encode(outputs)}


def encode(values: dict[str, Any]) -> dict[str, Any]:
    """Values in JSON, exactly: a tensor as its dtype, shape and numbers;
    a number that is not finite as its name.
    """
    return {name: _encode(value) for name, value in values.items()}


def decode(values: dict[str, Any]) -> Inputs:
    """The values `encode` was given (a tuple comes back as a list)."""
    return {name: _decode(value) for name, value in values.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        numbers = [_encode(x) for x in value.detach().reshape(-1).tolist()]
        return {
            "tensor": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "numbers": numbers,
        }
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, dict):
        return {"dict": encode(value)}
    if isinstance(value, (list, tuple)):
        return [_encode(x) for x in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"a {type(value).__name__} cannot be recorded; inputs and outputs are tensors and JSON "
        "values."
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(x) for x in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(
            [_decode(x) for x in value["numbers"]], dtype=getattr(torch, value["tensor"])
        ).reshape(value["shape"])
    return float(value["float"]) if "float" in value else decode(value["dict"])


def write(peer: str, recorded: dict[str, list[Record]]) -> Path:
    """One file for a framework, one line for each case."""
    path = RECORDED / f"{peer}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = []
    for name, found in recorded.items():
        lines = ",\n".join(
            "  " + json.dumps(case, separators=(",", ":"), allow_nan=False) for case in found
        )
        blocks.append(f" {json.dumps(name)}: [\n{lines}\n ]")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    return path


def recorded_signatures(peer: Peer) -> dict[str, Any]:
    """The framework's callables as they were recorded; {} if nothing is recorded."""
    found: dict[str, Any] = (
        json.loads(SIGNATURES.read_text()).get(peer.name, {}) if SIGNATURES.is_file() else {}
    )
    return found


def write_signatures(peer: Peer, described: dict[str, Any]) -> None:
    """Enter the signatures of one framework in the file of all."""
    every = json.loads(SIGNATURES.read_text()) if SIGNATURES.is_file() else {}
    every[peer.name] = {"release": peer.release, **described}
    SIGNATURES.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")
