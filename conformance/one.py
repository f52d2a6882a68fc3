"""The process that compares one framework at one release, in that framework's own environment."""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from conformance import release, signatures, standins
from conformance.cases import Case, count, run_side
from conformance.environments import (
    ENTERED,
    Peer,
    child_environment,
    ensure,
    ensure_release,
    interpreter,
)
from conformance.peers import functions
from conformance.record import record, recorded_signatures
from conformance.runner import Score, run_function
from conformance.suite import Function
from policyloss.output import write_output

SHOWN_PACKAGES = ("torch", "numpy", "transformers", "tensordict", "ray", "deepspeed")


def enter(peer: Peer, version: str) -> None:
    """Restart in the framework's interpreter with this release first on the path, unless this
    process already has both.
    """
    if os.environ.get(ENTERED) != f"{peer.name} {version}":
        ensure(peer)
        environment = child_environment(peer, version, ensure_release(peer, version))
        sys.stdout.flush()
        python = str(interpreter(peer))
        os.execve(python, [python, "-m", "conformance", *sys.argv[1:]], environment)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    standins.install(peer.name, version)
    release.set_current(version)


def applicable(peer: Peer, version: str, only: str | None = None) -> list[Function]:
    """The functions to compare at this release; `only` keeps those whose name contains it."""
    found = [f for f in functions(peer) if f.releases is None or version in f.releases]
    names = [f.name for f in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"{peer.name} {version}: two entries share a name: {', '.join(sorted(repeated))}."
        )
    kept = [f for f in found if only is None or only in f.name]
    if not kept:
        raise ValueError(
            f"{peer.name} {version}: no function {only!r}; there are {', '.join(names)}."
        )
    return kept


def compare_all(
    peer: Peer,
    version: str,
    shift: int,
    only: str | None,
    progress: Callable[[int, int], None],
    every: int = 1,
) -> dict[str, Any]:
    """Compare, and return the result as JSON values. `every`: of a function with many cases, run
    one in so many.
    """
    chosen = applicable(peer, version, only)
    total, before = sum(count(function, every) for function in chosen), 0
    scores = []
    for function in chosen:

        def report(done: int, before: int = before) -> None:
            progress(before + done, total)

        scores.append(run_function(function, shift, every, report))
        before += count(function, every)
    return {
        "peer": peer.name,
        "release": version,
        "pinned": version == peer.release,
        "minimum": peer.minimum,
        "seed": shift,
        "environment": _environment(),
        "signatures": []
        if only
        else signatures.check_installed(peer, version, chosen, recorded_signatures(peer)),
        "functions": [describe(score) for score in scores],
    }


def record_all(peer: Peer, version: str) -> dict[str, Any]:
    """The recorded cases of every function at this release, and the signatures."""
    chosen = applicable(peer, version)
    recorded = {f.name: found for f in chosen if (found := record(f, peer.release, peer.name))}
    described = (
        {"signatures": signatures.describe(peer.name, chosen)} if version == peer.release else {}
    )
    return {"recorded": recorded, **described}


def describe(score: Score) -> dict[str, Any]:
    """A score as JSON values."""
    return {
        "name": score.name,
        "cases": score.compared,
        "both_refuse": score.refused,
        "undefined": score.undefined,
        "worst": {dtype: dict(sorted(worst.items())) for dtype, worst in score.worst.items()},
        "defects": {reason: vars(tally) for reason, tally in score.defects.items()},
        "refusals": dict(score.refusals.most_common(8)),
        "failed": score.failed,
        "failures": score.failures,
    }


def _environment() -> dict[str, str]:
    versions = {}
    for name in SHOWN_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "machine": platform.machine(), **versions}


def write_json(path: Path, value: Any) -> None:
    """JSON on disk; a number that is not finite is written as its name."""
    write_output(
        path,
        (json.dumps(_finite(value), indent=1, ensure_ascii=False, default=str) + "\n").encode(),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    return (
        repr(value)
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))
        else value
    )


def replay(function: Function, words: dict[str, Any]) -> str:
    """One case on both sides, printed: inputs, outputs, gradients,
    and its declared defects.
    """
    case = Case(words["seed"], words["kind"], words["dtype"], words["options"])
    inputs = case.inputs(function)
    lines = [
        f"== {function.name}: {json.dumps(case.describe(), default=str)}",
        f"declared: {function.defect(case.options, inputs)}",
    ]
    lines += [f"input {name} = {value}" for name, value in inputs.items()]
    for who, call in (("theirs", function.theirs), ("ours", function.ours)):
        side = run_side(call, function, inputs, case.options, case.seed)
        lines += [f"{who} {name} = {value}" for name, value in side.outputs.items()]
        lines += [f"{who} gradient of {name} = {value}" for name, value in side.gradients.items()]
        lines += [f"{who} raised {side.refusal}"] if side.error else []
    return "\n".join(lines)
