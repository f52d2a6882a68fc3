"""Differences between runs: settings, losses (by `policyloss.diff`), seeds; runs that coincide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from policyloss.catalogue import PRESETS
from policyloss.explanations import Explanation, diff, explain
from policyloss.spec import LossSpec
from policyloss_lab.reading import Notes, strict

# The errors of reading, explaining or comparing a damaged loss.
_NO_LOSS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as {"a.b": JSON text}; a list is one value."""
    out: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            text = isinstance(value, str)
            out[f"{prefix}{key}"] = value if text else json.dumps(value, ensure_ascii=False)
    return out


def differences(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{"key", "values": [text of each run, or None]}] for the keys with different values."""
    tables = [flat(s) for s in settings]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [{"key": key, "values": [table.get(key) for table in tables]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def loss_card(spec: Any, config: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """{"name", "spec", "explain": `Explanation.to_dict()`, "text": the explanation as text}; the
    last two are None if the spec cannot be read.
    """
    name = config.get("loss")
    name = name if isinstance(name, str) and name else "unknown"
    card: dict[str, Any] = {"name": name, "spec": spec, "explain": None, "text": None}
    if spec is None:
        return card
    if spec == {"code": name}:
        notes.append(f"The loss is code, {name}, which a report does not run.")
        return card
    try:
        explanation = explain(LossSpec.from_dict(spec))
        explained = strict(explanation.to_dict(), "The explanation of the loss", notes)
        text = str(explanation)
    except _NO_LOSS as error:
        notes.append(f"The loss in config.json cannot be explained: {error}")
        return card
    return {**card, "name": _loss_name(name, explanation), "explain": explained, "text": text}


def _loss_name(name: str, explanation: Explanation) -> str:
    """The name of the loss in the run's settings if it is right, else the nearest preset."""
    if explanation.preset is not None:
        return name if name in explanation.also else explanation.preset
    base = name if name in PRESETS else explanation.near
    return f"{base}, changed" if base else "custom"


def loss_differences(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{"a": label, "b": label, "text", "changes", "notes"}]: each other loss against the first."""
    known = [run for run in runs if run["loss"]["explain"] is not None]
    distinct = [known[same[0]] for same in group_equal([run["loss"]["spec"] for run in known])]
    rows: list[dict[str, Any]] = []
    for run in distinct[1:]:
        first = distinct[0]["label"]
        try:
            result = diff(*(LossSpec.from_dict(x["loss"]["spec"]) for x in (distinct[0], run)))
        except _NO_LOSS as error:
            run["notes"].append(f"The loss cannot be compared with that of {first}: {error}")
            continue
        if not result.equal:
            parts = {name: result.to_dict()[name] for name in ("changes", "notes")}
            rows.append({"a": first, "b": run["label"], "text": str(result), **parts})
    return rows


# The last words of settings that differ between runs without influencing training.
_SEEDS = {"seed", "data_seed"}
_NAMES = {
    *("out", "output_dir", "logging_dir", "run_name", "experiment_name", "default_local_dir"),
    *("resume", "resume_from_checkpoint", "track"),
}
_SHOWN = 3  # settings in the name of a group


def seed_groups(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{"label", "runs": [index, …], "end"}]: runs with the same loss that differ only in the seed
    are one group. A run without settings is a group of its own.

    end: {"metric", "mean", "low", "high"} of the last values of a group of several runs, or None.
    """
    settings = [_influential(run) for run in runs]
    keys = [[s, run["loss"]["spec"]] if s else None for s, run in zip(settings, runs, strict=True)]
    groups = group_equal(keys)
    differing = [row["key"] for row in differences([settings[indices[0]] for indices in groups])]
    return [
        {
            "label": _label([runs[i] for i in indices], differing),
            "runs": indices,
            "end": _end([runs[i]["summary"] for i in indices]),
        }
        for indices in groups
    ]


def group_equal(values: Sequence[Any]) -> list[list[int]]:
    """The indices of equal values, group by group; None equals nothing."""
    groups: dict[str, list[int]] = {}
    for i, value in enumerate(values):
        key = f"#{i}" if value is None else json.dumps(value, sort_keys=True)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _influential(run: Mapping[str, Any]) -> dict[str, str]:
    """The settings that may influence training."""
    settings, left_out = flat(run["config"]), _SEEDS | _NAMES
    return {key: settings[key] for key in settings if key.rpartition(".")[2] not in left_out}


def _label(runs: Sequence[Mapping[str, Any]], differing: Sequence[str]) -> str:
    """The settings in which this group differs from the others, and its number of seeds."""
    if len(runs) == 1:
        return str(runs[0]["label"])
    settings = _influential(runs[0])
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
    """Groups of two or more runs with the same value of every metric at every step."""
    return [same for same in group_equal([run["metrics"] or None for run in runs]) if len(same) > 1]


def coinciding(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[list[int]]]:
    """{metric: [[index of a run, …], …]}: groups of runs with the same line. runs: as on the page,
    {"steps": [[…]], "series": {metric: [index of a list in "steps", values]}}.
    """
    out = {}
    for key in dict.fromkeys(key for run in runs for key in run["series"]):
        series = [run["series"].get(key) for run in runs]
        pairs = zip(runs, series, strict=True)
        lines = [line and [run["steps"][line[0]], line[1]] for run, line in pairs]
        if equal := [same for same in group_equal(lines) if len(same) > 1]:
            out[key] = equal
    return out
