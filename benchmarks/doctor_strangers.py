"""Faults for the held-out benchmark of the doctor, made by an engine in torch on small models.

An engine decodes token by token with a cache, in float32 or bf16; the trainer scores whole rows in
float32. `TorchSource` also makes the faults of `benchmarks.doctor_cases`, so that any family of
causes can be held out.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.doctor_cases import FAULTS, Batch, Rollout, Source, batch_of, coarse_routers, score
from benchmarks.doctor_engine import altered_prompts, settings_of
from benchmarks.doctor_models import END, LONGEST, PAD, VOCABULARY, prompts, train, trained
from policyloss_lab.diagnosis.forward import replace_attributes

ROWS = 32  # of a rollout; a smaller batch takes the first rows
STEPS = 150  # of the training of a model
# (logits [B, V], the tokens of each row so far, the number of completion tokens so far) -> logits
Process = Callable[[Tensor, Sequence[list[int]], int], Tensor]


class TorchSource(Source):
    """The models of one architecture, "NAME" trained or "NAME_random" not, and their engine.

    half: the engine computes in bf16. All weights are numbers of bf16, so that arithmetic is the
    only honest difference.
    """

    def __init__(self, name: str) -> None:
        super().__init__(Path(), Path())
        self.name, self.half = name, False
        self.steps = 0 if name.endswith("_random") else STEPS
        self.rollouts_made: dict[tuple[Any, ...], Rollout] = {}

    @cache  # noqa: B019  (a few sources in a process)
    def trail(self) -> list[Any]:
        """The model after its training, and 2 and 8 steps before."""
        model = trained(self.name.removesuffix("_random"), steps=self.steps).eval()
        kept = {}
        for step in train(model, 9, 7, 5e-4 if self.steps else 2e-3):
            kept[8 - step] = copy.deepcopy(model)
        return [kept[k].bfloat16().float().eval() for k in (0, 2, 8)]

    @cache  # noqa: B019
    def model(self, name: str = "base") -> Any:
        """A variant of the weights in float32; "bf16" computes in bf16."""
        base, stale2, stale8 = self.trail()
        if name in ("stale2", "stale8"):
            return stale2 if name == "stale2" else stale8
        if name == "bf16":
            return copy.deepcopy(base).bfloat16()
        twin = copy.deepcopy(base)
        rounding = ROUNDINGS.get(name)
        if rounding is not None:
            with torch.no_grad():
                for key, w in twin.named_parameters():
                    if w.dim() >= 2 and "embed" not in key and (w.dim() == 3 or "head" not in key):
                        w.copy_(rounding(w))
        return twin if rounding is not None else base

    def rollout(self, name: str, seed: int, rows: int) -> Rollout:
        """The first rows of the set that `benchmarks.doctor_engine` calls by this name."""
        model = self.model(name)
        settings = settings_of(name, seed)
        half = self.half or name == "plain_bfloat16"
        context = coarse_routers(model) if name == "router" else nullcontext()
        change = partial_settings(settings) if settings else None
        every = altered_prompts(name, prompts(ROWS, seed))
        with context:
            made = self.sampled((name, seed), model, every, change, half=half)
        return first_rows(replace(made, prompts=prompts(ROWS, seed)), rows)

    def sampled(
        self,
        key: tuple[Any, ...],
        model: Any,
        rows: list[list[int]],
        process: Process | None = None,
        *,
        half: bool | None = None,
        keys_and_values: Callable[[Tensor], Tensor] | None = None,
        change: AbstractContextManager[None] | None = None,
    ) -> Rollout:
        """What the engine samples and reports, made once for each key."""
        half = self.half if half is None else half
        name = (*key, half)
        if name not in self.rollouts_made:
            twin = copy.deepcopy(model).bfloat16() if half else model
            draw = torch.Generator().manual_seed(zlib.crc32(repr((self.name, *key)).encode()))
            with change or nullcontext():
                made = decode(twin, rows, draw, process, keys_and_values)
            self.rollouts_made[name] = made
        return self.rollouts_made[name]


def first_rows(roll: Rollout, rows: int) -> Rollout:
    """The first rows, without columns that they do not reach."""
    width = int(roll.mask[:rows].sum(1).max())
    ids, mask, logp = (x[:rows, :width] for x in (roll.ids, roll.mask, roll.logp))
    return Rollout(ids, mask, logp, roll.prompts[:rows])


@torch.no_grad()
def decode(
    model: Any,
    rows: list[list[int]],
    draw: torch.Generator,
    process: Process | None = None,
    keys_and_values: Callable[[Tensor], Tensor] | None = None,
) -> Rollout:
    """Sample completions token by token with a cache, prompts padded on the left."""
    from transformers import DynamicCache

    class Cache(DynamicCache):  # type: ignore[misc]
        def update(self, k: Tensor, v: Tensor, layer: int, *a: Any, **b: Any) -> Any:
            if keys_and_values is not None:
                k, v = keys_and_values(k), keys_and_values(v)
            return super().update(k, v, layer, *a, **b)

    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    place = (mask.cumsum(1) - 1).clamp(min=0)
    so_far = [list(row) for row in rows]
    memory = Cache()
    tokens, numbers, alive = [], [], [torch.ones(len(rows), dtype=torch.bool)]
    for step in range(LONGEST):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=place,
            past_key_values=memory,
            use_cache=True,
        )
        logits = out.logits[:, -1].float()
        if process is not None:
            logits = process(logits, so_far, step)
        logp = logits.log_softmax(1)
        token = torch.multinomial(logp.exp(), 1, generator=draw)
        tokens.append(token[:, 0])
        numbers.append(logp.gather(1, token)[:, 0])
        alive.append(alive[-1] & (token[:, 0] != END))
        for row, t in zip(so_far, token[:, 0].tolist(), strict=True):
            row.append(t)
        ids, place = token, place[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(token)], 1)
    valid = torch.stack(alive[:-1], 1)
    return Rollout(
        torch.where(valid, torch.stack(tokens, 1), 0),
        valid,
        torch.where(valid, torch.stack(numbers, 1), 0.0),
        rows,
    )


def partial_settings(settings: dict[str, float]) -> Process:
    """Temperature and cuts in the order of vLLM."""

    def process(z: Tensor, so_far: Sequence[list[int]], step: int) -> Tensor:
        z = z / settings.get("temperature", 1.0)
        ordered, index = z.sort(1, descending=True)
        p = ordered.softmax(1)
        keep = torch.ones_like(p, dtype=torch.bool)
        if "top_k" in settings:
            keep[:, int(settings["top_k"]) :] = False
        if "top_p" in settings:
            keep &= p.cumsum(1) - p < settings["top_p"]
        if "min_p" in settings:
            keep &= p >= settings["min_p"] * p[:, :1]
        return z.masked_fill(~torch.zeros_like(keep).scatter(1, index, keep), -torch.inf)

    return process


def by_groups(w: Tensor, size: int, steps: int) -> Tensor:
    """Symmetric integers with a scale for each group of inputs."""
    flat = w.reshape(-1, size) if w.shape[-1] % size == 0 else w.reshape(-1, w.shape[-1])
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-12) / steps
    return ((flat / scale).round().clamp(-steps - 1, steps) * scale).reshape(w.shape)


def to_fp8(x: Tensor, scale: Tensor | float = 1.0, kind: torch.dtype = torch.float8_e4m3fn) -> Any:
    """Numbers of fp8 and back."""
    return ((x / scale).to(kind).to(x.dtype)) * scale


def absmax(w: Tensor) -> Tensor:
    """The largest size in each row."""
    return w.abs().amax(-1, keepdim=True).clamp(min=1e-12)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp16": lambda w: w.half().float(),
    "int8": lambda w: (w / (absmax(w) / 127.5)).round().clamp(-128, 127) * absmax(w) / 127.5,
    "fp8": lambda w: to_fp8(w, absmax(w) / 448),
    "int4": lambda w: by_groups(w, 32, 7),
    "nf4": lambda w: by_groups(w.sign() * w.abs().sqrt(), 16, 7).pow(2) * w.sign(),
}


@dataclass(frozen=True)
class Stranger:
    """A fault.

    family: the family of hypotheses that can name it, which is disabled when it is held out.
    places: where a verdict that does not name it may say the differences are; one is enough.
    make: the batch; None if the model has nothing that could have the fault.
    """

    family: str
    places: tuple[str, ...]
    make: Callable[[TorchSource, int, int], Batch | None]


STRANGERS: dict[str, Stranger] = {}
Make = Callable[[TorchSource, int, int], Batch | None]


def stranger(name: str, family: str, *places: str) -> Callable[[Make], Make]:
    """Registers a fault under its name."""

    def register(make: Make) -> Make:
        STRANGERS[name] = Stranger(family, places, make)
        return make

    return register


def of_logits(
    name: str, family: str, places: tuple[str, ...], cause: str, change: Callable[[int], Process]
) -> None:
    """A fault of the sampler: the engine changes its logits, samples and reports."""

    @stranger(name, family, *places)
    def make(s: TorchSource, seed: int, rows: int) -> Batch:
        roll = s.sampled((name, seed), s.model(), prompts(ROWS, seed), change(seed))
        return batch_of(first_rows(roll, rows), s.model(), (cause,))


def penalty(kind: str, sizes: Sequence[float]) -> Callable[[int], Process]:
    """A penalty as vLLM applies it: repetition sees the prompt, the others the completion."""

    def at(seed: int) -> Process:
        size = sizes[seed % len(sizes)]

        def process(z: Tensor, so_far: Sequence[list[int]], step: int) -> Tensor:
            z = z.clone()
            for i, row in enumerate(so_far):
                seen = row if kind == "repetition" else row[len(row) - step :]
                counts = torch.bincount(torch.tensor(seen, dtype=torch.long), minlength=z.shape[1])
                there = counts > 0
                if kind == "repetition":
                    z[i] = torch.where(there, torch.where(z[i] > 0, z[i] / size, z[i] * size), z[i])
                else:
                    z[i] -= size * (counts if kind == "frequency" else there)
            return z

        return process

    return at


for _kind, _sizes in (
    ("repetition", (1.1, 1.3)),
    ("presence", (0.5, 1.5)),
    ("frequency", (0.3, 0.8)),
):
    of_logits(f"{_kind}_penalty", "penalty", ("repeated",), "penalty", penalty(_kind, _sizes))


def biased(words: int, size: float) -> Callable[[int], Process]:
    """A bias on some words that are the same everywhere."""

    def at(seed: int) -> Process:
        draw = torch.Generator().manual_seed(seed)
        chosen = 16 + torch.randperm(VOCABULARY - 16, generator=draw)[:words]
        bias = torch.zeros(VOCABULARY).index_fill(0, chosen, size)
        return lambda z, so_far, step: z + bias

    return at


of_logits("logit_bias_up", "support", ("ids",), "logit_bias", biased(3, 3.0))
of_logits("logit_bias_down", "support", ("ids", "one_sided"), "logit_bias", biased(6, -2.0))
of_logits("banned_tokens", "support", ("one_sided",), "support", biased(12, -torch.inf))


def no_early_end(seed: int) -> Process:
    """`min_tokens`: no end token among the first ones."""

    def process(z: Tensor, so_far: Sequence[list[int]], step: int) -> Tensor:
        z = z.clone()
        if step < 16:
            z[:, END] = -torch.inf
            z[:, 0] = -torch.inf
        return z

    return process


of_logits("no_early_end", "support", ("one_sided", "start"), "support", no_early_end)


def grammar(seed: int) -> Process:
    """The last word decides which half of the vocabulary may follow."""
    draw = torch.Generator().manual_seed(seed)
    allowed = torch.rand(VOCABULARY, VOCABULARY, generator=draw) < 0.7

    def process(z: Tensor, so_far: Sequence[list[int]], step: int) -> Tensor:
        last = torch.tensor([row[-1] for row in so_far])
        return z.masked_fill(~allowed[last], -torch.inf)

    return process


of_logits("grammar", "support", ("one_sided",), "support", grammar)


def varied_temperature(by: str) -> Callable[[int], Process]:
    """A temperature of each row, or one that falls along the row."""

    def at(seed: int) -> Process:
        draw = torch.Generator().manual_seed(seed)
        taus = 0.6 + 1.0 * torch.rand(ROWS, generator=draw)

        def process(z: Tensor, so_far: Sequence[list[int]], step: int) -> Tensor:
            return z / (taus[: len(z), None] if by == "row" else 1.5 - 0.9 * step / LONGEST)

        return process

    return at


of_logits(
    "temperature_by_row", "temperature", ("rows", "sharpness"), "temperature",
    varied_temperature("row"),
)  # fmt: skip
of_logits(
    "temperature_schedule", "temperature", ("start", "late", "sharpness"), "temperature",
    varied_temperature("step"),
)  # fmt: skip


def of_numbers(
    name: str, family: str, places: tuple[str, ...], cause: str, change: Callable[..., Tensor]
) -> None:
    """A fault of the reported numbers: `change(source, roll, seed)` of a sound rollout."""

    @stranger(name, family, *places)
    def make(s: TorchSource, seed: int, rows: int) -> Batch:
        roll = s.rollout("plain", seed, rows)
        return batch_of(roll, s.model(), (cause,), rollout_logp=change(s, roll, seed))


def top1(s: TorchSource, roll: Rollout, seed: int) -> Tensor:
    """The log-probability of the likeliest token."""
    scorer = roll.scorer(s.model("bf16") if s.half else s.model())
    return roll.padded(scorer.logits.log_softmax(1).amax(1))


def zeroed(roll: Rollout, where: Tensor) -> Tensor:
    """Zeros at some tokens."""
    return roll.logp.masked_fill(where, 0.0)


def drawn(roll: Rollout, seed: int, share: float) -> Tensor:
    """A flag for about this share of the tokens."""
    return torch.rand(roll.logp.shape, generator=torch.Generator().manual_seed(seed)) < share


def tool_tokens(s: TorchSource, roll: Rollout, seed: int) -> Tensor:
    """In every second row a run inside the row has no numbers."""
    place = torch.arange(roll.logp.shape[1])
    run = (place >= 4 + seed % 3) & (place < 9 + seed % 3)
    return zeroed(roll, run & (torch.arange(len(roll.logp)) % 2 == 0)[:, None])


of_numbers("top1", "column", ("one_sided",), "top1", top1)
of_numbers("base2", "column", ("multiplicative",), "units", lambda s, r, seed: r.logp / 0.6931472)
of_numbers("base10", "column", ("multiplicative",), "units", lambda s, r, seed: r.logp / 2.302585)
of_numbers(
    "unfilled", "mask", ("constant", "few_tokens"), "unfilled",
    lambda s, r, seed: zeroed(r, drawn(r, seed, 0.1)),
)  # fmt: skip
of_numbers("tool_tokens", "mask", ("constant", "few_tokens"), "unfilled", tool_tokens)
of_numbers(
    "end_missing", "mask", ("last", "constant"), "end_token",
    lambda s, r, seed: zeroed(r, r.ids == END),
)  # fmt: skip
of_numbers(
    "first_wrong", "mask", ("first",), "prompt_in_mask",
    lambda s, r, seed: r.logp - 3.0 * (torch.arange(r.logp.shape[1]) == 0) * drawn(r, seed, 0.9),
)  # fmt: skip


def bad_row(s: TorchSource, roll: Rollout, seed: int) -> Tensor:
    """The numbers of one row belong to nothing."""
    logp = roll.logp.clone()
    draw = torch.Generator().manual_seed(seed)
    logp[seed % len(logp)] = 3 * torch.rand(logp.shape[1], generator=draw).log()
    return logp


of_numbers("bad_row", "", ("rows",), "not_explained", bad_row)


def of_halves(name: str, family: str, cause: str, other: Callable[..., Rollout]) -> None:
    """Every second row comes from another engine."""

    @stranger(name, family, "rows")
    def make(s: TorchSource, seed: int, rows: int) -> Batch:
        first, second = s.rollout("plain", seed, ROWS), other(s, seed)
        width = max(first.ids.shape[1], second.ids.shape[1])
        a, b = (
            [nn.functional.pad(x, (0, width - x.shape[1])) for x in (r.ids, r.mask, r.logp)]
            for r in (first, second)
        )
        odd = (torch.arange(ROWS) % 2 == 1)[:, None]
        ids, mask, logp = (torch.where(odd, y, x) for x, y in zip(a, b, strict=True))
        mixed = first_rows(Rollout(ids, mask, logp, first.prompts), rows)
        return batch_of(mixed, s.model(), (cause,))


of_halves("half_temperature", "temperature", "temperature",
          lambda s, seed: s.rollout("temperature", seed, ROWS))  # fmt: skip
of_halves("half_stale", "weights", "not_explained", lambda s, seed: s.rollout("stale8", seed, ROWS))
of_halves("half_fp8", "format", "weights_fp8", lambda s, seed: s.rollout("fp8", seed, ROWS))
of_halves("half_bos", "prompt", "bos", lambda s, seed: s.rollout("bos_twice", seed, ROWS))


def of_forward(
    name: str, family: str, places: tuple[str, ...], cause: str, **options: Callable[..., Any]
) -> None:
    """A fault inside the engine's forward: `options` as those of `TorchSource.sampled`, each made
    from (model, seed).
    """

    @stranger(name, family, *places)
    def make(s: TorchSource, seed: int, rows: int) -> Batch | None:
        model = copy.deepcopy(s.model())
        model = model.bfloat16() if s.half else model
        made = {key: make_option(model, seed) for key, make_option in options.items()}
        if None in made.values():
            return None
        roll = s.sampled((name, seed), model, prompts(ROWS, seed), half=False, **made)
        s.rollouts_made.pop((name, seed, False))
        return batch_of(first_rows(roll, rows), s.model(), (cause,))


def of_weights(name: str, cause: str) -> None:
    """The engine's weights are quantised."""

    @stranger(f"weights_{name}", "format", "network")
    def make(s: TorchSource, seed: int, rows: int) -> Batch:
        return batch_of(s.rollout(name, seed, rows), s.model(), (cause,))


of_weights("int4", "weights_int4")
of_weights("nf4", "not_explained")
CACHES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "kv_fp8": ("kv_fp8", to_fp8),
    "kv_int8": ("kv_int8", lambda x: by_groups(x, x.shape[-1], 127)),
    "kv_int4": ("not_explained", lambda x: by_groups(x, x.shape[-1], 7)),
}
for _name, (_cause, _change) in CACHES.items():
    of_forward(_name, "format", ("network",), _cause,
               keys_and_values=lambda m, seed, c=_change: c)  # fmt: skip


@contextmanager
def _buffers(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    for name, x in model.named_buffers():
        if name.endswith("inv_freq"):
            x.copy_(change(x.float()))
    yield


def rope_base(model: Any, seed: int) -> Any:
    """Another base of the rotary embedding."""
    if not any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        return None
    power = (1.25, 1.5)[seed % 2]  # of the base 1e4: 1e5 and 1e6
    return _buffers(model, lambda x: x**power)


def rope_scaling(model: Any, seed: int) -> Any:
    """Positions divided by a factor."""
    if not any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        return None
    return _buffers(model, lambda x: x / (2.0, 4.0)[seed % 2])


def attention_scale(model: Any, seed: int) -> Any:
    """Another scale of the attention scores."""
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), float):
            module.scaling *= (0.5, 2.0)[seed % 2]
    return nullcontext()


of_forward("rope_base", "config", ("network",), "rope", change=rope_base)
of_forward("rope_scaling", "config", ("network",), "rope", change=rope_scaling)
of_forward("attention_scale", "config", ("network",), "attention_scale", change=attention_scale)


@stranger("window", "config", "network", "late")
def _(s: TorchSource, seed: int, rows: int) -> Batch:
    """The engine attends to the last tokens only."""
    roll = s.rollout("plain", seed, rows)
    size = (8, 16)[seed % 2]
    model = s.model("bf16") if s.half else s.model()
    flat = []
    for row, keep, prompt in zip(roll.ids, roll.mask, roll.prompts, strict=True):
        tokens = torch.tensor([*prompt, *row[keep].tolist()])[None]
        length = tokens.shape[1]
        gap = torch.arange(length)[:, None] - torch.arange(length)
        seen = ((gap >= 0) & (gap < size))[None, None]
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min).to(next(model.parameters()))
        with torch.no_grad():
            place = torch.arange(length)[None]
            logits = model(
                input_ids=tokens, attention_mask=mask, position_ids=place, use_cache=False
            ).logits[0]
        logp = logits[:-1].float().log_softmax(1).gather(1, tokens[0, 1:, None])[:, 0]
        flat.append(logp[len(prompt) - 1 :])
    return batch_of(roll, s.model(), ("window",), rollout_logp=roll.padded(torch.cat(flat)))


@stranger("dropout", "dropout", "network")
def _(s: TorchSource, seed: int, rows: int) -> Batch:
    """The trainer scores in training mode; the models have no dropout of their own."""
    roll = s.rollout("plain", seed, rows)
    rates = [
        (module, name, 0.1)
        for module in s.model().modules()
        for name in ("attention_dropout", "dropout")
        if isinstance(getattr(module, name, None), float)
    ]
    torch.manual_seed(seed)
    with replace_attributes(rates):
        old = score(roll, s.model(), train=True)
    return batch_of(roll, s.model(), ("dropout",), old=old)


# The faults of the matrix: family, and places when it is held out.
KNOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "temperature": ("temperature", ("sharpness",)),
    "temperature_raw": ("temperature", ("sharpness",)),
    "temperature+top_p": ("temperature cut support", ("sharpness", "one_sided")),
    "top_p": ("cut support", ("one_sided",)),
    "top_k": ("cut support", ("one_sided",)),
    "min_p": ("cut support", ("one_sided",)),
    "weights_int8": ("format", ("network",)),
    "weights_fp8": ("format", ("network",)),
    "stale_weights": ("weights", ("network",)),
    "bos": ("prompt", ("start", "network")),
    "template": ("prompt", ("start", "network")),
    "shift": ("order", ("unrelated",)),
    "shift+temperature": ("order", ("unrelated",)),
    "rows_permuted": ("order", ("unrelated", "rows")),
    "reencoded": ("order", ("late", "unrelated", "rows")),
    "prompt_in_mask": ("mask", ("first", "start", "constant")),
    "end_token": ("mask", ("last", "constant")),
    "padding_in_mask": ("mask", ("last", "late", "constant")),
    "logp_bf16": ("storage", ("multiplicative", "unlikely")),
    "logits_bf16": ("format", ("network",)),
    "softcap": ("softcap", ("sharpness",)),
    "vocab_shard": ("shard", ("one_sided", "ids")),
    "positions": ("positions", ("start", "network", "rows")),
    "noise": ("", ("uniform",)),
}
for _name, (_family, _places) in KNOWN.items():
    STRANGERS[_name] = Stranger(_family, _places, FAULTS[_name])


# Healthy engines ---------------------------------------------------------------------------------

HEALTHY: dict[str, Make] = {
    name: FAULTS[name] for name in ("healthy_f32", "healthy_bf16", "healthy_autocast")
}


def healthy(name: str) -> Callable[[Make], Make]:
    """Registers a healthy kind of batch."""

    def register(make: Make) -> Make:
        HEALTHY[name] = make
        return make

    return register


@healthy("fp8_both")
def _(s: TorchSource, seed: int, rows: int) -> Batch:
    """Both sides have the same fp8 weights, and the engine computes in bf16."""
    model = s.model("fp8")
    roll = s.sampled(("fp8_both", seed), model, prompts(ROWS, seed), half=True)
    return batch_of(first_rows(roll, rows), model, ("healthy",))


@healthy("other_kernel")
def _(s: TorchSource, seed: int, rows: int) -> Batch:
    """The trainer's attention is written out, in bf16, one row at a time."""
    roll = s.rollout("plain_bfloat16", seed, rows)
    model = copy.deepcopy(s.model("bf16"))
    model.set_attn_implementation("eager")
    parts = [
        score(Rollout(roll.ids[i : i + 1], roll.mask[i : i + 1], roll.logp[i : i + 1], [p]), model)
        for i, p in enumerate(roll.prompts)
    ]
    return batch_of(roll, s.model(), ("healthy",), old=torch.cat(parts))


@healthy("exact_bf16")
def _(s: TorchSource, seed: int, rows: int) -> Batch:
    """An engine that equals the trainer bit for bit, in bf16."""
    roll = s.rollout("plain_bfloat16", seed, rows)
    old = score(roll, s.model("bf16"))
    return batch_of(roll, s.model(), ("healthy",), old=old, rollout_logp=old.clone())
