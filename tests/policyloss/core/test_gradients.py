"""The gradient of autograd is the derivative of the loss, with stopped gradients held constant.

float64, finite differences. Presets are checked entry by entry; every loss one slot away from a
preset along a random direction, which sees any wrong entry with probability one. Points are away
from clip bounds; a kink would fail loudly, not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from walk import in_shares, walked

import policyloss as pl
from cases import (
    AGGREGATES,
    NAMED,
    NEIGHBOURS,
    PRESETS,
    Batch,
    label,
    layout_of,
    make_batch,
    run,
    with_streams,
)
from policyloss.check.loss import FrozenStopGradients

BATCH = make_batch(seed=5, rows=5, width=4)
LAYOUTS = {"padded": BATCH, "packed": BATCH.packed()}


def loss_of(spec: Any, batch: Batch) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logp: Tensor, entropy: Tensor) -> Tensor:
        carried = {"logp": logp, "entropy": entropy}
        if spec.divergence is not None:  # moves with the entropy, so that both are checked
            carried["divergence"] = 0.2 + 0.3 * entropy
        return pl.policy_loss(spec, **with_streams(spec, {**batch.kwargs, **carried})).loss

    return loss


def check_every_entry(f: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Raise unless autograd's gradient of `f` is its numerical derivative, entry by entry,
    with stop-gradients held.
    """
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    gradcheck(FrozenStopGradients().function(f, *leaves), leaves, eps=1e-6, atol=1e-7, rtol=1e-6)


def check_direction(f: Callable[..., Tensor], *inputs: Tensor) -> None:
    """The same along one random direction u: `grad·u = (f(x + hu) − f(x − hu)) / 2h`. Three
    evaluations instead of forty.
    """
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    mode, h, g = FrozenStopGradients(), 1e-6, torch.Generator().manual_seed(0)
    frozen = mode.function(f, *leaves)
    u = [torch.rand(x.shape, generator=g, dtype=torch.float64) + 0.1 for x in leaves]
    gradients = torch.autograd.grad(mode.base, leaves, allow_unused=True)
    analytic = sum((dx * d).sum() for dx, d in zip(gradients, u, strict=True) if dx is not None)
    with torch.no_grad():
        up, down = (frozen(*(x + s * d for x, d in zip(leaves, u, strict=True))) for s in (h, -h))
    numerical = (up - down) / (2 * h)
    if not torch.isclose(numerical, torch.as_tensor(analytic), rtol=1e-6, atol=1e-8):
        raise RuntimeError(
            f"Jacobian mismatch: autograd says {float(analytic)}, finite differences "
            f"{float(numerical)}"
        )


CHECKS = {"every_entry": check_every_entry, "direction": check_direction}


def check_spec(spec: Any, batch: Batch, check: Callable[..., None]) -> None:
    loss = loss_of(spec, batch)
    if "entropy" in spec.reads or spec.divergence is not None:
        check(loss, batch.logp, batch.entropy)
    else:
        check(lambda logp: loss(logp, batch.entropy), batch.logp)


@in_shares(2)
@walked("name", NAMED)
def test_preset_gradient_is_the_derivative(name: str, share: int) -> None:
    layout = list(LAYOUTS)[(list(NAMED).index(name) + share) % 2]
    check_spec(NAMED[name], LAYOUTS[layout], check_every_entry)


@walked("layout", LAYOUTS)
def test_entropy_gradient_is_the_derivative(layout: str) -> None:
    check_spec(PRESETS["grpo"].replace(entropy_coef=0.01), LAYOUTS[layout], check_every_entry)


@walked("name", NAMED)
def test_the_points_of_the_check_have_a_gradient(name: str) -> None:
    """A check at a point where every token is clipped would prove nothing."""
    dlogp = run(NAMED[name], BATCH).dlogp
    assert (dlogp != 0).sum() >= 2


@in_shares(5)
@walked("name", PRESETS)
def test_gradient_of_every_one_slot_neighbour(name: str, share: int) -> None:
    """Layouts alternate, out of step between presets, so that each part is met in both; and so do
    the five shares, so that the first one combines each part with every fifth preset.
    """
    wrong = []
    first = list(PRESETS).index(name)
    for i, (change, spec) in enumerate(NEIGHBOURS[name].items(), start=first):
        if i % 5 != share:
            continue
        layout = list(LAYOUTS)[i % 2]
        try:
            check_spec(spec, LAYOUTS[layout], check_direction)
        except RuntimeError as error:
            wrong.append(f"{name} with {change}, {layout}: {error}")
    assert not wrong, "\n".join(wrong)


def value_loss_of(batch: Batch, **kwargs: Any) -> Callable[[Tensor], Tensor]:
    def loss(values: Tensor) -> Tensor:
        shared = layout_of(batch)
        return pl.value_loss(
            values, batch.advantages, batch.old_logp, batch.mask, **shared, **kwargs
        ).loss

    return loss


@walked("layout", LAYOUTS)
@walked("clip", [0.2, None], ids=["clipped", "unclipped"])
@walked("kind", ["mse", "huber"])
def test_value_loss_gradient(kind: Any, clip: float | None, layout: str) -> None:
    batch = LAYOUTS[layout]
    # A Huber bend at 0.7 puts errors on both sides of it;
    # returns are the batch's advantages, old values its old_logp.
    loss = value_loss_of(batch, clip=clip, kind=kind, huber_delta=0.7)
    check_every_entry(loss, batch.logp)


@walked("aggregate", AGGREGATES, ids=label)
def test_value_loss_gradient_under_every_aggregation(aggregate: Any) -> None:
    for batch in LAYOUTS.values():
        check_direction(value_loss_of(batch, aggregate=aggregate), batch.logp)


class _DoubledGradient(torch.autograd.Function):
    """The identity, with twice its gradient: a mistake the check must see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


@walked("check", CHECKS.values(), ids=CHECKS)
@walked("layout", LAYOUTS)
def test_the_check_sees_a_wrong_gradient(layout: str, check: Callable[..., None]) -> None:
    right = PRESETS["ppo"].replace(trust=lambda t: -t.advantages * t.ratio)
    wrong = PRESETS["ppo"].replace(trust=lambda t: -t.advantages * _DoubledGradient.apply(t.ratio))
    check_spec(right, LAYOUTS[layout], check)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        check_spec(wrong, LAYOUTS[layout], check)


def test_one_wrong_entry_is_seen_along_a_random_direction() -> None:
    """A gradient wrong at a single token only is still caught by the one-direction check."""

    def trust(t: pl.Tokens) -> Tensor:
        only = torch.zeros_like(t.mask)
        only[1, 1] = True
        return -t.advantages * torch.where(only, _DoubledGradient.apply(t.ratio), t.ratio)

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        check_spec(PRESETS["ppo"].replace(trust=trust), BATCH, check_direction)


@walked("name", ["cispo", "gspo_token", "topr", "vespo"])
def test_stop_gradients_have_to_be_held(name: str) -> None:
    """Without freezing, these losses fail the check:
    freezing holds exactly their stop-gradients.
    """
    loss = loss_of(PRESETS[name], BATCH)
    logp = BATCH.logp.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(lambda x: loss(x, BATCH.entropy), (logp,), eps=1e-6, atol=1e-6, rtol=1e-5)
