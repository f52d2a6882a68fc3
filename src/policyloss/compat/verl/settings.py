"""verl's settings: fields of its configs, the `LossSpec` of a complete configuration
(`spec_from_config`), and their effect on a loss of this library. A preset has its own numbers, so
verl's settings for the same numbers have no effect; one warning names the settings that were
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from typing import Any

from policyloss.arguments import check_choice, check_number, check_scalar
from policyloss.catalogue import PRESETS, find_preset
from policyloss.compat.arguments import at_least
from policyloss.compat.engines import PREFIX
from policyloss.compat.hooks import check_advantages, default_of, swap, warn_once
from policyloss.compat.verl.aggregation import AVERAGES, MODES, kl_part
from policyloss.compat.verl.rollout_thresholds import rejection_rules, weight_bounds
from policyloss.errors import InputError, SpecError
from policyloss.parts import trust
from policyloss.parts.aggregate import SeqMeanTokenMean, SeqMeanTokenSumNorm
from policyloss.parts.correction import Band, Reject, SelfNormalise, Truncate
from policyloss.parts.ratio import SequenceRatio, TokenRatio
from policyloss.spec import LossSpec

OLDEST = "0.8.0"
# Options of the actor: verl's default, and the fields of the trust region with the same meaning.
TRUST_OPTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "clip_ratio": (0.2, ("eps_low", "eps_high")),
    "clip_ratio_low": (0.2, ("eps_low",)),
    "clip_ratio_high": (0.2, ("eps_high",)),
    "clip_ratio_c": (3.0, ("dual",)),
    "tau_pos": (1.0, ("tau_positive",)),
    "tau_neg": (1.05, ("tau_negative",)),
    "policy_loss.clip_cov_ratio": (2e-4, ("fraction",)),
    "policy_loss.clip_cov_lb": (1.0, ("cov_low",)),
    "policy_loss.clip_cov_ub": (5.0, ("cov_high",)),
    "policy_loss.kl_cov_ratio": (2e-4, ("fraction",)),
    "policy_loss.ppo_kl_coef": (0.1, ("coef",)),
    "policy_loss.dro_beta": (None, ("beta",)),
}
# algorithm.adv_estimator, and the estimator of `policyloss.advantage`. "grpo" divides by the
# standard deviation unless algorithm.norm_adv_by_std_in_grpo is false.
ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "opo", "gpg", "gdpo", "remax")},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "grpo_passk": "passk_max_gap",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_MISSING = object()


def read_field(config: Any, name: str, default: Any = None) -> Any:
    """A field of a verl config (a dataclass, an OmegaConf node or a mapping), or `default`."""
    if config is None:
        raise InputError(
            "config was not given; pass verl's ActorConfig (for advantages, its AlgoConfig), or an "
            "object with its attributes."
        )
    value = getattr(config, name, _MISSING)
    if value is _MISSING and hasattr(config, "get"):
        value = config.get(name, _MISSING)
    return default if value is _MISSING else value


def read_number(config: Any, name: str) -> float:
    """A field of a verl config that must be a number."""
    value = read_field(config, name)
    if value is None:
        raise InputError(f"config.{name} is missing; it must be a number.")
    check_scalar(f"config.{name}", value)
    return float(value)


def since(release: str | None, version: str) -> bool:
    """Whether `release` (None: the current one) is `version` or newer.

    Raises if it is older than `OLDEST`.
    """
    if not at_least(release, OLDEST):
        raise SpecError(
            f"release={release!r} is older than {OLDEST}, the oldest supported release of verl."
        )
    return at_least(release, version)


def either(value: Any, default: Any) -> Any:
    """`value`, or `default` if it is None."""
    return default if value is None else value


def policy_options(config: Any) -> Any:
    """`config.policy_loss`, the options that only one loss reads."""
    options = read_field(config, "policy_loss")
    if options is None:
        raise InputError("config.policy_loss is missing; this loss reads its settings from there.")
    return options


def clip_range(config: Any) -> tuple[float, float]:
    """`clip_ratio_low` and `clip_ratio_high`; the default of each is `clip_ratio`."""
    both = read_field(config, "clip_ratio")
    low, high = (either(read_field(config, f"clip_ratio_{side}"), both) for side in ("low", "high"))
    if low is None or high is None:
        raise InputError(
            "config.clip_ratio is missing; set it, or both clip_ratio_low and clip_ratio_high."
        )
    check_scalar("config.clip_ratio_low", low)
    check_scalar("config.clip_ratio_high", high)
    return float(low), float(high)


def check_dual(clip_ratio_c: float) -> float:
    """The limit of verl's dual clip, which is always on and must be above 1."""
    check_scalar("clip_ratio_c", clip_ratio_c)
    hint = "It is the largest ratio where A < 0."
    return check_number("clip_ratio_c", float(clip_ratio_c), above=1, error=SpecError, hint=hint)


UNCLAMPED = TokenRatio(log_clamp=None)


def _ppo(actor: Any) -> LossSpec:
    dual = check_dual(read_field(actor, "clip_ratio_c", 3.0))
    return LossSpec(trust=trust.Clip(*clip_range(actor), dual))


def _probability_band(divergence: Any, actor: Any) -> LossSpec:
    cap = read_field(actor, "clip_ratio_c", 20.0)
    return LossSpec(trust=trust.ProbabilityBand(divergence, *clip_range(actor), cap=cap))


def _gspo(actor: Any) -> LossSpec:
    ratio = SequenceRatio(grad="token", log_clamp=(None, 10.0))
    return LossSpec(ratio, trust.Clip(*clip_range(actor)))


def _sapo(actor: Any) -> LossSpec:
    return LossSpec(trust=trust.SoftGate(*(read_number(actor, n) for n in ("tau_pos", "tau_neg"))))


def _clip_cov(actor: Any) -> LossSpec:
    defaults = {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    return LossSpec(UNCLAMPED, trust.CovClip(*clip_range(actor), *_numbers(actor, defaults)))


def _kl_cov(actor: Any) -> LossSpec:
    return LossSpec(
        UNCLAMPED, trust.CovKL(*_numbers(actor, {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 1.0}))
    )


def _numbers(actor: Any, defaults: dict[str, float]) -> list[Any]:
    """These options of `actor.policy_loss`, in this order."""
    options = policy_options(actor)
    return [either(read_field(options, name), default) for name, default in defaults.items()]


def _dro(actor: Any) -> LossSpec:
    beta = read_field(policy_options(actor), "dro_beta")
    if beta is None or beta <= 0:
        raise SpecError(f"policy_loss.dro_beta must be a positive number for DRO, got {beta!r}.")
    return LossSpec(UNCLAMPED, trust.Quadratic(beta))


# By loss_mode: the ratio and the trust region that the options of the actor choose.
SPECS: dict[str, Callable[[Any], LossSpec]] = {
    "vanilla": _ppo,
    "dppo_tv": partial(_probability_band, "tv"),
    "dppo_kl": partial(_probability_band, "kl"),
    "gspo": _gspo,
    "sapo": _sapo,
    "gpg": lambda actor: LossSpec(trust=trust.Unbounded("logp")),
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "geo_mean": lambda actor: LossSpec(UNCLAMPED, trust.GeometricClip(*clip_range(actor))),
    "dro": _dro,
    "cispo": lambda actor: LossSpec(trust=trust.DetachedClip.around_one(*clip_range(actor))),
}
# The losses that verl averages over sequences, whatever loss_agg_mode is.
SEQUENCE_MEANS = ("sapo", "geo_mean")


def spec_from_config(config: Any) -> LossSpec:
    """The loss of the complete configuration of a verl run, the argument of verl's main function:
    the policy term, verl's KL and entropy terms, and its rollout correction.

    The KL in the reward is not part of it. An error names a combination that a LossSpec cannot
    express.
    """
    actor = read_field(read_field(config, "actor_rollout_ref"), "actor")
    rollout = either(read_field(read_field(config, "algorithm"), "rollout_correction"), {})
    mode = str(read_field(policy_options(actor), "loss_mode", "vanilla"))
    if mode.startswith(PREFIX):
        name = mode.removeprefix(PREFIX)
        return with_horizon_of(actor, name, find_preset(name).spec)
    check_choice("policy_loss.loss_mode", mode, SPECS, SpecError)
    if read_field(rollout, "bypass_mode", False):
        raise SpecError(
            "algorithm.rollout_correction.bypass_mode=true weighs by the current policy; use a "
            "loss with TokenRatio(anchor='rollout') instead."
        )
    kl = None
    if read_field(actor, "use_kl_loss", False):
        part = kl_part(read_field(actor, "kl_loss_type", "low_var_kl"))
        kl = replace(part, coef=read_number(actor, "kl_loss_coef"))
    return SPECS[mode](actor).replace(
        kl=kl,
        entropy_coef=read_field(actor, "entropy_coeff", 0.0),
        aggregate=SeqMeanTokenMean() if mode in SEQUENCE_MEANS else _average(actor),
        **_correction(rollout),
    )


def _average(actor: Any) -> Any:
    agg_mode = read_field(actor, "loss_agg_mode", "token-mean")
    check_choice("actor.loss_agg_mode", agg_mode, AVERAGES, SpecError)
    if agg_mode == "seq-mean-token-sum-norm":
        return SeqMeanTokenSumNorm(read_field(actor, "loss_scale_factor"))
    return AVERAGES[agg_mode]()


def _correction(rollout: Any) -> dict[str, Any]:
    """`algorithm.rollout_correction` as the slots `correction` and `rejected`."""
    parts: list[Any] = []
    level, rules = read_field(rollout, "rollout_is"), read_field(rollout, "rollout_rs")
    if level is not None:
        check_choice("rollout_is", level, ("token", "sequence"), SpecError)
        low, high = weight_bounds(read_field(rollout, "rollout_is_threshold", 2.0))
        of: Any = "token" if level == "token" else "product"
        parts.append(Truncate(high, level=of) if low is None else Band(low, high, level=of))
        if read_field(rollout, "rollout_is_batch_normalize", False):
            parts.append(SelfNormalise("tokens" if level == "token" else "sequences"))
    if rules is None:
        return {"correction": parts}
    if any(isinstance(part, Band) for part in parts):
        raise SpecError(
            "rollout_rs takes tokens out of the average, a rollout_is_threshold with two bounds "
            "leaves them in it, and a LossSpec has one rule for both; use one of them."
        )
    for rule in rejection_rules(rules, read_field(rollout, "rollout_rs_threshold")):
        make: Any = Reject
        parts.append(make(rule.estimator, rule.reduce, rule.low, rule.high))
    return {"correction": parts, "rejected": "renormalise"}


def warn_of_overridden(name: str, spec: LossSpec, config: Any, loss_agg_mode: str) -> None:
    """Warn once about the settings of verl's actor that were changed and that `spec` overrides."""
    overridden = list(_overridden_numbers(spec, config))
    if loss_agg_mode not in ("token-mean", MODES.get(type(spec.aggregate))):
        overridden.append(f"loss_agg_mode={loss_agg_mode}")
    if overridden:
        listed = ", ".join(f"actor.{option}" for option in overridden)
        warn_once(
            f"{PREFIX}{name} has its own trust region and average, so {listed} of verl's "
            "configuration has no effect on it; leave it out, or register a loss with the number "
            f"you want: register({{'mine': preset({name!r}).replace(…)}}). It runs with "
            f"trust={spec.trust!r}, aggregate={spec.aggregate!r}."
        )


def _overridden_numbers(spec: LossSpec, actor: Any) -> Iterator[str]:
    for option, (default, fields) in TRUST_OPTIONS.items():
        section, _, name = option.rpartition(".")
        config = read_field(actor, section) if section else actor
        value = None if config is None else read_field(config, name, default)
        if value is None or value == default_of(config, name, default):
            continue
        if any(getattr(spec.trust, field, None) != value for field in fields):
            yield f"{option}={value!r}"


def with_horizon_of(config: Any, name: str, spec: LossSpec) -> LossSpec:
    """`spec` with the horizon `actor.loss_scale_factor`; an error if it has another one."""
    tokens = read_field(config, "loss_scale_factor")
    chosen = getattr(spec.aggregate, "horizon", None)
    if spec.needs_horizon and tokens is None:
        raise SpecError(
            f"{PREFIX}{name} divides by the generation budget of your run, which verl does not "
            "pass to a policy loss: set actor_rollout_ref.actor.loss_scale_factor to the value of "
            "data.max_response_length."
        )
    if None not in (tokens, chosen) and tokens != chosen:
        raise SpecError(
            f"{PREFIX}{name} divides by the horizon {chosen!r}, but "
            f"actor.loss_scale_factor={tokens!r}; set both to the same value, or only one of them."
        )
    return spec if tokens is None else spec.for_run(tokens)


def check_config(config: Any) -> None:
    """Check the complete configuration of a verl run, the argument of verl's main function, if its
    `loss_mode` is a preset of this library.

    A warning is issued if the preset is defined with other advantages than
    `algorithm.adv_estimator` computes, and an error is raised if a horizon is missing.
    """
    actor = read_field(read_field(config, "actor_rollout_ref"), "actor")
    mode = str(read_field(read_field(actor, "policy_loss"), "loss_mode", ""))
    name = mode.removeprefix(PREFIX)
    if name == mode or name not in PRESETS:
        return
    with_horizon_of(actor, name, PRESETS[name].spec)
    estimator, setting = advantages_of(config)
    check_advantages(mode, name, estimator, setting, _setting_for)


def advantages_of(config: Any) -> tuple[str | None, str]:
    """The estimator that a complete configuration selects, and the setting that selects it.

    The estimator is the name of a function of `policyloss.advantage`, or None.
    """
    algorithm = read_field(config, "algorithm")
    adv_estimator = read_field(algorithm, "adv_estimator", "gae")
    chosen = str(getattr(adv_estimator, "value", adv_estimator))
    estimator, setting = ESTIMATORS.get(chosen), f"algorithm.adv_estimator={chosen}"
    if estimator == "grpo" and not read_field(algorithm, "norm_adv_by_std_in_grpo", True):
        return "dr_grpo", f"{setting} with algorithm.norm_adv_by_std_in_grpo=false"
    return estimator, setting


def _setting_for(advantage: str) -> str:
    if advantage == "dr_grpo":
        return "set algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false"
    theirs = next((name for name, ours in ESTIMATORS.items() if ours == advantage), None)
    return f"set algorithm.adv_estimator={theirs}" if theirs else ""


def extend_validation() -> bool:
    """Make verl's `validate_config` call `check_config` as well; returns whether verl has it.

    verl validates in the process that the user starts, so that process must import the hook too:
    `VERL_USE_EXTERNAL_MODULES=policyloss.compat.verl.hook`. The workers get only the actor's
    settings.
    """
    try:
        validate_config = import_module("verl.utils.config").validate_config
    except (ModuleNotFoundError, AttributeError):
        return False
    if hasattr(validate_config, "checks_policyloss"):
        return True

    @wraps(validate_config)
    def validate_both(config: Any, *args: Any, **kwargs: Any) -> Any:
        result = validate_config(config, *args, **kwargs)
        check_config(config)
        return result

    validate_both.checks_policyloss = True  # type: ignore[attr-defined]
    swap("verl", [(validate_config, validate_both)])
    return True
