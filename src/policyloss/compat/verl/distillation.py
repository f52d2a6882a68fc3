"""verl's distillation losses (verl/trainer/distillation): the forward KL on a teacher's top-k
entries, and for its registry the estimates on sampled tokens, also with the gradient of k2.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.compat.engines import PREFIX
from policyloss.compat.verl.aggregation import kl_penalty
from policyloss.compat.verl.settings import read_field
from policyloss.errors import InputError
from policyloss.functional.divergence import Measure, on_support, terms

FORWARD = Measure("forward", rest="drop")
ESTIMATES = ("k1", "k1+", "abs", "k2", "k3", "k3+")


def kl_divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    """`KL(p‖q)` over the entries of the arguments, in float32. `[..., K]` twice → `[...]`."""
    return on_support(log_q.float(), log_p.float(), FORWARD)


def compute_forward_kl_topk(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str = "thd",
) -> dict[str, Tensor]:
    """verl's forward KL on the teacher's top-k entries, and its statistics: five `[B, T]` tensors.

    student_logits: `[B, T, V]`. teacher_topk_log_probs, teacher_topk_ids: `[B, T, K]`, or nested
    tensors, which are packed. config: `distillation_loss.log_prob_min_clamp` is the smallest
    log-probability of both. data_format has no effect. verl later clamps the divergence at 0, which
    removes the gradient where the sum is negative; `Divergence("forward", …)` with its tail is
    never negative.
    """
    teacher, ids = (_of_this_rank(x) for x in (teacher_topk_log_probs, teacher_topk_ids))
    student = student_logits.log_softmax(-1)
    top = student.topk(ids.shape[-1], -1).indices
    chosen = student.gather(-1, ids)
    masses = {"student_mass": chosen.exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
    least = read_field(read_field(config, "distillation_loss"), "log_prob_min_clamp")
    if least is not None:
        chosen, teacher = chosen.clamp(min=least), teacher.clamp(min=least)
    shared = (ids.unsqueeze(-1) == top.unsqueeze(-2)).any(-1)
    count = shared.sum(-1)
    advantage = -(terms(chosen, teacher, FORWARD) * shared).sum(-1) / count.clamp(min=1)
    return {
        "distillation_losses": kl_divergence(chosen, teacher),
        **masses,
        "overlap_count": count,
        "overlap_token_advantage": advantage,
    }


def register_distillation() -> tuple[str, ...]:
    """Register the estimates on sampled tokens in verl as "policyloss/<name>"; returns the names. A
    second call in the same process is allowed.

    Choose one by `distillation.distillation_loss.loss_mode`. "k1+" and "k3+" report the estimate
    and have the gradient of k2, which on-policy is the gradient of the reverse KL. "k1" has no
    useful gradient unless `use_policy_gradient` turns it into an advantage; without that it is an
    error, as in verl.
    """
    losses = import_module("verl.trainer.distillation.losses")
    names = tuple(f"{PREFIX}{name}" for name in ESTIMATES)
    for full_name, name in zip(names, ESTIMATES, strict=True):
        losses.DISTILLATION_LOSS_REGISTRY.pop(full_name, None)  # verl refuses a second entry
        settings = losses.DistillationLossSettings(names=[full_name], use_estimator=True)
        losses.register_distillation_loss(settings)(_estimate(name))
    return names


def _estimate(name: str) -> Any:
    def loss(
        config: Any, distillation_config: Any, model_output: Any, data: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """The estimate of each token of a response `[B, T]`, and the mean of its modulus."""
        by_gradient = read_field(
            read_field(distillation_config, "distillation_loss"), "use_policy_gradient"
        )
        if name == "k1" and not by_gradient:
            raise InputError(
                f'loss_mode="{PREFIX}k1" has a gradient that does not depend on the teacher; set '
                f'use_policy_gradient=True, or choose "{PREFIX}k1+", "{PREFIX}k2" or "{PREFIX}k3+".'
            )
        losses = import_module("verl.trainer.distillation.losses")
        student = losses.no_padding_2_padding(model_output["log_probs"], data)
        teacher = losses.no_padding_2_padding(data["teacher_logprobs"], data).squeeze(-1)
        estimates = kl_penalty(student, teacher, name)
        mask = data["response_mask"]
        valid = (mask.to_padded_tensor(0) if mask.is_nested else mask).bool()
        mean = losses.Metric(losses.AggregationType.MEAN, estimates.detach()[valid].abs().mean())
        return estimates, {"distillation/abs_loss": mean}

    loss.__name__ = f"policyloss_{name.replace('+', '_with_k2')}"
    return loss


def _of_this_rank(x: Tensor) -> Tensor:
    """The entries as `[B, T, K]`: nested tensors are packed, and split over ranks as in verl."""
    x = x.values().unsqueeze(0) if x.is_nested else x
    try:
        ulysses = import_module("verl.utils.ulysses")
    except ModuleNotFoundError:
        return x
    several = ulysses.get_ulysses_sequence_parallel_world_size() > 1
    cut: Tensor = ulysses.slice_input_tensor(x, dim=1) if several else x
    return cut
