"""Our GRPOTrainer on a stand-in for TRL's: its gradient, the parts it leaves alone, and its logs.
No TRL needed.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_compat_trl import grpo_config
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.compat import trl as compat
from policyloss.compat.trl import trainer

COEF = 0.1


class Parent:
    """As much of TRL's trainer as ours touches. Its policy loss is the token mean of −A·r, and of
    that it logs a clip ratio.
    """

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None) -> None:
        self.args, self.model = args, SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(num_processes=1, sync_gradients=True)
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._entropy_bonus_enabled, self.aux_loss_enabled = args.entropy_coef != 0.0, False
        self.top_entropy_quantile = args.top_entropy_quantile
        self.history: list[dict[str, float]] = []

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        return entropies > threshold

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        logp, entropy, _ = self._get_per_token_logps_and_entropies(model)
        assert not logp.requires_grad, "TRL's policy term must not reach the model"
        mask = inputs["completion_mask"]
        keep: Any = 1.0
        if self.args.top_entropy_quantile < 1.0:
            keep = self.get_high_entropy_mask(entropy, mask, 1 - self.args.top_entropy_quantile)
        ratio = (logp - inputs.get("old_per_token_logps", logp)).exp()
        loss = (-inputs["advantages"].unsqueeze(1) * ratio * mask * keep).sum() / inputs[
            "num_items_in_batch"
        ]
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["clip_ratio/low_mean"].append(0.5)
        self._metrics[mode]["entropy"].append(entropy.mean().item())
        return loss - self.args.entropy_coef * (entropy * mask).sum() / mask.sum()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        self.history.append(
            {
                **logs,
                **{name: sum(values) / len(values) for name, values in self._metrics[mode].items()},
            }
        )
        self._metrics[mode].clear()


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("trl")
    module.GRPOTrainer, module.__version__ = Parent, "1.16.0"
    monkeypatch.setitem(sys.modules, "trl", module)
    trainer.trainer_class.cache_clear()
    yield
    trainer.trainer_class.cache_clear()


def forward() -> tuple[Tensor, Tensor, None]:
    """The model's output: log-probabilities and entropies of two rows of two tokens, with their
    gradients.
    """
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([[0.2, 0.9], [0.7, 0.4]], dtype=torch.float64, requires_grad=True)
    return logp, entropy, None


def inputs(**changes: Any) -> dict[str, Any]:
    made = {
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.tensor([1.0, -2.0], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(3),
    }
    return {**made, **changes}


def made(policy_loss: Any = None, **options: Any) -> Any:
    return compat.GRPOTrainer("model", args=grpo_config(**options), policy_loss=policy_loss)


def test_the_class_is_made_once_and_names_its_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.GRPOTrainer is compat.GRPOTrainer
    assert issubclass(compat.GRPOTrainer, Parent)
    trainer.trainer_class.cache_clear()
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match="pip install trl"):
        _ = compat.GRPOTrainer
    with pytest.raises(AttributeError, match="spec_from_config"):
        _ = compat.Trainer


def test_an_older_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["trl"], "__version__", "1.13.2")
    with pytest.raises(ImportError, match=r"TRL 1\.13\.2 is older than 1\.14"):
        _ = compat.GRPOTrainer


def test_a_trainer_that_unsloth_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = type("UnslothGRPOTrainer", (Parent,), {})
    monkeypatch.setattr(sys.modules["trl"], "GRPOTrainer", patched)
    with pytest.raises(ImportError, match="would never run"):
        _ = compat.GRPOTrainer


def test_a_parent_may_take_its_arguments_as_they_come() -> None:
    """As axolotl's trainers do; the loss is still checked before the parent starts anything."""

    started = []

    class OfAxolotl(Parent):
        def __init__(self, *args: Any, data_collator: Any = None, **kwargs: Any) -> None:
            started.append(kwargs)
            super().__init__(*args, **kwargs)

    kind: Any = type("Both", (compat.GRPOTrainer, OfAxolotl), {})
    with pytest.raises(pl.SpecError, match="reads ref_logp"):
        kind("model", None, args=grpo_config(), policy_loss="grpo")
    assert not started
    assert kind("model", None, args=grpo_config(), policy_loss="dapo").policy_loss.origin == "dapo"


def test_the_config_s_loss_with_our_gradient() -> None:
    model = forward()
    loss = made()._compute_loss(model, inputs())
    loss.backward()
    # On-policy token mean over 3 tokens: −(1 + 1 − 2)/3 = 0, slopes −A/3.
    assert loss.item() == 0.0
    assert model[0].grad is not None
    assert model[0].grad.tolist() == [[-1 / 3, -1 / 3], [2 / 3, 0.0]]
    assert model[1].grad is None


# Whose advantages TRL does not make.
@pytest.mark.filterwarnings("ignore:policy_loss, the preset 'gpg'")
@walked("given", [False, True])
def test_an_entropy_bonus_stays_trl_s(given: bool) -> None:
    """Whether the loss is the config's or given, the total is the policy loss minus the bonus,
    each with its own gradient.
    """
    policy_loss = pl.LossSpec(trust=pl.Unbounded("logp")) if given else None
    model = forward()
    loss = made(policy_loss, entropy_coef=COEF)._compute_loss(model, inputs())
    loss.backward()
    bonus = COEF * (0.2 + 0.9 + 0.7) / 3
    policy = (1 + 2 - 2 * 0.5) / 3 if given else 0.0  # −A·logp, or −A·1
    assert loss.item() == pytest.approx(policy - bonus, rel=1e-14)
    assert model[0].grad is not None
    assert model[1].grad is not None
    assert model[0].grad.tolist() == [[-1 / 3, -1 / 3], [2 / 3, 0.0]]
    assert model[1].grad.tolist() == [
        [pytest.approx(-COEF / 3, rel=1e-14)] * 2,
        [pytest.approx(-COEF / 3, rel=1e-14), 0.0],
    ]


def test_trl_s_token_filter_acts_on_our_loss() -> None:
    model = forward()
    # Keeps entropies above 0.5.
    made(top_entropy_quantile=0.5)._compute_loss(model, inputs()).backward()
    assert model[0].grad is not None
    assert model[0].grad.tolist() == [[0.0, -1 / 3], [2 / 3, 0.0]]


def test_metrics_of_a_step_cover_all_its_tokens() -> None:
    ours = made(gradient_accumulation_steps=2, steps_per_generation=2)
    ours.accelerator.sync_gradients = False
    # Two micro-batches of 3 tokens and of 1: the mean advantage is (1 + 1 − 2 + 1)/4,
    # not the mean of 0 and 1.
    ours._compute_loss(forward(), inputs())
    assert not any(name.startswith("policyloss/") for name in ours._metrics["train"])
    ours.accelerator.sync_gradients = True
    ours._compute_loss(forward(), inputs(completion_mask=torch.tensor([[1, 0], [0, 0]])))
    assert ours._metrics["train"]["policyloss/advantage_mean"] == [0.25]
    assert ours._metrics["train"]["policyloss/tokens"] == [4.0]
    ours.log({"loss": 1.0})
    assert ours.history[0]["policyloss/tokens"] == 4.0
    assert ours.history[0]["clip_ratio/low_mean"] == 0.5
    ours._compute_loss(forward(), inputs())
    assert ours._metrics["train"]["policyloss/tokens"] == [3.0], "the next step starts from zero"


def test_metrics_of_an_evaluation_cover_all_its_batches() -> None:
    ours = made()
    ours.model.training = False
    ours._compute_loss(forward(), inputs())
    ours._compute_loss(forward(), inputs(completion_mask=torch.tensor([[1, 0], [0, 0]])))
    ours.log({"eval_loss": 1.0})
    assert ours.history[0]["policyloss/advantage_mean"] == 0.25
    assert "policyloss/loss" not in ours.history[0]
    assert not ours._metrics["train"]


def test_metrics_of_a_loss_that_does_not_run_are_dropped() -> None:
    ours = made("gspo")
    ours._compute_loss(forward(), inputs())
    assert "clip_ratio/low_mean" not in ours._metrics["train"]
    assert ours._metrics["train"]["entropy"] == [pytest.approx(0.55)]


# Whose advantages TRL does not make.
@pytest.mark.filterwarnings("ignore:policy_loss, the preset 'gpg'")
def test_a_given_loss_is_averaged_over_the_whole_step() -> None:
    """Sequence mean over 2 rows × 2 micro-batches; token mean over 12 generated tokens · 2
    of 3 micro-batches = 8.
    """
    for aggregate, slope in ((pl.SeqMeanTokenSum(), -1 / 4), (pl.TokenMean(), -1 / 8)):
        model = forward()
        spec = pl.LossSpec(trust=pl.Unbounded("logp"), aggregate=aggregate)
        ours = made(spec, gradient_accumulation_steps=2, steps_per_generation=3)
        ours._compute_loss(model, inputs(num_items_in_batch=torch.tensor(12))).backward()
        assert model[0].grad is not None
        assert model[0].grad[0].tolist() == [slope, slope]


def test_a_drift_is_measured_from_the_engine_where_its_numbers_are_there() -> None:
    """A rollout function reports log-probabilities without vLLM;
    TRL then measures the drift from those.
    """
    model = forward()
    sampling = model[0].detach() + torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    ours = made(off_policy_mask_threshold=0.5)
    ours._compute_loss(model, inputs(sampling_per_token_logps=sampling)).backward()
    assert model[0].grad is not None
    assert model[0].grad.tolist() == [[-1 / 3, -1 / 3], [0.0, 0.0]]


def test_invalid_options_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(self: Any, model: Any, reward_funcs: Any = None, args: Any = None) -> None:
        raise AssertionError("TRL must not start")

    monkeypatch.setattr(Parent, "__init__", load)
    trainer.trainer_class.cache_clear()
    with pytest.raises(pl.SpecError, match=r"epsilon=0\.1"):
        made("gspo", epsilon=0.1)
    with pytest.raises(pl.SpecError, match=r"delta=0\.5"):
        made(delta=0.5)


def test_a_nan_is_not_hidden() -> None:
    logp, entropy, _ = forward()
    with torch.no_grad():
        logp[0, 0] = math.nan
    ours = made()
    assert math.isnan(ours._compute_loss((logp, entropy, None), inputs()).item())
    assert ours._metrics["train"]["policyloss/nonfinite_tokens"] == [1.0]
