"""`preference_loss`: DPO, KTO, ORPO and their relatives, over per-token log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.arguments import (
    check_like,
    check_scalar,
    check_tensor,
    description,
    refuse_transforms,
)
from policyloss.errors import InputError
from policyloss.functional.aggregate import reciprocal, weighted_sum
from policyloss.functional.exact import arithmetic
from policyloss.functional.masking import count, fill, nonfinite
from policyloss.functional.preference import matched_by_rank
from policyloss.loss import LossOutput
from policyloss.metrics import Metrics
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.preference.named_losses import AnyPreference, as_preference
from policyloss.preference.spec import PreferenceSpec, Score, Term
from policyloss.records import Invalid, Record, Stat, Sum
from policyloss.tokens import Layout
from policyloss.totals import Totals, resolve


def preference_loss(
    spec: AnyPreference,
    logp: Tensor,
    ref_logp: Tensor | None,
    mask: Tensor,
    *,
    chosen: Tensor | None = None,
    baseline: Tensor | float | None = None,
    log_sum_sq_probs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    totals: Totals | Literal["local"] | None = None,
    cp_group: Any = None,
) -> LossOutput:
    """The mean over pairs, or over sequences, of the loss of `spec` (`preference.PreferenceSpec`).

    spec: a `PreferenceSpec`, or a name of `preference.presets()`.
    logp (carries the gradient), ref_logp, log_sum_sq_probs, mask: per token, padded `[B, T]` or
    packed `[N]` with `cu_seqlens`; mask is True at the tokens of the answers. **Sequences 2i and
    2i + 1 are the chosen and the rejected answer of pair i**, unless `spec.over == "sequences"`.
    ref_logp: of the reference model; None if the loss has no reference. log_sum_sq_probs:
    `log Σ p²` over the vocabulary at each token, for a spec with weighting="wpo".
    chosen: `[S]` bool, only if `spec.over == "sequences"`: whether each is a desired answer.
    baseline: KTO's KL term z of the whole step, in nats, not yet times beta (docs/preference.md),
    only if `spec.baseline`; it gets no gradient.
    totals: the counts of the whole step, `Totals.count(mask_of_the_step)` (if the spec has `nll`:
    `preference.preference_totals`). The losses of its micro-batches then add up to the loss of the
    whole step, if no micro-batch splits a pair. None or "local": as in `policy_loss`. A pair
    with one empty answer counts as half a pair in the mean.
    cp_group: as in `policy_loss`.

    Metrics: `loss`, `tokens`, `chosen_logp` and `rejected_logp` (means of each sequence's sum),
    `chosen_reward` and `rejected_reward` (`beta` times the `Score` of `spec.terms[0]`), `margin`
    (the mean of chosen − rejected reward), `accuracy` (the share of pairs in which it is positive),
    `nll` (if the spec has it), `nonfinite_sequences`, `invalid_…` (docs/metrics.md).
    """
    refuse_transforms()
    spec, step = as_preference(spec), resolve(totals)
    check_tensor("logp", logp, "float")
    where = {"cu_seqlens": cu_seqlens, "cp_group": cp_group}
    t = Layout.of(logp, mask, called="logp", **where).with_totals(step)
    _check_labels(spec, t, chosen)
    if (baseline is not None) != spec.baseline:
        need = "reads" if spec.baseline else "does not read"
        raise InputError(f"this loss {need} a baseline, got baseline={description(baseline)}.")
    if baseline is not None:
        check_scalar("baseline", baseline)
        baseline = torch.as_tensor(baseline, dtype=t.dtype, device=logp.device).detach()
    if spec.ranks and step is not None:
        raise InputError(
            "a margin by rank (AOT) sorts the pairs of the whole step, so one call must hold them "
            'all: pass their log-probabilities with totals="local". To train in micro-batches, '
            "take the gradient of this loss in logp, and in each micro-batch back-propagate "
            "(gradient * logp).sum()."
        )
    if cp_group is not None and any(term.score.tail != 1 for term in spec.terms):
        raise InputError("Score.tail reads the order of tokens: use tail=1 with cp_group.")
    ref = torch.zeros_like(t.mask, dtype=t.dtype)
    if any(term.score.reference == "ref" for term in spec.terms):
        ref = _argument("ref_logp", ref_logp, logp, t)
    call = _Call(t, t.fill(logp), ref, chosen, baseline)
    per_sequence = call.losses(spec.terms)
    if spec.weighting == "wpo":
        squares = _argument("log_sum_sq_probs", log_sum_sq_probs, logp, t)
        weight = t.sequence_mean(call.logp.detach() - squares).exp()
        if spec.over == "pairs":
            weight = (weight[0::2] * weight[1::2]).repeat_interleave(2)
        per_sequence = per_sequence * weight
    x = t.fill(t.sequences.expand(per_sequence)) * SeqMeanTokenMean()(t)
    if spec.nll:
        x = x - fill(call.logp, call.chosen_tokens) * (spec.nll * _per_chosen_token(call, step))
    one = torch.ones((), dtype=t.dtype, device=x.device)
    loss = weighted_sum(x, one)
    share = arithmetic().step_share(x, one, None, loss, t.totals.dp_size)
    return LossOutput(loss, _metrics(spec, call, per_sequence, share))


def _check_labels(spec: PreferenceSpec, t: Layout, chosen: Any) -> None:
    """Raise unless the sequences are pairs, or each has a label, as the spec needs it."""
    n = t.sequences.count
    if spec.over == "pairs" and (n % 2 or chosen is not None):
        raise InputError(
            "this loss compares pairs: pass an even number of sequences, 2i the chosen and 2i + 1 "
            f"the rejected answer of pair i, and no chosen=; got {n} sequences."
        )
    if spec.over == "sequences":
        check_tensor("chosen", chosen, "any", ("mask", t.mask))
        if chosen.dtype != torch.bool or tuple(chosen.shape) != (n,):
            raise InputError(
                f"chosen must be one bool per sequence, ({n},), got {description(chosen)}."
            )


def _argument(name: str, x: Any, logp: Tensor, t: Layout) -> Tensor:
    """The tensor argument `name` without its gradient, 0 where masked; raise if it is missing."""
    if x is None:
        raise InputError(f"this loss reads {name}, which is missing; pass {name}.")
    check_like(name, x, ("logp", logp), "float")
    return t.fill(x.detach())


@dataclass(frozen=True)
class _Call:
    """The tensors of a call. labels: `[S]` bool if sequences have no partner, None for pairs."""

    t: Layout
    logp: Tensor
    ref: Tensor
    labels: Tensor | None
    baseline: Tensor | None = None

    @property
    def is_chosen(self) -> Tensor:
        """Whether each sequence is a desired answer, `[S]`."""
        if self.labels is not None:
            return self.labels
        return torch.arange(self.t.sequences.count, device=self.t.mask.device) % 2 == 0

    @property
    def chosen_tokens(self) -> Tensor:
        """The valid tokens of the chosen sequences, token-shaped."""
        return self.t.mask & self.t.sequences.expand(self.is_chosen)

    @property
    def valid_pairs(self) -> Tensor:
        """Whether both sequences of a pair have a valid token, `[P]`."""
        counts = self.t.counts
        return (counts[0::2] > 0) & (counts[1::2] > 0)

    def scores(self, score: Score) -> Tensor:
        """The score of each sequence `[S]`."""
        x = self.logp if score.reference is None else self.logp - self.ref
        return score.shaped(self._reduced(x, score))

    def _reduced(self, x: Tensor, score: Score) -> Tensor:
        """The sum or mean of each sequence, token-shaped → `[S]`."""
        if score.tail != 1:
            x = torch.where(self._shared_tokens(), x, score.tail * x)
        total = self.t.sequences.sum(x)
        return total if score.length == "sum" else total / self.t.lengths.clamp(min=1)

    def _shared_tokens(self) -> Tensor:
        """The valid tokens within the length of the shorter answer of a pair, token-shaped."""
        counts, sequences = self.t.counts, self.t.sequences
        place = self.t.mask.reshape(-1).cumsum(0).view(self.t.mask.shape)
        shorter = torch.minimum(counts[0::2], counts[1::2]).repeat_interleave(2)
        return place - sequences.expand(counts.cumsum(0) - counts) <= sequences.expand(shorter)

    def losses(self, terms: tuple[Term, ...]) -> Tensor:
        """The loss of each sequence `[S]`: its own, or that of its pair."""
        if self.labels is None:
            pairs = self.logp.new_zeros(self.t.sequences.count // 2)
            for term in terms:
                pairs = pairs + term.weight * term.link(self._margin(term))
            return pairs.repeat_interleave(2)
        total = self.logp.new_zeros(self.t.sequences.count)
        for term in terms:
            side = ~self.labels if term.margin == "rejected" else self.labels
            # Replaced before and after: the link of the other side's scores may overflow.
            of_side = term.link(fill(self._margin(term), side))
            total = total + fill(term.weight * of_side, side)
        return total

    def _margin(self, term: Term) -> Tensor:
        """The margin of each pair `[P]`, or of each sequence `[S]` if there are no pairs."""
        s, z = self.scores(term.score), 0.0 if self.baseline is None else self.baseline
        w, l = (s[0::2], s[1::2]) if self.labels is None else (s, s)  # noqa: E741
        if term.margin == "pair":
            return w - l
        if term.margin == "ranked_sides":
            return matched_by_rank(w, l, self.valid_pairs)
        if term.margin == "ranked_pair":
            sums = (self._reduced(x, term.score) for x in (self.logp, self.ref))
            a, b = (x[0::2] - x[1::2] for x in sums)
            return matched_by_rank(a, b, self.valid_pairs)
        return z - l if term.margin == "rejected" else z - w if "against" in term.margin else w - z


def _per_chosen_token(call: _Call, step: Totals | None) -> Tensor:
    """`dp_size / chosen tokens of the step`, 0-dim."""
    if step is None:
        tokens = fill(call.t.counts, call.is_chosen).sum()
    elif step.statistics and "chosen_tokens" in step.statistics:
        tokens = step.statistics["chosen_tokens"]
    else:
        raise InputError(
            "this loss has nll, a mean over the chosen tokens of the step: make the totals with "
            "policyloss.preference.preference_totals(mask_of_the_whole_step), which counts them."
        )
    return reciprocal(tokens, call.logp, times=call.t.totals.dp_size)


@torch.no_grad()
def _metrics(spec: PreferenceSpec, call: _Call, per_sequence: Tensor, share: Tensor) -> Metrics:
    t, total, full = call.t, arithmetic().total, call.t.counts > 0
    numbers = {"logp": t.sequences.sum(call.logp)}
    if spec.terms:
        beta = getattr(spec.terms[0].link, "beta", 1.0)
        numbers["reward"] = beta * call.scores(spec.terms[0].score)
    records: dict[str, Record] = {"loss": Sum(share), "tokens": Sum(count(t.mask))}
    for side, members in (("chosen", call.is_chosen & full), ("rejected", ~call.is_chosen & full)):
        for name, x in numbers.items():
            records[f"{side}_{name}"] = Stat(total(fill(x, members)), count(members))
    if spec.terms and spec.over == "pairs":
        rewards, pairs = numbers["reward"], call.valid_pairs
        margin = fill(rewards[0::2] - rewards[1::2], pairs)
        records["margin"] = Stat(total(margin), count(pairs))
        records["accuracy"] = Stat(count(margin > 0), count(pairs))
    if spec.nll:
        tokens = call.chosen_tokens
        records["nll"] = Stat(total(fill(-call.logp, tokens)), count(tokens))
    records["nonfinite_sequences"] = Sum(nonfinite(fill(per_sequence, full)))
    records.update({name: Invalid(number) for name, number in t.invalid.items()})
    return Metrics(records)


def preference_totals(
    mask: Tensor,
    *,
    chosen: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    group: Any = None,
    cp_group: Any = None,
    dp_size: int | None = None,
) -> Totals:
    """Count as `Totals.count` does, and the chosen tokens, which divide the NLL term.

    chosen: `[S]` bool as in `preference_loss`, None for pairs. Other arguments: as in
    `Totals.count`. Pass all micro-batches of this rank's step at once.
    """
    where: dict[str, Any] = {"cu_seqlens": cu_seqlens, "cp_group": cp_group}
    check_tensor("mask", mask)
    t = Layout.of(mask, mask, called="mask", **where)
    of_chosen = _Call(t, mask, mask, chosen).chosen_tokens
    where.update(group=group, dp_size=dp_size)
    tokens = torch.as_tensor(Totals.count(of_chosen, **where).tokens)
    return replace(Totals.count(mask, **where), statistics={"chosen_tokens": tokens})
