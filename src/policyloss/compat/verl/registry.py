"""Hooks into an installed verl: `register` adds losses to the registry of
`verl.trainer.ppo.core_algos`, and `install` replaces functions of verl by the drop-ins.

verl's workers are separate processes, so a hook must run in each of them: name
`policyloss.compat.verl.hook` in `actor_rollout_ref.model.external_lib`, and every worker imports
it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, update_wrapper
from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.catalogue import AnyLoss, as_spec, presets
from policyloss.compat.arguments import drop_in_of
from policyloss.compat.engines import PREFIX, mean_records
from policyloss.compat.hooks import Patch, installed_version
from policyloss.compat.verl import advantages, aggregation, losses, rollout_correction, settings
from policyloss.compat.verl.aggregation import KL_ESTIMATORS, MODES
from policyloss.compat.verl.losses import CLIPPED, LossCall, LossResult
from policyloss.compat.verl.parts import OfThisCall
from policyloss.errors import SpecError
from policyloss.metrics import Metrics
from policyloss.parts.correction import OPSM, GivenWeight
from policyloss.parts.kl import KL
from policyloss.parts.trust import CovClip, CovKL
from policyloss.records import Record
from policyloss.spec import LossSpec
from policyloss.totals import Totals

CORE, ROLLOUT = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper"
REGISTRIES = ("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY")
_patch = Patch("verl")
VerlLoss = Callable[..., LossResult]


def register(specs: Mapping[str, AnyLoss] | None = None) -> tuple[str, ...]:
    """Register every preset, and `specs` by their keys, in verl as "policyloss/<name>"; returns
    those names.

    The spec chooses the average, not `loss_agg_mode`; its counts come from verl's global batch
    info. A missing horizon is taken from `actor.loss_scale_factor`. verl passes neither reference
    nor rollout log-probabilities to a policy loss, so switch on a spec's KL (`actor.use_kl_loss`)
    and its rollout correction (`algorithm.rollout_correction`) in verl. A loss that verl cannot run
    raises an error at its first call, which names the setting. One warning lists the settings of
    the actor that you changed and that the spec overrides (clip_ratio, loss_agg_mode and the like).
    Means are reported as "policyloss/…"; verl averages them over micro-batches.
    """
    register_policy_loss = import_module(CORE).register_policy_loss
    named = {**{name: name for name in presets()}, **(specs or {})}
    for name, spec in named.items():
        loss = as_verl_loss(name, as_spec(spec, f"register: {name!r}"))
        register_policy_loss(f"{PREFIX}{name}")(loss)
    return tuple(f"{PREFIX}{name}" for name in named)


def as_verl_loss(name: str, spec: LossSpec) -> VerlLoss:
    """Wrap `spec` in a function for verl's registry."""

    @drop_in_of(LossCall)
    def loss(call: LossCall) -> LossResult:
        complete_spec = settings.with_horizon_of(call.config, name, spec)
        _check_terms_of_verl(name, complete_spec, call.config, call.loss_agg_mode)
        policy_term = _policy_term(name, complete_spec, call.rollout_is_weights)
        settings.warn_of_overridden(name, complete_spec, call.config, call.loss_agg_mode)
        info = settings.either(settings.read_field(call.config, "global_batch_info"), {})
        out = call.loss_of(policy_term, step_totals(call.response_mask, info))
        means: dict[str, Record] = {**mean_records(out.metrics)}
        clips = all(f"clip_fraction_{limit}" in out.metrics for limit in CLIPPED)
        return out.loss, {
            **Metrics(means).compute(),
            **call.report(call.share(out, CLIPPED) if clips else None, None, call.drift()),
        }

    loss.__name__ = f"policyloss_{name}"
    loss.__doc__ = f"policyloss: {name}."
    return loss


def step_totals(mask: Tensor, info: Mapping[str, Any]) -> Totals:
    """The step's totals from verl's `global_batch_info`, or of this call where it is empty."""
    totals = Totals.of_call(mask, settings.either(info.get("dp_size"), 1))
    for ours, theirs in (("tokens", "batch_num_tokens"), ("sequences", "global_batch_size")):
        if info.get(theirs) is not None:
            totals = replace(totals, **{ours: info[theirs]})
        elif totals.dp_size > 1:
            raise SpecError(
                f"global_batch_info has dp_size={totals.dp_size} but no {theirs}; with several "
                "ranks verl must pass the counts of the complete step."
            )
    return totals


def _policy_term(name: str, spec: LossSpec, weights: Tensor | None) -> LossSpec:
    """`spec` without the terms that verl adds itself, and with verl's rollout weights."""
    spec = spec.replace(kl=None, entropy_coef=0.0)
    if isinstance(spec.trust, (CovClip, CovKL)):
        # verl calls a loss once per micro-batch, so statistics of the step are not available; its
        # own losses have the same limit.
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
                "(rollout_is, rollout_rs), which computes the weights before it."
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


def _check_terms_of_verl(name: str, spec: LossSpec, config: Any, loss_agg_mode: str) -> None:
    """Raise unless verl adds the KL and the entropy bonus of `spec`, and averages them alike."""
    if spec.kl is not None:
        _check_kl(name, spec.kl, config)
    if spec.entropy_coef and settings.read_field(config, "entropy_coeff", 0.0) != spec.entropy_coef:
        raise SpecError(
            f"policyloss/{name} has an entropy bonus, which verl adds itself: set "
            f"actor.entropy_coeff={spec.entropy_coef}."
        )
    mode = MODES.get(type(spec.aggregate))
    if (spec.kl is not None or spec.entropy_coef) and loss_agg_mode != mode:
        fix = (
            f"set actor.loss_agg_mode={mode}" if mode else "register a spec without KL and entropy"
        )
        raise SpecError(
            f"policyloss/{name} is averaged by {spec.aggregate!r}, but verl would average the KL "
            f"and entropy it adds by actor.loss_agg_mode={loss_agg_mode!r}; {fix}."
        )


def _check_kl(name: str, kl: Any, config: Any) -> None:
    if not isinstance(kl, KL) or kl.anchor != "ref" or kl.reads_ratio or kl.grad == "score":
        raise SpecError(
            f"policyloss/{name} has a KL term that verl cannot add ({kl!r}); register a spec with "
            "kl=None or another."
        )
    plus = "+" if kl.grad == "k2" else ""
    kinds = [f"{theirs}{plus}" for theirs, ours in KL_ESTIMATORS.items() if ours == kl.estimator]
    used = settings.read_field(config, "use_kl_loss", False)
    kind = settings.read_field(config, "kl_loss_type", "")
    coef = settings.read_field(config, "kl_loss_coef")
    if not used or kind not in kinds or coef != kl.coef:
        raise SpecError(
            f"policyloss/{name} has a KL term, which verl adds itself: set actor.use_kl_loss=true, "
            f"actor.kl_loss_type={kinds[-1]}, actor.kl_loss_coef={kl.coef} (got {used}, {kind!r}, "
            f"{coef}), or register a spec without it: register({{'mine': "
            f"preset({name!r}).replace(kl=None)}})."
        )


def install(release: str | None = None) -> tuple[str, ...]:
    """Let an installed verl compute its losses, advantages, averages, KL and rollout correction
    with this library; returns the names that were replaced.

    Every module of verl that has bound one of these functions gets ours, and so do the registries.
    They follow the installed release, or `release` if the package has no metadata.
    Functions that this release lacks are not added. A second call changes nothing; `uninstall`
    undoes it. verl's workers are separate processes, so call it in each.
    """
    version = release or installed_version("verl")
    settings.since(version, settings.OLDEST)
    if not _patch.pairs:
        core, rollout = import_module(CORE), import_module(ROLLOUT)
        _patch.pairs.extend(_pairs(core, (losses, aggregation, advantages), version))
        _patch.pairs.extend(_pairs(rollout, (rollout_correction,), version))
    _set_registries(_patch.pairs)
    return tuple(_patch.apply())


def uninstall() -> None:
    """Restore verl's functions."""
    _set_registries([(new, old) for old, new in _patch.pairs])
    _patch.undo()


def _pairs(module: Any, our_modules: tuple[Any, ...], version: str) -> list[tuple[Any, Any]]:
    """(verl's, ours) for each function of `module` that one of our modules has too."""
    pairs = []
    for name, theirs in inspect.getmembers(module, callable):
        ours = next((getattr(m, name) for m in our_modules if hasattr(m, name)), None)
        if inspect.isfunction(ours) and ours.__module__.startswith("policyloss.compat.verl"):
            if "release" in inspect.signature(ours).parameters:
                ours = update_wrapper(partial(ours, release=version), ours)
            pairs.append((theirs, ours))
    return pairs


def _set_registries(pairs: list[tuple[Any, Any]]) -> None:
    core = import_module(CORE)
    for registry in (getattr(core, name, {}) for name in REGISTRIES):
        for name, function in registry.items():
            registry[name] = next((new for old, new in pairs if old is function), function)
