"""From lines of metrics to series over steps, histograms and the numbers of the summary."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from policyloss.report.reading import Notes, finite, is_number

Lines = dict[int, dict[str, Any]]  # by step
Series = dict[str, dict[str, list[Any]]]
HISTOGRAM = "ratio_histogram"


def by_step(rows: Iterable[tuple[int, dict[str, Any]]], name: str, notes: Notes) -> Lines:
    """The rows by their step, in order. A step written twice counts once, as last written."""
    lines: Lines = {}
    repeated = without = 0
    for _, row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            without += 1
            continue
        repeated += step in lines
        lines[step] = row
    if repeated:
        notes.append(f"{name} has {repeated} step(s) more than once; the last line of each is used.")
    if without:
        notes.append(f"{name} has {without} line(s) without a step, left out.")
    return dict(sorted(lines.items()))


def series(lines: Lines) -> Series:
    """{metric: {"step": [...], "value": [...]}}; the value is None where the metric was NaN or infinite."""
    out: Series = {}
    for step, row in lines.items():
        were = row.get("nonfinite")  # the names of the numbers that strict JSON could not hold and that were written as null
        nonfinite = were if isinstance(were, dict) else {}
        for key, value in row.items():
            if key != "step" and (is_number(value) or (value is None and key in nonfinite)):
                line = out.setdefault(key, {"step": [], "value": []})
                line["step"].append(step)
                line["value"].append(finite(value))
    return dict(sorted(out.items()))


def nonfinite_notes(found: Series) -> Notes:
    """A sentence for each metric that was NaN or infinite."""
    notes = []
    for key, line in found.items():
        steps = [s for s, v in zip(line["step"], line["value"], strict=True) if v is None]
        if steps:
            notes.append(f"{key} was NaN or infinite at {len(steps)} step(s), first at step {steps[0]}.")
    return notes


def histograms(lines: Lines, notes: Notes) -> dict[str, list[Any]] | None:
    """{"edges": [E], "step": [S], "counts": [S][E − 1]} of the ratio; None if no step has one."""
    edges: list[float] = []
    steps, counts, odd = [], [], 0
    for step, row in lines.items():
        if HISTOGRAM not in row:
            continue
        found = _histogram(row[HISTOGRAM])
        if found is not None and (not edges or found[0] == edges):
            edges = found[0]
            steps.append(step)
            counts.append(found[1])
        else:
            odd += 1
    if odd:
        notes.append(f"{odd} ratio histogram(s) have other edges than the first, or no usable ones, and were left out.")
    return {"edges": edges, "step": steps, "counts": counts} if steps else None


def _histogram(found: Any) -> tuple[list[float], list[Any]] | None:
    """Edges, positive and finite, and the counts between them; an outer edge of 0 or infinity is drawn one bin further out."""
    if not isinstance(found, dict) or not isinstance(found.get("edges"), list) or not isinstance(found.get("counts"), list):
        return None
    edges, counts = list(found["edges"]), found["counts"]
    if not all(isinstance(v, (int, float)) for v in edges) or any(not is_number(c) or finite(c) is None for c in counts):
        return None
    if len(edges) == len(counts) - 1:  # the outermost counts are of what lies beyond the edges
        edges = [0.0, *edges, math.inf]
    if len(edges) != len(counts) + 1 or len(edges) < 2:
        return None
    if edges[0] == 0 and len(edges) > 3:
        edges[0] = edges[1] ** 2 / edges[2]
    if edges[-1] == math.inf and len(edges) > 3:
        edges[-1] = edges[-2] ** 2 / edges[-3]
    usable = all(finite(e) is not None for e in edges) and edges[0] > 0 and all(a < b for a, b in pairwise(edges))
    return (edges, counts) if usable else None


def first_and_last(found: Series, key: str) -> dict[str, Any] | None:
    """{"first": …, "first_step": …, "last": …, "last_step": …, "best": …} over the finite values of a metric; None without any."""
    line = found.get(key, {"step": [], "value": []})
    points = [(s, v) for s, v in zip(line["step"], line["value"], strict=True) if v is not None]
    if not points:
        return None
    (first_step, first), (last_step, last) = points[0], points[-1]
    return {"first": first, "first_step": first_step, "last": last, "last_step": last_step, "best": max(v for _, v in points)}


def total(found: Series, key: str) -> float | int | None:
    """The sum of a metric over the steps; None if it was never written."""
    return sum(v for v in found[key]["value"] if v is not None) if key in found else None
