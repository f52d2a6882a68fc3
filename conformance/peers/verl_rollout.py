"""verl's rollout correction: importance weights, rejection masks, and every metric of them."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.inputs import Batch
from conformance.release import current
from conformance.suite import Defect, Function, Inputs, Options, Outputs
from policyloss.compat.verl import rollout_correction as ours

IS_THRESHOLDS: tuple[Any, ...] = (2.0, "2.0", 1.2, "0.5_2.0", "0.95_1.05", 1000)
RULES: tuple[tuple[str, Any], ...] = (
    ("token_k1", "0.5_2.0"),
    ("token_k1", "1.2"),
    ("token_k2", 0.02),
    ("token_k2", 1),
    ("token_k3", "0.02"),
    ("token_k3", 5.0),
    ("seq_sum_k1", "0.5_2.0"),
    ("seq_sum_k1", 40),
    ("seq_sum_k2", "0.3"),
    ("seq_sum_k3", "0.3"),
    ("seq_sum_k3", 100.0),
    ("seq_mean_k1", "0.9_1.3"),
    ("seq_mean_k1", 1.1),
    ("seq_mean_k2", 0.06),
    ("seq_mean_k3", 0.06),
    ("seq_mean_k3", "3.0"),
    ("seq_max_k2", 0.2),
    ("seq_max_k3", "0.2"),
    ("seq_max_k3", 40.0),
    ("token_k1,seq_max_k3", "0.5_2.0, 0.3"),
    ("token_k2,token_k3,token_k2", "0.1"),
    ("seq_mean_k1, seq_sum_k3", "0.8_1.3,2.0"),
    ("token_k1,seq_sum_k2,seq_max_k2", "0.7_1.5,0.8,0.3"),
    ("seq_mean_k2,token_k1,seq_mean_k3", 1.5),
)
# Options that verl refuses.
BAD_WEIGHT_THRESHOLDS = ("", "abc", "0.5_", "_2", -1.0, 0, "0_2", "2_0.5", True, [2.0])
BAD_RULES: tuple[tuple[str, Any], ...] = (
    *(
        ("token_k1", threshold)
        for threshold in (None, "", ",", "x", "0.5_x", "-1", "0_2", "1,2", True, [2.0], 0, "inf")
    ),
    *(("seq_max_k3", threshold) for threshold in ("0.5_2.0", "x", 0, "-2")),
    *((words, 2.0) for words in ("", " , ", "seq_max_k1", "token", "k3", "token_k1;token_k2")),
    ("token_k1,token_k2,token_k3", "2.0,1.0"),
    ("token_k1,token_k1", "2.0,1.0"),
    ("token_k1", "2.0_0.5"),  # from 0.9.0; before, it rejects every token
)
ALL_ZERO = Defect(
    "IcePop zeroes every weight, and verl divides by their mean square: ZeroDivisionError",
    "rollout_is_eff_sample_size is 0",
)


def helper() -> Any:
    """verl's module, of the release under test."""
    return import_module("verl.trainer.ppo.rollout_corr_helper")


def mask_of(batch: Batch, options: Options) -> Tensor:
    """The response mask: float as drawn, or int64 as verl's trainer makes it, or bool."""
    words = {"float": batch.dtype, "int": torch.int64, "bool": torch.bool}
    return batch.mask.to(words[options.get("mask", "float")])


def logp_inputs(batch: Batch, options: Options) -> Inputs:
    """Both policies' log-probabilities and the mask."""
    return {"old": batch.old_logp, "rollout": batch.rollout_logp, "mask": mask_of(batch, options)}


def ratio_inputs(batch: Batch, options: Options) -> Inputs:
    """The log-ratio and the mask."""
    return {
        "log_ratio": batch.old_logp - batch.rollout_logp,
        "response_mask": mask_of(batch, options),
    }


def weighted(found: tuple[Tensor, dict[str, float]]) -> Outputs:
    """A tensor and its metrics."""
    return {"result": found[0], **found[1]}


def corrected(found: tuple[Any, Tensor, dict[str, float]]) -> Outputs:
    """Weights out of their DataProto, mask and metrics."""
    proto, mask, metrics = found
    return {
        "weights": None if proto is None else proto.batch["rollout_is_weights"],
        "mask": mask,
        **metrics,
    }


def all_zero(options: Options, inputs: Inputs) -> Defect | None:
    """Whether IcePop leaves no weight at all."""
    chosen = options["now"]
    threshold, level = chosen.get("rollout_is_threshold"), chosen.get("rollout_is")
    if level is None or not isinstance(threshold, str) or "_" not in threshold:
        return None
    mask = inputs.get("response_mask", inputs.get("mask"))
    assert isinstance(mask, Tensor)
    d = inputs["log_ratio"] if "log_ratio" in inputs else inputs["old"] - inputs["rollout"]
    if level == "sequence":
        d = (d * mask).sum(-1, keepdim=True).expand_as(d)
    low, high = map(float, threshold.split("_"))
    w = d.clamp(-20, 20).exp()
    return ALL_ZERO if mask.any() and not ((w >= low) & (w <= high) & mask.bool()).any() else None


def weights_function() -> Function:
    """Importance weights."""
    every = product(("token", "sequence"), IS_THRESHOLDS, (False, True), ("float",))
    others = product(("token", "sequence"), (2.0, "0.5_2.0"), (True,), ("int", "bool"))
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    return Function(
        "compute_rollout_correction_weights",
        [
            {"now": dict(zip(names, words, strict=True)), "mask": mask}
            for *words, mask in (*every, *others)
        ],
        ratio_inputs,
        lambda x, o: weighted(
            ours.compute_rollout_correction_weights(**x, **o["now"], release=current())
        ),
        lambda x, o: weighted(helper().compute_rollout_correction_weights(**x, **o["now"])),
        defect=all_zero,
    )


def rules(chosen: tuple[str, Any]) -> Options:
    """The arguments of a rejection."""
    return {"now": dict(zip(("rollout_rs", "rollout_rs_threshold"), chosen, strict=True))}


def rejection_function() -> Function:
    """Rejection masks."""
    options = [rules(chosen) for chosen in RULES]
    options += [
        {**rules(chosen), "mask": mask} for mask in ("int", "bool") for chosen in RULES[::6]
    ]
    return Function(
        "compute_rollout_rejection_mask",
        options,
        ratio_inputs,
        lambda x, o: weighted(
            ours.compute_rollout_rejection_mask(**x, **o["now"], release=current())
        ),
        lambda x, o: weighted(helper().compute_rollout_rejection_mask(**x, **o["now"])),
    )


def pipelines() -> list[Options]:
    """Weights and rejections together: each weight with some rejections, and each of both alone."""
    weights: list[Options] = [
        {"rollout_is": None},
        {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
        {"rollout_is": "token", "rollout_is_threshold": "0.4_1.8"},
        {"rollout_is": "sequence"},
        {
            "rollout_is": "sequence",
            "rollout_is_threshold": "0.2_5",
            "rollout_is_batch_normalize": True,
        },
        {"rollout_is": "token", "rollout_is_threshold": None},
    ]
    made: list[Options] = []
    for i, weight in enumerate(weights):
        made.append({"now": weight})
        for j, chosen in enumerate(RULES[i :: len(weights)]):
            mask = ("float", "float", "int")[(i + j) % 3]
            made.append({"now": weight | rules(chosen)["now"], "mask": mask})
    return made


def pipeline(module: Any, x: Inputs, o: Options, **extra: Any) -> Outputs:
    """`compute_rollout_correction_and_rejection_mask`."""
    call = module.compute_rollout_correction_and_rejection_mask
    return corrected(call(x["old"], x["rollout"], x["mask"], **o["now"], **extra))


def add_to_batch(module: Any, x: Inputs, o: Options, **extra: Any) -> Outputs:
    """`compute_rollout_correction_and_add_to_batch`, on verl's own DataProto where there is one."""
    tensors = {
        "old_log_probs": x["old"],
        "rollout_log_probs": x["rollout"],
        "response_mask": x["mask"],
    }
    batch, metrics = module.compute_rollout_correction_and_add_to_batch(
        ours._data_proto(tensors), o["now"], **extra
    )
    return {**{name: batch.batch[name] for name in sorted(batch.batch.keys())}, **metrics}


def bypass(module: Any, x: Inputs, o: Options) -> Outputs:
    """`apply_bypass_mode`: its changes of batch and config.
    Without OmegaConf (a replay) the config is a dict.
    """
    try:
        config = import_module("omegaconf").OmegaConf.create({"loss_mode": "vanilla"})
        import_module("omegaconf").OmegaConf.set_struct(config, True)
    except ImportError:
        config = {"loss_mode": "vanilla"}
    tensors = {"old_log_probs": x["old"], "rollout_log_probs": x["rollout"]}
    batch = SimpleNamespace(batch={name: tensors[name] for name in o["tensors"]})
    result = module.apply_bypass_mode(batch, {"rollout_is": "token"}, config)
    return {
        **batch.batch,
        "loss_mode": config["loss_mode"],
        "rollout_is": config["rollout_correction"]["rollout_is"],
        "none": result,
    }


def gap_function() -> Function:
    """Diagnostics of two policies; of one without rollout log-probabilities."""

    def call(module: Any, x: Inputs, o: Options) -> Outputs:
        found: Outputs = module.compute_offpolicy_metrics(
            x["old"], x["rollout"] if o["rollout"] else None, x["mask"]
        )
        return found

    return Function(
        "compute_offpolicy_metrics",
        [
            {"rollout": rollout, "mask": mask}
            for rollout in (True, False)
            for mask in ("float", "int", "bool")
        ],
        logp_inputs,
        lambda x, o: call(ours, x, o),
        lambda x, o: call(helper(), x, o),
        seeds=2,
    )


def gap_with_prefix(module: Any, x: Inputs, o: Options) -> Outputs:
    """`compute_rollout_corr_metrics_from_logprobs`."""
    found: Outputs = module.compute_rollout_corr_metrics_from_logprobs(
        x["old"], x["rollout"], x["mask"]
    )
    return found


def weight_inputs(batch: Batch, options: Options) -> Inputs:
    """Weights unlike those of any correction: applied, raw, and the log-ratio at its level."""
    d = batch.old_logp - batch.rollout_logp
    level = d.sum(-1, keepdim=True) if options["rollout_is"] == "sequence" else d
    return {
        "applied": (0.9 * d).exp().clamp(max=1.7),
        "raw": d.exp(),
        "log_ratio": level,
        "mask": mask_of(batch, options),
    }


def is_metrics(module: Any, x: Inputs, o: Options, **extra: Any) -> Outputs:
    """`compute_is_metrics`."""
    tensors = (x[name] for name in ("applied", "raw", "log_ratio", "mask"))
    found: Outputs = module.compute_is_metrics(
        *tensors, o["rollout_is"], o["threshold"], o["lower"], **extra
    )
    return found


def rs_metrics(module: Any, x: Inputs, o: Options) -> Outputs:
    """`compute_rs_metrics`, called as its own."""
    values = x["raw"].mean(-1, keepdim=o["column"]) if o["values"] else None
    mask = x["mask"]
    found: Outputs = module.compute_rs_metrics(
        "mine",
        x["log_ratio"],
        mask,
        mask.sum(-1) > 0,
        level=o["level"],
        per_sequence_values=values,
        rollout_rs_threshold=0.3,
        rollout_rs_threshold_lower=-0.2,
        apply_lower_threshold=o["low"],
    )
    return found


def refusal(module: Any, x: Inputs, o: Options, **extra: Any) -> Outputs:
    """1 where a call is refused, whatever the error's type."""
    try:
        pipeline(module, x, o, **extra)
    except (ValueError, TypeError, ZeroDivisionError):
        return {"refused": 1}
    return {"refused": 0}


FUNCTIONS = [
    weights_function(),
    rejection_function(),
    Function(
        "compute_rollout_correction_and_rejection_mask",
        pipelines(),
        logp_inputs,
        lambda x, o: pipeline(ours, x, o, release=current()),
        lambda x, o: pipeline(helper(), x, o),
        defect=all_zero,
    ),
    Function(
        "compute_rollout_correction_and_add_to_batch",
        pipelines()[1::4],
        logp_inputs,
        lambda x, o: add_to_batch(ours, x, o, release=current()),
        lambda x, o: add_to_batch(helper(), x, o),
        defect=all_zero,
    ),
    gap_function(),
    Function(
        "compute_rollout_corr_metrics_from_logprobs",
        [{}],
        logp_inputs,
        lambda x, o: gap_with_prefix(ours, x, o),
        lambda x, o: gap_with_prefix(helper(), x, o),
        seeds=2,
    ),
    Function(
        "compute_is_metrics",
        [
            {"rollout_is": r, "threshold": t, "lower": w}
            for r in ("token", "sequence")
            for t, w in ((1.3, None), (2, 0.7))
        ],
        weight_inputs,
        lambda x, o: is_metrics(ours, x, o, release=current()),
        lambda x, o: is_metrics(helper(), x, o),
        seeds=2,
    ),
    Function(
        "compute_rs_metrics",
        [
            {"rollout_is": "token", "level": level, "values": values, "column": column, "low": low}
            for level, (values, column), low in product(
                ("token", "sequence"), ((False, False), (True, False), (True, True)), (True, False)
            )
        ],
        weight_inputs,
        lambda x, o: rs_metrics(ours, x, o),
        lambda x, o: rs_metrics(helper(), x, o),
    ),
    Function(
        "apply_bypass_mode",
        [
            {"tensors": ["old_log_probs", "rollout_log_probs"]},
            {"tensors": ["rollout_log_probs"]},
            {"tensors": ["old_log_probs"]},
        ],
        logp_inputs,
        lambda x, o: bypass(ours, x, o),
        lambda x, o: bypass(helper(), x, o),
        kinds=("ragged",),
    ),
    Function(
        "rollout_is_threshold, malformed",
        [
            {"now": {"rollout_is": "token", "rollout_is_threshold": threshold}}
            for threshold in BAD_WEIGHT_THRESHOLDS
        ]
        + [{"now": {"rollout_is": level}} for level in ("geometric", "")],
        logp_inputs,
        lambda x, o: refusal(ours, x, o, release=current()),
        lambda x, o: refusal(helper(), x, o),
        kinds=("ragged",),
    ),
    Function(
        "rollout_rs_threshold, malformed",
        [
            {"now": {"rollout_rs": words, "rollout_rs_threshold": threshold}}
            for words, threshold in BAD_RULES
        ],
        logp_inputs,
        lambda x, o: refusal(ours, x, o, release=current()),
        lambda x, o: refusal(helper(), x, o),
        kinds=("ragged",),
    ),
]
