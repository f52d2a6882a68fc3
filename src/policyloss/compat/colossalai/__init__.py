"""ColossalChat's losses (the package `coati` of ColossalAI 0.5.0): `PolicyLoss` of
`coati.distributed.loss`, and in `models` the two older losses of `coati.models.loss`.

`install()` replaces them in the `coati` that can be imported. ColossalChat's consumers are Ray
actors, so it must run there: `ray.init(runtime_env={"worker_process_setup_hook":
"policyloss.compat.colossalai.install"})`.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Literal

from torch import Tensor, nn

from policyloss.arguments import check_choice
from policyloss.compat.arguments import drop_in, drop_in_with
from policyloss.compat.colossalai import models
from policyloss.compat.hooks import Patch
from policyloss.compat.parts import EPSILON, GivenKL, mask_or_all, ratio_mean_and_max, sample_mean
from policyloss.errors import InputError, SpecError
from policyloss.loss import policy_loss
from policyloss.parts.aggregate import TokenMean
from policyloss.parts.ratio import TokenRatio
from policyloss.parts.trust import Clip
from policyloss.spec import LossSpec
from policyloss.tokens import as_mask
from policyloss.totals import Totals

__all__ = ["PolicyLoss", "install", "models", "uninstall"]


class PolicyLoss(nn.Module):
    """ColossalChat's clipped loss plus `beta` times a KL penalty that the caller computed.

    loss_variation: "sample_level" is the mean over all rows, empty ones included, of their token
    means; "token_level" is the sum divided by `total_effective_tokens_in_batch`. adv: stored but
    not used (advantages are computed elsewhere). The log-ratio is not clamped. returns: "tuple" for
    `(loss, largest ratio)`, "loss" for the loss alone.
    """

    @drop_in
    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        beta: float = 0.01,
        loss_variation: str = "sample_level",
        adv: str = "GRPO",
        *,
        returns: Literal["tuple", "loss"] = "tuple",
    ) -> None:
        super().__init__()
        check_choice("loss_variation", loss_variation, ("sample_level", "token_level"), SpecError)
        check_choice("returns", returns, ("tuple", "loss"), SpecError)
        self.clip_eps_low = clip_eps_low
        self.clip_eps_high = clip_eps_high
        self.beta = beta
        self.loss_variation = loss_variation
        self.adv = adv
        self.returns = returns

    @drop_in_with(per_sequence=("loss_mask",))
    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        per_token_kl: Tensor | None,
        action_mask: Tensor | None = None,
        loss_mask: Tensor | None = None,
        total_effective_tokens_in_batch: Tensor | float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss and the largest ratio, or the loss alone.

        log_probs, old_log_probs, per_token_kl (not read if beta is 0; its gradient is kept),
        action_mask: `[B, T]`. advantages: `[B, T]` or `[B, 1]`. loss_mask: `[B]`, the samples to
        learn from. total_effective_tokens_in_batch: the count of the optimizer step.
        """
        mask = mask_or_all(action_mask, log_probs)
        learned = as_mask(mask, log_probs)
        if loss_mask is not None:
            learned = learned & as_mask(loss_mask, log_probs[:, 0], "loss_mask").unsqueeze(-1)
        by_sample = self.loss_variation == "sample_level"
        spec = LossSpec(
            TokenRatio(log_clamp=None),
            Clip(self.clip_eps_low, self.clip_eps_high),
            kl=self._kl(per_token_kl),
            aggregate=sample_mean(mask.dtype) if by_sample else TokenMean(),
        )
        count: Tensor | float = log_probs.shape[0]
        if not by_sample:
            if total_effective_tokens_in_batch is None:
                raise InputError(
                    'total_effective_tokens_in_batch was not given; loss_variation="token_level" '
                    "divides by it."
                )
            count = total_effective_tokens_in_batch + EPSILON
        totals = Totals(count, count)
        loss = policy_loss(spec, log_probs, old_log_probs, advantages, learned, totals=totals).loss
        if self.returns == "loss":
            return loss
        return loss, ratio_mean_and_max(log_probs, old_log_probs, advantages, mask)[1]

    def _kl(self, per_token_kl: Tensor | None) -> GivenKL | None:
        if self.beta == 0:
            return None
        if not isinstance(per_token_kl, Tensor):
            raise InputError(
                f"per_token_kl must be a [B, T] tensor when beta is not 0 (it is {self.beta!r}), "
                f"got {per_token_kl!r}."
            )
        return GivenKL(per_token_kl, self.beta)


_OURS: dict[str, tuple[Any, ...]] = {
    "coati.distributed.loss": (PolicyLoss,),
    "coati.models.loss": (models.PolicyLoss, models.ValueLoss),
}
_patch = Patch("coati")


def install() -> list[str]:
    """Replace coati's losses in every module of coati, also in modules imported later; returns the
    classes that were replaced.

    A module of coati that cannot be imported is left out. An error is raised if none can be
    imported, or if a loss takes unknown arguments. A second call changes nothing; `uninstall`
    undoes it.
    """
    if not _patch.pairs:
        _patch.pairs.extend([pair for name in _OURS for pair in _pairs(name)])
    if not _patch.pairs:
        raise ModuleNotFoundError(
            f"none of {', '.join(_OURS)} can be imported; put ColossalChat's coati on the path."
        )
    _patch.apply()
    return [f"{old.__module__}.{old.__name__}" for old, _ in _patch.pairs]


def uninstall() -> None:
    """Restore coati's losses."""
    _patch.undo()


def _pairs(module_name: str) -> list[tuple[Any, Any]]:
    try:
        module = import_module(module_name)
    except ImportError:
        return []
    pairs = [(getattr(module, ours.__name__), ours) for ours in _OURS[module_name]]
    for theirs, ours in pairs:
        for method in ("__init__", "forward"):
            expected = [
                name
                for name, p in inspect.signature(getattr(ours, method)).parameters.items()
                if p.kind is not p.KEYWORD_ONLY
            ]
            there = list(inspect.signature(getattr(theirs, method)).parameters)
            if there != expected:
                raise SpecError(
                    f"{module_name}.{ours.__name__}.{method} takes ({', '.join(there)}), not "
                    f"({', '.join(expected)}) as in ColossalChat 0.5.0."
                )
    return pairs
