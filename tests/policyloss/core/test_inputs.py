"""`Inputs`: every tensor of a call, `extras` and `teacher_logp` among them, reaches the parts
however the call is made.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import assert_same, make_batch
from policyloss.inputs import DIFFERENTIATED, OPTIONAL, TOKEN_SHAPED, Inputs

BATCH = make_batch(seed=4)
WEIGHT = torch.rand(
    BATCH.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)


def weighted(t: pl.Tokens) -> Tensor:
    """A trust region that reads a tensor of its own."""
    return -t.advantages * t.ratio * t.extra("weight")


weighted.reach = "token"  # type: ignore[attr-defined]
SPEC = pl.LossSpec(trust=weighted)
# The same loss in other words: the weight inside the advantages.
PLAIN, SCALED = pl.LossSpec(trust=pl.Unbounded()), BATCH.map(lambda x: x * WEIGHT, "advantages")


def gradient(spec: pl.LossSpec, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logp = arguments["logp"].clone().requires_grad_()
    loss = pl.policy_loss(spec, **{**arguments, "logp": logp}).loss
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


@walked("packed", [False, True], ids=["padded", "packed"])
def test_a_part_reads_an_extra(packed: bool) -> None:
    batch, scaled, weight = BATCH, SCALED, WEIGHT
    if packed:
        batch, scaled, weight = BATCH.packed(), SCALED.packed(), WEIGHT[BATCH.inside]
    ours = gradient(SPEC, {**batch.kwargs, "extras": {"weight": weight}})
    for x, y, what in zip(ours, gradient(PLAIN, scaled.kwargs), ("loss", "gradient"), strict=True):
        assert_same(x, y, what=what)


def test_an_extra_is_not_trained_and_garbage_where_masked_is_not_read() -> None:
    weight = torch.where(BATCH.mask, WEIGHT, torch.nan).requires_grad_()
    logp = BATCH.logp.clone().requires_grad_()
    out = pl.policy_loss(SPEC, **{**BATCH.kwargs, "logp": logp, "extras": {"weight": weight}})
    moved, frozen = torch.autograd.grad(out.loss, (logp, weight), allow_unused=True)
    assert moved.isfinite().all()
    assert frozen is None


@walked("plan", ["one_pass", "recompute"])
def test_the_windows_of_the_head_carry_extras(plan: str) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(*BATCH.mask.shape, 4, generator=generator, dtype=torch.float64)
    head = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 9, BATCH.mask.shape, generator=generator)
    left_out = ("logp", *DIFFERENTIATED, "advantages")
    shared = {n: x for n, x in BATCH.kwargs.items() if n not in left_out}

    def slopes(spec: pl.LossSpec, advantages: Tensor, **extras: Any) -> list[Tensor]:
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        out = pl.linear_policy_loss(
            spec, *leaves, ids, advantages=advantages, plan=plan, **shared, **extras
        )
        return [out.loss.detach(), *torch.autograd.grad(out.loss, leaves)]

    ours = slopes(SPEC, BATCH.advantages, extras={"weight": WEIGHT})
    for x, y in zip(ours, slopes(PLAIN, SCALED.advantages), strict=True):
        assert_same(x, y, what="loss and gradients")


def test_micro_batches_carry_extras() -> None:
    def taken(spec: pl.LossSpec, batch: Any, extras: Tensor | None) -> Tensor:
        parts = []
        for rows in (slice(0, 3), slice(3, None)):
            part = {n: x[rows] for n, x in batch.kwargs.items() if x is not None}
            parts.append(part | ({} if extras is None else {"extras": {"weight": extras[rows]}}))
        step = pl.accumulate(spec, parts)
        return sum(
            (micro.loss(part["logp"]) for micro, part in zip(step, parts, strict=True)),
            torch.zeros(()),
        )

    assert_same(taken(SPEC, BATCH, WEIGHT), taken(PLAIN, SCALED, None), what="loss")


def test_a_compiled_loss_takes_the_inputs_of_the_eager_one() -> None:
    arguments = {**BATCH.kwargs, "extras": {"weight": WEIGHT}, "teacher_logp": BATCH.ref_logp}
    eager = pl.policy_loss("ppo", **arguments)
    compiled = pl.compiled_loss("ppo")(**arguments)
    assert_same(compiled.loss, eager.loss, what="loss")


def test_a_teacher_is_a_policy_that_a_part_may_read() -> None:
    pull = pl.LossSpec(trust=lambda t: -t.advantages * t.ratio + t.log_ratio_to("teacher"))
    ours = gradient(pull, {**BATCH.kwargs, "teacher_logp": BATCH.ref_logp})
    by_ref = pl.LossSpec(trust=lambda t: -t.advantages * t.ratio + t.log_ratio_to("ref"))
    for x, y in zip(ours, gradient(by_ref, BATCH.kwargs), strict=True):
        assert_same(x, y, what="loss and gradient")


def test_errors_name_the_extra_and_the_argument() -> None:
    with pytest.raises(pl.InputError, match=r"reads extras\['weight'\], which is missing"):
        pl.policy_loss(SPEC, **BATCH.kwargs)
    with pytest.raises(pl.InputError, match=r"extras\.weight has shape \(3,\)"):
        pl.policy_loss(SPEC, **BATCH.kwargs, extras={"weight": torch.zeros(3)})
    with pytest.raises(pl.InputError, match="extras must be a mapping"):
        pl.policy_loss(SPEC, **BATCH.kwargs, extras=WEIGHT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown argument 'ref_lgp'; did you mean 'ref_logp'"):
        pl.policy_loss(SPEC, **BATCH.kwargs, ref_lgp=WEIGHT)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="the head computes it"):
        pl.linear_policy_loss(
            "ppo",
            WEIGHT[..., None],
            WEIGHT[:, :1],
            BATCH.mask.long(),
            **{n: x for n, x in BATCH.kwargs.items() if n != "logp"},
        )


@walked(
    "function",
    [
        pl.policy_loss,
        pl.measure,
        pl.CompiledLoss.__call__,
        pl.CompiledLoss.value_and_gradient,
        pl.linear_policy_loss,
    ],
    ids=lambda f: f.__qualname__,
)
def test_every_function_shows_every_tensor_it_takes(function: Any) -> None:
    """A new input is a line of `CallTensors` and a field of `Inputs`;
    nothing else names them all.
    """
    shown = set(inspect.signature(function).parameters)
    of_the_head = set(DIFFERENTIATED) if function is pl.linear_policy_loss else set()
    assert set(OPTIONAL) - shown == of_the_head
    assert {*OPTIONAL, "logp", "old_logp", "advantages", "mask"} == set(Inputs.__dataclass_fields__)
    assert set(TOKEN_SHAPED) <= set(Inputs.__dataclass_fields__)
