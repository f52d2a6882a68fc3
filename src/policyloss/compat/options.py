"""The options of frameworks that decide a loss, as tables: their defaults, the values that a search
may try for each (`policyloss.porting`), and the loss that they describe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from policyloss.compat import openrlhf, trl
from policyloss.compat.openrlhf.losses import KL_CLAMP
from policyloss.compat.trl import config as trl_config
from policyloss.compat.verl import settings as verl_settings
from policyloss.compat.verl.aggregation import AGG_MODES
from policyloss.compat.verl.rollout_thresholds import SUPPORTED_ROLLOUT_RS_OPTIONS
from policyloss.parts.aggregate import LocalTokenMean
from policyloss.parts.kl import KL
from policyloss.spec import LossSpec

Options = Mapping[str, Any]
OFF_ON, ON_OFF = (False, True), (True, False)
# A bound that never binds where the log-ratio is clamped at 20: e^20 is below 4.9e8.
NEVER = 1e9


class Numbers(NamedTuple):
    """The values of an option: its default, `also`, and the numbers in a slot of the loss.

    form: "plain" numbers, with their "distance" from 1, as a "pair" of bounds, or as verl's bounds
    "joined" in a text.
    """

    default: Any
    slot: str
    form: str = "plain"
    also: tuple[Any, ...] = ()


class Framework(NamedTuple):
    """A framework as a reader of its options.

    steps: the options that a search sets together, each with its values, the default first. read:
    the loss of complete options. advantage: the function of `policyloss.advantage` that computes
    its advantages, or None. remarks: sentences on the framework that a LossSpec cannot hold, and
    whether each is true of these options. style: "json", or a command line: "hydra" or "flags".
    """

    style: str
    steps: tuple[dict[str, Any], ...]
    read: Callable[[Options], LossSpec]
    advantage: Callable[[Options], str | None]
    remarks: Callable[[Options], dict[str, Any]]

    @property
    def defaults(self) -> dict[str, Any]:
        """Every option that decides the loss, with its default."""
        return {name: values[0] for step in self.steps for name, values in step.items()}


def nest_options(options: Options) -> dict[str, Any]:
    """Options with dotted names as a tree of dicts."""
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *folders, last = name.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = value
    return tree


# TRL: the fields of GRPOConfig.
_VLLM = "vllm_importance_sampling_"


def _read_trl(options: Options) -> LossSpec:
    config = SimpleNamespace(**options)
    spec = trl.spec_from_config(config, handled=trl_config.EXTRA_OPTIONS)
    spec = spec.replace(entropy_coef=config.entropy_coef)
    return spec.replace(aggregate=LocalTokenMean()) if config.loss_type == "bnpo" else spec


def _remarks_of_trl(o: Options) -> dict[str, Any]:
    rows = ("grpo", "sapo", "dr_grpo", "luspo")
    share, bonus = o["top_entropy_quantile"], o["entropy_coef"] and o["loss_type"] != "bnpo"
    return {
        "TRL counts an empty completion as a row of the average": o["loss_type"] in rows,
        "TRL averages the entropy bonus over the tokens of each micro-batch": bonus,
        "TRL adapts entropy_coef (use_adaptive_entropy)": o["use_adaptive_entropy"],
        f"TRL trains on the share {share} of tokens with the highest entropy": share < 1,
    }


_TRL = Framework(
    "json",
    (
        {name: (default,) for name, default in trl_config.DEFAULTS.items()},
        {
            "loss_type": ("dapo", *trl_config.LOSS_TYPES),
            "importance_sampling_level": trl_config.LEVELS,
        },
        *(
            {name: Numbers(trl_config.DEFAULTS[name], "trust")}
            for name in ("delta", "epsilon_high", "epsilon", *trl_config.SAPO, *trl_config.VESPO)
        ),
        {"max_completion_length": Numbers(512, "aggregate")},
        {"beta": Numbers(0.0, "kl"), "use_bias_correction_kl": ON_OFF},
        {"entropy_coef": Numbers(0.0, "entropy_coef")},
        {
            "use_vllm": OFF_ON,
            f"{_VLLM}mode": ("sequence_mask", *trl_config.MODES),
            f"{_VLLM}clip_max": Numbers(3.0, "correction", also=(None,)),
            f"{_VLLM}clip_min": Numbers(None, "correction"),
        },
        {
            "off_policy_mask_threshold": Numbers(None, "correction"),
            "use_vllm": OFF_ON,
            f"{_VLLM}correction": ON_OFF,
        },
        {"scale_rewards": ("group", "none")},
    ),
    _read_trl,
    lambda options: trl_config.advantages_of(SimpleNamespace(**options)),
    _remarks_of_trl,
)

# verl: hydra's keys.
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
_MODE, _AVERAGE = f"{_ACTOR}policy_loss.loss_mode", f"{_ACTOR}loss_agg_mode"
_KL_TYPES = ("low_var_kl", "kl", "mse", "abs", "low_var_kl+", "kl+", "mse+", "abs+")


def _remarks_of_verl(o: Options) -> dict[str, Any]:
    mode, average = o[_MODE], o[_AVERAGE]
    terms = o[f"{_ACTOR}use_kl_loss"] or o[f"{_ACTOR}entropy_coeff"]
    scaled = average != "seq-mean-token-sum-norm" or o[f"{_ACTOR}loss_scale_factor"]
    chosen = mode in ("clip_cov", "kl_cov")
    fixed = terms and mode in verl_settings.SEQUENCE_MEANS
    return {
        "verl chooses the tokens to limit in each micro-batch, not in the step": chosen,
        "verl averages geo_mean over the rows of each micro-batch": mode == "geo_mean",
        f"verl averages KL and entropy by loss_agg_mode={average}": fixed,
        "verl divides by the padded width unless loss_scale_factor is set": not scaled,
    }


_VERL = Framework(
    "hydra",
    (
        {_AVERAGE: AGG_MODES, f"{_ROLLOUT}bypass_mode": (False,)},
        {
            _MODE: tuple(verl_settings.SPECS),
            f"{_ACTOR}policy_loss.dro_beta": Numbers(None, "trust"),
        },
        *(
            {f"{_ACTOR}{name}": Numbers(default, "trust", "distance", (NEVER,))}
            for name, (default, _) in verl_settings.TRUST_OPTIONS.items()
        ),
        {f"{_ACTOR}loss_scale_factor": Numbers(None, "aggregate")},
        {f"{_ACTOR}entropy_coeff": Numbers(0, "entropy_coef")},
        {
            f"{_ACTOR}use_kl_loss": OFF_ON,
            f"{_ACTOR}kl_loss_type": _KL_TYPES,
            f"{_ACTOR}kl_loss_coef": Numbers(0.001, "kl"),
        },
        {
            f"{_ROLLOUT}rollout_is": (None, "token", "sequence"),
            f"{_ROLLOUT}rollout_is_threshold": Numbers(2.0, "correction", "joined", (NEVER,)),
            f"{_ROLLOUT}rollout_is_batch_normalize": OFF_ON,
        },
        {
            f"{_ROLLOUT}rollout_rs": (None, *sorted(SUPPORTED_ROLLOUT_RS_OPTIONS)),
            f"{_ROLLOUT}rollout_rs_threshold": Numbers(None, "correction", "joined"),
        },
        {
            "algorithm.adv_estimator": tuple(verl_settings.ESTIMATORS),
            "algorithm.norm_adv_by_std_in_grpo": ON_OFF,
        },
    ),
    lambda options: verl_settings.spec_from_config(nest_options(options)),
    lambda options: verl_settings.advantages_of(nest_options(options))[0],
    _remarks_of_verl,
)

# OpenRLHF: its flags, without the dashes.
_GATE = "algo.advantage.is_correction_"
_OPENRLHF_ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}


def _read_openrlhf(o: Options) -> LossSpec:
    low, high = o["actor.eps_clip_low_high"] or (o["actor.eps_clip"], o["actor.eps_clip"])
    loss = openrlhf.PolicyLoss(
        *(low, high, o["actor.dual_clip"], o["actor.loss_agg_mode"] == "token-mean"),
        o["actor.policy_loss_type"],
        *(o[f"{_GATE}{name}"] for name in ("level", "mode", "gating", "threshold")),
    )
    kl, estimator = None, o["algo.kl.estimator"]
    if o["algo.kl.use_loss"] and o["algo.kl.init_coef"]:
        clamps: Any = {"clamp": KL_CLAMP if estimator == "k3" else None, "value_clamp": KL_CLAMP}
        unbiased: Any = {"grad": "k2", "weight": "detached_ratio", "weight_max": KL_CLAMP}
        chosen = unbiased if o["algo.kl.unbiased_gradient"] else {}
        kl = KL(estimator, o["algo.kl.init_coef"], **clamps, **chosen)
    return loss.spec.replace(kl=kl, entropy_coef=o["actor.entropy_coef"] or 0.0)


def _remarks_of_openrlhf(o: Options) -> dict[str, Any]:
    by_token = (o["actor.loss_agg_mode"], o["actor.policy_loss_type"]) == ("token-mean", "ppo")
    pull, in_loss = o["algo.kl.init_coef"], o["algo.kl.use_loss"]
    return {
        "OpenRLHF averages KL and entropy over tokens, but the policy term over sequences": (
            not by_token and (o["actor.entropy_coef"] or (pull and in_loss))
        ),
        f"OpenRLHF subtracts {pull} times the KL from the rewards": pull and not in_loss,
    }


_OPENRLHF = Framework(
    "flags",
    (
        {"actor.policy_loss_type": ("ppo", "gspo")},
        {"actor.eps_clip": Numbers(0.2, "trust")},
        {"actor.eps_clip_low_high": Numbers(None, "trust", "pair")},
        {"actor.dual_clip": Numbers(None, "trust")},
        {"actor.loss_agg_mode": ("token-mean", "seq-mean-token-mean")},
        {"actor.entropy_coef": Numbers(None, "entropy_coef")},
        {
            "algo.kl.use_loss": OFF_ON,
            "algo.kl.init_coef": Numbers(0.01, "kl", also=(0,)),
            "algo.kl.estimator": ("k1", "k2", "k3"),
            "algo.kl.unbiased_gradient": OFF_ON,
        },
        {
            f"{_GATE}level": ("off", "token", "seq"),
            f"{_GATE}mode": ("mask", "clip"),
            f"{_GATE}gating": ("ratio", "binary_kl", "tv"),
            f"{_GATE}threshold": Numbers([0.5, 5.0], "correction", "pair", ([0.0, NEVER],)),
        },
        {"algo.advantage.estimator": tuple(_OPENRLHF_ESTIMATORS)},
    ),
    _read_openrlhf,
    lambda options: _OPENRLHF_ESTIMATORS.get(options["algo.advantage.estimator"]),
    _remarks_of_openrlhf,
)


FRAMEWORKS = {"trl": _TRL, "verl": _VERL, "openrlhf": _OPENRLHF}
