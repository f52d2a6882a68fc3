"""Hypotheses that predict where differences are large, and not which way they go: weights of
another step, another context, dropout, another route through the experts.

Each runs the model several times with something drawn at random. The spread over the draws is the
shape of its noise. From pairs alone the shapes are guesses: `1 - p` for weights, and the same with
a decay over the row for a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policyloss.doctor.criterion import QUIET
from policyloss.doctor.forward import Scorer, altered
from policyloss.doctor.hypothesis import Case, Fit

DRAWS = 8
STEADY = 0.3
CHANGE = 0.02  # of the root mean square of a weight matrix, in a draw
ROUTE = 2.0**-7  # the relative noise of a router's weights in a draw
DECAYS = (2.0, 4.0, 8.0, 16.0, 32.0)


def spread(
    scorer: Scorer, name: str, logits: Callable[[torch.Generator], Tensor]
) -> tuple[Tensor, Tensor]:
    """The mean and the root mean square of the effects of several draws."""
    generator = torch.Generator().manual_seed(0)
    effects = torch.stack(
        [scorer.effect(f"{name} {k}", lambda: logits(generator)) for k in range(DRAWS)]
    )
    return effects.mean(0), effects.square().mean(0).sqrt()


def law_shape(size: Tensor, case: Case) -> Tensor:
    """The spread of a few draws, steadied by `1 - p`: `sqrt(spread² + (share·(1 - p))²)`, with
    both of mean 1.
    """
    noise = case.pairs.shape
    size = size / size.mean().clamp(min=1e-12)
    noise = STEADY * noise / noise.mean()
    return (size.square() + noise.square()).sqrt().clamp(min=QUIET)


@dataclass(frozen=True)
class OtherWeights:
    """The weights of the two sides differ: those of the engine are some steps old."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Noise of the shape that a random change of all weights makes."""
        sentence = "differences are as large as those of other weights would be, token by token"
        if case.scorer is None:
            yield Fit("stale_weights", sentence, shape=case.pairs.shape)
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

        _, size = spread(scorer, "weights", logits)
        yield Fit("stale_weights", sentence, shape=law_shape(size, case))


def matrices_of(model: nn.Module) -> set[str]:
    """The names of the weights that are matrices."""
    return {name for name, w in model.named_parameters() if w.dim() >= 2}


@dataclass(frozen=True)
class OtherContext:
    """One side saw another prompt, of which nothing more is known."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Noise of the shape that spoiled prompts make; without a model, noise that decays."""
        sentence = "differences are where another prompt would make them, and fade along the row"
        if case.scorer is None:
            for decay in DECAYS:
                fade = torch.exp(-case.pairs.rank / decay)
                yield Fit(
                    "template",
                    sentence,
                    shape=(case.pairs.shape * fade).clamp(min=QUIET**2),
                    freedom=1,
                    details={"tokens": decay},
                )
            return
        scorer = case.scorer
        if not all(scorer.prompts):
            return
        most = scorer.logits.shape[1]

        def logits(generator: torch.Generator) -> Tensor:
            def spoiled(prompt: list[int]) -> list[int]:
                where = int(torch.randint(len(prompt), (), generator=generator))
                token = int(torch.randint(most, (), generator=generator))
                return [*prompt[:where], token, *prompt[where:]]

            return scorer.forward([spoiled(p) for p in scorer.prompts])

        _, size = spread(scorer, "context", logits)
        yield Fit("template", sentence, shape=law_shape(size, case))


@dataclass(frozen=True)
class Dropout:
    """One side runs with dropout."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The mean effect of dropout, and noise of the shape of its spread."""
        if case.scorer is None or not _drops(case.scorer.model):
            return
        scorer = case.scorer
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            mean, size = spread(scorer, "dropout", lambda generator: scorer.forward(train=True))
        for side, sign in case.sides:
            yield Fit(
                "dropout",
                f"the model behind {side} runs with dropout",
                sign * mean,
                shape=law_shape(size, case),
                details={"side": side},
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

        _, size = spread(scorer, "routes", logits)
        yield Fit(
            "router",
            "differences are where a small change of the routers makes them",
            shape=law_shape(size, case),
        )


def routers(model: nn.Module) -> set[str]:
    """The names of the weights that choose experts."""
    return {
        name
        for name, w in model.named_parameters()
        if w.dim() == 2 and name.split(".")[-2] in ("gate", "router")
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
