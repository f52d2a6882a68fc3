"""TRL's divergences: GKDTrainer's `generalized_jsd_loss`, the chunked kernel on a CPU, and
DistillationTrainer's loss.

Hidden states (`_hidden`) are small, so that logits are within about ±2. TRL computes in float32
whatever it gets, so there is no float64 to compare, and with hidden states of size 1 the rounding
of either side exceeds the bound of 1e-6: measured in float64, TRL's divergence is off by 2.4e-6 and
its gradient by 6e-6, ours by 7.5e-7 and 4e-6. At size 0.15 both stay within 9e-7.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from conformance.inputs import Batch
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat.trl import distillation as ours

VOCABULARY, WIDTHS = 7, (3, 4)  # entries; hidden size of the student and of the teacher
KINDS = ("ragged", "full", "holes", "single_token", "all_masked")
RELEASES = ("1.16.0",)
BETAS = (0.0, 0.1, 0.5, 1.0)


def gkd() -> Any:
    """TRL's GKDTrainer, which holds the function."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return import_module("trl.experimental.gkd.gkd_trainer").GKDTrainer


def _logits(batch: Batch, options: Options) -> Inputs:
    g, shape = batch.generator(5), (*batch.logp.shape, VOCABULARY)
    student, teacher = (
        3 * torch.randn(shape, generator=g, dtype=torch.float64).to(batch.dtype) for _ in range(2)
    )
    labels = torch.where(batch.mask > 0, 1, -100)
    return {"student_logits": student, "teacher_logits": teacher, "labels": labels}


def _jsd(function: Any, inputs: Inputs, options: Options) -> Outputs:
    labels = inputs["labels"] if options["labels"] else None
    rest = {name: x for name, x in options.items() if name != "labels"}
    return {"loss": function(inputs["student_logits"], inputs["teacher_logits"], labels, **rest)}


def _hidden(batch: Batch, options: Options) -> Inputs:
    """Hidden states `[B, T, D]` and heads of both models."""
    g = batch.generator(6)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(batch.dtype)

    inputs: Inputs = {"mask": batch.mask}
    for name, width in zip(("student", "teacher"), WIDTHS, strict=True):
        inputs[f"{name}_hidden"] = 0.15 * noise(*batch.logp.shape, width)
        inputs[f"{name}_weight"] = noise(VOCABULARY, width)
        inputs[f"{name}_bias"] = 0.15 * noise(VOCABULARY) if options["bias"] else None
    return inputs


def _scaling(options: Options) -> Options:
    return {
        "temperature": options["temperature"],
        "student_logit_scale": options["scale"],
        "student_final_logit_softcapping": options["softcap"],
        "teacher_logit_scale": options["scale"],
        "teacher_final_logit_softcapping": options["softcap"],
    }


def _tokens(function: Any, inputs: Inputs, options: Options) -> Outputs:
    of_models = []
    for name in ("student", "teacher"):
        hidden = inputs[f"{name}_hidden"]
        of_models += [hidden.reshape(-1, hidden.shape[-1])]
        of_models += [inputs[f"{name}_weight"], inputs[f"{name}_bias"]]
    # The function of autograd takes no keywords.
    divergence, entropy = function(*of_models, options["beta"], *_scaling(options).values())
    return {"loss": divergence, "entropy": entropy}


def _trainer(function: Any, inputs: Inputs, options: Options) -> Outputs:
    loss, entropy, count = function(
        inputs["student_hidden"],
        inputs["teacher_hidden"],
        inputs["student_weight"],
        inputs["teacher_weight"],
        inputs["mask"],
        options["beta"],
        num_items_in_batch=options["items"],
        student_lm_head_bias=inputs["student_bias"],
        teacher_lm_head_bias=inputs["teacher_bias"],
        **_scaling(options),
    )
    return {"loss": loss, "entropy": entropy, "count": count}


REDUCTIONS = ("batchmean", "sum", "mean", "none")
SCALED: Options = {"bias": True, "temperature": 0.7, "scale": 1.5, "softcap": 4.0}
PLAIN: Options = {"bias": False, "temperature": 1.0, "scale": 1.0, "softcap": None}
OF_HIDDEN = [{"beta": beta, **form} for beta in BETAS for form in (PLAIN, SCALED)]
LEARNED = ("student_hidden", "student_weight")

FUNCTIONS = [
    Function(
        name="GKDTrainer.generalized_jsd_loss",
        options=[
            {"beta": beta, "temperature": 0.8, "reduction": reduction, "labels": labels}
            for beta in BETAS
            for reduction in REDUCTIONS
            for labels in (True, False)
        ]
        + [{"beta": 0.5, "labels": True, "num_items_in_batch": 37}],
        inputs=_logits,
        ours=lambda i, o: _jsd(ours.generalized_jsd_loss, i, o),
        theirs=lambda i, o: _jsd(gkd().generalized_jsd_loss, i, o),
        differentiate=("student_logits",),
        kinds=("ragged", "full", "holes", "single_token"),
        releases=RELEASES,
    ),
    Function(
        name="ChunkedDivergenceFunction",
        options=OF_HIDDEN,
        inputs=_hidden,
        ours=lambda i, o: _tokens(ours.chunked_divergence, i, o),
        theirs=lambda i, o: _tokens(
            import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction.apply, i, o
        ),
        differentiate=LEARNED,
        kinds=KINDS[:3],
        dtypes=("float32",),
        releases=RELEASES,
    ),
    Function(
        name="DistillationTrainer's loss",
        options=[{**option, "items": items} for option in OF_HIDDEN for items in (None, 41)],
        inputs=_hidden,
        ours=lambda i, o: _trainer(ours.chunked_divergence_loss, i, o),
        theirs=lambda i, o: _trainer(
            import_module("trl.trainer.distillation_trainer")._chunked_divergence_loss, i, o
        ),
        differentiate=LEARNED,
        kinds=KINDS,
        dtypes=("float32",),
        releases=RELEASES,
    ),
]
