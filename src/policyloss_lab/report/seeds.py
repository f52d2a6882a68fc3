"""Which runs belong together: those that differ in the seed alone, and those that coincide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from policyloss_lab.report.compare import differences, flat

# The last parts of the names of settings that tell runs apart without shaping them.
_SEEDS = {"seed", "data_seed"}
_NAMES = {
    *("out", "output_dir", "logging_dir", "run_name", "experiment_name", "default_local_dir"),
    *("resume", "resume_from_checkpoint", "track"),
}
_SHOWN = 3  # settings in the name of a group


def seed_groups(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{"label", "runs": [index, …], "end"}]: every run is in one group, with those that have the
    same loss and differ in no setting but the seed. A run without settings is alone.

    end: {"metric", "mean", "low", "high"} of the last values of a group of several runs, or None.
    """
    members: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        settings = _shaping(run)
        key = json.dumps([settings, run["loss"]["spec"]], sort_keys=True) if settings else f"#{i}"
        members.setdefault(key, []).append(i)
    firsts = [_shaping(runs[indices[0]]) for indices in members.values()]
    differing = [row["key"] for row in differences(firsts)]
    return [
        {
            "label": _label([runs[i] for i in indices], differing),
            "runs": indices,
            "end": _end([runs[i]["summary"] for i in indices]),
        }
        for indices in members.values()
    ]


def _shaping(run: Mapping[str, Any]) -> dict[str, str]:
    """The settings that may change what is learned."""
    left_out = _SEEDS | _NAMES
    return {
        key: value
        for key, value in flat(run["config"]).items()
        if key.rpartition(".")[2] not in left_out
    }


def _label(runs: Sequence[Mapping[str, Any]], differing: Sequence[str]) -> str:
    """What tells this group from the others, and how many seeds it has."""
    if len(runs) == 1:
        return str(runs[0]["label"])
    settings = _shaping(runs[0])
    others = [f"{key} {settings[key]}" for key in differing if key != "loss" and key in settings]
    more = ["…"] if len(others) > _SHOWN else []
    seeds = {
        tuple(v for key, v in flat(run["config"]).items() if key.rpartition(".")[2] in _SEEDS)
        for run in runs
    }
    count = f"{len(runs)} {'seeds' if len(seeds) == len(runs) else 'runs'}"
    return ", ".join([runs[0]["loss"]["name"], *others[:_SHOWN], *more]) + f" · {count}"


def _end(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    for metric in ("held_out", "reward"):
        last = [s[metric]["last"] for s in summaries if s[metric] is not None]
        if len(last) == len(summaries) > 1:
            mean = sum(last) / len(last)
            return {"metric": metric, "mean": mean, "low": min(last), "high": max(last)}
    return None


def identical_runs(runs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The runs that have the same value in every metric at every step, two or more of them."""
    return _equal({i: run["metrics"] for i, run in enumerate(runs) if run["metrics"]})


def coinciding(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[list[int]]]:
    """{metric: [[index of a run, …], …]}: the runs whose lines lie on each other. runs: those of
    the page, {"steps": [[…]], "series": {metric: [which steps, values]}}.
    """
    keys = dict.fromkeys(key for run in runs for key in run["series"])
    out = {}
    for key in keys:
        lines = {
            i: [run["steps"][run["series"][key][0]], run["series"][key][1]]
            for i, run in enumerate(runs)
            if key in run["series"]
        }
        if equal := _equal(lines):
            out[key] = equal
    return out


def _equal(values: Mapping[int, Any]) -> list[list[int]]:
    """The indices whose values are equal, where there are two or more."""
    groups: dict[str, list[int]] = {}
    for i, value in values.items():
        groups.setdefault(json.dumps(value, sort_keys=True), []).append(i)
    return [indices for indices in groups.values() if len(indices) > 1]
