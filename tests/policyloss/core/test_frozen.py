"""Gradients reach logp and entropy but no frozen input, and none is NaN at a dtype's edge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from head_cases import make_head_batch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import BY_CORRECTION, KLS, TRUSTS, Batch, label, make_batch, with_divergence

FROZEN = ("old_logp", "rollout_logp", "ref_logp", "teacher_logp", "advantages")
_WEIGHTED = pl.LossSpec(
    correction=(pl.Truncate(1.1), pl.OPSM(0.01)),
    kl=pl.KL("k3", 0.1, weight="ratio"),
    entropy_coef=0.01,
)
LOSSES = {
    **{f"trust={label(part)}": _WEIGHTED.replace(trust=part) for part in TRUSTS},
    **{
        f"kl={label(part)}": _WEIGHTED.replace(trust=pl.Unbounded("ratio"), kl=part) for part in KLS
    },
    **{name: spec.replace(trust=pl.Unbounded("ratio")) for name, spec in BY_CORRECTION.items()},
}


def leaves_of(batch: Batch, per_sequence: bool) -> dict[str, Tensor]:
    """The frozen tensors, each requiring a gradient;
    advantages one per token or one per sequence.
    """
    actual = {name: getattr(batch, name).clone() for name in FROZEN}
    if per_sequence:
        actual["advantages"] = torch.linspace(-1, 1, 7, dtype=torch.float64)
    return {name: x.requires_grad_() for name, x in actual.items()}


@walked("per_sequence", [False, True], ids=["per token", "per sequence"])
@walked("layout", ["padded", "packed"])
def test_only_logp_and_entropy_get_a_gradient(layout: str, per_sequence: bool) -> None:
    """Whatever frozen tensors require, no part of any slot sends them a gradient."""
    batch = make_batch(seed=3) if layout == "padded" else make_batch(seed=3).packed()
    for name, spec in LOSSES.items():
        frozen = leaves_of(batch, per_sequence)
        logp = batch.logp.clone().requires_grad_()
        entropy = batch.entropy.clone().requires_grad_()
        carried = {"logp": logp, "entropy": entropy, "divergence": with_divergence(batch, entropy)}
        out = pl.policy_loss(spec, **{**batch.kwargs, **frozen, **carried})
        moved, *others = torch.autograd.grad(out.loss, [logp, *frozen.values()], allow_unused=True)
        assert moved is not None, name
        assert {n for n, g in zip(frozen, others, strict=True) if g is not None} == set(), name


def test_values_alone_get_a_gradient() -> None:
    batch = make_batch(seed=3)
    values, returns, old = (
        getattr(batch, n).clone().requires_grad_() for n in ("logp", "ref_logp", "old_logp")
    )
    out = pl.value_loss(values, returns, old, batch.mask)
    moved, *others = torch.autograd.grad(out.loss, [values, returns, old], allow_unused=True)
    assert moved.abs().max() > 0
    assert others == [None, None]


@walked("plan", ["one_pass", "recompute"])
def test_the_head_moves_hidden_states_and_weight_alone(plan: str) -> None:
    batch = make_head_batch(seed=2)
    hidden, weight = (x.clone().requires_grad_() for x in (batch.hidden, batch.weight))
    frozen = {name: batch.kwargs[name].clone().requires_grad_() for name in FROZEN}
    out = pl.linear_policy_loss(
        _WEIGHTED.replace(trust=pl.Unbounded("ratio")),
        hidden,
        weight,
        batch.ids,
        plan=plan,
        **{**batch.kwargs, **frozen},
    )
    moved = torch.autograd.grad(out.loss, [hidden, weight, *frozen.values()], allow_unused=True)
    assert [g is not None for g in moved] == [True, True, *[False] * len(FROZEN)]


@walked("dtype", [torch.float32, torch.float64], ids=str)
def test_a_clamp_at_the_edge_of_the_dtype(dtype: torch.dtype) -> None:
    """At a log-ratio held at ln(max), or next to it, exp may be infinite:
    a clipped token still has gradient 0, not 0·inf.
    """
    edge = math.log(torch.finfo(dtype).max)
    limits: list[Any] = [
        math.nextafter(edge, 0),
        edge,
        math.nextafter(edge, math.inf),
        edge * (1 - 1e-9),
        edge + 1,
    ]
    for limit in [*limits, *((None, x) for x in limits)]:
        # Ratios e^2·max held at about max, and e: with A = 1 both are clipped at 1.2,
        # the loss is −1.2 and its slope 0.
        logp = torch.tensor([[0.0, 0.0]], dtype=dtype, requires_grad=True)
        old = torch.tensor([[-edge - 2, -1.0]], dtype=dtype)
        spec = pl.LossSpec(ratio=pl.TokenRatio(log_clamp=limit))
        loss = pl.policy_loss(spec, logp, old, torch.ones_like(old), torch.ones(1, 2)).loss
        (slope,) = torch.autograd.grad(loss, logp)
        assert loss.item() == pytest.approx(-1.2, rel=1e-6), limit
        assert slope.tolist() == [[0, 0]], limit
