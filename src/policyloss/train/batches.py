"""Completions as packs: sequences end to end, without padding.

Legend: N tokens of a pack, S sequences. A sequence of L tokens gives L−1 places, each with the
token it reads (`ids`) and the one it predicts (`targets`); `completion` is True where that one
belongs to the completion, `mask` where it is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from policyloss.train.sampler import Sample


@dataclass(frozen=True)
class Pack:
    """Sequences end to end. tokens: `[N]` tensors by name. sequences: `[S]` tensors by name.
    lengths: places of each sequence. kept: for each sequence, the vocabulary entries that its
    tokens were drawn from, place after place; `tokens["kept"]` says how many each place has. None
    if every token was drawn from all.
    """

    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    lengths: list[int]
    kept: list[Tensor] | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], *, train_on_cut: bool = True) -> Pack:
        """All samples. train_on_cut: False takes completions that did not end out of the mask."""
        parts: dict[str, list[Tensor]] = {
            name: []
            for name in ("ids", "targets", "completion", "mask", "position_ids", "rollout_logp")
        }
        lengths, kept = [], []
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
            if sample.support is not None:
                ids, offsets = sample.support
                counts = torch.zeros(n, dtype=torch.int64)
                parts.setdefault("kept", []).append(
                    counts.masked_scatter(completion, offsets.diff())
                )
                kept.append(ids)
            lengths.append(n)
        numbers = {
            "group_ids": torch.tensor([sample.group for sample in samples], dtype=torch.int64),
            "rewards": torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        }
        tokens = {name: torch.cat(x) for name, x in parts.items()}
        return cls(tokens, numbers, lengths, kept or None)

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
        return replace(self, tokens={**self.tokens, **tensors})

    def to(self, device: torch.device) -> Pack:
        """The same on a device."""
        tokens, sequences = (
            {name: x.to(device) for name, x in group.items()}
            for group in (self.tokens, self.sequences)
        )
        kept = None if self.kept is None else [x.to(device) for x in self.kept]
        return Pack(tokens, sequences, self.lengths, kept)

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
            None if self.kept is None else [self.kept[i] for i in chosen],
        )

    def micro_batch(self) -> dict[str, Any]:
        """As `policyloss.accumulate` takes it."""
        kept = self.kept and (
            torch.cat(self.kept),
            torch.nn.functional.pad(self.tokens["kept"].cumsum(0), (1, 0)),
        )
        return {
            **self.tokens,
            "support": kept,
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
