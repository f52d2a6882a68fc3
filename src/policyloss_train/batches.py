"""Completions as packs: concatenated sequences, without padding.

Legend: N positions of a pack, S sequences. A sequence of L tokens has L−1 positions, each with the
token that the model reads (`ids`) and the token that it predicts (`targets`). `completion` is True
where the target belongs to the completion, `mask` where the target is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policyloss.advantage import mask_truncated
from policyloss_train.sampler import Sample


@dataclass(frozen=True)
class Pack:
    """Concatenated sequences. tokens: `[N]` tensors by name. sequences: `[S]` tensors by name.
    lengths: the number of positions of each sequence. kept: for each sequence, the vocabulary
    entries that its tokens were drawn from, one position after the other; `tokens["kept"]` is the
    number of entries at each position. None if every token was drawn from the full vocabulary.
    """

    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    lengths: list[int]
    kept: list[Tensor] | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], *, train_on_cut: bool = True) -> Pack:
        """Pack all samples, or `nothing`. train_on_cut: False masks out unfinished completions."""
        if not samples:
            return cls.nothing()
        prompts, completions = (
            torch.tensor([getattr(sample, name).shape[0] for sample in samples])
            for name in ("prompt_ids", "completion_ids")
        )
        lengths = prompts + completions - 1
        # Each sequence has one more token than positions, so the k-th begins k tokens later.
        text = torch.cat([x for s in samples for x in (s.prompt_ids, s.completion_ids)])
        row, positions = _places(lengths)
        first = torch.arange(row.shape[0]) + row
        completion = positions >= (prompts - 1)[row]
        cut = torch.tensor([not (sample.finished or train_on_cut) for sample in samples])
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        logp = torch.cat([sample.rollout_logp for sample in samples])
        tokens = {
            "ids": text[first],
            "targets": text[first + 1],
            "completion": completion,
            "mask": mask_truncated(completion, cut, cu_seqlens=bounds),
            "position_ids": positions,
            "rollout_logp": torch.zeros(row.shape[0]).masked_scatter(completion, logp),
        }
        if samples[0].turn_ids is not None:  # a task in turns
            tokens |= _turn_tokens(samples, completion)
            tokens["mask"] &= tokens["turn_ids"] >= 0
        supports = [sample.support for sample in samples if sample.support is not None]
        if supports:
            counts = torch.cat([offsets.diff() for _, offsets in supports])
            tokens["kept"] = torch.zeros_like(row).masked_scatter(completion, counts)
        numbers = {
            "group_ids": torch.tensor([sample.group for sample in samples], dtype=torch.int64),
            "rewards": torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        }
        return cls(tokens, numbers, lengths.tolist(), [ids for ids, _ in supports] or None)

    @classmethod
    def nothing(cls) -> Pack:
        """One sequence without a trained token, with which an idle rank takes part in forwards."""
        token = torch.zeros(1, dtype=torch.int64)
        tokens = dict.fromkeys(("ids", "targets", "position_ids"), token)
        tokens |= dict.fromkeys(("completion", "mask"), token.bool())
        tokens["rollout_logp"] = torch.zeros(1)
        return cls(tokens, {"group_ids": token - 1, "rewards": torch.zeros(1)}, [1])

    @property
    def cu_seqlens(self) -> Tensor:
        """The offset of each sequence, and N at the end, `[S+1]`."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(self.tokens["ids"].device)

    @property
    def completion_lengths(self) -> Tensor:
        """The number of tokens of each sequence that are trained on, `[S]`."""
        mask = self.tokens["mask"]
        row, _ = _places(torch.tensor(self.lengths))
        counts = torch.zeros(len(self.lengths), dtype=torch.int64, device=mask.device)
        return counts.index_add(0, row.to(mask.device), mask.long())

    def with_tokens(self, **tensors: Tensor) -> Pack:
        """A copy of the pack with more tensors, `[N]` each."""
        return replace(self, tokens={**self.tokens, **tensors})

    def with_ages(self, samples: Sequence[Sample], version: int) -> Pack:
        """A copy with the age of each token. samples: those of the pack, none for `nothing`.
        version: of the current weights.
        """
        row, _ = _places(torch.tensor(self.lengths))
        ages = torch.tensor([version - sample.version for sample in samples] or [0])
        return self.with_tokens(ages=ages[row])

    def to(self, device: torch.device) -> Pack:
        """The pack on a device."""
        tokens, sequences = (
            {name: x.to(device) for name, x in group.items()}
            for group in (self.tokens, self.sequences)
        )
        if self.kept is None:
            return Pack(tokens, sequences, self.lengths)
        kept = torch.split(torch.cat(self.kept).to(device), [len(x) for x in self.kept])
        return Pack(tokens, sequences, self.lengths, list(kept))

    def select(self, chosen: Sequence[int]) -> Pack:
        """Some of the sequences, in this order."""
        device, lengths = self.tokens["ids"].device, [self.lengths[i] for i in chosen]
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        row, positions = _places(torch.tensor(lengths))
        tokens = (ends[list(chosen)][row] + positions).to(device)
        sequences = torch.tensor(list(chosen), device=device)
        return Pack(
            {name: x.index_select(0, tokens) for name, x in self.tokens.items()},
            {name: x.index_select(0, sequences) for name, x in self.sequences.items()},
            lengths,
            None if self.kept is None else [self.kept[i] for i in chosen],
        )

    def micro_batch(self) -> dict[str, Any]:
        """The micro-batch that `policyloss.accumulate` takes."""
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


def _turn_tokens(samples: Sequence[Sample], completion: Tensor) -> dict[str, Tensor]:
    """The turn of each token, −1 outside of all turns, and its reward at its last token."""
    ids = [sample.turn_ids for sample in samples if sample.turn_ids is not None]
    rewards = [torch.zeros(len(turns)) for turns in ids]
    for row, turns, sample in zip(rewards, ids, samples, strict=True):
        for turn, reward in enumerate(sample.turn_rewards):
            row[(turns == turn).nonzero()[-1]] = reward
    return {
        "turn_ids": torch.full_like(completion, -1, dtype=torch.int64).masked_scatter(
            completion, torch.cat(ids)
        ),
        "turn_rewards": torch.zeros(len(completion)).masked_scatter(completion, torch.cat(rewards)),
    }


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For each position of a pack: its sequence, and its index in that sequence, each `[N]`."""
    row = torch.repeat_interleave(lengths)
    return row, torch.arange(row.shape[0]) - (lengths.cumsum(0) - lengths)[row]


def minibatches(count: int, number: int, seed: int) -> list[list[int]]:
    """`count` sequences, shuffled by `seed` and split into `number` parts of similar size."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i * count // number : (i + 1) * count // number] for i in range(number)]
