"""`Mixture`: by hand, as the sum of its streams, as data, and its refusals.

The shared suites (gradcheck, invariance, partition, accumulate, context parallel, compile, head
plans) run `cases.MIXTURES` as they run every preset.
"""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import MIXTURES, assert_same, make_batch, run, with_streams
from policyloss.mixture import read_loss

CROSS_ENTROPY = pl.LossSpec(trust=pl.Unbounded("logp"))
CE = pl.Stream(CROSS_ENTROPY, 0.5, mask="demo", advantage=1.0)
MIXTURE = pl.Mixture({"rl": pl.LossSpec(trust=pl.Unbounded("ratio")), "ce": CE})
MASK = torch.tensor([[True, True, False], [True, True, True]])
DEMO = torch.tensor([[False, True, True], [False, True, True]])
HALF = math.log(0.5)


def call(**changes: Any) -> dict[str, Any]:
    logp = torch.full((2, 3), HALF, dtype=torch.float64, requires_grad=True)
    given = {
        "logp": logp,
        "old_logp": logp.detach(),
        "advantages": torch.tensor([2.0, -1.0], dtype=torch.float64),
        "mask": MASK,
        "extras": {"demo": DEMO},
    }
    return {**given, **changes}


def test_by_hand() -> None:
    """Of five tokens the policy term is -(2 + 2 - 1 - 1 - 1) / 5. Three of them are demonstrations,
    each with the cross-entropy log 2; the weight of their mean is a half.
    """
    given = call()
    out = pl.policy_loss(MIXTURE, **given)
    assert out.loss.item() == pytest.approx(-1 / 5 + 0.5 * math.log(2), rel=1e-14)
    (gradient,) = torch.autograd.grad(out.loss, given["logp"])
    a, b = -2 / 5, 1 / 5
    ce = 0.5 / 3
    expected = [[a, a - ce, 0.0], [b, b - ce, b - ce]]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))
    numbers = out.metrics.compute()
    assert numbers["tokens"] == 5
    assert (numbers["rl/tokens"], numbers["ce/tokens"]) == (5, 3)
    assert numbers["loss"] == pytest.approx(out.loss.item())
    assert numbers["rl/loss"] == pytest.approx(-1 / 5)
    assert numbers["ce/loss"] == pytest.approx(math.log(2))


@walked(
    ("form", "factor"),
    [("logp", 1.0), ("probability", 0.5), ("uncertainty", 0.25)],
)
def test_the_forms_of_cross_entropy_by_hand(form: Any, factor: float) -> None:
    """At p = ½ the loss is log 2, times p (DFT) or p(1 - p) (CHORD), and its slope minus that."""
    given = call(old_logp=None)
    stream = dataclasses.replace(CE, loss=pl.LossSpec(trust=pl.Unbounded(form)), weight=1.0)
    out = pl.policy_loss(pl.Mixture({"ce": stream}), **given)
    assert out.loss.item() == pytest.approx(factor * math.log(2), rel=1e-14)
    (gradient,) = torch.autograd.grad(out.loss, given["logp"])
    torch.testing.assert_close(gradient, -factor / 3 * (MASK & DEMO).double())


@walked("name", MIXTURES)
def test_a_mixture_is_the_sum_of_its_streams(name: str) -> None:
    batch, mixture = make_batch(seed=3), MIXTURES[name]
    whole = run(mixture, batch)
    masks = with_streams(mixture, batch.kwargs)["extras"]
    loss, dlogp = torch.zeros((), dtype=torch.float64), torch.zeros_like(batch.logp)
    for stream, part in mixture.streams.items():
        mask = batch.mask if part.mask is None else batch.mask & masks[part.mask]
        advantages = batch.advantages
        if part.advantage is not None:
            advantages = torch.full_like(advantages, part.advantage)
        alone = run(part.loss, dataclasses.replace(batch, mask=mask, advantages=advantages))
        loss, dlogp = loss + part.weight * alone.loss, dlogp + part.weight * alone.dlogp
        for metric, x in alone.metrics.items():
            assert whole.metrics[f"{stream}/{metric}"] == pytest.approx(x, nan_ok=True)
    assert_same(whole.loss, loss, what="loss")
    assert_same(whole.dlogp, dlogp, what="gradient")
    assert whole.metrics["loss"] == pytest.approx(loss.item())


@walked("name", MIXTURES)
def test_as_data(name: str, tmp_path: Path) -> None:
    mixture = MIXTURES[name]
    text = json.dumps(mixture.to_dict())
    again = pl.Mixture.from_dict(json.loads(text))
    assert again == mixture
    assert hash(again) == hash(mixture)
    file = tmp_path / "loss.json"
    file.write_text(text)
    assert read_loss(str(file)) == mixture


def test_a_spec_stands_for_a_stream() -> None:
    assert pl.Mixture({"rl": "dapo"}).streams["rl"] == pl.Stream(pl.preset("dapo"))
    batch = make_batch()
    assert_same(run(pl.Mixture({"rl": "dapo"}), batch).dlogp, run("dapo", batch).dlogp, 0)


def test_explain() -> None:
    page = pl.explain(MIXTURE)
    assert page.formula == "loss = rl + 0.5 * ce"
    assert "mask & extras['demo']" in page.tokens["ce"]
    assert "advantages: 1 at every token" in page.tokens["ce"]
    assert page.streams["ce"].formula == pl.explain(CROSS_ENTROPY).formula
    assert str(page.streams["rl"]) in str(page)
    assert json.loads(json.dumps(page.to_dict()))["formula"] == page.formula
    assert "loss = rl + 0.5 * ce" in page._repr_html_()


def test_the_warnings_of_a_stream() -> None:
    """The demonstrations' log-probabilities were never filled in; the other tokens' were."""
    logp = torch.where(DEMO, 0.0, HALF).requires_grad_()
    out = pl.policy_loss(MIXTURE, **call(logp=logp, old_logp=logp.detach()))
    with pytest.warns(UserWarning, match="exactly 0"):
        out.metrics.compute()


STEP = pl.Totals(tokens=5, sequences=2)
HEAD = (torch.randn(2, 3, 4), torch.randn(7, 4), torch.zeros(2, 3, dtype=torch.int64))
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "no streams": (lambda: pl.Mixture({}), ["streams by their names"]),
    "a list": (lambda: pl.Mixture(["dapo"]), ["streams by their names"]),
    "an unknown preset": (lambda: pl.Mixture({"rl": "dapoo"}), ["dapoo", "dapo"]),
    "a mixture in a mixture": (lambda: pl.Mixture({"rl": MIXTURE}), ["Stream.loss", "Mixture"]),
    "a negative weight": (lambda: pl.Stream("dapo", -1.0), ["Stream.weight", "-1.0"]),
    "a mask that is a tensor": (lambda: pl.Stream("dapo", mask=DEMO), ["Stream.mask", "extras"]),
    "two divergences": (
        lambda: pl.Mixture({"a": "gkd", "b": "gkd_forward"}),
        ["one divergence per token", "kind"],
    ),
    "a missing mask": (
        lambda: pl.policy_loss(MIXTURE, **call(extras=None)),
        ["extras['demo']", "missing"],
    ),
    "a mask of another shape": (
        lambda: pl.policy_loss(MIXTURE, **call(extras={"demo": DEMO[:1]})),
        ["extras['demo']", "(1, 3)", "(2, 3)"],
    ),
    "a mask of numbers": (
        lambda: pl.policy_loss(MIXTURE, **call(extras={"demo": DEMO * 0.3})),
        ["extras['demo']", "0 and 1"],
    ),
    "totals without streams": (
        lambda: pl.policy_loss(MIXTURE, **call(totals=STEP)),
        ["Mixture", "none of them", "rl, ce", "accumulate", "measure"],
    ),
    "totals of another mixture": (
        lambda: pl.policy_loss(
            MIXTURE, **call(totals=dataclasses.replace(STEP, streams={"rl": STEP}))
        ),
        ["count rl", "rl, ce"],
    ),
    "totals that are added": (
        lambda: pl.measure(MIXTURE, **call()) + STEP,
        ["Mixture", "added", "whole step"],
    ),
    "totals that are reduced": (
        lambda: pl.measure(MIXTURE, **call()).all_reduce(),
        ["Mixture", "ranks", "whole step"],
    ),
    "a horizon that is not set": (
        lambda: pl.policy_loss(pl.Mixture({"rl": "dr_grpo"}), **call()),
        ["horizon"],
    ),
    "rows left out of the head": (
        lambda: pl.linear_policy_loss(
            MIXTURE,
            *HEAD,
            torch.zeros(2, 3),
            torch.zeros(2),
            MASK,
            extras={"demo": DEMO},
            skip_zero_advantage=True,
        ),
        ["skip_zero_advantage", "Mixture"],
    ),
    "a compiled loss": (lambda: pl.compiled_loss(MIXTURE), ["Mixture", "policy_loss"]),
    "a fused path": (lambda: pl.explain_path(MIXTURE, **call()), ["Mixture", "policy_loss"]),
    "a difference": (lambda: pl.diff(MIXTURE, "dapo"), ["a is a Mixture"]),
    "a check": (lambda: pl.check_loss(MIXTURE), ["loss is a Mixture"]),
    "an exported loss": (
        lambda: import_module("policyloss.compat.tinker").export(MIXTURE),
        ["spec is a Mixture", "one loss"],
    ),
    "not data of a mixture": (lambda: pl.Mixture.from_dict({"rl": {}}), ["streams"]),
    "an unknown field": (
        lambda: pl.Mixture.from_dict({"streams": {"rl": {"loss": {}, "wieght": 1.0}}}),
        ["Stream field", "wieght", "weight"],
    ),
    "no loss": (lambda: pl.Mixture.from_dict({"streams": {"rl": {}}}), ["Stream", "loss"]),
}


@walked("case", REFUSED)
def test_refusals(case: str) -> None:
    function, words = REFUSED[case]
    with pytest.raises(pl.PolicyLossError) as error:
        function()
    assert all(word in str(error.value) for word in words), str(error.value)
