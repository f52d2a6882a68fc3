"""Coefficients that follow a target from step to step.

A controller is a value. Its fields are its whole state, plain numbers that JSON keeps exactly:
`json.dumps(dataclasses.asdict(controller))` saves it, `AdaptiveKL(**json.loads(text))` restores it.
`after(…)` returns the controller of the next step. Give it numbers of the whole step, over all
micro-batches and ranks (`step.reduce_metrics()`), so that every rank computes the same coefficient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from policyloss.arguments import check_number
from policyloss.parts.validate import Finite, LowerBound, Part, bounds, not_below

_Positive = Annotated[float, bounds(above=0, finite=True)]


@dataclass(frozen=True)
class AdaptiveKL(Part):
    """A KL coefficient that adapts from step to step, to hold the KL near `target`.

    `controller = controller.after(kl, sequences)` returns a new controller, with the coefficient
    `coef·(1 + clip(kl / target − 1, ±0.2)·sequences / horizon)`. kl: the mean KL of the step, in
    the unit of `target`, per token or per sequence. sequences: the number of sequences of the step.
    Use `coef` in `KL(…, coef=)` or `kl_in_reward(…, coef=)`.
    Source: Ziegler et al., arXiv 1909.08593; AdaptiveKLController of verl, OpenRLHF and SkyRL.
    """

    coef: LowerBound
    target: _Positive
    horizon: _Positive = 10_000.0

    def after(self, kl: float, sequences: float) -> AdaptiveKL:
        """The controller after a step with this mean KL and number of sequences."""
        # 5·horizon sequences could lower the coefficient to 0, where it would stay.
        hint = "horizon is too small for so many sequences in a step."
        check_number("sequences", sequences, least=0, below=5 * self.horizon, hint=hint)
        error = check_number("kl", float(kl)) / self.target - 1
        change = min(max(error, -0.2), 0.2) * sequences / self.horizon
        return replace(self, coef=self.coef * (1 + change))


@dataclass(frozen=True)
class AdaptiveEntropy(Part):
    """The coefficient of an entropy bonus that keeps the entropy from falling below `target`.

    `controller = controller.after(entropy)` returns a new controller: its `coef` is larger by
    `delta` if the entropy was at most the target, else smaller, within [least, most]. Use `applied`
    as the spec's `entropy_coef`: `coef` if the entropy is at most the target; 0 above it and before
    the first step. entropy: that of the last step; None before the first.
    Source: Skywork-OR1, arXiv 2505.22312; defaults as in TRL's use_adaptive_entropy.
    """

    coef: LowerBound = 0.0
    target: Finite = 0.2
    delta: _Positive = 0.005
    least: LowerBound = 0.0
    most: Annotated[LowerBound, not_below("least")] = 1.0
    entropy: Finite | None = None

    @property
    def applied(self) -> float:
        """The coefficient to use in the next step."""
        return self.coef if self.entropy is not None and self.entropy <= self.target else 0.0

    def after(self, entropy: float) -> AdaptiveEntropy:
        """A new controller, updated after a step with this mean entropy."""
        entropy = check_number("entropy", float(entropy), finite=True)
        rise = self.delta if entropy <= self.target else -self.delta
        coef = min(max(self.coef + rise, self.least), self.most)
        return replace(self, coef=coef, entropy=entropy)
