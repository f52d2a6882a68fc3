"""The plan "sparse": unbiased, with a bounded variance, the same draw in every cut of a batch.

The expectation over the offset of a row is an integral of a step function, which is added up here
step by step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.head import kernels, plans, sparse, sparse_kernels
from policyloss.head.head import HeadRows
from policyloss.head.softmax_rows import (
    Scaling,
    Statistics,
    rescale,
    row_gradient,
    row_partials,
    row_statistics,
)

V = 23
EPS = 0.05
G = torch.Generator().manual_seed(3)
BIAS = torch.randn(V, generator=G, dtype=torch.float64)
SCALINGS = {
    "plain": Scaling(),
    "temperature": Scaling(0.8),
    "bias": Scaling(1.0, bias=BIAS),
    "softcap": Scaling(1.2, softcap=3.0),
    "all": Scaling(0.9, softcap=3.0, bias=BIAS),
}
ENTROPY = {"no entropy": False, "entropy": True}


def statistics(z: Tensor, ids: Tensor, scaling: Scaling) -> Statistics:
    return row_statistics(row_partials(z, ids, scaling, entropy=True))


def sampled(z: Tensor, scaling: Scaling, entropy: bool, offsets: Tensor, eps: float) -> Any:
    """The sample of one row of logits `[V]` at each offset, as rows `[U, V]`; its exact gradient
    `[V]`; the sum of the variances at each offset.
    """
    ids = torch.tensor([4])
    s = statistics(z[None], ids, scaling)
    g, h = torch.tensor([1.7], dtype=z.dtype), torch.tensor([0.3 * entropy], dtype=z.dtype)
    exact = torch.empty_like(z)[None]
    row_gradient(z[None], exact, ids, s, g, h, scaling)
    found, variances = torch.zeros(len(offsets), len(z), dtype=z.dtype), []
    for i, offset in enumerate(offsets):
        rows = HeadRows(z[None, :1], ids, scaling)
        x = sparse.sample_entries(z[None], rows, s, (g, h), offset[None], eps)
        assert not x.dense.any()
        found[i].index_add_(0, x.columns[0].clamp(min=0), x.values[0])
        variances.append(x.variance)
    return found, exact[0], torch.stack(variances)


def offset_steps(z: Tensor, scaling: Scaling, eps: float) -> tuple[Tensor, Tensor]:
    """An offset from each interval on which the sample is constant, and the interval's length."""
    log_p = rescale(z[None], scaling)[0].log_softmax(-1)
    p = log_p.exp()
    tail = torch.where((p >= eps) | (torch.arange(len(z)) == 4), 0, p / eps)
    ends = torch.cat([torch.tensor([0.0, 1.0]).double(), (-tail.cumsum(0)) % 1]).sort().values
    return (ends[1:] + ends[:-1]) / 2, ends.diff()


@walked("entropy", ENTROPY)
@walked("name", SCALINGS)
def test_the_expectation_is_the_gradient(name: str, entropy: str) -> None:
    z = 2 * torch.randn(V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    offsets, lengths = offset_steps(z, SCALINGS[name], EPS)
    assert len(offsets) > 10
    found, exact, variances = sampled(z, SCALINGS[name], ENTROPY[entropy], offsets, EPS)
    assert (found != exact).any(1).all()
    mean = lengths @ found
    torch.testing.assert_close(mean, exact, rtol=0, atol=1e-12)
    variance = lengths @ (found - mean).square()
    torch.testing.assert_close(lengths @ variances, variance.sum(), rtol=1e-9, atol=0)
    p = rescale(z[None], SCALINGS[name])[0].softmax(-1)
    tail = (p < EPS) & (torch.arange(V) != 4)
    assert variance.sum() <= EPS * (exact.square() / p)[tail].sum()


def test_by_hand() -> None:
    """p = 0.6, 0.2, 0.06, 0.08, 0.06 and eps 0.1: the first two are kept; the running sum of the
    others in units of eps is 0.6, 1.4, 2.0 after an offset of 0, and an entry is kept where it
    passes an integer.
    """
    z = torch.tensor([0.6, 0.2, 0.06, 0.08, 0.06], dtype=torch.float64).log()
    ids = torch.tensor([0])
    s = statistics(z[None], ids, Scaling())
    kept = {}
    for offset in (0.1, 0.5, 0.7):
        columns, _ = sparse.choose_columns(
            z[None], ids, s, Scaling(), torch.tensor([offset], dtype=torch.float64), 0.1
        )
        kept[offset] = [c for c in columns[0].tolist() if c >= 0]
    assert kept == {0.1: [0, 1, 3, 4], 0.5: [0, 1, 2, 4], 0.7: [0, 1, 2, 3]}
    rows = HeadRows(z[None, :1], ids, Scaling())
    derivatives = (torch.tensor([2.0], dtype=torch.float64), None)
    x = sparse.sample_entries(z[None], rows, s, derivatives, torch.tensor([0.1]).double(), 0.1)
    expected = torch.tensor([0.8, -0.4, -0.2, -0.2], dtype=torch.float64)
    torch.testing.assert_close(x.values[0, :4], expected)


def test_ten_thousand_draws_of_a_large_vocabulary() -> None:
    g = torch.Generator().manual_seed(2)
    z = 3 * torch.randn(2000, generator=g)
    z[7] += 12
    draws = 10_000
    hidden = torch.randn(draws, 8, generator=g)
    ids = torch.full((draws,), 4)
    offsets = sparse.draw_offsets(hidden, ids, seed=5)
    s = Statistics(*(x.expand(draws) for x in statistics(z[None], ids[:1], Scaling())))
    total, squares = torch.zeros(2000, dtype=torch.float64), 0.0
    for part in torch.arange(draws).split(500):
        rows = HeadRows(hidden[part], ids[part], Scaling())
        of_part = Statistics(*(x[part] for x in s))
        derivatives = (torch.ones(len(part)), None)
        x = sparse.sample_entries(
            z.expand(len(part), -1), rows, of_part, derivatives, offsets[part], 1e-2
        )
        total.index_add_(0, x.columns.clamp(min=0).flatten(), x.values.double().flatten())
        squares += float(x.variance)
    exact = torch.empty(1, 2000)
    one = Statistics(*(x[:1] for x in s))
    row_gradient(z[None], exact, ids[:1], one, torch.ones(1), None, Scaling())
    error = (total / draws - exact[0].double()).norm()
    assert error < 1.2 * (squares / draws / draws) ** 0.5
    p = z.softmax(-1)
    tail = (p < 1e-2) & (torch.arange(2000) != 4)
    assert squares / draws <= 1e-2 * p[tail].sum()


def test_the_offset_belongs_to_the_token() -> None:
    g = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        hidden = torch.randn(4096, 12, generator=g).to(dtype)
        ids = torch.randint(9, (4096,), generator=g)
        offsets = sparse.draw_offsets(hidden, ids, 0)
        assert ((offsets >= 0) & (offsets < 1)).all()
        counts = torch.histc(offsets, 16, 0, 1)
        assert ((counts - 256).square() / 256).sum() < 45  # chi-square of 15: p = 1e-4
        turned = torch.randperm(4096, generator=g)
        assert torch.equal(sparse.draw_offsets(hidden[turned], ids[turned], 0), offsets[turned])
        for other in (sparse.draw_offsets(hidden, ids, 1), sparse.draw_offsets(hidden, ids + 1, 0)):
            assert abs(torch.corrcoef(torch.stack([other, offsets]))[0, 1]) < 0.08


# Through the public functions ---------------------------------------------------------------------


def batch(dtype: torch.dtype = torch.float64, vocabulary: int = 300, size: float = 1.2) -> Any:
    g = torch.Generator().manual_seed(11)
    hidden = size * torch.randn(6, 9, 8, generator=g, dtype=torch.float64)
    weight = torch.randn(vocabulary, 8, generator=g, dtype=torch.float64)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, 0.1 * weight[:, 0])]
    ids = torch.randint(vocabulary, (6, 9), generator=g)
    wide = torch.promote_types(dtype, torch.float32)
    old = -5 + torch.randn(6, 9, generator=g, dtype=torch.float64).to(wide)
    mask = torch.rand(6, 9, generator=g) < 0.8
    return leaves, ids, old, torch.randn(6, generator=g, dtype=torch.float64).to(wide), mask


def gradients(spec: Any, data: Any, plan: Any, rows: Any = slice(None), **others: Any) -> Any:
    (hidden, weight, bias), ids, old, advantages, mask = data
    tensors = (ids[rows], old[rows], advantages[rows], mask[rows])
    out = pl.linear_policy_loss(
        spec, hidden[rows], weight, *tensors, bias=bias, plan=plan, **others
    )
    return out, torch.autograd.grad(out.loss, (hidden, weight, bias))


SPECS = {
    "ppo": pl.preset("ppo_dual_clip"),
    "entropy": pl.preset("dapo").replace(entropy_coef=0.01),
    "gspo": pl.preset("gspo"),
    "clip_cov": pl.preset("clip_cov"),
}


@walked("name", SPECS)
def test_nothing_is_lost_where_every_entry_is_kept(name: str) -> None:
    """A vocabulary of fewer entries than a row may keep, or rows that are all dense."""
    for vocabulary in (100, 300):
        data = batch(vocabulary=vocabulary)
        full, expected = gradients(SPECS[name], data, "auto")
        out, found = gradients(SPECS[name], data, pl.Plan("sparse", eps=1e-14))
        assert torch.equal(out.loss, full.loss)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_dense_rows_that_are_gathered(monkeypatch: Any) -> None:
    """As on a GPU in half precision: with room for all of them, and for a window of 16."""
    data = batch()
    plan = pl.Plan("sparse", rows=16, eps=7e-4)
    out, expected = gradients(SPECS["ppo"], data, plan)
    assert 0.1 < out.metrics.compute()["sparse_dense_rows"] < 0.9
    for gathered in (54, 16):
        made = partial(start_gathering, gathered)
        monkeypatch.setattr(plans, "SparseSums", made)
        found = gradients(SPECS["ppo"], data, plan)[1]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def start_gathering(gathered: int, head: Any, wanted: Any, _: int, draw: Any) -> Any:
    return sparse.SparseSums(head, wanted, gathered, draw)


@walked("name", SPECS)
def test_every_cut_draws_the_same(name: str) -> None:
    spec, data, plan = SPECS[name], batch(), pl.Plan("sparse", eps=2e-2)
    _, ids, old, advantages, mask = data
    logp = pl.linear_logprobs(*data[0][:2], ids, bias=data[0][2], mask=mask).logp.detach()
    totals = pl.measure(spec, logp, old, advantages, mask)
    out, whole = gradients(spec, data, plan, totals=totals)
    parts = [torch.tensor(x) for x in ([3], [5, 0], [1, 2, 4])]
    cut = [gradients(spec, data, plan, rows, totals=totals)[1] for rows in parts]
    for i, x in enumerate(whole):
        torch.testing.assert_close(sum(part[i] for part in cut), x, rtol=1e-10, atol=1e-13)
    exact = gradients(spec, data, "auto", totals=totals)[1]
    assert (whole[1] - exact[1]).norm() > 1e-3 * exact[1].norm()
    if name == "ppo":
        metrics = out.metrics.compute()
        assert 2 < metrics["sparse_entries"] < 128
        assert metrics["sparse_dense_rows"] == 0
        assert 0 < metrics["sparse_noise"] < 0.5


def test_a_loss_of_ones_own_draws_the_same() -> None:
    (hidden, weight, bias), ids, old, advantages, mask = data = batch()
    plan = pl.Plan("sparse", eps=2e-2, seed=4)
    out = pl.linear_logprobs(hidden, weight, ids, bias=bias, mask=mask, plan=plan)
    loss = pl.policy_loss(SPECS["ppo"], out.logp, old, advantages, mask).loss
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    torch.testing.assert_close(found, gradients(SPECS["ppo"], data, plan)[1], rtol=1e-9, atol=1e-13)


@walked("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_of_many_seeds(dtype: torch.dtype) -> None:
    data = batch(dtype)
    expected = gradients(SPECS["ppo"], data, "auto")[1]
    draws = [
        gradients(SPECS["ppo"], data, pl.Plan("sparse", eps=2e-2, seed=seed))[1]
        for seed in range(100)
    ]
    for i, x in enumerate(expected):
        samples = torch.stack([draw[i].double() for draw in draws])
        deviation = samples.var(0).sum().sqrt()
        error = (samples.mean(0) - x.double()).norm()
        assert deviation > 1e-2 * x.double().norm()
        assert error < 1.5 * deviation / 10 + 0.01 * x.double().norm()


def test_a_batch_without_a_gradient() -> None:
    leaves, ids, old, advantages, mask = batch()
    data = (leaves, ids, old, advantages, torch.zeros_like(mask))
    out, found = gradients(SPECS["ppo"], data, "sparse")
    assert all((x == 0).all() for x in found)
    assert "sparse_entries" not in out.metrics


def test_a_nan_shows() -> None:
    (hidden, *rest), *others = batch(torch.float32)
    hidden = hidden.detach().clone()
    hidden[0, int(others[3][0].nonzero()[0])] = torch.nan
    data = ([hidden.requires_grad_(), *rest], *others)
    assert gradients(SPECS["ppo"], data, "sparse")[1][1].isnan().any()


def test_plans_that_cannot_be() -> None:
    data = batch()
    teacher = pl.Teacher(data[0][0].detach(), data[0][1].detach())
    spec = SPECS["ppo"].replace(kl=pl.Divergence("reverse", 0.1))
    with pytest.raises(pl.InputError, match="does not take a teacher"):
        gradients(spec, data, "sparse", teacher=teacher)
    some = pl.TopK(torch.tensor([[[1, 2]]]), torch.tensor([[[-1.0, -2.0]]]))
    hidden, weight = torch.zeros(1, 1, 4, requires_grad=True), torch.zeros(8, 4)
    with pytest.raises(pl.InputError, match="does not take a teacher"):
        pl.linear_divergence(hidden, weight, some, kind="reverse", plan="sparse")
    with pytest.raises(pl.InputError, match=r"within exact\(\) use another plan"), pl.exact():
        gradients(SPECS["ppo"], data, "sparse")
    wrong: dict[str, tuple[Any, ...]] = {
        "eps": (0.0, 1.0, -1.0, float("nan"), "x"),
        "seed": (-1, 1.5, 2**70, None),
        "rows": (-3, 2.0),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(pl.InputError, match=rf"plan\.{name} must be"):
                gradients(SPECS["ppo"], data, pl.Plan("sparse", **{name: value}))


# The kernels --------------------------------------------------------------------------------------


@walked("name", SCALINGS)
def test_the_kernels_choose_the_same_columns(name: str, monkeypatch: Any) -> None:
    """Except where the running sum is an integer but for rounding."""
    monkeypatch.setattr(sparse_kernels, "TILE", 64)
    g = torch.Generator().manual_seed(7)
    z = (3 * torch.randn(8, 300, generator=g)).to(DEVICE)
    z[5] = 0.1 * z[5]  # a dense row
    scaling = SCALINGS[name]
    if scaling.bias is not None:
        scaling = scaling._replace(bias=torch.randn(300, generator=g).to(DEVICE))
    ids = torch.tensor([0, 299, -1, 300, 5, 6, 7, 64], device=DEVICE)
    s = statistics(z, ids, scaling)
    offsets, eps = torch.rand(8, generator=g).to(DEVICE), 6e-3
    columns, counts = sparse_kernels.choose_columns(z, ids, s, scaling, offsets, eps)
    wide = Statistics(*(None if x is None else x.double().cpu() for x in s))
    bias = None if scaling.bias is None else scaling.bias.double().cpu()
    exact = sparse.choose_columns(
        z.double().cpu(), ids.cpu(), wide, scaling._replace(bias=bias), offsets.double().cpu(), eps
    )
    p = (rescale(z.double().cpu(), scaling._replace(bias=bias)) - wide.lse[:, None]).exp()
    large = (p >= eps) | (torch.arange(300) == ids.cpu()[:, None])
    sums = (p / eps).masked_fill(large, 0).cumsum(1) + offsets.double().cpu()[:, None]
    sure = ((sums - sums.round()).abs() > 1e-3).all(1)
    assert sure.sum() >= 2
    assert counts.cpu()[5] > sparse.MOST
    assert exact[1][5] > sparse.MOST
    for row in range(8):
        if row != 5 and (sure[row] or abs(int(counts[row] - exact[1][row])) > 1):
            assert columns[row].cpu().tolist() == exact[0][row].tolist()


def test_the_kernel_of_the_gradient_of_some_rows() -> None:
    g = torch.Generator().manual_seed(4)
    z, ids = torch.randn(9, 70, generator=g).to(DEVICE), torch.arange(9, device=DEVICE)
    s, source = statistics(z, ids, Scaling()), torch.tensor([5, 0, 7], device=DEVICE)
    here, one = s.of_rows(source), torch.ones(3, device=DEVICE)
    found, expected = torch.empty(2, 3, 70, device=DEVICE)
    kernels.row_gradient(z, found, ids[source], here, one, None, Scaling(), source)
    row_gradient(z[source], expected, ids[source], here, one, None, Scaling())
    torch.testing.assert_close(found, expected)


def test_the_kernel_of_weighted_sums(monkeypatch: Any) -> None:
    """Short bags and long ones; rows of the result that no bag has stay."""
    monkeypatch.setattr(sparse, "LONG", 5)
    monkeypatch.setattr(sparse_kernels, "LONG", 5)
    monkeypatch.setattr(sparse_kernels, "WIDTH", 32)
    g = torch.Generator().manual_seed(0)
    table = torch.randn(40, 70, generator=g)
    sizes = {1: 3, 4: 7, 9: 1, 11: 6}
    keys = torch.cat([torch.full((n,), key) for key, n in sizes.items()])
    index = torch.cat([torch.randperm(40, generator=g)[:n] for n in sizes.values()])
    bags = sparse.Bags.of(keys, index, torch.randn(17, generator=g))
    expected, found = torch.ones(20, 70), torch.ones(20, 70, device=DEVICE)
    sparse.add_weighted_sums(expected, table, bags)
    assert torch.equal(expected[0], torch.ones(70))
    bags = sparse.Bags(*(x.to(DEVICE) for x in bags[:-1]), bags.long)
    sparse_kernels.add_weighted_sums(found, table.to(DEVICE), bags)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
