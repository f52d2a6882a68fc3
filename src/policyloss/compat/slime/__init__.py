"""Any loss of this library as the custom loss of slime.

slime computes log-probabilities from vocabulary-parallel logits, slices samples over
context-parallel ranks, and passes its average as a function of one number per token. That function
is linear, so its slopes are the weights of the tokens, with slime's own denominators; the loss
here is the sum with these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.engines import fitting_spec
from policyloss.compat.parts import slopes
from policyloss.errors import InputError, SpecError
from policyloss.loss import policy_loss
from policyloss.parts.aggregate import SeqMeanTokenMean, TokenMean, TokenSum
from policyloss.spec import LossSpec

__all__ = ["loss_of"]

LOSS, PARALLEL = "slime.backends.megatron_utils.loss", "megatron.core.mpu"
# The argument of `policy_loss`, and the key of slime's batch.
KEYS = {"old_logp": "log_probs", "rollout_logp": "rollout_log_probs", "ref_logp": "ref_log_probs"}
OWN_TERMS = ("use_tis", "use_opsm", "use_unbiased_kl", "use_rollout_logprobs")


def loss_of(loss: AnyLoss) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """`loss` with the arguments and results of slime's custom loss. In a module of yours,
    `my_loss = loss_of(spec)` is a target of `--custom-loss-function-path`.
    """
    spec = fitting_spec("slime", loss, (*KEYS, "entropy"), (TokenMean, SeqMeanTokenMean))

    def custom_loss(
        args: Any,
        batch: Mapping[str, Any],
        logits: Tensor,
        sum_of_sample_mean: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _check(spec, args, batch)
        slime, parallel = import_module(LOSS), import_module(PARALLEL)
        _, computed = slime.get_log_probs_and_entropy(
            logits,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=bool(spec.entropy_coef),
            **slime.get_rollout_top_p_logprob_kwargs(args, batch),
        )
        rows = computed["log_probs"]
        weights = _padded(slopes(sum_of_sample_mean, rows))
        tensors: dict[str, Any] = {
            name: _padded(batch[key]) for name, key in KEYS.items() if batch.get(key)
        }
        # slime leaves it out if the policy has not been updated.
        tensors.setdefault("old_logp", "current")
        several = parallel.get_context_parallel_world_size() > 1
        out = policy_loss(
            spec.replace(aggregate=TokenSum()),
            _padded(rows),
            advantages=_padded(batch["advantages"]),
            mask=weights != 0,
            weights=weights,
            entropy=_padded(computed["entropy"]) if spec.entropy_coef else None,
            cp_group=parallel.get_context_parallel_group() if several else None,
            totals="local",
            metrics="none",
            **tensors,
        )
        return out.loss, {"loss": out.loss.detach()}

    return custom_loss


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """The rows of samples as one tensor `[B, T]`, with zeros behind the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _check(spec: LossSpec, args: Any, batch: Mapping[str, Any]) -> None:
    """Raise if the settings contradict the spec."""
    per_token = isinstance(spec.aggregate, TokenMean)
    if bool(args.calculate_per_token_loss) != per_token:
        raise SpecError(
            f"this loss is averaged by {spec.aggregate!r}, but slime with calculate_per_token_loss="
            f"{args.calculate_per_token_loss} by {'samples' if per_token else 'tokens'}; "
            f"{'pass' if per_token else 'leave out'} --calculate-per-token-loss."
        )
    if used := [name for name in OWN_TERMS if getattr(args, name, False)]:
        raise SpecError(
            f"{used[0]} belongs to slime's own policy loss and has no effect on a custom loss; "
            "unset it, and put the term into the spec."
        )
    if args.entropy_coef != spec.entropy_coef:
        raise SpecError(
            f"entropy_coef={args.entropy_coef} has no effect on a custom loss, but slime computes "
            f"the gradient of the entropy by it; pass --entropy-coef {spec.entropy_coef}."
        )
    if bool(args.use_kl_loss) != (spec.kl is not None):
        raise SpecError(
            f"use_kl_loss={args.use_kl_loss}, but the spec has kl={spec.kl!r}; slime runs the "
            "reference model by that setting, and the spec decides the term."
        )
    missing = [
        KEYS[n] for n in spec.reads if n in KEYS and n != "old_logp" and not batch.get(KEYS[n])
    ]
    if missing:
        raise InputError(f"this loss reads {missing[0]}, which slime's batch does not hold.")
