"""Any loss of this library as the custom loss of slime.

slime computes log-probabilities from vocabulary-parallel logits, slices samples over
context-parallel ranks, and passes its average as a function of one number per token. That function
is linear, so its slopes are the weights of the tokens, with slime's own denominators; the loss
here is the sum with these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.engines import check_settings, fitting_spec
from policyloss.compat.parts import slopes
from policyloss.errors import InputError, SpecError
from policyloss.loss import policy_loss
from policyloss.parts.aggregate import SeqMeanTokenMean, TokenMean, TokenSum
from policyloss.spec import LossSpec

__all__ = ["loss_of"]

LOSS, PARALLEL = "slime.backends.megatron_utils.loss", "megatron.core.mpu"
# The argument of `policy_loss`, and the key of slime's batch.
KEYS = {"old_logp": "log_probs", "rollout_logp": "rollout_log_probs", "ref_logp": "ref_log_probs"}
LAYOUT = ("unconcat_tokens", "total_lengths", "response_lengths")
# Terms of slime's own loss, which must be off.
OWN_TERMS = dict.fromkeys(("use_tis", "use_opsm", "use_unbiased_kl", "use_rollout_logprobs"), False)
Batch = Mapping[str, Any]
CustomLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
Scores = tuple[Mapping[str, Sequence[Tensor]], Any]


def loss_of(loss: AnyLoss) -> CustomLoss:
    """`loss` with the arguments and results of slime's custom loss. In a module of yours,
    `my_loss = loss_of(spec)` is a target of `--custom-loss-function-path`.
    """
    return custom_loss("slime", loss, _scores)


def _scores(args: Any, batch: Batch, logits: Tensor, with_entropy: bool) -> Scores:
    slime, parallel = import_module(LOSS), import_module(PARALLEL)
    _, computed = slime.get_log_probs_and_entropy(
        logits,
        args=args,
        **{name: batch[name] for name in LAYOUT},
        with_entropy=with_entropy,
        **slime.get_rollout_top_p_logprob_kwargs(args, batch),
    )
    several = parallel.get_context_parallel_world_size() > 1
    return computed, parallel.get_context_parallel_group() if several else None


def custom_loss(
    engine: str, loss: AnyLoss, scores: Callable[[Any, Batch, Tensor, bool], Scores]
) -> CustomLoss:
    """The custom loss of slime or of a fork. scores: computes the log-probabilities and entropies
    of each sample from `(args, batch, logits, with_entropy)`, and returns them with the group of
    context-parallel ranks, None if there is one rank.
    """
    spec = fitting_spec(engine, loss, (*KEYS, "entropy"), (TokenMean, SeqMeanTokenMean))

    def policy_loss_of_batch(
        args: Any,
        batch: Batch,
        logits: Tensor,
        sum_of_sample_mean: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _check(engine, spec, args, batch)
        computed, cp_group = scores(args, batch, logits, bool(spec.entropy_coef))
        rows = computed["log_probs"]
        weights = _pad_rows(slopes(sum_of_sample_mean, rows))
        tensors: dict[str, Any] = {
            name: _pad_rows(batch[key]) for name, key in KEYS.items() if batch.get(key)
        }
        # The engine leaves it out if the policy has not been updated.
        tensors.setdefault("old_logp", "current")
        out = policy_loss(
            spec.replace(aggregate=TokenSum()),
            _pad_rows(rows),
            advantages=_pad_rows(batch["advantages"]),
            mask=weights != 0,
            weights=weights,
            entropy=_pad_rows(computed["entropy"]) if spec.entropy_coef else None,
            cp_group=cp_group,
            totals="local",
            metrics="none",
            **tensors,
        )
        return out.loss, {"loss": out.loss.detach()}

    return policy_loss_of_batch


def _pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """The rows of samples as one tensor `[B, T]`, with zeros behind the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _check(engine: str, spec: LossSpec, args: Any, batch: Batch) -> None:
    """Raise if the settings contradict the spec."""
    per_token = isinstance(spec.aggregate, TokenMean)
    if bool(args.calculate_per_token_loss) != per_token:
        raise SpecError(
            f"this loss is averaged by {spec.aggregate!r}, but {engine} with "
            f"calculate_per_token_loss={args.calculate_per_token_loss} by "
            f"{'samples' if per_token else 'tokens'}; {'pass' if per_token else 'leave out'} "
            "--calculate-per-token-loss."
        )
    check_settings(engine, partial(getattr, args), OWN_TERMS)
    if args.entropy_coef != spec.entropy_coef:
        raise SpecError(
            f"entropy_coef={args.entropy_coef} has no effect on a custom loss, but {engine} "
            f"computes the gradient of the entropy by it; pass --entropy-coef {spec.entropy_coef}."
        )
    if bool(args.use_kl_loss) != (spec.kl is not None):
        raise SpecError(
            f"use_kl_loss={args.use_kl_loss}, but the spec has kl={spec.kl!r}; {engine} runs "
            "the reference model by that setting, and the spec decides the term."
        )
    missing = [
        KEYS[n] for n in spec.reads if n in KEYS and n != "old_logp" and not batch.get(KEYS[n])
    ]
    if missing:
        raise InputError(f"this loss reads {missing[0]}, which {engine}'s batch does not hold.")
