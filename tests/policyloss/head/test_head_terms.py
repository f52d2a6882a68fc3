"""`index=`: hidden states that serve several loss terms give the numbers of the unrolled batch.

The unrolled batch, `hidden[index]`, is the oracle: its head is compared with the contract line in
other files.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from head_cases import (
    CUDA,
    DEVICE,
    FLOAT,
    LOSS_PLANS,
    HeadBatch,
    LossRun,
    MatmulRows,
    admitted,
    assert_near,
    assert_same_bits,
    assert_same_loss,
    contract,
    generator,
    leaf,
    make_head_batch,
    run_loss,
)
from torch import Tensor
from torch.autograd import gradcheck
from walk import walked

import policyloss as pl
from cases import PRESETS

TOLERANCE = 2e-5 if CUDA else 1e-12


class Tree:
    """Sequences that share prefixes. states: `[N, D]`. index: `[B, T]`. unrolled: the same batch
    with a hidden state for each term.
    """

    def __init__(self, batch: HeadBatch) -> None:
        ids, shape = batch.ids.clone(), batch.ids.shape
        index = torch.arange(ids.numel(), device=DEVICE).view(shape)
        for row, parent, depth in ((1, 0, 4), (4, 0, 6), (5, 0, 2), (6, 4, 4)):
            index[row, :depth] = index[parent, :depth]
            # The last shared state predicts another token in each branch.
            ids[row, : depth - 1] = ids[parent, : depth - 1]
        self.states, self.index = batch.hidden.flatten(0, 1), index
        hidden = self.states[index]
        shift = contract(hidden, batch.weight, ids).logp - contract(*_head(batch)).logp
        names = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp")
        moved = shift.cpu().to(batch.tokens.logp.dtype)
        tokens = batch.tokens.map(lambda x: (x + moved).clamp(max=-1e-3), *names)
        self.unrolled = HeadBatch(hidden, batch.weight, ids, tokens)

    @property
    def mask(self) -> Tensor:
        return self.unrolled.tokens.mask.to(DEVICE)

    @property
    def distinct(self) -> int:
        """Distinct pairs of hidden state and id in the mask."""
        pairs = torch.stack([self.index[self.mask], self.unrolled.ids[self.mask]])
        return pairs.unique(dim=1).shape[1]

    def run(self, spec: pl.LossSpec, packed: bool = False, **call: Any) -> LossRun:
        """The loss of the tree, with garbage at masked terms."""
        batch = self.unrolled.packed() if packed else self.unrolled
        inside = self.unrolled.tokens.inside.to(DEVICE)
        index, mask = (x[inside] if packed else x for x in (self.index, self.mask))
        call = {**batch.kwargs, **call, "index": torch.where(mask, index, -1)}
        ids = torch.where(mask, batch.ids, -100)
        states, weight = leaf(self.states), leaf(batch.weight)
        out = pl.linear_policy_loss(spec, states, weight, ids, **call)
        grads = torch.autograd.grad(out.loss, (states, weight))
        return LossRun(out.loss.detach(), *grads, out.metrics)

    def expected(self, spec: pl.LossSpec, packed: bool = False, **call: Any) -> LossRun:
        """The loss of the unrolled batch, with its gradients by the shared states."""
        batch = self.unrolled.packed() if packed else self.unrolled
        run = run_loss(spec, batch, **call)
        states = torch.zeros_like(self.states)
        index = self.index[self.unrolled.tokens.inside.to(DEVICE)] if packed else self.index
        states.index_add_(0, index.flatten(), run.dhidden.flatten(0, -2))
        return run._replace(dhidden=states)


def _head(batch: HeadBatch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.hidden, batch.weight, batch.ids


TREE = Tree(make_head_batch(seed=2, dtype=FLOAT))
WEIGHT = TREE.unrolled.weight
BONUS = pl.LossSpec(trust=pl.Clip(0.2, 0.28), kl=pl.KL("k3", 0.1), entropy_coef=0.05)
# Clip-Cov draws by the bits of logp, which differ in float32.
SERVED = [n for n, s in PRESETS.items() if s.divergence is None and not (CUDA and n == "clip_cov")]


def small_windows(name: str) -> pl.Plan:
    """Windows of five rows, and ten vocabulary entries at a time."""
    return pl.Plan(name, 5, 10)


@walked("name", SERVED)
def test_every_preset_under_every_plan(name: str) -> None:
    """A loss of sequences has no "one_pass": its windows hold complete sequences, and these may
    share hidden states with others.
    """
    spec = PRESETS[name]
    sources, call = (leaf(TREE.states[TREE.index]), leaf(WEIGHT)), TREE.unrolled.kwargs
    explain = partial(pl.explain_plan, spec, *sources, TREE.unrolled.ids, **call)
    served = admitted(lambda plan: explain(plan=plan))
    expected = TREE.expected(spec)
    assert_same_loss(TREE.run(spec), expected, TOLERANCE)
    for plan in served:
        if plan == "one_pass" and spec.reach == "sequence":
            with pytest.raises(pl.InputError, match="with index, sequences may share hidden"):
                TREE.run(spec, plan=plan)
        else:
            assert_same_loss(TREE.run(spec, plan=small_windows(plan)), expected, TOLERANCE)


@walked("packed", (False, True))
@walked("plan", LOSS_PLANS)
def test_packed_terms_and_all_parts(plan: str, packed: bool) -> None:
    """An entropy bonus, a KL term and a bias; one temperature, and one per term."""
    ids = TREE.unrolled.ids
    bias = torch.randn(33, generator=generator(3)).to(TREE.states)
    warmth = 0.5 + torch.rand(ids.shape, generator=generator(4)).to(DEVICE)
    warmth[4] = warmth[0]  # their shared prefix, unlike the others', has equal temperatures
    warmth = warmth[TREE.unrolled.tokens.inside.to(DEVICE)] if packed else warmth
    for temperature in (0.7, warmth):
        call = {"packed": packed, "plan": small_windows(plan), "bias": bias}
        call["temperature"] = temperature
        assert_same_loss(TREE.run(BONUS, **call), TREE.expected(BONUS, **call), TOLERANCE)


@walked("plan", ("one_pass", "recompute"))
def test_softcap_the_current_policy_and_skipped_terms(plan: str) -> None:
    for spec, call in (
        (BONUS, {"softcap": 4.0}),
        (BONUS, {"old_logp": "current"}),
        (PRESETS["ppo"], {"skip_zero_advantage": True} if plan == "one_pass" else {}),
    ):
        call["plan"] = small_windows(plan)
        assert_same_loss(TREE.run(spec, **call), TREE.expected(spec, **call), TOLERANCE)


def test_gathered_gradients_of_logits() -> None:
    plan = dataclasses.replace(small_windows("one_pass"), gathered=11)
    expected = TREE.expected(PRESETS["ppo"])
    assert_same_loss(TREE.run(PRESETS["ppo"], plan=plan), expected, TOLERANCE)


@walked("plan", ("recompute", "stash"))
def test_logprobs_and_entropy(plan: str) -> None:
    """Values and gradients of the unrolled call, 0 at masked terms."""
    weight, bias = TREE.unrolled.weight, torch.randn(33, generator=generator(3)).to(TREE.states)
    through = [torch.randn(TREE.index.shape, generator=generator(i)).to(DEVICE) for i in (5, 6)]

    def run(shared: bool) -> list[Tensor]:
        leaves = leaf(TREE.states), leaf(weight), leaf(bias)
        hidden = leaves[0] if shared else leaves[0][TREE.index]
        index = {"index": TREE.index} if shared else {}
        call = {"mask": TREE.mask, "bias": leaves[2], "plan": small_windows(plan)}
        out = pl.linear_logprobs(
            hidden, leaves[1], TREE.unrolled.ids, entropy=True, **call, **index
        )
        total = sum((x * d).sum() for x, d in zip(out, through, strict=True))
        return [*(x.detach() for x in out), *torch.autograd.grad(total, leaves)]

    for name, ours, theirs in zip(
        ("logp", "entropy", "states", "weight", "bias"), run(True), run(False), strict=True
    ):
        assert_near(ours, theirs, TOLERANCE, name)


def test_a_gradient_by_hand() -> None:
    """Logits (0, ln 3): p = (1/4, 3/4). Terms of the ids 0, 1, 1 with derivatives 1, 2, 3:
    `Σ c·(e_y − p)` = (1, 5) − 6·(1/4, 3/4) = (−1/2, 1/2).
    """
    hidden, weight = (torch.tensor(x, dtype=torch.float64) for x in ([[9.0], [1.0]], [[0], [1]]))
    weight[1] = math.log(3)
    hidden, weight = leaf(hidden), leaf(weight)
    ids, index = torch.tensor([0, 1, 1]), torch.tensor([1, 1, 1])
    out = pl.linear_logprobs(hidden, weight, ids, index=index)
    expected = torch.tensor([0.25, 0.75, 0.75], dtype=torch.float64).log()
    assert_near(out.logp.detach(), expected, 1e-12, "logp")
    (out.logp * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert_near(hidden.grad.flatten(), torch.tensor([0, 0.5 * math.log(3)]), 1e-7, "hidden")
    assert_near(weight.grad.flatten(), torch.tensor([-0.5, 0.5]), 1e-12, "weight")


@pytest.mark.skipif(CUDA, reason="the kernels do not take float64")
def test_gradcheck() -> None:
    states, weight = leaf(TREE.states[:6]), leaf(TREE.unrolled.weight[:5])
    index, ids = torch.tensor([[0, 1, 2], [0, 1, 5]]), torch.tensor([[4, 0, 1], [4, 2, 1]])

    def values(states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = pl.linear_logprobs(states, weight, ids, index=index, entropy=True)
        assert out.entropy is not None
        return out.logp, out.entropy

    assert gradcheck(values, (states, weight))


def test_distinct_rows_are_computed_once() -> None:
    """Three matmuls of the distinct rows, fewer than there are terms; in four of "recompute"."""
    vocab, width = TREE.unrolled.weight.shape
    assert TREE.distinct < int(TREE.mask.sum()) - 10
    for plan, matmuls in (("one_pass", 3), ("recompute", 4), ("stash", 3)):
        with MatmulRows(vocab, width) as counted:
            TREE.run(BONUS, plan=plan)
        assert counted.rows == matmuls * TREE.distinct
    call = {**TREE.unrolled.kwargs, "index": TREE.index}
    states, weight = leaf(TREE.states), leaf(TREE.unrolled.weight)
    plan = pl.explain_plan(BONUS, states, weight, TREE.unrolled.ids, **call)
    assert (plan.name, plan.computed, plan.with_gradient) == ("one_pass", *[TREE.distinct] * 2)
    mask = {"mask": TREE.mask, "index": TREE.index}
    plan = pl.explain_plan(None, states, weight, TREE.unrolled.ids, **mask)
    assert (plan.computed, plan.tokens) == (TREE.distinct, TREE.distinct + 1)


def test_rejected_terms_have_no_logp() -> None:
    """Also where another term reads the same row: the output is that of the unrolled batch."""
    spec, batch = PRESETS["icepop"].replace(rejected="renormalise"), TREE.unrolled
    call = {**batch.kwargs, "rollout_logp": batch.kwargs["old_logp"].clone()}
    call["rollout_logp"][0, :3] -= 9
    unrolled = pl.linear_policy_loss(spec, batch.hidden, batch.weight, batch.ids, **call)
    tree = pl.linear_policy_loss(
        spec, TREE.states, batch.weight, batch.ids, index=TREE.index, **call
    )
    rejected = TREE.mask & (unrolled.logp == 0)
    shared = torch.isin(TREE.index, TREE.index[TREE.mask & ~rejected])
    assert bool((rejected & shared).any())
    assert_near(tree.logp, unrolled.logp, TOLERANCE, "logp")
    assert_near(tree.entropy, unrolled.entropy, TOLERANCE, "entropy")


def test_exact_values_have_the_bits_of_the_unrolled_batch() -> None:
    """A row has the same bits in every tile. Gradients are summed in another order, and are the
    same from call to call.
    """
    tree = Tree(make_head_batch(seed=2, vocab=128, size=16, dtype=torch.float32))
    with pl.exact():
        expected, *runs = tree.expected(BONUS), tree.run(BONUS), tree.run(BONUS)
    assert_same_bits(runs[0].loss, expected.loss)
    assert_same_bits(runs[0][:3], runs[1][:3])
    assert_same_loss(runs[0], expected, 2e-5)


def test_micro_batches_of_a_step_add_up() -> None:
    """`index` travels in a micro-batch as `ids` do; the empty share of a rank has one, too."""
    batch, spec = TREE.unrolled, PRESETS["ppo"]
    call = {**batch.kwargs, "ids": batch.ids, "index": TREE.index}
    per_term = {name: x for name, x in call.items() if x is not None}
    states, weight = leaf(TREE.states), leaf(batch.weight)
    parts = [{name: x[at] for name, x in per_term.items()} for at in ([0, 1, 2], [3, 4, 5, 6])]
    for micro in pl.accumulate(spec, parts):
        call = {"index": micro["index"], **micro.arguments()}
        pl.linear_policy_loss(spec, states, weight, micro["ids"], **call).loss.backward()
    whole = TREE.run(spec)
    assert_near(states.grad, whole.dhidden, TOLERANCE, "states")
    assert_near(weight.grad, whole.dweight, TOLERANCE, "weight")


def test_no_terms() -> None:
    """All are masked, or there are none: a loss of 0 with a gradient of 0."""
    for cut in (slice(None), slice(0)):
        index, ids = TREE.index[cut], TREE.unrolled.ids[cut]
        states = leaf(TREE.states)
        numbers = {"old_logp": torch.zeros(ids.shape, device=DEVICE), "totals": "local"}
        nothing = torch.zeros(ids.shape, dtype=torch.bool, device=DEVICE)
        call = {**numbers, "advantages": numbers["old_logp"], "mask": nothing, "index": index}
        out = pl.linear_policy_loss("ppo", states, TREE.unrolled.weight, ids, **call)
        out.loss.backward()
        assert float(out.loss.detach()) == 0 == float(states.grad.abs().sum())


def changed(x: Tensor, row: int, column: int, value: float) -> Tensor:
    x = x.clone()
    x[row, column] = value
    return x


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a float": ({"index": TREE.index.double()}, "index must be a tensor of integers"),
    "another shape": ({"index": TREE.index[:, :-1]}, r"index has shape \(7, 7\) but ids has"),
    "a list": ({"index": [0, 1]}, "index must be a tensor of integers"),
    "too high": ({"index": TREE.index + 3}, "index holds 56 at position .*, 0 to 55"),
    "negative": ({"index": TREE.index - 1}, "index holds -1 at position 0 .* False in mask"),
    "an id": (
        {"ids": changed(TREE.unrolled.ids, 1, 3, 40)},
        r"ids holds 40 at position 11 \(counted over all tokens\)",
    ),
    "ids of floats": ({"ids": TREE.unrolled.ids.double()}, "ids must be a tensor of integers"),
    "a temperature": (
        {"temperature": changed(torch.ones(TREE.index.shape, device=DEVICE), 4, 2, -2)},
        "temperature holds -2.0 at position 34",
    ),
    "temperatures": ({"temperature": torch.ones(56, device=DEVICE)}, "temperature has shape"),
    "a mask": ({"mask": TREE.mask[:3]}, "mask has shape"),
    "a support": (
        {"support": (torch.zeros(1), torch.zeros(1))},
        "index and support were passed together",
    ),
}


@walked(("change", "message"), WRONG.values(), ids=list(WRONG))
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    call = {"ids": TREE.unrolled.ids, "index": TREE.index, **change}
    with pytest.raises(pl.InputError, match=message):
        pl.linear_logprobs(TREE.states, TREE.unrolled.weight, **call)


def test_a_teacher_is_refused() -> None:
    spec = next(s for s in PRESETS.values() if s.divergence is not None)
    call = {**TREE.unrolled.kwargs, "teacher": TREE.unrolled.teacher(), "index": TREE.index}
    with pytest.raises(pl.InputError, match="index and teacher were passed together"):
        pl.linear_policy_loss(spec, TREE.states, TREE.unrolled.weight, TREE.unrolled.ids, **call)
