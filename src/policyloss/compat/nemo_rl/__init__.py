"""Any loss of this library as the `loss_fn` of NeMo-RL's `grpo_train`.

NeMo-RL counts the valid tokens and sequences of a step over all ranks and passes both to every
call, so they are the `Totals` of the loss. It multiplies the loss by the number of ranks itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.engines import COUNTED, PREFIX, fitting_spec, mean_records
from policyloss.errors import InputError
from policyloss.loss import policy_loss, ready_spec
from policyloss.metrics import Metrics
from policyloss.parts.aggregate import TokenMean
from policyloss.records import Record, Stat
from policyloss.totals import Totals

__all__ = ["NemoLoss"]

INTERFACES = "nemo_rl.algorithms.loss.interfaces"
# The argument of `policy_loss`, and the key of NeMo-RL's data.
KEYS = {
    "old_logp": "prev_logprobs",
    "rollout_logp": "generation_logprobs",
    "ref_logp": "reference_policy_logprobs",
}


class NemoLoss:
    """`loss` with the arguments, attributes and results of NeMo-RL's `LossFunction`.

        grpo_train(…, loss_fn=NemoLoss("dapo"), …)

    NeMo-RL rescales gradients by `loss_type`, the denominator of the spec's average. It adds
    reported numbers over micro-batches, so the means are divided by its count of tokens.
    """

    def __init__(self, loss: AnyLoss) -> None:
        interfaces = import_module(INTERFACES)
        self.spec = fitting_spec("NeMo-RL", ready_spec(loss), KEYS, COUNTED)
        by_tokens = isinstance(self.spec.aggregate, TokenMean)
        kinds, units = interfaces.LossType, interfaces.MetricNormalizer
        self.loss_type = kinds.TOKEN_LEVEL if by_tokens else kinds.SEQUENCE_LEVEL
        self.input_type = interfaces.LossInputType.LOGPROB
        # NeMo-RL then passes the log-probabilities before its top-k and top-p filter as well.
        self.reference_policy_kl_penalty = len(self.spec.kl_parts)
        self.metric_normalizations = {
            "loss": units.TOKENS if by_tokens else units.SEQUENCES,
            "num_valid_samples": units.NONE,
            **{f"{PREFIX}{key}": units.TOKENS for key in ("clip_fraction", "kl_old_k1")},
        }

    def __call__(
        self,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """The share of a micro-batch in the loss of the step. data: tensors `[B, T]`, of which the
        first position has no prediction; next_token_logprobs: `[B, T-1]`.
        """
        read = {key: KEYS[key] for key in KEYS if key in self.spec.reads or KEYS[key] in data}
        if missing := [key for key in read.values() if key not in data]:
            raise InputError(
                f"this loss reads {missing[0]}, which NeMo-RL did not compute; see "
                "loss_fn.force_on_policy_ratio, loss_fn.reference_policy_kl_penalty and "
                "grpo.skip_reference_policy_logprobs_calculation."
            )
        if "curr_logprobs_unfiltered" in data and self.spec.kl is not None:
            raise InputError(
                "policy.generation.top_k or top_p filters the log-probabilities of the policy, but "
                "not those of the reference, so a KL term cannot be computed from them; use "
                "spec.replace(kl=None), or sample without a filter."
            )
        samples = data["sample_mask"]
        out = policy_loss(
            self.spec,
            next_token_logprobs,
            **{"old_logp": None, **{key: data[name][:, 1:] for key, name in read.items()}},
            advantages=data["advantages"][:, 1:],
            mask=data["token_mask"][:, 1:].bool() & samples.bool().unsqueeze(-1),
            totals=Totals(global_valid_toks, global_valid_seqs),
            metrics="basic",
        )
        means = mean_records(out.metrics)
        shares: dict[str, Record] = {
            key: Stat(mean.sum, global_valid_toks) for key, mean in means.items()
        }
        counts = {"loss": out.loss.item(), "num_valid_samples": int(samples.count_nonzero())}
        return out.loss, counts | Metrics(shares).compute()
