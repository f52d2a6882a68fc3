"""The checks of `check_loss` that find a wrong sign, side or stop-gradient.

Each computes the loss of single-token sequences at chosen log-ratios, and returns a problem in
words, or "".
"""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.check.batch import Batch
from policyloss.inputs import Inputs
from policyloss.loss import corrected_tokens, token_losses, with_ratio
from policyloss.parts.aggregate import weight_factors
from policyloss.spec import LossSpec
from policyloss.tokens import Tokens

# Log-ratios at which a limit may bind. They go further along the advantage, to find a limit that
# is wide on that side.
AGAINST = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5)
ALONG = (*AGAINST, 3.0)
# Equally many good and bad tokens, of three sizes, at three log-probabilities.
ADVANTAGES = torch.tensor([0.3, 1.0, 2.5, -0.3, -1.0, -2.5]).double().repeat_interleave(3)
ANCHOR = torch.tensor([-4.0, -4.5, -5.0]).double().repeat(6)


def _tokens(
    advantages: Tensor, log_ratio: Tensor | float, log_weight: Tensor | float = 0
) -> Tokens:
    """Tokens that are each a sequence, `[n, 1]`.

    log_ratio: of the current policy to every other. log_weight: of the trainer to the engine.
    """
    anchor = ANCHOR[: len(advantages)].unsqueeze(1)
    old, ones, rows = anchor + log_weight, torch.ones_like(anchor), torch.arange(len(anchor))
    logp = (old + log_ratio).requires_grad_()
    others = (old, anchor, old, old, ones, advantages.unsqueeze(1), ones, ones.bool(), rows // 2)
    return Inputs(**Batch(logp, *others, torch.ones_like(rows), width=1).kwargs).tokens()


def _losses(spec: LossSpec, advantages: Tensor, log_ratio: Tensor | float) -> tuple[Tensor, Tensor]:
    """The loss of each token, and its derivative by logp, `[n]`, before weights and averages."""
    t = _tokens(advantages, log_ratio)
    loss = token_losses(spec.replace(entropy_coef=0.0), with_ratio(spec, t), None).loss
    logp = t.read("logp")
    (gradient,) = torch.autograd.grad(loss.sum() + 0 * logp.sum(), logp)
    return loss.detach()[:, 0], gradient[:, 0]


def _pulls(spec: LossSpec, shift: float) -> tuple[Tensor, Tensor]:
    """How hard the surrogate alone pulls each token: `−A·∂loss/∂logp`, positive towards its
    advantage; and its loss. Both `[2, n]`, row 0 with A > 0.

    shift: the log-ratio in the direction of the advantage.
    """
    loss, gradient = _losses(
        spec.replace(kl=None), ADVANTAGES, shift * ADVANTAGES.sign().unsqueeze(1)
    )
    return (-ADVANTAGES * gradient).view(2, -1), loss.view(2, -1)


def direction(spec: LossSpec, batch: Batch) -> str:
    """At ratio 1 a good token must become more likely and a bad one less; no limit binds yet."""
    at_one, away = _pulls(spec, 0.0)[0], [_pulls(spec, -distance)[0] for distance in AGAINST]
    for row, sign in enumerate(("positive", "negative")):
        pull = at_one[row]
        if (pull < 0).any():
            more = "less" if sign == "positive" else "more"
            return (
                f"at ratio 1, a step makes a token with a {sign} advantage {more} likely: is a "
                "sign wrong, or |advantages| used?"
            )
        if not pull.any() and any(x[row].any() for x in away):
            return (
                f"at ratio 1, a token with a {sign} advantage gets no gradient, and elsewhere it "
                "does: a limit binds there already; are its bounds swapped?"
            )
    return ""


def pessimism(spec: LossSpec, batch: Batch) -> str:
    """A limit must not trap a token that moved *against* its advantage.

    (A dual clip traps bad tokens there. A loss may also drop far-off tokens: their loss is 0.)
    """
    at_one, against = _pulls(spec, 0.0)[0], [_pulls(spec, -distance) for distance in AGAINST]
    is_held = at_one[0].any() and any(
        ((pull == 0) & (loss != 0))[0].any() for pull, loss in against
    )
    is_stopped = torch.stack([(pull == 0).all(1) for pull, _ in against]).any(0).all()
    if is_held or (is_stopped and all(_pulls(spec, x)[0].any(1).all() for x in ALONG)):
        return (
            "tokens that moved against their advantage get no gradient: a clip must take the worse "
            "of the two losses, torch.maximum(-A * ratio, -A * ratio.clamp(low, high))"
        )
    return ""


def detach(spec: LossSpec, batch: Batch) -> str:
    """The weights of corrections and of the average are numbers, not functions of logp."""
    t, corrected = corrected_tokens(spec, _tokens(ADVANTAGES, 0.0), None)
    t = with_ratio(spec, t).with_totals(None)
    weights = {"correction": corrected.weight, "aggregate": weight_factors(spec.aggregate, t)[0]}
    for slot, weight in weights.items():
        if weight is not None and weight.requires_grad:
            return (
                f"the {slot} part returns a weight that carries a gradient (no detach), which adds "
                "to that of the loss: return weight.detach()"
            )
    return ""


def importance(spec: LossSpec, batch: Batch) -> str:
    """A weight must not fall where a token is more likely under the policy than its sampler."""
    log_weight = torch.tensor([-0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25]).double().unsqueeze(1)
    t, corrected = corrected_tokens(spec, _tokens(torch.ones(7).double(), 0.0, log_weight), None)
    falls = False
    if corrected.weight is not None:
        kept = t.mask if corrected.keep is None else t.mask & corrected.keep
        falls = bool((corrected.weight.detach()[kept].diff() < -1e-9).any())
    at_one = _pulls(spec, 0.0)[0]
    ratio = torch.tensor([[0.1], [-0.1]]).double().exp()
    inverse = torch.allclose(_pulls(spec, 0.1)[0] * ratio, at_one, rtol=1e-9)
    if falls or (inverse and at_one.any()):
        return (
            "the importance weight is upside down: it falls where the token became more likely; it "
            "is exp(old_logp - rollout_logp), or exp(logp - old_logp) for the ratio"
        )
    return ""


def anchor(spec: LossSpec, batch: Batch) -> str:
    """Without an advantage, a token more likely than its anchor must not become more so.

    (k1 has the same gradient on both sides, and other estimators change sign near the anchor.)
    """
    pulls = torch.stack([_losses(spec, 0 * ADVANTAGES, x)[1] for x in ALONG])
    if ((pulls <= 0).all(0) & (pulls < 0).any(0)).any():
        return (
            "the KL pushes the policy away from its anchor: a token more likely than there becomes "
            "more likely still; is its sign wrong (k1 is logp - ref_logp)?"
        )
    return ""
