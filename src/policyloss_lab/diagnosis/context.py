"""Hypotheses about what stands before the tokens: the prompt, its first token, positions, padding.

Each is simulated: the model runs once more with that context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from policyloss_lab.diagnosis.forward import Scorer
from policyloss_lab.diagnosis.hypothesis import Case, Fit


def bos_of(scorer: Scorer) -> int | None:
    """The token that every prompt begins with, or the one that the configuration names."""
    firsts = {p[0] if p else None for p in scorer.prompts}
    (first,) = firsts if len(firsts) == 1 else (None,)
    named = getattr(scorer.config, "bos_token_id", None)
    bos = first if first is not None else named
    return bos if isinstance(bos, int) else None


@dataclass(frozen=True)
class FirstToken:
    """One side has the first token (BOS) twice, or lacks it."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Both."""
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
    """One side saw another prompt: a part of it is missing, or it is that of another template.

    others: the prompts of the rows in another template, as tokens.
    """

    others: Sequence[Sequence[int]] | None = None

    def fit(self, case: Case) -> Iterator[Fit]:
        """The last tokens missing, the whole prompt missing, and the other template."""
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
    for side, sign in case.sides:
        yield Fit(
            cause,
            f"the model behind {side} {what}",
            sign * effect,
            freedom=1,
            details={"what": what, "side": side},
        )


@dataclass(frozen=True)
class Padding:
    """Rows are padded on the left, and one side counts padding as positions or attends to it."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Both; nothing where all rows have one length."""
        if case.scorer is None:
            return
        scorer = case.scorer

        def counted() -> Tensor:
            return scorer.forward(padding="left", positions=False)

        def attended() -> Tensor:
            return scorer.forward(padding="left", attend_padding=True)

        def neither() -> Tensor:
            return scorer.forward(padding="left", positions=False, attend_padding=True)

        for what, logits in (
            ("counts padding as positions", counted),
            ("attends to padding", attended),
            ("counts padding as positions and attends to it", neither),
        ):
            effect = scorer.effect(what, logits)
            for side, sign in case.sides:
                yield Fit(
                    "positions",
                    f"the model behind {side} {what}",
                    sign * effect,
                    share="exact",
                    details={"what": what, "side": side},
                )
