"""A batch that can be cut between its sequences, and the cuts that show a wrong denominator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.segments import Sequences
from policyloss.tokens import as_mask

Cut = list[list[int]]  # the micro-batches, each a list of sequences


class CuttableBatch:
    """The mapping that a trainer trains on, as S sequences that can be cut.

    mask: `[B, T]` rows, or `[N]` with `cu_seqlens`. Tensors that lie along the rows (`[B, …]`), the
    tokens of a pack (`[N, …]`, `[1, N, …]`) or its sequences (`[S, …]`) are cut; everything else is
    passed through.
    lengths: the number of valid tokens of each sequence. positions: the number of all its
    positions, masked ones included. Both are `[S]`, float64.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        if not isinstance(batch, Mapping):
            raise InputError(
                f"batch must be a mapping of names to tensors, got {type(batch).__name__}."
            )
        if not isinstance(batch.get("mask"), Tensor):
            raise InputError(
                "batch needs a tensor 'mask', True where a token is trained on; it has "
                f"{sorted(map(str, batch))}."
            )
        self.batch = dict(batch)
        self.cu_seqlens: Tensor | None = self.batch.get("cu_seqlens")
        mask = self.batch["mask"]
        self.sequences = Sequences.of(mask, self.cu_seqlens)
        valid = as_mask(mask, mask)
        self.lengths = self.sequences.sum(valid).to("cpu", torch.float64)
        self.positions = self.sequences.sum(torch.ones_like(valid)).to("cpu", torch.float64)

    @property
    def packed(self) -> bool:
        """Whether the tokens lie in one pack, `[N]` with `cu_seqlens`."""
        return self.cu_seqlens is not None

    def take(self, chosen: Sequence[int]) -> dict[str, Any]:
        """The micro-batch of the `chosen` sequences, in that order; one may be chosen twice."""
        index = torch.tensor(list(chosen), dtype=torch.int64)
        if self.cu_seqlens is None:
            return {
                name: self._picked(x, self.sequences.shape[0], index)
                for name, x in self.batch.items()
            }
        offsets = self.cu_seqlens.to("cpu", torch.int64)
        spans = [torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in chosen]
        tokens, n = torch.cat(spans), self.sequences.shape[0]
        micro = {}
        for name, x in self.batch.items():
            if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == (1, n):
                micro[name] = x[:, tokens.to(x.device)]
            else:  # as everywhere, where N = S a tensor is taken per token
                along_tokens = isinstance(x, Tensor) and x.dim() >= 1 and x.shape[0] == n
                size, chosen_here = (n, tokens) if along_tokens else (self.sequences.count, index)
                micro[name] = self._picked(x, size, chosen_here)
        lengths = torch.tensor([len(span) for span in spans])
        micro["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(self.cu_seqlens)
        return micro

    @staticmethod
    def _picked(x: Any, size: int, index: Tensor) -> Any:
        along = isinstance(x, Tensor) and x.dim() >= 1 and x.shape[0] == size
        return x[index.to(x.device)] if along else x

    def half_masked(self, sequence: int) -> dict[str, Any]:
        """One sequence alone, with the later half of its valid tokens masked."""
        micro = self.take([sequence])
        valid = micro["mask"] != 0
        keep = int(self.lengths[sequence]) // 2
        early = valid.reshape(-1).cumsum(0).reshape(valid.shape) <= keep
        micro["mask"] = torch.where(early, micro["mask"], torch.zeros_like(micro["mask"]))
        return micro

    def checked(self, cuts: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Cut]:
        """The user's cuts, if each has every sequence once and no empty micro-batch."""
        if not isinstance(cuts, Mapping) or not cuts:
            raise InputError(
                "cuts must map a name to a list of micro-batches, each a list of sequences; got "
                f"{cuts!r}."
            )
        every = list(range(self.sequences.count))
        for name, cut in cuts.items():
            if sorted(i for part in cut for i in part) != every:
                raise InputError(
                    f"cut {name!r} must hold each of the {len(every)} sequences once, got "
                    f"{list(map(list, cut))}."
                )
            if any(not self.lengths[list(part)].any() for part in cut):
                raise InputError(
                    f"cut {name!r} has a micro-batch without a valid token: {list(map(list, cut))}."
                )
        return {str(name): [list(part) for part in cut] for name, cut in cuts.items()}

    def default_cuts(self) -> dict[str, Cut]:
        """Halves, single sequences, one and the rest, short and long; equal cuts appear once."""
        present = self.lengths.nonzero().flatten().tolist()
        by_length = sorted(present, key=lambda i: float(self.lengths[i]))
        half = len(present) // 2
        cuts = {
            "two halves": [present[:half], present[half:]],
            "one sequence each": [[i] for i in present],
            "one and the rest": [present[:1], present[1:]],
            "short and long": [sorted(by_length[:half]), sorted(by_length[half:])],
        }
        distinct: dict[str, Cut] = {}
        for name, cut in cuts.items():
            if sorted(cut) not in [sorted(other) for other in distinct.values()]:
                distinct[name] = cut
        return {name: self._with_empty(cut) for name, cut in distinct.items()}

    def over_ranks(self, ranks: int) -> Cut:
        """One uneven share per rank: each a short sequence, and the last rank gets the rest."""
        present = sorted(
            self.lengths.nonzero().flatten().tolist(), key=lambda i: float(self.lengths[i])
        )
        if len(present) < ranks:
            raise InputError(
                f"batch has {len(present)} sequences with valid tokens, too few to share among "
                f"{ranks} ranks."
            )
        return self._with_empty([*([i] for i in present[: ranks - 1]), present[ranks - 1 :]])

    def _with_empty(self, cut: Cut) -> Cut:
        """`cut` with the sequences that have no valid token in its last micro-batch, because alone
        they would be 0/0 in many trainers.
        """
        return [*cut[:-1], [*cut[-1], *(self.lengths == 0).nonzero().flatten().tolist()]]
