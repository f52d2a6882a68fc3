"""Numbers that broke someone's run: NaN, overflow, empty batches, sequences of nothing,
lengths of one.

A NaN at a valid token is never hidden, whatever would have been rejected, clipped or dropped around
it; a huge log-ratio is bounded and counted; nothing to train on is loss 0 with a gradient of zeros.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import in_shares, walked

import policyloss as pl
from cases import (
    AGGREGATES,
    BY_CORRECTION,
    PRESETS,
    RATIOS,
    SPECS,
    TRUSTS,
    Batch,
    Result,
    assert_same,
    assert_same_result,
    label,
    layout_of,
    make_batch,
    run,
)

NAN = float("nan")
SMALL = make_batch(seed=3, rows=3, width=4)
every_spec = walked("name", SPECS)
every_preset = walked("name", PRESETS)
every_layout = walked("layout", ["padded", "packed"])
# In the other modes a rejected token leaves the batch ("as if the mask had been False"),
# and its content with it.
KEEPING = {
    **PRESETS,
    **{name: spec for name, spec in BY_CORRECTION.items() if spec.rejected == "keep"},
}
BY_TRUST = {label(t): pl.LossSpec(trust=t, kl=pl.KL("k3", 0.1), entropy_coef=0.01) for t in TRUSTS}


def laid_out(batch: Batch, layout: str) -> Batch:
    return batch.packed() if layout == "packed" else batch


def tensors_read(spec: pl.LossSpec) -> list[str]:
    integers = ("group_ids", "ages")  # have no NaN
    return ["logp", "advantages", *(name for name in spec.reads if name not in integers)]


def with_nan(batch: Batch, name: str, place: tuple[int, ...]) -> Batch:
    tensor = getattr(batch, name).clone()
    tensor[place] = NAN
    return dataclasses.replace(batch, **{name: tensor})


def hidden_nans(spec: pl.LossSpec, batch: Batch) -> list[str]:
    """The places where one NaN, in a tensor the spec reads at a token it trains on,
    leaves the loss or the count untouched.
    """
    hidden = []
    for name in tensors_read(spec):
        for place in batch.mask.nonzero().tolist():
            with torch.no_grad():
                out = pl.policy_loss(spec, **with_nan(batch, name, tuple(place)).kwargs)
            if not (out.loss.isnan() and out.metrics["nonfinite_tokens"].value >= 1):
                hidden.append(f"{name}{place}: loss {float(out.loss):.3g}")
    return hidden


@in_shares(2)
def test_a_nan_at_a_valid_token_shows(share: int) -> None:
    specs = {**KEEPING, **BY_TRUST}
    hidden = {name: hidden_nans(specs[name], SMALL) for name in [*specs][share::2]}
    assert {name: places for name, places in hidden.items() if places} == {}


@walked(
    "name", ["gspo", "gspo_turn", "gmpo", "rloo_loss", "seq_mask_tis", "clip_cov", "kl_cov", "opsm"]
)
def test_a_nan_at_a_valid_token_shows_when_packed(name: str) -> None:
    assert not hidden_nans(PRESETS[name], SMALL.packed())


@walked("rejected", ["renormalise", "drop_sequence"])
@walked("name", [n for n in BY_CORRECTION if n.endswith(":keep")])
def test_a_nan_the_verdict_depends_on_is_not_dropped(name: str, rejected: Any) -> None:
    """With everything else well inside the bounds, a NaN rollout_logp can be neither kept nor
    dropped, so it must show.
    """
    spec = BY_CORRECTION[name].replace(rejected=rejected)
    agreeing = dataclasses.replace(SMALL, old_logp=SMALL.logp, rollout_logp=SMALL.logp)
    agreeing = agreeing.map(torch.zeros_like, "ages")
    hidden = []
    for tensor in ("old_logp", "rollout_logp"):
        if tensor in spec.reads:
            for place in SMALL.mask.nonzero().tolist():
                result = run(spec, with_nan(agreeing, tensor, tuple(place)))
                if not (result.loss.isnan() and result.metrics["nonfinite_tokens"] >= 1):
                    hidden.append(f"{tensor}{place}")
    assert not hidden


@walked("name", ["values", "returns", "old_values"])
@walked("kind", ["mse", "huber"])
def test_a_nan_at_a_valid_token_shows_in_the_value_loss(name: str, kind: Any) -> None:
    for place in SMALL.mask.nonzero().tolist():
        tensors = {
            "values": SMALL.logp.clone(),
            "returns": SMALL.advantages.clone(),
            "old_values": SMALL.old_logp.clone(),
        }
        tensors[name][tuple(place)] = NAN
        out = pl.value_loss(**tensors, mask=SMALL.mask, kind=kind)
        assert out.loss.isnan()
        assert out.metrics["nonfinite_tokens"].value >= 1


def far_off(distance: float, dtype: torch.dtype) -> Batch:
    """Every log-ratio (to old, rollout and ref) is ±distance,
    both signs of the advantage under each sign of it.
    """
    batch = make_batch(seed=4, rows=2, width=4)
    sign = torch.tensor([[1.0, 1, -1, -1], [-1, -1, -1, -1]], dtype=torch.float64)
    logp = torch.full_like(sign, -1.5 - distance)  # no anchor is positive
    anchor = logp - distance * sign
    advantages = torch.tensor([[2.0, -2, 2, -2], [1, 1, -3, -3]], dtype=torch.float64)
    batch = dataclasses.replace(
        batch,
        logp=logp,
        old_logp=anchor,
        rollout_logp=anchor,
        ref_logp=anchor,
        advantages=advantages,
        mask=torch.ones(2, 4, dtype=torch.bool),
        lengths=torch.tensor([4, 4]),
    )
    return batch.map(lambda x: x.to(dtype))


CLAMPED = {
    name: spec
    for name, spec in {**KEEPING, **BY_TRUST}.items()
    if getattr(spec.ratio, "log_clamp", None) is not None
}


@walked("distance", [30.0, 1000.0])
@walked("name", CLAMPED)
def test_huge_log_ratios_have_finite_losses_and_gradients(name: str, distance: float) -> None:
    for dtype in (torch.float32, torch.float64):
        result = run(CLAMPED[name], far_off(distance, dtype))
        assert result.loss.isfinite()
        assert result.dlogp.isfinite().all()
        assert result.metrics["nonfinite_tokens"] == 0


@walked("distance", [30.0, 1000.0])
@walked("ratio", [r for r in RATIOS if getattr(r, "anchor", "") != "current"], ids=label)
def test_clamped_tokens_are_counted(ratio: Any, distance: float) -> None:
    """Row 0 has +d, +d, −d, −d (mean and sum 0), row 1 only −d:
    all 8 tokens leave a token ratio's band, 4 a sequence's. Half of a token's log-ratio leaves it,
    too; the mean of a ratio and of the sequence's 1 is at least ½, so only +d leaves the band.
    """
    beyond = 8 if isinstance(ratio, pl.TokenRatio) else 4
    if isinstance(ratio, pl.MixedRatio):
        beyond = 6 if ratio.mean == "arithmetic" else 8
    spec = pl.LossSpec(ratio=ratio)
    for batch in (far_off(distance, torch.float32), far_off(distance, torch.float32).packed()):
        assert run(spec, batch).metrics["clamped_tokens"] == beyond
    assert run(spec, far_off(0.1, torch.float32)).metrics["clamped_tokens"] == 0


@walked("name", [n for n, s in PRESETS.items() if getattr(s.ratio, "log_clamp", 1) is None])
def test_without_a_clamp_an_overflow_is_loud_or_harmless(name: str) -> None:
    """Either the loss is not finite, or its gradient is finite:
    never a good-looking loss with a broken gradient.
    """
    for distance in (30.0, 100.0, 1000.0):
        batch = far_off(distance, torch.float32)
        for advantages in (batch.advantages, batch.advantages.abs(), -batch.advantages.abs()):
            result = run(PRESETS[name], dataclasses.replace(batch, advantages=advantages))
            assert result.dlogp.isfinite().all() or not result.loss.isfinite(), (
                f"at log-ratio {distance}"
            )


def test_a_log_ratio_of_a_token_the_engine_calls_impossible_is_bounded() -> None:
    """rollout_logp = −inf (cut by top-p): the importance weight is exp(20) at most, so TIS
    truncates it like any other.
    """
    batch = dataclasses.replace(
        SMALL, rollout_logp=torch.where(SMALL.mask, -torch.inf, 0.0).to(torch.float64)
    )
    result = run(PRESETS["tis"], batch)
    assert result.metrics["correction_weight_max"] == 2.0
    assert result.loss.isfinite()
    assert result.dlogp.isfinite().all()


def nothing_to_train_on() -> dict[str, Batch]:
    """Padded and packed: no valid token; no token (T = 0, N = 0 with sequences of length 0);
    no sequence.
    """
    masked = dataclasses.replace(SMALL, mask=torch.zeros_like(SMALL.mask)).map(
        lambda x: torch.full_like(x, NAN)
    )
    no_tokens = dataclasses.replace(masked, lengths=torch.zeros_like(masked.lengths))
    no_columns = dataclasses.replace(
        no_tokens.map(lambda x: x[:, :0], *no_tokens.token_shaped), width=0
    )
    return {
        "masked, padded": masked,
        "masked, packed": masked.packed(),
        "no column": no_columns,
        "no packed token": no_tokens.packed(),
        "no row": masked.rows([]),
    }


@every_spec
def test_nothing_to_train_on_is_exactly_zero(name: str) -> None:
    for kind, batch in nothing_to_train_on().items():
        result = run(SPECS[name], batch)
        assert float(result.loss) == 0, kind
        assert result.dlogp.shape == (len(batch.lengths), batch.width), kind
        assert (result.dlogp == 0).all(), kind
        assert (result.dentropy == 0).all(), kind
        metrics = result.metrics
        assert metrics["tokens"] == metrics["nonfinite_tokens"] == metrics["loss"] == 0, kind


@walked("kind", nothing_to_train_on())
@walked("aggregate", AGGREGATES, ids=label)
def test_nothing_to_train_on_is_exactly_zero_for_the_value_loss(aggregate: Any, kind: str) -> None:
    batch = nothing_to_train_on()[kind]
    values = batch.logp.clone().requires_grad_()
    shared = layout_of(batch)
    out = pl.value_loss(
        values, batch.advantages, batch.old_logp, batch.mask, aggregate=aggregate, **shared
    )
    (gradient,) = torch.autograd.grad(out.loss, values)
    assert float(out.loss.detach()) == 0
    assert gradient.shape == values.shape
    assert (gradient == 0).all()


@every_spec
def test_a_fully_masked_sequence_is_no_sequence(name: str) -> None:
    """Without its empty and its fully masked row, the batch gives the same loss,
    gradient and metrics.
    """
    batch = make_batch(seed=6)
    assert int((batch.mask.sum(1) == 0).sum()) == 2
    present = [i for i, n in enumerate(batch.mask.sum(1).tolist()) if n]
    full, without = run(SPECS[name], batch), run(SPECS[name], batch.rows(present))
    assert (full.dlogp[[2, 3]] == 0).all()
    assert_same_result(
        Result(full.loss, full.dlogp[present], full.dentropy[present], full.records), without
    )
    assert int(pl.Totals.count(batch.mask).sequences) == len(present)


@every_layout
@every_preset
def test_zero_advantages_have_no_policy_gradient(name: str, layout: str) -> None:
    """Only a term that does not read the advantage may be left:
    a KL penalty, DRO's quadratic, a regression on the advantage, KL-Cov's penalty.
    """
    spec = PRESETS[name].replace(kl=None)
    batch = laid_out(SMALL.map(torch.zeros_like, "advantages"), layout)
    result = run(spec, batch)
    if isinstance(spec.trust, (pl.Quadratic, pl.Regression, pl.CovKL)):
        assert (result.dlogp != 0).any()
    else:
        assert float(result.loss) == 0
        assert (result.dlogp == 0).all()


def one_token(t: Tensor) -> Tensor:
    return t[:, 1:2]


@every_preset
def test_sequences_of_one_token(name: str) -> None:
    """T = 1: padded equals packed, and each sequence alone (B = 1) gives its share of the whole."""
    batch = SMALL.map(one_token, *SMALL.token_shaped)
    batch = dataclasses.replace(batch, width=1, lengths=torch.ones_like(batch.lengths))
    spec = PRESETS[name]
    result = run(spec, batch)
    assert result.loss.isfinite()
    assert_same_result(run(spec, batch.packed()), result)
    totals = pl.measure(spec, **batch.kwargs)
    parts = [run(spec, batch.rows([i]), totals) for i in range(3)]
    assert_same(sum(p.loss for p in parts), result.loss, what="loss")
    assert_same(torch.cat([p.dlogp for p in parts]), result.dlogp, what="gradient")


@cache
def token_losses_of_small_ratio_gap(dtype: torch.dtype, gap: float) -> float:
    logp = torch.tensor([[-8.0]], dtype=dtype)
    old = (logp.double() + gap).to(dtype)
    advantages, mask = torch.ones(1), torch.ones(1, 1, dtype=torch.bool)
    return float(
        pl.policy_loss(
            pl.preset("importance_sampling"), logp, None, advantages, mask, rollout_logp=old
        ).loss
    )


def test_half_precision_is_subtracted_in_float32() -> None:
    """−8 and −7.96875 are bfloat16 neighbours; their difference −0.03125 is exact
    in float32, e^−0.03125 = 0.969233…
    """
    value = token_losses_of_small_ratio_gap(torch.bfloat16, 0.03125)
    # bfloat16 arithmetic would give −0.96875 or −0.97265625.
    assert value == pytest.approx(-0.9692332344763441, rel=1e-7)
