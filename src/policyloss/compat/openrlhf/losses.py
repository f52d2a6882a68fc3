"""OpenRLHF's `PolicyLoss`, `ValueLoss` and `aggregate_loss` (openrlhf/models/loss.py) and
`compute_approx_kl` (openrlhf/models/utils.py), with the signatures, return values and numbers of
0.11.0 to 0.11.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from policyloss.arguments import check_choice, check_like
from policyloss.compat.arguments import at_least, drop_in
from policyloss.compat.openrlhf.corrections import (
    CURRENT,
    NEWER_DEFAULTS,
    VLLM_TYPES,
    Gate,
    Threshold,
    capped_weight,
    filter_ratio,
    mean_or_zero,
    older_by_position,
    release_of,
)
from policyloss.compat.parts import as_count, mask_or_all, sample_mean, union_share
from policyloss.errors import InputError, SpecError
from policyloss.functional.kl import estimate, with_gradient
from policyloss.functional.masking import bound, difference
from policyloss.inputs import Inputs
from policyloss.loss import aggregate_tokens, policy_loss
from policyloss.parts.aggregate import SeqMeanTokenMean, TokenMean
from policyloss.parts.ratio import SequenceRatio, TokenRatio
from policyloss.parts.trust import Clip
from policyloss.records import Record, Stat
from policyloss.spec import LossSpec
from policyloss.totals import Totals
from policyloss.value import value_loss

KL_CLAMP = 10.0  # of an estimate of the KL, and of the weight on its unbiased gradient


class Average(NamedTuple):
    """OpenRLHF's mean over tokens, or over samples of their token means, in one call."""

    token_level: bool
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None

    def mask(
        self, like: Tensor, mask: Tensor | None, called: str = "action_mask", needed: bool = False
    ) -> Tensor:
        """The mask, or all tokens where OpenRLHF accepts a missing one. called: its name."""
        of_this_call = self.token_level and self.batch_num_tokens is None
        if mask is None and (needed or not of_this_call):
            raise InputError(
                f"{called} was not given; only a mean over the tokens of this call works without "
                "it."
            )
        return mask_or_all(mask, like)

    def part(self, mask_dtype: torch.dtype) -> TokenMean | SeqMeanTokenMean:
        """The aggregation."""
        return TokenMean() if self.token_level else sample_mean(mask_dtype)

    @property
    def totals(self) -> Totals | Literal["local"]:
        """The step's counts, or "local" if the caller passed no count for this mean."""
        count = as_count(self.batch_num_tokens if self.token_level else self.global_batch_size)
        return "local" if count is None else Totals(count, count, dp_size=int(self.dp_size))


class PolicyLoss(nn.Module):
    """OpenRLHF's policy loss, with the correction arguments of 0.11.2 (`is_correction_*`) or of
    earlier releases.

    Pass the earlier ones (`enable_vllm_is_correction`, `vllm_is_truncated_threshold`,
    `vllm_is_correction_type`) by name, or by position as in those releases, where the sixth
    argument is a bool. The loss then returns the four values of 0.11.1, otherwise the five of
    0.11.2. release: follow the numbers and return values of this release instead.

    The log-ratio is clamped at ±20 and empty rows are left out of the mean. A batch without valid
    tokens has the loss 0 with a zero gradient (OpenRLHF: NaN).

    As in OpenRLHF, a threshold of (0, high) on "binary_kl" also drops tokens with equal
    probabilities under both policies, if rounding puts their divergence below 0 (half of them in
    float32); (-1, high) keeps them.
    """

    default_release: str | None = None

    @drop_in
    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str | bool = "off",
        is_correction_mode: Any = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
        *,
        enable_vllm_is_correction: bool | None = None,
        vllm_is_truncated_threshold: Threshold = None,
        vllm_is_correction_type: str | None = None,
        release: str | None = None,
    ) -> None:
        super().__init__()
        newer: tuple[Any, ...] = (is_correction_level, is_correction_mode)
        newer = (*newer, is_correction_gating, is_correction_threshold)
        older = (enable_vllm_is_correction, vllm_is_truncated_threshold, vllm_is_correction_type)
        if isinstance(is_correction_level, bool):
            newer, older = NEWER_DEFAULTS, older_by_position(newer, older)
        self.release = release_of(newer, older, release or self.default_release)
        self.clip_eps_low = clip_eps_low
        self.clip_eps_high = clip_eps_high
        self.dual_clip = dual_clip
        self.token_level_loss = token_level_loss and policy_loss_type != "gspo"
        self.policy_loss_type = policy_loss_type
        check_choice("policy_loss_type", policy_loss_type, ("ppo", "gspo"), SpecError)
        if dual_clip is not None and not dual_clip > 1:
            raise SpecError(
                f"dual_clip must be greater than 1, or None for off, got {dual_clip!r}."
            )
        if self.returns_filter_ratio:
            self.is_correction_level, self.is_correction_mode = newer[:2]
            self.is_correction_gating, self.is_correction_threshold = newer[2:]
            self._gate().check()
        else:
            self.enable_vllm_is_correction = bool(older[0])
            self.vllm_is_truncated_threshold = older[1]
            self.vllm_is_correction_type = kind = "tis" if older[2] is None else older[2]
            check_choice("vllm_is_correction_type", kind, VLLM_TYPES, SpecError)
        self._make_spec()  # checks the numbers

    @property
    def returns_filter_ratio(self) -> bool:
        """Whether the release returns `is_filter_ratio` as a fifth value."""
        return at_least(self.release, CURRENT)

    @property
    def spec(self) -> LossSpec:
        """The loss as a `LossSpec`, for example for `policyloss.explain`."""
        return self._make_spec()

    def _make_spec(self, mask_dtype: torch.dtype = torch.float64) -> LossSpec:
        corrected = self._gate().level != "off"
        trust = Clip(self.clip_eps_low, self.clip_eps_high, self.dual_clip)
        aggregate = Average(self.token_level_loss).part(mask_dtype)
        if self.policy_loss_type == "gspo":
            ratio = SequenceRatio(anchor="rollout" if corrected else "old", log_clamp=None)
            return LossSpec(ratio, trust, aggregate=aggregate)
        parts = self._gate().part() if corrected else ()
        return LossSpec(TokenRatio(log_clamp=20.0), trust, parts, aggregate=aggregate)

    @drop_in
    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor | None, ...]:
        """`(loss, clip_ratio, ppo_kl, vllm_kl)`, and since 0.11.2 `is_filter_ratio`; vllm_kl and
        is_filter_ratio are None without a correction.

        All tensors are `[B, T]`. batch_num_tokens and global_batch_size count the valid tokens and
        the samples of the optimizer step over all ranks.
        """
        average = Average(self.token_level_loss, dp_size, batch_num_tokens, global_batch_size)
        mask = average.mask(log_probs, action_mask, needed=self.policy_loss_type == "gspo")
        gate = self._gate()
        corrected = gate.level != "off"
        if corrected and rollout_log_probs is None:
            raise InputError(
                "rollout_log_probs was not given; a correction needs it (PPO compares it with "
                "old_log_probs, GSPO uses it as anchor)."
            )
        weighted = corrected and self.policy_loss_type == "ppo"
        tensors: dict[str, Any] = {
            "logp": log_probs,
            "old_logp": old_log_probs,
            "advantages": advantages,
            "mask": mask,
            "rollout_logp": rollout_log_probs if corrected else None,
        }
        out = policy_loss(self._make_spec(mask.dtype), **tensors, totals=average.totals)
        share = torch.promote_types(torch.float32, mask.dtype)
        number = torch.promote_types(share, log_probs.dtype)
        m = out.metrics
        clip_ratio = _mean(union_share(m["clip_fraction_upper"], m["clip_fraction_lower"]), share)
        ppo_kl = _mean(m["kl_old_k1"], number)
        vllm_kl = _mean(m["kl_rollout_k1"], number) if weighted else None
        values = (out.loss, clip_ratio, ppo_kl, vllm_kl)
        if not self.returns_filter_ratio:
            return values
        outside = filter_ratio(gate, Inputs(**tensors).tokens(), share) if weighted else None
        return (*values, outside)

    def _gate(self) -> Gate:
        if self.returns_filter_ratio:
            level, gating = str(self.is_correction_level), self.is_correction_gating
            return Gate(level, self.is_correction_mode, gating, self.is_correction_threshold)
        if not self.enable_vllm_is_correction:
            return Gate("off")
        level, mode = VLLM_TYPES[self.vllm_is_correction_type]
        return Gate(level, mode, threshold=self.vllm_is_truncated_threshold)


class ValueLoss(nn.Module):
    """OpenRLHF's value loss: half the squared error, or with `clip_eps` half the larger of the
    squared error and the clipped squared error.
    """

    @drop_in
    def __init__(self, clip_eps: float | None = None, token_level_loss: bool = True) -> None:
        super().__init__()
        if clip_eps is not None and not clip_eps > 0:
            raise SpecError(
                f"clip_eps must be greater than 0, or None for no clipping, got {clip_eps!r}."
            )
        self.clip_eps = clip_eps
        self.token_level_loss = token_level_loss

    @drop_in
    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> Tensor:
        """The loss, 0-dim. The tensors are `[B, T]`; the counts belong to the optimizer step."""
        average = Average(self.token_level_loss, dp_size, batch_num_tokens, global_batch_size)
        mask = average.mask(values, action_mask)
        part, totals = average.part(mask.dtype), average.totals
        return value_loss(
            values, returns, old_values, mask, self.clip_eps, aggregate=part, totals=totals
        ).loss


@drop_in
def aggregate_loss(
    loss: Tensor,
    loss_mask: Tensor | None,
    token_level_loss: bool = True,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
) -> Tensor:
    """OpenRLHF's mean of a `[B, T]` loss: over tokens, or over samples of their token means.
    dp_size has an effect only with a count of the step.
    """
    average = Average(token_level_loss, dp_size, batch_num_tokens, global_batch_size)
    mask = average.mask(loss, loss_mask, "loss_mask")
    return aggregate_tokens(loss, mask, average.part(mask.dtype), totals=average.totals)


@drop_in
def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    log_probs_old: Tensor | str | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> Tensor:
    """OpenRLHF's estimate of KL(current‖base) for each token, in float32, clamped to ±10.

    unbiased_gradient: take the gradient of k2, times the ratio to log_probs_old (at most 10) if
    that is passed. Up to 0.11.0 the third argument is the estimator; that order works too.
    """
    called, old = "kl_estimator", log_probs_old
    if isinstance(old, str):
        kl_estimator, called, old = old, "log_probs_old, or kl_estimator,", None
    elif old is not None:
        check_like("log_probs_old", old, ("log_probs", log_probs))
    check_choice(called, kl_estimator, ("k1", "k2", "k3"), SpecError)
    everywhere = mask_or_all(None, log_probs)
    d = difference(log_probs_base, log_probs, everywhere, torch.float32)
    clamped = bound(d, (None, KL_CLAMP)) if kl_estimator == "k3" else d
    raw = estimate(clamped, kl_estimator, as_written="exp(d) - 1 - d")
    value = bound(raw, KL_CLAMP)
    if not unbiased_gradient:
        return value
    weight = None
    if old is not None:
        weight = capped_weight(difference(log_probs, old, everywhere, torch.float32), KL_CLAMP)
    return with_gradient(value, d, log_probs, "k2", weight)


def _mean(record: Record, dtype: torch.dtype) -> Tensor:
    """A mean in OpenRLHF's precision; 0 if nothing was counted, where OpenRLHF returns NaN."""
    assert isinstance(record, Stat)
    return mean_or_zero(record.sum, record.count).to(dtype)
