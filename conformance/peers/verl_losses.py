"""verl's losses: every function of its registry, `compute_policy_loss`, the value loss,
`agg_loss` and `kl_penalty`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from conformance.inputs import Batch
from conformance.release import current
from conformance.suite import Defect, Function, Inputs, Options, Outputs
from policyloss.compat import verl as ours
from policyloss.compat.arguments import at_least

AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
# Possible counts of a step of four ranks; {} leaves the counting to the call.
WHOLE_STEP = {
    "dp_size": 4,
    "batch_num_tokens": 217,
    "global_batch_size": 24,
    "loss_scale_factor": 9,
}
BATCH_INFO: tuple[dict[str, Any], ...] = ({}, WHOLE_STEP)
CLIPS: tuple[dict[str, Any], ...] = (
    {"clip_ratio": 0.2},
    {"clip_ratio": 0.2, "clip_ratio_low": 0.15, "clip_ratio_high": 0.28, "clip_ratio_c": 1.4},
)
DEFAULTS = {
    "clip_ratio_low": None,
    "clip_ratio_high": None,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
}
POLICY = {
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": -1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.2,
    "ppo_kl_coef": 0.7,
    "dro_beta": 0.3,
}


class Bag(SimpleNamespace):
    """A config: attributes, and `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, or the default."""
        return getattr(self, name, default)


def core() -> Any:
    """verl's module of algorithms, of the release under test."""
    return import_module("verl.trainer.ppo.core_algos")


def config_of(options: Options) -> Any:
    """The config of a call: verl's own class where there is a verl (its losses check the type),
    else a bag of the same fields.
    """
    try:
        kind = core().ActorConfig
    except ModuleNotFoundError:
        kind = Bag
    # Only the fields: building the class would check settings of the trainer that no loss reads.
    config = kind.__new__(kind)
    policy = {**POLICY, **options.get("policy", {})}
    if policy.get("rollout_correction") is not None:
        policy["rollout_correction"] = Bag(**policy["rollout_correction"])
    fields = {
        **DEFAULTS,
        **options["clip"],
        "policy_loss": Bag(**policy),
        "global_batch_info": dict(options["info"]),
    }
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


def mask_of(batch: Batch, options: Options) -> torch.Tensor:
    """The mask in the dtype the options name: verl's own guards act only on a float64 one."""
    return batch.mask.to(getattr(torch, options["mask"])) if options.get("mask") else batch.mask


def policy_inputs(batch: Batch, options: Options) -> Inputs:
    """The four tensors of a policy loss, and weights if the options name them."""
    first = "rollout_log_prob" if options.get("name") == "reinforce" else "old_log_prob"
    inputs: Inputs = {
        first: batch.old_logp,
        "log_prob": batch.logp,
        "advantages": batch.advantages,
        "response_mask": mask_of(batch, options),
    }
    if options.get("weights"):
        weights = 2 * torch.rand(batch.logp.shape, generator=batch.generator(), dtype=torch.float64)
        inputs["rollout_is_weights"] = torch.where(weights < 0.3, 0, weights).to(batch.dtype)
    return inputs


def registered(function: Any, inputs: Inputs, options: Options, **extra: Any) -> Outputs:
    """One call of a registry loss: its loss and its metrics. Seeded, because Clip-Cov draws."""
    torch.manual_seed(7)
    loss, metrics = function(
        loss_agg_mode=options["loss_agg_mode"], config=config_of(options), **inputs, **extra
    )
    return {"loss": loss, **metrics}


def ours_registered(inputs: Inputs, options: Options) -> Outputs:
    """Our function of that name, in the meaning of the release under test."""
    function = (
        ours.compute_policy_loss_reinforce
        if options["name"] == "reinforce"
        else ours.POLICY_LOSSES[options["name"]]
    )
    return registered(function, inputs, options, release=current())


def their_registered(inputs: Inputs, options: Options) -> Outputs:
    """verl's function of that name."""
    name = options["name"]
    function = (
        core().compute_policy_loss_reinforce
        if name == "reinforce"
        else core().POLICY_LOSS_REGISTRY[name]
    )
    return registered(function, inputs, options)


def nothing_valid(mask: torch.Tensor, mode: str, info: Options) -> Defect | None:
    """Whether verl divides by a count of 0."""
    if mask.any() or info or mode == "token-sum":
        return None
    return Defect(
        "no valid token: verl divides 0 by 0 and returns NaN",
        "loss 0 with zero gradient",
        ("loss",),
    )


def mode_defect(mode: str) -> Defect | None:
    """Whether the release under test lacks an aggregation."""
    if mode == "token-sum" and not at_least(current(), "0.9.0"):
        return Defect(
            "token-sum does not exist before 0.9.0", "the sum over tokens, as from 0.9.0 on"
        )
    return None


def registry_defect(options: Options, inputs: Inputs) -> Defect | None:
    """Known defects of the registry losses."""
    name, mode, mask = options["name"], options["loss_agg_mode"], inputs["response_mask"]
    if name == "geo_mean":
        return None
    if name == "sapo" or (name == "gspo" and not at_least(current(), "0.9.1")):
        mode = "seq-mean-token-mean"
    if (
        name == "bypass_mode"
        and mask.any()
        and options["policy"]["rollout_correction"]["rollout_rs"]
    ):
        correction = options["policy"]["rollout_correction"]
        log_ratio = inputs["log_prob"].detach() - inputs["old_log_prob"]
        bounds = correction["rollout_rs"], correction["rollout_rs_threshold"]
        mask, _ = ours.compute_rollout_rejection_mask(log_ratio, mask, *bounds, release=current())
    if name == "bypass_mode" and not inputs["response_mask"].any():
        return None  # both refuse
    return mode_defect(mode) or nothing_valid(mask, mode, options["info"])


def registry_options(name: str) -> list[Options]:
    """Every combination for one loss."""
    combinations = product(AGG_MODES, BATCH_INFO, CLIPS, (False, True))
    base = [
        {"name": name, "loss_agg_mode": mode, "info": info, "clip": clip, "weights": weights}
        for mode, info, clip, weights in combinations
    ]
    if name != "bypass_mode":
        masks = [
            {**base[i], "mask": kind} for i, kind in product((0, 3, 13, 29), ("bool", "int64"))
        ]
        return [*base, *masks]
    rejections: tuple[Options, ...] = (
        {"rollout_rs": None, "rollout_rs_threshold": None},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.3"},
        {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1},
    )
    corrections = [
        {
            "loss_type": kind,
            "rollout_is": level,
            "rollout_is_threshold": 2.0,
            "rollout_is_batch_normalize": normalise,
            **reject,
        }
        for kind, (level, normalise), reject in product(
            ("ppo_clip", "reinforce"),
            ((None, False), ("token", False), ("sequence", True)),
            rejections,
        )
    ]
    plain = [o for o in base if not o["weights"] and o["clip"] is CLIPS[0]]
    return [
        {**plain[i % len(plain)], "policy": {"rollout_correction": c}}
        for i, c in enumerate(corrections * 2)
    ]


def registry_function(name: str) -> Function:
    """The comparison of one loss of the registry."""
    return Function(
        name=f"compute_policy_loss_{name}",
        options=registry_options(name),
        inputs=policy_inputs,
        ours=ours_registered,
        theirs=their_registered,
        differentiate=("log_prob",),
        releases=("0.9.1", "0.9.0") if name == "dro" else None,
        defect=registry_defect,
    )


def _policy_loss(function: Any, inputs: Inputs, options: Options) -> Outputs:
    names = ("loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    settings = {name: value for name, value in options.items() if name != "mask"}
    return dict(zip(names, function(**inputs, **settings), strict=True))


def _agg_inputs(batch: Batch, options: Options) -> Inputs:
    return {"loss_mat": batch.values, "loss_mask": mask_of(batch, options)}


def _agg(function: Any, inputs: Inputs, options: Options) -> Outputs:
    mode, info = options["loss_agg_mode"], options["info"]
    return {"loss": function(**inputs, loss_agg_mode=mode, **info)}


def _agg_defect(options: Options, inputs: Inputs) -> Defect | None:
    mode, info = options["loss_agg_mode"], options.get("info", {})
    mask = inputs["loss_mask"] if "loss_mask" in inputs else inputs["response_mask"]
    return mode_defect(mode) or nothing_valid(mask, mode, info)


def _value_inputs(batch: Batch, options: Options) -> Inputs:
    if options.get("grid"):  # values that often lie exactly at the ends of the clip
        values, old, returns = (
            (8 * x).round() / 8 for x in (batch.values, batch.old_values, batch.returns)
        )
        return {
            "vpreds": values,
            "returns": returns,
            "values": old,
            "response_mask": mask_of(batch, options),
        }
    return {
        "vpreds": batch.values,
        "returns": batch.returns,
        "values": batch.old_values,
        "response_mask": mask_of(batch, options),
    }


def _value(function: Any, inputs: Inputs, options: Options) -> Outputs:
    settings = {
        "cliprange_value": options["cliprange_value"],
        "loss_agg_mode": options["loss_agg_mode"],
        **options["info"],
    }
    return dict(zip(("loss", "vf_clipfrac"), function(**inputs, **settings), strict=True))


def _value_defect(options: Options, inputs: Inputs) -> Defect | None:
    if options["info"] and not at_least(current(), "0.9.0"):
        return Defect(
            "compute_value_loss takes no global counts before 0.9.0", "the counts are honoured"
        )
    return _agg_defect(options, inputs)


def _kl_inputs(batch: Batch, options: Options) -> Inputs:
    return {"logprob": batch.logp, "ref_logprob": batch.ref_logp}


def _kl(function: Any, inputs: Inputs, options: Options) -> Outputs:
    return {"loss": function(**inputs, kl_penalty=options["kl_penalty"])}


KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
_CLIPS = ((0.2, None, None), (0.2, 0.1, None), (None, 0.15, 0.28))

FUNCTIONS: list[Function] = [
    Function(
        name="compute_policy_loss",
        options=[
            {
                "cliprange": c,
                "cliprange_low": low,
                "cliprange_high": high,
                "clip_ratio_c": dual,
                "loss_agg_mode": mode,
            }
            for (c, low, high), dual, mode in product(_CLIPS, (3.0, 1.3), AGG_MODES)
        ]
        + [
            {"cliprange": 0.2, "loss_agg_mode": mode, "mask": kind}
            for mode, kind in product(AGG_MODES, ("bool", "int64"))
        ],
        inputs=policy_inputs,
        ours=lambda i, o: _policy_loss(ours.compute_policy_loss, i, o),
        theirs=lambda i, o: _policy_loss(core().compute_policy_loss, i, o),
        differentiate=("log_prob",),
        defect=_agg_defect,
    ),
    *(registry_function(name) for name in ours.POLICY_LOSSES),
    registry_function("reinforce"),
    Function(
        name="agg_loss",
        options=[
            {"loss_agg_mode": mode, "info": info, "mask": kind}
            for mode, info, kind in product(AGG_MODES, BATCH_INFO, (None, "bool", "int64"))
        ],
        inputs=_agg_inputs,
        ours=lambda i, o: _agg(ours.agg_loss, i, o),
        theirs=lambda i, o: _agg(core().agg_loss, i, o),
        differentiate=("loss_mat",),
        defect=_agg_defect,
    ),
    Function(
        name="compute_value_loss",
        options=[
            {"cliprange_value": clip, "loss_agg_mode": mode, "info": info, "mask": kind}
            for clip, mode, info, kind in product((0.2, 0.5), AGG_MODES, BATCH_INFO, (None, "bool"))
        ]
        + [
            {"cliprange_value": 0.5, "loss_agg_mode": mode, "info": {}, "grid": True}
            for mode in AGG_MODES
        ],
        inputs=_value_inputs,
        ours=lambda i, o: _value(ours.compute_value_loss, i, o),
        theirs=lambda i, o: _value(core().compute_value_loss, i, o),
        differentiate=("vpreds",),
        defect=_value_defect,
    ),
    Function(
        name="kl_penalty",
        options=[{"kl_penalty": f"{name}{plus}"} for name, plus in product(KL_NAMES, ("", "+"))],
        inputs=_kl_inputs,
        ours=partial(_kl, ours.kl_penalty),
        theirs=lambda i, o: _kl(core().kl_penalty, i, o),
        differentiate=("logprob",),
        seeds=3,
    ),
    Function(
        name="kl_penalty_forward",
        options=[{"kl_penalty": name} for name in KL_NAMES],
        inputs=_kl_inputs,
        ours=partial(_kl, ours.kl_penalty_forward),
        theirs=lambda i, o: _kl(core().kl_penalty_forward, i, o),
        differentiate=("logprob",),
    ),
]
