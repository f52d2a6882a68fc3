"""The stress chart on a GPU: a model of 38 million weights, pretrained here on sums with their
steps written out, then trained by reinforcement.

    python -m benchmarks.chart_gpu [STUDY ...] [--jobs 5] [--seeds 3] [--seconds 500]
        [--folder out/chart_gpu] [--out benchmarks/results/chart_cuda.json]

The studies: `mismatch` (a sampler in bf16, fp8 or int4 next to a learner in float32, with and
without corrections), `length` (how the average changes the length of answers), `dual_clip` (large
ratios with and without dual clip), `means` (a mean of the means of micro-batches in place of exact
denominators). A run is stored when it ends; the same command continues after a stop.

Most demonstrations forget carries, and all have idle signs of random number, which change no
answer: the reward can teach to carry, and length costs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch

import policyloss as pl
from benchmarks.harness import environment, write_json
from policyloss_train import setup
from policyloss_train.bench.engines import Changed, round_fp8, round_integers
from policyloss_train.bench.processes import run_in_processes
from policyloss_train.bench.tasks import FILE, write_task
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.loop import train
from policyloss_train.models import tiny_tokenizer
from policyloss_train.rollout.protocol import Weights
from policyloss_train.tasks.base import Example, Task, draw_splits

INT4_MOST = 7.0  # the largest integer of 4 bits
FORGETS = 0.65  # the probability that a demonstration forgets a carry
IDLE = 0.7  # the probability of one more idle sign
CURVES = {
    "reward": "reward/mean",
    "length": "length/mean",
    "norm": "grad_norm",
    "mismatch": "policy/kl_rollout_k3",
    "ratio_max": "policy/ratio_max",
    "entropy": "policy/entropy",
    "loss": "policy/loss",
    "rejected": "policy/rejected_fraction",
}


class Size(NamedTuple):
    """Sizes of the model, of its pretraining and of a run."""

    hidden: int = 512
    layers: int = 12
    heads: int = 8
    batch: int = 256
    pretraining: int = 700
    steps: int = 50
    prompts: int = 32
    longest: int = 128
    eval_prompts: int = 256
    device: str = "cuda"


FULL = Size()
QUICK = Size(32, 2, 2, 8, 3, 2, 2, 24, 4, "cpu")


def write_steps(a: int, b: int, forgets: Any, idle: Any) -> str:
    """`483+279` → `3+9=12;8+7+1=16;4+2+1=7;>762`. forgets: whether to forget the next carry. idle:
    the number of idle signs after a step.
    """
    text, carry, digits = "", 0, []
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        carried = carry if carry and not forgets() else 0
        total = int(x) + int(y) + carried
        text += f"{x}+{y}" + ("+1" if carried else "") + f"={total};" + "~" * idle()
        carry = int(total > 9)
        digits.append(str(total % 10))
    digits += ["1"] * carry
    return f"{text}>{''.join(reversed(digits))}"


def _draw(rng: Random) -> Iterator[Example]:
    while True:
        a, b = (rng.randrange(1000, 10_000) for _ in range(2))
        yield Example(f"{a}+{b}:", str(a + b))


def _demonstration(example: Example, rng: Random) -> str:
    a, b = map(int, example.prompt[:-1].split("+"))

    def idle() -> int:
        n = 0
        while rng.random() < IDLE:
            n += 1
        return n

    return write_steps(a, b, lambda: rng.random() < FORGETS, idle)


def reward(example: Example, completion: str) -> float:
    """1 if the number after the last `>` is the sum, else 0."""
    return float(completion.rpartition(">")[2] == example.answer)


def sums_task() -> Task:
    """Sums of two numbers of four digits."""
    splits = draw_splits(_draw, 0, 16384, 512)
    return Task("sums", *splits, reward, demonstration=_demonstration)


def pretrain(size: Size, folder: Path) -> None:
    """Write the pretrained model and the task to `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    task, began, losses = sums_task(), time.monotonic(), []
    tokenizer: Any = tiny_tokenizer(task)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model: Any = LlamaForCausalLM(config).to(size.device).eval()
    options: Any = {"steps": size.pretraining, "lr": 5e-4, "seed": 0}
    with mock.patch.object(setup, "BATCH", size.batch):
        setup.warm_up(model, tokenizer, task, progress=lambda _, x: losses.append(x), **options)
    torch.set_float32_matmul_precision("highest")
    Weights(model, tokenizer, Ranks(0, 1, torch.device(size.device))).save(folder)
    write_task(task, folder / FILE)
    record = {
        "weights": sum(p.numel() for p in model.parameters()),
        "steps": size.pretraining,
        "seconds": time.monotonic() - began,
        "first_loss": losses[0],
        "last_loss": sum(losses[-20:]) / len(losses[-20:]),
    }
    (folder / "record.json").write_text(json.dumps(record))
    print(record, flush=True)


class Half(Changed):
    """A sampler that computes in bfloat16, with rounded matrices."""

    def __init__(self, config: TrainConfig, weights: Weights, change: Any = None) -> None:
        super().__init__(config, weights, change)
        self._model.to(torch.bfloat16)


def bf16(config: TrainConfig, weights: Weights) -> Half:
    """A sampler in bfloat16."""
    return Half(config, weights)


def int4(config: TrainConfig, weights: Weights) -> Half:
    """A sampler in bfloat16 with weights of 4 bits."""
    return Half(config, weights, lambda x: round_integers(x.float(), INT4_MOST))


def fp8(config: TrainConfig, weights: Weights) -> Half:
    """A sampler in bfloat16 with weights in float8."""
    return Half(config, weights, lambda x: round_fp8(x.float()))


class Job(NamedTuple):
    """One run. loss: a preset, or one with a correction. options: of the trainer. means: divide by
    the counts of micro-batches.
    """

    study: str
    name: str
    seed: int
    spec: pl.LossSpec
    options: Mapping[str, Any] = {}
    means: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of its result."""
        return self.study, self.name, self.seed


LR, HIGH_LR = 2e-5, 1e-4
_DAPO = pl.preset("dapo")
AVERAGES = {
    "grpo": pl.preset("grpo").replace(kl=None),  # a pull to the start would hold the length, too
    "dr_grpo": pl.preset("dr_grpo"),
    "dapo": _DAPO,
}
CORRECTED = {
    "none": _DAPO,
    "TIS": _DAPO.replace(correction=pl.Truncate(2.0)),
    "IcePop": _DAPO.replace(correction=pl.Band(0.5, 5.0)),
    "seq-mask": _DAPO.replace(correction=pl.SequenceMask(0.999, 1.002)),
    "OPSM": _DAPO.replace(correction=pl.OPSM(1e-4, source="rollout")),
}


def jobs(seeds: int) -> Iterator[Job]:
    """All runs, seed by seed; two studies of small differences have twice as many seeds."""
    for seed in range(2 * seeds):
        small = {"lr": 5e-5, "micro_tokens": 1024}
        yield Job("means", "exact", seed, _DAPO, small)
        yield Job("means", "mean of means", seed, _DAPO, small, means=True)
        for name, spec in AVERAGES.items():
            yield Job("length", name, seed, spec, {"lr": 5e-5})
        if seed >= seeds:
            continue
        fast = {"lr": HIGH_LR}
        yield Job("mismatch", "float32, none", seed, _DAPO, fast)
        for engine in ("bf16", "fp8", "int4"):
            options = {**fast, "rollout": f"benchmarks.chart_gpu:{engine}"}
            for name, spec in CORRECTED.items():
                if engine == "int4" or name in ("none", "TIS"):
                    yield Job("mismatch", f"{engine}, {name}", seed, spec, options)
        stale = {"staleness": 8, "old_logp": "rollout", "epochs": 2, "grad_clip": 0.0, **fast}
        for name in ("ppo", "ppo_dual_clip", "two_sided"):
            options = {**stale, "advantage": "grpo"}
            yield Job("dual_clip", name, seed, pl.preset(name), options)


def mean_of_means(accumulate: Any, spec: Any, batches: Sequence[Any], **more: Any) -> Any:
    """`accumulate` with the loss that many trainers compute by mistake: each micro-batch is divided
    by its own tokens, and the sum by the number of micro-batches. Without a KL the loss is linear
    in the advantages, which take the factor.
    """
    counts = [int(batch["mask"].sum()) for batch in batches]
    even = sum(counts) / len(counts)
    scaled = [
        {**batch, "advantages": batch["advantages"] * (even / max(n, 1))}
        for batch, n in zip(batches, counts, strict=True)
    ]
    return accumulate(spec, scaled, **more)


def run_job(job: Job, size: Size, start: Path) -> dict[str, Any]:
    """Train in a temporary folder; the curves of the run."""
    torch.set_num_threads(1)
    began, error = time.monotonic(), ""
    common: dict[str, Any] = {
        "task": str(start / FILE),
        "reward": "benchmarks.chart_gpu:reward",
        "model": str(start),
        "steps": size.steps,
        "prompts": size.prompts,
        "max_new_tokens": size.longest,
        "sampling_tokens": 1 << 20,
        "micro_tokens": 1 << 15,
        "eval_every": 10,
        "eval_prompts": size.eval_prompts,
        "checkpoint_every": 0,
        "rollouts_every": 10,
        "rollouts_rows": 8 * size.prompts,
        "reward_timeout": 0,
        "lr": LR,
        "device": size.device,
    }
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "run")
        options = {**common, **job.options, "out": out, "seed": job.seed}
        changed = partial(mean_of_means, pl.accumulate)
        patch = mock.patch.object(pl, "accumulate", changed) if job.means else None
        try:
            with (
                patch or contextlib.nullcontext(),
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
            ):
                train(TrainConfig(**options), job.spec.for_run(size.longest))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        rows, rollouts = (_lines(out / name) for name in ("metrics.jsonl", "rollouts.jsonl"))
    evaluated = [row for row in rows if "eval/accuracy" in row]
    found = {
        "study": job.study,
        "name": job.name,
        "seed": job.seed,
        "options": dict(job.options),
        "seconds": round(time.monotonic() - began, 1),
        "error": error,
        "accuracy": {row["step"]: row["eval/accuracy"] for row in evaluated},
        "eval_length": {row["step"]: _short(row["eval/length"]) for row in evaluated},
        "lengths": lengths(rollouts),
    }
    steps = [row for row in rows if row["step"]]
    for name, metric in CURVES.items():
        if any(metric in row for row in steps):
            found[name] = [_short(row.get(metric)) for row in steps]
    return found


def lengths(rollouts: Sequence[Mapping[str, Any]]) -> dict[int, list[float | None]]:
    """The mean lengths of right and of wrong completions, by step."""
    found: dict[int, list[float | None]] = {}
    for step in sorted({row["step"] for row in rollouts}):
        pair: list[float | None] = []
        for right in (True, False):
            chosen = [
                len(row["ids"])
                for row in rollouts
                if row["step"] == step and (row["reward"] >= 1) == right
            ]
            pair.append(round(sum(chosen) / len(chosen), 2) if chosen else None)
        found[step] = pair
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def _short(x: float | None) -> float | None:
    return float(f"{x:.4g}") if x is not None and math.isfinite(x) else None


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--quick", action="store_true", help="a tiny model and two steps, on a CPU")
    parser.add_argument("--folder", type=Path, default=Path("out/chart_gpu"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/chart_cuda.json"))
    args = parser.parse_args(argv)
    size, end = QUICK if args.quick else FULL, time.monotonic() + args.seconds
    start = args.folder / "start"
    stored = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
    done = {(run["study"], run["name"], run["seed"]) for run in stored["runs"]}
    wanted = [job for job in jobs(args.seeds) if not args.studies or job.study in args.studies]
    left = [job for job in wanted if job.key not in done]
    if not start.is_dir():
        for _ in run_in_processes([start], 2, partial(pretrain, size)):
            pass
    stored["pretraining"] = json.loads((start / "record.json").read_text())

    def in_time() -> Iterator[Job]:
        for job in left:
            if time.monotonic() > end:
                return
            yield job

    work = partial(run_job, size=size, start=start)
    for i, run in enumerate(run_in_processes(in_time(), args.jobs, work), 1):
        stored["runs"].append(run)
        stored["runs"].sort(key=lambda run: (run["study"], run["name"], run["seed"]))
        stored["environment"] = {"size": size._asdict()}
        write_json(args.out, stored)
        print(f"[{i}/{len(left)}] {run['study']}: {run['name']}, {run['seed']}: ", end="")
        print(run["error"] or f"{run['accuracy']}, {run['seconds']} s", flush=True)
    stored["environment"] = {**environment(), "size": size._asdict()}
    write_json(args.out, stored)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
