"""OpenRLHF's two averages: over tokens, or over samples of their token means."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.compat.counts import number
from policyloss.compat.parts import seq_mean_token_mean
from policyloss.compat.releases import at_least
from policyloss.errors import InputError
from policyloss.parts.aggregate import SeqMeanTokenMean, TokenMean
from policyloss.totals import Totals

EPSILON = 1e-8  # added to the number of a sequence's tokens


class Average(NamedTuple):
    """One of the two averages as `release` has it, and the counts of the step in a call."""

    token_level: bool
    release: str
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None

    def mask(
        self, like: Tensor, mask: Tensor | None, called: str = "action_mask", needed: bool = False
    ) -> Tensor:
        """The mask, or a mask of all tokens where OpenRLHF works without one. called: its name."""
        if mask is not None:
            return mask
        rows_need_it = not self.token_level and at_least(self.release, "0.10.3")
        counted = self.token_level and self.batch_num_tokens is not None
        if needed or rows_need_it or counted:
            raise InputError(
                f"{called} was not given; only a mean over the tokens of this call works without "
                "it."
            )
        return torch.ones_like(like, dtype=torch.bool)

    def part(self, mask_dtype: torch.dtype) -> TokenMean | SeqMeanTokenMean:
        """The aggregation. OpenRLHF adds epsilon to a count in the mask's precision, and only
        float64 keeps it.
        """
        if self.token_level:
            return TokenMean()
        felt = mask_dtype == torch.float64 and at_least(self.release, "0.10.3")
        return seq_mean_token_mean(EPSILON if felt else 0.0)

    @property
    def totals(self) -> Totals | Literal["local"]:
        """The step's counts; without the one that the mean needs, the call is the complete
        batch.
        """
        count = number(self.batch_num_tokens if self.token_level else self.global_batch_size)
        return "local" if count is None else Totals(count, count, dp_size=int(self.dp_size))
