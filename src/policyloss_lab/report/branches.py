"""The branch of the loss that each token of stored completions took, for runs that did not store
it: the library's own functions on the stored numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from policyloss.errors import PolicyLossError
from policyloss.spec import LossSpec
from policyloss_lab.completions import BRANCHES, token_branches

_NAMES = tuple(BRANCHES)


def with_branches(rows: Sequence[dict[str, Any]], loss: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with a branch for every token, where the loss can tell it from the row alone.

    loss: the card of the run's loss. What was stored stays. A trust region that ranks the tokens of
    a whole step, and a row that lacks a number, leave the branch unknown.
    """
    spec = LossSpec.from_dict(loss["spec"]) if loss["explain"] is not None else None
    if spec is None or any(getattr(spec.trust, "statistics_names", ())):
        return list(rows)
    reads = spec.replace(kl=None, entropy_coef=0.0).reads
    names = {"logp", "token_advantage", *(name for name in reads if name.endswith("_logp"))}
    open_rows = [i for i, row in enumerate(rows) if _lacks_branches(row, names)]
    if not open_rows:
        return list(rows)
    chosen = [rows[i] for i in open_rows]
    lengths = torch.tensor([0, *(len(row["tokens"]) for row in chosen)])
    tensors = {name: _joined(chosen, name) for name in {"old_logp", *names}}
    mask = torch.tensor([used is not False for row in chosen for used in row["mask"]])
    try:
        codes = token_branches(
            spec,
            tensors.pop("logp"),
            tensors.pop("old_logp"),
            tensors.pop("token_advantage"),
            mask,
            **tensors,
            cu_seqlens=lengths.cumsum(0),
        )
    except PolicyLossError:  # it reads something that no file of completions holds
        return list(rows)
    out = list(rows)
    for i, part in zip(open_rows, torch.split(codes, lengths[1:].tolist()), strict=True):
        out[i] = {**rows[i], "branch": [_NAMES[code] for code in part.tolist()]}
    return out


def _lacks_branches(row: Mapping[str, Any], names: set[str]) -> bool:
    """Whether the row has tokens and no branch, but every number of a trained token."""
    if not row["tokens"] or any(branch is not None for branch in row["branch"]):
        return False
    return all(
        value is not None or used is False
        for name in names
        for value, used in zip(row[name], row["mask"], strict=True)
    )


def _joined(rows: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor:
    """The numbers of all rows end to end, 0 where a token that is not trained on has none."""
    values = [0.0 if value is None else value for row in rows for value in row[name]]
    return torch.tensor(values, dtype=torch.float64)
