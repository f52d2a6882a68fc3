"""Writes docs/catalogue.md: every loss of a public trainer, with its spec and how it was compared.

The numbers are those that `make conformance` recorded. `catalogue_rows` has the words.
"""

from __future__ import annotations

import dataclasses
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from conformance import public_controls
from conformance.public_losses import KLS, LOGLINEAR, SPECS

import policyloss as pl
from docs.catalogue_rows import COMPARED, READ, REASONS, RUN
from docs.conformance_page import CALLED
from docs.markdown import GENERATED, join, table
from policyloss.explanations.framework_names import ELSEWHERE
from policyloss.explanations.traits import fits, traits

TRAINERS = {
    "prime-rl": "prime-rl",
    "trinity-rft": "Trinity-RFT",
    "trinity-main": "Trinity-RFT",
    "areal": "AReaL",
    "areal-main": "AReaL",
    "xtuner": "xtuner",
    "flux": "Flux",
    "roll": "ROLL",
    "ms-swift": "ms-swift",
    "openpipe-art": "ART",
    "verl-recipe": "verl-recipe",
    "rllm": "rLLM",
    **CALLED,
}
_TURNS = {"turn-level GAE": "`advantage.turn_gae`", "gigpo": "`advantage.gigpo`"}


def catalogue_page(compared: Path, recorded: Path, engines: Path) -> str:
    """The page, from the results of the drop-ins, of the recorded numbers and of the engines."""
    about = (
        "The policy, distillation and preference losses of public trainers, and their advantages "
        "where they were compared: the spec that computes each here, the release, the "
        "number of cases and the worst difference from the trainer's own code, relative to "
        "max(1, |value|). The first table is of [drop-ins](conformance.md) against installed "
        "packages, the second of single functions loaded from a trainer's files, and of "
        "[engines](engines.md) against their adapters. The third "
        "lists losses that were read, not run, and those that have no spec, each with its reason."
    )
    if not all(path.is_file() for path in (compared, recorded, engines)):
        return join("# The catalogue", GENERATED, about, "No run has been recorded yet.")
    heading = ["framework", "loss", "here", "releases", "cases", "values", "gradients"]
    return join(
        "# The catalogue",
        GENERATED,
        about,
        "## Run: installed packages",
        "Worst differences in float64 where it was compared.",
        table(heading, _installed(json.loads(compared.read_text(encoding="utf-8"))["results"])),
        "## Run: functions from files",
        "In float64, or where the trainer computes in float32, against its float32. SkyRL's losses "
        "also ran with the other averages that its adapter takes, slime's with both, torchtitan's "
        "with other bounds.",
        table(
            heading,
            sorted(
                _from_files(json.loads(recorded.read_text(encoding="utf-8")))
                + _of_engines(json.loads(engines.read_text(encoding="utf-8"))["results"]),
                key=lambda row: row[0].lower(),
            ),
        ),
        "## Read, not run",
        "*here*: the presets whose parts are those of the loss; their numbers may differ.",
        table(["framework", "loss", "here", "read, not run, because"], _read()),
    )


def _installed(results: list[dict[str, Any]]) -> list[list[str]]:
    """One row for each loss of a framework, over all releases."""
    rows = []
    for peer, losses in COMPARED.items():
        for function, (loss, here) in losses.items():
            found = {
                r["release"]: f
                for r in results
                if r["peer"] == peer
                for f in r["functions"]
                if f["name"] == function
            }
            cases = str(sum(f["cases"] for f in found.values()))
            worst = [_worst(list(found.values()), gradient) for gradient in (False, True)]
            rows.append([CALLED[peer], loss, _link(here), ", ".join(found), cases, *worst])
    return rows


def _worst(functions: list[dict[str, Any]], gradient: bool) -> str:
    """The worst difference in float64, or in float32 if only that was compared."""
    for dtype in ("float64", "float32"):
        found = [f["worst"][dtype].items() for f in functions]
        numbers = [float(x) for each in found for n, x in each if ("gradient" in n) is gradient]
        if numbers:
            return _number(max(numbers)) + (" (float32)" if dtype == "float32" else "")
    return ""


def _from_files(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for key, result in results.items():
        trainer, release, loss = key.split(" ", 2)
        worst = [_number(result["values"]), _number(result["gradients"])]
        cases = str(result["cases"])
        rows.append([TRAINERS[trainer], loss, _link(_here(key, loss)), release, cases, *worst])
    return rows


def _of_engines(results: list[dict[str, Any]]) -> list[list[str]]:
    """One row for each function of an engine, with the spec that its adapter ran."""
    rows = []
    for result in results:
        specs = import_module(f"conformance.peers.{result['peer']}").SPECS
        for f in result["functions"]:
            worst = [_worst([f], gradient) for gradient in (False, True)]
            here = _link(_named(specs[f["name"]]))
            start = [CALLED[result["peer"]], f["name"], here, result["release"]]
            rows.append([*start, str(f["cases"]), *worst])
    return rows


def _here(key: str, loss: str) -> str:
    """Our name of a recorded loss or function."""
    if key in SPECS:
        old = ', `old_logp="loglinear"`' if key in LOGLINEAR else ""
        return _named(SPECS[key]) + old
    if key == KLS:
        return '`Divergence("skew_forward")`, `Divergence("skew_reverse")`'
    if key in public_controls.FUNCTIONS:
        name = public_controls.FUNCTIONS[key][1]
        return f"`{name}`" if hasattr(pl, name) else f"`advantage.{name}`"
    return _TURNS[loss]


def _named(spec: pl.LossSpec | pl.Mixture) -> str:
    """The preset that equals a spec, or the spec as code."""
    name = next((n for n in pl.presets() if pl.preset(n) == spec), None)
    return f"`{name or _code(spec)}`"


def _code(part: Any) -> str:
    """A spec or a part as code, without the fields that have their defaults."""
    if isinstance(part, tuple):
        return ", ".join(map(_code, part))
    if isinstance(part, dict):
        return f"{{{', '.join(f'{name!r}: {_code(x)}' for name, x in part.items())}}}"
    if not dataclasses.is_dataclass(part):
        return repr(part)
    values = [(f, getattr(part, f.name)) for f in dataclasses.fields(part)]
    changed = [f"{f.name}={_code(x)}" for f, x in values if x != f.default]
    return f"{type(part).__name__}({', '.join(changed)})"


def _read() -> list[list[str]]:
    """The losses of `framework_names` of the frameworks in `REASONS`, then `READ`."""
    words = {name: traits(pl.preset(name)) for name in pl.presets()}
    rows = []
    for entry in ELSEWHERE:
        if entry.part != "surrogate":
            continue
        presets = [name for name, traits_of in words.items() if fits(entry.needs, traits_of)]
        more = ", …" if len(presets) > 2 else ""
        here = ", ".join(f"`{name}`" for name in presets[:2]) + more or entry.what
        for frameworks, said in entry.names.items():
            for framework in frameworks.split(", "):
                if framework in REASONS and (framework, entry.what) not in RUN:
                    rows.append([framework, said, _link(here), REASONS[framework]])
    rows += [[*row[:2], _link(row[2]), row[3]] for row in READ]
    return sorted(rows, key=lambda row: row[0].lower())


def _link(here: str) -> str:
    """Link the names of presets to their pages."""
    names = pl.presets()
    return re.sub(
        r"`(\w+)`",
        lambda m: f"[`{m[1]}`](presets/{m[1]}.md)" if m[1] in names else m[0],
        here,
    )


def _number(x: float | None) -> str:
    return "" if x is None else "0" if x == 0 else f"{x:.1e}"
