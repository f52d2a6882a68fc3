"""Our AsyncGRPOTrainer on a stand-in for TRL's. `conformance.engines` compares it with TRL's own
`compute_loss`.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.compat import trl as compat
from policyloss.compat.trl import trainer as trainer_module

ROUTER = 0.25


class Parent:
    """As much of TRL's trainer as ours touches: a policy term of −A·logp, and a router loss."""

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None) -> None:
        self.args, self.accelerator = args, SimpleNamespace(num_processes=2)
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        outputs = model(input_ids=inputs["token_index"])
        assert not outputs.log_probs.requires_grad, "TRL's policy term must not reach the model"
        self._metrics["train"]["clip_ratio/low_mean"].append(0.5)
        self._metrics["train"]["entropy"].append(1.0)
        policy: Tensor = -(inputs["advantages"] * outputs.log_probs.sum()).sum()
        return policy + ROUTER * outputs.aux_loss


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = SimpleNamespace(__version__="1.16.0", GRPOTrainer=Parent)
    monkeypatch.setitem(sys.modules, "trl", module)  # type: ignore[arg-type]
    kinds = SimpleNamespace(AsyncGRPOTrainer=Parent)
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo", kinds)  # type: ignore[arg-type]
    trainer_module.trainer_class.cache_clear()
    yield
    trainer_module.trainer_class.cache_clear()


def config(**changes: Any) -> Any:
    numbers = {"gradient_accumulation_steps": 1, "epsilon": 0.2, "epsilon_high": None}
    return SimpleNamespace(**numbers | changes)


def made(policy_loss: Any, **changes: Any) -> Any:
    return compat.AsyncGRPOTrainer("model", args=config(**changes), policy_loss=policy_loss)


def test_by_hand() -> None:
    # Three tokens at two positions: the first position serves two samples. Ratios 2, 1 and 1 with
    # A = 1, 2, -4; the first is clipped at 1.2. Six tokens over both ranks, each of which averages:
    # -(1.2 + 2 - 4) · 2/6, and the router loss.
    logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    inputs = {
        "token_index": torch.tensor([[0, 1, 0, -1]]),
        "segment_id": torch.tensor([[0, 0, 1, -1]]),
        "old_log_probs": torch.tensor([[-1.0 - math.log(2), -1.0, -1.0, 0.0]]),
        "advantages": torch.tensor([[1.0, 2.0, -4.0, 50.0]]),
        "global_n_tokens": torch.tensor([6.0]),
    }
    outputs = SimpleNamespace(log_probs=logp, aux_loss=torch.tensor(8.0))
    trainer = made("ppo")
    loss = trainer.compute_loss(lambda **_: outputs, inputs)
    assert loss.item() == pytest.approx(0.8 / 3 + 8 * ROUTER)
    # The clipped token has no slope: 4/3 at the first position, -2/3 at the second.
    (slope,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(slope, torch.tensor([[4 / 3, -2 / 3]]))
    logs = trainer._metrics["train"]
    assert logs["policyloss/clip_fraction"] == [pytest.approx(1 / 3)]
    assert logs["entropy"] == [1.0]
    assert "clip_ratio/low_mean" not in logs


@walked(
    ("loss", "changes", "words"),
    [
        ("gspo", {}, "does not count the denominator of SeqMeanTokenMean"),
        ("grpo", {}, "reads ref_logp"),
        (pl.LossSpec(correction=pl.Truncate(2.0)), {}, "compares trainer and sampler"),
        ("ppo", {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 would not"),
    ],
)
def test_a_loss_that_it_cannot_run_is_refused(loss: Any, changes: Any, words: str) -> None:
    with pytest.raises(pl.SpecError, match=words):
        made(loss, **changes)


def test_bounds_of_the_config_would_have_no_effect() -> None:
    from dataclasses import dataclass

    @dataclass
    class Config:
        gradient_accumulation_steps: int = 1
        epsilon: float = 0.2
        epsilon_high: float | None = None

    assert trainer_module.checked_async_loss("ppo", Config()) == pl.preset("ppo")
    with pytest.raises(pl.SpecError, match=r"epsilon_high=0\.28 would have no effect"):
        trainer_module.checked_async_loss("ppo", Config(epsilon_high=0.28))


def test_older_releases_and_unsloth_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["trl"], "__version__", "1.15.0")
    with pytest.raises(ImportError, match=r"TRL 1\.15\.0 is older than 1\.16"):
        _ = compat.AsyncGRPOTrainer
    monkeypatch.setattr(sys.modules["trl"], "__version__", "1.16.0")
    patched = type("UnslothGRPOTrainer", (Parent,), {})
    monkeypatch.setattr(sys.modules["trl"], "GRPOTrainer", patched)
    with pytest.raises(ImportError, match="would never run"):
        _ = compat.AsyncGRPOTrainer
