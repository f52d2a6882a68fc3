"""Batches with a known fault, made from rollouts of a real engine and a trainer's own forward."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.doctor_models import LONGEST, PAD, prompts, sentences, with_adapter
from policyloss_lab.diagnosis.forward import Scorer, alter_weights

SMALL = 8  # rows of the smaller batch


@dataclass
class Batch:
    """What `lab.doctor` is given, and the causes that it should name."""

    arguments: dict[str, Any]
    causes: tuple[str, ...]
    model: Any = None
    prompts: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Rollout:
    """One batch of an engine, padded: ids, mask and log-probabilities `[B, T]`."""

    ids: Tensor
    mask: Tensor
    logp: Tensor
    prompts: list[list[int]]

    def scorer(self, model: Any) -> Scorer:
        """A model on these sequences."""
        rows = [row[keep].tolist() for row, keep in zip(self.ids, self.mask, strict=True)]
        return Scorer(model, self.prompts, rows, self.mask.nonzero(), self.ids[self.mask])

    def padded(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Numbers of the valid tokens as `[B, T]` float32."""
        out = torch.full(self.mask.shape, fill)
        out[self.mask] = flat.float()
        return out


class Source:
    """The rollouts and the models of one folder, read once."""

    def __init__(self, rollouts: Path, models: Path) -> None:
        self.rollouts, self.models = rollouts, models

    @cache  # noqa: B019  (two sources in a process)
    def batches(self, name: str) -> list[dict[str, Any]]:
        """All batches of a set."""
        data: list[dict[str, Any]] = json.loads((self.rollouts / f"{name}.json").read_text())
        return data

    def rollout(self, name: str, seed: int, rows: int) -> Rollout:
        """The first rows of the batch of a seed."""
        batch = self.batches(name)[seed]
        ids, logp = batch["completions"][:rows], batch["logp"][:rows]
        width = max(map(len, ids))
        mask = torch.tensor([[k < len(row) for k in range(width)] for row in ids])
        padded = torch.zeros(mask.shape, dtype=torch.long)
        numbers = torch.zeros(mask.shape)
        padded[mask] = torch.tensor([t for row in ids for t in row])
        numbers[mask] = torch.tensor([x for row in logp for x in row])
        every = batch.get("prompts") or prompts(len(batch["completions"]), seed)
        return Rollout(padded, mask, numbers, every[:rows])

    @cache  # noqa: B019
    def model(self, name: str = "base") -> Any:
        """A model of the folder in float32; "adapter" is a peft model."""
        from transformers import AutoModelForCausalLM

        if name == "adapter":
            base = AutoModelForCausalLM.from_pretrained(self.models / "bf16_values")
            return with_adapter(base.float(), 3)
        if name == "bf16":
            return copy.deepcopy(self.model()).bfloat16()
        return AutoModelForCausalLM.from_pretrained(self.models / name).float().eval()


def score(roll: Rollout, model: Any, temperature: float = 1.0, **options: Any) -> Tensor:
    """The trainer's log-probabilities, `[B, T]`."""
    scorer = roll.scorer(model)
    return roll.padded(scorer.of_ids(scorer.forward(**options) / temperature))


Fault = Callable[[Source, int, int], Batch]
FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Fault], Fault]:
    """Registers a fault under its name."""

    def register(function: Fault) -> Fault:
        FAULTS[name] = function
        return function

    return register


def batch_of(
    roll: Rollout, model: Any, causes: tuple[str, ...], *, old: Tensor | None = None, **changes: Any
) -> Batch:
    """A batch whose trainer is `model`, with some arguments replaced."""
    arguments = {
        "ids": roll.ids,
        "mask": roll.mask,
        "rollout_logp": roll.logp,
        "old_logp": score(roll, model) if old is None else old,
        **changes,
    }
    return Batch(arguments, causes, model, roll.prompts)


def of_engine(name: str, causes: tuple[str, ...], trainer: str = "base") -> None:
    """A fault that the engine makes by itself."""
    FAULTS[name] = lambda s, seed, rows: batch_of(
        s.rollout(name, seed, rows), s.model(trainer), causes
    )


@fault("healthy_f32")
def _(s: Source, seed: int, rows: int) -> Batch:
    return batch_of(s.rollout("plain", seed, rows), s.model(), ("healthy",))


@fault("healthy_bf16")
def _(s: Source, seed: int, rows: int) -> Batch:
    return batch_of(s.rollout("plain_bfloat16", seed, rows), s.model("bf16"), ("healthy",))


@fault("healthy_autocast")
def _(s: Source, seed: int, rows: int) -> Batch:
    """The engine runs in bf16, and the trainer keeps float32 weights and computes in bf16."""
    roll = s.rollout("plain_bfloat16", seed, rows)
    with torch.autocast("cpu", torch.bfloat16):
        old = score(roll, s.model())
    return batch_of(roll, s.model(), ("healthy",), old=old)


for _name in ("temperature", "top_p", "top_k", "min_p"):
    of_engine(_name, (_name,))
of_engine("temperature+top_p", ("temperature", "top_p"))
for _name in ("fp16", "int8", "fp8"):
    FAULTS[f"weights_{_name}"] = lambda s, seed, rows, n=_name: batch_of(  # type: ignore[misc]
        s.rollout(n, seed, rows), s.model(), (f"weights_{n}",)
    )


@fault("temperature_raw")
def _(s: Source, seed: int, rows: int) -> Batch:
    """The trainer divides by a temperature, and the engine reports raw log-probabilities."""
    roll = s.rollout("plain", seed, rows)
    tau = (0.6, 0.75, 1.3, 1.6)[seed % 4]
    return batch_of(roll, s.model(), ("temperature",), old=score(roll, s.model(), tau))


@fault("weights_bf16")
def _(s: Source, seed: int, rows: int) -> Batch:
    return batch_of(s.rollout("plain_bfloat16", seed, rows), s.model(), ("weights_bf16",))


@fault("stale_weights")
def _(s: Source, seed: int, rows: int) -> Batch:
    name = ("stale2", "stale8")[seed % 2]
    return batch_of(s.rollout(name, seed, rows), s.model(), ("stale_weights",))


@fault("adapter_missing")
def _(s: Source, seed: int, rows: int) -> Batch:
    roll = s.rollout("bf16_values", seed, rows)
    return batch_of(roll, s.model("adapter"), ("adapter_missing",))


@fault("adapter_merged")
def _(s: Source, seed: int, rows: int) -> Batch:
    return batch_of(s.rollout("merged", seed, rows), s.model("adapter"), ("adapter_merged",))


@fault("bos")
def _(s: Source, seed: int, rows: int) -> Batch:
    name = ("bos_twice", "bos_missing")[seed % 2]
    return batch_of(s.rollout(name, seed, rows), s.model(), ("bos",))


@fault("template")
def _(s: Source, seed: int, rows: int) -> Batch:
    return batch_of(s.rollout("template", seed, rows), s.model(), ("template",))


@fault("shift")
def _(s: Source, seed: int, rows: int) -> Batch:
    roll = s.rollout("plain", seed, rows)
    return batch_of(roll, s.model(), ("shift",), rollout_logp=roll.logp.roll(1 - 2 * (seed % 2), 1))


@fault("shift+temperature")
def _(s: Source, seed: int, rows: int) -> Batch:
    roll = s.rollout("temperature", seed, rows)
    return batch_of(roll, s.model(), ("shift", "temperature"), rollout_logp=roll.logp.roll(1, 1))


@fault("rows_permuted")
def _(s: Source, seed: int, rows: int) -> Batch:
    roll = s.rollout("plain", seed, rows)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    order = order if (order != torch.arange(rows)).any() else order.flip(0)
    return batch_of(roll, s.model(), ("rows_permuted",), rollout_logp=roll.logp[order])


@fault("prompt_in_mask")
def _(s: Source, seed: int, rows: int) -> Batch:
    """The mask begins some tokens before the completion, where the engine's list holds zeros."""
    roll = s.rollout("plain", seed, rows)
    early = 1 + seed % 3
    prompt = torch.tensor([p[-early:] for p in roll.prompts])
    ids = torch.cat([prompt, roll.ids], 1)
    mask = torch.cat([torch.ones_like(prompt, dtype=torch.bool), roll.mask], 1)
    logp = torch.cat([torch.zeros(rows, early), roll.logp], 1)
    shorter = [p[:-early] for p in roll.prompts]
    return batch_of(Rollout(ids, mask, logp, shorter), s.model(), ("prompt_in_mask",))


@fault("end_token")
def _(s: Source, seed: int, rows: int) -> Batch:
    """The engine's list has no number for the last token."""
    roll = s.rollout("plain", seed, rows)
    last = roll.mask.sum(1) - 1
    logp = roll.logp.clone()
    logp[torch.arange(rows), last] = 0.0
    return batch_of(roll, s.model(), ("end_token",), rollout_logp=logp)


@fault("padding_in_mask")
def _(s: Source, seed: int, rows: int) -> Batch:
    """The mask covers padding as well, and the engine's list is filled up with zeros."""
    roll = s.rollout("plain", seed, rows)
    spare = torch.zeros(rows, 3, dtype=torch.long)
    ids = torch.cat([roll.ids, spare], 1)
    logp = torch.cat([roll.logp, spare.float()], 1)
    whole = Rollout(ids, torch.ones_like(ids, dtype=torch.bool), logp, roll.prompts)
    return batch_of(whole, s.model(), ("padding_in_mask",))


@fault("reencoded")
def _(s: Source, seed: int, rows: int) -> Batch:
    """In every row one token of the engine became two of the trainer."""
    roll = s.rollout("plain", seed, rows)
    draw = torch.Generator().manual_seed(seed)
    ids, mask, logp = (
        torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (roll.ids, roll.mask, roll.logp)
    )
    engine = logp.clone()
    for i, n in enumerate(roll.mask.sum(1).tolist()):
        at = int(torch.randint(2, max(n - 6, 3), (), generator=draw))
        ids[i, at + 1 : n + 1] = roll.ids[i, at:n]
        ids[i, at] = 16 + int(torch.randint(112, (), generator=draw))
        mask[i, n] = True
    whole = Rollout(ids, mask, engine, roll.prompts)
    return batch_of(whole, s.model(), ("reencoded",))


@fault("copy")
def _(s: Source, seed: int, rows: int) -> Batch:
    """A trainer computes numbers for padding as well, and a copy has them."""
    batch = batch_of(s.rollout("plain", seed, rows), s.model(), ("copy",))
    old, mask = batch.arguments["old_logp"], batch.arguments["mask"]
    old[~mask] = -torch.rand(int((~mask).sum()), generator=torch.Generator().manual_seed(seed))
    batch.arguments["rollout_logp"] = old.clone()
    return batch


@fault("logp_bf16")
def _(s: Source, seed: int, rows: int) -> Batch:
    roll = s.rollout("plain", seed, rows)
    half = roll.logp.bfloat16().float()
    return batch_of(roll, s.model(), ("logp_bf16",), rollout_logp=half)


def on_logits(name: str, change: Callable[[Tensor, int], Tensor]) -> None:
    """A fault of the trainer's head: its logits are changed."""

    def make(s: Source, seed: int, rows: int) -> Batch:
        roll = s.rollout("plain", seed, rows)
        scorer = roll.scorer(s.model())
        old = roll.padded(scorer.of_ids(change(scorer.logits, seed)))
        return batch_of(roll, s.model(), (name,), old=old)

    FAULTS[name] = make


on_logits("logits_bf16", lambda z, seed: z.bfloat16())
on_logits("softcap", lambda z, seed: _capped(z, (5.0, 10.0, 20.0)[seed % 3]))


def _capped(z: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(z / cap)


def _lost_shard(z: Tensor, seed: int) -> Tensor:
    """One of four ranks sends zeros, or nothing."""
    size = z.shape[1] // 4
    j = seed % 4
    z = z.clone()
    z[:, j * size : (j + 1) * size] = 0.0
    return z


on_logits("vocab_shard", _lost_shard)


@fault("positions")
def _(s: Source, seed: int, rows: int) -> Batch:
    """The trainer pads on the left and passes neither positions nor, at odd seeds, a mask."""
    roll = s.rollout("plain", seed, rows)
    old = score(roll, s.model(), padding="left", positions=False, attend_padding=True)
    return batch_of(roll, s.model(), ("positions",), old=old)


@fault("dropout")
def _(s: Source, seed: int, rows: int) -> Batch:
    """The trainer scores in training mode."""
    roll = s.rollout("plain", seed, rows)
    torch.manual_seed(seed)
    return batch_of(roll, s.model(), ("dropout",), old=score(roll, s.model(), train=True))


@fault("noise")
def _(s: Source, seed: int, rows: int) -> Batch:
    """Noise of one size on every token: nothing that a model does."""
    roll = s.rollout("plain", seed, rows)
    draw = torch.Generator().manual_seed(seed)
    noisy = roll.logp + 0.3 * torch.randn(roll.logp.shape, generator=draw)
    return batch_of(roll, s.model(), ("not_explained",), rollout_logp=noisy)


class MixtureSource(Source):
    """A mixture of experts: its sequences are those of the language, and its engine is a second
    forward whose routers see and hold numbers of fp8.
    """

    def rollout(self, name: str, seed: int, rows: int) -> Rollout:
        """Sequences of the language after prompts of different lengths."""
        ids, lengths = sentences(rows, 20_000 + seed)
        parts = [
            row[n : n + LONGEST][: int((row[n:] != PAD).sum())]
            for row, n in zip(ids, lengths.tolist(), strict=True)
        ]
        width = max(part.numel() for part in parts)
        mask = torch.stack([torch.arange(width) < part.numel() for part in parts])
        padded = torch.zeros(mask.shape, dtype=torch.long)
        padded[mask] = torch.cat(parts)
        starts = [row[:n].tolist() for row, n in zip(ids, lengths.tolist(), strict=True)]
        empty = Rollout(padded, mask, torch.zeros(mask.shape), starts)
        with coarse_routers(self.model()) if name == "router" else nullcontext():
            return replace(empty, logp=score(empty, self.model()))


@contextmanager
def coarse_routers(model: Any) -> Iterator[None]:
    """The model with routers that see and hold numbers of fp8."""

    def coarse(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.to(torch.float8_e4m3fn).float() for x in inputs)

    gates = [m for name, m in model.named_modules() if name.split(".")[-1] in ("gate", "router")]
    hooks = [gate.register_forward_pre_hook(coarse) for gate in gates]
    try:
        with alter_weights(
            model, lambda n, w: w.to(torch.float8_e4m3fn).float() if ".gate." in n else None
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@fault("router")
def _(s: Source, seed: int, rows: int) -> Batch:
    return batch_of(s.rollout("router", seed, rows), s.model(), ("router",))
