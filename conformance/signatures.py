"""Signature pins: our callables have the frameworks' parameters, in order, with their defaults,
and return as many values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from conformance import forms, returned
from conformance.environments import Peer
from conformance.suite import Function

CORE, ROLLOUT = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper"
ADD_FUSED_HEAD = "trl.trainer.utils:add_fused_lm_head"
ACTOR_FORWARD = "openrlhf.models.actor:Actor.forward"
TORCH_HEAD = "verl.utils.experimental.torch_functional"
REQUIRED = "required"
Parameters = list[list[str]]  # name, kind, default as Python writes it
Described = dict[str, Any]


@dataclass(frozen=True)
class Pin:
    """A callable of a framework and ours. extra: keyword-only parameters that ours may have
    besides; all others are the same.
    """

    theirs: str
    ours: str
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Registry:
    """A table of a framework and ours: the same names,
    and under each a callable with the same parameters.
    """

    theirs: str
    ours: str
    extra: tuple[str, ...] = ("release",)


def _verl(module: str, name: str, *extra: str) -> Pin:
    return Pin(f"{module}:{name}", f"policyloss.compat.verl:{name}", extra)


def _openrlhf(module: str, name: str, *extra: str) -> Pin:
    return Pin(f"openrlhf.models.{module}:{name}", f"policyloss.compat.openrlhf:{name}", extra)


PINS: dict[str, tuple[Pin, ...]] = {
    "verl": (
        _verl(CORE, "compute_policy_loss", "log_clamp"),
        _verl(CORE, "compute_policy_loss_reinforce", "release"),
        _verl(CORE, "compute_value_loss"),
        _verl(CORE, "agg_loss"),
        _verl(CORE, "kl_penalty"),
        _verl(CORE, "kl_penalty_forward"),
        _verl(ROLLOUT, "compute_rollout_correction_weights", "release"),
        _verl(ROLLOUT, "compute_rollout_rejection_mask", "release"),
        _verl(ROLLOUT, "compute_rollout_correction_and_rejection_mask", "release"),
        _verl(ROLLOUT, "compute_rollout_correction_and_add_to_batch", "release"),
        _verl(ROLLOUT, "compute_offpolicy_metrics"),
        _verl(ROLLOUT, "compute_is_metrics", "release"),
        _verl(ROLLOUT, "compute_rs_metrics"),
        _verl(ROLLOUT, "compute_rollout_corr_metrics_from_logprobs"),
        _verl(ROLLOUT, "apply_bypass_mode"),
        _verl(TORCH_HEAD, "FusedLinearForPPO.forward"),
    ),
    "openrlhf": (
        _openrlhf(
            "loss",
            "PolicyLoss.__init__",
            "enable_vllm_is_correction",
            "vllm_is_truncated_threshold",
            "vllm_is_correction_type",
            "release",
        ),
        _openrlhf("loss", "PolicyLoss.forward"),
        _openrlhf("loss", "ValueLoss.__init__"),
        _openrlhf("loss", "ValueLoss.forward"),
        _openrlhf("loss", "aggregate_loss"),
        _openrlhf("utils", "compute_approx_kl"),
    ),
}
# Methods that our subclass of TRL's trainer overrides or passes through without a signature of its
# own, and functions that our heads replace: theirs must be as recorded.
HOOKS: dict[str, tuple[str, ...]] = {
    "trl": (
        "trl:GRPOTrainer.__init__",
        "trl:GRPOTrainer._compute_loss",
        "trl:GRPOTrainer._get_per_token_logps_and_entropies",
        "trl:GRPOTrainer.get_high_entropy_mask",
        ADD_FUSED_HEAD,
    ),
    "openrlhf": (ACTOR_FORWARD,),
}
REGISTRIES: dict[str, tuple[Registry, ...]] = {
    "verl": (
        Registry(f"{CORE}:POLICY_LOSS_REGISTRY", "policyloss.compat.verl:POLICY_LOSSES"),
        Registry(f"{CORE}:ADV_ESTIMATOR_REGISTRY", "policyloss.compat.verl:ADVANTAGE_ESTIMATORS"),
    )
}


def resolve(path: str) -> Any:
    """The object that "package.module:name.of.thing" names."""
    module, _, names = path.partition(":")
    found = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def entries(path: str) -> dict[str, Callable[..., Any]]:
    """A registry by name (a framework's keys may be members of an enumeration), without our own
    registrations.
    """
    named = {str(getattr(key, "value", key)): value for key, value in resolve(path).items()}
    return {name: value for name, value in named.items() if not name.startswith("policyloss/")}


def their_calls(peer: str, older: bool = False) -> dict[str, Callable[..., Any]]:
    """Every pinned callable of the installed framework. older: it may lack some."""
    calls: dict[str, Callable[..., Any]] = {}
    for path in (*(pin.theirs for pin in PINS.get(peer, ())), *HOOKS.get(peer, ())):
        try:
            calls[path] = resolve(path)
        except (AttributeError, ModuleNotFoundError):
            if not older:
                raise
    for table in REGISTRIES.get(peer, ()):
        calls |= {f"{table.theirs}[{name}]": call for name, call in entries(table.theirs).items()}
    return calls


def our_calls(peer: str) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
    """Our callable for each of theirs, and the additional parameters it may have."""
    calls = {pin.theirs: (resolve(pin.ours), pin.extra) for pin in PINS.get(peer, ())}
    for table in REGISTRIES.get(peer, ()):
        calls |= {
            f"{table.theirs}[{name}]": (call, table.extra)
            for name, call in entries(table.ours).items()
        }
    return calls


def parameters(call: Callable[..., Any]) -> Parameters:
    """The parameters of a callable but `self`: name, kind, default."""
    found = [p for p in inspect.signature(call).parameters.values() if p.name != "self"]
    return [
        [p.name, p.kind.name, REQUIRED if p.default is p.empty else repr(p.default)] for p in found
    ]


def describe(peer: str, functions: Iterable[Function], older: bool = False) -> Described:
    """The pinned callables of the installed framework: their parameters, and their return values in
    some cases of the functions. older: as in `their_calls`.
    """
    calls = their_calls(peer, older)
    seen = returned.observe(functions, calls, "theirs")
    described: Described = {
        name: {"parameters": parameters(call), "returns": sorted(seen[name])}
        for name, call in calls.items()
    }
    return {"callables": described} | ({"fields": forms.trl_fields()} if peer == "trl" else {})


def check_installed(
    peer: Peer, release: str, functions: Iterable[Function], recorded: Described
) -> list[str]:
    """The differences between the installed framework and ours; for `peer.others`, whose parameters
    may differ, only the return values.
    """
    described = describe(peer.name, functions, older=release in peer.others)
    problems = forms.openrlhf_constructor(release) if peer.name == "openrlhf" else []
    if release in peer.others:
        return problems + check_returns(peer.name, described, functions, seen_only=True)
    return (
        problems
        + check(peer.name, described, functions)
        + check_hooks(peer.name, described, recorded)
    )


def check(peer: str, described: Described, functions: Iterable[Function]) -> list[str]:
    """Everything in which the described framework differs from ours:
    parameters, registries, return values, fields.
    """
    fields = forms.field_problems(described["fields"]) if peer == "trl" else []
    return check_parameters(peer, described) + check_returns(peer, described, functions) + fields


def check_parameters(peer: str, described: Described) -> list[str]:
    """Callables whose parameters differ from ours, and callables that only one side has."""
    theirs, ours = described["callables"], our_calls(peer)
    problems = []
    for name in {**theirs, **ours}:
        if name not in HOOKS.get(peer, ()):
            call, extra = ours.get(name, (None, ()))
            problems += drift(
                name,
                theirs.get(name, {}).get("parameters"),
                None if call is None else parameters(call),
                extra,
            )
    return problems


def check_returns(
    peer: str, described: Described, functions: Iterable[Function], seen_only: bool = False
) -> list[str]:
    """Callables that return another number of values on our side, in the same cases.

    seen_only: leave out callables without a recorded return on one side, because other releases
    call other functions inside.
    """
    theirs = {name: found["returns"] for name, found in described["callables"].items()}
    calls = {name: call for name, (call, _) in our_calls(peer).items() if name in theirs}
    ours = returned.observe(functions, calls, "ours")
    problems = []
    for name in calls:
        a, b = theirs[name], sorted(ours[name])
        if a != b and not (seen_only and not (a and b)):
            problems.append(
                f"{name}: theirs returns {' or '.join(a) or 'nothing'}, ours "
                f"{' or '.join(b) or 'nothing'}"
            )
    return problems


def check_hooks(peer: str, described: Described, recorded: Described) -> list[str]:
    """Names that our subclasses rely on and that differ from the record."""
    changed = [
        name
        for name in HOOKS.get(peer, ())
        if described["callables"][name] != recorded["callables"].get(name)
    ]
    return [
        f"{name} is not as it was recorded: {_shown(described['callables'][name]['parameters'])}"
        for name in changed
    ]


def drift(
    name: str, theirs: Parameters | None, ours: Parameters | None, extra: tuple[str, ...] = ()
) -> list[str]:
    """How our parameters differ from theirs; nothing if they do not."""
    if theirs is None or ours is None:
        return [f"{name}: only {'we have' if theirs is None else 'the framework has'} it"]
    own = [p for p in ours if not (p[0] in extra and p[1] == "KEYWORD_ONLY")]
    return [] if own == theirs else [f"{name}: theirs {_shown(theirs)}; ours {_shown(own)}"]


def _shown(found: Parameters) -> str:
    return (
        "("
        + ", ".join(
            name if default == REQUIRED else f"{name}={default}" for name, _, default in found
        )
        + ")"
    )
