"""OpenRLHF's losses and ours: `openrlhf.models.loss` and `openrlhf.models.utils`."""

from __future__ import annotations

import importlib
from itertools import product
from typing import Any

import torch

from conformance.inputs import Batch
from conformance.release import current
from conformance.suite import GRADIENT, Defect, Function, Inputs, Options, Outputs
from policyloss.compat import openrlhf as ours

CURRENT = ("0.11.2",)
OLDER = ("0.11.1", "0.11.0")  # with the older correction arguments
UNBIASED = ("0.11.1", "0.11.2")
NAMES = ("loss", "clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")
COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size")

# The correction arguments of 0.11.2, and of earlier releases.
GATES: list[Options] = [{}] + [
    {
        "is_correction_level": level,
        "is_correction_mode": mode,
        "is_correction_gating": gating,
        "is_correction_threshold": threshold,
    }
    for level, mode, gating, threshold in (
        ("token", "mask", "ratio", [0.5, 5.0]),
        ("token", "mask", "ratio", [0.9, 1.1]),
        ("token", "clip", "ratio", [0.5, 5.0]),
        ("token", "clip", "ratio", [0.9, 1.1]),
        ("seq", "mask", "ratio", [0.5, 5.0]),
        ("seq", "mask", "ratio", [0.9, 1.1]),
        ("token", "mask", "binary_kl", [0.0, 0.05]),
        ("token", "mask", "binary_kl", [0.0, 0.002]),
        ("seq", "mask", "binary_kl", [0.0, 0.05]),
        ("seq", "mask", "binary_kl", [-1.0, 0.02]),
        ("token", "mask", "tv", [0.0, 0.1]),
        ("token", "mask", "tv", [0.0, 0.02]),
        ("seq", "mask", "tv", [0.0, 0.1]),
    )
]
VLLM: list[Options] = [{}, {"enable_vllm_is_correction": False}] + [
    {
        "enable_vllm_is_correction": True,
        "vllm_is_truncated_threshold": threshold,
        "vllm_is_correction_type": kind,
    }
    for kind, threshold in product(
        ("tis", "icepop", "seq-mask-tis"), ([0.5, 5.0], [0.9, 1.1], [0.99, 1.01])
    )
]
# Options that OpenRLHF and we refuse.
WRONG: list[Options] = [
    {"is_correction_level": "sequence"},
    {"is_correction_level": "seq", "is_correction_mode": "clip"},
    {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_gating": "tv"},
    {
        "is_correction_level": "token",
        "is_correction_gating": "tv",
        "is_correction_threshold": [0.5, 5.0],
    },
    {"policy_loss_type": "grpo"},
    {"dual_clip": 1.0},
]


def _options(corrections: list[Options]) -> list[Options]:
    """Every combination of the loss's own options and a correction;
    then the masks of other dtypes, or none.
    """
    sizes = ([0.2, 0.2], [0.1, 0.28])
    found: list[Options] = []
    for kind, dual, token_level, counted, (low, high), words in product(
        ("ppo", "gspo"), (None, 1.3, 3.0), (True, False), (False, True), sizes, corrections
    ):
        if kind == "gspo" and words not in corrections[:3]:
            continue  # GSPO only tests whether there is a correction
        sizing = {"clip_eps_low": low, "clip_eps_high": high, "dual_clip": dual}
        found.append(
            {
                "init": {
                    **sizing,
                    "token_level_loss": token_level,
                    "policy_loss_type": kind,
                    **words,
                },
                "counts": counted,
            }
        )
    for token_level, counted, mask, words in product(
        (True, False), (False, True), ("bool", "int64", None), corrections
    ):
        found.append(
            {"init": {"token_level_loss": token_level, **words}, "counts": counted, "mask": mask}
        )
    return found


def _mask(batch: Batch, options: Options) -> torch.Tensor | None:
    dtype = options.get("mask", "as the rest")
    if dtype is None:
        return None
    return batch.mask.to({"bool": torch.bool, "int64": torch.int64}.get(dtype, batch.dtype))


def _counts(batch: Batch, options: Options) -> Inputs:
    """Counts of a step that this batch is a part of."""
    if not options.get("counts"):
        return {}
    return {
        "dp_size": 3,
        "batch_num_tokens": 2.5 * float(batch.mask.sum()) + 7,
        "global_batch_size": 2 * batch.mask.shape[0] + 1,
    }


def _policy_inputs(batch: Batch, options: Options) -> Inputs:
    return {
        "log_probs": batch.logp,
        "old_log_probs": batch.old_logp,
        "advantages": batch.advantages,
        "action_mask": _mask(batch, options),
        "rollout_log_probs": batch.rollout_logp,
        **_counts(batch, options),
    }


def _theirs(name: str) -> Any:
    module = "utils" if name == "compute_approx_kl" else "loss"
    return getattr(importlib.import_module(f"openrlhf.models.{module}"), name)


def _named(values: tuple[Any, ...]) -> Outputs:
    return dict(zip(NAMES, values, strict=False)) | {"values": len(values)}


def _their_policy_loss(inputs: Inputs, options: Options) -> Outputs:
    return _named(_theirs("PolicyLoss")(**options["init"])(**inputs))


def _our_policy_loss(inputs: Inputs, options: Options) -> Outputs:
    return _named(ours.PolicyLoss(**options["init"], release=current())(**inputs))


def _installed_policy_loss(inputs: Inputs, options: Options) -> Outputs:
    """The loss of OpenRLHF itself after `install()`."""
    ours.install(current())
    try:
        loss = importlib.import_module("openrlhf.models").PolicyLoss(**options["init"])
        assert isinstance(loss, ours.PolicyLoss), "openrlhf.models.PolicyLoss is ours now"
        return _named(loss(**inputs))
    finally:
        ours.uninstall()


NOTHING = "nothing valid: 0 / 0 is NaN"


def _policy_defects(options: Options, inputs: Inputs) -> list[Defect]:
    mask, init = inputs["action_mask"], options["init"]
    if mask is None or init in WRONG:
        return []
    if mask.any():
        return []
    shares = [
        name
        for name in NAMES[1:]
        if not (name == "is_filter_ratio" and init.get("is_correction_level") == "seq")
    ]
    outputs = shares if options.get("counts") else ["loss", GRADIENT, *shares]
    instead = "a loss of 0 with a zero gradient; means of nothing are 0"
    return [Defect(NOTHING, instead, tuple(outputs))]


def _value_inputs(batch: Batch, options: Options) -> Inputs:
    values = {"values": batch.values, "old_values": batch.old_values, "returns": batch.returns}
    return {**values, "action_mask": _mask(batch, options), **_counts(batch, options)}


def _their_value_loss(inputs: Inputs, options: Options) -> Outputs:
    return {"loss": _theirs("ValueLoss")(**options["init"])(**inputs)}


def _our_value_loss(inputs: Inputs, options: Options) -> Outputs:
    return {"loss": ours.ValueLoss(**options["init"])(**inputs)}


def _loss_defects(options: Options, inputs: Inputs) -> list[Defect]:
    """Defects of functions that return only the loss."""
    named = {"action_mask": inputs.get("action_mask", inputs.get("loss_mask"))}
    whole = {"init": options.get("init", options), "counts": options.get("counts")}
    return [
        d for d in _policy_defects(whole, named) if d.outputs is not None and "loss" in d.outputs
    ]


_VALUE_OPTIONS: list[Options] = [
    {"init": {"clip_eps": clip, "token_level_loss": token_level}, "counts": counted, "mask": mask}
    for clip, token_level, counted, mask in product(
        (None, 0.1, 0.5), (True, False), (False, True), ("as the rest", "bool", "int64", None)
    )
]


def _aggregate_inputs(batch: Batch, options: Options) -> Inputs:
    return {"loss": batch.logp, "loss_mask": _mask(batch, options), **_counts(batch, options)}


def _their_aggregate(inputs: Inputs, options: Options) -> Outputs:
    return {
        "loss": _theirs("aggregate_loss")(**inputs, token_level_loss=options["token_level_loss"])
    }


def _our_aggregate(inputs: Inputs, options: Options) -> Outputs:
    return {"loss": ours.aggregate_loss(**inputs, token_level_loss=options["token_level_loss"])}


def _kl_inputs(batch: Batch, options: Options) -> Inputs:
    inputs = {"log_probs": batch.logp, "log_probs_base": batch.ref_logp}
    return {**inputs, "log_probs_old": batch.old_logp} if options.get("old") else inputs


def _kl_words(options: Options) -> Options:
    return {name: value for name, value in options.items() if name != "old"}


def _their_kl(inputs: Inputs, options: Options) -> Outputs:
    return {"loss": _theirs("compute_approx_kl")(**inputs, **_kl_words(options))}


def _our_kl(inputs: Inputs, options: Options) -> Outputs:
    return {"loss": ours.compute_approx_kl(**inputs, **_kl_words(options))}


ROUNDED = (
    "adds w·k2 to the value and takes it off again, in float32: the value is rounded to the size "
    "of w·k2"
)


def _kl_defects(options: Options, inputs: Inputs) -> list[Defect]:
    """float64 inputs are rounded to float32 inside: their rounding shows where ours differs. In
    float32 it shows only next to a large w·k2.
    """
    wide = inputs["log_probs"].dtype == torch.float64
    if options["kl_estimator"] not in ("k1", "k2", "k3"):
        return []
    if options.get("unbiased_gradient"):
        d = inputs["log_probs"] - inputs["log_probs_base"]
        w = (
            (inputs["log_probs"] - inputs["log_probs_old"]).exp().clamp(max=10)
            if options.get("old")
            else torch.ones(())
        )
        if wide or (w * d**2 / 2).max() > 8:
            return [Defect(ROUNDED, "the estimator's value as it is", ("loss",))]
    return []


def _policy(
    name: str, options: list[Options], releases: tuple[str, ...], **changes: Any
) -> Function:
    fields: dict[str, Any] = {
        "ours": _our_policy_loss,
        "theirs": _their_policy_loss,
        "differentiate": ("log_probs",),
    }
    fields |= {"defect": _policy_defects, "releases": releases, **changes}
    return Function(name, options, _policy_inputs, **fields)


def _few(corrections: list[Options]) -> list[Options]:
    return [
        {
            "init": {"policy_loss_type": kind, "token_level_loss": token_level, **words},
            "counts": False,
        }
        for kind, token_level, words in product(("ppo", "gspo"), (True, False), corrections)
    ]


_WRONG: list[Options] = [{"init": init, "counts": False} for init in WRONG]
_INSTALLED: dict[str, Any] = {
    "ours": _installed_policy_loss,
    "kinds": ("ragged", "empty_rows", "extreme"),
}
ESTIMATORS: list[Options] = [{"kl_estimator": name} for name in ("k1", "k2", "k3", "k4")]

FUNCTIONS = [
    _policy("PolicyLoss", _options(GATES) + _WRONG, CURRENT),
    _policy("PolicyLoss", _options(VLLM), OLDER),
    _policy("install(): openrlhf.models.PolicyLoss", _few(GATES), CURRENT, **_INSTALLED),
    _policy("install(): openrlhf.models.PolicyLoss", _few(VLLM), OLDER, **_INSTALLED),
    Function(
        "ValueLoss",
        _VALUE_OPTIONS,
        _value_inputs,
        _our_value_loss,
        _their_value_loss,
        differentiate=("values",),
        defect=_loss_defects,
    ),
    Function(
        "aggregate_loss",
        [
            {"token_level_loss": token_level, "counts": counted, "mask": mask}
            for token_level, counted, mask in product(
                (True, False), (False, True), ("as the rest", "bool", "int64", None)
            )
        ],
        _aggregate_inputs,
        _our_aggregate,
        _their_aggregate,
        differentiate=("loss",),
        defect=_loss_defects,
    ),
    Function(
        "compute_approx_kl",
        ESTIMATORS,
        _kl_inputs,
        _our_kl,
        _their_kl,
        differentiate=("log_probs",),
        seeds=4,
        defect=_kl_defects,
    ),
    Function(
        "compute_approx_kl(unbiased_gradient=True)",
        [
            {**words, "unbiased_gradient": True, "old": old}
            for words, old in product(ESTIMATORS, (False, True))
        ],
        _kl_inputs,
        _our_kl,
        _their_kl,
        differentiate=("log_probs",),
        seeds=2,
        releases=UNBIASED,
        defect=_kl_defects,
    ),
]
