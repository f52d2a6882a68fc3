"""Within `exact()` a token has the same bits alone, in any batch, at any place, padded or packed,
for every plan and window: log-probability, entropy, gradient of its hidden state, loss and metrics.

Everything runs on a GPU where there is one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
from head_cases import (
    CUDA,
    DEVICE,
    Case,
    assert_run_no_worse,
    assert_same_bits,
    backward,
    contract,
    dtype_name,
    generator,
    leaf,
    make_head_batch,
    peaked_case,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import policyloss as pl
from cases import PRESETS
from policyloss.head import softmax_rows
from policyloss.head import tiles as tiles_of
from policyloss.head.linear import head_and_sources
from policyloss.head.matmul import Room

SHAPES = {"1000x64": (1000, 64), "1024x300": (1024, 300), "5003x33": (5003, 33)}
DTYPES = (torch.float32, torch.bfloat16)
# Float16 on a GPU is refused, and float64 has no kernels there.
ALL_DTYPES = DTYPES if CUDA else (*DTYPES, torch.float16, torch.float64)
N = 41
FULL = PRESETS["dapo"].replace(kl=pl.KL("k3", 0.1), entropy_coef=0.05)
LOSSES = {
    "token": FULL,
    "sequence": FULL.replace(ratio=pl.SequenceRatio(), aggregate=pl.SeqMeanTokenMean()),
}


class Output(NamedTuple):
    """The results of a call of the loss, except the gradient of the weight."""

    loss: Tensor
    hidden: Tensor
    logp: Tensor
    entropy: Tensor
    metrics: dict[str, float]


def bits_case(shape: str, dtype: torch.dtype) -> Case:
    vocab, width = SHAPES[shape]
    return peaked_case(N, vocab, width, dtype, seed=7)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(shape, dtype):
    """Alone, in every other number, in another order, in windows of any size, and next to masked
    rows.
    """
    case = bits_case(shape, dtype)
    x, w, ids, b = case.hidden, case.weight, case.ids, case.bias

    def values(index: Any, **options: Any) -> pl.LogProbs:
        return pl.linear_logprobs(x[index], w, ids[index], b, 0.7, entropy=True, **options)

    with pl.exact():
        expected = values(slice(None))
        for index in ([0], [N - 1], [3, 1], list(range(17)), list(range(N))[::-1]):
            assert_same_bits(values(index), pl.LogProbs(*(e[index] for e in expected)))
        for rows in (1, 2, 19):
            assert_same_bits(values(slice(None), plan=pl.Plan("forward", rows, 0)), expected)
        mask = torch.arange(N, device=DEVICE) % 3 == 0
        masked = values(slice(None), mask=mask)
        assert_same_bits(
            pl.LogProbs(*(m[mask] for m in masked)), pl.LogProbs(*(e[mask] for e in expected))
        )


@pytest.mark.skipif(CUDA, reason="on a GPU the default has the same bits, but does not promise it")
def test_the_default_depends_on_the_company():
    """Otherwise the tests here would show nothing."""
    case = bits_case("1000x64", torch.float32)
    together = pl.linear_logprobs(case.hidden, case.weight, case.ids).logp
    alone = [
        pl.linear_logprobs(case.hidden[[i]], case.weight, case.ids[[i]]).logp for i in range(N)
    ]
    assert not torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_the_mode_changes_no_more_than_roundings(dtype):
    """The error against float64 is that of the default, up to a factor of two."""
    case = bits_case("1024x300", dtype)
    upstream = (case.dlogp, case.dentropy)
    arguments = (case.weight, case.ids, case.bias)
    runs = []
    for on in (True, False):
        hidden = leaf(case.hidden)
        with pl.exact(on):
            values = pl.linear_logprobs(hidden, *arguments, entropy=True)
        runs.append(backward(values, upstream, [hidden]))
    hidden = leaf(case.hidden, torch.float64)
    truth = contract(hidden, case.weight.double(), case.ids, case.bias.double())
    runs.append(backward(truth, upstream, [hidden]))
    assert_run_no_worse(*runs, factors={"hidden": 10.0}, logit=10.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_a_row_has_the_same_bits_in_any_company(shape, dtype):
    case = bits_case(shape, dtype)

    def gradient(index: Any, **options: Any) -> Tensor:
        hidden = leaf(case.hidden[index])
        with pl.exact():
            values = pl.linear_logprobs(
                hidden, leaf(case.weight), case.ids[index], entropy=True, **options
            )
        torch.autograd.backward(list(values), [case.dlogp[index], case.dentropy[index]])
        assert hidden.grad is not None
        return hidden.grad

    expected = gradient(slice(None))
    for index in ([0], [N - 1, 2], list(range(18)), list(range(N))[::-1]):
        assert torch.equal(gradient(index), expected[index])
    for plan in (pl.Plan("recompute", 5, 128), pl.Plan("recompute", 64, 300)):
        assert torch.equal(gradient(slice(None), plan=plan), expected)


def loss_of(batch: Any, spec: pl.LossSpec, **options: Any) -> Output:
    hidden, weight = leaf(batch.hidden), leaf(batch.weight)
    with pl.exact():
        out = pl.linear_policy_loss(spec, hidden, weight, batch.ids, **batch.kwargs, **options)
    out.loss.backward()
    assert hidden.grad is not None
    return Output(out.loss.detach(), hidden.grad, out.logp, out.entropy, out.metrics.compute())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_has_the_same_bits_for_every_plan_and_layout(kind, dtype):
    spec = LOSSES[kind]
    batch = make_head_batch(seed=3, rows=7, width=9, vocab=1024, size=96, dtype=dtype)
    expected = loss_of(batch, spec)
    plans = ["one_pass", "recompute", *(pl.Plan("one_pass", rows, 0) for rows in (9, 23, 500))]
    if dtype == torch.bfloat16:
        # Kept in half precision until all are multiplied together (on a CPU all is float32).
        plans.append(pl.Plan("one_pass", 16, 0, gathered=64))
    for plan in (*plans, pl.Plan("recompute", 11, 256)):
        assert_same_bits(loss_of(batch, spec, plan=plan)[:4], expected[:4])
        assert loss_of(batch, spec, plan=plan).metrics == expected.metrics
    packed, inside = loss_of(batch.packed(), spec), batch.tokens.inside.to(DEVICE)
    assert torch.equal(packed.loss, expected.loss)
    for a, e in zip(packed[1:4], expected[1:4], strict=True):
        assert torch.equal(a, e[inside])
    assert packed.metrics == expected.metrics


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_has_the_same_bits_for_any_cut_into_micro_batches(kind, dtype):
    spec = LOSSES[kind]
    batch = make_head_batch(seed=8, rows=7, width=9, vocab=1024, size=96, dtype=dtype)
    totals = pl.Totals.count(batch.kwargs["mask"], group_ids=batch.kwargs["group_ids"])
    expected = loss_of(batch, spec, totals=totals)
    for cut in ([[i] for i in range(7)], [[4, 0], [2, 6, 1], [5, 3]]):
        hidden, metrics = torch.zeros_like(expected.hidden), pl.Metrics()
        for rows in cut:
            part = batch.rows(rows)
            leaf_of = leaf(part.hidden)
            with pl.exact():
                out = pl.linear_policy_loss(
                    spec, leaf_of, batch.weight, part.ids, totals=totals, **part.kwargs
                )
            out.loss.backward()
            hidden[rows] = leaf_of.grad
            metrics = metrics + out.metrics
        assert torch.equal(hidden, expected.hidden)
        assert metrics.compute() == expected.metrics


def test_the_same_bits_from_logits_that_exist():
    case = bits_case("5003x33", torch.float32)
    with pl.exact():
        expected = pl.linear_logprobs(case.hidden, case.weight, case.ids, entropy=True)
        head = head_and_sources(case.hidden, case.weight, case.ids, None)[0]
        logits = head.logits(head.rows(slice(None)), head.room(N)).clone()
        assert_same_bits(pl.logprobs(logits, case.ids, entropy=True), expected)
        alone = [pl.logprobs(logits[i : i + 1], case.ids[i : i + 1]).logp for i in range(N)]
        assert torch.equal(torch.cat(alone), expected.logp)


def test_a_support_and_a_softcap():
    """Of 1000 entries a token keeps 4, in one part of the vocabulary or in several."""
    case = bits_case("1000x64", torch.float32)
    draws = torch.randint(1000, (N, 4), generator=generator(1)).to(DEVICE)
    draws[:, 0] = case.ids
    offsets = torch.arange(0, 4 * N + 1, 4, device=DEVICE)
    options = {"softcap": 20.0, "entropy": True}
    with pl.exact():
        together = pl.linear_logprobs(
            case.hidden, case.weight, case.ids, support=(draws.flatten(), offsets), **options
        )
        for i in (0, 9, N - 1):
            alone = pl.linear_logprobs(
                case.hidden[[i]],
                case.weight,
                case.ids[[i]],
                support=(draws[i], offsets[:2]),
                **options,
            )
            assert_same_bits(alone, pl.LogProbs(*(x[[i]] for x in together)))
    plain = pl.linear_logprobs(
        case.hidden, case.weight, case.ids, support=(draws.flatten(), offsets), **options
    )
    for ours, expected in zip(together, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_several_threads(threads):
    """They share the sum of a lone row of many logits, unless it is kept from them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = torch.randn(24, 70001, generator=generator(2))
        ids = torch.randint(70001, (24,), generator=generator(3))
        together = pl.logprobs(logits, ids, entropy=True)
        for i in range(24):
            alone = pl.logprobs(logits[[i]], ids[[i]], entropy=True)
            assert_same_bits(alone, pl.LogProbs(*(x[[i]] for x in together)))
    finally:
        torch.set_num_threads(before)


def test_a_shard_of_the_vocabulary_has_the_products_of_all_of_it():
    """The logits of whole parts, and the tree of the gradient's parts: what ranks rest on."""
    case = peaked_case(N, 1024, 64, torch.bfloat16, seed=2)
    with pl.exact():
        head = head_and_sources(case.hidden, case.weight, case.ids, None)[0]
        shares = [
            head_and_sources(case.hidden, w, case.ids % 256, None)[0] for w in case.weight.chunk(4)
        ]
    tiles, everything = head.tiles, slice(None)
    assert tiles is not None
    z = head.logits(head.rows(everything), head.room(N)).clone()
    out = torch.empty(N, 64, device=DEVICE)
    tiles.hidden_gradient(z.to(head.hidden.dtype), head.weight, out)
    parts = []
    for i, share in enumerate(shares):
        here = slice(256 * i, 256 * (i + 1))
        of_rank = tiles._replace(parts=tuple(slice(0 + a, 128 + a) for a in (0, 128)))
        rows = tiles.full(N)
        cut = Room(rows, 256, z, z.dtype).logits(rows, 256)
        of_rank.logits(share.hidden, share.weight, cut)
        assert torch.equal(cut[:N], z[:, here])
        part = torch.empty_like(out)
        of_rank.hidden_gradient(cut.to(head.hidden.dtype), share.weight, part)
        parts.append(part)
    assert torch.equal((parts[0] + parts[1]) + (parts[2] + parts[3]), out)


class _LargeRooms(TorchDispatchMode):
    """Counts the tensors without values that hold the logits of N rows or more."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.least, self.count = N * vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self.count += out.numel() >= self.least
        return out


@pytest.mark.skipif(CUDA, reason="there a tile of hidden states counts as large, too")
@pytest.mark.parametrize(("plan", "rooms"), [("one_pass", 1), ("recompute", 2)])
def test_rows_that_fill_no_tile_are_not_copied_into_one(plan, rooms):
    """Their logits are made in a tile, and their gradient is multiplied in the same place."""
    vocab = 1024
    batch = make_head_batch(seed=3, rows=7, width=9, vocab=vocab, size=8, dtype=torch.float32)
    spec = LOSSES["token"]
    loss_of(batch, spec, plan=plan)  # the shapes are tried once
    with _LargeRooms(vocab) as large:
        loss_of(batch, spec, plan=plan)
    assert large.count == rooms


@pytest.mark.parametrize("plan", ["one_pass", "recompute"])
def test_the_padding_of_a_tile_does_not_matter(plan):
    """Rows that only the metrics need, or memory of a larger window, next to rows that move."""
    batch = make_head_batch(seed=5, rows=7, width=9, vocab=1024, size=96, dtype=torch.float32)
    spec = LOSSES["token"].replace(kl=None, entropy_coef=0.0)
    advantages, hidden = batch.tokens.advantages.clone(), batch.hidden.clone()
    advantages[:, ::2], hidden[:, ::2] = 0, 1e30
    some = dataclasses.replace(batch.with_tokens(advantages=advantages), hidden=hidden)
    expected = loss_of(batch, spec, plan=plan).hidden[:, 1::2]
    assert expected.abs().sum() > 0
    assert torch.equal(loss_of(some, spec, plan=plan).hidden[:, 1::2], expected)


@pytest.mark.parametrize("vocab", [300, 256])
def test_the_kernels_walk_parts_of_a_vocabulary(monkeypatch, vocab):
    """Triton's, on any machine: a part is a view of some columns, with its own part of the bias.

    Equal parts without a bias are rows of one launch, each with the temperature of its row.
    """
    pytest.importorskip("interpreted")
    monkeypatch.setattr(softmax_rows, "_reason_against_kernels", lambda *_: "")
    case = peaked_case(2, vocab, 16, torch.float32, seed=1)
    bias, rates = (case.bias if vocab == 300 else None), torch.linspace(0.5, 0.9, 2, device=DEVICE)

    def values(index: Any) -> pl.LogProbs:
        return pl.linear_logprobs(
            case.hidden[index], case.weight, case.ids[index], bias, rates[index], entropy=True
        )

    plain = values(slice(None))
    with pl.exact():
        together = values(slice(None))
        assert_same_bits(values([1]), pl.LogProbs(*(x[[1]] for x in together)))
    for a, e in zip(together, plain, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 15, 16, 50, 127, 128, 1000, 50257, 151936])
def test_parts_cover_a_vocabulary(vocab):
    vocabulary = tiles_of.Vocabulary(vocab, vocab)
    tiles = tiles_of.Tiles.of_vocabulary(vocabulary, torch.empty(vocab, 1))
    columns = [i for part in tiles.parts for i in range(part.start, part.stop)]
    assert columns == list(range(vocab))
    assert all(part.start % 16 == 0 for part in tiles.parts)
    assert len(tiles.parts) == 8 or vocab < 128


def test_the_mode_refuses_some_calls():
    case = bits_case("1000x64", torch.float32)
    arguments = (leaf(case.hidden), case.weight, case.ids)
    teacher = pl.Teacher(case.hidden, case.weight)
    with pl.exact():
        with pytest.raises(pl.InputError, match="plan='stash' keeps rounded probabilities"):
            pl.linear_logprobs(*arguments, plan="stash")
        with pytest.raises(pl.InputError, match=r"exact\(\) does not cover a teacher"):
            pl.linear_divergence(*arguments[:2], teacher, kind="reverse")
        half = torch.zeros(2, 4, dtype=torch.float16)
        with pytest.raises(pl.InputError, match="float16"):
            tiles_of.Tiles.of(half, half, tiles_of.Vocabulary(2, 2))


def test_a_device_with_position_dependent_products_is_refused(monkeypatch):
    def biased(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
        out[-1] *= 1 + 2 * torch.finfo(out.dtype).eps

    monkeypatch.setattr(tiles_of, "product", biased)
    monkeypatch.setattr(tiles_of, "_CHECKED", {})
    case = bits_case("1000x64", torch.float32)
    with pl.exact(), pytest.raises(pl.InputError, match="the bits of a row depend on its place"):
        pl.linear_logprobs(case.hidden, case.weight, case.ids)


def rounds_wide_products_otherwise(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device whose product over all 1000 entries has other bits; the widths it multiplies."""
    widths: list[int] = []

    def by_width(a: Tensor, b: Tensor, out: Tensor) -> None:
        widths.append(b.shape[1])
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
        if b.shape[1] == 1000:
            out *= 1 + 2 * torch.finfo(out.dtype).eps

    monkeypatch.setattr(tiles_of, "product", by_width)
    monkeypatch.setattr(tiles_of, "_CHECKED", {})
    return widths


def test_one_product_of_other_bits_is_not_taken(monkeypatch):
    """A product over all entries that rounds in its own way: the parts are multiplied instead."""
    case = bits_case("1000x64", torch.float32)
    widths = rounds_wide_products_otherwise(monkeypatch)
    with pl.exact():
        pl.linear_logprobs(case.hidden, case.weight, case.ids)
        widths.clear()
        pl.linear_logprobs(case.hidden, case.weight, case.ids)
        assert sorted(set(widths)) == [112, 128, 136]


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_trial_does_not_depend_on_the_weight_it_meets_first(monkeypatch, value):
    """Of a weight of zeros, or of one that is not finite, every product looks the same."""
    case = bits_case("1000x64", torch.float32)
    rounds_wide_products_otherwise(monkeypatch)
    with pl.exact():
        pl.linear_logprobs(case.hidden, torch.full_like(case.weight, value), case.ids)
    assert list(tiles_of._CHECKED.values()) == [False]


def test_a_trial_holds_for_one_layout_one_precision_and_one_number_of_threads(monkeypatch):
    """A weight whose columns lie together is multiplied by other code, and so is TF32."""
    case = bits_case("1000x64", torch.float32)
    monkeypatch.setattr(tiles_of, "_CHECKED", {})
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        with pl.exact():
            pl.linear_logprobs(case.hidden, case.weight, case.ids)
            pl.linear_logprobs(case.hidden[:3], case.weight + 1, case.ids[:3])
            assert len(tiles_of._CHECKED) == 1
            pl.linear_logprobs(case.hidden, case.weight.t().contiguous().t(), case.ids)
            assert len(tiles_of._CHECKED) == 2
            torch.set_float32_matmul_precision("medium" if before == "highest" else "highest")
            pl.linear_logprobs(case.hidden, case.weight, case.ids)
            assert len(tiles_of._CHECKED) == 3
            torch.set_num_threads(threads + 1)
            pl.linear_logprobs(case.hidden, case.weight, case.ids)
            assert len(tiles_of._CHECKED) == 4
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_num_threads(threads)


def test_plans_hold_whole_tiles():
    case = bits_case("1000x64", torch.float32)
    with pl.exact():
        plan = pl.explain_plan(None, leaf(case.hidden), case.weight, case.ids)
    rows = tiles_of.GPU_ROWS if CUDA else tiles_of.CPU_ROWS
    assert plan.rows % rows == 0
    assert plan.name == "recompute"
    assert dataclasses.replace(plan, rows=7).rows == 7


@pytest.mark.parametrize("count", range(1, 9))
def test_a_stack_is_summed_by_halves(count):
    """As the parts of one rank are, so that ranks which hold some of them get the same bits."""
    x = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    expected = tiles_of.tree(lambda i: x[i].clone(), 0, count)
    assert torch.equal(tiles_of._tree_of(x), expected)
    by_hand = {
        3: lambda a, b, c: (a + b) + c,
        4: lambda a, b, c, d: (a + b) + (c + d),
        5: lambda a, b, c, d, e: ((a + b) + c) + (d + e),
        6: lambda a, b, c, d, e, f: ((a + b) + c) + ((d + e) + f),
        7: lambda a, b, c, d, e, f, g: ((a + b) + (c + d)) + ((e + f) + g),
    }
    if count in by_hand:
        assert torch.equal(expected, by_hand[count](*x))


@pytest.mark.parametrize("wanted", ["all", "weight", "hidden"])
def test_the_weight_gradient_of_several_windows(wanted):
    """Of plan "recompute", which goes back by parts of the vocabulary; windows add up."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 12, generator=g, dtype=torch.float64)
    weight = torch.randn(256, 12, generator=g, dtype=torch.float64)
    bias, ids = torch.randn(256, generator=g).double(), torch.arange(300) % 256
    leaves = [
        x.clone().requires_grad_(wanted in ("all", name))
        for x, name in ((hidden, "hidden"), (weight, "weight"), (bias, "weight"))
    ]
    plain = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
    with pl.exact():
        out = pl.linear_logprobs(
            *leaves[:2], ids, leaves[2], entropy=True, plan=pl.Plan("recompute", 16, 0)
        )
        (out.logp.sum() + out.entropy.sum()).backward()
    s = (plain[0] @ plain[1].t() + plain[2]).log_softmax(-1)
    entropy = -(s.exp() * s).sum(-1)
    (s.gather(-1, ids.unsqueeze(-1)).sum() + entropy.sum()).backward()
    for x, other in zip(leaves, plain, strict=True):
        assert (x.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=1e-10)
