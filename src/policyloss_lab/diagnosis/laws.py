"""Laws of noise: hypotheses that predict where differences are large but not their sign. The laws
are weights of another step, another context, dropout, and another route through the experts.

Each law runs the model several times with a random change. The typical size of the effect is the
shape of its noise; if the mean effect is not 0, a multiple of it is predicted. Pairs alone cannot
name one of these laws, because half precision, dropout, an adapter and stale weights all have the
shape `1 - p`. A step of the trainer (both `logp` and `old_logp`) shows the effect of stale weights.
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
CHANGE = 0.02  # noise of a draw, relative to the root mean square of a matrix
ROUTE = 2.0**-5  # noise of a draw, relative to each weight of a router
SUPPLY = "model=, ids= and prompts= tell which"
DECAYS = (2.0, 4.0, 8.0, 16.0, 32.0)


def drawn(scorer: Scorer, name: str, logits: Callable[[torch.Generator], Tensor]) -> Tensor:
    """The effects of several draws, `[draws, n]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack(
        [scorer.effect(f"{name} {k}", lambda: logits(generator)) for k in range(DRAWS)]
    )


def random_weights(
    scorer: Scorer, names: set[str], perturb: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[torch.Generator], Tensor]:
    """The logits of the model with `perturb(weight, noise)` in place of the named weights."""

    def logits(generator: torch.Generator) -> Tensor:
        def change(name: str, w: Tensor) -> Tensor | None:
            if name not in names:
                return None
            return perturb(w, torch.randn(w.shape, generator=generator).to(w.device, w.dtype))

        with altered(scorer.model, change):
            return scorer.forward()

    return logits


def law_shape(effects: Tensor, case: Case) -> Tensor:
    """The typical size over draws, `(mean √|e|)²`, smoothed by `1 - p`: `sqrt(size² + (0.3·h)²)`,
    with size and h scaled to mean 1. The roots keep a rare large effect from dominating.
    """
    size = effects.abs().sqrt().mean(0).square()
    size = size / size.mean().clamp(min=1e-12)
    noise = STEADY * case.pairs.shape / case.pairs.shape.mean()
    return (size.square() + noise.square()).sqrt().clamp(min=QUIET)


def along(mean: Tensor, shape: Tensor, case: Case) -> tuple[Tensor, str]:
    """`b·mean` with the least-squares b, and the side that the sign of b belongs to."""
    weight = mean / shape.square()
    slope = float((weight * case.pairs.difference).sum() / (weight * mean).sum().clamp(min=1e-12))
    return slope * mean, "rollout_logp" if slope > 0 else "old_logp"


@dataclass(frozen=True)
class OtherWeights:
    """The weights of the engine are some steps older than the trainer's."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Noise of the shape of a random change of all matrices."""
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
        matrices = {name for name, w in case.scorer.model.named_parameters() if w.dim() >= 2}
        logits = random_weights(
            case.scorer, matrices, lambda w, noise: w + CHANGE * w.square().mean().sqrt() * noise
        )
        effects = drawn(case.scorer, "weights", logits)
        yield Fit("stale_weights", sentence, shape=law_shape(effects, case))


@dataclass(frozen=True)
class OtherContext:
    """One side saw another, unknown prompt."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The mean effect of random words in the prompts, and noise of its spread; without a model,
        noise that decays.
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
        """The median effect of dropout, and noise of its spread; no fit if the model agrees with
        old_logp, because engines have no dropout.
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
        """Noise of the shape of a small random change of the routers."""
        if case.scorer is None or not (names := routers(case.scorer.model)):
            return
        logits = random_weights(case.scorer, names, lambda w, noise: w * (1 + ROUTE * noise))
        effects = drawn(case.scorer, "routes", logits)
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
    """Noise of equal size at all tokens: nothing is explained."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """A flat shape."""
        yield Fit(
            "not_explained",
            "differences are equally large at all tokens",
            shape=torch.ones(case.pairs.size, dtype=torch.float64),
        )
