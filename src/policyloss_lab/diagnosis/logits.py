"""Hypotheses about numbers after the model: soft cap, precision, a shard of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from policyloss_lab.diagnosis.hypothesis import Case, Fit
from policyloss_lab.diagnosis.pairs import on_grid
from policyloss_lab.diagnosis.sampling import geometric, refined

SHARDS = (2, 4, 8)


@dataclass(frozen=True)
class SoftCap:
    """One side caps its logits, `c·tanh(z/c)`, and the other does not, or caps them twice."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The best cap, and the model without its cap."""
        if case.scorer is None:
            return
        scorer, logits = case.scorer, case.scorer.logits.double()
        cap = getattr(scorer.config, "final_logit_softcapping", None)
        for side, sign in case.sides:

            def capped(c: float, sign: int = sign) -> Tensor:
                return sign * (scorer.of_ids(c * torch.tanh(logits / c)) - scorer.logp)

            value, prediction = refined(geometric(1.0, 200.0, 25), capped, case)
            twice = cap is not None and abs(value / cap - 1) < 0.02
            word = "a second soft cap" if twice else "a soft cap"
            yield Fit(
                "softcap",
                f"{side} has {word} of {value:.3g} on its logits",
                prediction,
                freedom=1,
                details={"softcap": value, "side": side},
            )
        if cap is not None:
            bare = cap * torch.atanh((logits / cap).clamp(-1 + 1e-6, 1 - 1e-6))
            yield from case.fit_sides(
                "softcap",
                f"{{side}} lacks the model's soft cap of {cap:g}",
                scorer.of_ids(bare) - scorer.logp,
                {"softcap": cap, "missing": True},
            )


@dataclass(frozen=True)
class RoundedLogits:
    """One side rounds its logits to 16 bits before the softmax."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """bf16 and fp16."""
        if case.scorer is None:
            return
        scorer = case.scorer
        for cause, dtype in (("logits_bf16", torch.bfloat16), ("logits_fp16", torch.float16)):
            effect = scorer.of_ids(scorer.logits.to(dtype)) - scorer.logp
            name = str(dtype).removeprefix("torch.")
            sentence = f"the logits of {{side}} are rounded to {name}"
            yield from case.fit_sides(cause, sentence, effect, share="exact")


@dataclass(frozen=True)
class VocabularyShard:
    """The vocabulary is split over ranks, and one side handles a shard wrongly: it leaves the shard
    out of the normaliser, has no logits for it, or normalises over the token's shard alone.
    """

    def fit(self, case: Case) -> Iterator[Fit]:
        """Every shard of 2, 4 and 8."""
        if case.scorer is None:
            return
        scorer, ids = case.scorer, case.scorer.ids
        logits = scorer.logits.double()
        vocabulary = logits.shape[1]
        chosen = logits.gather(1, ids[:, None])[:, 0]
        for shards in SHARDS:
            size = -(-vocabulary // shards)
            sums = torch.stack([part.logsumexp(1) for part in torch.split(logits, size, 1)], 1)
            count = sums.shape[1]
            if count < 2:
                continue
            mine = ids // size
            alone = chosen - sums.gather(1, mine[:, None])[:, 0]
            effects = {f"normalised over 1 of {count} shards": alone}
            for j in range(count):
                others = torch.cat([sums[:, :j], sums[:, j + 1 :]], 1).logsumexp(1)
                width = min(size, vocabulary - j * size)
                empty = torch.logaddexp(others, others.new_full((), width).log())
                zero = torch.where(mine == j, 0.0, chosen)
                effects[f"without shard {j} of {count} in the normaliser"] = chosen - others
                effects[f"with zero logits in shard {j} of {count}"] = zero - empty
            for what, logp in effects.items():
                yield from case.fit_sides(
                    "vocab_shard",
                    f"{{side}} is {what} of the vocabulary",
                    logp - scorer.logp,
                    {"shards": count},
                    freedom=2,
                )


TYPES = {"logp_bf16": torch.bfloat16, "logp_fp16": torch.float16}


@dataclass(frozen=True)
class StoredLogProbs:
    """One side's log-probabilities, or both, were rounded to bf16 or fp16 after the softmax."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """A fit for each type that holds all numbers of a side exactly."""
        pairs = case.pairs
        uncertain = (pairs.trainer < -1e-3) & (pairs.rollout < -1e-3)
        if int(uncertain.sum()) < 8:
            return
        for cause, dtype in TYPES.items():
            rollout = bool(on_grid(pairs.rollout, dtype)[uncertain].all())
            trainer = bool(on_grid(pairs.trainer, dtype)[uncertain].all())
            name = str(dtype).removeprefix("torch.")
            if rollout and trainer:
                step = torch.finfo(dtype).eps * pairs.trainer.abs()
                prediction = pairs.difference.clamp(-step, step)
                yield Fit(cause, f"both are rounded to {name}", prediction, freedom=0)
            elif rollout:
                prediction = pairs.trainer.to(dtype).double() - pairs.trainer
                yield Fit(cause, f"rollout_logp is rounded to {name}", prediction, freedom=0)
            elif trainer:
                prediction = pairs.rollout - pairs.rollout.to(dtype).double()
                yield Fit(cause, f"old_logp is rounded to {name}", prediction, freedom=0)
