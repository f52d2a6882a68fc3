"""Hypotheses that the model simulates: other weights (a numeric format, a missing or merged
adapter, older weights), another configuration, and another context (the prompt, its first token,
padding). Each runs the model once more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from policyloss_lab.diagnosis.forward import Scorer, alter_weights, replace_attributes, routers
from policyloss_lab.diagnosis.hypothesis import Case, Fit

FP8_MAX = 448.0  # of float8_e4m3fn


def integers(w: Tensor, axis: int, steps: float = 127.0) -> Tensor:
    """Symmetric integers with a scale for each output channel. steps: 127 or, if all 256 values
    are in use as in torchao, 127.5; 7 for four bits.
    """
    scale = w.abs().amax(axis, keepdim=True).clamp(min=1e-12) / steps
    return (w / scale).round().clamp(-math.ceil(steps + 0.5), math.floor(steps)) * scale


def int4(w: Tensor, axis: int, group: int) -> Tensor:
    """Four bits with a scale for each group of inputs; by channel where groups do not fit."""
    x = w.movedim(axis, -1)
    parts = x.reshape(-1, group) if x.shape[-1] % group == 0 else x.reshape(-1, x.shape[-1])
    return integers(parts, 1, 7.0).reshape(x.shape).movedim(-1, axis)


def fp8(w: Tensor, axis: int | None) -> Tensor:
    """e4m3 with a scale for each output channel, or with one for the matrix (axis None)."""
    size = w.abs().amax() if axis is None else w.abs().amax(axis, keepdim=True)
    scale = size.clamp(min=1e-12) / FP8_MAX
    return (w / scale).to(torch.float8_e4m3fn).to(w.dtype) * scale


Rounding = Callable[[Tensor, int], Tensor]
EVERY: tuple[tuple[str, str, Rounding], ...] = (  # all weights
    ("weights_bf16", "bfloat16", lambda w, axis: w.bfloat16().to(w.dtype)),
    ("weights_fp16", "float16", lambda w, axis: w.half().to(w.dtype)),
)
MATRICES: tuple[tuple[str, str, Rounding], ...] = (  # linear layers
    ("weights_int8", "int8", integers),
    ("weights_int8", "int8 (256 values)", partial(integers, steps=127.5)),
    ("weights_fp8", "fp8 by channel", fp8),
    ("weights_fp8", "fp8 by matrix", lambda w, axis: fp8(w, None)),
    ("weights_int4", "int4 by channel", partial(integers, steps=7.0)),
    ("weights_int4", "int4 in groups of 32", partial(int4, group=32)),
    ("weights_int4", "int4 in groups of 128", partial(int4, group=128)),
)
CACHES: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    ("kv_fp8", "fp8", lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
    ("kv_fp8", "fp8 with a scale for each token and head", lambda x: fp8(x, -1)),
    ("kv_int8", "int8 with a scale for each token and head", lambda x: integers(x, -1)),
)


def fit_formats(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """The weights of one side are rounded: all to 16 bits, or the matrices to 8 or 4, with and
    without the head; or its cache of keys and values is.
    """
    model = scorer.model
    roundings = [(*row, True) for row in EVERY]
    if len(case.sides) == 1:  # if both sides run in bf16, neither is wrong
        yield from case.fit_sides(
            "weights_bf16",
            "the model behind {side} is rounded to bfloat16 and runs in it",
            scorer.half_precision("bf16"),
            {"rounding": "bfloat16"},
            share="fixed",
        )
    else:
        del roundings[0]
    axes = matrices(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = {n for n, w in model.named_parameters() if w is getattr(head, "weight", None)}
    kinds = {"": set(axes), ", all but the output head": set(axes) - heads}
    if choosing := routers(model):
        kinds[", all but output head and routers"] = set(axes) - heads - choosing
    for cause, name, rounding, every in [*roundings, *((*row, False) for row in MATRICES)]:
        for tail, chosen in [("", set(axes))] if every else kinds.items():

            def change(key: str, w: Tensor) -> Tensor | None:
                if not every and key not in chosen:  # noqa: B023  (used in this turn)
                    return None
                return rounding(w, axes.get(key, -1))  # noqa: B023

            effect = scorer.effect(
                name + tail, partial(_within, scorer, alter_weights(model, change))
            )
            sentence = f"the weights behind {{side}} are rounded to {name}{tail}"
            yield from case.fit_sides(
                cause, sentence, effect, {"rounding": name}, freedom=1 - every, share="fixed"
            )
    for cause, name, change_cache in CACHES if _of_transformers(model) else ():
        effect = scorer.effect(f"cache {name}", partial(scorer.forward, cached=change_cache))
        sentence = f"the cache of keys and values behind {{side}} is rounded to {name}"
        details = {"rounding": name}
        yield from case.fit_sides(cause, sentence, effect, details, freedom=1, share="fixed")


def _within(scorer: Scorer, context: AbstractContextManager[None]) -> Tensor:
    """The logits under a change of the model."""
    with context:
        return scorer.forward()


def _of_transformers(model: Any) -> bool:
    """Whether the model takes caches and masks of transformers."""
    return any(c.__module__.startswith("transformers.") for c in type(model).__mro__)


def matrices(model: nn.Module) -> dict[str, int]:
    """The weights of linear layers, experts and routers by name, with the axis of their inputs: the
    last one, or 0 where a layer stores its weight transposed.
    """
    axes = {name: -1 for name, w in model.named_parameters() if w.dim() == 3}
    axes |= dict.fromkeys(routers(model), -1)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            axes[f"{name}.weight"] = -1
        elif type(module).__name__ == "Conv1D":
            axes[f"{name}.weight"] = 0
    return axes


BASES = (1e4, 1e5, 5e5, 1e6, 1e7)
STRETCHES = (2.0, 4.0, 8.0, 0.5, 0.25)
SCALES = (0.25, 0.5, 0.5**0.5, 2.0**0.5, 2.0, 4.0)


def fit_configuration(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side's model has another RoPE base or scaling, or scale or window of attention."""
    for cause, what, run in _configurations(scorer) if _of_transformers(scorer.model) else ():
        sentence = f"the model behind {{side}} has {what}"
        effect = scorer.effect(what, run)
        yield from case.fit_sides(cause, sentence, effect, {"what": what}, freedom=1)


def _configurations(scorer: Scorer) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    modules = list(scorer.model.modules())
    rotary = [m for m in modules if isinstance(getattr(m, "inv_freq", None), Tensor)]
    powers = {b: _power(rotary[0].inv_freq, b) for b in BASES} if rotary else {}
    for base, power in powers.items():
        if abs(power - 1) > 1e-3:
            change = replace_attributes([(m, "inv_freq", m.inv_freq**power) for m in rotary])
            yield "rope", f"a RoPE base of {base:g}", partial(_within, scorer, change)
    for factor in STRETCHES if rotary else ():
        change = replace_attributes([(m, "inv_freq", m.inv_freq / factor) for m in rotary])
        yield "rope", f"RoPE positions divided by {factor:g}", partial(_within, scorer, change)
    scaled = [m for m in modules if isinstance(getattr(m, "scaling", None), float)]
    for factor in (*SCALES, 1 / scaled[0].scaling, scaled[0].scaling) if scaled else ():
        change = replace_attributes([(m, "scaling", m.scaling * factor) for m in scaled])
        what = f"attention scores times {factor:.3g}"
        yield "attention_scale", what, partial(_within, scorer, change)
    longest = max(len(p) + len(c) for p, c in zip(scorer.prompts, scorer.completions, strict=True))
    sizes = [2**k for k in range(2, longest.bit_length())]
    if getattr(scorer.config, "sliding_window", None) is not None:
        sizes.append(longest)
    for size in sizes:
        what = f"a window of {size} tokens" if size < longest else "no window"
        yield "window", what, partial(scorer.forward, window=size)


def _power(frequencies: Tensor, base: float) -> float:
    """The power of RoPE's frequencies that gives them another base."""
    count = frequencies.numel()
    last = float(frequencies[-1].double().log())
    return -math.log(base) * (count - 1) / count / last if last else 1.0


def fit_earlier(case: Case) -> Iterator[Fit]:
    """The engine has the older weights of `earlier_logp`."""
    if case.pairs.earlier is not None:
        sentence = "rollout_logp belongs to the older weights (earlier_logp)"
        effect = case.pairs.earlier - case.pairs.trainer
        details = {"side": "rollout_logp"}
        yield Fit("stale_weights", sentence, effect, share="fixed", details=details)


def fit_adapter(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """The model has an adapter that one side leaves out, or merges into rounded weights: a model
    with `disable_adapter` and `merge_and_unload`, as in peft.
    """
    model = scorer.model
    if not hasattr(model, "disable_adapter"):
        return

    def merged() -> Tensor:
        merged_model = copy.deepcopy(model).merge_and_unload()
        with alter_weights(merged_model, lambda name, w: w.bfloat16().to(w.dtype)):
            return scorer.with_model(merged_model).forward()

    without = partial(_within, scorer, model.disable_adapter())
    for cause, what, logits in (
        ("adapter_missing", "belongs to the model without its adapter", without),
        ("adapter_merged", "belongs to an adapter merged into bf16 weights", merged),
    ):
        effect = scorer.effect(cause, logits)
        yield from case.fit_sides(cause, f"{{side}} {what}", effect, share="fixed")


def bos_of(scorer: Scorer) -> int | None:
    """The token that begins every prompt, else the BOS token of the configuration."""
    firsts = {p[0] if p else None for p in scorer.prompts}
    (first,) = firsts if len(firsts) == 1 else (None,)
    named = getattr(scorer.config, "bos_token_id", None)
    bos = first if first is not None else named
    return bos if isinstance(bos, int) else None


def fit_prompts(
    case: Case, scorer: Scorer, others: Sequence[Sequence[int]] | None = None
) -> Iterator[Fit]:
    """One side saw another prompt: the first token (BOS) is doubled or missing, the last tokens or
    all but the first are missing, or the template differs.

    others: the prompts in that template, as token ids.
    """
    prompts = scorer.prompts
    shortest = min(len(p) for p in prompts)
    changed: list[tuple[str, str, list[list[int]]]] = []
    if (bos := bos_of(scorer)) is not None:
        begun = all(p[:1] == [bos] for p in prompts)
        what = "saw the first token twice" if begun else "saw a first token that the prompts lack"
        changed.append(("bos", what, [[bos, *p] for p in prompts]))
        if begun and shortest > 1:
            changed.append(("bos", "did not see the first token", [p[1:] for p in prompts]))
    if others is not None:
        what = "saw the prompts of the other template"
        changed.append(("template", what, [list(p) for p in others]))
    for missing in range(1, min(5, shortest)):
        tokens = "token" if missing == 1 else f"{missing} tokens"
        what = f"saw the prompts without their last {tokens}"
        changed.append(("template", what, [p[:-missing] for p in prompts]))
    if shortest > 1:
        what = "saw the first token of each prompt alone"
        changed.append(("template", what, [p[:1] for p in prompts]))
    for cause, what, rows in changed:
        effect = scorer.effect(what, partial(scorer.forward, rows))
        sentence = f"the model behind {{side}} {what}"
        yield from case.fit_sides(cause, sentence, effect, {"what": what}, freedom=1)


def fit_padding(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """Rows are padded on the left, and one side counts padding as positions or attends to it."""
    for what, positions, attend in (
        ("counts padding as positions", False, False),
        ("attends to padding", True, True),
        ("counts padding as positions and attends to it", False, True),
    ):
        logits = partial(scorer.forward, padding="left", positions=positions, attend_padding=attend)
        effect = scorer.effect(what, logits)
        sentence = f"the model behind {{side}} {what}"
        yield from case.fit_sides("positions", sentence, effect, {"what": what})


SIMULATED = (fit_formats, fit_configuration, fit_adapter, fit_padding)
