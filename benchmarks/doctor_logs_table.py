"""Counts what our doctor, rldoctor and rlwatch name in runs whose fault is known.

    python -m benchmarks.doctor_logs_table out/doctor_logs [--fresh out/doctor_logs_fresh]

The runs are those of `benchmarks.doctor_logs`. The two others are needed beside it: `pip install
rldoctor==0.2.0 rlwatch==0.5.1`. Each gets every column of our log that it has a name for, and its
own defaults. Writes benchmarks/results/doctor_logs.json, from which docs/doctor_logs.md is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.doctor_logs_plan import HEALTHY
from benchmarks.harness import write_json
from policyloss.errors import InputError
from policyloss_lab.diagnosis.run_doctor import diagnose_rows, read_log
from policyloss_lab.logs.names import canonical
from policyloss_train.config import TrainConfig

RESULTS = Path("benchmarks/results/doctor_logs.json")
Row = Mapping[str, float]
Names = dict[str, frozenset[str]]  # what a tool named, and which of our symptoms that may mean

# Ours, and what rldoctor reads: the names of TRL where TRL logs it, else the first that it lists.
RLDOCTOR_COLUMNS = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "eval/accuracy": "eval_score",
    "advantage/mean": "advantage/mean",
    "advantage/std": "advantage/std",
    "policy/entropy": "entropy",
    "policy/kl_ref": "kl",
    "policy/clip_fraction": "clip_ratio/region_mean",
    "policy/clip_fraction_lower": "clip_ratio/low_mean",
    "policy/clip_fraction_upper": "clip_ratio/high_mean",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "policy/loss": "policy_loss",
    "length/mean": "completions/mean_length",
    "length/max": "completions/max_length",
    "truncated": "completions/clipped_ratio",
}
# The arguments of rlwatch's `log_step`.
RLWATCH_COLUMNS = {
    "policy/entropy": "entropy",
    "policy/kl_ref": "kl_divergence",
    "reward/mean": "reward_mean",
    "reward/std": "reward_std",
    "advantage/std": "advantage_std",
    "policy/loss": "loss",
    "grad_norm": "grad_norm",
}
# What each of their detectors may mean here, in its favour where it means several things.
RLDOCTOR_MEANING = {
    "advantage_collapse": ("dead_groups",),
    "entropy_collapse": ("entropy_collapse",),
    "reward_hacking": ("reward_hacking",),
    "length_pathology": ("length_growth", "truncation"),
    "clip_saturation": ("clip_saturation",),
    "kl_drift": ("kl_drift",),
    "gradient_pathology": (
        "gradient_spike",
        "gradient_growth",
        "no_gradient",
        "nonfinite",
        "dead_groups",
    ),
    "reward_composition": ("reward_hacking",),
    "plateau": ("no_learning", "learning_rate_low", "no_gradient"),
}
RLWATCH_MEANING = {
    "entropy_collapse": ("entropy_collapse",),
    "kl_explosion": ("kl_drift", "learning_rate_high"),
    "reward_hacking": ("reward_hacking",),
    "advantage_variance": ("gradient_spike", "gradient_growth"),
    "loss_nan": ("nonfinite",),
    "gradient_norm_spike": ("gradient_spike", "gradient_growth"),
    "reward_mean_drift": ("reward_hacking", "no_learning", "collapse"),
}


def renamed(row: Row, columns: Mapping[str, str]) -> dict[str, float]:
    """The metrics of a row that another tool knows, by its names."""
    return {other: row[name] for name, other in columns.items() if name in row}


def ours(rows: Sequence[Row], run: Mapping[str, Any]) -> Names:
    """What `lab.doctor_run` names."""
    return {f.cause: frozenset([f.cause]) for f in diagnose_rows(rows).findings}


def rldoctor(rows: Sequence[Row], run: Mapping[str, Any], least: str = "WARNING") -> Names:
    """Its findings from a severity on; a warning is what its own `selftest` counts."""
    package = import_module("rl_doctor")
    records = []
    for row in rows:
        record = {"step": row["step"], **renamed(row, RLDOCTOR_COLUMNS)}
        if "dead_groups" in (known := canonical(row)):
            record["frac_reward_zero_std"] = known["dead_groups"]
        records.append(record)
    own = run["settings"]["own"]
    config = {
        "algorithm": "ppo" if own.get("advantage") == "gae" else "grpo",
        "num_generations": own.get("group_size", TrainConfig().group_size),
        "max_response_length": own.get("max_new_tokens", TrainConfig().max_new_tokens),
        "learning_rate": own.get("lr", TrainConfig().lr),
    }
    result = package.diagnose(package.run_from_records(records, config=config))
    names = [f.detector for f in result.findings if f.severity >= package.Severity[least]]
    return {name: frozenset(RLDOCTOR_MEANING[name]) for name in names}


def rldoctor_notes(rows: Sequence[Row], run: Mapping[str, Any]) -> Names:
    """The same with its notes, which are below a warning."""
    return rldoctor(rows, run, "INFO")


def rlwatch(rows: Sequence[Row], run: Mapping[str, Any]) -> Names:
    """Every alert of its detectors, step by step."""
    config = import_module("rlwatch.config").RLWatchConfig()
    suite = import_module("rlwatch.detectors").DetectorSuite(config)
    names: Names = {}
    for row in rows:
        if numbers := renamed(row, RLWATCH_COLUMNS):
            for alert in suite.check_step(int(row["step"]), **numbers):
                names[alert.detector] = frozenset(RLWATCH_MEANING[alert.detector])
    return names


Tool = Callable[[Sequence[Row], Mapping[str, Any]], Names]
TOOLS: Mapping[str, Tool] = {
    "policyloss": ours,
    "rldoctor 0.2.0": rldoctor,
    "rldoctor 0.2.0, with notes": rldoctor_notes,
    "rlwatch 0.5.1": rlwatch,
}


def judged(run: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """found: a symptom of the fault was named. noticed: anything was. strays: names that neither
    the fault nor its effects explain; all names, in a healthy run.
    """
    symptoms, effects = set(run["symptoms"]), set(run["effects"])
    return {
        "names": sorted(names),
        "found": any(meaning & symptoms for meaning in names.values()),
        "noticed": bool(names),
        "strays": sorted(n for n, meaning in names.items() if not meaning & (symptoms | effects)),
    }


def counted(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """For each kind: runs, found, noticed, and runs with strays. runs: (run.json, its verdict)."""
    kinds: dict[str, dict[str, int]] = {}
    for run, verdict in runs:
        row = kinds.setdefault(
            run["kind"], dict.fromkeys(("runs", "found", "noticed", "strays"), 0)
        )
        row["runs"] += 1
        for name in ("found", "noticed", "strays"):
            row[name] += bool(verdict[name])
    return kinds


def measured(folder: Path) -> dict[str, Any]:
    """Counts and verdicts of all runs in a folder, for each tool."""
    files = sorted(folder.glob("*/run.json"))
    if not files:
        raise InputError(f"{folder} holds no run; python -m benchmarks.doctor_logs makes them.")
    runs = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    logs = {name: read_log(folder / name) for name in runs}
    verdicts = {
        tool: {name: judged(run, call(logs[name], run)) for name, run in runs.items()}
        for tool, call in TOOLS.items()
    }
    return {
        tool: {"kinds": counted((runs[name], of[name]) for name in runs), "verdicts": of}
        for tool, of in verdicts.items()
    }


def line_of(tool: str, kinds: Mapping[str, Mapping[str, int]]) -> str:
    """A tool in a line."""
    sick = [row for kind, row in kinds.items() if kind != HEALTHY]
    total, right = sum(row["runs"] for row in sick), sum(row["found"] for row in sick)
    seen = sum(row["noticed"] for row in sick)
    well = kinds.get(HEALTHY, {"runs": 0, "strays": 0})
    return (
        f"{tool}: {right} of {total} faults named, {seen} noticed; false alarms in "
        f"{well['strays']} of {well['runs']} healthy runs"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--fresh", type=Path, help="runs with seeds that nobody looked at")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    try:
        versions = {name: version(name) for name in ("rldoctor", "rlwatch")}
        sets = {"first": measured(args.runs)}
        if args.fresh:
            sets["fresh"] = measured(args.fresh)
    except (ModuleNotFoundError, InputError) as error:
        parser.error(str(error))
    for label, tools in sets.items():
        print(label)
        for tool, result in tools.items():
            print(f"  {line_of(tool, result['kinds'])}")
    write_json(args.out, {"versions": versions, "sets": sets})
    return 0


if __name__ == "__main__":
    sys.exit(main())
