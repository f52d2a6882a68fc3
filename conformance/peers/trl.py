"""TRL: `GRPOTrainer._compute_loss` on fixed log-probabilities,
against the spec of the same config, one entry per loss_type.

Theirs is the trainer's own method, called on a stand-in for the trainer that holds the config's
values and replaces the model and the accelerator; vLLM's importance weights come from the trainer's
own lines, cut out of the method that generates completions.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import fields
from functools import cache
from importlib import import_module
from itertools import product
from random import Random
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.compare import TOLERANCE
from conformance.inputs import Batch
from conformance.suite import GRADIENT, Defect, Function, Inputs, Options, Outputs
from policyloss.compat.trl import batch_loss, spec_from_config, totals_for
from policyloss.compat.trl.config import CLIPPED, DEFAULTS, LOSS_TYPES, MODES
from policyloss.loss import policy_loss
from policyloss.records import Stat

PINNED = "1.16.0"
HORIZON = 16
# A step as seen from one micro-batch: micro-batches accumulated, micro-batches generated at once,
# processes.
STEPS = ((1, 1, 1), (4, 4, 1), (4, 2, 1), (2, 3, 3), (1, 4, 2))
BANDS = ((0.2, None), (0.2, 0.28), (3e-4, 4e-4), (1.0, 4.0))
CAPS = (None, 5.0, 1.2)
BOUNDS = ((None, 3.0), (0.3, 2.0), (0.5, None), (None, 1.5))
TEMPERATURES = ((1.0, 1.05), (0.7, 1.3))
SHAPES = ((2.0, 3.0, 3.0, 2.0), (1.1, 0.7, 2.3, 0.0))
# TRL's metrics and ours, where they mean the same.
METRICS = {
    "entropy": "entropy",
    "kl": "kl_ref",
    "clip_ratio/low_mean": "clip_fraction_lower",
    "clip_ratio/high_mean": "clip_fraction_upper",
}
# Options that are not fields of GRPOConfig.
OURS_ALONE = ("processes", "training", "on_policy", "unscored")


def _options(loss_type: str) -> list[Options]:
    """Every level, delta, KL, off-policy mask and vLLM mode together;
    the other numbers are drawn.
    """
    deltas = (None, 4.0, 1.1) if loss_type in CLIPPED else (None,)
    kls = ((0.0, True), (0.04, False), (0.04, True))
    modes = (None, *(mode for mode in MODES if loss_type != "vespo" or mode.startswith("token")))
    combinations = product(("token", "sequence"), deltas, kls, (None, 0.1), modes)
    return [
        _option(loss_type, *chosen, Random(f"{loss_type} {i}"))
        for i, chosen in enumerate(combinations)
    ]


def _option(
    loss_type: str,
    level: str,
    delta: float | None,
    kl: tuple[float, bool],
    drift: float | None,
    mode: str | None,
    draw: Random,
) -> Options:
    low, high = draw.choice(BANDS)
    calls, generated, processes = draw.choice(STEPS)
    chosen: Options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon": low,
        "epsilon_high": draw.choice(CAPS) if loss_type == "cispo" else high,
        "delta": delta,
        "beta": kl[0],
        "use_bias_correction_kl": kl[1],
        "off_policy_mask_threshold": drift,
        "max_completion_length": HORIZON,
        "gradient_accumulation_steps": calls,
        "steps_per_generation": generated,
        "processes": processes,
        "training": draw.random() < 0.8,
        "on_policy": draw.random() < 0.3,
        "unscored": draw.random() < 0.5,
    }
    if mode is not None:
        chosen["use_vllm"], chosen["vllm_importance_sampling_mode"] = True, mode
        chosen["vllm_importance_sampling_clip_min"], chosen["vllm_importance_sampling_clip_max"] = (
            draw.choice(BOUNDS)
        )
    if loss_type == "sapo":
        chosen["sapo_temperature_pos"], chosen["sapo_temperature_neg"] = draw.choice(TEMPERATURES)
    if loss_type == "vespo":
        names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
        chosen.update(zip(names, draw.choice(SHAPES), strict=True))
    return chosen


def _inputs(batch: Batch, options: Options) -> Inputs:
    g = batch.generator(7)
    elsewhere = int(torch.randint(0, 40, (), generator=g))
    near = _nearness(batch, options)
    return {
        "logp": batch.logp,
        "old_logp": batch.logp + near * (batch.old_logp - batch.logp),
        "rollout_logp": batch.rollout_logp,
        "ref_logp": batch.logp + near * (batch.ref_logp - batch.logp),
        "entropy": batch.entropy,
        # One advantage per sequence, as TRL's own, where the batch has that;
        # else one per token, as its subclasses may give.
        "advantages": batch.advantages[:, 0].clone()
        if batch.kind == "sequence_advantages"
        else batch.advantages,
        "mask": batch.mask,
        "unscored": (torch.rand(batch.mask.shape, generator=g) < 0.15).to(batch.dtype),
        "num_items": int(batch.mask.sum()) + elsewhere,
        "tool": batch.kind == "holes",
    }


def _nearness(batch: Batch, options: Options) -> float:
    """A sixth of the distances where float32 has no digits left to compare:
    ratios of e^30 times a KL whose terms cancel.

    TRL's own numbers are then off by more than 1e-6 from its own numbers for the same batch in
    float64, and equal ours only if both add in the same order, which they do where the ratio is per
    token and alone carries the surrogate's gradient.
    """
    weighted = options["beta"] != 0.0 and options["use_bias_correction_kl"]
    other_order = (
        options["loss_type"] in ("cispo", "vespo")
        or options["importance_sampling_level"] == "sequence"
    )
    return (
        1 / 6
        if batch.kind == "extreme" and batch.dtype == torch.float32 and weighted and other_order
        else 1.0
    )


def _config(options: Options, defaults: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{**defaults, **{name: x for name, x in options.items() if name not in OURS_ALONE}}
    )


def _trainer_inputs(inputs: Inputs, options: Options, config: Any) -> dict[str, Any]:
    """The micro-batch as the trainer's `_generate_and_score_completions` returns it,
    but for the importance weights.
    """
    mask = inputs["mask"].long()
    ids = torch.zeros_like(mask)
    made: dict[str, Any] = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": torch.ones_like(mask) if inputs["tool"] else mask,
        "advantages": inputs["advantages"],
        "num_items_in_batch": torch.tensor(inputs["num_items"]),
    }
    if inputs["tool"]:
        made["tool_mask"] = mask
    if config.beta != 0.0:
        made["ref_per_token_logps"] = inputs["ref_logp"]
    if not options["on_policy"] or config.use_vllm:
        made["old_per_token_logps"] = inputs["old_logp"]
    if config.use_vllm:
        unscored = options["unscored"] and inputs["unscored"].bool()
        made["sampling_per_token_logps"] = torch.where(
            torch.as_tensor(unscored), torch.nan, inputs["rollout_logp"]
        )
    return made


def _ours(inputs: Inputs, options: Options) -> Outputs:
    config = _config(options, DEFAULTS)
    made = _trainer_inputs(inputs, options, config)
    spec = spec_from_config(config)
    totals = totals_for(
        config,
        inputs["mask"],
        made["num_items_in_batch"],
        num_processes=options["processes"],
        training=options["training"],
    )
    out = batch_loss(spec, inputs["logp"], made, totals=totals, entropy=inputs["entropy"])
    said = {name: _mean(name, out.metrics[METRICS[name]]) for name in _comparable(config)}
    return {"loss": out.loss, **said}


def _ours_with_bonus(inputs: Inputs, options: Options) -> Outputs:
    """The spec and the totals given to `policy_loss` itself, the entropies with their gradient."""
    config = _config(options, DEFAULTS)
    made = _trainer_inputs(inputs, options, config)
    items = made["num_items_in_batch"]
    totals = totals_for(config, inputs["mask"], items, num_processes=options["processes"])
    out = policy_loss(
        spec_from_config(config),
        inputs["logp"],
        inputs["old_logp"],
        inputs["advantages"],
        inputs["mask"],
        entropy=inputs["entropy"],
        totals=totals,
    )
    return {
        "loss": out.loss,
        **{name: _mean(name, out.metrics[METRICS[name]]) for name in _comparable(config)},
    }


def _mean(name: str, record: Any) -> float:
    """A mean that is 0 where nothing was counted, as TRL's;
    it counts clipped tokens in float32 whatever the dtype.
    """
    assert isinstance(record, Stat)
    total, count = (x.float() for x in record.wide) if name.startswith("clip") else record.wide
    return float(total / count.clamp(min=1))


def _comparable(config: Any) -> list[str]:
    """TRL's metrics that mean what ours do. With a ratio per sequence TRL averages over rows,
    ours over tokens.
    """
    names = ["entropy"]
    if config.beta != 0.0:
        names.append("kl")
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if (
        config.loss_type in CLIPPED
        and config.importance_sampling_level == "token"
        and (config.delta or math.inf) > 1 + high
    ):
        names += ["clip_ratio/low_mean", "clip_ratio/high_mean"]
    return names


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    GRPOTrainer = import_module("trl.trainer.grpo_trainer").GRPOTrainer  # noqa: N806
    config = _config(
        options,
        {f.name: f.default for f in fields(import_module("trl.trainer.grpo_config").GRPOConfig)},
    )
    made = _trainer_inputs(inputs, options, config)
    trainer = _stand_in(GRPOTrainer, config, inputs, options)
    if trainer.use_vllm:
        made["importance_sampling_ratio"] = _importance_weights(GRPOTrainer, trainer, made)
    loss = GRPOTrainer._compute_loss(trainer, None, made)
    logged = trainer._metrics["train" if options["training"] else "eval"]
    return {"loss": loss, **{name: logged[name][-1] for name in _comparable(config)}}


def _stand_in(trainer_class: Any, config: Any, inputs: Inputs, options: Options) -> SimpleNamespace:
    """A trainer for `_compute_loss`: the values of the config, a model's output, and the
    accelerator of one process.
    """
    forward = (
        inputs["logp"],
        inputs["entropy"],
        *((None,) if _returns_router_loss(trainer_class) else ()),
    )
    same = (
        "use_vllm",
        "loss_type",
        "importance_sampling_level",
        "beta",
        "off_policy_mask_threshold",
        "max_completion_length",
    )
    vllm = {
        name: value
        for name, value in vars(config).items()
        if name.startswith("vllm_importance_sampling_")
    }
    return SimpleNamespace(
        **{name: getattr(config, name) for name in same},
        **vllm,
        args=config,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        current_gradient_accumulation_steps=config.gradient_accumulation_steps,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        entropy_coef=config.entropy_coef,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=config.entropy_coef != 0.0,
        model=SimpleNamespace(training=options["training"]),
        accelerator=SimpleNamespace(
            num_processes=options["processes"],
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            sync_gradients=True,
        ),
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: forward,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )


@cache
def _returns_router_loss(trainer_class: Any) -> bool:
    """Since 1.7 the model's answer has a third part."""
    return "aux_loss" in inspect.getsource(trainer_class._compute_loss)


@cache
def _importance_code(trainer_class: Any) -> CodeType:
    """TRL's lines that make the weights: the `if` of `_generate_and_score_completions`
    in which their ratio is assigned.
    """
    tree = ast.parse(
        textwrap.dedent(inspect.getsource(trainer_class._generate_and_score_completions))
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "vllm_importance_sampling_correction" in ast.unparse(
            node.test
        ):
            body = "\n".join(ast.unparse(line) for line in node.body)
            if "vllm_importance_sampling_ratio = torch.exp" in body:
                return compile(body, "trl: importance weights", "exec")
    raise LookupError("this TRL makes vLLM's importance weights elsewhere")


def _importance_weights(trainer_class: Any, trainer: Any, made: dict[str, Any]) -> Tensor:
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "self": trainer,
        "completion_mask": made["completion_mask"],
        "tool_mask": made.get("tool_mask"),
        "old_per_token_logps": made["old_per_token_logps"],
        "sampling_per_token_logps": made["sampling_per_token_logps"],
    }
    exec(_importance_code(trainer_class), names)
    weights: Tensor = names["vllm_importance_sampling_ratio"]
    return weights


LOST_GRADIENT = Defect(
    "far from the old policy or the reference, a KL that is weighted by the ratio has two huge "
    "terms that cancel; the policy gradient is added to one of them first, and lost in its "
    "rounding",
    "the two KL terms cancel first, and the policy gradient is kept",
    (GRADIENT,),
)


def _defect(options: Options, inputs: Inputs) -> Defect | None:
    """Far from the reference, with no clamp, the KL's two terms are huge and cancel; any number
    added to one before that is lost.
    """
    if (
        options["loss_type"] != "vespo"
        or options["beta"] == 0.0
        or not options["use_bias_correction_kl"]
    ):
        return None
    logp, mask, dtype = inputs["logp"].double(), inputs["mask"].double(), inputs["logp"].dtype
    old = (
        logp
        if options["on_policy"] and not options.get("use_vllm")
        else inputs["old_logp"].double()
    )
    log_ratio = (logp - old) * mask
    if options["importance_sampling_level"] == "sequence":
        log_ratio = (log_ratio.sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1)
    term = (
        options["beta"]
        * (log_ratio + inputs["ref_logp"].double() - logp).exp()
        / mask.sum().clamp(min=1)
    )
    if (term * mask).max() * torch.finfo(dtype).eps < TOLERANCE[dtype]:
        return None
    return LOST_GRADIENT


def _function(name: str, options: list[Options], **others: Any) -> Function:
    return Function(
        name, options, _inputs, _ours, _theirs, differentiate=("logp",), defect=_defect, **others
    )


def _far_function() -> Function:
    """CISPO at a log-ratio of 80 to the old policy, the reference being the policy itself,
    as at the start of a run.
    """
    near = [
        o
        for o in _options("cispo")
        if o["beta"] and o["use_bias_correction_kl"] and not o.get("use_vllm")
    ]
    options = [
        {**o, "on_policy": False, "off_policy_mask_threshold": None, "epsilon_high": 5.0}
        for o in near
    ]

    def inputs(batch: Batch, options: Options) -> Inputs:
        return {
            **_inputs(batch, options),
            "old_logp": batch.logp - 80.0,
            "ref_logp": batch.logp.clone(),
        }

    return Function(
        "GRPOTrainer cispo, log-ratio 80",
        options,
        inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        defect=lambda options, inputs: LOST_GRADIENT,
    )


def _bonus_function() -> Function:
    name, differentiated = "GRPOTrainer bnpo, entropy bonus", ("logp", "entropy")
    return Function(
        name, _with_bonus(), _inputs, _ours_with_bonus, _theirs, differentiate=differentiated
    )


def _some(loss_type: str) -> list[Options]:
    """A quarter of the options, or half where there are few."""
    options = [option for option in _options(loss_type) if not _may_overflow(option)]
    return Random(f"some {loss_type}").sample(
        options, len(options) // (4 if loss_type in CLIPPED else 2)
    )


def _may_overflow(options: Options) -> bool:
    """A product of weights without an upper bound, which on an extreme batch
    is infinite on both sides.
    """
    product_of_weights = str(options.get("vllm_importance_sampling_mode")).startswith("sequence")
    return product_of_weights and options["vllm_importance_sampling_clip_max"] is None


def _with_bonus() -> list[Options]:
    """A policy loss that is averaged as TRL averages its entropy bonus,
    so that one spec holds both.
    """
    plain = [
        o
        for o in _options("bnpo")
        if o["beta"] == 0.0 and not o.get("use_vllm") and o["training"] and not o["on_policy"]
    ]
    return [{**option, "entropy_coef": coef} for option in plain for coef in (0.01, -0.3)]


# Every combination on ragged batches; some of them on every kind of batch and in every release.
FUNCTIONS = [
    *(_function(f"GRPOTrainer {name}", _some(name)) for name in LOSS_TYPES),
    _bonus_function(),
    _far_function(),
    *(
        _function(
            f"GRPOTrainer {name}, all options",
            _options(name),
            kinds=("ragged",),
            releases=("1.16.0",),
        )
        for name in LOSS_TYPES
    ),
]
