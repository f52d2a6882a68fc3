"""The data that the page's script needs, in compact form: series share their lists of steps, and
histograms lose their empty outer bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policyloss.report.limits import LARGEST
from policyloss.report.panels import panels_for
from policyloss.report.reading import finite
from policyloss.report.rollouts import NUMBERS

# The least size with the full colour, so that the rounding of an on-policy run has no colour.
_LEAST = {"ratio": 0.01, "advantage": 0.0, "rollout": 0.01}


def view(data: Mapping[str, Any]) -> dict[str, Any]:
    """{"runs": […], "panels": […], "scales": {mode: the value of the strongest colour}}."""
    runs = [_run(run) for run in data["runs"]]
    keys = {key for run in runs for key in run["series"]}
    rows = [row for run in data["runs"] for row in run["rollouts"]]
    return {"runs": runs, "panels": panels_for(keys), "scales": _scales(rows)}


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    named = {**run["metrics"], **{f"timing/{key}": line for key, line in run["timing"].items()}}
    places: dict[tuple[int, ...], int] = {}
    series = {}
    for key, line in named.items():
        series[key] = [places.setdefault(tuple(line["step"]), len(places)), _short(line["value"])]
    return {
        "label": run["label"],
        "engine": run["summary"]["engine"],
        "names": run["names"],
        "steps": [list(steps) for steps in places],
        "series": series,
        "histogram": _cut(run["ratio_histogram"]),
        "band": _band(run["loss"]["spec"]),
        "rollouts": [
            {**row, **{name: _short(row[name]) for name in NUMBERS}} for row in run["rollouts"]
        ],
    }


def _short(values: Iterable[Any]) -> list[Any]:
    """The values with six significant digits, more than a screen can show; tiny ones are 0."""
    return [
        v if v is None or isinstance(v, int) else float(f"{v:.6g}") if abs(v) > 1 / LARGEST else 0.0
        for v in values
    ]


def _cut(histogram: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The histogram without the outer bins that are empty at every step."""
    if histogram is None:
        return None
    used = [
        i for i in range(len(histogram["edges"]) - 1) if any(row[i] for row in histogram["counts"])
    ]
    low, high = (used[0], used[-1] + 1) if used else (0, 1)
    counts = [row[low:high] for row in histogram["counts"]]
    return {
        "edges": _short(histogram["edges"][low : high + 1]),
        "step": histogram["step"],
        "counts": counts,
    }


def _band(spec: Any) -> list[float] | None:
    """The ratios between which the trust region limits nothing; None if the loss has no such band,
    or if its ratio is not that of tokens, as the histogram's is.
    """
    parts = spec if isinstance(spec, dict) else {}
    ratio, trust = parts.get("ratio"), parts.get("trust")
    if (
        not isinstance(ratio, dict)
        or ratio.get("type") != "TokenRatio"
        or not isinstance(trust, dict)
    ):
        return None
    low, high = finite(trust.get("eps_low")), finite(trust.get("eps_high"))
    if low is not None and high is not None:
        return [1 - low, 1 + high]
    low, high = finite(trust.get("ratio_min")), finite(trust.get("ratio_max"))
    return [low, high] if low is not None and high is not None else None


def _scales(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each colouring, the size that gets the full colour. 98 % of the tokens do not exceed it,
    and all runs share one scale.
    """
    values: dict[str, list[float]] = {"ratio": [], "advantage": [], "rollout": []}
    for row in rows:
        values["ratio"] += [abs(math.log(r)) for r in row["ratio"] if r is not None and r > 0]
        values["advantage"] += [abs(a) for a in row["token_advantage"] if a is not None]
        pairs = zip(row["logp"], row["rollout_logp"], strict=True)
        values["rollout"] += [abs(a - b) for a, b in pairs if a is not None and b is not None]
    return {
        mode: max(_percentile(sizes, 0.98), _LEAST[mode]) or 1.0 for mode, sizes in values.items()
    }


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return float(f"{ordered[int(share * (len(ordered) - 1))]:.3g}") if ordered else 0.0
