"""`logprobs`: from logits. The contract line in float64 is the oracle, the same line in the inputs'
dtype the measure of error.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from head_cases import (
    CUDA,
    DEVICE,
    DTYPES,
    Poison,
    Run,
    assert_near,
    assert_run_no_worse,
    assert_same_bits,
    backward,
    contract_of_logits,
    dtype_name,
    generator,
    largest_logit,
    leaf,
    peaked_case,
    poison_freed_memory,
)
from torch import Tensor
from torch.autograd import gradcheck
from walk import walked

import policyloss as pl

VOCABULARIES = (1, 2, 33, 50257, *((128256, 151936) if CUDA else ()))
UPSTREAM = {"dlogp": (True, False), "dentropy": (False, True), "both": (True, True)}


class LogitsCase:
    """Logits `[N, V]`, ids `[N]` and an upstream gradient for logp and entropy."""

    def __init__(
        self, n: int, vocab: int, dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> None:
        case = peaked_case(n, vocab, 8, torch.float64, seed)
        self.logits = (case.hidden @ case.weight.T).to(dtype)
        self.ids, self.dlogp, self.dentropy = case.ids, case.dlogp, case.dentropy

    def run(
        self, function: Any, logits: Tensor | None = None, upstream: str = "both", **kwargs: Any
    ) -> Run:
        """Values and gradient of `function(logits, ids)`;
        `logits` may be another version of them, not yet a leaf.
        """
        z = leaf(self.logits if logits is None else logits)
        through = [
            d if on else None
            for d, on in zip((self.dlogp, self.dentropy), UPSTREAM[upstream], strict=True)
        ]
        return backward(function(z, self.ids, **kwargs), through, (z,))

    def ours(self, **kwargs: Any) -> Run:
        return self.run(lambda *a, **k: pl.logprobs(*a, entropy=True, **k), **kwargs)

    def check(self, **kwargs: Any) -> Run:
        """Ours against eager and the oracle, with the same further arguments."""
        ours, eager = self.ours(**kwargs), self.run(contract_of_logits, **kwargs)
        truth = self.run(
            contract_of_logits, **{**kwargs, "logits": kwargs.get("logits", self.logits).double()}
        )
        logits = kwargs.get("logits", self.logits).double()
        logit = largest_logit(logits, kwargs.get("temperature", 1.0), kwargs.get("mask"))
        assert_run_no_worse(ours, eager, truth, {"logits": 1.0}, logit)
        return ours


def test_two_entries_by_hand() -> None:
    """logits 0 and ln 3: p = 1/4, 3/4. logp = ln 3/4; H = ¼·ln 4 + ¾·ln 4/3;
    dlogp/dz = (−1/4, 1 − 3/4);

    dH/dz = −p·(ln p + H): with H = ln 4 − ¾·ln 3, ln p + H is −¾·ln 3 and ¼·ln 3,
    so dH/dz = ±(3/16)·ln 3.
    """
    z = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64, device=DEVICE, requires_grad=True)
    logp, entropy = pl.logprobs(z, torch.tensor([1], device=DEVICE), entropy=True)
    assert logp.tolist() == pytest.approx([math.log(0.75)], abs=1e-15)
    assert entropy.tolist() == pytest.approx([math.log(4) - 0.75 * math.log(3)], abs=1e-15)
    (dlogp,) = torch.autograd.grad(logp.sum(), z, retain_graph=True)
    assert dlogp.tolist()[0] == pytest.approx([-0.25, 0.25], abs=1e-15)
    (dentropy,) = torch.autograd.grad(entropy.sum(), z)
    assert dentropy.tolist()[0] == pytest.approx(
        [3 / 16 * math.log(3), -3 / 16 * math.log(3)], abs=1e-15
    )


def test_temperature_and_softcap_by_hand() -> None:
    """Logits 0 and 2·ln 3 at temperature 2 are those above.
    A cap of 1: tanh(∞) and tanh(0) leave the logits 1 and 0.
    """
    ids = torch.tensor([1], device=DEVICE)
    z = torch.tensor([[0.0, 2 * math.log(3)]], dtype=torch.float64, device=DEVICE)
    assert pl.logprobs(z, ids, 2.0).logp.item() == pytest.approx(math.log(0.75), abs=1e-15)
    assert pl.logprobs(z, ids, torch.tensor([2.0], device=DEVICE)).logp.item() == pytest.approx(
        math.log(0.75), abs=1e-15
    )
    z = torch.tensor([[0.0, 1e9]], dtype=torch.float64, device=DEVICE)
    assert pl.logprobs(z, ids, softcap=1.0).logp.item() == pytest.approx(
        -math.log1p(math.exp(-1)), abs=1e-15
    )


@walked("upstream", UPSTREAM)
@walked("vocab", VOCABULARIES)
@walked("dtype", DTYPES, ids=dtype_name)
def test_values_and_gradients(dtype: torch.dtype, vocab: int, upstream: str) -> None:
    ours = LogitsCase(5, vocab, dtype).check(upstream=upstream)
    wide = torch.promote_types(dtype, torch.float32)
    assert (ours.logp.dtype, ours.entropy.dtype, ours.grads[0].dtype) == (wide, wide, dtype)


@walked("n", [1, 2, 127, 128, 129, 1000, 65537 if CUDA else 4097])
def test_any_number_of_rows(n: int) -> None:
    LogitsCase(n, 33, torch.float32).check()


@walked("dtype", DTYPES, ids=dtype_name)
@walked("kind", ["peaked", "deep", "flat", "far"])
def test_extreme_logits(kind: str, dtype: torch.dtype) -> None:
    """One logit 80 above, or below, all others; all equal; all near a thousand."""
    case = LogitsCase(6, 1000, dtype)
    z = torch.zeros_like(case.logits)
    column = case.ids.unsqueeze(1) if kind == "peaked" else (case.ids.unsqueeze(1) + 1) % 1000
    case.logits = {
        "peaked": z.scatter(1, column, 80.0),
        "deep": z.scatter(1, column, -80.0),
        "flat": z,
        "far": 1000 + case.logits,
    }[kind]
    case.check()


def test_values_do_not_depend_on_where_the_logits_lie() -> None:
    """Logits that are integers stay exact when 1000 is added,
    so log-probs and entropy must keep their bits.

    The kernels count in powers of two, where 1000·log2 e is rounded:
    there, one float32 rounding of 1000.
    """
    case = LogitsCase(9, 33, torch.float32)
    near = case.logits.round()
    allowed = 1000 * torch.finfo(torch.float32).eps if CUDA else 0.0
    here, there = (pl.logprobs(z, case.ids, entropy=True) for z in (near, near + 1000))
    assert float((there.logp - here.logp).abs().max()) <= allowed
    assert float((there.entropy - here.entropy).abs().max()) <= allowed


@walked("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_name)
def test_forbidden_entries(dtype: torch.dtype) -> None:
    """−inf is a probability of 0: nothing in the values, exactly nothing in the gradient,
    and no NaN.
    """
    case = LogitsCase(7, 65, dtype)
    forbidden = torch.rand(7, 65, generator=generator(1)).to(DEVICE) < 0.4
    forbidden.scatter_(1, case.ids.unsqueeze(1), False)
    forbidden[0] = True  # only the token itself is left: logp and entropy 0
    forbidden[0, case.ids[0]] = False
    case.logits = case.logits.masked_fill(forbidden, -torch.inf)
    ours = case.check()
    assert (ours.grads[0][forbidden] == 0).all()
    # The kernels count in powers of two, from a maximum that is rounded there:
    # 2^x of that rounding, and back.
    allowed = torch.finfo(torch.float32).eps if CUDA and dtype != torch.float64 else 0.0
    assert max(abs(float(ours.logp[0])), abs(float(ours.entropy[0]))) <= allowed


@walked("overwrite", [False, True], ids=["kept", "overwritten"])
def test_all_but_the_last_position(overwrite: bool) -> None:
    """`logits[:, :-1]`, the usual shift, has no single stride from row to row;
    its gradient is that of a contiguous copy.
    """
    whole = torch.randn(3, 5, 9, generator=generator(2), dtype=torch.float64).to(DEVICE)
    ids = torch.randint(0, 9, (3, 4), generator=generator(3)).to(DEVICE)
    weight = torch.randn(2, 3, 4, generator=generator(4), dtype=torch.float64).to(DEVICE)

    def gradient(cut: bool) -> tuple[Tensor, Tensor]:
        leaf = whole.clone().requires_grad_()
        logits = leaf.clone()[:, :-1]
        out = pl.logprobs(
            logits if cut else logits.contiguous(), ids, entropy=True, overwrite_logits=overwrite
        )
        (weight[0] * out.logp + weight[1] * out.entropy).sum().backward()
        return out.logp.detach(), leaf.grad

    for ours, expected in zip(gradient(True), gradient(False), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert (gradient(True)[1][:, -1] == 0).all()


def test_a_forbidden_token_has_logp_minus_infinity() -> None:
    case = LogitsCase(3, 20, torch.float32)
    case.logits[1, case.ids[1]] = -torch.inf
    logp, entropy = pl.logprobs(case.logits, case.ids, entropy=True)
    assert logp[1] == -torch.inf
    assert entropy.isfinite().all()
    assert logp[[0, 2]].isfinite().all()


@walked("vocab", [2, 33, 1000, 50257])
def test_ids_at_both_ends(vocab: int) -> None:
    case = LogitsCase(4, vocab, torch.float32)
    case.ids = torch.tensor([0, vocab - 1, 0, vocab - 1], device=DEVICE)
    ours = case.check()
    case.ids = case.ids.int()
    assert_same_bits(case.ours(), ours)


@walked("temperature", [0.7, "per token"])
@walked("softcap", [None, 30.0])
@walked("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_name)
def test_temperature_and_softcap(
    temperature: Any, softcap: float | None, dtype: torch.dtype
) -> None:
    case = LogitsCase(9, 129, dtype)
    case.logits = case.logits * 4  # into the bend of the cap
    if temperature == "per token":
        temperature = torch.linspace(0.3, 2.0, 9, device=DEVICE)
    case.check(temperature=temperature, softcap=softcap)


@walked("variant", ["plain", "temperature", "per_token", "softcap", "mask"])
def test_gradcheck(variant: str) -> None:
    case = LogitsCase(4, 6)
    temperature = torch.tensor([0.5, 1.0, 1.7, 0.9], dtype=torch.float64, device=DEVICE)
    kwargs = {
        "plain": {},
        "temperature": {"temperature": 0.6},
        "per_token": {"temperature": temperature},
        "softcap": {"softcap": 3.0},
        "mask": {"mask": torch.tensor([True, False, True, True], device=DEVICE)},
    }[variant]
    assert gradcheck(
        lambda z: tuple(pl.logprobs(z, case.ids, entropy=True, **kwargs)),
        (leaf(case.logits),),
        atol=1e-7,
        rtol=1e-6,
    )


LAYOUTS = {
    "shifted": lambda z: torch.nn.functional.pad(z, (0, 0, 0, 1))[:-1],
    "every other row": lambda z: z.repeat_interleave(2, 0)[::2],
    "padded rows": lambda z: torch.nn.functional.pad(z, (3, 4))[:, 3:-4],
    "transposed": lambda z: z.T.contiguous().T,
}


@walked("layout", LAYOUTS)
@walked("overwrite", [False, True], ids=["kept", "overwritten"])
def test_strided_logits(layout: str, overwrite: bool) -> None:
    case = LogitsCase(6, 33, torch.float32)
    expected = case.ours()
    z = leaf(case.logits)
    strided = LAYOUTS[layout](z)
    assert torch.equal(strided, z)
    values = pl.logprobs(strided, case.ids, entropy=True, overwrite_logits=overwrite)
    assert_same_bits(backward(values, (case.dlogp, case.dentropy), (z,)), expected)


def test_batched_shapes_and_one_row_expanded() -> None:
    case = LogitsCase(6, 33, torch.float32)
    expected = case.ours()
    z, ids = leaf(case.logits), case.ids.reshape(2, 3)
    values = pl.logprobs(z.reshape(2, 3, 33), ids, entropy=True)
    assert values.logp.shape == values.entropy.shape == (2, 3)
    run = backward(values, (case.dlogp.reshape(2, 3), case.dentropy.reshape(2, 3)), (z,))
    assert_same_bits(run.grads, expected.grads)
    one = leaf(case.logits[:1])
    run = backward(
        pl.logprobs(one.expand(6, 33), case.ids, entropy=True), (case.dlogp, case.dentropy), (one,)
    )
    truth = leaf(case.logits[:1].double())
    true = backward(
        contract_of_logits(truth.expand(6, 33), case.ids), (case.dlogp, case.dentropy), (truth,)
    )
    assert_near(run.grads[0], true.grads[0], 1e-5, "gradient of an expanded row")


def test_entropy_is_returned_on_request() -> None:
    case = LogitsCase(5, 33, torch.float32)
    alone = pl.logprobs(case.logits, case.ids).logp
    assert isinstance(alone, Tensor)
    both = pl.logprobs(case.logits, case.ids, entropy=True)
    assert isinstance(both, pl.LogProbs)
    assert torch.equal(alone, both.logp)
    z, y = leaf(case.logits), leaf(case.logits)
    (expected,) = torch.autograd.grad(
        pl.logprobs(z, case.ids, entropy=True).logp, z, case.dlogp.float()
    )
    (actual,) = torch.autograd.grad(pl.logprobs(y, case.ids).logp, y, case.dlogp.float())
    assert torch.equal(actual, expected)


@walked("overwrite", [False, True], ids=["kept", "overwritten"])
@walked("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_name)
def test_garbage_at_masked_rows(dtype: torch.dtype, overwrite: bool) -> None:
    """NaN, inf and ids outside the vocabulary behind the mask change no bit elsewhere;
    values and gradients there are 0.
    """
    case = LogitsCase(8, 33, dtype)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool, device=DEVICE)
    temperature = torch.linspace(0.5, 1.5, 8, device=DEVICE)

    def run() -> Run:
        z = leaf(case.logits)
        called = {
            "entropy": True,
            "mask": mask,
            "temperature": temperature,
            "overwrite_logits": overwrite,
        }
        return backward(
            pl.logprobs(z.clone(), case.ids, **called), (case.dlogp, case.dentropy), (z,)
        )

    clean = run()
    case.check(mask=mask, temperature=temperature)
    case.logits[1], case.logits[4], case.logits[5, 3] = torch.nan, torch.inf, -torch.inf
    case.ids[1], case.ids[5], case.ids[7] = -100, 33, 10**12
    temperature[~mask] = torch.tensor([0.0, -1.0, torch.nan, torch.inf], device=DEVICE)
    case.dlogp[~mask], case.dentropy[~mask] = torch.inf, torch.nan
    dirty = run()
    assert_same_bits(dirty, clean)
    for x in (dirty.logp, dirty.entropy, dirty.grads[0]):
        assert (x[~mask] == 0).all()


def test_a_nan_stays_in_its_row() -> None:
    case = LogitsCase(5, 33, torch.float32)
    clean = case.ours()
    case.logits[2, 7] = torch.nan
    dirty = case.ours()
    others = [0, 1, 3, 4]
    assert dirty.logp[2].isnan()
    assert dirty.entropy[2].isnan()
    assert dirty.grads[0][2].isnan().any()
    for a, b in zip(
        (dirty.logp, dirty.entropy, *dirty.grads),
        (clean.logp, clean.entropy, *clean.grads),
        strict=True,
    ):
        assert torch.equal(a[others], b[others])


@walked("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    z = torch.zeros(*shape, 33, device=DEVICE, requires_grad=True)
    logp, entropy = pl.logprobs(
        z, torch.zeros(shape, dtype=torch.int64, device=DEVICE), entropy=True
    )
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == shape
    assert z.grad is not None
    assert z.grad.shape == z.shape


@walked("overwrite", [False, True], ids=["kept", "overwritten"])
def test_all_rows_masked(overwrite: bool) -> None:
    z = torch.full((4, 33), torch.nan, device=DEVICE, requires_grad=True)
    ids, mask = (
        torch.full((4,), -100, device=DEVICE),
        torch.zeros(4, dtype=torch.bool, device=DEVICE),
    )
    logp, entropy = pl.logprobs(z.clone(), ids, entropy=True, mask=mask, overwrite_logits=overwrite)
    (logp.sum() + entropy.sum()).backward()
    assert logp.tolist() == entropy.tolist() == [0.0] * 4
    assert z.grad is not None
    assert (z.grad == 0).all()


@walked("masked", [False, True], ids=["all", "masked"])
@walked("dtype", DTYPES, ids=dtype_name)
def test_overwriting_the_logits(dtype: torch.dtype, masked: bool) -> None:
    """The same bits as without, and the storage of the logits holds the gradient afterwards; a
    second backward would be wrong.
    """
    case = LogitsCase(7, 65, dtype)
    mask = (
        torch.tensor([True, False, True, True, False, True, True], device=DEVICE)
        if masked
        else None
    )
    expected = case.ours(mask=mask)
    z = leaf(case.logits)
    logits = z.clone()
    values = pl.logprobs(logits, case.ids, entropy=True, mask=mask, overwrite_logits=True)
    upstream = (case.dlogp.to(values.logp.dtype), case.dentropy.to(values.logp.dtype))
    assert torch.equal(logits.detach(), case.logits), "the forward must leave the logits alone"
    (gradient,) = torch.autograd.grad(values, z, upstream, retain_graph=True)
    assert torch.equal(gradient, expected.grads[0])
    assert torch.equal(logits.detach(), expected.grads[0])
    with pytest.raises((RuntimeError, pl.InputError)):
        torch.autograd.grad(values, z, upstream)


def test_overwriting_one_row_that_stands_for_several() -> None:
    """Rows that share their memory cannot each hold a gradient:
    refused, or computed elsewhere; never a wrong number.
    """
    case = LogitsCase(6, 33, torch.float32)
    one, truth = leaf(case.logits[:1]), leaf(case.logits[:1].double())
    try:
        values = pl.logprobs((one * 1).expand(6, 33), case.ids, entropy=True, overwrite_logits=True)
    except pl.InputError as error:
        assert "overwrite_logits" in str(error)  # noqa: PT017 - either outcome is right
        return
    run = backward(values, (case.dlogp, case.dentropy), (one,))
    true = backward(
        contract_of_logits(truth.expand(6, 33), case.ids), (case.dlogp, case.dentropy), (truth,)
    )
    assert_near(run.grads[0], true.grads[0], 1e-5, "gradient of an expanded row")


def test_backward_twice_gives_the_same_twice() -> None:
    case = LogitsCase(5, 33, torch.float32)
    z = leaf(case.logits)
    logp = pl.logprobs(z, case.ids).logp
    logp.sum().backward(retain_graph=True)
    assert z.grad is not None
    once = z.grad.clone()
    logp.sum().backward()
    assert torch.equal(z.grad, 2 * once)


def test_no_graph_without_gradients() -> None:
    case = LogitsCase(5, 33, torch.float32)
    with torch.no_grad():
        assert not pl.logprobs(leaf(case.logits), case.ids).logp.requires_grad
    assert not pl.logprobs(case.logits, case.ids).logp.requires_grad


@walked("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_the_same_bits_every_time_and_whatever_memory_held(dtype: torch.dtype) -> None:
    case = LogitsCase(40, 1537, dtype)
    mask = torch.arange(40, device=DEVICE) % 3 > 0
    first = case.ours(mask=mask)
    assert_same_bits(case.ours(mask=mask), first)
    with Poison():
        assert_same_bits(case.ours(mask=mask), first)
    poison_freed_memory((40, 1537), (27, 1537), (40,), (27,))
    assert_same_bits(case.ours(mask=mask), first)


@pytest.mark.skipif(not CUDA, reason="needs the memory of a GPU")
@walked("overwrite", [False, True], ids=["kept", "overwritten"])
def test_more_than_two_to_the_31_logits(overwrite: bool) -> None:
    """16 384 × 151 936 ≈ 2.5·10⁹ entries: rows at the end, where a 32-bit index would have wrapped,
    are those of a small call.
    """
    n, vocab = 16384, 151936
    base = LogitsCase(64, vocab, torch.bfloat16)
    z = base.logits.repeat(n // 64, 1).requires_grad_()
    ids = base.ids.repeat(n // 64)
    values = pl.logprobs(z.view_as(z), ids, entropy=True, overwrite_logits=overwrite)
    run = backward(values, (base.dlogp.repeat(n // 64), base.dentropy.repeat(n // 64)), (z,))
    small = base.check()
    for start in (0, 14080, n - 64):  # 14 133 rows are 2³¹ entries
        rows = slice(start, start + 64)
        assert_same_bits(
            (run.logp[rows], run.entropy[rows], run.grads[0][rows]),
            (small.logp, small.entropy, small.grads[0]),
        )
