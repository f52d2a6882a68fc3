"""The loss does not depend on padding content and width, row order, layout, the shape of
advantages, or the dtype of the mask.

Held for every preset, every aggregation and every correction under every rejection mode
(`cases.LOSSES`), in loss, gradients and every metric; bit for bit where the arithmetic is the same,
to 1e-12 where only the order of a sum differs.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import (
    AGGREGATES,
    CORRECTIONS,
    LOSSES,
    PRESETS,
    PULLS,
    RATIOS,
    TOKEN_TENSORS,
    TRUSTS,
    Batch,
    Result,
    assert_same,
    assert_same_result,
    layout_of,
    make_batch,
    run,
)
from policyloss.parts import aggregate, correction, kl, ratio, trust

BATCH = make_batch(seed=1)
NAN, INF = float("nan"), float("inf")
# All NaN, and a mixture that meets itself in every pairing (inf − inf, 1e30 − nan, …) because each
# tensor starts elsewhere in it.
GARBAGE = ((NAN,), (INF, -INF, 1e30, NAN, -1e30, INF))
every_spec = walked("name", LOSSES)
every_preset = walked("name", PRESETS)


def poisoned(batch: Batch, garbage: tuple[float, ...]) -> Batch:
    """The batch with garbage at every masked position of every tensor."""
    for i, name in enumerate(TOKEN_TENSORS):
        places = (torch.arange(batch.mask.numel()) + i).reshape(batch.mask.shape) % len(garbage)
        values = torch.tensor(garbage, dtype=torch.float64)[places]
        batch = batch.map(partial(torch.where, batch.mask, other=values), name)
    return batch.map(lambda ages: torch.where(batch.mask, ages, -7), "ages")


@cache
def of_batch(name: str) -> Result:
    """What `LOSSES[name]` gives on `BATCH`, computed once."""
    return run(LOSSES[name], BATCH)


@walked(
    ("module", "parts"),
    [
        (ratio, RATIOS),
        (trust, TRUSTS),
        (correction, sum(CORRECTIONS, ())),
        (kl, PULLS),
        (aggregate, AGGREGATES),
    ],
    ids=["ratio", "trust", "correction", "kl", "aggregate"],
)
def test_the_lists_leave_no_part_out(module: Any, parts: tuple[Any, ...]) -> None:
    assert {type(p) for p in parts} == set(module.VARIANTS)


@walked("layout", ["padded", "packed"])
@every_spec
def test_masked_positions_change_nothing(name: str, layout: str) -> None:
    batch = BATCH if layout == "padded" else BATCH.packed()
    expected = run(LOSSES[name], batch.map(lambda x: torch.where(batch.mask, x, -1.0)))
    assert (expected.dlogp[~BATCH.mask] == 0).all()
    for garbage in GARBAGE:
        assert_same_result(run(LOSSES[name], poisoned(batch, garbage)), expected, tol=0)


@every_spec
def test_padded_equals_packed(name: str) -> None:
    """Rows of length 0 become empty sequences of the pack;
    they and fully masked ones count for nothing in both layouts.
    """
    assert_same_result(run(LOSSES[name], BATCH.packed()), of_batch(name))


@every_spec
def test_row_order_does_not_matter(name: str) -> None:
    order = [4, 2, 6, 0, 5, 1, 3]
    result, expected = run(LOSSES[name], BATCH.rows(order)), of_batch(name)
    moved = Result(expected.loss, expected.dlogp[order], expected.dentropy[order], expected.records)
    assert_same_result(result, moved)


def widened(batch: Batch, extra: int) -> Batch:
    def pad(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, extra), value=NAN if x.is_floating_point() else 0)

    return dataclasses.replace(batch.map(pad, *batch.token_shaped), width=batch.width + extra)


@every_spec
def test_extra_padding_columns_do_not_matter(name: str) -> None:
    result = run(LOSSES[name], widened(BATCH, 5))
    assert (result.dlogp[:, BATCH.width :] == 0).all()
    narrow = Result(
        result.loss, *(g[:, : BATCH.width] for g in (result.dlogp, result.dentropy)), result.records
    )
    assert_same_result(narrow, of_batch(name))


@every_spec
def test_one_advantage_per_sequence_is_the_same_for_each_of_its_tokens(name: str) -> None:
    per_sequence = torch.tensor([1.0, -0.5, 2.0, -3.0, 0.7, -1.2, 0.3], dtype=torch.float64)
    per_token = per_sequence[:, None].expand(BATCH.mask.shape)
    expected = run(LOSSES[name], dataclasses.replace(BATCH, advantages=per_token))
    for shape in ((7,), (7, 1)):
        short = dataclasses.replace(BATCH, advantages=per_sequence.reshape(shape))
        assert_same_result(run(LOSSES[name], short), expected, tol=0)
        assert_same_result(
            run(LOSSES[name], dataclasses.replace(BATCH.packed(), advantages=short.advantages)),
            expected,
        )


@every_preset
def test_mask_may_be_bool_integer_or_float(name: str) -> None:
    expected = of_batch(name)
    for dtype in (torch.int64, torch.uint8, torch.float32, torch.bfloat16):
        assert_same_result(
            run(PRESETS[name], BATCH.map(lambda m, d=dtype: m.to(d), "mask")), expected, tol=0
        )


@walked("value", [0.5, 2.0, -1.0, float("nan")])
def test_a_mask_that_is_not_0_or_1_is_an_error(value: float) -> None:
    mask = BATCH.mask.to(torch.float32)
    mask[0, 0] = value
    with pytest.raises(pl.InputError, match="mask must be bool or hold only 0 and 1"):
        run(PRESETS["ppo"], dataclasses.replace(BATCH, mask=mask))


@walked(
    ("name", "dtype"),
    [(n, torch.bfloat16) for n in LOSSES] + [(n, torch.float16) for n in PRESETS],
    ids=str,
)
def test_half_precision_inputs_are_upcast_before_anything_else(
    name: str, dtype: torch.dtype
) -> None:
    """The result of half-precision inputs is that of the same numbers in float32,
    the gradient rounded back once.
    """
    half = BATCH.map(lambda x: x.to(dtype))
    result, expected = (
        run(LOSSES[name], half),
        run(LOSSES[name], half.map(lambda x: x.to(torch.float32))),
    )
    assert result.loss.dtype == torch.float32
    assert_same(result.loss, expected.loss, 0, "loss")
    assert_same(result.dlogp, expected.dlogp.to(dtype), 0, "gradient")
    assert_same(result.dentropy, expected.dentropy.to(dtype), 0, "entropy gradient")
    assert_same(result.metrics, expected.metrics, 0, "metric")


@every_preset
def test_only_logp_needs_to_be_float64_for_a_float64_result(name: str) -> None:
    mixed = BATCH.map(
        lambda x: x.to(torch.float32),
        "old_logp",
        "rollout_logp",
        "ref_logp",
        "teacher_logp",
        "advantages",
    )
    expected = run(PRESETS[name], mixed.map(lambda x: x.to(torch.float64)))
    assert_same_result(run(PRESETS[name], mixed), expected, tol=0)


@every_spec
def test_the_same_inputs_give_the_same_bits(name: str) -> None:
    first = of_batch(name)
    torch.manual_seed(123)  # no global generator may enter, not even for the specs that draw tokens
    torch.rand(7)
    assert_same_result(run(LOSSES[name], BATCH), first, tol=0)


@every_spec
def test_the_inputs_are_not_written_to(name: str) -> None:
    for batch in (make_batch(seed=1), make_batch(seed=1).packed()):
        before = batch.map(torch.clone, *batch.token_shaped, "group_ids")
        run(LOSSES[name], batch)
        for tensor in (*batch.token_shaped, "group_ids"):
            assert torch.equal(getattr(batch, tensor), getattr(before, tensor)), tensor


@walked("layout", ["padded", "packed"])
@walked("clip", [0.2, None])
@walked("kind", ["mse", "huber"])
@walked("aggregate", AGGREGATES, ids=lambda a: type(a).__name__)
def test_value_loss_ignores_masked_positions_layout_and_row_order(
    aggregate: Any, kind: Any, clip: Any, layout: str
) -> None:
    def value_run(batch: Batch) -> Result:
        values = batch.logp.clone().requires_grad_()
        shared: dict[str, Any] = {
            **layout_of(batch),
            "huber_delta": 0.7,
        }
        out = pl.value_loss(
            values,
            batch.advantages,
            batch.old_logp,
            batch.mask,
            clip,
            kind,
            aggregate=aggregate,
            **shared,
        )
        (gradient,) = torch.autograd.grad(out.loss, values)
        return Result(out.loss.detach(), batch.as_rows(gradient), torch.zeros(()), out.metrics)

    expected = value_run(BATCH)
    order = [4, 2, 6, 0, 5, 1, 3]
    moved = Result(expected.loss, expected.dlogp[order], expected.dentropy, expected.records)
    assert_same_result(
        value_run(BATCH.rows(order) if layout == "padded" else BATCH.rows(order).packed()), moved
    )
    for garbage in GARBAGE:
        batch = poisoned(BATCH, garbage)
        assert_same_result(
            value_run(batch if layout == "padded" else batch.packed()),
            expected,
            0 if layout == "padded" else 1e-12,
        )
