"""OpenRLHF's classes and functions, with its signatures, return values and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policyloss.arguments import check_choice, check_like
from policyloss.compat.arguments import drop_in
from policyloss.compat.counts import together
from policyloss.compat.openrlhf.averages import Average
from policyloss.compat.openrlhf.counts import capped_weight, mean_or_zero, rejected_share
from policyloss.compat.openrlhf.words import (
    CURRENT,
    VLLM_TYPES,
    Gate,
    Threshold,
    by_place,
    check_gate,
    check_release,
    correction,
    family,
)
from policyloss.compat.releases import at_least
from policyloss.errors import InputError, SpecError
from policyloss.functional.kl import estimate, with_gradient
from policyloss.functional.masking import bound, difference
from policyloss.inputs import Inputs
from policyloss.loss import aggregate_tokens, policy_loss
from policyloss.parts.ratio import SequenceRatio, TokenRatio
from policyloss.parts.trust import Clip
from policyloss.records import Record, Stat
from policyloss.spec import LossSpec
from policyloss.tokens import Tokens
from policyloss.value import value_loss

KL_CLAMP = 10.0  # of an estimate of the KL, and of the weight on its unbiased gradient


class PolicyLoss(nn.Module):
    """OpenRLHF's policy loss, with the correction arguments of 0.11.2 (`is_correction_*`) or of
    earlier releases.

    Pass those of earlier releases — `enable_vllm_is_correction`, `vllm_is_truncated_threshold`,
    `vllm_is_correction_type` — by name, or by position as in those releases: the sixth argument is
    then a bool, where 0.11.2 has a word. With them, the loss returns the four values of 0.11.1;
    otherwise it returns the five of 0.11.2. release: another release whose numbers and return
    values to follow.

    0.10.3 brought the clamp of the log-ratio at ±20 and left empty rows out of the mean; from 0.9.3
    to 0.10.2 ppo_kl is that of the rollout policy when a correction is on. A batch without valid
    tokens gives 0 here, with a zero gradient (OpenRLHF: NaN).

    As in OpenRLHF, a threshold of (0, high) on "binary_kl" also drops tokens on whose probability
    the two policies agree, where rounding puts the divergence below 0 (half of them, in float32);
    (-1, high) does not.
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
        words = (
            is_correction_level,
            is_correction_mode,
            is_correction_gating,
            is_correction_threshold,
        )
        vllm = (enable_vllm_is_correction, vllm_is_truncated_threshold, vllm_is_correction_type)
        if isinstance(is_correction_level, bool):
            words, vllm = by_place(words, vllm)
        release = release or self.default_release
        self.release = family(words, vllm, release)
        self.clip_eps_low = clip_eps_low
        self.clip_eps_high = clip_eps_high
        self.dual_clip = dual_clip
        self.token_level_loss = token_level_loss and policy_loss_type != "gspo"
        self.policy_loss_type = policy_loss_type
        if self.returns_filter_ratio:
            self.is_correction_level, self.is_correction_mode = words[:2]
            self.is_correction_gating, self.is_correction_threshold = words[2:]
        else:
            self.enable_vllm_is_correction = bool(vllm[0])
            self.vllm_is_truncated_threshold = vllm[1]
            self.vllm_is_correction_type = "tis" if vllm[2] is None else vllm[2]
        self._check_words()
        self._make_spec()  # checks the numbers

    @property
    def returns_filter_ratio(self) -> bool:
        """Whether the release returns a fifth value."""
        return at_least(self.release, CURRENT)

    @property
    def spec(self) -> LossSpec:
        """The loss as a `LossSpec`, for example for `policyloss.explain`."""
        return self._make_spec()

    def _make_spec(self, mask_dtype: torch.dtype = torch.float64) -> LossSpec:
        corrected = self._gate().level != "off"
        trust = Clip(self.clip_eps_low, self.clip_eps_high, self.dual_clip)
        aggregate = Average(self.token_level_loss, self.release).part(mask_dtype)
        if self.policy_loss_type == "gspo":
            ratio = SequenceRatio(anchor="rollout" if corrected else "old", log_clamp=None)
            return LossSpec(ratio, trust, aggregate=aggregate)
        log_clamp = 20.0 if at_least(self.release, "0.10.3") else None
        parts = correction(self._gate()) if corrected else ()
        return LossSpec(TokenRatio(log_clamp=log_clamp), trust, parts, aggregate=aggregate)

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
        """`(loss, clip_ratio, ppo_kl, vllm_kl)`, and `is_filter_ratio` from 0.11.2 on; the last
        ones None without a correction.

        All tensors are `[B, T]`. The counts are those of the valid tokens and the samples of the
        optimizer step, over all ranks.
        """
        average = Average(
            self.token_level_loss, self.release, dp_size, batch_num_tokens, global_batch_size
        )
        mask = average.mask(log_probs, action_mask, needed=self.policy_loss_type == "gspo")
        gate = self._gate()
        corrected = gate.level != "off"
        if corrected and rollout_log_probs is None:
            raise InputError(
                "rollout_log_probs was not given; a correction compares it with old_log_probs, or "
                "GSPO is anchored at it."
            )
        weighted = corrected and self.policy_loss_type == "ppo"
        # Before 0.10.3, GSPO measured ppo_kl from its anchor.
        from_anchor = corrected and not weighted and not at_least(self.release, "0.10.3")
        tensors: dict[str, Any] = {
            "logp": log_probs,
            "old_logp": rollout_log_probs if from_anchor else old_log_probs,
            "advantages": advantages,
            "mask": mask,
            "rollout_logp": rollout_log_probs if corrected else None,
        }
        out = policy_loss(self._make_spec(mask.dtype), **tensors, totals=average.totals)
        share = torch.promote_types(torch.float32, mask.dtype)
        number = torch.promote_types(share, log_probs.dtype)
        m = out.metrics
        clip_ratio = _mean(together(m["clip_fraction_upper"], m["clip_fraction_lower"]), share)
        ppo_kl = _mean(m["kl_old_k1"], number)
        vllm_kl = filter_ratio = None
        if weighted:
            vllm_kl = _mean(m["kl_rollout_k1"], number)
            if at_least(self.release, "0.9.3") and not at_least(self.release, "0.10.3"):
                ppo_kl = vllm_kl
        values = (out.loss, clip_ratio, ppo_kl, vllm_kl)
        if not self.returns_filter_ratio:
            return values
        if weighted:
            filter_ratio = _filter_ratio(gate, Inputs(**tensors).tokens(), share)
        return (*values, filter_ratio)

    def _gate(self) -> Gate:
        if self.returns_filter_ratio:
            level, gating = str(self.is_correction_level), self.is_correction_gating
            return Gate(level, self.is_correction_mode, gating, self.is_correction_threshold)
        if not self.enable_vllm_is_correction:
            return Gate("off")
        level, mode = VLLM_TYPES[self.vllm_is_correction_type]
        return Gate(level, mode, threshold=self.vllm_is_truncated_threshold)

    def _check_words(self) -> None:
        check_choice("policy_loss_type", self.policy_loss_type, ("ppo", "gspo"), SpecError)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise SpecError(
                f"dual_clip must be greater than 1, or None for off, got {self.dual_clip!r}."
            )
        if self.returns_filter_ratio:
            check_gate(self._gate())
        elif self.vllm_is_correction_type != "mis":  # another name of "seq-mask-tis"
            words = ("tis", "icepop", "seq-mask-tis")
            check_choice("vllm_is_correction_type", self.vllm_is_correction_type, words, SpecError)


def _filter_ratio(gate: Gate, tokens: Tokens, dtype: torch.dtype) -> Tensor:
    """The share outside the threshold: of the tokens, or at sequence level of the rows (a row
    without a token counts as outside).
    """
    part = correction(gate._replace(mode="mask"))
    if gate.level == "seq":
        return rejected_share(part, tokens, per="sequence").to(torch.float32)
    return rejected_share(part, tokens).to(dtype)


class ValueLoss(nn.Module):
    """OpenRLHF's value loss: half the squared error, or with `clip_eps` half the larger of the
    squared error and the clipped one. release: as in `PolicyLoss`.
    """

    default_release: str | None = None

    @drop_in
    def __init__(
        self,
        clip_eps: float | None = None,
        token_level_loss: bool = True,
        *,
        release: str | None = None,
    ) -> None:
        super().__init__()
        self.release = release or self.default_release or CURRENT
        check_release(self.release)
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
        """The loss, 0-dim. The tensors are `[B, T]`; the counts are those of the optimizer step."""
        average = Average(
            self.token_level_loss, self.release, dp_size, batch_num_tokens, global_batch_size
        )
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
    dp_size: used only with a count of the step.
    """
    average = Average(token_level_loss, CURRENT, dp_size, batch_num_tokens, global_batch_size)
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

    unbiased_gradient: the gradient is that of k2, times the ratio to log_probs_old (at most 10) if
    you pass that. Up to 0.11.0 the third argument is the estimator, and this function accepts that
    too.
    """
    old = None if isinstance(log_probs_old, str) else log_probs_old
    if old is not None:
        check_like("log_probs_old", old, ("log_probs", log_probs))
    called = "kl_estimator"
    if isinstance(log_probs_old, str):
        kl_estimator, called = log_probs_old, "log_probs_old, or kl_estimator,"
    check_choice(called, kl_estimator, ("k1", "k2", "k3"), SpecError)
    everywhere = torch.ones_like(log_probs, dtype=torch.bool)
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
    """A mean in OpenRLHF's precision; 0 if nothing was counted, where OpenRLHF gives NaN."""
    assert isinstance(record, Stat)
    return mean_or_zero(record.sum, record.count).to(dtype)
