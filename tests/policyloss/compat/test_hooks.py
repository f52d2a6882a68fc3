"""The advantages that a preset is defined with, and the framework options that it overrides."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from trl_configs import config as trl_config
from trl_configs import grpo_config
from walk import walked

import policyloss as pl
from policyloss.advantage import ESTIMATORS
from policyloss.catalogue import PRESETS
from policyloss.compat import verl
from policyloss.compat.hooks import warn_once
from policyloss.compat.trl import explain_config
from policyloss.compat.trl.trainer import checked_loss
from policyloss.compat.verl import settings
from policyloss.compat.verl.registry import as_verl_loss


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> Iterator[None]:
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def warnings_of(function: Callable[[], Any], times: int) -> list[str]:
    """The texts of the warnings of so many calls, shown however often they come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            function()
    return [str(warning.message) for warning in caught]


# --- the advantages of a preset ---

# From the papers' side; presets that are not here go with any.
DEFINED_WITH = {
    "ppo": "gae",
    "ppo_dual_clip": "gae",
    "rec_one_side": "dr_grpo",
    "m2po": "grpo",
    "ipo": "dr_grpo",
    "decoupled_ppo": "gae",
    "grpo": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "cispo_unified": "grpo",
    "sapo": "grpo",
    "gmpo": "grpo",
    "luspo": "grpo",
    "dr_grpo": "dr_grpo",
    "prime_rl": "dr_grpo",
    "dro": "dr_grpo",
    "gpg": "gpg",
    "rloo_loss": "rloo",
    "opd": "opd",
    "iw_opd": "iw_opd",
    "kdrl": "grpo",
}


@walked("name", pl.presets())
def test_the_advantages_of_a_preset_are_data_with_a_source(name: str) -> None:
    preset = PRESETS[name]
    assert preset.advantage == DEFINED_WITH.get(name)
    assert (preset.advantage is None) == ("advantage" not in preset.sources)
    assert preset.advantage is None or preset.advantage in ESTIMATORS
    assert "advantage." not in preset.note or name == "rloo_loss"  # stated only once


def test_the_explanation_shows_them() -> None:
    assert "Advantages\n  advantage.dr_grpo; arXiv 2503.20783" in str(pl.explain("dr_grpo"))
    assert "Advantages\n  any:" in str(pl.explain("tis"))
    data = pl.explain("ppo").to_dict()
    assert data["advantage"] == "gae"
    assert "equations 11 and 12" in data["advantage_source"]
    changed = pl.explain(pl.preset("dr_grpo").with_horizon(8).replace(trust=pl.Clip(0.2, 0.28)))
    assert (changed.near, changed.advantage) == ("dr_grpo", "dr_grpo")


def trl_args(scale_rewards: Any, **options: Any) -> Any:
    args = grpo_config(**options)
    args.scale_rewards = scale_rewards
    return args


@walked(
    ("loss", "scale_rewards", "words"),
    [
        (
            "dr_grpo",
            "group",
            [
                "'dr_grpo'",
                "advantage.dr_grpo",
                "scale_rewards='group'",
                "advantage.grpo",
                "scale_rewards='none'",
            ],
        ),
        ("dr_grpo", True, ["scale_rewards=True", "set scale_rewards='none'"]),
        ("gspo", "none", ["advantage.grpo", "set scale_rewards='group'"]),
        ("gspo", "batch", ["scale_rewards='batch'", "others", "set scale_rewards='group'"]),
        ("rloo_loss", "group", ["advantage.rloo", "cannot compute them"]),
        ("DR-GRPO", "group", ["policy_loss='DR-GRPO' is defined with", "advantage.dr_grpo"]),
        (
            pl.preset("dr_grpo"),
            "group",
            ["policy_loss, the preset 'dr_grpo',", "advantage.dr_grpo", "set scale_rewards='none'"],
        ),
        # A changed number by name, and one in a spec of which only the value is known.
        (
            pl.preset("dr_grpo", eps_high=0.28),
            "group",
            ["policy_loss, a change of the preset 'dr_grpo',", "set scale_rewards='none'"],
        ),
        (
            pl.LossSpec.from_dict(pl.preset("gspo", eps_high=5e-4).to_dict()),
            "none",
            ["policy_loss, a change of the preset 'gspo',", "set scale_rewards='group'"],
        ),
        (pl.preset("ppo"), "group", ["the preset 'ppo'", "advantage.gae", "cannot compute them"]),
    ],
)
def test_trl_warns_of_other_advantages(loss: Any, scale_rewards: Any, words: list[str]) -> None:
    (text,) = warnings_of(lambda: checked_loss(loss, trl_args(scale_rewards)), times=2)
    assert not [word for word in words if word not in text]


@walked(
    ("loss", "scale_rewards"),
    [
        *(("dr_grpo", "none"), ("dr_grpo", False), ("gspo", "group"), ("gspo", True)),
        *(("bnpo", "batch"), (pl.preset("bnpo"), "batch")),
        (pl.preset("dr_grpo", eps_high=0.28), "none"),
        (pl.LossSpec(trust=lambda tokens: tokens.ratio), "group"),
        # Its numbers equal those of ppo and of bnpo, which works with any advantages.
        *((pl.LossSpec(), "group"), (pl.LossSpec(trust=pl.Clip(0.1, 0.1)), "group")),
    ],
)
def test_trl_is_quiet_where_they_fit(loss: Any, scale_rewards: Any) -> None:
    checked_loss(loss, trl_args(scale_rewards))  # a warning is an error here


def test_the_page_on_a_config_names_other_advantages() -> None:
    trap = (
        "Dr. GRPO's advantages are not divided by a standard deviation; set scale_rewards='none'."
    )
    assert trap in " ".join(explain_config(trl_config(loss_type="dr_grpo")).split())
    assert trap not in " ".join(
        explain_config(trl_config(loss_type="dr_grpo", scale_rewards="none")).split()
    )
    assert trap not in " ".join(explain_config(trl_config(loss_type="grpo")).split())


# --- verl ---


@dataclass
class PolicyLossConfig:
    """The fields of verl's that one loss alone reads, with its defaults."""

    loss_mode: str = "vanilla"
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None


@dataclass
class ActorConfig:
    """The fields of verl's that a loss reads, with its defaults."""

    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    use_kl_loss: bool = False
    kl_loss_type: str = "low_var_kl"
    kl_loss_coef: float = 0.001
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    global_batch_info: dict[str, Any] = field(default_factory=dict)


def called(name: str, config: ActorConfig, spec: pl.LossSpec | None = None) -> float:
    """A registered loss on one batch, as verl's worker calls it."""
    old = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.7, -0.1]], dtype=torch.float64)
    new = old + torch.tensor([[0.3, -0.4, 0.0], [0.1, 0.9, 0.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-2.0]], dtype=torch.float64).expand(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    loss, _ = as_verl_loss(name, pl.preset(name) if spec is None else spec)(
        old, new, advantages, mask, config.loss_agg_mode, config
    )
    return float(loss)


OVERRIDDEN: list[tuple[str, dict[str, Any], list[str]]] = [
    ("ppo", {"clip_ratio": 0.3}, ["actor.clip_ratio=0.3"]),
    (
        "ppo",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.4},
        ["actor.clip_ratio_low=0.1", "actor.clip_ratio_high=0.4"],
    ),
    ("ppo_dual_clip", {"clip_ratio_c": 10.0}, ["actor.clip_ratio_c=10.0", "dual=3.0"]),
    ("gspo", {"clip_ratio_high": 0.28}, ["actor.clip_ratio_high=0.28", "0.0004"]),
    (
        "dapo",
        {"loss_agg_mode": "seq-mean-token-mean"},
        ["actor.loss_agg_mode=seq-mean-token-mean", "TokenMean()"],
    ),
    ("sapo", {"tau_neg": 1.2}, ["actor.tau_neg=1.2"]),
    ("dro", {"policy_loss": PolicyLossConfig(dro_beta=0.5)}, ["actor.policy_loss.dro_beta=0.5"]),
    (
        "kl_cov",
        {"policy_loss": PolicyLossConfig(ppo_kl_coef=0.5)},
        ["actor.policy_loss.ppo_kl_coef=0.5"],
    ),
]


@walked(("name", "options", "words"), OVERRIDDEN, ids=[f"{n} {w[0]}" for n, _, w in OVERRIDDEN])
def test_verl_names_the_settings_a_preset_overrides_once(
    name: str, options: dict[str, Any], words: list[str]
) -> None:
    plain = called(name, ActorConfig())  # a warning is an error here
    changed: list[float] = []
    (text,) = warnings_of(lambda: changed.append(called(name, ActorConfig(**options))), times=2)
    assert changed == [plain, plain]  # no effect, as the warning states
    assert not [word for word in (f"policyloss/{name}", *words) if word not in text]


@walked(
    ("name", "options"),
    [
        ("dapo", {"clip_ratio_high": 0.28}),
        ("gspo", {"loss_agg_mode": "seq-mean-token-mean"}),
        ("dro", {"policy_loss": PolicyLossConfig(dro_beta=0.1)}),
        ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        ("ppo", {}),
    ],
)
def test_verl_is_quiet_where_a_setting_agrees_with_the_preset(
    name: str, options: dict[str, Any]
) -> None:
    called(name, ActorConfig(**options))


def test_every_number_of_verl_s_losses_is_looked_at() -> None:
    """A new field of these configs must be classified: what does a preset do to it?"""
    known = {
        *(option.rpartition(".")[2] for option in settings.TRUST_OPTIONS),
        "loss_agg_mode",
        "loss_scale_factor",
        "policy_loss",
        "loss_mode",
    }
    # Verl's own terms and counts.
    known |= {
        "entropy_coeff",
        "use_kl_loss",
        "kl_loss_type",
        "kl_loss_coef",
        "global_batch_info",
    }
    fields = [f.name for cls in (ActorConfig, PolicyLossConfig) for f in dataclasses.fields(cls)]
    assert set(fields) == known


def test_verl_gives_its_scale_factor_as_the_horizon() -> None:
    with pytest.raises(
        pl.SpecError,
        match=r"policyloss/dr_grpo.*actor\.loss_scale_factor.*data\.max_response_length",
    ):
        called("dr_grpo", ActorConfig())
    # Sums of the surrogate, ratios and clips by hand are in test_hand_computed;
    # here only the constant changes.
    sums = called("dr_grpo", ActorConfig(loss_scale_factor=1.0))
    assert called("dr_grpo", ActorConfig(loss_scale_factor=8.0)) == pytest.approx(
        sums / 8, rel=1e-15
    )
    own = pl.preset("dr_grpo").with_horizon(100)
    assert called("mine", ActorConfig(), own) == pytest.approx(sums / 100, rel=1e-15)
    with pytest.raises(pl.SpecError, match=r"policyloss/mine.*100.*loss_scale_factor=8\.0"):
        called("mine", ActorConfig(loss_scale_factor=8.0), own)
    assert called("dapo", ActorConfig(loss_scale_factor=8.0)) == called("dapo", ActorConfig())


def run_config(loss_mode: str, adv_estimator: Any, **more: Any) -> dict[str, Any]:
    actor = ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        loss_scale_factor=more.pop("loss_scale_factor", None),
    )
    return {
        "actor_rollout_ref": {"actor": actor},
        "algorithm": {"adv_estimator": adv_estimator, **more},
    }


@walked(
    ("config", "words"),
    [
        (
            run_config("policyloss/gspo", "gae"),
            ["advantage.grpo", "adv_estimator=gae", "set algorithm.adv_estimator=grpo"],
        ),
        (
            run_config("policyloss/ppo", "grpo"),
            ["advantage.gae", "set algorithm.adv_estimator=gae"],
        ),
        (
            run_config("policyloss/dr_grpo", "grpo", loss_scale_factor=8),
            ["advantage.dr_grpo", "adv_estimator=grpo", "norm_adv_by_std_in_grpo=false"],
        ),
        (
            run_config("policyloss/gspo", "grpo", norm_adv_by_std_in_grpo=False),
            ["norm_adv_by_std_in_grpo=false computes those of"],
        ),
        (
            run_config("policyloss/rloo_loss", "my_own"),
            ["advantage.rloo", "adv_estimator=my_own computes others", "=rloo"],
        ),
    ],
)
def test_a_verl_run_warns_of_other_advantages(config: dict[str, Any], words: list[str]) -> None:
    (text,) = warnings_of(lambda: verl.check_config(config), times=2)
    assert not [word for word in words if word not in text]


@walked(
    "config",
    [
        run_config("policyloss/gspo", "grpo"),
        run_config(
            "policyloss/gspo", SimpleNamespace(value="grpo_vectorized")
        ),  # verl has them as an enumeration, too
        run_config("policyloss/ppo", "gae"),
        run_config(
            "policyloss/dr_grpo", "grpo", norm_adv_by_std_in_grpo=False, loss_scale_factor=8
        ),
        run_config("policyloss/tis", "rloo"),
        run_config("policyloss/mine", "gae"),
        run_config("vanilla", "grpo"),
    ],
)
def test_a_verl_run_is_quiet_where_they_fit(config: dict[str, Any]) -> None:
    verl.check_config(config)


def test_a_verl_run_without_its_horizon_ends_before_it_begins() -> None:
    with pytest.raises(pl.SpecError, match="loss_scale_factor"):
        verl.check_config(run_config("policyloss/dr_grpo", "grpo", norm_adv_by_std_in_grpo=False))


def test_the_check_follows_verl_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    seen: list[Any] = []
    theirs = ModuleType("verl.utils.config")
    theirs.validate_config = lambda config, use_critic: seen.append(use_critic)  # type: ignore[attr-defined]
    for name in ("verl", "verl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    assert settings.extend_validation()
    once = theirs.validate_config
    assert settings.extend_validation()
    assert theirs.validate_config is once  # not wrapped twice
    with pytest.warns(UserWarning, match=r"policyloss/gspo is defined with"):
        once(config=run_config("policyloss/gspo", "gae"), use_critic=True)
    assert seen == [True]
    monkeypatch.delattr(theirs, "validate_config")
    assert not settings.extend_validation()


def test_a_warning_appears_once() -> None:
    assert warnings_of(lambda: [warn_once(text) for text in ("a", "b", "a", "b")], times=2) == [
        "a",
        "b",
    ]
