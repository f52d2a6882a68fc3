"""verl's distillation: the forward KL on a teacher's top-k entries, and a worker's step with the
estimates on sampled tokens that `register_distillation()` puts into verl's registry.
"""

from __future__ import annotations

from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from conformance.inputs import Batch
from conformance.peers.verl_worker import (
    ONE_CALL,
    WHOLE_STEP,
    actor_config,
    logged,
    unpadded,
    worker_data,
)
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat.verl import distillation as ours

VOCABULARY = 9
KINDS = ("ragged", "full", "extreme")
RELEASES = ("0.9.1",)


def theirs() -> Any:
    """verl's module of losses on logits."""
    return import_module("verl.trainer.distillation.fsdp.losses")


def _inputs(batch: Batch, options: Options) -> Inputs:
    """Logits of both models; the teacher is known by its `k` most probable entries."""
    g, (rows, width) = batch.generator(3), batch.logp.shape
    size = 30.0 if batch.kind == "extreme" else 3.0
    student, teacher = (
        size * torch.randn(1, rows * width, VOCABULARY, generator=g, dtype=torch.float64)
        for _ in range(2)
    )
    top = teacher.log_softmax(-1).topk(options["k"], -1)
    dtype = batch.logp.dtype
    return {
        "student_logits": student.to(dtype),
        "log_probs": top.values.to(dtype),
        "ids": top.indices,
    }


def _forward_kl(function: Any, inputs: Inputs, options: Options) -> Outputs:
    nested = [
        torch.nested.nested_tensor([inputs[name][0]], layout=torch.jagged)
        for name in ("log_probs", "ids")
    ]
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=options["least"]))
    outputs = dict(function(inputs["student_logits"], *nested, config=config, data_format="thd"))
    return {"loss": outputs.pop("distillation_losses"), **outputs}


def _divergence(function: Any, inputs: Inputs, options: Options) -> Outputs:
    student = inputs["student_logits"].log_softmax(-1).gather(-1, inputs["ids"])
    return {"loss": function(log_q=student, log_p=inputs["log_probs"])}


def _sampled(batch: Batch, options: Options) -> Inputs:
    return {
        "log_prob": batch.logp,
        "teacher_logprobs": batch.ref_logp,
        "old_log_probs": batch.old_logp,
        "advantages": batch.advantages,
        "entropy": batch.entropy,
        "response_mask": batch.mask.bool(),
    }


def _step(inputs: Inputs, options: Options, loss_mode: str) -> Outputs:
    """One call of the loss that verl's worker sets with distillation, and the metrics it would
    log.
    """
    losses = import_module("verl.trainer.distillation.losses")
    configs = import_module("verl.workers.config.distillation")
    rows, width = inputs["response_mask"].shape
    # The teacher scores whole sequences: as many outputs as the student, with one entry each.
    teacher = torch.nested.nested_tensor_from_jagged(
        unpadded(inputs["teacher_logprobs"]).unsqueeze(-1),
        offsets=torch.arange(rows + 1) * (width + 1),
    )
    names = ("old_log_probs", "advantages", "response_mask")
    tensors = {name: inputs[name] for name in names} | {"teacher_logprobs": teacher}
    tensors["ref_log_prob"] = inputs["old_log_probs"]
    if options["nested"]:
        tensors["response_mask"] = torch.nested.nested_tensor(
            list(inputs["response_mask"]), layout=torch.jagged
        )
    output = {"log_probs": unpadded(inputs["log_prob"]), "entropy": unpadded(inputs["entropy"])}
    chosen = {name: options[name] for name in ("use_policy_gradient", "use_task_rewards")}
    distillation = configs.DistillationConfig(
        distillation_loss=configs.DistillationLossConfig(
            loss_mode=loss_mode,
            loss_max_clamp=options["most"],
            distillation_loss_coef=0.3,
            **chosen,
        )
    )
    loss, metrics = losses.distillation_ppo_loss(
        config=actor_config({"loss_agg_mode": "token-mean"}, "vanilla"),
        distillation_config=distillation,
        model_output=output,
        data=worker_data(tensors, options["info"]),
    )
    kinds = ("loss", "loss_min", "loss_max", "abs_loss", "pg_clipfrac")
    return {"loss": loss, **logged(metrics, tuple(f"distillation/{kind}" for kind in kinds))}


def _step_of_verl(inputs: Inputs, options: Options) -> Outputs:
    """The step with verl's own estimator. verl can compute the "+" forms, and registers none."""
    losses = import_module("verl.trainer.distillation.losses")
    name = options["estimator"]
    if name not in losses.DISTILLATION_LOSS_REGISTRY:
        settings = losses.DistillationLossSettings(names=[name], use_estimator=True)
        estimator = losses.compute_distillation_loss_reverse_kl_estimator
        losses.register_distillation_loss(settings)(estimator)
    return _step(inputs, options, name)


def _step_of_ours(inputs: Inputs, options: Options) -> Outputs:
    """The step with ours, registered again each time, as several imports in a worker might."""
    names = ours.register_distillation()
    name = f"policyloss/{options['estimator']}"
    assert name in names
    return _step(inputs, options, name)


OPTIONS = [{"k": k, "least": least} for k in (1, 4, VOCABULARY) for least in (None, -10.0)]

FUNCTIONS = [
    Function(
        name="distillation.compute_forward_kl_topk",
        options=OPTIONS,
        inputs=_inputs,
        ours=lambda i, o: _forward_kl(ours.compute_forward_kl_topk, i, o),
        theirs=lambda i, o: _forward_kl(theirs().compute_forward_kl_topk, i, o),
        differentiate=("student_logits",),
        seeds=3,
        kinds=KINDS,
        dtypes=("float32",),
        releases=RELEASES,
    ),
    Function(
        name="distillation.kl_divergence",
        options=OPTIONS[::2],
        inputs=_inputs,
        ours=lambda i, o: _divergence(ours.kl_divergence, i, o),
        theirs=lambda i, o: _divergence(theirs().kl_divergence, i, o),
        differentiate=("student_logits",),
        seeds=3,
        kinds=KINDS,
        dtypes=("float32",),
        releases=RELEASES,
    ),
    Function(
        name="distillation_ppo_loss after register_distillation()",
        options=[
            {
                "estimator": estimator,
                "use_policy_gradient": by_gradient,
                "use_task_rewards": rewards,
                "most": most,
                "info": info,
                "nested": nested,
            }
            for estimator, (by_gradient, rewards), (most, info, nested) in product(
                ours.ESTIMATES,
                ((True, False), (False, False), (False, True)),
                ((None, ONE_CALL, False), (1.0, WHOLE_STEP, True)),
            )
        ],
        inputs=_sampled,
        ours=_step_of_ours,
        theirs=_step_of_verl,
        differentiate=("log_prob", "entropy"),
        kinds=("ragged", "holes", "extreme", "on_policy"),
        releases=RELEASES,
    ),
]
