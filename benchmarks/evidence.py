"""Does each loss learn? Every preset trains the default task from the same start;
and the claim of dual clip is tried.

    python -m benchmarks.evidence [--jobs 2] [--seeds 3] [--only ppo,grpo,dual_clip]
        [--out benchmarks/results/evidence.json]

Each run is one process with one thread. Results are written as they come; a second call runs only
jobs that are missing or had other settings. `benchmarks.evidence_plan` defines the runs and their
reasons; docs/evidence.md is made from the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence_plan import (
    COMMON,
    GOAL,
    PRESET_STUDY,
    TEACHER,
    TEACHER_OPTIONS,
    Job,
    jobs,
)
from benchmarks.harness import environment, write_json
from policyloss.errors import InputError
from policyloss_lab.runs.files import environment as made_with
from policyloss_train.arguments import read_spec
from policyloss_train.bench.processes import run_in_processes
from policyloss_train.config import TrainConfig

Record = dict[str, Any]
Work = Callable[[Job], Record]
OUT = Path("benchmarks/results/evidence.json")
FINAL = {
    "kl_old": "policy/kl_old_k3",
    "clip_fraction": "policy/clip_fraction",
    "grad_norm": "grad_norm",
}
# By step, in the study of dual clip alone.
CURVES = {
    "loss": "policy/loss",
    "grad_norm": "grad_norm",
    "ratio_max": "policy/ratio_max",
    "kl_old": "policy/kl_old_k3",
}


# One run ------------------------------------------------------------------------------------------


def train_one(job: Job) -> Record:
    """Train in a temporary folder. → its record; with "error" if the run failed, empty if it was
    interrupted.
    """
    # With transformers: seconds, and `main` does it once for all processes.
    from policyloss_train.loop import (
        train,
    )

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                if train(job.config(out), job.spec) != 0:
                    return {}
            metrics, timing = (_lines(out / name) for name in ("metrics.jsonl", "timing.jsonl"))
            return {
                **_named(job),
                **summary(metrics, timing, with_curves=job.study != PRESET_STUDY),
            }
        # One loss that cannot be trained must not end the others; the page shows it.
        except Exception as error:
            return {**_named(job), "error": f"{type(error).__name__}: {error}"}


def _named(job: Job) -> Record:
    names = {
        "study": job.study,
        "preset": job.preset,
        "seed": job.seed,
        "fingerprint": job.fingerprint,
    }
    return {**names, "settings": job.settings, "why": job.plan.why}


def _lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(
    metrics: Sequence[Record], timing: Sequence[Record], with_curves: bool = False
) -> Record:
    """The stored summary of a run's metrics.jsonl and timing.jsonl.

    Seconds count sampling and learning, without warm-up and evaluation. `to_goal` is
    the first evaluation that reaches `GOAL`, or `None`.
    A number that is not finite is null.
    """
    accuracy = {line["step"]: line["eval/accuracy"] for line in metrics if "eval/accuracy" in line}
    seconds = dict(zip(accuracy, _until(timing, list(accuracy)), strict=True))
    reached = next((step for step, x in accuracy.items() if x >= GOAL), None)
    values = list(accuracy.values())
    trained = [line for line in metrics if line["step"] > 0]
    found: Record = {
        "start": values[0],
        "end": values[-1],
        "best": max(values),
        "to_goal": None
        if reached is None
        else {"steps": reached, "seconds": round(seconds[reached], 2)},
        "seconds": round(seconds[max(seconds)], 2),
        "accuracy": {str(step): x for step, x in accuracy.items()},
        "final": {name: rounded(trained[-1].get(metric)) for name, metric in FINAL.items()},
        "nonfinite_tokens": sum(line.get("policy/nonfinite_tokens") or 0 for line in trained),
    }
    if with_curves:
        found["curves"] = {
            name: [rounded(line.get(metric)) for line in trained] for name, metric in CURVES.items()
        }
    return found


def _until(timing: Sequence[Record], steps: Sequence[int]) -> Iterator[float]:
    """Seconds of all training steps up to each of `steps`; line 0 is an evaluation."""
    for step in steps:
        yield sum(line["step_s"] for line in timing if 0 < line["step"] <= step)


def rounded(x: float | None) -> float | None:
    """To 4 digits, which is more than a run repeats on another machine."""
    return None if x is None else float(f"{x:.4g}")


# All runs -----------------------------------------------------------------------------------------


class Results:
    """The file of results: read at the start, written whole after every run. Each run names one of
    `machines`.
    """

    def __init__(self, path: Path, jobs: int) -> None:
        self.path = path
        self.runs: dict[tuple[str, str, int], Record] = {}
        self.machines: list[Record] = []
        transformers = made_with()["packages"].get("transformers")
        self.here = {**environment(), "cpu": cpu_name(), "transformers": transformers, "jobs": jobs}
        if path.is_file():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                self.machines = stored["machines"]
                self.runs = {
                    (run["study"], run["preset"], run["seed"]): run for run in stored["runs"]
                }
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path} is no file of this program ({error!r}); move it away, or give another "
                    "--out."
                ) from None

    def missing(self, wanted: Sequence[Job]) -> list[Job]:
        """The jobs without a result of exactly these settings."""
        return [job for job in wanted if not self._has(job)]

    def _has(self, job: Job) -> bool:
        run = self.runs.get(job.key, {})
        return run.get("fingerprint") == job.fingerprint and "error" not in run

    def add(self, record: Record) -> None:
        """Store the result, replacing an older one, and write the file."""
        if self.here not in self.machines:
            self.machines.append(self.here)
        key = record["study"], record["preset"], record["seed"]
        self.runs[key] = {**record, "machine": self.machines.index(self.here)}
        ordered = [self.runs[key] for key in sorted(self.runs)]
        write_json(self.path, {"goal": GOAL, "machines": self.machines, "runs": ordered})


def cpu_name() -> str:
    """The system's name of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def run_all(
    wanted: Sequence[Job], results: Results, workers: int, work: Work = train_one
) -> list[Record]:
    """Run the missing jobs, `workers` at a time. → the new results."""
    left = results.missing(wanted)
    print(
        f"{len(left)} runs to do, {len(wanted) - len(left)} are there already; {workers} at a time",
        flush=True,
    )
    done: list[Record] = []
    for record in run_in_processes(left, workers, work):
        if not record:
            raise KeyboardInterrupt
        results.add(record)
        done.append(record)
        print(f"[{len(done)}/{len(left)}] {line_of(record)}", flush=True)
    return done


def line_of(record: Record) -> str:
    """A run in a line."""
    name = f"{record['study']} {record['preset']} seed {record['seed']}"
    if "error" in record:
        return f"{name}: failed, {record['error']}"
    reached = record["to_goal"]
    when = (
        f"{GOAL} at step {reached['steps']}, {reached['seconds']:.0f} s"
        if reached
        else f"{GOAL} not reached"
    )
    return f"{name}: {record['start']:.3f} → {record['end']:.3f}, {when}"


def make_teacher(folder: Path) -> None:
    """The run that students learn from, unless it is there."""
    from policyloss_train.loop import train

    if (folder / "checkpoints").is_dir():
        return
    config = TrainConfig(out=folder, **{**COMMON, "checkpoint_every": 60, **TEACHER_OPTIONS})
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train(config, read_spec(config.loss, ()).for_run(config.max_new_tokens))


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=COMMON["steps"], help="training steps of each run"
    )
    parser.add_argument(
        "--only",
        default="",
        help="presets, and dual_clip for that study, with commas between; all if not given",
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    only = [name for name in args.only.split(",") if name]
    common: Mapping[str, Any] = {**COMMON, "steps": args.steps}
    workers = max(args.jobs, 1)
    try:
        results, wanted = Results(args.out, workers), jobs(args.seeds, only, common)
    except InputError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    # Before the fork, so that 16 processes do not import it 16 times.
    import policyloss_train.loop  # noqa: F401

    try:
        if any("teacher" in job.plan.options for job in results.missing(wanted)):
            make_teacher(Path(TEACHER))
        done = run_all(wanted, results, workers)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
        return 130
    failed = sum("error" in record for record in done)
    print(
        f"all results are in {args.out}; {failed} runs failed"
        if failed
        else f"all results are in {args.out}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
