"""The doctor on faults that it was not built for, and on its own families held out one at a time.

python -m benchmarks.doctor_heldout

makes small models (trained for a moment, and random), an engine in torch, and batches of every
fault of `benchmarks.doctor_strangers`. Each batch is diagnosed twice, with the model and from pairs
alone: as it is, and with the family of the fault disabled. Then the right verdict is "not
explained" with the right place, or "healthy" if the fault is below the noise floor. Writes
`benchmarks/results/doctor_heldout.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor_cases import Batch
from benchmarks.doctor_strangers import HEALTHY, STRANGERS, Stranger, TorchSource
from policyloss_lab.diagnosis.diagnose import Thresholds, diagnose
from policyloss_lab.diagnosis.hypothesis import Case
from policyloss_lab.diagnosis.pairs import read_pairs
from policyloss_lab.diagnosis.tokens import case_with_model
from policyloss_lab.diagnosis.verdict import Diagnosis

# Thresholds were chosen on the first models; the recorded numbers are those of the second.
CHOSEN_ON = ("llama", "gpt2", "mixtral", "llama_random")
STRANGE = ("mistral", "gemma2", "opt", "olmoe", "mistral_random")
SIZES = (32, 8)
ABOVE = 2.0  # times the floor: the least effect that must not be called healthy
# Causes that only a law of noise shows: a verdict without a name is right at the right place.
LAWS = ("stale_weights", "template", "dropout")
# What pairs alone can name; all others must be "not explained", or healthy.
FROM_PAIRS = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "support"), ("support",)),
    **{c: (c,) for c in ("temperature", "shift", "rows_permuted", "reencoded", "unfilled")},
    "softcap": ("temperature",),
    "shift+temperature": ("shift", "temperature"),
    **{c: (c,) for c in ("prompt_in_mask", "end_token", "padding_in_mask", "logp_bf16", "units")},
}
NOT_FROM_PAIRS = ("temperature_by_row", "temperature_schedule")
# Two names of one family that are right for one fault: both send the reader to the same place.
ALIKE = (
    *({"unfilled", edge} for edge in ("end_token", "prompt_in_mask", "padding_in_mask")),
    {"support", "logit_bias"},
    {"temperature", "softcap"},
)
BINS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 1.01)


def cases(batch: Batch) -> tuple[Case, Case]:
    """The case with the model, and that of pairs alone."""
    a = batch.arguments
    pairs = read_pairs(a["rollout_logp"], a["old_logp"], a["mask"], ids=a["ids"])
    return case_with_model(pairs, batch.model, a["ids"], batch.prompts), Case(pairs)


def is_above(case: Case, floor: float) -> bool:
    """Whether the root mean square of the differences is above the floor."""
    size = case.pairs.difference / case.pairs.shape
    return bool(size.square().mean().sqrt() > ABOVE * floor)


def outcome(
    verdict: Diagnosis, truth: Sequence[str], places: Sequence[str], above: bool, bf16: bool
) -> str:
    """right, place (not explained, right place), unplaced, healthy (below the floor), missed, or
    wrong. bf16: the engine computes in bf16, so that weights_bf16 is true if nothing louder is.
    """
    named = sorted(verdict.causes)
    if named != ["not_explained"] and (named == sorted(truth) or {*named, *truth} in ALIKE):
        return "right"
    if verdict.healthy or (bf16 and not above and named == ["weights_bf16"]):
        return "missed" if above else "healthy"
    if verdict.cause != "not_explained":
        return "wrong"
    return "place" if {p.tag for p in verdict.places} & set(places) else "unplaced"


def verdicts(job: dict[str, Any], batch: Batch, stranger: Stranger) -> Iterator[dict[str, Any]]:
    """The verdicts on a batch: open and held out, with the model and from pairs."""
    with_model, pairs = cases(batch)
    for reads, case in (("model", with_model), ("pairs", pairs)):
        for mode in ("open", "held out"):
            held = frozenset(stranger.family.split()) if mode == "held out" else frozenset()
            if mode == "held out" and not held:
                continue
            start = time.process_time()
            verdict = diagnose(case, Thresholds(), held_out=held)
            truth: Sequence[str] = batch.causes if mode == "open" else ("not_explained",)
            if reads == "pairs" and mode == "open":
                unknown = ("not_explained",)
                truth = FROM_PAIRS.get("+".join(batch.causes), unknown)
                truth = unknown if job["fault"] in NOT_FROM_PAIRS else truth
            yield {
                **job,
                "reads": reads,
                "mode": mode,
                "truth": "+".join(truth),
                "named": "+".join(verdict.causes),
                "places": [p.tag for p in verdict.places],
                "outcome": outcome(
                    verdict, truth, stranger.places, is_above(case, verdict.floor), job["bf16"]
                ),
                "confidence": round(verdict.confidence, 3),
                "tokens": verdict.tokens,
                "scale": float(f"{verdict.details['scale']:.3g}"),
                "seconds": round(time.process_time() - start, 2),
            }


def rows_of(
    models: Sequence[str],
    seeds: int,
    sizes: Sequence[int],
    names: Sequence[str],
    healthy_seeds: int,
    first_seed: int,
) -> Iterator[dict[str, Any]]:
    """Every verdict of the benchmark: each batch has one of the sizes, and every second engine
    computes in bf16.
    """
    for model in models:
        source = TorchSource(model)
        for k in range(max(seeds, healthy_seeds)):
            seed = first_seed + k
            makes: dict[str, Stranger] = {}
            if k < seeds:
                makes |= {name: STRANGERS[name] for name in names or STRANGERS}
            if k < healthy_seeds:
                makes |= {name: Stranger("", (), make) for name, make in HEALTHY.items()}
            for name, stranger in makes.items():
                number = zlib.crc32(f"{name}{model}{seed}".encode())
                source.half = name not in HEALTHY and number % 2 == 1
                rows = sizes[number // 2 % len(sizes)]
                job = {"fault": name, "model": model, "seed": seed, "rows": rows}
                job["bf16"] = source.half or name in HEALTHY
                batch = stranger.make(source, seed, rows)
                for row in () if batch is None else verdicts(job, batch, stranger):
                    if name in HEALTHY:
                        good = row["outcome"] in ("healthy", "right")
                        row |= {"mode": "healthy", "outcome": "right" if good else "alarm"}
                    yield row
            source.rollouts_made.clear()


def is_right(row: dict[str, Any]) -> bool:
    """Whether a verdict is as it should be."""
    if row["outcome"] in ("right", "healthy"):
        return True
    lawful = row["truth"] == "not_explained" or row["truth"] in LAWS
    return row["outcome"] == "place" and lawful


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of outcomes by mode, by fault, and of the reliability of the confidence."""
    batches = {(row["fault"], row["model"], row["seed"]) for row in rows}
    out: dict[str, Any] = {"batches": len(batches)}
    for reads in ("model", "pairs"):
        mine = [row for row in rows if row["reads"] == reads]
        part: dict[str, Any] = {}
        for mode in ("open", "held out", "healthy"):
            some = [row for row in mine if row["mode"] == mode]
            part[mode] = {
                "verdicts": len(some),
                "correct": sum(map(is_right, some)),
                **Counter(row["outcome"] for row in some),
            }
        curve = []
        for low, high in itertools.pairwise(BINS):
            some = [row for row in mine if low <= row["confidence"] < high]
            if some:
                mean = sum(row["confidence"] for row in some) / len(some)
                curve.append(
                    {
                        "confidence": round(mean, 3),
                        "verdicts": len(some),
                        "right": sum(map(is_right, some)),
                    }
                )
        faults: dict[str, Any] = {}
        for name in dict.fromkeys(row["fault"] for row in mine):
            some = [row for row in mine if row["fault"] == name]
            entry: dict[str, Any] = {}
            for mode in dict.fromkeys(row["mode"] for row in some):
                these = [row for row in some if row["mode"] == mode]
                wrong = Counter(r["named"] for r in these if r["outcome"] in ("wrong", "alarm"))
                entry[mode] = {
                    **Counter(row["outcome"] for row in these),
                    **({"named": dict(wrong)} if wrong else {}),
                }
            good = [r for r in some if r["mode"] != "held out" and r["outcome"] == "right"]
            if good:
                entry["least_tokens"] = min(r["tokens"] for r in good)
                entry["least_scale"] = min(r["scale"] for r in good)
            faults[name] = entry
        out[reads] = {**part, "reliability": curve, "faults": faults}
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=STRANGE)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--faults", nargs="*", default=[])
    parser.add_argument("--healthy-seeds", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/doctor_heldout.json"))
    parser.add_argument("--rows", type=Path, help="also write every verdict, as JSON lines")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.monotonic()
    rows = []
    numbers = (args.healthy_seeds, args.first_seed)
    for row in rows_of(args.models, args.seeds, args.sizes, args.faults, *numbers):
        rows.append(row)
        if args.rows:
            with args.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    result = {"torch": torch.__version__, "models": list(args.models), **summary(rows)}
    args.out.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    for reads in ("model", "pairs"):
        for mode in ("open", "held out", "healthy"):
            print(reads, mode, result[reads][mode])
        print(reads, "reliability", result[reads]["reliability"])
    print(f"{time.monotonic() - start:.0f} seconds")


if __name__ == "__main__":
    main()
