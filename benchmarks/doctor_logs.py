"""Makes the runs that the doctor's diagnosis from logs is measured with: 25 that learn, 61 that
have a known fault.

    python -m benchmarks.doctor_logs [--workers 2] [--out out/doctor_logs] [--only lr_high,nan]
        [--seed-shift 1000]

Each is a run of `policyloss train` in one process with one thread, of the built-in task. The
folder of each holds `metrics.jsonl` (as the trainer writes it, without histograms and with six
digits) and `run.json` (its fault and its result). A second call makes only runs that are missing or
were made with other settings. `benchmarks.doctor_logs_plan` lists the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor_log_faults import CLOCK
from benchmarks.doctor_logs_plan import HEALTHY, JOBS, KINDS, name_of
from benchmarks.evidence_plan import Job
from benchmarks.harness import write_json
from policyloss.errors import InputError, PolicyLossError, unknown_name
from policyloss.output import write_output
from policyloss_train.bench.processes import run_in_processes

OUT = Path("out/doctor_logs")
LEARNED = 0.3  # a healthy run gains at least this much held-out accuracy
DIGITS = 6


def train_one(job: Job) -> dict[str, Any]:
    """Train in a folder that is gone afterwards. → what becomes `run.json`, with the lines of
    metrics.jsonl as "metrics"; nothing if it was interrupted.
    """
    from policyloss_train.loop import train  # with transformers: seconds, which `main` takes once

    torch.set_num_threads(1)
    CLOCK.begin(job.seed)
    began = time.perf_counter()
    stopped = None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        try:
            # Warnings of sick runs are many, and are no news here.
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                if train(job.config(out), job.spec) != 0:
                    return {}
        # A run that gives up is a result; its log ends there.
        except PolicyLossError as error:
            stopped = f"{type(error).__name__}: {error}".replace(folder, "")
        file = out / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rows = [shortened(json.loads(line)) for line in lines]
    held_out = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
    kind = KINDS[job.study]
    return {
        "name": name_of(job),
        "kind": job.study,
        "fault": kind.fault,
        "symptoms": kind.symptoms,
        "effects": kind.effects,
        "loss": job.preset,
        "seed": job.seed,
        "settings": job.settings,
        "fingerprint": job.fingerprint,
        "steps": int(rows[-1]["step"]) if rows else 0,
        "held_out": [held_out[0], held_out[-1]] if held_out else [],
        "stopped": stopped,
        "seconds": round(time.perf_counter() - began, 1),
        "metrics": rows,
    }


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without histograms, its numbers with six digits."""
    return {
        name: float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x
        for name, x in row.items()
        if name != "ratio_histogram"
    }


def keep(record: dict[str, Any], out: Path) -> None:
    """Write the folder of a run; run.json last, because it says that the run is there."""
    folder = out / record["name"]
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in record["metrics"])
    write_output(folder / "metrics.jsonl", lines.encode())
    write_json(folder / "run.json", {k: x for k, x in record.items() if k != "metrics"})


def missing(jobs: Sequence[Job], out: Path) -> list[Job]:
    """Those without a result of these very settings."""
    return [job for job in jobs if _fingerprint(out / name_of(job) / "run.json") != job.fingerprint]


def _fingerprint(file: Path) -> str | None:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stored.get("fingerprint") if isinstance(stored, dict) else None


def line_of(record: dict[str, Any]) -> str:
    """A run in a line."""
    held_out = record["held_out"]
    parts = [f"{record['name']}: {record['steps']} steps, {record['seconds']:.0f} s"]
    if held_out:
        parts.append(f"held-out {held_out[0]:.2f} → {held_out[1]:.2f}")
    if record["stopped"]:
        parts.append(f"stopped, {record['stopped'][:100]}")
    if not as_planned(record):
        parts.append("NOT AS PLANNED")
    return "; ".join(parts)


def as_planned(record: dict[str, Any]) -> bool:
    """Whether a healthy run learned; a sick one is what it is, if it was trained at all."""
    held_out = record["held_out"]
    if record["kind"] != HEALTHY:
        return bool(record["steps"])
    return bool(held_out) and held_out[1] - held_out[0] >= LEARNED and record["stopped"] is None


def chosen_jobs(only: str, seed_shift: int = 0) -> list[Job]:
    """The runs of the kinds, or with the names, that `only` lists with commas; all if empty.
    seed_shift: is added to every seed, for runs that nobody looked at.
    """
    wanted = {name for name in only.split(",") if name}
    jobs = [dataclasses.replace(job, seed=job.seed + seed_shift) for job in JOBS]
    valid = {*KINDS, *map(name_of, jobs)}
    for name in sorted(wanted - valid):
        raise InputError(unknown_name("--only", name, valid))
    return [job for job in jobs if not wanted or wanted & {job.study, name_of(job)}]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", default="", help="kinds or names of runs, with commas between")
    parser.add_argument("--seed-shift", type=int, default=0, help="is added to every seed")
    args = parser.parse_args(argv)
    try:
        wanted = chosen_jobs(args.only, args.seed_shift)
    except InputError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    import policyloss_train.loop  # noqa: F401  # before the fork, once for all processes

    left = missing(wanted, args.out)
    print(f"{len(left)} runs to make, {len(wanted) - len(left)} are there already", flush=True)
    bad = 0
    try:
        for done, record in enumerate(run_in_processes(left, max(args.workers, 1), train_one), 1):
            if not record:
                raise KeyboardInterrupt
            keep(record, args.out)
            bad += not as_planned(record)
            print(f"[{done}/{len(left)}] {line_of(record)}", flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
        return 130
    print(f"all runs are in {args.out}; {bad} of those made now are not as planned")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
