"""Writes docs/conformance.md from the results of the last `make conformance`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docs.markdown import GENERATED, fenced, join, table

Result = dict[str, Any]  # one framework at one release, as `conformance.one` writes it
CALLED = {
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "trl": "TRL",
    "colossalai": "ColossalChat",
    "tinker": "Tinker",
    "skyrl": "SkyRL",
    "nemo_rl": "NeMo-RL",
    "prime_rl": "prime-rl",
    "slime": "slime",
    "torchtitan": "torchtitan",
    "miles": "miles",
    "areal": "AReaL",
    "trl_async": "TRL AsyncGRPO",
    "swift": "ms-swift",
    "xtuner": "xtuner",
    "rlinf": "RLinf",
    "trinity": "Trinity",
    "twinkle": "twinkle",
}
HEADING = [
    "function",
    "cases",
    "both refuse",
    "float64",
    "its gradient",
    "float32",
    "its gradient",
    "defects",
]


def conformance_page(results: Path, engines: Path | None = None) -> str:
    """The page; before the first run it only explains how to make one."""
    about = (
        "`make conformance` builds one environment per framework from pinned packages and calls "
        "every drop-in and the function it stands in for with the same random inputs: ragged, "
        "full and empty masks, holes, log-ratios up to ±30, float32 and float64, every "
        "combination of options. It compares the loss, every other returned value, and the "
        "gradient. Differences are relative to max(1, |value|), and the run fails if one exceeds "
        "1e-12 in float64 or 1e-6 in float32. These bounds hold for the inputs "
        "drawn here. At extreme ratios float32 has no digits left to agree in: where terms of the "
        "size of e^30 cancel, a framework's own float32 is further than 1e-6 from its own "
        "float64. TRL's loss types that add those terms in another order than we do are therefore "
        "drawn nearer to the reference in float32."
    )
    if not results.is_file():
        return join("# Conformance", GENERATED, about, "No run has been recorded yet.")
    written = json.loads(results.read_text(encoding="utf-8"))
    measured: list[Result] = written["results"]
    of_engines: list[Result] = json.loads(engines.read_text())["results"] if engines else []
    return join(
        "# Conformance",
        GENERATED,
        about,
        "The worst differences of the last run:",
        summary(measured),
        "## Defects of the frameworks",
        "Cases in which a framework's own answer is wrong or undefined are declared beforehand, "
        "with the reason; they are counted here, not compared. A declared defect that never shows "
        "fails the run.",
        defects(measured),
        *engine_table(of_engines),
        *programs(written.get("programs", [])),
        "## Function by function",
        "*cases*: compared. *both refuse*: both sides raise an error. The other columns are the "
        "worst difference in the values and in the gradient. *defects*: cases with a declared "
        "defect.",
        *(section(result) for result in [*measured, *of_engines]),
    )


def engine_table(results: list[Result]) -> list[str]:
    """One row for each engine, and how its hook was tried."""
    if not results:
        return []
    about = (
        "The adapters of [engines](engines.md), against the engines' own functions, which "
        "`python -m conformance.engines engine=SRC` loads from an unpacked wheel or a checkout "
        "(without `=SRC`, from the wheel that pip downloads). "
        "*two ranks*: presets that ran through the adapter over two processes with two "
        "micro-batches each, divided by the engine's own denominators, and the worst difference "
        "of a gradient from that of the whole batch."
    )
    rows = [
        [
            CALLED[r["peer"]],
            r["release"],
            *_row(r["functions"])[:1],
            *_row(r["functions"])[2:6],
            _ranks(r["partition"]),
            f"{r['tried']}: {r['hook']}",
        ]
        for r in results
    ]
    heading = ["engine", "version", "cases", *HEADING[3:7], "two ranks", "hook"]
    return ["## Engines", about, table(heading, rows)]


def _ranks(two: dict[str, Any]) -> str:
    """The presets over two ranks; none if an engine averages each micro-batch alone."""
    return f"{len(two['presets'])} presets, {two['worst']:.1e}" if two["presets"] else "–"


def summary(results: list[Result]) -> str:
    """One row for each framework and release."""
    rows = [
        [
            CALLED.get(r["peer"], r["peer"]),
            r["release"],
            str(len(r["functions"])),
            *_row(r["functions"]),
        ]
        for r in results
    ]
    return table(["framework", "release", "functions", *HEADING[1:]], rows)


def section(result: Result) -> str:
    """All functions of one framework at one release."""
    rows = [[f"`{f['name']}`", *_row([f])] for f in result["functions"]]
    versions = ", ".join(f"{name} {version}" for name, version in result["environment"].items())
    title = f"### {CALLED.get(result['peer'], result['peer'])} {result['release']}"
    failed = sum(f["failed"] for f in result["functions"]) + len(result.get("signatures", ()))
    return join(
        title,
        f"With {versions}.",
        table(HEADING, rows),
        f"**{failed} failures.**" if failed else "",
    )


def defects(results: Iterable[Result]) -> str:
    """Each defect once: the fault, the drop-in's result instead, and the functions that have it."""
    by_reason: dict[tuple[str, str, str], dict[str, Any]] = {}
    for result in results:
        for function in result["functions"]:
            for reason, tally in function["defects"].items():
                entry = by_reason.setdefault(
                    (result["peer"], reason, tally["instead"]),
                    {"seen": 0, "functions": {}, "releases": {}},
                )
                entry["seen"] += tally["seen"]
                entry["functions"][f"`{function['name']}`"] = entry["releases"][
                    result["release"]
                ] = True
    rows = [
        [
            CALLED.get(peer, peer),
            ", ".join(entry["releases"]),
            reason,
            instead,
            ", ".join(entry["functions"]),
            str(entry["seen"]),
        ]
        for (peer, reason, instead), entry in by_reason.items()
    ]
    return (
        table(
            [
                "framework",
                "releases",
                "defect",
                "the drop-in instead",
                "where",
                "cases seen",
            ],
            rows,
        )
        if rows
        else "None."
    )


def programs(ran: list[dict[str, Any]]) -> list[str]:
    """The comparisons that run whole programs, with the output of each program."""
    if not ran:
        return []
    about = (
        "Whole trainings, the frameworks' own unit tests with our functions in place of theirs, "
        "and the code on these pages, run with the installed packages."
    )
    shown = [
        f"`python -m {one['name']}`: {'**failed**' if one['status'] else 'passed'}\n"
        "\n"
        f"{fenced(one['output'].strip(), 'text')}"
        for one in ran
    ]
    return ["## Programs", about, *shown]


def _row(functions: list[dict[str, Any]]) -> list[str]:
    """The numbers of some functions together."""

    def total(key: str) -> int:
        return sum(f[key] for f in functions)

    declared = sum(tally["declared"] for f in functions for tally in f["defects"].values())
    worst = [
        _worst(functions, dtype, gradient)
        for dtype in ("float64", "float32")
        for gradient in (False, True)
    ]
    return [str(total("cases")), str(total("both_refuse") or ""), *worst, str(declared or "")]


def _worst(functions: list[dict[str, Any]], dtype: str, gradient: bool) -> str:
    numbers = [
        float(x)
        for f in functions
        for name, x in f["worst"][dtype].items()
        if name.startswith("gradient") is gradient
    ]
    if not numbers:
        return ""
    return "0" if max(numbers) == 0 else f"{max(numbers):.1e}"
