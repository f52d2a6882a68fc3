"""Any loss of this library as a policy loss of SkyRL.

SkyRL divides the advantages by the denominator of `loss_reduction` before the step is cut into
micro-batches, and sums the losses. So a loss here is a sum over tokens, and it must be a multiple
of the advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.catalogue import AnyLoss, as_spec, presets
from policyloss.compat.engines import PREFIX, fitting_spec, means
from policyloss.compat.hooks import default_of, warn_once
from policyloss.compat.parts import mask_or_all
from policyloss.errors import SpecError
from policyloss.loss import policy_loss
from policyloss.parts import aggregate
from policyloss.spec import LossSpec

__all__ = ["SkyRLLoss", "register"]

PPO_UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils"
REDUCTIONS: dict[type, str] = {
    aggregate.TokenMean: "token_mean",
    aggregate.SeqMeanTokenMean: "sequence_mean",
    aggregate.SeqMeanTokenSumNorm: "seq_mean_token_sum_norm",
    aggregate.PromptMean: "prompt_mean",
}
OWN_SETTINGS = ("eps_clip_low", "eps_clip_high", "clip_ratio_c")
CORRECTIONS = (
    *("tis_ratio_type", "sequence_mask_metric"),
    *("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
    *("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
)


def register(specs: Mapping[str, AnyLoss] | None = None) -> tuple[str, ...]:
    """Register every preset that SkyRL can run, and `specs` by their keys, in SkyRL as
    "policyloss/<name>"; returns those names.

    Call it where `trainer.algorithm.policy_loss_type` is validated; SkyRL sends the losses to its
    workers. An error names the reason if SkyRL cannot run one of `specs`.
    """
    losses = {name: SkyRLLoss(name, as_spec(spec)) for name, spec in (specs or {}).items()}
    for name in presets():
        try:
            losses.setdefault(name, SkyRLLoss(name, as_spec(name)))
        except SpecError:
            continue
    registry = import_module(PPO_UTILS).PolicyLossRegistry
    for name, loss in losses.items():
        registry.register(f"{PREFIX}{name}", loss)
    return tuple(f"{PREFIX}{name}" for name in losses)


@dataclass(frozen=True)
class SkyRLLoss:
    """`spec` with the arguments and results of a policy loss of SkyRL. It can be pickled."""

    name: str
    spec: LossSpec

    def __post_init__(self) -> None:
        # SkyRL itself divides by the groups of a PromptMean.
        fitting_spec("SkyRL", self.spec, ("old_logp", "rollout_logp", "group_ids"), REDUCTIONS)
        if not self.spec.follows_advantage:
            raise SpecError(
                f"SkyRL's denominators are in the advantages, but {self.name} is not a multiple of "
                f"the advantage (trust={self.spec.trust!r}, kl={self.spec.kl!r})."
            )

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The sum over the tokens of a micro-batch, `[B, T]`, and the means of its metrics."""
        self._check(config)
        total = self.spec.replace(aggregate=aggregate.TokenSum())
        out = policy_loss(
            total,
            log_probs,
            old_log_probs,
            advantages,
            mask_or_all(loss_mask, log_probs),
            rollout_logp=rollout_logprobs,
            totals="local",
        )
        return out.loss, {key: x.item() for key, x in means(out.metrics).items()}

    def _check(self, config: Any) -> None:
        """Raise if the settings contradict the spec, and warn of those that it does not read."""
        wanted = REDUCTIONS[type(self.spec.aggregate)]
        if config.loss_reduction != wanted:
            raise SpecError(
                f"{PREFIX}{self.name} is averaged by {self.spec.aggregate!r}, but SkyRL divides by "
                f"loss_reduction={config.loss_reduction!r}; set "
                f"trainer.algorithm.loss_reduction={wanted}."
            )
        horizon = getattr(self.spec.aggregate, "horizon", None)
        if horizon is not None and horizon != config.max_seq_len:
            raise SpecError(
                f"{PREFIX}{self.name} divides by a horizon of {horizon}, but SkyRL by "
                f"max_seq_len={config.max_seq_len}; set trainer.algorithm.max_seq_len={horizon}."
            )
        correction = config.off_policy_correction
        if used := [name for name in CORRECTIONS if getattr(correction, name) is not None]:
            raise SpecError(
                f"{PREFIX}{self.name} corrects by its spec ({self.spec.correction!r}), so SkyRL's "
                f"off_policy_correction.{used[0]}={getattr(correction, used[0])!r} has no effect; "
                "unset it and use spec.replace(correction=…)."
            )
        for name in OWN_SETTINGS:
            value = getattr(config, name)
            if value != default_of(config, name, value):
                warn_once(f"{PREFIX}{self.name} has its own bounds; {name}={value} is not read.")
