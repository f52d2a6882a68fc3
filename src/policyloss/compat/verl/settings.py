"""verl's settings: fields of its configs, and their effect on a loss of this library. A preset has
its own numbers, so verl's settings for the same numbers have no effect; one warning names the
settings that were changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from importlib import import_module
from typing import Any

from policyloss.arguments import check_number, check_scalar
from policyloss.catalogue import PRESETS
from policyloss.compat.arguments import at_least
from policyloss.compat.hooks import check_advantages, default_of, swap, warn_once
from policyloss.errors import InputError, SpecError
from policyloss.parts import aggregate
from policyloss.spec import LossSpec

PREFIX = "policyloss/"
OLDEST = "0.8.0"
# verl's names for the averages that a preset may have.
MODES = {
    aggregate.TokenMean: "token-mean",
    aggregate.TokenSum: "token-sum",
    aggregate.SeqMeanTokenSum: "seq-mean-token-sum",
    aggregate.SeqMeanTokenMean: "seq-mean-token-mean",
    aggregate.SeqMeanTokenSumNorm: "seq-mean-token-sum-norm",
}
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
    """Whether `release` (None: the current one) is `version` or newer; raises if it is older than
    `OLDEST`.
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
    """The estimator of `policyloss.advantage` of a complete configuration, or None; and the setting
    that selects it.
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
