"""One loss on stored tokens: `Outcome`. Every number comes from the gradient of `policy_loss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.inputs import DIFFERENTIATED, Inputs
from policyloss.loss import policy_loss
from policyloss.spec import LossSpec
from policyloss_lab.completions import BRANCHES, CODES, token_branches
from policyloss_lab.whatif.tokens import StoredTokens

RATIO_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
POSITIONS = 10  # parts of a sequence
SIGNS = ("advantage below 0", "no advantage", "advantage above 0")
LIMITED = ("upper", "lower", "dual", "dropped")


@dataclass(frozen=True)
class Outcome:
    """What one loss does to N tokens.

    gradient: `∂loss/∂logp_t`, `[N]`; a step of gradient descent raises a token where it is below 0.
    policy: the same without the pulls of the kl slot and without the entropy bonus. on_policy: the
    same as `policy` where current, old and rollout policy are one (every ratio and every correction
    weight 1), so that `importance` is what ratio, trust region and correction make of it. branch:
    `[N]`, the places in `BRANCHES`. metrics: those of the call.
    """

    name: str
    spec: LossSpec
    gradient: Tensor
    policy: Tensor
    on_policy: Tensor
    branch: Tensor
    metrics: Mapping[str, float]

    @property
    def importance(self) -> Tensor:
        """`policy / on_policy` of the tokens that have a gradient on policy, `[M]`."""
        moved = self.on_policy != 0
        return self.policy[moved] / self.on_policy[moved]

    @property
    def lost(self) -> float | None:
        """The share of the on-policy gradient, `Σ|on_policy|`, at tokens that now get exactly none.

        None where the policy term has no gradient at all.
        """
        mass = self.on_policy.abs()
        total = float(mass.sum())
        return float(mass[self.policy == 0].sum()) / total if total else None

    @property
    def effective(self) -> float | None:
        """The effective sample size, `(Σu)² / (M·Σu²)` with u the importance of M tokens: 1 where
        every token counts as it would on policy, 1/M where one token is all that counts.
        """
        u = self.importance
        squares = float((u * u).sum())
        return float(u.sum()) ** 2 / (u.shape[0] * squares) if squares else None

    @property
    def norm(self) -> float:
        """The length of the gradient by log-probabilities."""
        return float(self.gradient.norm())

    def share(self, *branches: str) -> float:
        """The share of trained tokens that took one of these branches."""
        trained = self.branch[self.branch != CODES["masked"]]
        codes = torch.tensor([CODES[name] for name in branches])
        return float(torch.isin(trained, codes).double().mean())

    def masses(self, tokens: StoredTokens) -> dict[str, dict[str, float]]:
        """Where the gradient is: shares of `Σ|gradient|` by sign of the advantage, by ratio to the
        old policy and by place in the sequence; and shares of `Σ|on_policy|` by branch, which say
        how much a bound or a rejection met.
        """
        out = {}
        for kind, (names, places) in buckets(tokens, self.branch).items():
            mass = (self.on_policy if kind == "branch" else self.gradient).abs()
            total = float(mass.sum()) or 1.0
            shares = [float(mass[places == i].sum()) / total for i in range(len(names))]
            pairs = zip(names, shares, strict=True)
            out[kind] = {name: x for name, x in pairs if x or kind != "branch"}
        return out


def buckets(tokens: StoredTokens, branch: Tensor) -> dict[str, tuple[tuple[str, ...], Tensor]]:
    """Ways to sort tokens: the names of the buckets, and the bucket of each token, `[N]`, -1 where
    it is not trained on.
    """
    t, mask = tokens.inputs, tokens.inputs.mask
    out: dict[str, tuple[tuple[str, ...], Tensor]] = {}
    out["sign"] = (SIGNS, t.advantages.sign().long() + 1)
    if t.old_logp is not None:
        edges = torch.tensor(RATIO_EDGES, dtype=torch.float64)
        low, high = (0.0, *RATIO_EDGES), (*RATIO_EDGES, float("inf"))
        names = tuple(f"{a:g}–{b:g}" for a, b in zip(low, high, strict=True))
        names = (f"< {RATIO_EDGES[0]:g}", *names[1:-1], f"> {RATIO_EDGES[-1]:g}")
        out["ratio"] = (names, torch.bucketize((t.logp - t.old_logp).exp(), edges))
    # The rank of each trained token among those of its sequence.
    assert t.cu_seqlens is not None
    row, counted = tokens.sequence, mask.double().cumsum(0) - mask.double()
    before = counted[t.cu_seqlens[:-1][row]]
    lengths = tokens.sums(mask.double()).clamp(min=1)[row]
    place = ((counted - before) * POSITIONS / lengths).long().clamp(max=POSITIONS - 1)
    step = 100 // POSITIONS
    parts = tuple(f"{step * i}–{step * (i + 1)} %" for i in range(POSITIONS))
    out["position"] = (parts, place)
    out["branch"] = (tuple(BRANCHES), branch)
    return {kind: (names, places.where(mask, -1)) for kind, (names, places) in out.items()}


def outcome_of(name: str, spec: LossSpec, tokens: StoredTokens) -> Outcome:
    """The loss on these tokens; an `InputError` says what it reads that was not stored."""
    t = tokens.inputs
    missing = [argument for argument in spec.reads if getattr(t, argument) is None]
    if missing:
        raise InputError(f"it reads {' and '.join(missing)}, which was not stored.")
    spec = spec.for_run(tokens.horizon or int(tokens.lengths.max()))
    bare = spec.replace(kl=None, entropy_coef=0.0)
    sampled = [x for x in ("old_logp", "rollout_logp") if getattr(t, x) is not None]
    gradient, metrics = _gradient(spec, t)
    policy = gradient if bare == spec else _gradient(bare, t)[0]
    on_policy, _ = _gradient(bare, t.replace(**dict.fromkeys(sampled, t.logp)))
    branch = token_branches(bare, **_arguments(t))
    return Outcome(name, spec, gradient, policy, on_policy, branch, metrics)


def _arguments(t: Inputs) -> dict[str, Any]:
    return {"old_logp": None, **t.tensors()}


def _gradient(spec: LossSpec, t: Inputs) -> tuple[Tensor, dict[str, float]]:
    """`∂loss/∂logp`, `[N]`, and the metrics of the call."""
    arguments, slope = _arguments(t), None
    for name in ("logp", *DIFFERENTIATED):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name].clone().requires_grad_()
    with torch.enable_grad():
        out = policy_loss(spec, **arguments, totals="local")
        if out.loss.requires_grad:
            (slope,) = torch.autograd.grad(out.loss, arguments["logp"], allow_unused=True)
    # A divergence from a teacher's distribution does not pass through the sampled token.
    return torch.zeros_like(t.logp) if slope is None else slope, out.metrics.compute()
