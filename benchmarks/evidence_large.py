"""A model of a hundred million weights trains end to end through the one-pass head,
and with all logits kept.

    python -m benchmarks.evidence_large --device cuda|cpu [--quick]
        [--out benchmarks/results/evidence_large.json]

Nothing is downloaded: the model is a Llama with random weights, its tokenizer has a word for each
of the 65 536 tokens, and the reward is the share of words with an even number. So it is a real run
of `policyloss train` in every part, on a made-up task. It measures tokens per second of the
learning phase and the peak of the GPU's memory over the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import environment, table, write_json
from policyloss_train.arguments import read_spec
from policyloss_train.config import TrainConfig
from policyloss_train.loop import train
from policyloss_train.tasks.base import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

HEADS = ("fused", "logits")
PAD, END = "<pad>", "<end>"
# How far the two heads may be apart in the first step, where they see the same weights and
# completions: roundings of bfloat16.
LOSS_GAP, NORM_GAP = 1e-3, 0.02


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a step."""

    hidden: int = 768
    layers: int = 8
    heads: int = 12
    vocabulary: int = 65536
    prompts: int = 32
    group_size: int = 8
    new_tokens: int = 128
    micro_tokens: int = 16384
    steps: int = 4
    dtype: str = "bfloat16"


FULL = Size()
QUICK = Size(
    32, 2, 2, 512, prompts=2, group_size=4, new_tokens=8, micro_tokens=64, steps=2, dtype="float32"
)


def reward(example: Example, completion: str) -> float:
    """The share of words `w<number>` whose number is even; 0 without words."""
    words = [word for word in completion.split() if word.startswith("w")]
    return sum(int(word[1:]) % 2 == 0 for word in words) / len(words) if words else 0.0


def make_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """Words `w0`, `w1`, …, and two special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, END, *(f"w{i}" for i in range(size.vocabulary - 2))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=PAD
    )


def make_model(size: Size) -> PreTrainedModel:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(getattr(torch, size.dtype))


def save_model(size: Size, folder: Path) -> int:
    """Save a model with random weights, and its tokenizer, to `folder`.
    → how many weights it has.
    """
    model = make_model(size)
    model.save_pretrained(folder)
    make_tokenizer(size).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def make_task(size: Size, path: Path) -> None:
    """Prompts of eight words each."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(size.vocabulary - 2, (size.prompts * 4, 8), generator=generator).tolist()
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in row), "answer": ""}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def options(size: Size, head: str, device: str, folder: Path) -> TrainConfig:
    """One update per step, so that the loss of the first step is
    of the same weights whatever the head.
    """
    return TrainConfig(
        loss="dapo",
        task=str(folder / "task.jsonl"),
        reward=f"{__spec__.name if __spec__ else __name__}:reward",
        model=str(folder / "model"),
        out=folder / head,
        steps=size.steps,
        prompts=size.prompts,
        group_size=size.group_size,
        max_new_tokens=size.new_tokens,
        sampling_tokens=4 * size.prompts * size.group_size * size.new_tokens,
        minibatches=1,
        micro_tokens=size.micro_tokens,
        lr=3e-4,
        head="fused" if head == "fused" else "logits",
        dtype="bfloat16" if size.dtype == "bfloat16" else "float32",
        device=device,
        eval_every=0,
        eval_prompts=2,
        checkpoint_every=0,
        keep=1,
        rollouts_every=0,
    )


def measure(size: Size, head: str, device: str, folder: Path) -> dict[str, Any]:
    """Train, and read the files of the run."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config = options(size, head, device, folder)
    train(config, read_spec(config.loss))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    metrics, timing = (_lines(config.out / name)[1:] for name in ("metrics.jsonl", "timing.jsonl"))
    speeds = [m["tokens"] / t["learn_s"] for m, t in zip(metrics, timing, strict=True)]
    return {
        # The first step compiles kernels and fills caches.
        "learn_tokens_per_s": statistics.median(speeds[1:]),
        "learn_s": [t["learn_s"] for t in timing],
        "sample_s": [t["sample_s"] for t in timing],
        "peak_bytes": peak,
        "tokens": [m["tokens"] for m in metrics],
        "reward": [m["reward/mean"] for m in metrics],
        "loss": [m["policy/loss"] for m in metrics],
        "entropy": [m["policy/entropy"] for m in metrics],
        "grad_norm": [m["grad_norm"] for m in metrics],
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def agreement(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The differences of the heads in the first step: absolute for the loss, relative for the norm
    of the gradient.
    """
    a, b = (runs[head] for head in HEADS)
    loss = abs(a["loss"][0] - b["loss"][0])
    norm = abs(a["grad_norm"][0] / b["grad_norm"][0] - 1)
    return {"loss": loss, "grad_norm": norm, "agree": loss <= LOSS_GAP and norm <= NORM_GAP}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="a model of thousands of weights and two steps"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/evidence_large.json"))
    args = parser.parse_args(argv)
    size = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = save_model(size, folder / "model")
        make_task(size, folder / "task.jsonl")
        runs = {head: measure(size, head, args.device, folder) for head in HEADS}
    gaps = agreement(runs)
    rows = [["head", "tokens/s, learning", "peak GiB", "loss", "grad norm"]]
    for head, run in runs.items():
        peak = "-" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**30:.2f}"
        rows.append(
            [
                head,
                f"{run['learn_tokens_per_s']:.0f}",
                peak,
                f"{run['loss'][0]:.3g}",
                f"{run['grad_norm'][0]:.4g}",
            ]
        )
    print(f"{weights / 1e6:.0f} M weights\n{table(rows)}\nfirst step apart: {gaps}")
    found = {
        "environment": environment(),
        "size": size.__dict__,
        "weights": weights,
        "runs": runs,
        "first_step": gaps,
    }
    write_json(args.out, found)
    return 0 if gaps["agree"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
