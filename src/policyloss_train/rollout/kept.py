"""Which tokens vLLM drew from: they are read off the log-probabilities that it returns.

Its processed log-probabilities are −inf for tokens that top-p and top-k left out (−9999 where a
server writes them). So if it returns those of the likeliest tokens, and one of these is left out,
then all that were kept are among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss_train.config import TrainConfig
from policyloss_train.rollout.protocol import LEFT_OUT, RolloutError
from policyloss_train.supports import Pair

TIES = 64  # tokens that vLLM may keep beyond --top-k, because they are as likely as the last
MOST = 4096  # log-probabilities of a token, each of which is a number of Python on its way here


@dataclass(frozen=True)
class Report:
    """How many log-probabilities vLLM must return for each token: 0 if nobody asks what it kept."""

    count: int
    vocabulary: int

    @classmethod
    def of(cls, config: TrainConfig, vocabulary: int) -> Report:
        """As many as top-k may keep; without it, those of all tokens."""
        if not config.replays_support:
            return cls(0, vocabulary)
        count = min(vocabulary, config.top_k + TIES if config.top_k else vocabulary)
        if count > MOST:
            raise InputError(
                f"--rollout {config.rollout} would have to report {count} log-probabilities of "
                "every token, so that the learner knows which tokens --top-p and --top-k kept; add "
                f"--top-k {MOST - TIES} or less, or --no-sampling-mask."
            )
        return cls(count, vocabulary)

    def support(self, ids: Tensor, logp: Tensor) -> Pair:
        """What each token was drawn from. ids, logp: the likeliest tokens, `[L, count]` each."""
        kept = logp > LEFT_OUT
        sizes = kept.sum(1)
        if self.count < self.vocabulary and bool((sizes == self.count).any()):
            raise RolloutError(
                f"vLLM kept {self.count} tokens or more, and reports no more of them: more than "
                f"{TIES} are as likely as the last that --top-k allows. Use another --top-k, or "
                "--no-sampling-mask."
            )
        return ids[kept].to(torch.int32), torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
