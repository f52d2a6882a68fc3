"""All corrections of a spec together: one weight, and the tokens that none of them rejects."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.aggregate import check_alignment
from policyloss.functional.masking import fill
from policyloss.parts.correction import VARIANTS, Corrected, SelfNormalise
from policyloss.tokens import Tokens


class Combined(NamedTuple):
    """All corrections together.

    weight: of the policy term. keep: the tokens that no correction rejects. verdicts: those that
    each correction keeps, by its name. statistics: the batch-wide numbers that were used.
    """

    weight: Tensor | None
    keep: Tensor | None
    verdicts: dict[str, Tensor]
    statistics: dict[str, Tensor]


def combine(corrections: tuple[Any, ...], t: Tokens) -> Combined:
    """Apply every correction of a spec to `t`.

    `SelfNormalise` is left out: it comes after rejected tokens have left the mask.
    """
    weight: Tensor | None = None
    keep: Tensor | None = None
    verdicts: dict[str, Tensor] = {}
    for i, part in enumerate(c for c in corrections if not isinstance(c, SelfNormalise)):
        verdict = part(t)
        if not isinstance(verdict, Corrected):
            raise InputError(
                "a correction must return policyloss.Corrected(weight, keep), got "
                f"{type(verdict).__name__}."
            )
        for x in verdict:
            if x is not None:
                check_alignment(
                    "a correction must return one weight and one verdict per token", x, t.mask
                )
        if verdict.weight is not None:
            weight = verdict.weight if weight is None else weight * verdict.weight
        if verdict.keep is not None:
            keep = verdict.keep if keep is None else keep & verdict.keep
            name = correction_name(part)
            verdicts[name if name not in verdicts else f"{name}_{i}"] = verdict.keep
    if keep is not None:
        # A rejected token has weight 0: its policy term vanishes, but a NaN in it, or in its
        # weight, does not.
        weight = torch.ones_like(t.advantages) if weight is None else weight
        weight = torch.where(keep | weight.isnan(), weight, 0)
    return Combined(weight, keep, verdicts, {})


def correction_name(part: Any) -> str:
    """What metrics call a correction."""
    return (
        type(part).__name__ if isinstance(part, VARIANTS) else getattr(part, "__name__", "custom")
    )


def self_normalised(
    corrections: tuple[Any, ...], corrected: Combined, t: Tokens, group: Any = None
) -> Combined:
    """Divide the weight by its mean over `t` (the tokens that still count), if a part says so."""
    weight = corrected.weight
    for part in corrections:
        if isinstance(part, SelfNormalise) and weight is not None:
            weight = fill(weight, t.mask)
            statistics = part.statistics(t, weight, group) if t.measured is None else t.measured
            weight = weight / statistics["weight_mean"].to(t.dtype).clamp(
                min=torch.finfo(t.dtype).tiny
            )
            corrected = corrected._replace(weight=weight, statistics=statistics)
    return corrected
