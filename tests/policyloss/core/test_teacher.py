"""A teacher's log-probabilities as an anchor, and weights of a KL that carry no gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import assert_same, make_batch, run, unweighted

BATCH = unweighted(make_batch(seed=4))
TEACHER = BATCH.ref_logp - 0.1 * BATCH.entropy
SILENT = dataclasses.replace(BATCH, advantages=torch.zeros_like(BATCH.advantages))


def distilled(kl: Any, **kwargs: Any) -> pl.LossSpec:
    return pl.LossSpec(trust=pl.Unbounded("logp"), kl=kl, aggregate=pl.TokenSum(), **kwargs)


def one_token(kl: pl.KL, logp: float, old: float, teacher: float) -> tuple[float, float]:
    """The loss and its gradient of a single token without advantage."""
    x = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    rest = [torch.tensor([[v]], dtype=torch.float64) for v in (old, 0.0, 1.0)]
    teacher_logp = torch.tensor([[teacher]], dtype=torch.float64)
    out = pl.policy_loss(distilled(kl), x, *rest, teacher_logp=teacher_logp)
    (slope,) = torch.autograd.grad(out.loss, x)
    return float(out.loss.detach()), float(slope)


def test_live_student_by_hand() -> None:
    """`−sg[t − lp]·lp` has the slope −(t − lp): that of k2, whatever the value that is reported."""
    # logp −1, teacher −1.5: d = t − lp = −0.5; k1 = 0.5; the slope is −d = 0.5.
    assert one_token(pl.KL("k1", 1.0, grad="k2", anchor="teacher"), -1.0, -1.3, -1.5) == (0.5, 0.5)
    # Ratio exp(−1 + 1.3) = e^0.3 as a detached weight: both are multiplied by it, and no more.
    weighted = pl.KL("k1", 1.0, grad="k2", weight="detached_ratio", anchor="teacher")
    loss, slope = one_token(weighted, -1.0, -1.3, -1.5)
    assert math.isclose(loss, 0.5 * math.exp(0.3))
    assert math.isclose(slope, 0.5 * math.exp(0.3))
    # Truncated at 1.2, below e^0.3 = 1.3499.
    truncated = dataclasses.replace(weighted, weight_max=1.2)
    assert one_token(truncated, -1.0, -1.3, -1.5) == pytest.approx((0.6, 0.6), abs=1e-15)
    # With its gradient, the ratio adds k1·r to the slope: 0.5·r + 0.5·r.
    carried = dataclasses.replace(weighted, weight="ratio")
    assert math.isclose(one_token(carried, -1.0, -1.3, -1.5)[1], math.exp(0.3))


def live_student(logp: Tensor, teacher: Tensor) -> Tensor:
    """The loss as the papers write it."""
    return -(teacher - logp).detach() * logp


def test_gradient_is_that_of_the_live_student() -> None:
    x = BATCH.logp.clone().requires_grad_()
    (expected,) = torch.autograd.grad(live_student(x, TEACHER)[BATCH.mask].sum(), x)
    kl = pl.KL("k1", 1.0, grad="k2", anchor="teacher")
    assert_same(run(distilled(kl), SILENT, teacher_logp=TEACHER).dlogp, expected, what="gradient")


def test_gradient_of_a_weighted_live_student() -> None:
    """prime-rl's form, `−sg[t − lp]·ρ` with the ratio to the engine: ρ·(lp − t) for each token."""
    kl = pl.KL("k1", 1.0, grad="k2", weight="detached_ratio", anchor="teacher", clamp=None)
    spec = distilled(kl, ratio=pl.TokenRatio(anchor="rollout"))
    x = BATCH.logp.clone().requires_grad_()
    ratio = (x - BATCH.rollout_logp).exp()
    (expected,) = torch.autograd.grad((-(TEACHER - x).detach() * ratio)[BATCH.mask].sum(), x)
    assert_same(run(spec, SILENT, teacher_logp=TEACHER).dlogp, expected, what="gradient")


@walked("ratio", [pl.TokenRatio, pl.SequenceRatio, pl.SequenceProduct])
def test_the_ratio_may_be_to_the_teacher(ratio: Any) -> None:
    """On tokens that the teacher wrote, the teacher is the policy that sampled."""
    spec = pl.LossSpec(ratio(anchor="teacher"), pl.Unbounded("ratio"))
    as_old = dataclasses.replace(BATCH, old_logp=TEACHER)
    expected = run(spec.replace(ratio=ratio()), as_old)
    actual = run(spec, BATCH, teacher_logp=TEACHER)
    assert_same(actual.loss, expected.loss, what="loss")
    assert_same(actual.dlogp, expected.dlogp, what="gradient")
    assert spec.reads == ("teacher_logp",)


def test_the_tensors_of_a_teachers_kl() -> None:
    assert pl.LossSpec(kl=pl.KL("k3", 0.1, anchor="teacher")).reads == ("old_logp", "teacher_logp")
    with pytest.raises(pl.InputError, match="teacher_logp, which is missing"):
        run(distilled(pl.KL("k2", 1.0, anchor="teacher")), BATCH, teacher_logp=None)
    weighted = distilled(pl.KL("k2", 1.0, weight="detached_ratio", anchor="teacher"))
    assert weighted.reads == ("old_logp", "teacher_logp")
    assert pl.LossSpec.from_dict(weighted.to_dict()) == weighted


def test_a_teachers_kl_is_the_kl_to_any_anchor() -> None:
    for estimator in ("k1", "k2", "k3", "abs"):
        for grad in ("value", "k2", "score"):
            kl = pl.KL(estimator, 0.3, grad=grad)
            expected = run(distilled(kl), BATCH)
            to_teacher = dataclasses.replace(kl, anchor="teacher")
            actual = run(distilled(to_teacher), BATCH, teacher_logp=BATCH.ref_logp, ref_logp=None)
            assert_same(actual.dlogp, expected.dlogp, 0, what=f"gradient of {estimator}, {grad}")


@walked("part", [{"weight_max": 2.0}, {"weight": "ratio", "weight_max": 2.0}])
def test_a_bound_belongs_to_a_detached_weight(part: dict[str, Any]) -> None:
    with pytest.raises(pl.SpecError, match=r"weight_max.*weight='detached_ratio'"):
        pl.KL("k1", 1.0, **part)


def test_explained_by_its_names() -> None:
    kl = pl.KL("k1", 0.5, grad="k2", weight="detached_ratio", weight_max=2.0, anchor="teacher")
    text = str(pl.explain(distilled(kl)))
    assert "teacher_logp" in text
    assert "sg(min(ratio, 2))" in text
    words = "KL(current, teacher), times the ratio, at most 2, without its gradient"
    assert words in " ".join(text.split())
