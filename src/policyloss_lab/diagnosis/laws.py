"""Hypotheses that predict where differences are large, and not which way they go: weights of
another step, another context, dropout, another route through the experts.

Each runs the model several times with something drawn at random. The typical size over the draws
is the shape of its noise, and where their mean is not 0, a multiple of it is predicted. Pairs alone
hold too little to name one of these: half precision, dropout, an adapter and stale weights have all
the shape `1 - p`. A step of the trainer (`logp` beside `old_logp`) shows what stale weights do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policyloss_lab.diagnosis.forward import Scorer, altered
from policyloss_lab.diagnosis.hypothesis import Case, Fit
from policyloss_lab.diagnosis.pairs import QUIET

DRAWS = 16
STEADY = 0.3
CHANGE = 0.02  # of the root mean square of a weight matrix, in a draw
ROUTE = 2.0**-5  # the relative noise of a router's weights in a draw
SUPPLY = "model=, ids= and prompts= tell which"
DECAYS = (2.0, 4.0, 8.0, 16.0, 32.0)


def drawn(scorer: Scorer, name: str, logits: Callable[[torch.Generator], Tensor]) -> Tensor:
    """The effects of several draws, `[draws, n]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack(
        [scorer.effect(f"{name} {k}", lambda: logits(generator)) for k in range(DRAWS)]
    )


def law_shape(effects: Tensor, case: Case) -> Tensor:
    """The typical size over draws, `(mean √|e|)²`, steadied by `1 - p`: `sqrt(size² + (0.3·h)²)`
    with both of mean 1. A rare large effect must not pass for the size of all.
    """
    size = effects.abs().sqrt().mean(0).square()
    size = size / size.mean().clamp(min=1e-12)
    noise = STEADY * case.pairs.shape / case.pairs.shape.mean()
    return (size.square() + noise.square()).sqrt().clamp(min=QUIET)


def along(mean: Tensor, shape: Tensor, case: Case) -> tuple[Tensor, str]:
    """`b·mean` with the b of least squares, and the side that it belongs to: that of its sign."""
    weight = mean / shape.square()
    slope = float((weight * case.pairs.difference).sum() / (weight * mean).sum().clamp(min=1e-12))
    return slope * mean, "rollout_logp" if slope > 0 else "old_logp"


@dataclass(frozen=True)
class OtherWeights:
    """The weights of the two sides differ: those of the engine are some steps old."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Noise of the shape that a random change of all weights makes."""
        sentence = "differences are as large as those of other weights would be, token by token"
        if case.scorer is None:
            yield Fit(
                "not_explained",
                "differences are larger at unlikely tokens, as those of other weights, another "
                f"precision, dropout or an adapter are; {SUPPLY}",
                shape=case.pairs.shape,
            )
            if case.pairs.later is not None:
                step = case.pairs.later - case.pairs.trainer
                yield Fit(
                    "stale_weights",
                    "differences are large where the trainer's own step is",
                    shape=law_shape(step[None], case),
                )
            return
        scorer = case.scorer
        names = matrices_of(scorer.model)

        def logits(generator: torch.Generator) -> Tensor:
            def change(name: str, w: Tensor) -> Tensor | None:
                if name not in names:
                    return None
                noise = torch.randn(w.shape, generator=generator).to(w.device, w.dtype)
                return w + CHANGE * w.square().mean().sqrt() * noise

            with altered(scorer.model, change):
                return scorer.forward()

        effects = drawn(scorer, "weights", logits)
        yield Fit("stale_weights", sentence, shape=law_shape(effects, case))


def matrices_of(model: nn.Module) -> set[str]:
    """The names of the weights that are matrices."""
    return {name for name, w in model.named_parameters() if w.dim() >= 2}


@dataclass(frozen=True)
class OtherContext:
    """One side saw another prompt, of which nothing more is known."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The mean effect of words that are put into the prompts, and noise of its spread; without
        a model, noise that decays.
        """
        sentence = "differences are where another prompt would make them, and fade along the row"
        if case.scorer is None:
            for decay in DECAYS:
                fade = torch.exp(-case.pairs.rank / decay)
                yield Fit(
                    "not_explained",
                    f"differences fade along the row, as those of another prompt do; {SUPPLY}",
                    shape=(case.pairs.shape * fade).clamp(min=QUIET**2),
                    freedom=1,
                )
            return
        scorer = case.scorer
        if not all(scorer.prompts):
            return
        most = scorer.logits.shape[1]

        def logits(generator: torch.Generator) -> Tensor:
            count = int(torch.randint(1, 4, (), generator=generator))
            words = torch.randint(most, (count,), generator=generator).tolist()
            return scorer.forward([[*p[:1], *words, *p[1:]] for p in scorer.prompts])

        effects = drawn(scorer, "context", logits)
        mean = effects.mean(0)
        shape = law_shape(effects - mean, case)
        prediction, side = along(mean, shape, case)
        yield Fit("template", sentence, prediction, shape=shape, freedom=1, details={"side": side})


@dataclass(frozen=True)
class Dropout:
    """One side runs with dropout."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The median effect of dropout, and noise of the shape of its spread; nothing if old_logp
        is that of the model, because engines have no dropout.
        """
        trainer_may_be_odd = any(side == "old_logp" for side, _ in case.sides)
        if case.scorer is None or not trainer_may_be_odd or not _drops(case.scorer.model):
            return
        scorer = case.scorer
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            effects = drawn(scorer, "dropout", lambda generator: scorer.forward(train=True))
        middle = effects.median(0).values
        shape = law_shape(effects - middle, case)
        prediction, _ = along(middle, shape, case)
        yield Fit(
            "dropout",
            "the model behind old_logp runs with dropout",
            prediction,
            shape=shape,
            freedom=1,
            details={"side": "old_logp"},
        )


def _drops(model: nn.Module) -> bool:
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    rates += [getattr(m, "attention_dropout", 0.0) for m in model.modules()]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


@dataclass(frozen=True)
class Routes:
    """The routers of a mixture of experts choose other experts for some tokens."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Noise of the shape that a small noise in the routers makes."""
        if case.scorer is None:
            return
        scorer = case.scorer
        names = routers(scorer.model)
        if not names:
            return

        def logits(generator: torch.Generator) -> Tensor:
            def change(name: str, w: Tensor) -> Tensor | None:
                if name not in names:
                    return None
                noise = torch.randn(w.shape, generator=generator).to(w.device, w.dtype)
                return w * (1 + ROUTE * noise)

            with altered(scorer.model, change):
                return scorer.forward()

        effects = drawn(scorer, "routes", logits)
        yield Fit(
            "router",
            "differences are where a small change of the routers makes them",
            shape=law_shape(effects, case),
        )


def routers(model: nn.Module) -> set[str]:
    """The names of the weights that choose experts."""
    return {
        name
        for name, w in model.named_parameters()
        if w.dim() == 2 and {"gate", "router"} & set(name.split("."))
    }


@dataclass(frozen=True)
class AnyNoise:
    """Noise that is the same for all tokens: nothing is explained."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """A flat shape."""
        yield Fit(
            "not_explained",
            "differences are equally large at all tokens",
            shape=torch.ones(case.pairs.size, dtype=torch.float64),
        )
