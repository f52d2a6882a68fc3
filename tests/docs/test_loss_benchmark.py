"""The benchmarks of the loss and of GAE: no wrong provider is timed, and a target is the ratio in
its name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import gae, harness, loss


def timed(**milliseconds: float) -> dict[str, dict[str, float]]:
    return {name: {"median_ms": ms} for name, ms in milliseconds.items()}


def measured(lines: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    return {line["what"]: (line["measured"], line["met"]) for line in lines}


def test_our_loss_and_coatis_form_pass_the_check_and_a_wrong_one_does_not() -> None:
    data = loss.batch(4, 40, "cpu")
    levels = {name: loss.ours(level) for level, name in loss.LEVELS.items()}
    plain = {name: loss.ours(level, True) for level, name in loss.BY_OPERATIONS.items()}
    providers = loss.steps({**levels, **plain, loss.COATI: loss.coati_form}, data)
    loss.check(providers, data)
    assert len(providers) == 7

    def twice(*args: Any) -> tuple[torch.Tensor, Any]:
        value, metrics = loss.ours("all")(*args)
        return value * 1.001, metrics

    with pytest.raises(AssertionError):
        loss.check(loss.steps({"wrong": twice}, data), data)

    def fails(*args: Any) -> Any:
        raise OSError("no compiler")

    providers = loss.steps({"fails": fails, "policyloss": loss.ours("none")}, data)
    loss.check(providers, data)
    assert list(providers) == ["policyloss"]
    # The two formulas differ: ColossalChat has no dual bound, and averages rows.
    with pytest.raises(AssertionError):
        loss.check(loss.steps({"policyloss": loss.coati_form}, data), data)


def test_targets_on_a_gpu() -> None:
    times = timed(
        **{
            "policyloss": 2.0,
            "policyloss, basic": 0.5,
            "policyloss, basic, torch.compile": 0.5,
            loss.FUSED: 0.1,
            loss.DIRECT: 0.05,
            "verl": 1.5,
            loss.COATI: 0.8,
            "verl, torch.compile": 0.25,
        }
    )
    found = measured(loss.targets(times, {}, "cuda"))
    # 1.5 / 0.1.
    assert found["with backward(): times faster than verl's eager function"] == (
        pytest.approx(15),
        True,
    )
    # 0.25 / 0.1.
    assert found["with backward(): times faster than verl's function under torch.compile"] == (
        pytest.approx(2.5),
        False,
    )
    assert found["with backward(): milliseconds"] == (0.1, True)
    # 1.5 / 0.05.
    assert found["value_and_gradient: times faster than verl's eager function"] == (
        pytest.approx(30),
        True,
    )
    assert found["value_and_gradient: times faster than verl's function under torch.compile"] == (
        pytest.approx(5),
        True,
    )
    assert found["value_and_gradient: milliseconds"] == (0.05, True)
    # 1.5 / 2, 0.8 / 0.5 and 0.25 / 0.5.
    assert found["eager, all metrics: times faster than verl's eager function"] == (0.75, False)
    assert found["eager, basic metrics: times faster than the fastest eager peer"] == (
        pytest.approx(1.6),
        True,
    )
    assert found[
        "torch.compile, basic metrics: times faster than verl's function under torch.compile"
    ] == (0.5, False)


def test_targets_on_a_cpu() -> None:
    times = timed(
        **{
            "policyloss": 4.0,
            "policyloss, basic": 2.5,
            "policyloss, no metrics": 1.6,
            loss.FUSED: 1.0,
            "verl": 8.0,
            loss.COATI: 2.0,
        }
    )
    memory = {"policyloss": 5, loss.FUSED: 1, "verl": 8, loss.COATI: 4}
    found = measured(loss.targets(times, memory, "cpu"))
    assert found == {
        "compiled_loss: times faster than the fastest eager peer": (
            2.0,
            True,
        ),  # coati's 2 ms against 1
        "eager: times faster than verl": (2.0, True),
        "eager: times faster than coati's form": (0.5, False),
        "eager, basic metrics: times faster than coati's form": (0.8, False),
        "eager, no metrics: times faster than coati's form": (1.25, True),
        "compiled_loss: peak memory / the least of the eager peers": (0.25, True),
        "eager: peak memory / the least of the eager peers": (1.25, False),
    }


def test_targets_without_peers_are_not_measured() -> None:
    times = timed(**{"policyloss": 4.0, loss.FUSED: 1.0})
    assert {
        m
        for m, _ in measured(loss.targets(times, {"policyloss": 5, loss.FUSED: 1}, "cpu")).values()
    } == {None}


@pytest.mark.parametrize(
    ("device", "ratio", "met", "stretched"),
    [("cuda", 6000.0, True, False), ("cpu", 19.0, False, False)],
)
def test_targets_of_gae(device: str, ratio: float, met: bool, stretched: bool) -> None:
    (line,) = gae.targets({"padded": ratio}, device)
    assert (line["measured"], line["met"], line["stretch_met"]) == (ratio, met, stretched)


def test_the_loop_of_the_gae_benchmark_by_hand() -> None:
    """γ = 0.99, λ = 0.95, two tokens: A₂ = 1 − 0.5;
    A₁ = (0 + 0.99·0.5 − 0.25) + 0.99·0.95·0.5 = 0.245 + 0.47025.
    """
    advantages, returns = gae.loop(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.25, 0.5]]), torch.ones(1, 2, dtype=torch.bool)
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.71525, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.96525, 1.0]]))


def test_a_fast_provider_is_called_several_times_per_round_and_a_slow_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    took = {"fast": 0.1, "slow": 7.0}
    providers = {name: (lambda name=name: calls.append(name)) for name in took}

    def clock(provider: Any, device: str) -> float:
        provider()
        return took[calls[-1]]

    monkeypatch.setattr(harness, "_milliseconds", clock)
    times = harness.time_interleaved(providers, 2, warmup=1, repeats=3)
    assert calls[:2] == ["fast", "slow"]  # the warm-up
    assert sorted(calls[2:6]) == sorted(calls[6:]) == ["fast", "fast", "fast", "slow"]
    assert {name: (t["samples"], t["median_ms"]) for name, t in times.items()} == {
        "fast": (6, 0.1),
        "slow": (2, 7.0),
    }
