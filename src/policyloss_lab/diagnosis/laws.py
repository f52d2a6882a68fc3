"""Laws of noise: they predict where differences are large, and not their sign.

Each law runs the model several times with a random change: of all weights, of the prompt, of
dropout, of the routers. The typical size of the effect is the shape of its noise; if the mean
effect is not 0, a multiple of it is predicted. Many causes have one shape: quantised weights, a
quantised cache, another RoPE base and stale weights all look like a change of the weights. So a law
names no cause; a verdict that is not explained lists the laws that fit as "consistent with".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from policyloss_lab.diagnosis.forward import Scorer, altered
from policyloss_lab.diagnosis.hypothesis import Case, Fit
from policyloss_lab.diagnosis.pairs import QUIET

DRAWS = 8
STEADY = 0.3
CHANGE = 0.02  # noise of a draw, relative to the root mean square of a matrix
ROUTE = 2.0**-5  # noise of a draw, relative to each weight of a router
DECAYS = (2.0, 4.0, 8.0, 16.0, 32.0)
NOISE, WEIGHTS, PROMPT, DROPOUT, ROUTER = "noise", "weights", "prompt", "dropout", "router"
NEXT = {  # the measurement that shows a law for certain
    DROPOUT: "Score the batch twice with the trainer's own code: two results mean dropout.",
    ROUTER: "Print the experts that both sides choose for every token of one sequence.",
}


def fit_laws(case: Case) -> Iterator[Fit]:
    """The law of each kind, flat noise first; its name takes the place of a cause."""
    flat = torch.ones(case.pairs.size, dtype=torch.float64)
    yield Fit(NOISE, "noise of one size at all tokens", shape=flat)
    if case.scorer is None:
        sentence = "a change inside the model: other weights or formats, dropout, an adapter"
        yield Fit(WEIGHTS, sentence, shape=case.pairs.shape)
        if case.pairs.later is not None:
            step = (case.pairs.later - case.pairs.trainer)[None]
            sentence = "weights of another step: differences are large where the trainer's step is"
            yield Fit(WEIGHTS, sentence, shape=law_shape(step, case))
        for decay in DECAYS:
            fade = (case.pairs.shape * torch.exp(-case.pairs.rank / decay)).clamp(min=QUIET**2)
            yield Fit(PROMPT, "another prompt: differences fade", shape=fade, freedom=1)
        return
    yield from _laws_of_model(case, case.scorer)


def _laws_of_model(case: Case, scorer: Scorer) -> Iterator[Fit]:
    matrices = {name for name, w in scorer.model.named_parameters() if w.dim() >= 2}
    effects = random_weights(
        scorer, matrices, lambda w, noise: w + CHANGE * w.square().mean().sqrt() * noise
    )
    sentence = (
        "another set of weights, among others: stale or quantised weights, a quantised cache, "
        "another attention"
    )
    yield Fit(WEIGHTS, sentence, shape=law_shape(effects, case))
    if all(scorer.prompts):

        def reworded(generator: torch.Generator) -> Tensor:
            count = int(torch.randint(1, 4, (), generator=generator))
            words = torch.randint(scorer.logits.shape[1], (count,), generator=generator).tolist()
            return scorer.forward([[*p[:1], *words, *p[1:]] for p in scorer.prompts])

        effects = drawn(scorer, "context", reworded)
        shape = law_shape(effects - effects.mean(0), case)
        prediction = along(effects.mean(0), shape, case)
        yield Fit(PROMPT, "another prompt or template", prediction, shape, freedom=1)
    # Engines have no dropout: it can only be in the trainer, if old_logp is not the model's.
    if any(side == "old_logp" for side, _ in case.sides) and _drops(scorer.model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            effects = drawn(scorer, "dropout", lambda generator: scorer.forward(train=True))
        middle = effects.median(0).values
        shape = law_shape(effects - middle, case)
        sentence = "dropout behind old_logp: model.eval() was not called"
        yield Fit(DROPOUT, sentence, along(middle, shape, case), shape, freedom=1)
    if names := routers(scorer.model):
        effects = random_weights(scorer, names, lambda w, noise: w * (1 + ROUTE * noise))
        yield Fit(ROUTER, "routers that choose other experts", shape=law_shape(effects, case))


def drawn(scorer: Scorer, name: str, logits: Callable[[torch.Generator], Tensor]) -> Tensor:
    """The effects of several draws, `[draws, n]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack(
        [scorer.effect(f"{name} {k}", lambda: logits(generator)) for k in range(DRAWS)]
    )


def random_weights(
    scorer: Scorer, names: set[str], perturb: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The effects of `perturb(weight, noise)` in place of the named weights, `[draws, n]`."""

    def logits(generator: torch.Generator) -> Tensor:
        def change(name: str, w: Tensor) -> Tensor | None:
            if name not in names:
                return None
            return perturb(w, torch.randn(w.shape, generator=generator).to(w.device, w.dtype))

        with altered(scorer.model, change):
            return scorer.forward()

    return drawn(scorer, f"{len(names)} weights", logits)


def law_shape(effects: Tensor, case: Case) -> Tensor:
    """The typical size over draws, `(mean √|e|)²`, smoothed by `1 - p`: `sqrt(size² + (0.3·h)²)`,
    with size and h scaled to mean 1. The roots keep a rare large effect from dominating.
    """
    size = effects.abs().sqrt().mean(0).square()
    size = size / size.mean().clamp(min=1e-12)
    noise = STEADY * case.pairs.shape / case.pairs.shape.mean()
    return (size.square() + noise.square()).sqrt().clamp(min=QUIET)


def along(mean: Tensor, shape: Tensor, case: Case) -> Tensor:
    """`b·mean` with the least-squares b."""
    weight = mean / shape.square()
    slope = float((weight * case.pairs.difference).sum() / (weight * mean).sum().clamp(min=1e-12))
    return slope * mean


def _drops(model: nn.Module) -> bool:
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    rates += [getattr(m, "attention_dropout", 0.0) for m in model.modules()]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def routers(model: nn.Module) -> set[str]:
    """The names of the weights that choose experts."""
    return {
        name
        for name, w in model.named_parameters()
        if w.dim() == 2 and {"gate", "router"} & set(name.split("."))
    }
