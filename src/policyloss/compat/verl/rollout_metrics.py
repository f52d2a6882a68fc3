"""The metrics of verl's rollout correction (verl/trainer/ppo/rollout_corr_helper.py): how far the
inference engine is from the trainer in one batch. All are pure functions of detached tensors.

Legend: `logp` are the trainer's and `rollout_logp` the engine's log-probabilities, d = logp −
rollout_logp, and a weight is `exp(d)`; all are token-shaped. S sequences. Results are 0-dim tensors
by name, computed in the dtype of the inputs and in verl's order: a variance E[x²] − E[x]² depends
on every rounding, and these numbers must be verl's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policyloss.functional.collectives import all_sum
from policyloss.functional.correction import importance_weight, reduced, within
from policyloss.functional.kl import estimate
from policyloss.functional.masking import accumulator_dtype, bound, extremes, fill
from policyloss.functional.segments import Sequences

Statistics = dict[str, Tensor]


@dataclass(frozen=True)
class Means:
    """Means over the valid tokens of a batch and of each sequence.

    mask: bool or 0/1, token-shaped; counts are sums in its dtype. epsilon: added to every count
    before dividing. With 0 the means are exact, but the mean of an empty sequence is 0/0; with
    verl's 1e-8 it is 0.
    """

    mask: Tensor
    epsilon: float

    @property
    def sequences(self) -> Sequences:
        """The rows of a mask `[B, T]`; a mask `[N]` is one sequence."""
        return Sequences(tuple(self.mask.shape))

    @property
    def valid(self) -> Tensor:
        """The mask as bool."""
        return self.mask.bool()

    @property
    def lengths(self) -> Tensor:
        """The number of valid tokens of each sequence, `[S]`."""
        return self.sequences.sum(self.mask)

    @property
    def nonempty(self) -> Tensor:
        """A flag for each sequence with a valid token, `[S]`."""
        return self.lengths > 0

    def of_tokens(self, x: Tensor) -> Tensor:
        """`Σ x / (n + epsilon)` over the n valid tokens, 0-dim; flags are float32."""
        return self.fill(x).sum() / (self.mask.sum() + self.epsilon)

    def of_sequences(self, x: Tensor) -> Tensor:
        """`Σ x / (L + epsilon)` over the L valid tokens of each sequence. `[S]`."""
        return self.sequences.sum(self.fill(x)) / (self.lengths + self.epsilon)

    def reduce(self, x: Tensor, how: str) -> Tensor:
        """`x` per "token", or the "sum", "mean" or "max" of its sequence at every token."""
        if how == "mean":
            return self.sequences.expand(self.of_sequences(x))
        return reduced(x, how, self.valid, None, self.sequences)

    def fill(self, x: Tensor) -> Tensor:
        """`x` where valid, 0 elsewhere, in the dtype of `x` times the mask."""
        x = x.float() if x.dtype == torch.bool else x
        return fill(x, self.valid, torch.result_type(x, self.mask))


def _share(flags: Tensor) -> Tensor:
    """The share of `flags` that are True, in float32."""
    return flags.float().mean()


def _log(threshold: float, like: Tensor) -> Tensor:
    """The logarithm of a bound in torch's default dtype, as in verl."""
    return torch.tensor(float(threshold), device=like.device).log()


def _beyond(average: Any, x: Tensor, low: float | None, high: float) -> Statistics:
    """The shares beyond the bounds; without a lower bound its share is left out."""
    above = {"fraction_high": average(x > high)}
    return above if low is None else {**above, "fraction_low": average(x < low)}


def of_each_sequence(
    values: Tensor, judged: Tensor, low: float | None, high: float, center: float
) -> Statistics:
    """Statistics of one number per sequence, `[S]`.

    judged: the numbers to compare with the bounds `low` and `high`. center: the origin of the
    deviation.
    """
    statistics = {
        "mean": values.mean(),
        "std": values.std() if values.numel() > 1 else values.new_zeros(()),
        "max": values.max(),
        "min": values.min(),
        "max_deviation": (values - center).abs().max(),
        **_beyond(_share, judged, low, high),
    }
    return {f"seq_{name}": value for name, value in statistics.items()}


def policy_gap(
    logp: Tensor, rollout_logp: Tensor | None, means: Means, log_clamp: float = 20.0
) -> Statistics:
    """Perplexities of both policies and divergences between them.

    *_ppl = mean_S exp(−m), *_log_ppl = mean_S −m, with m a sequence's mean log-probability;
    log_ppl_diff (its mean, mean modulus, max and min over sequences) = m_rollout − m; ppl_ratio =
    mean_S exp(log_ppl_diff); kl = mean −d and k3_kl = mean eᵈ − 1 − d over tokens, both estimates
    of KL(rollout‖trainer); chi2_token = mean e²ᵈ − 1, chi2_seq = mean_S e^(2 Σd) − 1, with d and Σd
    clamped to ±log_clamp. Means over sequences are over all of them: an empty one has m = 0.
    Without `rollout_logp` there are only the numbers training_*.
    """
    mean_logp = means.of_sequences(logp)
    gap = _perplexity("training", mean_logp)
    if rollout_logp is None:
        return gap
    d = logp - rollout_logp
    mean_rollout_logp = means.of_sequences(rollout_logp)
    difference = mean_rollout_logp - mean_logp
    token_weight = importance_weight(d, log_clamp)
    log_likelihood_ratio = means.sequences.sum(means.fill(d))
    return {
        **gap,
        "kl": means.of_tokens(estimate(d, "k1")),
        "k3_kl": means.of_tokens(estimate(d, "k3", as_written="exp(d) - 1 - d")),
        **_perplexity("rollout", mean_rollout_logp),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": means.of_tokens(token_weight.square()) - 1,
        "chi2_seq": (2 * bound(log_likelihood_ratio, log_clamp)).exp().mean() - 1,
    }


def _perplexity(whose: str, mean_logp: Tensor) -> Statistics:
    return {f"{whose}_ppl": (-mean_logp).exp().mean(), f"{whose}_log_ppl": (-mean_logp).mean()}


def bounded_weight(weight: Tensor, low: float | None, high: float) -> Tensor:
    """Without `low`, TIS: `min(w, high)`. With it, IcePop: w where low ≤ w ≤ high, else 0."""
    return (
        weight.clamp(max=high) if low is None else torch.where(within(weight, low, high), weight, 0)
    )


def normalise(weight: Tensor, means: Means, over: str, group: Any = None) -> tuple[Tensor, Tensor]:
    """`weight` divided by its mean, and that mean: over the valid "tokens", or over the mean
    weights of the "sequences" with a valid token.

    A mean that is not above epsilon counts as 1, so weights that are all 0 stay 0. With a process
    group the mean is over its ranks. Only the mean over the tokens of one process has epsilon in
    its last division.
    """
    if over == "tokens":
        x, counted = means.fill(weight), means.mask
    else:
        x, counted = means.of_sequences(weight), means.nonempty
    total, count = all_sum(x.sum(), group), all_sum(counted.sum(), group)
    mean = total / (count + means.epsilon if group is None and over == "tokens" else count)
    factor = torch.where(mean > means.epsilon, mean, 1)
    return weight / factor, factor


def token_weight_limits(
    weight: Tensor, raw: Tensor, means: Means, low: float, high: float
) -> Statistics:
    """Extremes of the applied weight, and the shares of tokens with a raw weight beyond a bound."""
    largest, smallest = extremes(weight, means.valid)
    return {
        "max": largest,
        "min": smallest,
        "ratio_fraction_high": means.of_tokens(raw > high),
        "ratio_fraction_low": means.of_tokens(raw < low),
    }


def sequence_weight_limits(
    log_weight: Tensor, low: float, high: float, log_clamp: float = 20.0
) -> Statistics:
    """The same from one log-weight per sequence, `[S]` or `[S, 1]`, compared in logarithms; every
    sequence counts. The largest weight is clamped to `exp(log_clamp)`, the smallest is not.
    """
    return {
        "max": log_weight.max().clamp(max=log_clamp).exp(),
        "min": log_weight.min().exp(),
        "ratio_fraction_high": _share(log_weight > _log(high, log_weight)),
        "ratio_fraction_low": _share(log_weight < _log(low, log_weight)),
    }


def clamped_deviation(x: Tensor, means: Means, low: float, high: float) -> Tensor:
    """√(E[x²] − E[x]²) over valid tokens, `x` clamped to [low, high]; 0 for a single token."""
    clamped = x.clamp(min=low, max=high)
    variance = means.of_tokens(clamped.square()) - means.of_tokens(clamped).square()
    return torch.where(means.mask.sum() > 1, variance.clamp(min=0).sqrt(), 0)


def weight_spread(weight: Tensor, means: Means, high: float) -> Statistics:
    """The mean of the weights, and the spread of the weights clamped to [0, high].

    The spread is their standard deviation and their effective sample size, as a share:
    eff_sample_size = 1 / mean (w / (mean w + epsilon))², and 0 if every weight is 0.
    """
    clamped = weight.clamp(min=0.0, max=high)
    mean = means.of_tokens(clamped)
    square = means.of_tokens((clamped / (mean + means.epsilon)).square())
    square = square.to(accumulator_dtype(square.device))
    return {
        "mean": means.of_tokens(weight),
        "std": clamped_deviation(weight, means, 0.0, high),
        "eff_sample_size": torch.where(mean == 0, 0, 1 / square),
    }


def rejection_statistics(
    stat: Tensor,
    of_sequence: Tensor | None,
    nonempty: Tensor,
    means: Means,
    low: float | None,
    high: float,
    by_sequence: bool,
) -> Statistics:
    """Statistics of the number that decides a rejection: tokens with `low <= stat <= high` are
    kept; None is no lower bound.

    stat: token-shaped. of_sequence: the same number per sequence `[S]` (None: its mean).
    by_sequence: whether max, min and the shares beyond the bounds are taken over the sequences with
    a valid token, or over the valid tokens.
    """
    values = (means.of_sequences(stat) if of_sequence is None else of_sequence)[nonempty]
    if by_sequence and values.numel():
        limits = {"max": values.max(), "min": values.min(), **_beyond(_share, values, low, high)}
    else:
        largest, smallest = extremes(stat, means.valid)
        limits = {"max": largest, "min": smallest, **_beyond(means.of_tokens, stat, low, high)}
    statistics = {
        "mean": means.of_tokens(stat),
        "std": clamped_deviation(stat, means, 0.0 if low is None else low, high),
        "fraction_low": stat.new_zeros(()),
        **limits,
    }
    if values.numel():
        return statistics | of_each_sequence(values, values, low, high, center=0.0)
    names = ("mean", "std", "max", "min", "max_deviation", "fraction_high", "fraction_low")
    return statistics | {f"seq_{name}": stat.new_zeros(()) for name in names}


def rejected_tokens(keep: Tensor, means: Means, dtype: torch.dtype = torch.float32) -> Tensor:
    """The share of valid tokens that are not kept, counted in `dtype`."""
    return means.of_tokens((~keep).to(dtype))


def rejected_sequences(
    keep: Tensor, means: Means, among: str = "all", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The share of sequences that lose a valid token.

    among: of "all" sequences, or of the "nonempty" ones; the latter share is in `dtype`, at least
    float32.
    """
    lost = means.sequences.sum(~keep & means.valid) > 0
    if among == "all":
        return _share(lost)
    lost = lost[means.nonempty].to(torch.promote_types(dtype, torch.float32))
    return lost.sum() / lost.numel()
