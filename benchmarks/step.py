"""A whole training step: forward and backward of a random-weight Qwen3 with each head and loss.

`python -m benchmarks.step --device cuda --peers peers/src` measures every model and size (smaller
ones with `--device cpu`), and with `--largest` the largest batch that fits; `--small` runs
everything on tiny models, as a test. Half of a sequence is prompt; the body recomputes its
activations. The body alone (with the mean of its last hidden states as loss) is the floor. Every
head is compared with the eager one on one sequence first, and a wrong head is not timed.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import peers
from benchmarks.harness import environment, time_interleaved, write_json

RESULTS = Path(__file__).resolve().parent / "results"
SPEC = pl.preset("ppo")  # every head below can compute its numbers


@dataclass(frozen=True)
class Sizes:
    """The measured sizes. models: hidden, intermediate, layers, heads, heads of keys and values."""

    models: dict[str, tuple[int, ...]]
    tokens: tuple[int, ...]
    length: int
    vocabulary: int


SIZES = {
    "cuda": Sizes(  # Qwen3's
        {
            "0.6B": (1024, 3072, 28, 16, 8),
            "1.7B": (2048, 6144, 28, 16, 8),
            "4B": (2560, 9728, 36, 32, 8),
        },
        (16_384, 65_536, 262_144),
        2048,
        151_936,
    ),
    "cpu": Sizes({"31M": (512, 1536, 6, 4, 2)}, (1024, 4096), 256, 32_000),
}
SMALL = Sizes({"tiny": (64, 96, 2, 4, 2)}, (64, 128), 32, 500)
OURS, EAGER, BODY = "pl.hf.policy_loss", "eager logits", "body alone"
# Tolerance of the loss and of the gradient's length: the error of logits rounded to bfloat16.
ALLOWED = 0.05
LONG_S = 2.0  # a step that takes longer is timed twice
VERY_LONG_S = 10.0  # and one that takes longer than this once


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, and the loss's tensors of the predicted tokens `[B, T-1]`."""

    ids: Tensor
    old_logp: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def of(cls, rows: int, length: int, vocabulary: int, device: str) -> Batch:
        """Random tokens, half of each row prompt."""
        torch.manual_seed(1)
        ids = torch.randint(0, vocabulary, (rows, length), device=device)
        mask = (torch.arange(1, length, device=device) >= length // 2).expand(rows, length - 1)
        # A random model gives every token about the same probability, so that ratios are near 1.
        old = torch.full((rows, length - 1), -math.log(vocabulary), device=device)
        return cls(ids, old, torch.randn(rows, device=device), mask)

    def loss(self, logp: Tensor) -> Tensor:
        """Our loss on log-probabilities that a head made."""
        return pl.policy_loss(SPEC, logp, self.old_logp, self.advantages, self.mask).loss

    def scattered(self, rows: Tensor) -> Tensor:
        """Log-probabilities of the live rows, in the places of their tokens."""
        empty = rows.new_zeros(self.mask.shape)
        return empty.masked_scatter(self.mask, rows)


Step = Callable[[Any, Batch], Tensor]


def _hidden(model: Any, batch: Batch) -> Tensor:
    """The hidden states that predict each token, `[B, T-1, D]`."""
    last: Tensor = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    return last[:, :-1]


def body_alone(model: Any, batch: Batch) -> Tensor:
    """No head and no loss: the floor."""
    return _hidden(model, batch).float().mean()


def ours(model: Any, batch: Batch) -> Tensor:
    """Head and loss in one pass."""
    return pl.hf.policy_loss(
        model,
        SPEC,
        batch.ids,
        old_logp=batch.old_logp,
        advantages=batch.advantages,
        mask=batch.mask,
    ).loss


def eager(model: Any, batch: Batch) -> Tensor:
    """The model's own logits, and a float32 log_softmax."""
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1].float()
    every = torch.log_softmax(logits, -1)
    return batch.loss(every.gather(-1, batch.ids[:, 1:, None]).squeeze(-1))


def trl_chunked(folder: Path) -> Step:
    """TRL's chunked head on the live rows, as its trainers call it."""
    head = peers.trl_chunked_head(folder)

    def step(model: Any, batch: Batch) -> Tensor:
        live, ids = _hidden(model, batch)[batch.mask], batch.ids[:, 1:][batch.mask]
        weight = model.lm_head.weight
        options = (1.0, peers.TRL_CHUNK, None, 1.0, ("entropy",))
        return batch.loss(batch.scattered(head.apply(live, weight, None, ids, *options)[0]))

    return step


def liger(folder: Path) -> Step:
    """Liger's fused GRPO loss on the second half of each row."""
    fused = peers.liger_grpo_loss(folder)(
        beta=0.0, use_ref_model=False, compiled=torch.cuda.is_available()
    )

    def step(model: Any, batch: Batch) -> Tensor:
        first = int(batch.mask[0].to(torch.uint8).argmax())
        loss: Tensor = fused(
            _hidden(model, batch)[:, first:],
            model.lm_head.weight,
            batch.ids[:, 1 + first :],
            batch.mask[:, first:].float(),
            batch.advantages,
            old_per_token_logps=batch.old_logp[:, first:],
        )[0]
        return loss

    return step


def verl_triton(folder: Path) -> Step:
    """verl's Triton head on all rows, as its models call it."""
    head = peers.verl_linear_cross_entropy(folder)

    def step(model: Any, batch: Batch) -> Tensor:
        flat = _hidden(model, batch).reshape(-1, model.config.hidden_size)
        logp = head(flat, model.lm_head.weight, batch.ids[:, 1:].reshape(-1), 1.0, "none")[0]
        return batch.loss(logp.view(batch.mask.shape))

    return step


def verl_chunked(folder: Path) -> Step:
    """verl's torch head on all rows."""
    head = peers.verl_chunked_head(folder)()

    def step(model: Any, batch: Batch) -> Tensor:
        return batch.loss(head(_hidden(model, batch), model.lm_head.weight, batch.ids[:, 1:])[0])

    return step


def torch_linear_cross_entropy(_: Path) -> Step:
    """PyTorch's own function, from torch 2.13 on, on the live rows."""
    function = peers.torch_linear_cross_entropy()

    def step(model: Any, batch: Batch) -> Tensor:
        live, ids = _hidden(model, batch)[batch.mask], batch.ids[:, 1:][batch.mask]
        nll = function(live, model.lm_head.weight, ids, reduction="none")
        return batch.loss(batch.scattered(-nll.float()))

    return step


def steps(folder: Path, device: str) -> tuple[dict[str, Step], dict[str, str]]:
    """The available heads, and the others with the reason."""
    present: dict[str, Step] = {BODY: body_alone, OURS: ours, EAGER: eager}
    absent: dict[str, str] = {}
    makers = {
        "verl, chunked torch": verl_chunked,
        "verl, Triton": verl_triton,
        "TRL, chunked": trl_chunked,
        "Liger GRPO": liger,
        "torch linear_cross_entropy": torch_linear_cross_entropy,
    }
    for name, make in makers.items():
        if name == "verl, Triton" and device == "cpu":
            absent[name] = "needs a GPU"
            continue
        try:
            present[name] = make(folder)
        except (peers.MissingPeerError, ImportError, AttributeError) as error:
            absent[name] = f"{type(error).__name__}: {error}"
    return present, absent


def make_model(sizes: tuple[int, ...], vocabulary: int, length: int, device: str) -> Any:
    """A random Qwen3 in training mode that recomputes its activations."""
    transformers = import_module("transformers")
    hidden, intermediate, layers, heads, pairs = sizes
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        head_dim=128 if hidden > 64 else 16,
        max_position_embeddings=length,
        tie_word_embeddings=hidden < 2560,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(config)
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def forward_backward(step: Step, model: Any, batch: Batch) -> None:
    """One step without its optimizer."""
    step(model, batch).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def wrong(step: Step, model: Any, batch: Batch) -> str:
    """The difference of a head from the eager one on this batch, or ""."""

    def numbers(one: Step) -> tuple[float, Tensor]:
        loss = one(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = model.lm_head.weight.grad.float().clone()
        model.zero_grad(set_to_none=True)
        return float(loss.detach()), gradient

    (loss, gradient), (expected, theirs) = numbers(step), numbers(eager)
    off = float((gradient - theirs).norm() / theirs.norm())
    if abs(loss - expected) <= ALLOWED * max(abs(expected), 1.0) and off <= ALLOWED:
        return ""
    return f"loss {loss:.4g} instead of {expected:.4g}, gradient off by {off:.2g}"


@dataclass(frozen=True)
class First:
    """A head's first step. peak_bytes: the most memory, weights included; None on a CPU."""

    peak_bytes: int | None
    seconds: float


def first_step(step: Step, model: Any, batch: Batch) -> First | None:
    """One step, which compiles its kernels; None if it does not fit into memory."""
    cuda, start = batch.ids.is_cuda, time.monotonic()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        forward_backward(step, model, batch)
        if cuda:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if cuda else None
        return First(peak, time.monotonic() - start)
    except torch.OutOfMemoryError:
        model.zero_grad(set_to_none=True)
        return None
    finally:
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def largest(step: Step, model: Any, most: int, make: Callable[[int], Batch], memory: int) -> int:
    """The most rows that fit, to a sixteenth; `most` at most.

    Rows are doubled up to 64. Their memory predicts the rows that fit into `memory` bytes (0:
    unknown), so that few long steps near the limit are needed; bisection finds the rest.
    """
    low, high = 0, most + 1
    peaks: list[tuple[int, int]] = []

    def fits(rows: int) -> bool:
        nonlocal low, high
        first = first_step(step, model, make(rows))
        low, high = (low, rows) if first is None else (rows, high)
        if first is not None and first.peak_bytes:
            peaks.append((rows, first.peak_bytes))
        return first is not None

    rows = 1
    while rows < high and fits(rows):
        rows *= 4 if memory and rows < 64 else 2
        if memory and rows > 64:
            break
    if memory and len(peaks) > 1:
        (few, least), (many, greatest) = peaks[-2:]
        limit = many + (memory - greatest) * (many - few) // max(greatest - least, 1)
        for guess in (limit * 15 // 16, limit * 17 // 16):
            if low < guess < high:
                fits(guess)
    while high - low > max(low // 16, 1):
        fits((low + high) // 2)
    return low


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every model and size: times, peaks, and the largest batches."""
    device, rounds = options.device, options.rounds
    sizes = SMALL if options.small else SIZES[device]
    length, vocabulary = sizes.length, sizes.vocabulary
    present, absent = steps(options.peers, device)
    present = {who: step for who, step in present.items() if who in (options.head or present)}

    def batch_of(rows: int) -> Batch:
        return Batch.of(rows, length, vocabulary, device)

    rows, most, refused = [], [], dict(absent)
    for name in options.model or sizes.models:
        model = make_model(sizes.models[name], vocabulary, length, device)
        checked: dict[str, Step] = {}
        for who, step in present.items():
            problem = "" if step is body_alone else wrong(step, model, batch_of(1))
            refused |= {who: f"wrong: {problem}"} if problem else {}
            checked |= {} if problem else {who: step}
        for tokens in options.tokens or sizes.tokens:
            batch = batch_of(tokens // length)
            torch.compiler.reset()  # of Liger's: torch 2.11 cannot compile it for a second size
            firsts: dict[str, First | None] = {}
            for who, step in checked.items():
                try:
                    firsts[who] = first_step(step, model, batch)
                except Exception as error:  # a peer that fails at one size is left out there
                    refused[f"{who}, {name}, {tokens}"] = f"{type(error).__name__}: {error}"[:200]
            fitting = {who: first for who, first in firsts.items() if first is not None}
            calls = {who: partial(forward_backward, checked[who], model, batch) for who in fitting}
            # The first step was the warm-up, and long steps are steady.
            few = {
                who: 1 if first.seconds > VERY_LONG_S else 2
                for who, first in fitting.items()
                if first.seconds > LONG_S
            }
            times = time_interleaved(calls, rounds, device, warmup=0, few=few)
            for who in firsts:
                row = {"model": name, "tokens": tokens, "head": who}
                if who in fitting:
                    row |= {**times[who], "peak_bytes": fitting[who].peak_bytes}
                rows.append(row)
                print(row, flush=True)
            del batch, calls
        if options.largest:
            memory = torch.cuda.mem_get_info()[1] if device == "cuda" else 0
            for who, step in checked.items():
                count = largest(step, model, options.largest, batch_of, memory)
                most.append({"model": name, "head": who, "tokens": count * length})
                print(most[-1], flush=True)
        del model
        gc.collect()
    return {
        "environment": environment(),
        "length": length,
        "rows": rows,
        "largest": most,
        "absent": refused,
    }


def main(words: list[str] | None = None) -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", type=Path, default=Path("peers/src"))
    parser.add_argument("--small", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--model", action="append", help="only this model (may be repeated)")
    parser.add_argument("--tokens", action="append", type=int, help="only so many tokens")
    parser.add_argument("--head", action="append", help="only this head (may be repeated)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--largest", type=int, default=0, help="also look for the largest batch, up to so many rows"
    )
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args(words)
    results = measure(options)
    if not options.small or options.out:
        write_json(options.out or RESULTS / f"step_{options.device}.json", results)
    for who, why in results["absent"].items():
        print(f"{who}: {why}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
