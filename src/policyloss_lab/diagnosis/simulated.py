"""Hypotheses that the model simulates: other weights (a precision, a missing or merged adapter)
and another context (the prompt, its first token, padding). Each runs the model once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from policyloss_lab.diagnosis.forward import Scorer, altered
from policyloss_lab.diagnosis.hypothesis import Case, Fit

FP8_MAX = 448.0  # of float8_e4m3fn


def rounded(dtype: torch.dtype) -> Callable[[Tensor, int], Tensor]:
    """Rounding of a weight to a 16-bit type."""
    return lambda w, axis: w.to(dtype).to(w.dtype)


def int8(w: Tensor, axis: int, steps: float = 127.0) -> Tensor:
    """Symmetric 8-bit integers with a scale for each output channel."""
    scale = w.abs().amax(axis, keepdim=True).clamp(min=1e-12) / steps
    return (w / scale).round().clamp(-128, 127) * scale


def int8_wide(w: Tensor, axis: int) -> Tensor:
    """`int8` with all 256 values in use, as in torchao."""
    return int8(w, axis, 127.5)


def fp8(w: Tensor, axis: int) -> Tensor:
    """e4m3 with a scale for each output channel."""
    scale = w.abs().amax(axis, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (w / scale).to(torch.float8_e4m3fn).to(w.dtype) * scale


def fp8_tensor(w: Tensor, axis: int) -> Tensor:
    """e4m3 with one scale for the matrix."""
    scale = w.abs().amax().clamp(min=1e-12) / FP8_MAX
    return (w / scale).to(torch.float8_e4m3fn).to(w.dtype) * scale


ROUNDINGS: dict[str, tuple[tuple[str, Callable[[Tensor, int], Tensor], bool], ...]] = {
    "weights_bf16": (("bfloat16", rounded(torch.bfloat16), True),),
    "weights_fp16": (("float16", rounded(torch.float16), True),),
    "weights_int8": (("int8", int8, False), ("int8 of 256 values", int8_wide, False)),
    "weights_fp8": (
        ("fp8 by channel", fp8, False),
        ("fp8 by matrix", fp8_tensor, False),
    ),
}


@dataclass(frozen=True)
class RoundedWeights:
    """The weights of one side are rounded: all to 16 bits, or the matrices to 8."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """One fit for each rounding, with and without the head."""
        if case.scorer is None:
            return
        scorer, model = case.scorer, case.scorer.model
        one_side = len(case.sides) == 1  # if both sides run in bf16, neither is wrong
        if one_side:
            yield from case.fit_sides(
                "weights_bf16",
                "the model behind {side} is rounded to bfloat16 and runs in it",
                scorer.half_precision(),
                {"rounding": "bfloat16"},
                share="fixed",
            )
        axes = matrices(model)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        head_weight = getattr(head, "weight", None)
        for cause, variants in ROUNDINGS.items():
            for name, rounding, every in variants if one_side or cause != "weights_bf16" else ():
                for with_head in (True,) if every else (True, False):

                    def change(
                        weight_name: str,
                        w: Tensor,
                        every: bool = every,
                        rounding: Callable[[Tensor, int], Tensor] = rounding,
                        with_head: bool = with_head,
                    ) -> Tensor | None:
                        axis = axes.get(weight_name)
                        if not every and (
                            axis is None or (not with_head and w.data_ptr() == _place(head_weight))
                        ):
                            return None
                        return rounding(w, 1 if axis is None else axis)

                    def logits(change: Callable[[str, Tensor], Tensor | None] = change) -> Tensor:
                        with altered(model, change):
                            return scorer.forward()

                    effect = scorer.effect(f"{name} {with_head}", logits)
                    tail = "" if with_head else ", but for the head"
                    yield from case.fit_sides(
                        cause,
                        f"the weights behind {{side}} are rounded to {name}{tail}",
                        effect,
                        {"rounding": name},
                        freedom=0 if every else 1,
                        share="fixed",
                    )


def _place(weight: Tensor | None) -> int | None:
    return None if weight is None else weight.data_ptr()


def matrices(model: nn.Module) -> dict[str, int]:
    """The weights of linear layers by name, with the axis of their inputs: 1, or 0 where a layer
    stores its weight transposed.
    """
    axes = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            if isinstance(module, nn.Linear):
                axes[f"{name}.weight"] = 1
            elif type(module).__name__ == "Conv1D":
                axes[f"{name}.weight"] = 0
    return axes


@dataclass(frozen=True)
class Adapter:
    """The model has an adapter that one side leaves out, or merges into rounded weights."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The adapter left out, and the adapter merged, for a model with `disable_adapter` and
        `merge_and_unload`, as in peft.
        """
        if case.scorer is None or not hasattr(case.scorer.model, "disable_adapter"):
            return
        scorer, model = case.scorer, case.scorer.model

        def without() -> Tensor:
            with model.disable_adapter():
                return scorer.forward()

        def merged() -> Tensor:
            merged_model = copy.deepcopy(model).merge_and_unload()
            with altered(merged_model, lambda name, w: w.bfloat16().to(w.dtype)):
                return scorer.with_model(merged_model).forward()

        for cause, what, logits in (
            ("adapter_missing", "is that of the model without its adapter", without),
            ("adapter_merged", "is that of an adapter merged into bf16 weights", merged),
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


@dataclass(frozen=True)
class FirstToken:
    """One side has the first token (BOS) twice, or lacks it."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The first token twice, and the first token missing."""
        if case.scorer is None or (bos := bos_of(case.scorer)) is None:
            return
        prompts = case.scorer.prompts
        twice = [[bos, *p] for p in prompts]
        if not all(p[:1] == [bos] for p in prompts):
            what = "has a first token that the prompts do not have"
            yield from _simulated(case, "bos", what, twice)
            return
        yield from _simulated(case, "bos", "has the first token twice", twice)
        if all(len(p) > 1 for p in prompts):
            without = [p[1:] for p in prompts]
            yield from _simulated(case, "bos", "lacks the first token", without)


@dataclass(frozen=True)
class OtherPrompt:
    """One side saw another prompt: a part is missing, or the template differs.

    others: the prompts in that template, as token ids.
    """

    others: Sequence[Sequence[int]] | None = None

    def fit(self, case: Case) -> Iterator[Fit]:
        """The last tokens missing, the prompt missing, and the other template."""
        if case.scorer is None:
            return
        if self.others is not None:
            others = [list(p) for p in self.others]
            yield from _simulated(case, "template", "saw the prompts of the other template", others)
        prompts = case.scorer.prompts
        shortest = min(len(p) for p in prompts)
        for missing in (1, 2, 3, 4):
            if shortest > missing:
                tokens = "token" if missing == 1 else f"{missing} tokens"
                what = f"saw the prompts without their last {tokens}"
                cut = [p[:-missing] for p in prompts]
                yield from _simulated(case, "template", what, cut)
        if shortest > 1:
            alone = [p[:1] for p in prompts]
            what = "saw the first token of each prompt alone"
            yield from _simulated(case, "template", what, alone)


def _simulated(case: Case, cause: str, what: str, prompts: Sequence[list[int]]) -> Iterator[Fit]:
    assert case.scorer is not None
    scorer = case.scorer
    effect = scorer.effect(what, lambda: scorer.forward(prompts))
    sentence = f"the model behind {{side}} {what}"
    yield from case.fit_sides(cause, sentence, effect, {"what": what}, freedom=1)


@dataclass(frozen=True)
class Padding:
    """Rows are padded on the left, and one side counts padding as positions or attends to it."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Counting padding, attending to padding, and both together."""
        if case.scorer is None:
            return
        scorer = case.scorer

        for what, positions, attend in (
            ("counts padding as positions", False, False),
            ("attends to padding", True, True),
            ("counts padding as positions and attends to it", False, True),
        ):
            logits = partial(
                scorer.forward, padding="left", positions=positions, attend_padding=attend
            )
            effect = scorer.effect(what, logits)
            sentence = f"the model behind {{side}} {what}"
            yield from case.fit_sides("positions", sentence, effect, {"what": what}, share="exact")
