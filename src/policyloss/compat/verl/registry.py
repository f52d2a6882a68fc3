"""Hook into an installed verl: `actor.policy_loss.loss_mode="policyloss/<preset>"`.

verl's workers are separate processes, so the registration must run in each: name
`policyloss.compat.verl.hook` in `actor_rollout_ref.model.external_lib`, and every worker imports
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.catalogue import AnyLoss, as_spec, presets
from policyloss.compat.arguments import drop_in_of
from policyloss.compat.verl.aggregation import KL_ESTIMATORS
from policyloss.compat.verl.calls import CLIPPED, Call, LossResult, either, read
from policyloss.compat.verl.parts import OfThisCall
from policyloss.compat.verl.settings import MODES, PREFIX, warn_of_overridden, with_horizon_of
from policyloss.errors import SpecError
from policyloss.metrics import Metrics
from policyloss.parts.correction import OPSM
from policyloss.parts.kl import KL
from policyloss.parts.precomputed import GivenWeight
from policyloss.parts.trust import CovClip, CovKL
from policyloss.records import Stat
from policyloss.spec import LossSpec
from policyloss.totals import Totals

VerlLoss = Callable[..., LossResult]


def register(specs: Mapping[str, AnyLoss] | None = None) -> tuple[str, ...]:
    """Register every preset, and `specs` by their keys, in verl as "policyloss/<name>"; returns
    those names. The aggregation of the preset decides, not `loss_agg_mode`, with the counts of
    verl's global batch info. Means are reported as "policyloss/…", and verl averages them over
    micro-batches like its metrics. verl passes neither reference nor rollout log-probabilities to a
    policy loss, so a spec's KL must be switched on in verl (`actor.use_kl_loss`), and its rollout
    correction too (`algorithm.rollout_correction`). A loss that verl cannot serve raises an error
    when it is called, which names the setting. One warning names the settings of the actor that
    were changed and that the spec overrides (clip_ratio, loss_agg_mode and the like). A missing
    horizon is taken from `actor.loss_scale_factor`.
    """
    register_policy_loss = import_module("verl.trainer.ppo.core_algos").register_policy_loss
    named = {**{name: name for name in presets()}, **(specs or {})}
    for name, spec in named.items():
        loss = as_verl_loss(name, as_spec(spec, f"register: {name!r}"))
        register_policy_loss(f"{PREFIX}{name}")(loss)
    return tuple(f"{PREFIX}{name}" for name in named)


def as_verl_loss(name: str, spec: LossSpec) -> VerlLoss:
    """`spec` as a function of verl's registry."""

    @drop_in_of(Call)
    def loss(call: Call) -> LossResult:
        complete_spec = with_horizon_of(call.config, name, spec)
        served = _served(name, complete_spec, call.config, call.rollout_is_weights)
        _check_average(name, complete_spec, call.loss_agg_mode)
        warn_of_overridden(name, complete_spec, call.config, call.loss_agg_mode)
        info = either(read(call.config, "global_batch_info"), {})
        out = call.loss_of(served, step_totals(call.response_mask, info))
        # verl averages what a loss reports over micro-batches: right for means, wrong for counts,
        # sums and extremes.
        means = Metrics(
            {key: record for key, record in out.metrics.items() if isinstance(record, Stat)}
        )
        clips = all(f"clip_fraction_{limit}" in out.metrics for limit in CLIPPED)
        return out.loss, {
            **{f"{PREFIX}{key}": value for key, value in means.compute().items()},
            **call.report(call.share(out, CLIPPED) if clips else None, None, call.drift()),
        }

    loss.__name__ = f"policyloss_{name}"
    loss.__doc__ = f"policyloss: {name}."
    return loss


def step_totals(mask: Tensor, info: Mapping[str, Any]) -> Totals:
    """verl's counts of the optimizer step as totals; this call's where verl has none."""
    totals = Totals.of_call(mask, either(info.get("dp_size"), 1))
    for ours, theirs in (("tokens", "batch_num_tokens"), ("sequences", "global_batch_size")):
        if info.get(theirs) is not None:
            totals = replace(totals, **{ours: info[theirs]})
        elif totals.dp_size > 1:
            raise SpecError(
                f"global_batch_info has dp_size={totals.dp_size} but no {theirs}; verl must count "
                "the whole step."
            )
    return totals


def _served(name: str, spec: LossSpec, config: Any, weights: Tensor | None) -> LossSpec:
    """`spec` without the terms that verl itself adds; an error where verl would not add them."""
    _check_kl(name, spec.kl, config)
    _check_entropy(name, spec.entropy_coef, config)
    spec = spec.replace(kl=None, entropy_coef=0.0)
    if isinstance(spec.trust, (CovClip, CovKL)):
        # verl calls a loss one micro-batch at a time and cannot measure the step first; verl's
        # losses have the same limit.
        spec = spec.replace(trust=OfThisCall(spec.trust))
    kept = tuple(
        part for part in spec.correction if isinstance(part, OPSM) and part.source == "old"
    )
    if kept != spec.correction:
        if weights is None:
            parts = ", ".join(type(part).__name__ for part in spec.correction)
            raise SpecError(
                f"policyloss/{name} corrects for the rollout engine ({parts}), but verl passes no "
                "rollout log-probabilities to a policy loss; set algorithm.rollout_correction "
                "(rollout_is, rollout_rs), which makes the weights before it."
            )
        spec = spec.replace(correction=kept, rejected=spec.rejected if kept else "keep")
    missing = [argument for argument in spec.reads if argument != "old_logp"]
    if missing:
        raise SpecError(
            f"policyloss/{name} reads {', '.join(missing)}, which verl does not pass to a policy "
            "loss; register a spec that reads old_logp alone, such as "
            f"preset({name!r}).replace(…)."
        )
    return spec if weights is None else spec.replace(correction=(*kept, GivenWeight(weights)))


def _check_kl(name: str, kl: Any, config: Any) -> None:
    """verl adds the KL term itself: check that it does, with the same estimator and coefficient."""
    if kl is None:
        return
    if not isinstance(kl, KL) or kl.anchor != "ref" or kl.reads_ratio or kl.grad == "score":
        raise SpecError(
            f"policyloss/{name} has a KL term that verl cannot add ({kl!r}); register a spec with "
            "kl=None or another."
        )
    plus = "+" if kl.grad == "k2" else ""
    wanted = [f"{theirs}{plus}" for theirs, ours in KL_ESTIMATORS.items() if ours == kl.estimator]
    used = read(config, "use_kl_loss", False)
    kind = read(config, "kl_loss_type", "")
    coef = read(config, "kl_loss_coef", None)
    if not used or kind not in wanted or coef != kl.coef:
        raise SpecError(
            f"policyloss/{name} has a KL term, which verl adds itself: set actor.use_kl_loss=true, "
            f"actor.kl_loss_type={wanted[-1]}, actor.kl_loss_coef={kl.coef} (seen: {used}, "
            f"{kind!r}, {coef}), or register a spec without it: register({{'mine': "
            f"preset({name!r}).replace(kl=None)}})."
        )


def _check_entropy(name: str, coef: float, config: Any) -> None:
    """verl adds the entropy bonus itself: check that it does."""
    if coef and read(config, "entropy_coeff", 0.0) != coef:
        raise SpecError(
            f"policyloss/{name} has an entropy bonus, which verl adds itself: set "
            f"actor.entropy_coeff={coef}."
        )


def _check_average(name: str, spec: LossSpec, loss_agg_mode: str) -> None:
    """Check that verl averages the terms that it adds as the spec averages the policy term. verl
    averages KL and entropy by actor.loss_agg_mode, and the spec averages the policy term.
    """
    mode = MODES.get(type(spec.aggregate))
    if (spec.kl is not None or spec.entropy_coef) and loss_agg_mode != mode:
        fix = (
            f"set actor.loss_agg_mode={mode}" if mode else "register a spec without KL and entropy"
        )
        raise SpecError(
            f"policyloss/{name} is averaged by {spec.aggregate!r}, but verl would average the KL "
            f"and entropy it adds by actor.loss_agg_mode={loss_agg_mode!r}; {fix}."
        )
