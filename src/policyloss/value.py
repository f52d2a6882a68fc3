"""`value_loss`: the critic's clipped regression, averaged and measured like the policy loss."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.arguments import check_choice, check_like, check_number, check_tensor
from policyloss.errors import InputError
from policyloss.functional.aggregate import weighted_sum
from policyloss.functional.exact import arithmetic, stays_eager
from policyloss.functional.masking import accumulator_dtype, count, fill, nonfinite
from policyloss.loss import LossOutput
from policyloss.metrics import Metrics
from policyloss.parts.aggregate import TokenMean
from policyloss.parts.data import check_part
from policyloss.records import ExplainedVariance, Invalid, Record, Stat, Sum
from policyloss.tokens import Layout, expand_advantages
from policyloss.totals import Totals, resolve


def huber_error(error: Tensor, delta: float) -> Tensor:
    """`½·e²` where |e| ≤ delta, `delta·(|e| − ½·delta)` beyond: quadratic, then linear."""
    size = error.abs()
    inner = size.clamp(max=delta)
    return inner * (size - 0.5 * inner)


def clamp_value(x: Tensor, low: Tensor, high: Tensor, boundary: str) -> Tensor:
    """`x` within bounds; at a bound its slope is 1 ("pass") or ½ ("half")."""
    return x.clamp(low, high) if boundary == "pass" else torch.maximum(torch.minimum(x, high), low)


@stays_eager
def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None,
    mask: Tensor,
    clip: float | None = 0.2,
    kind: Literal["mse", "huber"] = "mse",
    *,
    huber_delta: float = 10.0,
    boundary: Literal["pass", "half"] = "pass",
    aggregate: Any = None,
    cu_seqlens: Tensor | None = None,
    group_ids: Tensor | None = None,
    weights: Tensor | None = None,
    turn_ids: Tensor | None = None,
    totals: Totals | Literal["local"] | None = None,
    cp_group: Any = None,
) -> LossOutput:
    """The clipped value loss `max(f(v − R), f(clamp(v, v₀ − clip, v₀ + clip) − R))`.

    v are `values`, R `returns`, v₀ `old_values`; f(e) is `½e²` or Huber's loss.

    values (carries the gradient), returns, old_values, mask: per token, `[B, T]` or packed `[N]`
    with `cu_seqlens`.
    clip: once v is farther than this from `old_values`, moving it further no longer lowers the
    loss; None: no clipping (`old_values` may then be None). boundary: the clamp's slope exactly at
    a bound, "pass" (1, as `torch.clamp`) or "half" (½, as `max(min(…))` in verl; half-precision
    values often equal a bound). kind: "mse" (`½e²`), or "huber" with `huber_delta`. aggregate: as
    in `LossSpec`, `TokenMean()` by default. weights: factors on the loss of each token; only
    `WeightMean` also divides by their sum. Of the metrics, only `loss` is weighted. totals,
    cp_group, group_ids, turn_ids: as in `policy_loss`.
    Metrics: loss, tokens, `value_mean`, `return_mean`, `value_error` (mean |v − R|),
    `clip_fraction` (share of tokens where the clipped error is the larger one),
    `explained_variance` (1 − Var(R − v)/Var(R)), `nonfinite_tokens`, and counts of invalid inputs,
    such as `invalid_mask_values` (docs/metrics.md).
    """
    check_choice("kind", kind, ("mse", "huber"))
    check_choice("boundary", boundary, ("pass", "half"))
    check_number("huber_delta", huber_delta, above=0)
    if clip is not None:
        check_number("clip", clip, above=0, hint="None is no clipping.")
        if old_values is None:
            raise InputError(
                "clipping reads old_values, which is missing; pass old_values, or clip=None."
            )
    aggregate = TokenMean() if aggregate is None else aggregate
    check_part("aggregate", aggregate)
    step = resolve(totals)
    check_tensor("values", values, "float")
    where = {"cu_seqlens": cu_seqlens, "group_ids": group_ids, "cp_group": cp_group}
    where |= {"weights": weights, "turn_ids": turn_ids}
    t = Layout.of(values, mask, called="values", **where).with_totals(step)
    value = t.fill(values)
    target = t.fill(expand_advantages(returns, t.sequences, "returns", ("values", values)))

    def f(error: Tensor) -> Tensor:
        return 0.5 * error**2 if kind == "mse" else huber_error(error, huber_delta)

    token_loss = f(value - target)
    binds: Tensor | None = None
    if old_values is not None:
        check_like("old_values", old_values, ("values", values))
    if clip is not None and old_values is not None:
        old = t.fill(old_values.detach())
        clipped = f(clamp_value(value, old - clip, old + clip, boundary) - target)
        with torch.no_grad():
            binds = t.mask & (clipped > token_loss)
        token_loss = torch.maximum(token_loss, clipped)
    token_loss = t.weighted(fill(token_loss, t.mask))
    weight = aggregate(t)
    loss = weighted_sum(token_loss, weight)
    share = arithmetic().step_share(token_loss, weight, None, loss, t.totals.dp_size)
    return LossOutput(loss, _metrics(t, value, target, token_loss, binds, share))


@torch.no_grad()
def _metrics(
    t: Layout,
    value: Tensor,
    target: Tensor,
    token_loss: Tensor,
    binds: Tensor | None,
    share: Tensor,
) -> Metrics:
    n, total = count(t.mask), arithmetic().total
    error, wide = (target - value).detach(), accumulator_dtype(value.device)
    moments = [error, error.to(wide) ** 2, target, target.to(wide) ** 2]

    records: dict[str, Record] = {
        "loss": Sum(share),
        "tokens": Sum(n),
        "value_mean": Stat(total(value.detach()), n),
        "return_mean": Stat(total(target), n),
        "value_error": Stat(total(error.abs()), n),
        "explained_variance": ExplainedVariance(n, *(total(x, dtype=wide) for x in moments)),
        "nonfinite_tokens": Sum(nonfinite(token_loss)),
        **{name: Invalid(number) for name, number in t.invalid.items()},
    }
    if binds is not None:
        records["clip_fraction"] = Stat(count(binds), n)
    return Metrics(records)
