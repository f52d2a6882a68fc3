"""Divergences of complete rows, the reference of the head's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.functional.divergence import Measure, slopes, terms


def of_distributions(student: Tensor, teacher: Tensor, measure: Measure) -> Tensor:
    """The divergence of rows that hold every entry. `[..., V]`, `[..., V]` → `[...]`."""
    return terms(student, teacher, measure.of_complete_rows).sum(-1)


def whole_gradient(student: Tensor, teacher: Tensor, measure: Measure) -> Tensor:
    """Its gradient by the student's logits, `slopes − p_s·Σ slopes`. → `[..., V]`."""
    each = slopes(student, teacher, measure)
    # The slopes of the forward KL sum to exactly −1.
    exact = torch.full_like(each[..., 0], -1)
    total = exact if measure.computed_kind.name == "forward" else each.sum(-1)
    return each - student.exp() * total.unsqueeze(-1)
