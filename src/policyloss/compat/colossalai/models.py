"""`coati.models.loss` of ColossalChat 0.5.0: the older PPO losses of actor and critic."""

from __future__ import annotations

from torch import Tensor, nn

from policyloss.compat.arguments import drop_in
from policyloss.compat.parts import mask_or_all, ratio_mean_and_max, sample_mean
from policyloss.errors import SpecError
from policyloss.loss import policy_loss
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.parts.ratio import TokenRatio
from policyloss.parts.trust import Clip
from policyloss.spec import LossSpec
from policyloss.totals import Totals
from policyloss.value import value_loss

LOG_10 = 2.302585092994046  # the ratio is at most 10


class PolicyLoss(nn.Module):
    """ColossalChat's older PPO loss: ratios up to 10, averaged over all rows of token means."""

    @drop_in
    def __init__(self, clip_eps: float = 0.2, skip_threshold: float = 20.0) -> None:
        super().__init__()
        self.clip_eps = clip_eps
        self.skip_threshold = skip_threshold

    @property
    def spec(self) -> LossSpec:
        """The loss as a `LossSpec`, for example for `policyloss.explain`."""
        ratio = TokenRatio(log_clamp=(None, LOG_10))
        return LossSpec(ratio, Clip(self.clip_eps, self.clip_eps), aggregate=SeqMeanTokenMean())

    @drop_in
    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
    ) -> tuple[Tensor, bool, Tensor]:
        """`(loss, skip, largest ratio)`. skip: whether the mean ratio, with 1 at masked tokens, is
        above skip_threshold. All tensors are `[B, T]`.
        """
        mask, rows = mask_or_all(action_mask, log_probs), log_probs.shape[0]
        spec = self.spec.replace(aggregate=sample_mean(mask.dtype))
        tensors = (log_probs, old_log_probs, advantages, mask)
        loss = policy_loss(spec, *tensors, totals=Totals(rows, rows)).loss
        mean, largest = ratio_mean_and_max(log_probs, old_log_probs, advantages, mask)
        return loss, bool(mean > self.skip_threshold), largest


class ValueLoss(nn.Module):
    """ColossalChat's older value loss: half the larger squared error, clipped or not."""

    @drop_in
    def __init__(self, clip_eps: float = 0.2) -> None:
        super().__init__()
        if not clip_eps > 0:
            raise SpecError(f"clip_eps must be greater than 0, got {clip_eps!r}.")
        self.clip_eps = clip_eps

    @drop_in
    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        advantage: Tensor,
        action_mask: Tensor | None = None,
    ) -> Tensor:
        """The loss, 0-dim; the returns are advantage + old_values. All tensors are `[B, T]`. A
        batch without valid tokens has the loss 0 (ColossalChat: NaN).
        """
        mask, returns = mask_or_all(action_mask, values), advantage + old_values
        return value_loss(values, returns, old_values, mask, self.clip_eps, totals="local").loss
