"""Completions as packs: sequences end to end, without padding.

Legend: N tokens of a pack, S sequences. A sequence of L tokens gives L−1 places, each with the
token it reads (`ids`) and the one it predicts (`targets`); `completion` is True where that one
belongs to the completion, `mask` where it is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from policyloss.train.sampler import Sample


@dataclass(frozen=True)
class Pack:
    """Sequences end to end. tokens: `[N]` tensors by name. sequences: `[S]` tensors by name.
    lengths: places of each sequence.
    """

    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    lengths: list[int]

    @classmethod
    def of(cls, samples: Sequence[Sample], *, train_on_cut: bool = True) -> Pack:
        """All samples. train_on_cut: False takes completions that did not end out of the mask."""
        parts: dict[str, list[Tensor]] = {
            name: []
            for name in ("ids", "targets", "completion", "mask", "position_ids", "rollout_logp")
        }
        lengths = []
        for sample in samples:
            sequence = torch.cat([sample.prompt_ids, sample.completion_ids])
            n, prompt = sequence.shape[0] - 1, sample.prompt_ids.shape[0]
            completion = torch.arange(n) >= prompt - 1
            parts["ids"].append(sequence[:-1])
            parts["targets"].append(sequence[1:])
            parts["completion"].append(completion)
            parts["mask"].append(completion & (sample.finished or train_on_cut))
            parts["position_ids"].append(torch.arange(n))
            parts["rollout_logp"].append(
                torch.zeros(n).masked_scatter(completion, sample.rollout_logp)
            )
            lengths.append(n)
        numbers = {
            "group_ids": torch.tensor([sample.group for sample in samples], dtype=torch.int64),
            "rewards": torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        }
        return cls({name: torch.cat(x) for name, x in parts.items()}, numbers, lengths)

    @classmethod
    def nothing(cls) -> Pack:
        """One sequence without a token to train on, for a rank that has none: it takes part in
        every forward all the same.
        """
        token = torch.zeros(1, dtype=torch.int64)
        nowhere = {"completion": token.bool(), "mask": token.bool()}
        tokens = {
            "ids": token,
            "targets": token,
            **nowhere,
            "position_ids": token,
            "rollout_logp": torch.zeros(1),
        }
        return cls(tokens, {"group_ids": token - 1, "rewards": torch.zeros(1)}, [1])

    @property
    def cu_seqlens(self) -> Tensor:
        """Where sequences begin and end, `[S+1]`."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(self.tokens["ids"].device)

    @property
    def completion_lengths(self) -> Tensor:
        """Tokens of each sequence that are trained on, `[S]`."""
        return torch.stack([part.sum() for part in torch.split(self.tokens["mask"], self.lengths)])

    def with_tokens(self, **tensors: Tensor) -> Pack:
        """The same with more tensors, `[N]` each."""
        return Pack({**self.tokens, **tensors}, self.sequences, self.lengths)

    def to(self, device: torch.device) -> Pack:
        """The same on a device."""
        tokens, sequences = (
            {name: x.to(device) for name, x in group.items()}
            for group in (self.tokens, self.sequences)
        )
        return Pack(tokens, sequences, self.lengths)

    def select(self, chosen: Sequence[int]) -> Pack:
        """Some of the sequences, in this order."""
        device, lengths = self.tokens["ids"].device, [self.lengths[i] for i in chosen]
        starts = list(accumulate(self.lengths, initial=0))
        places = [torch.arange(starts[i], starts[i + 1]) for i in chosen]
        tokens, sequences = torch.cat(places).to(device), torch.tensor(list(chosen), device=device)
        return Pack(
            {name: x.index_select(0, tokens) for name, x in self.tokens.items()},
            {name: x.index_select(0, sequences) for name, x in self.sequences.items()},
            lengths,
        )

    def micro_batch(self) -> dict[str, Any]:
        """As `policyloss.accumulate` takes it."""
        return {
            **self.tokens,
            "cu_seqlens": self.cu_seqlens,
            "lengths": self.lengths,
            "group_ids": self.sequences["group_ids"],
        }


def minibatches(count: int, number: int, seed: int) -> list[list[int]]:
    """`count` sequences in an order drawn from `seed`,
    dealt out into `number` parts of about one size.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i * count // number : (i + 1) * count // number] for i in range(number)]
