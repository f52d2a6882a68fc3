"""`policy_loss`: the whole pipeline, a straight line over the slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_tensor
from policyloss.catalogue import AnyLoss, as_spec
from policyloss.errors import InputError
from policyloss.functional.aggregate import weighted_sum, weighted_total
from policyloss.functional.correction import any_in_sequence
from policyloss.functional.exact import arithmetic, must_stay_eager
from policyloss.functional.masking import fill
from policyloss.functional.ratio import bounded_exp
from policyloss.inputs import CallTensors, Inputs, StandIn, takes_tensors
from policyloss.metrics import Metrics
from policyloss.mixture import Mixture
from policyloss.parts.aggregate import known_horizon, weight_factors
from policyloss.parts.correction import Combined, combine, self_normalised
from policyloss.parts.data import check_part, is_part
from policyloss.parts.kl import Divergence
from policyloss.parts.trust import Surrogate
from policyloss.policy_metrics import MeasuredCall, MetricsLevel, check_level, policy_metrics
from policyloss.spec import LossSpec
from policyloss.tokens import Layout, Tokens
from policyloss.totals import Totals, data_parallel_group, resolve, sum_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack  # part of typing since Python 3.11


@dataclass(frozen=True)
class LossOutput:
    """`loss`: 0-dim, to call `backward()` on. `metrics`: add those of several calls with `+`."""

    loss: Tensor
    metrics: Metrics


@takes_tensors
def policy_loss(
    spec: AnyLoss | Mixture,
    logp: Tensor,
    old_logp: Tensor | StandIn | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    totals: Totals | Literal["local"] | None = None,
    metrics: MetricsLevel = "all",
    **tensors: Unpack[CallTensors],
) -> LossOutput:
    """The loss that `spec` describes, over per-token log-probabilities.

    `loss = Σ_t share_t · (correction_t · surrogate_t + kl.coef · kl_t − entropy_coef · entropy_t)`

    share_t is the token's share of the average, such as 1/tokens. `spec.kl` may hold several parts;
    each adds its own `coef · kl_t`. `weights` multiply the sum in parentheses.

    "Token-shaped" tensors are padded `[B, T]`, or packed `[N]` with `cu_seqlens` `[S+1]`. There are
    S sequences.

    - `logp`, `old_logp`, `rollout_logp`, `ref_logp`, `teacher_logp`, `entropy`, `divergence` and
      `mask` are token-shaped. `logp`, `entropy` and `divergence` (between the teacher's and the
      current policy's distributions; a `Divergence` reads it) carry the gradient. `old_logp` comes
      from the trainer's policy before its first update on this batch; `old_logp="current"` means
      that the policy has not been updated since then, so `logp`, detached, is used; "loglinear"
      computes it from `logp`, `rollout_logp` and `ages` (`functional.ratio.loglinear_logp`),
      without a forward. `rollout_logp` comes from the inference engine, `ref_logp` from the
      reference model, `teacher_logp` from a teacher. `spec.reads` lists the tensors that a loss
      reads; any other may be None; if given, only metrics read it.
    - `advantages` are token-shaped (packed also `[1, N]`), or one per sequence, `[S]` or `[S, 1]`.
      If a pack has as many tokens as sequences, `[N]` and `[S]` are the same shape: pass `[1, N]`
      or `[S, 1]`. With `cp_group`, `[N]` always means per token; pass `[S, 1]` for one per
      sequence.
    - `mask` is bool or 0/1; True means that the token is trained on.
    - `group_ids` are `[S]` integers: sequences of one prompt have the same id.
    - `weights` are numbers ≥ 0, in any shape that `advantages` may have. A weight multiplies the
      loss of its token: surrogate, KL and entropy alike, while a scaled advantage leaves KL and
      entropy unchanged. Averages count tokens and ignore the weights; only `WeightMean` divides by
      the sum of the weights of the step. Of the metrics, `loss` is weighted; the others count each
      valid token once.
    - `turn_ids` are token-shaped integers, the turn of each token in its sequence, and −1 at tokens
      that the environment wrote, where `mask` must be False. `SegmentRatio` and `TurnMean` read
      them; without them, a turn is an unbroken run of tokens with mask True.
    - `ages` are token-shaped integers, as in `Mismatch`: the version of the current weights minus
      that of the weights that sampled the token. A version may count updates or steps. `Stale`
      and `old_logp="loglinear"` read them.
    - `totals` are the counts of the whole optimizer step (`Totals.count`). None or "local": this
      call holds the whole batch; None is an error if torch.distributed runs on several ranks. With
      `cp_group`, "local" means that the calls on its ranks make up the whole batch, and the
      training engine must sum their losses and gradients (if it averages over these ranks instead,
      pass `Totals.count(mask, cp_group=…)`).
    - `cp_group` is the process group over which each sequence's tokens are spread (context
      parallel). `positions` are token-shaped integers, each token's index in its whole sequence.
      Only parts that depend on the order of tokens (such as turns without `turn_ids`) read
      positions, only with `cp_group`, and only where `mask` is True.
    - `extras` maps names to token-shaped tensors that custom parts read with
      `tokens.extra(name)`; for a `Mixture`, it also holds the masks of the streams.
    - `metrics` selects the metrics: "all"; "basic", which is loss, tokens, clip_fraction,
      clip_fraction_dual and kl_old_k1; or "none". Loss and gradient do not depend on it.
    """
    if torch.compiler.is_compiling() and not isinstance(spec, Mixture):
        # One node of the graph. The module imports the compiler and this module.
        from policyloss.compiled.in_graph import loss_in_graph

        out = loss_in_graph(spec, logp, old_logp, advantages, mask, totals, metrics, tensors)
        if out is not None:
            return out
    inputs = Inputs.of(logp, old_logp, advantages, mask, tensors)
    return loss_of(ready_loss(spec), inputs, resolve(totals), metrics)


def loss_of(
    spec: LossSpec | Mixture, inputs: Inputs, step: Totals | None, metrics: MetricsLevel = "all"
) -> LossOutput:
    """`policy_loss` of collected arguments. step: the totals, None if local."""
    check_level(metrics)
    if isinstance(spec, Mixture):
        calls = spec.calls(inputs, step)
        outs = {n: loss_of(c.spec, c.inputs, c.step, metrics) for n, c in calls.items()}
        loss = reduce(torch.add, [calls[name].weight * out.loss for name, out in outs.items()])
        measured = {name: out.metrics for name, out in outs.items()}
        return LossOutput(loss, spec.metrics(measured, inputs.mask))
    # Not `stays_eager`: all functions that it decorates share the code of its wrapper, and with it
    # dynamo's limit of recompilations.
    if must_stay_eager():
        eager: LossOutput = torch.compiler.disable(loss_of)(spec, inputs, step, metrics)  # type: ignore[no-untyped-call]
        return eager
    check_gradients(spec, inputs)
    if not torch.compiler.is_compiling():
        # Two kernels on a GPU. The module imports this one.
        from policyloss.compiled.fused import fused_loss

        out = fused_loss(spec, inputs, step, metrics)
        if out is not None:
            return out
    parts = pipeline(spec, inputs.tokens(), step, metrics)
    return LossOutput(parts.loss, parts.metrics)


class PipelineOutput(NamedTuple):
    """The loss as `total · scale`: a sum over tokens, and a 0-dim factor of all tokens, if any."""

    total: Tensor
    scale: Tensor | None
    loss: Tensor
    metrics: Metrics


def check_gradients(spec: LossSpec, inputs: Inputs) -> None:
    """Raise if `logp` carries a gradient, but the entropy or divergence of a term does not."""
    logp: Any = inputs.logp
    check_tensor("logp", logp, "float")
    if not (torch.is_grad_enabled() and logp.requires_grad):
        return
    coef = 0.0 if spec.divergence is None else spec.divergence.coef
    if spec.entropy_coef and _lacks_gradient("entropy", inputs.entropy):
        raise InputError(
            f"entropy carries no gradient, but logp does, so entropy_coef={spec.entropy_coef:g} "
            "would train nothing: pass the entropy of the same forward (policyloss.logprobs(…, "
            "entropy=True)), or spec.replace(entropy_coef=0.0) to measure it."
        )
    if coef and _lacks_gradient("divergence", inputs.divergence):
        raise InputError(
            f"divergence carries no gradient, but logp does, so its coef={coef:g} would train "
            "nothing: pass the divergence of the same forward (policyloss.linear_divergence or "
            "policyloss.divergence), or leave the Divergence out of the spec to measure it."
        )


def _lacks_gradient(name: str, x: Any) -> bool:
    if x is None:
        return False
    check_tensor(name, x)
    return not x.requires_grad


def ready_spec(spec: AnyLoss) -> LossSpec:
    """The spec, or the preset of that name; raise if its horizon is not set."""
    spec = as_spec(spec)
    if spec.needs_horizon:
        known_horizon(spec.aggregate)  # raises, before a step is sampled, counted or compiled
    return spec


def ready_loss(spec: AnyLoss | Mixture) -> LossSpec | Mixture:
    """`ready_spec`; a mixture itself, if its streams are ready."""
    if not isinstance(spec, Mixture):
        return ready_spec(spec)
    for one in spec.specs:
        ready_spec(one)
    return spec


def pipeline(
    spec: LossSpec, tokens: Tokens, step: Totals | None, level: MetricsLevel = "all"
) -> PipelineOutput:
    """The slots in order, on one call's tokens.

    step: the totals; None if this call is the whole step. level: which metrics are computed.
    """
    t, corrected = corrected_tokens(spec, tokens, step)
    t = with_ratio(spec, t)
    t = t.replace(step="local" if step is None else step, flags=level != "none")
    surrogate, kl, token_loss = token_losses(spec, t, corrected.weight)
    weight, shared = weight_factors(spec.aggregate, t)
    total, scale = weighted_total(token_loss, weight, shared)
    loss = total if scale is None else total * scale
    # Not needed any more, and large: the metrics read the log-ratio and the flags.
    _, *flags = surrogate
    t, surrogate = t.replace(ratio_value=None), Surrogate(total, *flags)
    with torch.no_grad():
        share = arithmetic().step_share(token_loss, weight, shared, loss, t.totals.dp_size)
        call = MeasuredCall(tokens, t, corrected, surrogate, kl, token_loss, share)
        metrics = policy_metrics(spec, call, level)
    return PipelineOutput(total, scale, loss, metrics)


class TokenLosses(NamedTuple):
    """The three terms of the loss of each token.

    surrogate: the result of the trust part. kl: the KL terms before their coefficients, without a
    teacher's divergence; None without a KL. loss: the sum of all terms, 0 where masked.
    """

    surrogate: Surrogate
    kl: Tensor | None
    loss: Tensor


def token_losses(spec: LossSpec, t: Tokens, weight: Tensor | None) -> TokenLosses:
    """`weight·surrogate + kl.coef·kl − entropy_coef·entropy` of every token, before any averaging,
    times the weight of the token in the call (`weights`).

    weight: the corrections' weight of each token, or None for 1.
    """
    surrogate = spec.trust(t)
    if not isinstance(surrogate, Surrogate):
        surrogate = Surrogate(surrogate)
    loss = _per_token("trust", surrogate.loss, t)
    if weight is not None:
        loss = loss * weight
    kl: Tensor | None = None
    for part in spec.kl_parts:
        term = _per_token("kl", part(t), t)
        loss = loss + (part.coef * term if is_part("kl", part) else term)
        if not isinstance(part, Divergence):
            kl = term if kl is None else kl + term
    if spec.entropy_coef:
        loss = loss - spec.entropy_coef * t.entropy
    if weight is not None or not spec.is_zero_where_masked:
        loss = fill(loss, t.mask, zero=t.zero)
    return TokenLosses(surrogate, kl, t.weighted(loss))


def aggregate_tokens(
    x: Tensor,
    mask: Tensor,
    aggregate: Any,
    *,
    cu_seqlens: Tensor | None = None,
    group_ids: Tensor | None = None,
    weights: Tensor | None = None,
    turn_ids: Tensor | None = None,
    totals: Totals | Literal["local"] | None = None,
    cp_group: Any = None,
) -> Tensor:
    """Average `x` as `policy_loss` averages its tokens: `Σ_t share_t · x_t`, differentiable in x.

    x, mask: `[B, T]` or `[N]`. aggregate: the part of a `LossSpec` that defines share_t, such as
    `TokenMean()`. Other arguments: as in `policy_loss`.
    """
    check_part("aggregate", aggregate)
    step = resolve(totals)
    check_tensor("x", x, "float")
    where = {"cu_seqlens": cu_seqlens, "group_ids": group_ids, "cp_group": cp_group}
    where |= {"weights": weights, "turn_ids": turn_ids}
    layout = Layout.of(x, mask, called="x", **where).with_totals(step)
    return weighted_sum(layout.weighted(layout.fill(x)), aggregate(layout))


def _per_token(slot: str, x: Any, t: Tokens) -> Tensor:
    """`x` if it is one number per token; a smaller tensor would be broadcast to a wrong loss."""
    if not isinstance(x, Tensor) or x.shape != t.mask.shape:
        actual = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(
            f"the {slot} part must return one number per token, shape {tuple(t.mask.shape)}; got "
            f"{actual}."
        )
    return x


def corrected_tokens(
    spec: LossSpec, t: Tokens, step: Totals | None, group: Any = None
) -> tuple[Tokens, Combined]:
    """Apply the corrections, and unless `spec.rejected` is "keep", mask the rejected tokens."""
    if step is not None and spec.needs_statistics:
        measured = step.statistics
        if measured is None or any(name not in measured for name in spec.statistics_names):
            raise InputError(
                "this loss needs batch-wide numbers of the whole step (survivors of a rejection, "
                "covariances or a mean weight), which counting the mask does not give: make the "
                "totals with policyloss.measure(spec, …) on the step's tensors, or pass "
                'totals="local" if this call is the whole batch.'
            )
        t = t.replace(measured=measured)
    if not spec.correction:
        return t, Combined(None, None, {}, {})
    corrected = combine(spec.correction, t, group)
    if spec.rejected != "keep" and corrected.keep is not None:
        keep = corrected.keep
        if spec.rejected == "drop_sequence":
            keep = ~any_in_sequence(t.mask & ~keep, t.sequences)
        t = t.with_mask(t.mask & keep)
    return t, self_normalised(spec.correction, corrected, t, group)


def with_ratio(spec: LossSpec, t: Tokens) -> Tokens:
    """`t` with the ratio, unless no part reads the ratio and one of its tensors is missing."""
    anchor = getattr(spec.ratio, "anchor", "old")
    of_anchor = () if anchor == "current" else (f"{anchor}_logp",)
    made_of = (*of_anchor, *getattr(spec.ratio, "reads", ()))
    if not spec.reads_ratio_value and not all(map(t.has, made_of)):
        return t.replace(anchor=anchor)
    log_ratio, clamp = spec.ratio(t), getattr(spec.ratio, "log_clamp", 20.0)
    value = bounded_exp(log_ratio, clamp)
    return t.replace(anchor=anchor, raw_log_ratio=log_ratio, log_clamp=clamp, ratio_value=value)


@takes_tensors
def measure(
    spec: AnyLoss | Mixture,
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    group: Any = None,
    dp_size: int | None = None,
    **tensors: Unpack[CallTensors],
) -> Totals:
    """The `Totals` (counts and statistics) of a whole optimizer step, for a loss that needs more
    than the numbers of valid tokens and sequences.

    Pass this rank's tensors of *all* micro-batches, concatenated (logp from a forward without
    gradient), then pass the result as `totals=` to `policy_loss` on each micro-batch: the gradient
    is the same however the batch is split. Losses with these parts need it: `rejected=` other than
    "keep" (the kept tokens must be counted), `SelfNormalise`, `MomentBudget`, `CovClip` or `CovKL`;
    also a `Mixture` (each of its streams gets its own totals). For other specs the result equals
    `Totals.count`. Arguments as in `policy_loss` and `Totals.count`.
    """
    inputs = Inputs.of(logp, old_logp, advantages, mask, tensors)
    group = data_parallel_group(group, inputs.cp_group)
    return _measure_totals(ready_loss(spec), inputs, group, dp_size)


def _measure_totals(
    spec: LossSpec | Mixture, inputs: Inputs, group: Any, dp_size: int | None
) -> Totals:
    cp_group, logp = inputs.cp_group, inputs.logp
    if isinstance(spec, Mixture):
        of_streams = {
            name: _measure_totals(call.spec, call.inputs, group, dp_size)
            for name, call in spec.calls(inputs, None).items()
        }
        where = {"cu_seqlens": inputs.cu_seqlens, "cp_group": cp_group, "group": group}
        return replace(Totals.count(inputs.mask, **where, dp_size=dp_size), streams=of_streams)
    check_tensor("logp", logp, "float")
    with torch.no_grad():
        tokens = inputs.replace(logp=logp.detach()).tokens()
        t, corrected = corrected_tokens(spec, tokens, None, group)
        t = with_ratio(spec, t)
        statistics = dict(corrected.statistics)
        if hasattr(spec.trust, "statistics"):
            statistics.update(spec.trust.statistics(t, group))
        where = {"cu_seqlens": t.sequences.offsets, "group_ids": inputs.group_ids}
        totals = Totals.count(t.mask, **where, cp_group=cp_group, group=group, dp_size=dp_size)
        if t.weights is not None:
            totals = replace(totals, weights=sum_weights(t.weights, t.mask, cp_group, group))
        return replace(totals, statistics=statistics)
