"""Log-probabilities over the tokens that a sampler kept, against float64 over those alone."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from head_cases import (
    CUDA,
    DEVICE,
    FLOAT,
    LOSS_PLANS,
    Case,
    Run,
    Values,
    assert_near,
    assert_same_bits,
    backward,
    leaf,
    make_head_batch,
    peaked_case,
    run_loss,
)
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.head import support as support_of_head

Support = tuple[Tensor, Tensor]
TOL = 2e-5 if CUDA else 1e-12
CASE = peaked_case(23, 41, 8, FLOAT)
ALIVE = torch.arange(23, device=DEVICE) % 5 != 2


def kept_of(ids: Tensor, vocab: int, seed: int = 0, share: float = 0.3) -> Tensor:
    """A random set of entries for each token, its own id among them. `[N, V]`, bool."""
    g = torch.Generator().manual_seed(seed)
    dense = torch.rand(ids.numel(), vocab, generator=g) < share
    dense[torch.arange(ids.numel()), ids.reshape(-1).cpu()] = True
    return dense.to(ids.device)


def as_pair(dense: Tensor) -> Support:
    """The same set as ids and offsets."""
    counts = torch.nn.functional.pad(dense.sum(1).cumsum(0), (1, 0))
    return dense.nonzero()[:, 1], counts


DENSE = kept_of(CASE.ids, 41)
SUPPORT = as_pair(DENSE)


def over_kept(
    logits: Tensor, ids: Tensor, dense: Tensor, temperature: Any = 1.0, softcap: Any = None
) -> Values:
    """The definition: a softmax over the kept entries alone, one row after another."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp, entropy = [], []
    for row, kept, i in zip(z, dense, ids, strict=True):
        log_p = row[kept].log_softmax(0)
        logp.append(log_p[kept.nonzero()[:, 0] == i].sum())
        entropy.append(-(log_p.exp() * log_p).sum())
    return Values(torch.stack(logp), torch.stack(entropy))


def oracle(case: Case, mask: Tensor | None = None, bias: bool = True, **options: Any) -> Run:
    leaves = [leaf(x, torch.float64) for x in (case.hidden, case.weight, case.bias)]
    logits = leaves[0] @ leaves[1].T + (leaves[2] if bias else 0)
    values = over_kept(logits, case.ids, DENSE, **options)
    if mask is not None:
        values = Values(*(torch.where(mask, x, 0) for x in values))
    return backward(values, (case.dlogp, case.dentropy), leaves[: 3 if bias else 2])


def ours(case: Case, bias: bool = True, **options: Any) -> Run:
    leaves = [leaf(x) for x in (case.hidden, case.weight, case.bias)]
    values = pl.linear_logprobs(
        *leaves[:2], case.ids, leaves[2] if bias else None, entropy=True, support=SUPPORT, **options
    )
    return backward(values, (case.dlogp, case.dentropy), leaves[: 3 if bias else 2])


def assert_runs_agree(actual: Run, expected: Run) -> None:
    assert_near(actual.logp, expected.logp, TOL, "logp")
    assert_near(actual.entropy, expected.entropy, TOL, "entropy")
    for a, b in zip(actual.grads, expected.grads, strict=True):
        assert_near(a, b, 10 * TOL, "gradient")


@walked("plan", ["recompute", "stash", pl.Plan("recompute", 3, 7)])
def test_values_and_gradients(plan: Any) -> None:
    assert_runs_agree(ours(CASE, plan=plan), oracle(CASE))
    per_token = torch.linspace(0.5, 2, 23, dtype=FLOAT, device=DEVICE)
    warm = {"temperature": per_token, "mask": ALIVE, "bias": False}
    assert_runs_agree(ours(CASE, plan=plan, **warm), oracle(CASE, **warm))
    if plan != "stash":
        assert_runs_agree(
            ours(CASE, plan=plan, softcap=3.0, temperature=0.7),
            oracle(CASE, softcap=3.0, temperature=0.7),
        )


def test_the_entries_of_a_rank() -> None:
    """Ranks that hold a part of the vocabulary keep their part of every support."""
    whole = torch.randn(23, 41, device=DEVICE)
    support, expected = support_of_head.Support(*SUPPORT), whole.clone()
    expected[~DENSE] = -torch.inf
    for first, last in ((0, 17), (17, 41)):
        z = whole[:, first:last].clone()
        support.of_rows(slice(None), first).restrict(z)
        assert torch.equal(z, expected[:, first:last])


@walked("softcap", [None, 3.0])
@walked("layout", ["flat", "rows", "a slice"])
@walked("overwrite", [False, True])
def test_logits_that_exist(
    overwrite: bool, layout: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies that are restricted hold a few rows only, and cuts between them change nothing."""
    monkeypatch.setattr("policyloss.head.logits.COPY_BYTES", 5 * 41 * 8)
    logits = CASE.hidden[:20] @ CASE.weight.T
    ids, dense = CASE.ids[:20], DENSE[:20]
    options: dict[str, Any] = {"temperature": 0.8, "softcap": softcap}
    true = leaf(logits, torch.float64)
    upstream = (CASE.dlogp[:20], CASE.dentropy[:20])
    expected = backward(over_kept(true, ids, dense, **options), upstream, [true])
    x = leaf(logits)
    if layout != "flat":
        ids, upstream = ids.view(4, 5), tuple(u.view(4, 5) for u in upstream)
    shaped = x.clone() if layout == "flat" else x.clone().view(4, 5, 41)
    if layout == "a slice":
        shaped = torch.cat([shaped, torch.full_like(shaped[:, :1], torch.nan)], 1)[:, :-1]
    values = pl.logprobs(
        shaped, ids, entropy=True, overwrite_logits=overwrite, support=as_pair(dense), **options
    )
    actual = backward(values, upstream, [x])
    assert_near(actual.logp.flatten(), expected.logp, TOL, "logp")
    assert_near(actual.entropy.flatten(), expected.entropy, TOL, "entropy")
    gradient = actual.grads[0].detach()
    assert_near(gradient, expected.grads[0], TOL, "gradient")
    assert not gradient[~dense].any(), "an entry outside of the support has a gradient"


def test_weight_outside_every_support_gets_no_gradient() -> None:
    """Exactly none: such an entry is no part of any softmax."""
    dense = DENSE.clone()
    dense[:, 7] = CASE.ids == 7
    lonely = dense.clone()
    lonely[CASE.ids == 7] = False
    keep = CASE.ids != 7
    case = Case(*(x[keep] if x.shape[:1] == (23,) else x for x in CASE))
    for plan in ("recompute", "stash"):
        weight, hidden = leaf(case.weight), leaf(case.hidden)
        out = pl.linear_logprobs(
            hidden, weight, case.ids, entropy=True, plan=plan, support=as_pair(dense[keep])
        )
        (out.logp.sum() + out.entropy.sum()).backward()
        assert not weight.grad[7].any()
        assert weight.grad.abs().sum() > 0.1


@walked("plan", ["recompute", "stash"])
def test_the_whole_vocabulary_is_no_support(plan: str) -> None:
    """Bit for bit: k = V cuts nothing."""
    everything = as_pair(torch.ones_like(DENSE))
    leaves = [leaf(CASE.hidden), leaf(CASE.weight)]
    runs = [
        backward(
            pl.linear_logprobs(*leaves, CASE.ids, entropy=True, plan=plan, support=support),
            (CASE.dlogp, CASE.dentropy),
            leaves,
        )
        for support in (None, everything)
    ]
    assert_same_bits(runs[0], runs[1])
    logits = CASE.hidden @ CASE.weight.T
    assert_same_bits(
        pl.logprobs(logits, CASE.ids, entropy=True, support=everything),
        pl.logprobs(logits, CASE.ids, entropy=True),
    )


def test_kept_ids_may_come_in_any_order_and_twice() -> None:
    ids, offsets = SUPPORT
    lists = [ids[a:b].flip(0).repeat(2) for a, b in pairwise(offsets)]
    shuffled = torch.cat(lists), 2 * offsets
    logits = CASE.hidden @ CASE.weight.T
    assert_same_bits(
        pl.logprobs(logits, CASE.ids, entropy=True, support=shuffled),
        pl.logprobs(logits, CASE.ids, entropy=True, support=SUPPORT),
    )


SPECS = {
    "dapo": pl.preset("dapo"),
    "entropy": pl.LossSpec(kl=pl.KL("k3", 0.1), entropy_coef=0.1),
    "gspo": pl.preset("gspo"),
}


@walked("packed", [False, True], ids=["padded", "packed"])
@walked("plan", [*LOSS_PLANS, pl.Plan("one_pass", 8, 0)])
@walked("name", SPECS)
def test_loss(name: str, plan: Any, packed: bool) -> None:
    """`policy_loss` on log-probabilities over the kept entries, masked rows without any."""
    batch = make_head_batch(seed=3)
    dense = kept_of(batch.ids, batch.weight.shape[0], seed=1)
    dense &= batch.tokens.mask.reshape(-1, 1).to(DEVICE)
    if packed:
        dense, batch = dense[batch.tokens.inside.flatten().to(DEVICE)], batch.packed()
    hidden, weight = leaf(batch.hidden, torch.float64), leaf(batch.weight, torch.float64)
    some = dense | (dense.sum(1, keepdim=True) == 0)  # a row without entries is masked
    flat = hidden.view(-1, hidden.shape[-1]) @ weight.T
    mask = batch.kwargs["mask"]
    values = over_kept(flat, batch.ids.reshape(-1), some)
    logp, entropy = (torch.where(mask, x.view(mask.shape), 0) for x in values)
    expected = pl.policy_loss(SPECS[name], logp, **{**batch.kwargs, "entropy": entropy})
    gradients = torch.autograd.grad(expected.loss, (hidden, weight))
    actual = run_loss(SPECS[name], batch, plan=plan, support=as_pair(dense))
    assert_near(actual.loss, expected.loss.detach(), TOL, "loss")
    for a, b in zip((actual.dhidden, actual.dweight), gradients, strict=True):
        assert_near(a, b, 10 * TOL, "gradient")
    unrestricted = run_loss(SPECS[name], batch, plan=plan)
    assert (unrestricted.dweight - actual.dweight).abs().max() > 1e-3


def test_without_a_gradient() -> None:
    with torch.no_grad():
        plain = pl.linear_logprobs(
            CASE.hidden, CASE.weight, CASE.ids, support=SUPPORT, mask=ALIVE
        ).logp
    expected = over_kept((CASE.hidden @ CASE.weight.T).double(), CASE.ids, DENSE).logp
    assert_near(plain, torch.where(ALIVE, expected, 0), TOL, "logp")
    none = torch.zeros(0, 8, dtype=FLOAT, device=DEVICE)
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    nothing = (empty, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert pl.linear_logprobs(none, CASE.weight, empty, support=nothing).logp.shape == (0,)
    assert pl.logprobs(none, empty, support=nothing).logp.shape == (0,)


def test_a_token_outside_its_support_is_an_error_that_counts_them() -> None:
    dense = DENSE.clone()
    rows = torch.tensor([1, 4, 7], device=DEVICE)  # 7 is masked
    dense[rows, CASE.ids[rows]] = False
    logits = CASE.hidden @ CASE.weight.T
    message = r"2 sampled token\(s\) are not in their own support"
    with pytest.raises(pl.InputError, match=message):
        pl.logprobs(logits, CASE.ids, mask=ALIVE, support=as_pair(dense))
    with pytest.raises(pl.InputError, match=message):
        pl.linear_logprobs(CASE.hidden, CASE.weight, CASE.ids, mask=ALIVE, support=as_pair(dense))
    batch = make_head_batch(seed=3)
    dense = kept_of(batch.ids, batch.weight.shape[0])
    first = int(batch.tokens.mask.flatten().nonzero()[0])
    dense[first, batch.ids.flatten()[first]] = False
    with pytest.raises(pl.InputError, match=r"1 sampled token\(s\)"):
        run_loss(SPECS["dapo"], batch, support=as_pair(dense))


@walked(
    ("support", "words"),
    [
        (SUPPORT[0], ["support must be a pair (ids, offsets)"]),
        ((SUPPORT[0].double(), SUPPORT[1]), ["support ids must be a 1-D tensor of integers"]),
        ((SUPPORT[0], SUPPORT[1][:, None]), ["support offsets must be a 1-D tensor of integers"]),
        ((SUPPORT[0], SUPPORT[1][:-1]), ["support offsets must be 24 numbers", "got 23 numbers"]),
        ((SUPPORT[0][:-1], SUPPORT[1]), ["rise from 0 to the number of kept entries"]),
        ((SUPPORT[0], SUPPORT[1].flip(0)), ["rise from 0"]),
        ((SUPPORT[0] + 5, SUPPORT[1]), ["that the vocabulary of 41 does not have"]),
    ],
)
def test_errors(support: Any, words: list[str]) -> None:
    for call in (
        lambda: pl.linear_logprobs(CASE.hidden, CASE.weight, CASE.ids, support=support).logp,
        lambda: pl.logprobs(CASE.hidden @ CASE.weight.T, CASE.ids, support=support).logp,
    ):
        with pytest.raises(pl.InputError) as error:
            call()
        assert all(word in str(error.value) for word in words), str(error.value)


def test_a_teacher_has_no_support() -> None:
    batch = make_head_batch(seed=3)
    spec = pl.LossSpec(kl=pl.Divergence("reverse", 1.0))
    teacher = pl.Teacher(batch.hidden, batch.weight)
    support = as_pair(kept_of(batch.ids, batch.weight.shape[0]))
    with pytest.raises(pl.InputError, match="got a teacher and a support"):
        run_loss(spec, batch, teacher=teacher, support=support)


def test_the_plan_is_explained() -> None:
    plan = pl.explain_plan(None, CASE.hidden, CASE.weight, CASE.ids, support=SUPPORT)
    assert plan == pl.explain_plan(None, CASE.hidden, CASE.weight, CASE.ids)


@pytest.mark.skipif(CUDA, reason="the float16 rounding is checked on a CPU")
def test_half_precision_logits_are_copied_wide() -> None:
    """Half-precision logits are restricted in a copy, which is in float32."""
    logits = (CASE.hidden @ CASE.weight.T).half().requires_grad_()
    out = pl.logprobs(logits, CASE.ids, entropy=True, support=SUPPORT)
    expected = over_kept(logits.detach().double(), CASE.ids, DENSE)
    assert_near(out.logp.detach(), expected.logp, 1e-6, "logp")
    assert_near(out.entropy.detach(), expected.entropy, 1e-6, "entropy")
    (gradient,) = torch.autograd.grad(out.logp.sum() + out.entropy.sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[~DENSE].any()


def test_packs_and_rows_agree() -> None:
    batch = make_head_batch(seed=5)
    inside = batch.tokens.inside.flatten().to(DEVICE)
    dense = kept_of(batch.ids, batch.weight.shape[0])
    spec = dataclasses.replace(SPECS["entropy"], aggregate=pl.SeqMeanTokenMean())
    rows = run_loss(spec, batch, support=as_pair(dense))
    pack = run_loss(spec, batch.packed(), support=as_pair(dense[inside]))
    assert_near(pack.loss, rows.loss, TOL, "loss")
    assert_near(pack.dweight, rows.dweight, 10 * TOL, "gradient")
