"""Losses through the Tinker API. `make conformance` runs them through the SDK itself; here a datum
is a dataclass with the two fields that matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from walk import walked

import policyloss as pl
from policyloss.compat import tinker
from policyloss.errors import InputError


class Numbers:
    """The SDK's TensorData, of any dtype."""

    def __init__(self, values):
        self.values = torch.as_tensor(values)

    def to_torch(self):
        return self.values


@dataclass(frozen=True)
class Datum:
    model_input: Any = None
    loss_fn_inputs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        numbers = {
            key: x if isinstance(x, Numbers) else Numbers(x)
            for key, x in self.loss_fn_inputs.items()
        }
        object.__setattr__(self, "loss_fn_inputs", numbers)


LENGTHS = (5, 9, 1, 12, 7, 7)
COUNTED = [
    name
    for name in pl.presets()
    if not pl.preset(name).needs_statistics and pl.preset(name).divergence is None
]


def spec_of(name):
    return pl.preset(name).for_run(16)


def data_of(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def logp(n):
        return -torch.rand(n, generator=g, dtype=dtype)

    return [
        Datum(
            loss_fn_inputs={
                "target_tokens": torch.arange(n),
                "mask": (torch.rand(n, generator=g) > 0.3).to(dtype),
                "advantages": torch.randn(n, generator=g, dtype=dtype),
                "logprobs": logp(n),
                "old_logprobs": logp(n),
                "ref_logprobs": logp(n),
                "teacher_logprobs": logp(n),
                "group_id": torch.tensor(i // 2),
            }
        )
        for i, n in enumerate(LENGTHS)
    ]


def logp_of(seed=1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [(-torch.rand(n, generator=g, dtype=dtype)).requires_grad_() for n in LENGTHS]


def with_inputs(datum, **inputs):
    kept = {**datum.loss_fn_inputs, **inputs}
    return Datum(loss_fn_inputs={key: x for key, x in kept.items() if x is not None})


def gradients(rows):
    return torch.cat([row.grad for row in rows])


def test_a_step_of_two_data_by_hand():
    # Token mean over 3 valid tokens; ratio 2 is clipped at 1.2, ratio 1 is not.
    # -(1.2·1 + 1·2 + 1·(-3)) / 3 = -0.2 / 3
    log2 = torch.tensor(2.0).log()
    first = Datum(
        loss_fn_inputs={
            "target_tokens": [3, 4],
            "mask": [1, 1],
            "advantages": [1.0, 2.0],
            "logprobs": [-1.0 - log2, -1.0],
        }
    )
    second = Datum(
        loss_fn_inputs={
            "target_tokens": [5, 6],
            "weights": [0, 1],
            "mask": [0, 1],
            "advantages": [-3.0],
            "logprobs": [-9.0, -1.0],
        }
    )
    rows = [torch.tensor([-1.0, -1.0], requires_grad=True) for _ in range(2)]
    step = tinker.loss("ppo", [first, second])
    loss, metrics = step([first, second], rows)
    assert loss.item() == pytest.approx(-0.2 / 3)
    assert metrics["tokens"] == 3
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    loss.backward()
    assert gradients(rows).tolist() == pytest.approx([0, -2 / 3, 0, 1])


@walked("name", COUNTED)
def test_a_step_may_take_any_number_of_calls(name):
    data = data_of()
    whole, parts = logp_of(), logp_of()
    once = tinker.loss(spec_of(name), data)
    loss, _ = once(data, whole)
    loss.backward()
    several, total = tinker.loss(spec_of(name), data), 0.0
    for share in (slice(0, 1), slice(1, 4), slice(4, 6)):
        out, _ = several(several.bare(data[share]), parts[share])
        out.backward()
        total += out.item()
    assert total == pytest.approx(loss.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-12, atol=1e-14)
    assert several.metrics.compute() == pytest.approx(once.metrics.compute(), nan_ok=True)


@walked("name", ["clip_cov", "kl_cov"])
def test_a_loss_with_statistics_takes_a_whole_step_in_one_call(name):
    data, rows = data_of(), logp_of()
    with pytest.raises(InputError, match="pass all data of a step to one call"):
        tinker.loss(name, data)
    loss, _ = tinker.loss(name)(data, rows)
    flat = {
        key: torch.cat([datum.loss_fn_inputs[key].values for datum in data])
        for key in ("old_logprobs", "advantages", "mask")
    }
    expected = pl.policy_loss(
        name,
        torch.cat(rows),
        flat["old_logprobs"],
        flat["advantages"].unsqueeze(0),
        flat["mask"] != 0,
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0),
    )
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)


def test_bare_data_hold_the_target_tokens_alone():
    data = data_of()
    step = tinker.loss("dapo", data)
    assert all(set(datum.loss_fn_inputs) == {"target_tokens"} for datum in step.bare(data))


def test_the_sampler_is_the_old_policy_unless_the_data_hold_one():
    data, rows = data_of(), logp_of()
    alone = [with_inputs(datum, old_logprobs=None) for datum in data]
    equal = [with_inputs(d, old_logprobs=d.loss_fn_inputs["logprobs"]) for d in data]
    loss, _ = tinker.loss("ppo", alone)(alone, rows)
    assert loss.item() == tinker.loss("ppo", equal)(equal, rows)[0].item()
    assert loss.item() != tinker.loss("ppo", data)(data, rows)[0].item()
    with pytest.raises(InputError, match=r"needs loss_fn_inputs\['old_logprobs'\]"):
        tinker.loss("tis", alone)


WRONG = {
    "data is empty": lambda data: [],
    r"datum 1 has no loss_fn_inputs\['advantages'\]": lambda data: [
        data[0],
        with_inputs(data[1], advantages=None),
    ],
    r"datum 0 has no loss_fn_inputs\['weights'\]": lambda data: [
        with_inputs(datum, mask=None) for datum in data
    ],
    "mask must hold 0 and 1": lambda data: [with_inputs(data[0], mask=[0.5] * 5)],
    r"shape \(3,\); it must be \(5,\)": lambda data: [with_inputs(data[0], mask=[1.0] * 3)],
    "one target per position": lambda data: [
        with_inputs(data[0], target_tokens=torch.zeros(5, 2, dtype=torch.int64))
    ],
}


@walked("message", WRONG)
def test_wrong_data_are_refused(message):
    with pytest.raises(InputError, match=message):
        tinker.loss("ppo", WRONG[message](data_of()))


def test_log_probabilities_of_other_lengths_are_refused():
    data = data_of()
    with pytest.raises(InputError, match="shapes of target_tokens"):
        tinker.loss("ppo")(data, logp_of()[1:])


def test_a_group_id_is_one_integer():
    wrong = [with_inputs(data_of()[0], group_id=[1, 2])]
    spec = pl.preset("ppo").replace(aggregate=pl.PromptMean())
    with pytest.raises(InputError, match="group_id must be one integer"):
        tinker.loss(spec, wrong)


@walked("make", [tinker.loss, tinker.export], ids=["loss", "export"])
def test_a_loss_of_whole_distributions_is_refused(make):
    with pytest.raises(InputError, match="reads the divergence of each token"):
        make("gkd")
    with pytest.raises(InputError, match="reads the entropy of each token"):
        make(pl.preset("ppo", entropy_coef=0.01))


# The formulas of the documented built-in losses, of log-probs p, the sampler's q and advantages a.
def clipped(ratio, low=0.8, high=1.2):
    return ratio.clamp(low, high)


FORMULAS = {
    "cross_entropy": lambda p, q, a: -(p * a).sum(),
    "importance_sampling": lambda p, q, a: -((p - q).exp() * a).sum(),
    "ppo": lambda p, q, a: -torch.minimum((p - q).exp() * a, clipped((p - q).exp()) * a).sum(),
    "cispo": lambda p, q, a: -(clipped((p - q).exp()).detach() * p * a).sum(),
    "dro": lambda p, q, a: -(p * a - 0.5 * 0.05 * (p - q) ** 2).sum(),
}


@walked("name", FORMULAS)
def test_a_built_in_loss_is_a_spec(name):
    config = {"beta": 0.05} if name == "dro" else {}
    data = [
        with_inputs(d, mask=torch.ones_like(d.loss_fn_inputs["mask"].values)) for d in data_of()
    ]
    ours, theirs = logp_of(), logp_of()
    q, advantages = (
        torch.cat([datum.loss_fn_inputs[key].values for datum in data])
        for key in ("logprobs", "advantages")
    )
    loss, _ = tinker.loss(tinker.built_in(name, **config), data)(data, ours)
    loss.backward()
    expected = FORMULAS[name](torch.cat(theirs), q, advantages)
    expected.backward()
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-12, atol=1e-13)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_wrong_built_in_loss_is_refused():
    with pytest.raises(InputError, match="unknown built-in loss 'pppo'"):
        tinker.built_in("pppo")
    with pytest.raises(InputError, match="loss_fn_config of ppo"):
        tinker.built_in("ppo", clip=0.2)


# To trace a loss takes a second; `make conformance` exports all.
@walked("name", [name for name in COUNTED if name != "fipo"][::4])
def test_an_exported_loss_has_the_value_and_gradient_of_the_spec(name):
    data, exported = data_of(dtype=torch.float32), tinker.export(spec_of(name))
    ours, theirs = logp_of(dtype=torch.float32), logp_of(dtype=torch.float32)
    loss, _ = tinker.loss(spec_of(name), data)(data, ours)
    loss.backward()
    prepared = exported.prepare(data)
    names = list(exported.input_ranks)[1:]
    total = torch.zeros(())
    for datum, row in zip(prepared, theirs, strict=True):
        inputs = [datum.loss_fn_inputs[key].values for key in names]
        assert [x.dim() for x in inputs] == [exported.input_ranks[key] for key in names]
        share, metrics = exported.function(row, *inputs)
        assert metrics == {}
        total = total + share
    total.backward()
    assert total.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradients(theirs), gradients(ours), rtol=1e-5, atol=1e-7)


@walked("name", ["ppo", "gspo_turn", "importance_sampling", "sapo"])
def test_an_exported_graph_holds_torch_operations_and_no_tensor(name):
    graph = torch.fx.symbolic_trace(tinker.export(spec_of(name)).function).graph
    kinds = {node.op for node in graph.nodes}
    assert kinds <= {"placeholder", "call_function", "output"}
    assert all("device" not in node.kwargs for node in graph.nodes)
    modules = {
        node.target.__module__.split(".")[0] for node in graph.nodes if node.op == "call_function"
    }
    assert modules <= {"torch", "_operator", "operator", "math"}


def test_a_loss_that_compares_sequences_is_not_exported():
    for spec in ("clip_cov", pl.preset("ppo").replace(aggregate=pl.PromptMean())):
        with pytest.raises(InputError, match=r"one sequence at a time; use .*tinker.loss"):
            tinker.export(spec)
    future = pl.FutureKL(0.2, 0.2)
    for trust in (future, pl.BySign(future, pl.Unbounded("ratio"))):
        with pytest.raises(InputError, match=r"fixed number; use .*tinker.loss"):
            tinker.export(pl.preset("fipo").replace(trust=trust))
