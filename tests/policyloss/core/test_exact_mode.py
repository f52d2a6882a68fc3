"""`exact()` as a context: threads, wrong arguments, decorators, compilers, and a second backward;
and sums whose size does not matter.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import SPECS, make_batch
from policyloss.functional.exact import exact_total, is_exact, unit_of
from policyloss.functional.segments import Sequences

BATCH = make_batch(seed=4, rows=9, width=11, dtype=torch.float32)


@walked("on", [True, False])
def test_blocks_of_two_threads_that_overlap(on):
    """The first ends within the second: the second keeps its mode, and its end is the end."""
    first_began, second_began, first_ended = (threading.Event() for _ in range(3))
    modes = []

    def first() -> None:
        with pl.exact():
            first_began.set()
            second_began.wait(10)
        first_ended.set()

    def second() -> None:
        first_began.wait(10)
        with pl.exact(on):
            second_began.set()
            first_ended.wait(10)
            modes.append(is_exact())

    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert modes == [on]
    assert not is_exact()


def test_one_block_used_twice_and_within_itself():
    block = pl.exact()
    with block:
        with pl.exact(False):
            with block:
                assert is_exact()
            assert not is_exact()
        assert is_exact()
    assert not is_exact()


def test_a_decorator():
    @pl.exact()
    def mode(depth: int) -> list[bool]:
        return [is_exact(), *(mode(depth - 1) if depth else [])]

    assert mode(2) == [True, True, True]
    assert not is_exact()


@walked("on", ["no", 1, None, is_exact], ids=["text", "number", "None", "function"])
def test_anything_but_a_flag_is_refused(on: Any):
    """`@pl.exact` without parentheses would otherwise replace a function by one that returns it."""
    with pytest.raises(pl.InputError, match="on must be True or False"):
        pl.exact(on)
    assert not is_exact()


def gradient(spec: pl.LossSpec, factor: float) -> Tensor:
    logp = BATCH.logp.clone().requires_grad_()
    with pl.exact():
        loss = pl.policy_loss(spec, **{**BATCH.kwargs, "logp": logp}).loss
    return torch.autograd.grad(loss * factor, logp)[0]


@walked("name", ["dapo", "gspo", "sapo"])
@walked("power", [-90, -40, 60])
def test_a_power_of_two_scales_every_gradient_exactly(name, power):
    """Sums over a sequence keep their digits, however small their terms are."""
    spec = SPECS[name]
    assert torch.equal(gradient(spec, 2.0**power), gradient(spec, 1.0) * 2.0**power)


@walked("size", [2.0**-120, 2.0**-62, 1.0, 2.0**100])
def test_totals_and_sums_of_any_size_by_hand(size):
    # 3 + 1 + 2^-40 − 3 = 1 + 2^-40. With quanta of one size for all, nothing of 2^-62 were left.
    x = torch.tensor([3.0, 1.0, 2.0**-40, -3.0], dtype=torch.float64) * size
    expected = (1 + 2.0**-40) * size
    assert float(exact_total(x)) == expected
    rows = Sequences.of(x.view(1, 4))
    pack = Sequences.of(x, torch.tensor([0, 0, 4, 4]))
    with pl.exact():
        assert rows.sum(x.view(1, 4)).tolist() == [expected]
        assert pack.sum(x).tolist() == [0.0, expected, 0.0]


def test_the_unit_of_a_sum_by_hand():
    # 6 = 0.75·2^3 becomes 6·2^25, less than 2^28; zeros have the unit 1.
    tops = torch.tensor([6.0, 0.0, math.inf, math.nan, -math.inf], dtype=torch.float64)
    assert unit_of(tops).tolist() == [2.0**-25, 1.0, 1.0, 1.0, 1.0]


@walked("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_spoils_its_own_sequence_alone(bad):
    x = torch.tensor([1.0, bad, 0.25, 0.5])
    with pl.exact():
        sums = Sequences.of(x, torch.tensor([0, 2, 4])).sum(x)
    assert not math.isfinite(sums[0])
    assert sums[1] == 0.75


def test_a_second_backward_keeps_the_mode():
    """It runs the windows again, with parts that read the mode."""
    modes: list[bool] = []

    def trust(t: Any) -> Tensor:
        modes.append(is_exact())
        return -t.advantages * t.ratio

    trust.reach = "token"  # type: ignore[attr-defined]
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(7, 4)
    tensors = {"old_logp": -torch.ones(2, 3), "advantages": torch.randn(2, 3)}
    with pl.exact():
        out = pl.linear_policy_loss(
            pl.LossSpec(trust=trust),
            hidden,
            weight,
            torch.zeros(2, 3, dtype=torch.long),
            mask=torch.ones(2, 3, dtype=torch.bool),
            plan="one_pass",
            **tensors,
        )
    once = torch.autograd.grad(out.loss, hidden, retain_graph=True)[0]
    modes.clear()
    again = torch.autograd.grad(out.loss, hidden)[0]
    assert modes
    assert all(modes)
    assert torch.equal(once, again)


LOGITS, IDS = torch.randn(5, 40), torch.randint(0, 5, (5,))
MASK = torch.tensor([[True, True, False], [True, True, True]])
CALLS = {
    "logprobs": lambda x: pl.logprobs(x, IDS, entropy=True).entropy,
    "linear_logprobs": lambda x: pl.linear_logprobs(x, LOGITS, IDS).logp,
    "linear_policy_loss": lambda x: (
        pl.linear_policy_loss(
            "reinforce", x[None], LOGITS, IDS[None], None, torch.ones(1, 5), IDS[None] >= 0
        ).loss
    ),
    "gae": lambda x: pl.gae(x[:2, :3], x[2:4, :3], MASK, 0.9, 0.8).advantages,
}


# A compiler takes seconds.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CALLS if name != "gae"]


@pytest.mark.parametrize("name", ["gae", *SLOW])
def test_a_compiler_leaves_every_function_alone(name):
    """It chooses kernels and the order of sums by itself: no number is in its graphs."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def twice(x: Tensor) -> Tensor:
        return 2 * CALLS[name](x)

    torch.compiler.reset()
    with pl.exact():
        result = torch.compile(twice, backend=backend)(LOGITS)
        assert torch.equal(result, twice(LOGITS))
    names = {str(n.target) for graph in graphs for n in graph.graph.nodes}
    assert not [n for n in names if any(word in n for word in ("exp", "sum", "mm", "addc", "sub"))]
