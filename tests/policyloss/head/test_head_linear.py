"""`linear_logprobs`: from hidden states. The contract line in float64 is the oracle;
plans and windows must not show.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from head_cases import (
    CUDA,
    DEVICE,
    DTYPES,
    FLOAT,
    LOGPROB_PLANS,
    Case,
    MatmulRows,
    Poison,
    Run,
    assert_near,
    assert_run_no_worse,
    assert_same_bits,
    backward,
    contract,
    dtype_name,
    forced_rows,
    largest_logit,
    leaf,
    peaked_case,
    poison_freed_memory,
    rms,
)
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from walk import walked

import policyloss as pl

NAMES = ("hidden", "weight", "bias")
UPSTREAM = {"dlogp": (True, False), "dentropy": (False, True), "both": (True, True)}
SHAPES = [
    (5, 50257, 4),
    (13, 33, 8),
    (4, 1, 3),
    (6, 2, 3),
    (1, 33, 8),
    *(((64, 128256, 64), (64, 151936, 64)) if CUDA else ()),
]


def plan_of(case: Case, name: str, rows: int | None = None, mask: Tensor | None = None) -> Any:
    """A plan by name, or that plan with windows of `rows` rows."""
    if rows is None:
        return name
    return forced_rows(
        pl.explain_plan(
            None, leaf(case.hidden), leaf(case.weight), case.ids, None, None, mask, plan=name
        ),
        rows,
    )


def run(
    function: Any,
    case: Case,
    dtype: torch.dtype | None = None,
    upstream: str = "both",
    bias: bool = True,
    **kwargs: Any,
) -> Run:
    """Values of `function` and the gradients of hidden, weight and bias,
    with the inputs as leaves of `dtype`.
    """
    leaves = [leaf(x, dtype) for x in (case.hidden, case.weight, case.bias)][: 3 if bias else 2]
    values = function(leaves[0], leaves[1], case.ids, bias=leaves[2] if bias else None, **kwargs)
    through = [
        d if on else None
        for d, on in zip((case.dlogp, case.dentropy), UPSTREAM[upstream], strict=True)
    ]
    return backward(values, through, leaves)


def ours(case: Case, **kwargs: Any) -> Run:
    return run(lambda *a, **k: pl.linear_logprobs(*a, entropy=True, **k), case, **kwargs)


def check(case: Case, plan: Any = "auto", **kwargs: Any) -> Run:
    """Ours against the contract line in the inputs' dtype and in float64."""
    found = ours(case, plan=plan, **kwargs)
    logits = case.hidden.double() @ case.weight.double().T + (
        case.bias.double() if kwargs.get("bias", True) else 0
    )
    logit = largest_logit(logits, kwargs.get("temperature", 1.0), kwargs.get("mask"))
    live = case.hidden if kwargs.get("mask") is None else case.hidden[kwargs["mask"]]
    factors = {
        "hidden": float(case.weight.abs().max()),
        "weight": float(live.abs().max()),
        "bias": 1.0,
    }
    assert_run_no_worse(
        found,
        run(contract, case, **kwargs),
        run(contract, case, dtype=torch.float64, **kwargs),
        factors,
        logit,
    )
    return found


@walked("upstream", UPSTREAM)
@walked("plan", LOGPROB_PLANS)
@walked("dtype", DTYPES, ids=dtype_name)
def test_values_and_gradients(dtype: torch.dtype, plan: str, upstream: str) -> None:
    for n, vocab, width in SHAPES:
        found = check(peaked_case(n, vocab, width, dtype), plan, upstream=upstream)
        wide = torch.promote_types(dtype, torch.float32)
        assert (found.logp.dtype, found.entropy.dtype, *(g.dtype for g in found.grads)) == (
            wide,
            wide,
            dtype,
            dtype,
            dtype,
        )


@walked("plan", LOGPROB_PLANS)
def test_without_a_bias(plan: str) -> None:
    check(peaked_case(13, 33, 8, torch.float32), plan, bias=False)


def test_bf16_logprobs_are_float32_exact() -> None:
    """Logits of bf16 inputs are not rounded to bf16: a root mean square error of 2e-5 at most,
    where eager's is over 1e-3.
    """
    n, vocab, width, peak = (512, 151936, 1024, 20.0) if CUDA else (64, 4000, 256, 16.0)
    case = peaked_case(n, vocab, width, torch.bfloat16, peak=peak, spread=4.0)
    truth = contract(case.hidden.double(), case.weight.double(), case.ids)
    eager = contract(case.hidden, case.weight, case.ids)
    found = pl.linear_logprobs(case.hidden, case.weight, case.ids, entropy=True)
    assert 0.01 < float(truth.entropy.median()) < 5, (
        "the point of the check is a peaked distribution"
    )
    assert (
        rms(found.logp.double() - truth.logp) <= 2e-5 < 1e-3 < rms(eager.logp.double() - truth.logp)
    )
    assert rms(found.entropy.double() - truth.entropy) <= 2e-5


@walked("plan", LOGPROB_PLANS)
def test_bf16_gradients_do_not_degrade_with_the_number_of_windows(plan: str) -> None:
    """dW is summed in float32: in bf16, sixty-four windows would leave an error
    of several per cent.
    """
    case = peaked_case(256, 65, 16, torch.bfloat16)
    truth = run(contract, case, dtype=torch.float64)
    found = ours(case, plan=plan_of(case, plan, 4))
    for name, a, b in zip(NAMES, found.grads, truth.grads, strict=True):
        assert rms(a.double() - b) <= 3e-3 * rms(b), name


@walked("plan", LOGPROB_PLANS)
@walked("n", [1, 7, 8, 9, 15, 16, 17])
def test_window_boundaries(n: int, plan: str) -> None:
    """One row, and one less, as many and one more than fill one or two windows of eight."""
    case = peaked_case(n, 33, 8, FLOAT, seed=n)
    check(case, plan_of(case, plan, 8))


@walked("plan", LOGPROB_PLANS)
def test_windows_of_live_rows(plan: str) -> None:
    """Eight live rows of nineteen fill a window of eight:
    what counts is the rows that are computed.
    """
    case = peaked_case(19, 33, 8, FLOAT)
    mask = torch.arange(19, device=DEVICE) % 5 < 2
    assert mask.sum() == 8
    for rows in (7, 8, 9):
        check(case, plan_of(case, plan, rows, mask), mask=mask)


def test_windows_only_change_the_rounding() -> None:
    """A product of other shape may add in another order:
    eight float32 roundings of the largest logit (here below 16).
    """
    case = peaked_case(40, 257, 16, torch.float32)
    whole = ours(case, plan=plan_of(case, "recompute", 64))
    for rows in (1, 7, 40):
        part = ours(case, plan=plan_of(case, "recompute", rows))
        assert (part.logp - whole.logp).abs().max() <= 8 * 16 * torch.finfo(torch.float32).eps
        assert (part.entropy - whole.entropy).abs().max() <= 8 * 16 * torch.finfo(torch.float32).eps


@walked("plan", LOGPROB_PLANS)
@walked("n", [65537] if CUDA else [2049])
def test_many_rows(n: int, plan: str) -> None:
    check(peaked_case(n, 33, 8, torch.float32), plan)
    if CUDA:
        check(peaked_case(n, 1000, 64, torch.bfloat16), plan)


@pytest.mark.skipif(not CUDA, reason="needs the memory of a GPU")
@walked("plan", LOGPROB_PLANS)
def test_more_than_two_to_the_31_logits(plan: str) -> None:
    """16 384 × 151 936 ≈ 2.5·10⁹ logits. Rows repeat every 64,
    so the first 64 determine the gradients of all rows and of the weight.
    """
    case, times = peaked_case(64, 151936, 64, torch.bfloat16), 256
    long = Case(
        case.hidden.repeat(times, 1),
        case.weight,
        case.ids.repeat(times),
        case.bias,
        *(d.repeat(times) for d in case[4:]),
    )
    found, truth = ours(long, plan=plan), run(contract, case, dtype=torch.float64)
    assert rms(found.logp.double() - truth.logp.repeat(times)) <= 2e-5
    assert rms(found.grads[0].double() - truth.grads[0].repeat(times, 1)) <= 3e-3 * rms(
        truth.grads[0]
    )
    assert rms(found.grads[1].double() - times * truth.grads[1]) <= 3e-3 * rms(
        times * truth.grads[1]
    )


@walked("plan", LOGPROB_PLANS)
@walked("kind", ["peaked", "deep", "flat"])
def test_extreme_logits(kind: str, plan: str) -> None:
    """Logits of ±80 at the token and 0 elsewhere (weights are unit vectors), and all of them 0."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        case = peaked_case(6, 16, 16, dtype)
        size = {"peaked": 80.0, "deep": -80.0, "flat": 0.0}[kind]
        weight = torch.eye(16, dtype=dtype, device=DEVICE)
        check(case._replace(weight=weight, hidden=size * weight[case.ids]), plan)


@walked("plan", LOGPROB_PLANS)
@walked("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_name)
def test_forbidden_vocabulary(dtype: torch.dtype, plan: str) -> None:
    """A bias of −inf forbids an entry: its row of the weight's gradient is exactly 0,
    and nothing is NaN.
    """
    case = peaked_case(9, 33, 8, dtype)
    forbidden = torch.ones(33, dtype=torch.bool, device=DEVICE)
    forbidden[case.ids] = False
    forbidden[::2] = False
    assert forbidden.sum() > 3
    found = check(case._replace(bias=case.bias.masked_fill(forbidden, -torch.inf)), plan)
    assert (found.grads[1][forbidden] == 0).all()
    assert (found.grads[2][forbidden] == 0).all()


@walked("plan", LOGPROB_PLANS)
def test_ids_at_both_ends_and_of_either_width(plan: str) -> None:
    case = peaked_case(4, 33, 8, torch.float32)
    case = case._replace(ids=torch.tensor([0, 32, 32, 0], device=DEVICE))
    found = check(case, plan)
    assert_same_bits(ours(case._replace(ids=case.ids.int()), plan=plan), found)


@walked(("plan", "softcap"), [("recompute", None), ("recompute", 30.0), ("stash", None)])
@walked("temperature", [1.0, 0.7, "per token"])
def test_temperature_and_softcap(temperature: Any, softcap: float | None, plan: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        case = peaked_case(11, 33, 8, dtype, peak=40.0)  # into the bend of the cap
        t = (
            torch.linspace(0.3, 2.0, 11, device=DEVICE)
            if temperature == "per token"
            else temperature
        )
        for rows in (None, 4):
            check(case, plan_of(case, plan, rows), temperature=t, softcap=softcap)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "per_token": {
        "temperature": torch.tensor(
            [[0.5, 1.0, 1.7], [0.9, 2.0, 1.1]], dtype=torch.float64, device=DEVICE
        )
    },
    "softcap": {"softcap": 3.0},
    "mask": {"mask": torch.tensor([[True, False, True], [True, True, False]], device=DEVICE)},
}


# The slope of a softcap is not known from kept probabilities.
POSSIBLE = [(p, v) for p in LOGPROB_PLANS for v in VARIANTS if (p, v) != ("stash", "softcap")]


@walked("rows", [None, 2])
@walked(("plan", "variant"), POSSIBLE)
def test_gradcheck(plan: str, variant: str, rows: int | None) -> None:
    case, kwargs = peaked_case(6, 5, 3), VARIANTS[variant]
    case = case._replace(hidden=case.hidden.reshape(2, 3, 3), ids=case.ids.reshape(2, 3))
    chosen = plan_of(case, plan, rows, kwargs.get("mask"))

    def values(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            pl.linear_logprobs(hidden, weight, case.ids, bias, entropy=True, plan=chosen, **kwargs)
        )

    leaves = [leaf(x) for x in (case.hidden, case.weight, case.bias)]
    # The first backward consumes a stash; a second one makes another, in another order of sums.
    assert gradcheck(
        values, leaves, atol=1e-7, rtol=1e-6, nondet_tol=1e-12 if plan == "stash" else 0.0
    )


@walked("plan", LOGPROB_PLANS)
@walked("wanted", ["hidden", "weight", "bias", "hidden+weight", "weight+bias"])
def test_partial_gradients(wanted: str, plan: str) -> None:
    """Each gradient alone equals the one among all, to the bit; other leaves get none."""
    case = peaked_case(13, 33, 8, torch.float32)
    everything = dict(zip(NAMES, ours(case, plan=plan).grads, strict=True))
    inputs = zip(NAMES, (case.hidden, case.weight, case.bias), strict=True)
    leaves = {
        name: x.detach().clone().requires_grad_(name in wanted.split("+")) for name, x in inputs
    }
    values = pl.linear_logprobs(
        leaves["hidden"], leaves["weight"], case.ids, leaves["bias"], entropy=True, plan=plan
    )
    torch.autograd.backward(values, (case.dlogp, case.dentropy))
    for name, x in leaves.items():
        if name in wanted.split("+"):
            assert x.grad is not None
            assert_same_bits(x.grad, everything[name])
        else:
            assert x.grad is None


@walked("plan", LOGPROB_PLANS)
def test_strided_inputs(plan: str) -> None:
    """A shifted slice of `[B, T, D]`, a batch stored time first,
    and hidden or weight stored the other way round.
    """
    case = peaked_case(12, 33, 8, FLOAT)
    expected = ours(case, plan=plan, bias=False)
    hidden, weight = leaf(case.hidden.reshape(3, 4, 8)), leaf(case.weight)
    dlogp, dentropy = case.dlogp.reshape(3, 4), case.dentropy.reshape(3, 4)
    ids = torch.nn.functional.pad(case.ids.reshape(3, 4), (1, 0))[:, 1:]
    for name, x, w, back in (
        ("slice", torch.nn.functional.pad(hidden, (0, 0, 0, 1))[:, :-1], weight, False),
        ("transposed", hidden.transpose(0, 1).contiguous().transpose(0, 1), weight, False),
        ("time first", hidden.transpose(0, 1), weight, True),
        ("hidden by column", hidden.transpose(1, 2).contiguous().transpose(1, 2), weight, False),
        ("weight by column", hidden, weight.T.contiguous().T, False),
    ):
        turn = (lambda t: t.T) if back else (lambda t: t)
        values = pl.linear_logprobs(x, w, turn(ids), entropy=True, plan=plan)
        found = torch.autograd.grad(values, (hidden, weight), (turn(dlogp), turn(dentropy)))
        assert_near(
            turn(values.logp.detach()).reshape(-1),
            expected.logp,
            1e-5 if CUDA else 1e-12,
            f"{name}: logp",
        )
        assert_near(
            found[0].reshape(12, 8), expected.grads[0], 1e-5 if CUDA else 1e-12, f"{name}: hidden"
        )
        assert_near(found[1], expected.grads[1], 1e-5 if CUDA else 1e-12, f"{name}: weight")


def test_expanded_weight_and_hidden() -> None:
    """All entries the same vector: a uniform distribution, logp = −ln 33;
    and one hidden state for all tokens.
    """
    case = peaked_case(5, 33, 8, FLOAT)
    one = leaf(case.weight[:1])
    values = pl.linear_logprobs(case.hidden, one.expand(33, 8), case.ids, entropy=True)
    assert_near(
        values.logp.detach(), torch.full_like(values.logp, -3.4965075614664802), 1e-6, "logp"
    )
    assert_near(
        values.entropy.detach(), torch.full_like(values.logp, 3.4965075614664802), 4e-6, "entropy"
    )
    assert_near(
        torch.autograd.grad(values.logp.sum(), one)[0],
        torch.zeros_like(one),
        1e-5,
        "the shared row cannot matter",
    )
    same, apart = leaf(case.hidden[:1]), leaf(case.hidden[:1].expand(5, 8))
    for x in (same, apart):
        found = pl.linear_logprobs(x.expand(5, 8), case.weight, case.ids).logp
        torch.autograd.backward(found, case.dlogp)
    assert_near(
        same.grad,
        apart.grad.sum(0, keepdim=True),
        1e-5 if CUDA else 1e-12,
        "gradient of a shared hidden state",
    )


@walked("plan", LOGPROB_PLANS)
def test_tied_weight(plan: str) -> None:
    """The embedding is also the head: its gradient is the sum of both uses."""
    case = peaked_case(9, 33, 8, FLOAT)
    inputs = (case.ids * 5 + 1) % 33

    def gradient(head: Any, dtype: torch.dtype, embed: bool = True, project: bool = True) -> Tensor:
        table = leaf(case.weight, dtype)
        x = torch.tanh((table if embed else table.detach())[inputs])
        logp = head(x, table if project else table.detach(), case.ids)
        return torch.autograd.grad(logp, table, case.dlogp.to(logp.dtype))[0]

    def head(*args: Any) -> Tensor:
        return pl.linear_logprobs(*args, plan=plan).logp

    tied = gradient(head, FLOAT)
    assert_near(
        tied,
        gradient(head, FLOAT, embed=False) + gradient(head, FLOAT, project=False),
        1e-6,
        "sum of both uses",
    )
    assert_near(
        tied,
        gradient(lambda *a: contract(*a).logp, torch.float64),
        1e-5 if CUDA else 1e-12,
        "tied gradient",
    )


@walked("plan", LOGPROB_PLANS)
@walked("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_name)
def test_garbage_at_masked_rows(dtype: torch.dtype, plan: str) -> None:
    """NaN, inf and ids outside the vocabulary behind the mask change no bit elsewhere;
    values and gradients there are 0.
    """
    case = peaked_case(8, 33, 8, dtype)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool, device=DEVICE)
    temperature = torch.linspace(0.5, 1.5, 8, device=DEVICE)
    clean = check(case, plan, mask=mask, temperature=temperature)
    case.hidden[1], case.hidden[4], case.hidden[5, 3] = torch.nan, torch.inf, -torch.inf
    case.ids[1], case.ids[5], case.ids[7] = -100, 33, 10**12
    temperature[~mask] = torch.tensor([0.0, -1.0, torch.nan, torch.inf], device=DEVICE)
    case.dlogp[~mask], case.dentropy[~mask] = torch.inf, torch.nan
    dirty = ours(case, plan=plan, mask=mask, temperature=temperature)
    assert_same_bits(dirty, clean)
    for x in (dirty.logp, dirty.entropy, dirty.grads[0]):
        assert (x[~mask] == 0).all()
    assert_same_bits(ours(case, plan=plan, mask=mask.long(), temperature=temperature), clean)


@walked("plan", LOGPROB_PLANS)
def test_a_nan_stays_in_its_row_and_shows_in_the_weight(plan: str) -> None:
    case = peaked_case(5, 33, 8, torch.float32)
    clean = ours(case, plan=plan)
    case.hidden[2, 3] = torch.nan
    dirty = ours(case, plan=plan)
    others = [0, 1, 3, 4]
    assert dirty.logp[2].isnan()
    assert dirty.entropy[2].isnan()
    assert dirty.grads[0][2].isnan().all()
    assert dirty.grads[1].isnan().any()
    assert_same_bits(
        (dirty.logp[others], dirty.grads[0][others]), (clean.logp[others], clean.grads[0][others])
    )


@walked("plan", ["auto", *LOGPROB_PLANS])
@walked("shape", [(0,), (2, 0), (3,)], ids=str)
def test_no_rows_or_none_that_count(shape: tuple[int, ...], plan: str) -> None:
    """No rows, or three that are all masked: zeros,
    and gradients that are 0 rather than missing.
    """
    case = peaked_case(3, 33, 8, torch.float32)
    hidden = torch.full((*shape, 8), torch.nan, device=DEVICE, requires_grad=True)
    weight, bias = leaf(case.weight), leaf(case.bias)
    ids = torch.full(shape, -100, device=DEVICE)
    mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    logp, entropy = pl.linear_logprobs(
        hidden, weight, ids, bias, entropy=True, mask=mask, plan=plan
    )
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == shape
    for x in (logp, entropy, hidden.grad, weight.grad, bias.grad):
        assert x is not None
        assert (x == 0).all()
    assert (hidden.grad.shape, weight.grad.shape, bias.grad.shape) == (hidden.shape, (33, 8), (33,))


@walked("plan", LOGPROB_PLANS)
def test_backward_twice_and_into_an_existing_gradient(plan: str) -> None:
    case = peaked_case(9, 33, 8, FLOAT)
    once = ours(case, plan=plan, bias=False).grads
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    values = pl.linear_logprobs(hidden, weight, case.ids, entropy=True, plan=plan)
    torch.autograd.backward(values, (case.dlogp, case.dentropy), retain_graph=True)
    torch.autograd.backward(values, (case.dlogp, case.dentropy))
    assert_near(hidden.grad, 2 * once[0], 1e-5, "hidden")
    assert_near(weight.grad, 2 * once[1], 1e-5, "weight")


def test_forward_only_keeps_nothing() -> None:
    case = peaked_case(9, 33, 8, torch.float32)
    expected = ours(case, bias=False)
    hidden, weight = leaf(case.hidden), leaf(case.weight)
    with torch.no_grad():
        found = pl.linear_logprobs(hidden, weight, case.ids, entropy=True)
    assert_same_bits(tuple(found), (expected.logp, expected.entropy))
    assert not found.logp.requires_grad
    assert not pl.linear_logprobs(hidden.detach(), weight.detach(), case.ids).logp.requires_grad
    alone = pl.linear_logprobs(hidden.detach(), weight, case.ids).logp
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, expected.logp)


@walked("inside", [False, True], ids=["backward outside", "backward inside"])
@walked("plan", LOGPROB_PLANS)
def test_autocast_is_the_computation_in_its_dtype(plan: str, inside: bool) -> None:
    """float32 parameters under autocast: the values of the bf16 inputs bit for bit, and float32
    gradients to a rounding of bf16.
    """
    case = peaked_case(17, 65, 16, torch.float32)
    rounded = Case(
        *(x.bfloat16() if x.is_floating_point() else x for x in case[:4]), case.dlogp, case.dentropy
    )
    expected = ours(rounded, plan=plan, bias=False)
    truth = run(contract, rounded, dtype=torch.float64, bias=False)
    leaves = leaf(case.hidden), leaf(case.weight)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        values = pl.linear_logprobs(*leaves, case.ids, entropy=True, plan=plan)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=inside):
        found = backward(values, (case.dlogp, case.dentropy), leaves)
    assert_same_bits((found.logp, found.entropy), (expected.logp, expected.entropy))
    for name, a, b in zip(NAMES, found.grads, truth.grads, strict=False):
        assert a.dtype == torch.float32
        assert rms(a.double() - b) <= 2**-8 * rms(b), name


def test_checkpoint_around_the_body() -> None:
    case = peaked_case(9, 33, 8, torch.float32)
    body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(DEVICE)

    def gradients(hidden_of: Any) -> tuple[Tensor, ...]:
        weight = leaf(case.weight)
        logp = pl.linear_logprobs(hidden_of(case.hidden), weight, case.ids).logp
        return torch.autograd.grad(logp, (weight, *body.parameters()), case.dlogp)

    assert_same_bits(gradients(lambda x: checkpoint(body, x, use_reentrant=False)), gradients(body))


@walked("plan", LOGPROB_PLANS)
@walked("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_the_same_bits_every_time_and_whatever_memory_held(dtype: torch.dtype, plan: str) -> None:
    case = peaked_case(50, 333, 16, dtype)
    mask = torch.arange(50, device=DEVICE) % 3 > 0
    call = {"plan": plan_of(case, plan, 16, mask), "mask": mask}
    first = ours(case, **call)
    assert_same_bits(ours(case, **call), first)
    with Poison():
        assert_same_bits(ours(case, **call), first)
    poison_freed_memory(
        (16, 333), (33, 333), (50, 333), (50, 16), (333, 16), (33, 16), (50,), (33,), (16,)
    )
    assert_same_bits(ours(case, **call), first)


@walked(("plan", "passes"), [("recompute", 4), ("stash", 3)])
def test_only_live_rows_enter_a_product(plan: str, passes: int) -> None:
    """Twenty of fifty rows: `passes` products of twenty rows with gradients, one without, two if
    the head is frozen (of three).
    """
    case = peaked_case(50, 65, 16, torch.float32)
    mask = torch.arange(50, device=DEVICE) % 5 < 2
    for rows in (None, 8):
        chosen = plan_of(case, plan, rows, mask)
        with MatmulRows(65, 16) as counted:
            ours(case, plan=chosen, mask=mask)
        assert counted.rows == passes * 20
        with MatmulRows(65, 16) as counted:
            hidden = leaf(case.hidden)
            torch.autograd.grad(
                pl.linear_logprobs(hidden, case.weight, case.ids, mask=mask, plan=chosen).logp,
                hidden,
                case.dlogp,
            )
        assert counted.rows == (passes - 1) * 20
        with MatmulRows(65, 16) as counted, torch.no_grad():
            pl.linear_logprobs(
                leaf(case.hidden), leaf(case.weight), case.ids, mask=mask, plan=chosen
            )
        assert counted.rows == 20


def test_logits_are_never_there_all_at_once() -> None:
    """Under `recompute` no tensor of the call is larger than a window of logits,
    the weight or hidden.
    """
    case = peaked_case(64, 512, 8, torch.float32)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, Tensor):
                    self.elements = max(self.elements, x.numel())
            return out

    with Largest() as seen:
        plan = dataclasses.replace(plan_of(case, "recompute", 8), columns=64)
        ours(case, plan=plan)
    assert seen.elements <= 64 * 64 == 8 * 512 == case.weight.numel()
