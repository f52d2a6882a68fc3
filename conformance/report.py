"""The table of a run, the defects of the frameworks, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from conformance.suite import GRADIENT

Result = dict[str, Any]  # the result of one process for one framework at one release
Program = dict[str, Any]  # a program that was run: its name, exit status and output

HEADER = (
    "peer",
    "release",
    "function",
    "cases",
    "refuse",
    "float64",
    "gradient",
    "float32",
    "gradient",
    "defects",
    "failed",
)


def problems(results: Iterable[Result], whole: bool = True) -> list[str]:
    """All failures, in one line each. `whole`: every function ran, so that the
    number of cases can be judged.
    """
    found = []
    for result in results:
        where = f"{result['peer']} {result['release']}"
        found += [
            f"{where} {f['name']}: {f['failed']} failures, the first: {_failure(f)}"
            for f in result["functions"]
            if f["failed"]
        ]
        found += [f"{where} signature: {line}" for line in result.get("signatures", ())]
        cases = sum(f["cases"] for f in result["functions"])
        if whole and result["pinned"] and cases < result["minimum"]:
            found.append(
                f"{where}: {cases} cases compared; at least {result['minimum']} are wanted."
            )
    return found


def table(results: Iterable[Result]) -> str:
    """One row for each framework, release and function, and the sum of each release."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        where = (result["peer"], result["release"])
        rows += [(*where, *_cells(f["name"], [f])) for f in result["functions"]]
        rows.append((*where, *_cells("ALL", result["functions"])))
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    lines = [_line(HEADER, widths), "  ".join("-" * width for width in widths)]
    return "\n".join(lines + [_line(row, widths) for row in rows])


def defects(results: Iterable[Result]) -> str:
    """Every declared defect: where, how often it was declared and how often it showed, the reason,
    and our result instead.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for result in results:
        for function in result["functions"]:
            for reason, tally in function["defects"].items():
                key = (result["peer"], reason, tally["instead"])
                entry = found.setdefault(
                    key, {"declared": 0, "seen": 0, "functions": {}, "releases": {}}
                )
                entry["declared"] += tally["declared"]
                entry["seen"] += tally["seen"]
                entry["functions"][function["name"]] = entry["releases"][result["release"]] = True
    lines = []
    for (peer, reason, instead), entry in found.items():
        lines.append(f"{peer}: {reason}")
        lines.append(f"    we: {instead}")
        where = f"{', '.join(entry['functions'])} in {', '.join(entry['releases'])}"
        lines.append(f"    declared in {entry['declared']} cases, seen in {entry['seen']}: {where}")
    return "\n".join(lines)


def _cells(name: str, functions: list[dict[str, Any]]) -> tuple[str, ...]:
    def total(key: str) -> int:
        return sum(f[key] for f in functions)

    declared = sum(tally["declared"] for f in functions for tally in f["defects"].values())
    return (
        name,
        str(total("cases")),
        str(total("both_refuse") or ""),
        _worst(functions, "float64", False),
        _worst(functions, "float64", True),
        _worst(functions, "float32", False),
        _worst(functions, "float32", True),
        str(declared or ""),
        str(total("failed") or ""),
    )


def _worst(functions: list[dict[str, Any]], dtype: str, gradient: bool) -> str:
    worst = [
        float(x)
        for f in functions
        for name, x in f["worst"][dtype].items()
        if name.startswith(GRADIENT) is gradient
    ]
    return f"{max(worst):.1e}".replace("0.0e+00", "0") if worst else "-"


def _line(row: Iterable[str], widths: list[int]) -> str:
    cells = [
        cell.ljust(width) if i < 3 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _failure(function: dict[str, Any]) -> str:
    return ", ".join(
        f"{key}={value!r}" if key != "what" else str(value)
        for key, value in function["failures"][0].items()
    )
