"""Teachers: the distributions that a student's distribution is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policyloss.arguments import check_tensor, description
from policyloss.errors import InputError


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher given by its head: `softmax((hidden @ weight.T + bias) / temperature)` per token.

    hidden: `[..., D]`, the teacher's last hidden states, aligned with the student's `hidden`: each
    state predicts one token. D may differ from the student's. weight: `[V, D]`, over the
    student's vocabulary (over this rank's entries, if the vocabulary is split over ranks). bias,
    temperature, softcap: as in `linear_logprobs`. The teacher gets no gradient, even if its tensors
    require one.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    temperature: float | Tensor = 1.0
    softcap: float | None = None

    def prefix(self, size: int) -> Teacher:
        """The same teacher over the first `size` entries of its vocabulary, normalised over them.

        Use it for models that share a tokenizer and pad its vocabulary to different sizes.
        """
        check_tensor("teacher.weight", self.weight, "float")
        entries = self.weight.shape[0]
        if not isinstance(size, int) or not 0 < size <= entries:
            raise InputError(
                f"prefix takes the first entries of the teacher's {entries}, got "
                f"{description(size)}."
            )
        bias = None if self.bias is None else self.bias[:size]
        return replace(self, weight=self.weight[:size], bias=bias)


@dataclass(frozen=True, eq=False)
class TopK:
    """A teacher given by the log-probabilities of some vocabulary entries per token.

    Usually these are the k most probable entries; they may also be entries that the student chose.
    ids: `[..., K]` integers, sorted in ascending order along K; −1 is padding: it comes first, and
    its logp is ignored. logp: `[..., K]`, normalised over the whole vocabulary. The divergence is
    over these entries; `rest` of `Divergence` decides how all others count (by default, as one more
    entry).
    """

    ids: Tensor
    logp: Tensor

    def __post_init__(self) -> None:
        check_tensor("TopK.ids", self.ids, "integer")
        check_tensor("TopK.logp", self.logp, "float", like=("TopK.ids", self.ids))
        if self.ids.shape != self.logp.shape or self.ids.dim() < 2 or not self.ids.shape[-1]:
            raise InputError(
                f"TopK.ids has shape {tuple(self.ids.shape)} and logp {tuple(self.logp.shape)}; "
                "give both as [..., K], with at least one entry per token."
            )

    @classmethod
    def sorted(cls, ids: Tensor, logp: Tensor) -> TopK:
        """Make a teacher from entries in any order, such as the result of `torch.topk`."""
        order = ids.argsort(-1)
        return cls(ids.gather(-1, order), logp.gather(-1, order))

    def counts(self, size: int, valid: Tensor | None) -> Tensor:
        """The numbers of invalid tokens, `[4]`: with ids outside a vocabulary of `size`, with ids
        not strictly ascending, with a log-probability above 0 (or NaN), and with probabilities
        that sum to more than 1. valid: the flattened mask, or None for all tokens.
        """
        k = self.ids.shape[-1]
        ids, logp = self.ids.reshape(-1, k), self.logp.detach().reshape(-1, k).float()
        tolerance = max(1e-3, 4 * torch.finfo(self.logp.dtype).eps)
        there = ids >= 0
        known = torch.where(there, logp, -torch.inf)
        falls = there[:, :-1] & (ids[:, 1:] <= ids[:, :-1])
        outside = ((ids < -1) | (ids >= size)).any(-1)
        above = ~(known <= tolerance).all(-1)
        wrong = torch.stack([outside, falls.any(-1), above, known.exp().sum(-1) > 1 + tolerance])
        return (wrong if valid is None else wrong & valid).sum(-1)


def refuse_counts(counts: list[int], size: int) -> None:
    """Raise if `counts`, the result of `TopK.counts`, show a teacher that cannot be used."""
    problems = (
        f"ids lie outside of the student's vocabulary of {size} entries, 0 to {size - 1}",
        "ids do not rise, or hold one id twice; TopK.sorted(ids, logp) sorts them, and an entry "
        "may be there once",
        "logp holds a log-probability above 0 (or NaN): give log-probabilities, not logits",
        "logp holds probabilities that sum to more than 1: they must be normalised over the whole "
        "vocabulary, not over the entries that were kept",
    )
    for number, problem in zip(counts, problems, strict=True):
        if number:
            raise InputError(f"teacher has {number} token(s) whose {problem}.")
