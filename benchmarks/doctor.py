"""The doctor's confusion matrix: every fault × seeds × models × sizes of batch.

python -m benchmarks.doctor --work /tmp/doctor --engine-python .engines/vllm/bin/python

makes small models, starts a real vLLM on them (once for each model and way of reporting), injects
every fault, calls `lab.doctor`, and writes `matrix.json` into the work folder. Finished jobs are
kept in the work folder, so that the command can be stopped and started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor_cases import FAULTS, Batch, MixtureSource, Source
from benchmarks.doctor_models import DENSE, MIXTURES, prompts
from policyloss_lab.diagnosis.tokens import doctor

ENGINES = (("raw", "float32"), ("processed", "float32"), ("raw", "bfloat16"))
SIZES = (32, 8)  # rows of a batch
FEW = (4, 2, 1)  # rows, to find the least number of tokens
FEW_SEEDS = 10
ENOUGH = 0.95  # the share of verdicts that must be right
RECORDED = 2  # batches of each set that the tests read
# What pairs alone can name; the others need the model.
FROM_PAIRS = {
    "healthy_f32": "healthy",
    "healthy_bf16": "healthy",
    "healthy_autocast": "healthy",
    "weights_bf16": "healthy",  # an engine in bf16 and a trainer in float32
    "temperature": "temperature",
    "temperature_raw": "temperature",
    "top_p": "support",
    "top_k": "support",
    "min_p": "support",
    "shift": "shift",
    "rows_permuted": "rows_permuted",
    "prompt_in_mask": "prompt_in_mask",
    "end_token": "end_token",
    "padding_in_mask": "padding_in_mask",
    "reencoded": "reencoded",
    "copy": "copy",
    "logp_bf16": "logp_bf16",
    "noise": "not_explained",
}


def prepare(work: Path, engine_python: str) -> None:
    """Make the models and the rollouts that are missing."""
    for name in (*DENSE, *MIXTURES):
        folder = work / "models" / name
        if not (folder / "base").exists():
            _run([sys.executable, "-m", "benchmarks.doctor_models", str(folder), name])
    for name in DENSE:
        out = work / "rollouts" / name
        for report, dtype in ENGINES:
            last = {"raw": "merged", "processed": "temperature+top_p"}[report]
            if not (out / f"{last if dtype == 'float32' else 'plain_bfloat16'}.json").exists():
                options = ["--report", report, "--dtype", dtype]
                module = ["-m", "benchmarks.doctor_engine"]
                models = str(work / "models" / name)
                _run([engine_python, *module, models, str(out), *options])


def _run(command: list[str]) -> None:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)


def jobs(seeds: int) -> Iterator[tuple[str, str, int, int]]:
    """Fault, model, seed and rows of every diagnosis: five seeds of the matrix, three of the small
    batches, and then the others, so that a run that is stopped has something of each.
    """
    few = min(seeds, FEW_SEEDS)
    for sizes, part in (
        (SIZES, range(min(seeds, 5))),
        (FEW, range(min(few, 3))),
        (SIZES, range(5, seeds)),
        (FEW, range(3, few)),
    ):
        for seed in part:
            for fault in FAULTS:
                for model in MIXTURES if fault == "router" else DENSE:
                    for rows in sizes:
                        yield fault, model, seed, rows


def source(work: Path, model: str) -> Source:
    """The batches of a model."""
    kind = MixtureSource if model in MIXTURES else Source
    return kind(work / "rollouts" / model, work / "models" / model)


def verdict(batch: Batch, fault: str, rows: int) -> dict[str, Any]:
    """What the doctor says with the model, and from pairs alone where they can tell."""
    start = time.process_time()
    with_model = doctor(**batch.arguments, model=batch.model, prompts=batch.prompts)
    row: dict[str, Any] = {
        "causes": sorted(with_model.causes),
        "truth": sorted(batch.causes),
        "tokens": with_model.tokens,
        "confidence": round(with_model.confidence, 3),
        "seconds": round(time.process_time() - start, 2),
    }
    if fault in FROM_PAIRS and rows in SIZES:
        row["pairs"] = sorted(doctor(**batch.arguments).causes)
    return row


def diagnose_all(
    work: Path, seeds: int, deadline: float, part: int, parts: int
) -> dict[str, dict[str, Any]]:
    """The verdict on every job, by its name; those in the work folder are not made again."""
    done: dict[str, dict[str, Any]] = {}
    for old in sorted(work.glob("verdicts*.jsonl")):
        done |= {row["job"]: row for row in map(json.loads, old.read_text().splitlines())}
    file = work / f"verdicts{part}.jsonl"
    mine = [
        (job, fault, model, seed, rows)
        for fault, model, seed, rows in jobs(seeds)
        if (job := f"{fault}/{model}/{seed}/{rows}") not in done
        and zlib.crc32(job.encode()) % parts == part
    ]
    sources = {name: source(work, name) for name in (*DENSE, *MIXTURES)}
    with file.open("a") as out:
        for number, (job, fault, model, seed, rows) in enumerate(mine):
            if time.monotonic() > deadline:
                break
            if number % 20 == 0:
                print(f"{number} of {len(mine)} diagnoses, next {job}", flush=True)
            torch.manual_seed(zlib.crc32(job.encode()))
            try:
                batch = FAULTS[fault](sources[model], seed, rows)
                row = {"job": job, **verdict(batch, fault, rows)}
            except ValueError as error:
                row = {"job": job, "error": str(error), "truth": [], "causes": [], "tokens": 0}
            done[job] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
    return done


def summary(verdicts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The matrix, the shares that are right, and the least number of tokens of each fault."""
    rows: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    seeds: dict[str, set[str]] = defaultdict(set)
    models = set()
    for job, row in verdicts.items():
        fault, model, seed, size = job.split("/")
        rows[fault][int(size)].append(row)
        if int(size) in SIZES:
            seeds[fault].add(seed)
            models.add(model)
    faults = {
        fault: fault_summary(fault, sizes) for fault, sizes in rows.items() if sizes.keys() & SIZES
    }
    healthy = [row for fault, row in faults.items() if fault.startswith("healthy")]
    quiet = [row for f, row in faults.items() if FROM_PAIRS.get(f) == "healthy"]
    return {
        "torch": torch.__version__,
        "sizes": list(SIZES),
        "models": sorted(models),
        "seeds": min((len(seeds[fault]) for fault in faults), default=0),
        "diagnoses": sum(row["diagnoses"] for row in faults.values()),
        "right": _mean(faults.values(), "right"),
        "false_alarms": 1 - _mean(healthy, "right"),
        "false_alarms_from_pairs": 1 - _mean(quiet, "right_from_pairs"),
        "faults": faults,
    }


def _mean(rows: Iterable[dict[str, Any]], name: str) -> float:
    """The mean over all diagnoses of some faults."""
    pairs = [(float(row[name]), int(row["diagnoses"])) for row in rows]
    return sum(x * n for x, n in pairs) / max(sum(n for _, n in pairs), 1)


def fault_summary(fault: str, by_size: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """The verdicts on a fault, and the share that is right at each size of batch."""
    matrix = [row for size in SIZES for row in by_size.get(size, [])]
    pairs = [row["pairs"] == [FROM_PAIRS[fault]] for row in matrix if "pairs" in row]
    curve = []
    for size in sorted(by_size, reverse=True):
        tokens = sorted(row["tokens"] for row in by_size[size])
        curve.append(
            {
                "rows": size,
                "tokens": tokens[len(tokens) // 2],
                "right": right(by_size[size]),
                "diagnoses": len(tokens),
            }
        )
    enough = list(itertools.takewhile(lambda point: point["right"] >= ENOUGH, curve))
    names = Counter("+".join(row["causes"]) or "refused" for row in matrix)
    return {
        "diagnoses": len(matrix),
        "right": right(matrix),
        "verdicts": dict(names.most_common()),
        "right_from_pairs": sum(pairs) / len(pairs) if pairs else None,
        "least_tokens": enough[-1]["tokens"] if enough else None,
        "curve": curve,
    }


def right(rows: Sequence[dict[str, Any]]) -> float:
    """The share of verdicts that name the truth."""
    hits = [row["causes"] == row["truth"] and "error" not in row for row in rows]
    return hits.count(True) / len(rows)


def record(work: Path, folder: Path) -> None:
    """Write the part of the rollouts that the tests compare with: one model, two small batches."""
    model = DENSE[0]
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    for file in sorted((work / "rollouts" / model).glob("*.json")):
        if file.stem in ("merged", "bf16_values"):
            continue  # the tests have no peft to load their adapter with
        batches = []
        for seed, batch in enumerate(json.loads(file.read_text())[:RECORDED]):
            rows = prompts(len(batch["completions"]), seed)
            every = {"prompts": rows, **batch}
            batches.append({name: x[: SIZES[1]] for name, x in every.items()})
        text = json.dumps(batches, separators=(",", ":"))
        (folder / "rollouts" / file.name).write_text(text + "\n")
    (folder / "models" / "base").mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(work / "models" / model / "base" / name, folder / "models" / "base" / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/doctor"))
    parser.add_argument("--engine-python", default=".engines/vllm/bin/python")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--part", type=int, default=0, help="which share of the jobs to do")
    parser.add_argument("--parts", type=int, default=1, help="how many processes share the jobs")
    parser.add_argument("--record", type=Path, help="only write the part that the tests read")
    args = parser.parse_args(arguments)
    if args.record:
        record(args.work, args.record)
        return
    torch.set_num_threads(1)
    deadline = time.monotonic() + 60 * args.minutes
    prepare(args.work, args.engine_python)
    result = summary(diagnose_all(args.work, args.seeds, deadline, args.part, args.parts))
    (args.work / "matrix.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{result['right']:.1%} of {result['diagnoses']} right, {result['false_alarms']:.1%} false "
        f"alarms, {result['false_alarms_from_pairs']:.1%} from pairs alone"
    )
    for fault, row in result["faults"].items():
        print(f"{row['right']:6.1%}  {fault:20} {row['verdicts']}")


if __name__ == "__main__":
    main()
