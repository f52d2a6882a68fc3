"""verl's forward KL on a teacher's top-k entries. (Its estimates on sampled tokens are
`kl_penalty`, which `verl_losses` compares.)
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from conformance.inputs import Batch
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
]
