"""The data that the page's script needs, in compact form: series share their lists of steps,
histograms lose their empty outer bins, and completions are grouped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policyloss.errors import visible
from policyloss_lab.completions import BRANCHES, CODES, spread
from policyloss_lab.limits import LARGEST
from policyloss_lab.reading import finite
from policyloss_lab.report.compare import coinciding
from policyloss_lab.report.panels import LABELS, panels_for
from policyloss_lab.report.rollouts import FLAGS, INTEGERS, NUMBERS, group_of

# The colourings of tokens by a number, and the smallest size with the full colour, so that
# rounding in an on-policy run stays uncoloured.
_LEAST = {"advantage": 0.0, "entropy": 0.1, "surprise": 0.1}
_LEAST |= dict.fromkeys(("ratio", "mismatch", "ref", "teacher"), 0.01)


def view(data: Mapping[str, Any]) -> dict[str, Any]:
    """{"runs": […], "panels": […], "groups": […], "labels": {metric: its name in a chart}, "same":
    {metric: runs that coincide}, "scales": {mode: the value of the strongest colour}}.
    """
    runs = [_run(run) for run in data["runs"]]
    keys = {key for run in runs for key in run["series"]}
    rows = [row for run in data["runs"] for row in (*run["rollouts"], *run["answers"])]
    return {
        "runs": runs,
        "panels": panels_for(keys),
        "groups": [
            {"label": visible(group["label"]), "runs": group["runs"]} for group in data["groups"]
        ],
        "labels": {key: LABELS[key] for key in sorted(keys) if key in LABELS},
        "same": coinciding(runs),
        "scales": _scales(rows),
        "branches": list(BRANCHES.items()),
    }


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    named = {**run["metrics"], **{f"timing/{key}": line for key, line in run["timing"].items()}}
    places: dict[tuple[int, ...], int] = {}
    series = {}
    for key, line in named.items():
        # The script shows names unchanged, and a lone surrogate would crash a browser.
        place = places.setdefault(tuple(line["step"]), len(places))
        series[visible(key)] = [place, short(line["value"])]
    return {
        "label": visible(run["label"]),
        "engine": run["summary"]["engine"],
        "names": run["names"],
        "steps": [list(steps) for steps in places],
        "progress": {
            name: sums and {"step": sums["step"], "value": short(sums["value"])}
            for name, sums in run["progress"].items()
        },
        "series": series,
        "histogram": _cut(run["ratio_histogram"]),
        "band": _band(run["loss"]["spec"]),
        "rollouts": groups_of(run),
    }


def _cut(histogram: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The histogram without the outer bins that are empty at every step."""
    if histogram is None:
        return None
    bins, counts = range(len(histogram["edges"]) - 1), histogram["counts"]
    used = [i for i in bins if any(row[i] for row in counts)]
    low, high = (used[0], used[-1] + 1) if used else (0, 1)
    edges, counts = histogram["edges"][low : high + 1], [x[low:high] for x in histogram["counts"]]
    return {"edges": short(edges), "step": histogram["step"], "counts": counts}


def _band(spec: Any) -> list[float] | None:
    """The ratios between which the trust region limits nothing; None if the loss has no such band,
    or if its ratio is not the token ratio of the histogram.
    """
    parts = spec if isinstance(spec, dict) else {}
    ratio, trust = (x if isinstance(x, dict) else {} for x in map(parts.get, ("ratio", "trust")))
    if ratio.get("type") != "TokenRatio":
        return None
    below, above = finite(trust.get("eps_low")), finite(trust.get("eps_high"))
    if below is not None and above is not None:
        return [1 - below, 1 + above]
    low, high = finite(trust.get("ratio_min")), finite(trust.get("ratio_max"))
    return [low, high] if low is not None and high is not None else None


def _scales(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """{colouring: the size with the full colour}, which 98 % of the tokens do not exceed."""
    values: dict[str, list[float]] = {mode: [] for mode in _LEAST}
    for row in rows:
        sampled, trained = (
            [b if a is None else a for a, b in zip(row[name], row["logp"], strict=True)]
            for name in ("rollout_logp", "old_logp")
        )
        values["ratio"] += [abs(math.log(r)) for r in row["ratio"] if r is not None and r > 0]
        values["advantage"] += _sizes(row["token_advantage"])
        values["entropy"] += _sizes(row["entropy"])
        values["surprise"] += _sizes(sampled)
        values["mismatch"] += _distances(trained, row["rollout_logp"])
        values["ref"] += _distances(row["logp"], row["ref_logp"])
        values["teacher"] += _distances(row["logp"], row["teacher_logp"])
    return {
        mode: max(float(f"{sorted(sizes)[int(0.98 * (len(sizes) - 1))]:.3g}"), _LEAST[mode]) or 1.0
        for mode, sizes in values.items()
        if sizes
    }


def _sizes(values: Iterable[Any]) -> list[float]:
    return [abs(v) for v in values if v is not None]


def _distances(x: Iterable[Any], y: Iterable[Any]) -> list[float]:
    pairs = zip(x, y, strict=True)
    return [abs(a - b) for a, b in pairs if a is not None and b is not None]


def groups_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a run by step: training groups, and answers to held-out prompts.

    Each group has the common fields of its rows, the mean reward, its spread, the mean length, the
    number of cut completions, and the rows.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for name in ("rollouts", "answers"):
        for row in run[name]:
            groups.setdefault((row["step"], name == "answers", group_of(row)), []).append(row)
    shown = [_group(rows, held_out) for (_, held_out, _), rows in groups.items()]
    return sorted(shown, key=lambda group: group["step"])


def _group(rows: Sequence[dict[str, Any]], held_out: bool) -> dict[str, Any]:
    first = rows[0]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    lengths = [len(row["tokens"]) for row in rows if row["tokens"]]
    return {
        "step": first["step"],
        "held_out": held_out,
        "example": first["example"],
        "of": first["groups"],
        "prompt": first["prompt"],
        "answer": first["answer"],
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "spread": spread(rewards) if len(rewards) > 1 else None,
        "length": sum(lengths) / len(lengths) if lengths else None,
        "cut": sum(row["finished"] is False for row in rows),
        "rows": [_row(row) for row in rows],
    }


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One completion. A column with the same value at every token is stored as that value."""
    named = ("completion", "reward", "advantage", "weights", "finished", "finish_reason")
    branch = [None if name is None else CODES[name] for name in row["branch"]]
    return {
        **{name: row[name] for name in named},
        "tokens": row["tokens"],
        **{name: _column(row[name]) for name in INTEGERS},
        **{name: _column(short(row[name])) for name in NUMBERS},
        **{name: _column(row[name]) for name in FLAGS},
        "branch": _column(branch),
    }


def _column(values: list[Any]) -> Any:
    if not values:
        return None
    first = values[0]
    # 1 and True are equal, but not the same in JSON.
    same = all(value == first and type(value) is type(first) for value in values)
    return first if same else values


def short(values: Sequence[Any]) -> list[Any]:
    """The values with six significant digits; tiny ones are 0."""
    return [
        v if v is None or isinstance(v, int) else float(f"{v:.6g}") if abs(v) > 1 / LARGEST else 0.0
        for v in values
    ]
