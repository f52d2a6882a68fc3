"""Inside a user's own `torch.compile` a loss is one node of their graph, whatever surrounds it.

That the numbers of every preset are the eager ones is tested in test_compile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import policyloss as pl
from cases import PRESETS, Batch, assert_same, make_batch
from policyloss.compiled import in_graph
from policyloss.errors import PolicyLossError

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
BATCH = make_batch(seed=4)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs each graph unchanged, and counts its operations.

    leaves: the tensors whose gradient each loss computes, by name.
    """

    def __init__(self) -> None:
        self.operations: list[int] = []
        self.leaves: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nodes = graph.graph.nodes
        getters = [n for n in nodes if n.op == "call_function" and "getitem" not in str(n.target)]
        self.operations.append(len(getters))
        self.leaves += [list(n.args[4]) for n in getters if n.target is in_graph._node]
        return graph.forward


def arguments(batch: Batch) -> dict[str, Any]:
    """Without entropy and divergence, which the losses here do not read."""
    return {
        name: x for name, x in batch.kwargs.items() if name not in ("logp", "entropy", "divergence")
    }


@pytest.mark.parametrize("name", ["ppo_dual_clip", "gspo", "tis"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_compiler_sees_one_operation(name: str, layout: str) -> None:
    """Hundreds of values of the pipeline would be guarded otherwise, before every call."""
    batch, graphs = BATCH.packed() if layout == "packed" else BATCH, Graphs()

    def loss(logp: Tensor) -> tuple[Tensor, pl.Metrics]:
        out = pl.policy_loss(PRESETS[name], logp, **arguments(batch))
        return out.loss, out.metrics

    leaf = batch.logp.clone().requires_grad_()
    value, metrics = torch.compile(loss, fullgraph=True, backend=graphs)(leaf)
    value.backward()
    same = batch.logp.clone().requires_grad_()
    expected, other = loss(same)
    expected.backward()
    assert_same(value.detach(), expected.detach(), what="loss")
    assert_same(leaf.grad, same.grad, what="gradient")
    assert_same(metrics.compute(), other.compute(), what="metric")
    assert graphs.operations == [1]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_other_shapes_share_a_graph(layout: str) -> None:
    graphs = Graphs()
    batches = [make_batch(seed=1, rows=rows, width=7) for rows in (4, 5, 6, 9)]
    if layout == "packed":
        batches = [batch.packed() for batch in batches]

    def loss(logp: Tensor, others: dict[str, Any]) -> Tensor:
        return pl.policy_loss("gspo", logp, **others).loss

    compiled = torch.compile(loss, fullgraph=True, backend=graphs)
    for batch in batches:
        others = arguments(batch)
        assert_same(compiled(batch.logp, others), loss(batch.logp, others), what="loss")
    assert graphs.operations == [1, 1]  # the first shape, and any


def test_every_level_of_metrics_within_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that runs, in any thread, leaves the places of the metrics of other kinds alone."""
    levels: tuple[Any, ...] = ("all", "basic", "none")
    call, kinds, node = (BATCH.old_logp, BATCH.advantages, BATCH.mask), [], in_graph._node

    def all_levels(logp: Tensor) -> list[pl.Metrics]:
        return [pl.policy_loss("ppo", logp, *call, metrics=level).metrics for level in levels]

    compiled = torch.compile(all_levels, fullgraph=True, backend="eager")
    expected = all_levels(BATCH.logp)
    for a, b in zip(compiled(BATCH.logp), expected, strict=True):
        assert_same(a.compute(), b.compute(), what="metric")

    def recorded(kind: str, *rest: Any) -> Any:
        kinds.append(kind)
        return node(kind, *rest)

    monkeypatch.setattr(in_graph, "_node", recorded)
    for level in levels:
        in_graph.loss_in_graph("ppo", BATCH.logp, *call, None, level, {})
    names = [{name for name, *_ in in_graph._places_of(kind).records} for kind in kinds]
    assert names == [set(metrics) for metrics in expected]


def test_a_loss_against_the_policy_itself() -> None:
    """`old_logp="current"` is logp without its gradient."""
    graphs = Graphs()

    def loss(logp: Tensor) -> Tensor:
        return pl.policy_loss("ppo", logp, "current", BATCH.advantages, BATCH.mask).loss

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=graphs)):
        leaf = BATCH.logp.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf), leaf)[0])
    assert_same(gradients[1], gradients[0], what="gradient")
    assert gradients[0].abs().max() > 0.01
    assert graphs.operations == [1]


def test_a_loss_against_a_policy_between_rollout_and_current_policy() -> None:
    def loss(logp: Tensor) -> Tensor:
        tensors = {"rollout_logp": BATCH.rollout_logp, "ages": BATCH.ages, "mask": BATCH.mask}
        return pl.policy_loss("ppo", logp, "loglinear", BATCH.advantages, **tensors).loss

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="eager")):
        leaf = BATCH.logp.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf), leaf)[0])
    assert_same(gradients[1], gradients[0], what="gradient")


def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    """Of logp alone where the other inputs have none; of nothing without autograd."""
    graphs = Graphs()

    def loss(logp: Tensor) -> Tensor:
        return pl.policy_loss("ppo", logp, **arguments(BATCH)).loss

    compiled = torch.compile(loss, fullgraph=True, backend=graphs)
    leaf = BATCH.logp.clone().requires_grad_()
    assert compiled(leaf).requires_grad
    with torch.no_grad():
        assert not compiled(leaf).requires_grad
    assert not compiled(leaf.detach()).requires_grad
    assert graphs.leaves == [["logp"], [], []]


def test_the_exact_mode_stays_out_of_the_graph() -> None:
    """A compiler chooses the order of sums by itself."""
    graphs = Graphs()

    def loss(logp: Tensor) -> tuple[Tensor, pl.Metrics]:
        out = pl.policy_loss("gspo", logp, **arguments(BATCH))
        return out.loss, out.metrics

    with pl.exact():
        value, metrics = torch.compile(loss, backend=graphs)(BATCH.logp)
        expected, other = loss(BATCH.logp)
    assert torch.equal(value, expected)
    assert metrics.compute() == other.compute()
    assert sum(graphs.operations) == 0


def test_metrics_of_two_losses_are_added_within_a_graph() -> None:
    def both(logp: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (pl.policy_loss(x, logp, **arguments(BATCH)) for x in ("ppo", "gspo"))
        metrics = first.metrics + second.metrics
        return metrics["tokens"].value, metrics["clip_fraction"].value

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for value, expected in zip(compiled(BATCH.logp), both(BATCH.logp), strict=True):
        assert_same(value.double(), expected.double(), what="metric")
    assert compiled(BATCH.logp)[0] == 2 * BATCH.mask.sum()


def test_the_gradient_reaches_tensors_before_the_loss() -> None:
    weight = torch.randn(3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids, old = torch.arange(20).view(4, 5) % 11, torch.full((4, 5), -2.0, dtype=torch.float64)
    advantages, mask = torch.tensor([1.0, -1.0, 2.0, 0.5]).double(), torch.arange(20).view(4, 5) > 2

    def loss(hidden: Tensor) -> Tensor:
        logp = (hidden @ weight).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return 3 * pl.policy_loss("ppo", logp, old, advantages, mask).loss

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = hidden.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf), leaf)[0])
    assert_same(gradients[1], gradients[0], what="gradient")
    assert gradients[0].abs().max() > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.ones(3, 9)}, r"advantages has shape \(3, 9\)"),
        ({"ref_logp": torch.ones(2, 2)}, r"ref_logp has shape \(2, 2\)"),
        ({"reff_logp": torch.ones(2, 2)}, "unknown argument 'reff_logp'; did you mean 'ref_logp'"),
        ({"advantages": [1.0, 2.0]}, "advantages must be a tensor"),
        ({"metrics": "some"}, 'metrics must be "all", "basic" or "none"'),
        ({"totals": "lokal"}, 'totals must be a Totals, "local" or None'),
        ({"spec": "dr_grpo"}, "divides by a horizon"),
        ({"spec": PRESETS["ppo"].replace(entropy_coef=0.1)}, "entropy carries no gradient"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_wrong_call_raises_the_usual_error(changes: dict[str, Any], message: str) -> None:
    call = {"spec": "ppo", **arguments(BATCH), "entropy": BATCH.entropy.detach(), **changes}
    leaf = BATCH.logp.clone().requires_grad_()
    for function in (pl.policy_loss, torch.compile(pl.policy_loss, backend="eager")):
        with pytest.raises(PolicyLossError, match=message):
            function(logp=leaf, **call)


def test_a_callable_is_traced_line_by_line() -> None:
    graphs = Graphs()
    spec = pl.LossSpec(trust=lambda t: -t.advantages * t.ratio * 2)

    def loss(logp: Tensor) -> Tensor:
        return pl.policy_loss(spec, logp, **arguments(BATCH)).loss

    value = torch.compile(loss, fullgraph=True, backend=graphs)(BATCH.logp)
    assert_same(value, loss(BATCH.logp), what="loss")
    assert graphs.operations[0] > 10


def test_the_text_of_a_loss_is_the_loss() -> None:
    """The node stores a loss as its text."""
    import json

    for spec in PRESETS.values():
        assert spec.as_json is not None
        assert pl.LossSpec.from_dict(json.loads(spec.as_json)) == spec
    assert pl.LossSpec(trust=lambda t: t.ratio).as_json is None
    assert PRESETS["ppo"].as_json != PRESETS["dapo"].as_json
