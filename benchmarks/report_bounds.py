"""How long a report of huge runs takes, and how much memory: the bounds of docs/report.md.

    python -m benchmarks.report_bounds [--folder DIR] [--gib 10] [--only NAME]

Each case is made on disk (10 GiB for the rollouts by default), drawn by `policyloss
report` in a process of its own, and removed again.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

METRICS = [f"metric/{i:02d}" for i in range(38)]
GIB = 2**30
MEASURED = """
import resource, sys, time
from policyloss.cli import main
start, busy = time.perf_counter(), time.process_time()
code = main(["report", *sys.argv[1:]])
wall, busy = time.perf_counter() - start, time.process_time() - busy
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"MEASURED {code} {wall:.1f} {busy:.1f} {peak:.0f}")
"""


def metric_line(step: int) -> str:
    """A row of 40 metrics, about 1 kB."""
    value = f"{(step * 0.6180339887) % 1:.6f}"
    row = ", ".join(f'"{name}": {value}' for name in METRICS)
    return f'{{"step": {step}, "reward/mean": {value}, "policy/entropy": {value}, {row}}}\n'


def rollout_line(step: int, place: int, tokens: int = 400) -> str:
    """A completion with five numbers for each token, about 30 kB."""
    numbers = [round(-0.001 * ((step + i * 7) % 1000), 5) for i in range(tokens)]
    row = {
        "step": step,
        "group": place // 8,
        "prompt": f"prompt {place // 8}",
        "completion": "word " * tokens,
        "reward": float(place % 2),
        "advantage": 1.0 - 2 * (place % 2),
        "finished": True,
        "ids": list(range(tokens)),
        "tokens": ["word "] * tokens,
        **dict.fromkeys(("logp", "old_logp", "rollout_logp", "ratio"), numbers),
        "token_advantage": [0.5] * tokens,
    }
    return json.dumps(row) + "\n"


def run_folder(folder: Path, lines: int, rollout_bytes: int) -> Path:
    """A run directory of ours with so many lines of metrics and about so many bytes of rollouts."""
    folder.mkdir(parents=True)
    config = {"policyloss": "", "config": {"loss": "dapo"}, "loss": None}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(metric_line(step) for step in range(lines))
    if rollout_bytes:
        block = [rollout_line(0, place) for place in range(32)]
        step = 0
        with (folder / "rollouts.jsonl").open("w") as file:
            while file.tell() < rollout_bytes:
                step += 1
                file.write("".join(block).replace('{"step": 0,', f'{{"step": {step},'))
    return folder


def one_run(folder: Path, gib: float) -> list[Path]:
    """1,000,000 lines of metrics and all of the rollouts in one run."""
    return [run_folder(folder / "run", 1_000_000, int(gib * GIB))]


def hundred_runs(folder: Path, gib: float) -> list[Path]:
    """100 runs with 10,000 lines of metrics and a hundredth of the rollouts each."""
    return [run_folder(folder / f"run{i:03d}", 10_000, int(gib * GIB / 100)) for i in range(100)]


def long_token(folder: Path, gib: float) -> list[Path]:
    """A run with a token of 1 GiB."""
    run = run_folder(folder / "run", 100, 0)
    with (run / "rollouts.jsonl").open("w") as file:
        file.write(rollout_line(1, 0) + '{"step": 2, "tokens": ["')
        for _ in range(1024):
            file.write("x" * 2**20)
        file.write('"]}\n' + rollout_line(3, 0))
    return [run]


def csv_table(folder: Path, gib: float) -> list[Path]:
    """A CSV export of 1,000,000 lines."""
    folder.mkdir(parents=True)
    path = folder / "export.csv"
    with path.open("w") as file:
        file.write(",".join(["Step", *(f"run - {name}" for name in METRICS)]) + "\n")
        for step in range(1_000_000):
            file.write(f"{step}" + f",{(step * 0.618) % 1:.6f}" * len(METRICS) + "\n")
    return [path]


def tensorboard(folder: Path, gib: float) -> list[Path]:
    """1,000,000 scalars in one file of events; records are made by hand, which is quicker."""
    import struct

    folder.mkdir(parents=True)
    path = folder / "events.out.tfevents.0"

    def record(body: bytes) -> bytes:
        return struct.pack("<Q", len(body)) + b"\0\0\0\0" + body + b"\0\0\0\0"

    def scalar(step: int, tag: bytes, value: float) -> bytes:
        inner = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", value)
        summary = b"\x0a" + bytes([len(inner)]) + inner
        digits = bytearray()
        while step >= 128:
            digits.append(step % 128 + 128)
            step //= 128
        return b"\x10" + bytes([*digits, step]) + b"\x2a" + bytes([len(summary)]) + summary

    with path.open("wb") as file:
        file.write(record(b"\x1a\x0dbrain.Event:2"))
        for i in range(1_000_000):
            file.write(record(scalar(i // 40, f"train/m{i % 40}".encode(), i % 1000 / 1000)))
    return [path]


def verl_dumps(folder: Path, gib: float) -> list[Path]:
    """The rollouts as 1,000 files of verl's dumps."""
    folder.mkdir(parents=True)
    row = {"input": "prompt", "output": "word " * 4000, "gts": "", "score": 0.5, "step": 0}
    text = json.dumps(row) + "\n"
    rows = max(1, int(gib * GIB / 1000 / len(text)))
    for step in range(1, 1001):
        (folder / f"{step}.jsonl").write_text(text.replace('"step": 0', f'"step": {step}') * rows)
    return [folder]


CASES: dict[str, Callable[[Path, float], list[Path]]] = {
    case.__name__: case
    for case in (one_run, hundred_runs, long_token, csv_table, tensorboard, verl_dumps)
}


def measure(name: str, folder: Path, gib: float) -> dict[str, Any]:
    """Make a case, draw it, and return its time and memory."""
    start = time.perf_counter()
    runs = CASES[name](folder / "runs", gib)
    made = time.perf_counter() - start
    size = sum(file.stat().st_size for file in (folder / "runs").rglob("*") if file.is_file())
    page = folder / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, runs), "--out", str(page)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "MEASURED 0" not in done.stdout:
        raise SystemExit(done.stdout + done.stderr)
    _, seconds, busy, peak = done.stdout.split("MEASURED")[1].split()
    out = {
        "case": name,
        "GiB": round(size / GIB, 2),
        "seconds": float(seconds),
        "seconds of processor": float(busy),
        "peak MiB": int(peak),
        "page MiB": round(page.stat().st_size / 2**20, 1),
        "made in": round(made),
        "notes": done.stderr.splitlines()[:4],
    }
    shutil.rmtree(folder / "runs")
    return out


def main() -> int:
    """Measure the cases one after the other, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="where there is room (default: temporary)")
    parser.add_argument("--gib", type=float, default=10.0, help="size of the rollouts")
    parser.add_argument("--only", choices=CASES, action="append", help="this case; may be repeated")
    options = parser.parse_args()
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")
    for name in options.only or CASES:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps(measure(name, Path(folder), options.gib)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
