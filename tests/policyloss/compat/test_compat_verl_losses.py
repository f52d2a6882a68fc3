"""verl's losses under verl's names: numbers by hand, meanings by release,
and the hook into its registry.
"""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.compat import verl
from policyloss.compat.parts import as_share, guard
from policyloss.compat.trl.parts import WrittenKL
from policyloss.compat.verl.distillation import register_distillation

F64 = torch.float64
# Two rows: ratios 2, 0.5, – and 1.1, –, –; advantages 1, −1 and −2.
OLD = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]], dtype=F64)
NEW = OLD + torch.tensor([[2.0, 0.5, 7.0], [1.1, 7.0, 7.0]], dtype=F64).log()
A = torch.tensor([[1.0, -1.0, 5.0], [-2.0, 5.0, 5.0]], dtype=F64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)


class Config(SimpleNamespace):
    """verl's actor config, as far as a loss reads it."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def config(**changes: Any) -> Config:
    fields = {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": None,
        "clip_ratio_c": 3.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
    }
    return Config(
        **{
            **fields,
            "global_batch_info": {},
            "policy_loss": Config(dro_beta=0.5),
            "use_kl_loss": False,
            **changes,
        }
    )


def test_ppo_by_hand() -> None:
    # −A·r against −A·clip(r, 0.8, 1.28): max(−2, −1.28) = −1.28, clipped; max(0.5, 0.8) = 0.8,
    # clipped; max(2.2, 2.2) = 2.2.
    loss, clipped, kl, lower = verl.compute_policy_loss(
        OLD, NEW, A, MASK, cliprange=0.2, cliprange_high=0.28
    )
    assert float(loss) == pytest.approx((-1.28 + 0.8 + 2.2) / 3, rel=1e-14)
    assert float(clipped) == pytest.approx(2 / 3, rel=1e-7)
    assert float(kl) == pytest.approx(-(math.log(2) + math.log(0.5) + math.log(1.1)) / 3, rel=1e-14)
    assert float(lower) == 0
    # Dual clip at 1.05 holds the last token at 2·1.05.
    loss, _, _, lower = verl.compute_policy_loss(OLD, NEW, A, MASK, 0.2, None, 0.28, 1.05)
    assert float(loss) == pytest.approx((-1.28 + 0.8 + 2.1) / 3, rel=1e-14)
    assert float(lower) == pytest.approx(1 / 3, rel=1e-7)


def test_the_drift_is_clamped_as_the_ratio_is() -> None:
    # Log-ratio 30: the drift is −20 where the ratio is clamped at 20, and −30 where it is not.
    old = torch.full((1, 1), -31.0, dtype=F64)
    args = (old, old + 30, torch.ones_like(old), torch.ones_like(old))
    drifts = dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl", "sapo", "cispo"), -20.0)
    drifts |= dict.fromkeys(("gspo", "clip_cov", "geo_mean", "dro"), -30.0)
    drifts["kl_cov"] = 30.0  # its modulus
    for name, drift in drifts.items():
        _, metrics = verl.POLICY_LOSSES[name](*args, config=config())
        # verl's guard: the mean is over 1 + 1e-8 tokens.
        assert metrics["actor/ppo_kl"] == pytest.approx(drift / (1 + 1e-8), rel=1e-14), name


def test_the_clamp_of_the_page_is_an_argument() -> None:
    # Log-ratio 14.
    old, new = (
        torch.full((1, 1), -15.0, dtype=F64),
        torch.full((1, 1), -1.0, dtype=F64),
    )
    args = (old, new, torch.full_like(old, -1.0), torch.ones_like(old))
    for clamp, kept in ((20.0, 14.0), (10.0, 10.0), (None, 14.0)):
        loss, _, kl, _ = verl.compute_policy_loss(
            *args, cliprange=0.2, clip_ratio_c=1e9, log_clamp=clamp
        )
        assert float(loss) == pytest.approx(math.exp(kept), rel=1e-12)
        assert float(kl) == pytest.approx(-kept, rel=1e-7)


@walked(
    ("mode", "expected"),
    [
        ("token-mean", 7 / 3),
        ("token-sum", 7.0),
        ("seq-mean-token-sum", 7 / 2),
        ("seq-mean-token-mean", (3 / 2 + 4) / 2),
        ("seq-mean-token-sum-norm", 7 / 2 / 3),
    ],
)
def test_agg_loss_by_hand(mode: str, expected: float) -> None:
    x = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=F64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert float(verl.agg_loss(x, mask, mode)) == pytest.approx(expected, rel=1e-14)
    # A step of 10 tokens and 5 sequences on 2 ranks, scaled by 7:
    # the same sums over those counts, times 2.
    counts = {"dp_size": 2, "batch_num_tokens": 10, "global_batch_size": 5, "loss_scale_factor": 7}
    step = {
        "token-mean": 7 / 10,
        "token-sum": 7.0,
        "seq-mean-token-sum": 7 / 5,
        "seq-mean-token-mean": 5.5 / 5,
        "seq-mean-token-sum-norm": 7 / 5 / 7,
    }
    assert float(verl.agg_loss(x, mask, mode, **counts)) == pytest.approx(2 * step[mode], rel=1e-14)


def test_the_guard_of_a_float64_mask_is_kept() -> None:
    x, mask = torch.ones(1, 2, dtype=F64), torch.ones(1, 2, dtype=F64)
    assert float(verl.agg_loss(x, mask, "seq-mean-token-mean")) == pytest.approx(
        2 / (2 + 1e-8), rel=1e-15
    )
    assert float(verl.agg_loss(x, mask.bool(), "seq-mean-token-mean")) == 1.0
    assert (guard(mask), guard(mask.bool()), guard(mask.float())) == (1e-8, 1e-30, 1e-30)
    assert as_share(x, mask.float()).dtype == torch.float32


def test_meanings_that_changed_between_releases() -> None:
    # Up to 0.9.0 GSPO was averaged by sequence, whatever the setting.
    gspo = verl.POLICY_LOSSES["gspo"]
    by_token, _ = gspo(OLD, NEW, A, MASK, "token-mean", config())
    older, _ = gspo(OLD, NEW, A, MASK, "token-mean", config(), release="0.9.0")
    by_sequence, _ = gspo(OLD, NEW, A, MASK, "seq-mean-token-mean", config())
    assert older == by_sequence
    assert abs(float(by_token - by_sequence)) > 0.05


def test_value_loss_by_hand() -> None:
    # v 1, 3; v₀ 0, 0; R 0, 0; clip 0.5: max(1, 0.25), max(9, 0.25), half the mean; nothing clipped
    # upward. With R = 2 for the first: max(1, 2.25) is the clipped one.
    v, r = torch.tensor([[1.0, 3.0]], dtype=F64), torch.tensor([[2.0, 0.0]], dtype=F64)
    loss, clipped = verl.compute_value_loss(v, r, torch.zeros_like(v), torch.ones_like(v), 0.5)
    assert float(loss) == pytest.approx((2.25 + 9) / 4, rel=1e-14)
    assert float(clipped) == pytest.approx(1 / 2, rel=1e-7)


def test_kl_penalty_by_hand() -> None:
    d = torch.tensor([[0.5, -1.0]], dtype=F64)  # logprob − ref
    for name, expected in {
        "kl": [0.5, -1.0],
        "abs": [0.5, 1.0],
        "mse": [0.125, 0.5],
        "low_var_kl": [math.exp(-0.5) + 0.5 - 1, math.exp(1) - 1 - 1],
    }.items():
        for plus in ("", "+"):
            lp = d.clone().requires_grad_()
            value = verl.kl_penalty(lp, torch.zeros_like(d), name + plus)
            torch.testing.assert_close(value.detach(), torch.tensor([expected], dtype=F64))
            value.sum().backward()
            if plus:
                torch.testing.assert_close(lp.grad, d)  # the gradient of k2, whatever the value
    with pytest.raises(NotImplementedError, match="full"):
        verl.kl_penalty(d, d, "full")
    with pytest.raises(NotImplementedError, match="k4"):
        verl.kl_penalty(d, d, "k4")
    with pytest.raises(NotImplementedError, match="kl_penalty_forward"):
        verl.kl_penalty_forward(d, d, "k3+")
    far = verl.kl_penalty(torch.full((1, 1), -50.0), torch.zeros(1, 1), "k3")
    assert float(far) == 10.0  # verl holds the estimate within ±10


BAD = {
    "no clip range": (lambda: verl.compute_policy_loss(OLD, NEW, A, MASK), "cliprange"),
    "dual clip below one": (
        lambda: verl.compute_policy_loss(OLD, NEW, A, MASK, 0.2, clip_ratio_c=0.5),
        r"clip_ratio_c.*0\.5",
    ),
    "unknown mode": (lambda: verl.agg_loss(A, MASK, "mean"), "loss_agg_mode.*'mean'"),
    "ranks without tokens": (
        lambda: verl.agg_loss(A, MASK, "token-mean", dp_size=2),
        "batch_num_tokens.*dp_size=2",
    ),
    "ranks without rows": (
        lambda: verl.agg_loss(A, MASK, "seq-mean-token-sum", dp_size=2),
        "global_batch_size.*dp_size=2",
    ),
    "no config": (lambda: verl.compute_policy_loss_vanilla(OLD, NEW, A, MASK), "config"),
    "no beta": (
        lambda: verl.compute_policy_loss_dro(
            OLD, NEW, A, MASK, config=config(policy_loss=Config(dro_beta=None))
        ),
        "dro_beta",
    ),
    "no correction": (
        lambda: verl.compute_policy_loss_bypass_mode(OLD, NEW, A, MASK, config=config()),
        "rollout_correction",
    ),
    "unknown release": (
        lambda: verl.compute_policy_loss_vanilla(OLD, NEW, A, MASK, release="newest"),
        "release.*newest",
    ),
    "old release": (
        lambda: verl.compute_policy_loss_vanilla(OLD, NEW, A, MASK, release="0.7.1"),
        r"0\.7\.1.*older than 0\.8\.0",
    ),
}


@walked("case", BAD)
def test_unsupported_settings_are_named(case: str) -> None:
    call, match = BAD[case]
    with pytest.raises(pl.PolicyLossError, match=match):
        call()


def test_an_empty_batch_has_no_loss_and_no_gradient() -> None:
    nothing = torch.zeros_like(MASK)
    for name, loss in verl.POLICY_LOSSES.items():
        if name == "bypass_mode":
            continue
        new = NEW.clone().requires_grad_()
        out, metrics = loss(OLD, new, A, nothing, config=config(policy_loss=Config(dro_beta=0.5)))
        out.backward()
        assert out.item() == 0, name
        assert torch.count_nonzero(new.grad) == 0, name
        assert set(metrics.values()) <= {0.0}, name


def unset(**changes: Any) -> Config:
    """A config without the settings that only one loss of verl reads."""
    return config(**{"policy_loss": Config(), **changes})


@pytest.fixture
def fake_verl(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A verl that has only its registry of policy losses."""
    registry: dict[str, Any] = {}
    core = ModuleType("verl.trainer.ppo.core_algos")
    core.register_policy_loss = lambda name: lambda function: registry.setdefault(name, function)  # type: ignore[attr-defined]
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, core.__name__, core)
    return registry


def test_register_puts_every_preset_into_the_registry(fake_verl: dict[str, Any]) -> None:
    mine = pl.preset("dapo").replace(trust=pl.Clip(0.1, 0.3))
    names = verl.register({"mine": mine})
    assert (
        set(names) == set(fake_verl) == {f"policyloss/{name}" for name in [*pl.presets(), "mine"]}
    )
    info = {"dp_size": 2, "batch_num_tokens": 12, "global_batch_size": 4, "loss_scale_factor": None}
    loss, metrics = fake_verl["policyloss/mine"](
        old_log_prob=OLD, log_prob=NEW, advantages=A, response_mask=MASK,
        loss_agg_mode="token-mean",
        config=unset(global_batch_info=info), rollout_is_weights=None,
    )  # fmt: skip
    expected = pl.policy_loss(mine, NEW, OLD, A, MASK, totals=pl.Totals(12, 4, dp_size=2))
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-14)
    assert metrics["policyloss/clip_fraction"] == expected.metrics.compute()["clip_fraction"]
    assert metrics["actor/ppo_kl"] == pytest.approx(
        -(math.log(2) + math.log(0.5) + math.log(1.1)) / 3
    )


@pytest.fixture
def fake_distillation(fake_verl: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A verl that has a registry of distillation losses too, which refuses a second entry."""
    registry: dict[str, Any] = {}

    def register(settings: Any) -> Any:
        def put(function: Any) -> None:
            (name,) = settings.names
            assert settings.use_estimator
            assert name not in registry
            registry[name] = function

        return put

    losses = ModuleType("verl.trainer.distillation.losses")
    vars(losses).update(
        DISTILLATION_LOSS_REGISTRY=registry,
        DistillationLossSettings=SimpleNamespace,
        register_distillation_loss=register,
        no_padding_2_padding=lambda x, data: x,
        AggregationType=SimpleNamespace(MEAN="mean"),
        Metric=lambda aggregation, value: (aggregation, value),
    )
    parent = ModuleType("verl.trainer.distillation")
    for module in (parent, losses):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return registry


def test_distillation_is_registered_again_and_again(fake_distillation: dict[str, Any]) -> None:
    names = register_distillation()
    assert register_distillation() == names == tuple(fake_distillation)
    # The student is log 2, −log 2 and log 1.1 away from the teacher: the gradient of k1+ is that.
    student = NEW.clone().requires_grad_()
    supervised = Config(distillation_loss=Config(use_policy_gradient=False))
    data = {"teacher_logprobs": OLD.unsqueeze(-1), "response_mask": MASK.long()}
    estimates, metrics = fake_distillation["policyloss/k1+"](
        config=None,
        distillation_config=supervised,
        model_output={"log_probs": student},
        data=data,
    )
    gaps = torch.tensor([2.0, 0.5, 1.1], dtype=F64).log()
    torch.testing.assert_close(estimates[MASK], gaps)
    (gradient,) = torch.autograd.grad(estimates.sum(), student)
    torch.testing.assert_close(gradient[MASK], gaps)
    aggregation, mean = metrics["distillation/abs_loss"]
    assert aggregation == "mean"
    assert float(mean) == pytest.approx((2 * math.log(2) + math.log(1.1)) / 3)
    with pytest.raises(pl.InputError, match=r"does not depend on the teacher.*use_policy_gradient"):
        fake_distillation["policyloss/k1"](None, supervised, {"log_probs": student}, data)


def test_the_hook_registers_when_it_is_imported(
    fake_verl: dict[str, Any], fake_distillation: dict[str, Any]
) -> None:
    sys.modules.pop("policyloss.compat.verl.hook", None)
    hook = importlib.import_module("policyloss.compat.verl.hook")
    assert "policyloss/gspo" in fake_verl
    assert "policyloss/gspo" in hook.NAMES
    assert len(fake_distillation) == 6
    assert hook.NAMES[-6:] == tuple(fake_distillation)


def registered(
    fake_verl: dict[str, Any],
    name: str,
    weights: Tensor | None = None,
    mode: str = "token-mean",
    **changes: Any,
) -> Tensor:
    verl.register()
    loss, _ = fake_verl[f"policyloss/{name}"](OLD, NEW, A, MASK, mode, unset(**changes), weights)
    assert isinstance(loss, Tensor)
    return loss


SERVED = [
    name
    for name in pl.presets()
    if not set(pl.preset(name).reads) - {"old_logp"} or name in ("clip_cov", "kl_cov")
]


@pytest.mark.parametrize("name", SERVED)
def test_a_registered_preset_is_the_preset(fake_verl: dict[str, Any], name: str) -> None:
    loss = registered(fake_verl, name, loss_scale_factor=12)
    expected = pl.policy_loss(pl.preset(name).for_run(12), NEW, OLD, A, MASK).loss
    assert float(loss) == pytest.approx(float(expected), rel=1e-13, abs=1e-15)


def test_a_preset_with_kl_leaves_it_to_verl_or_names_the_setting(fake_verl: dict[str, Any]) -> None:
    with pytest.raises(
        pl.SpecError, match=r"use_kl_loss=true.*kl_loss_type=k3.*kl_loss_coef=0\.04"
    ):
        registered(fake_verl, "grpo")
    with pytest.raises(pl.SpecError, match=r"0\.04.*0\.001"):
        registered(
            fake_verl, "grpo", use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=0.001
        )
    kl = {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.04}
    with pytest.raises(
        pl.SpecError,
        match=r"SeqMeanTokenMean.*'token-mean'; set actor\.loss_agg_mode=seq-mean-token-mean",
    ):
        registered(fake_verl, "grpo", **kl)
    with pytest.raises(pl.SpecError, match="kl_loss_type=k3,"):  # "k3+" has another gradient
        registered(fake_verl, "grpo", mode="seq-mean-token-mean", **{**kl, "kl_loss_type": "k3+"})
    loss = registered(fake_verl, "grpo", mode="seq-mean-token-mean", **kl)
    expected = pl.policy_loss(pl.preset("grpo").replace(kl=None), NEW, OLD, A, MASK).loss
    assert float(loss) == pytest.approx(float(expected), rel=1e-14)


def test_a_correction_is_verls_to_make(fake_verl: dict[str, Any]) -> None:
    with pytest.raises(pl.SpecError, match=r"Truncate.*algorithm\.rollout_correction"):
        registered(fake_verl, "tis")
    weights = torch.full_like(OLD, 0.5)
    loss = registered(fake_verl, "tis", weights)
    plain = pl.policy_loss(pl.preset("tis").replace(correction=()), NEW, OLD, A, MASK).loss
    assert float(loss) == pytest.approx(float(plain) / 2, rel=1e-14)
    with pytest.raises(pl.SpecError, match="rollout_logp, which verl does not pass"):
        registered(fake_verl, "importance_sampling")
    verl.register({"prompts": pl.LossSpec(aggregate=pl.PromptMean())})
    with pytest.raises(pl.SpecError, match="group_ids"):
        fake_verl["policyloss/prompts"](OLD, NEW, A, MASK, "token-mean", config(), None)


def test_ranks_without_counts_are_refused(fake_verl: dict[str, Any]) -> None:
    with pytest.raises(pl.SpecError, match="batch_num_tokens"):
        registered(fake_verl, "dapo", global_batch_info={"dp_size": 4})


@pytest.mark.parametrize(
    "kl",
    [
        pl.KL("k3", 0.04, weight="ratio"),
        pl.KL("k3", 0.04, grad="score"),
        pl.KL("k2", 0.04, anchor="old"),
        WrittenKL("k3", 0.04, ratio_level="token"),
    ],
)
def test_a_kl_that_verl_does_not_have_is_refused(fake_verl: dict[str, Any], kl: pl.KL) -> None:
    verl.register({"own": pl.LossSpec(kl=kl)})
    settings = config(use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=0.04)
    with pytest.raises(pl.SpecError, match="verl cannot add"):
        fake_verl["policyloss/own"](OLD, NEW, A, MASK, "token-mean", settings, None)


def test_only_means_are_reported_as_verl_averages_them(fake_verl: dict[str, Any]) -> None:
    verl.register()
    _, metrics = fake_verl["policyloss/dapo"](OLD, NEW, A, MASK, "token-mean", unset(), None)
    assert "policyloss/clip_fraction" in metrics
    assert not {"policyloss/loss", "policyloss/tokens", "policyloss/ratio_max"} & set(metrics)


def test_the_gradient_at_the_ends_of_a_clipped_value_is_verls() -> None:
    # v = v₀ + clip exactly, R = 0: both errors are equal, so each gets half; verl's max(min(…))
    # passes half of the clipped one's.
    v = torch.tensor([[1.5]], dtype=F64, requires_grad=True)
    loss, _ = verl.compute_value_loss(
        v, torch.zeros(1, 1, dtype=F64), torch.ones(1, 1, dtype=F64), torch.ones(1, 1), 0.5
    )
    loss.backward()
    assert v.grad.item() == pytest.approx(1.5 * (0.5 + 0.25))


class NumpyLike:
    """A number that is not a Python number, like numpy's scalars."""

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)


def test_numbers_of_any_kind() -> None:
    plain = verl.agg_loss(A, MASK, "token-mean", dp_size=4, batch_num_tokens=30)
    for kind in (NumpyLike, torch.tensor, float):
        assert float(
            verl.agg_loss(A, MASK, "token-mean", dp_size=kind(4), batch_num_tokens=kind(30))
        ) == float(plain)
        horizon = verl.agg_loss(
            A,
            MASK,
            "seq-mean-token-sum-norm",
            dp_size=kind(4),
            global_batch_size=8,
            loss_scale_factor=kind(7),
        )
        assert float(horizon) == pytest.approx(4 * (1 - 1 - 2) / 8 / 7, rel=1e-15)
        clipped = verl.compute_policy_loss(
            OLD, NEW, A, MASK, cliprange=kind(0.25), clip_ratio_c=kind(3)
        )
        assert float(clipped[0]) == float(
            verl.compute_policy_loss(OLD, NEW, A, MASK, cliprange=0.25)[0]
        )


def test_kl_penalty_takes_any_shape() -> None:
    d = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=F64)
    for shape in ((4,), (2, 2), (2, 1, 2), ()):
        x = d[: max(1, math.prod(shape))].reshape(shape)
        torch.testing.assert_close(verl.kl_penalty(x, torch.zeros_like(x), "k2"), 0.5 * x**2)


def test_sapo_holds_its_temperatures_as_the_advantages() -> None:
    loss, _ = verl.compute_policy_loss_sapo(OLD, NEW, A.to(torch.bfloat16), MASK, config=config())
    tau = torch.tensor(1.05, dtype=torch.bfloat16).item()
    spec = pl.LossSpec(trust=pl.SoftGate(1.0, tau), aggregate=pl.SeqMeanTokenMean())
    assert float(loss) == pytest.approx(
        float(pl.policy_loss(spec, NEW, OLD, A, MASK).loss), rel=1e-14
    )


def test_a_hook_without_its_framework_is_an_error() -> None:
    with pytest.raises(
        ImportError, match=r"verl is not installed here.*policyloss\.compat\.verl work without it"
    ):
        verl.install()
    with pytest.raises(ImportError, match="openrlhf is not installed here"):
        pl.compat.openrlhf.install()
