"""`StoredTokens`: the tokens that losses are tried on, end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.inputs import OPTIONAL, TOKEN_SHAPED, Inputs

# Beside the tensors of a loss: what the page shows, and what a model is run on.
BESIDE = ("rewards", "ids", "prompts")
NEEDED = ("logp", "advantages", "mask")


@dataclass(frozen=True)
class StoredTokens:
    """Tokens of S sequences, N in all.

    inputs: the tensors of a loss, packed `[N]` in float64, advantages one per token, 0 where the
    mask is False. rewards: `[S]`. ids: `[N]`. prompts: the token ids before each sequence;
    prompt_texts: the same as texts. texts: one for each token. loss: of the run that stored them,
    as its config.json has it. horizon: its longest completion. notes: what was left out.
    """

    inputs: Inputs
    rewards: Tensor | None = None
    ids: Tensor | None = None
    prompts: Sequence[Sequence[int]] | None = None
    prompt_texts: Sequence[str] | None = None
    texts: Sequence[str] | None = None
    loss: Any = None
    horizon: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> StoredTokens:
        """From the arguments of `policy_loss` by name, padded or packed, and those of `BESIDE`."""
        missing = [name for name in NEEDED if tensors.get(name) is None]
        if missing:
            there = ", ".join(sorted(map(str, tensors))) or "nothing"
            raise InputError(
                f"the tokens need {' and '.join(missing)}, as policy_loss takes them; there is "
                f"{there}."
            )
        others = {name: x for name, x in tensors.items() if name in OPTIONAL}
        unknown = set(tensors) - {*OPTIONAL, *NEEDED, *BESIDE, "old_logp"}
        if unknown:
            raise InputError(
                f"unknown tensors {', '.join(sorted(map(str, unknown)))}; the names are those of "
                f"policy_loss and {', '.join(BESIDE)}."
            )
        logp, advantages, mask = (tensors[name] for name in NEEDED)
        inputs = Inputs.of(logp, tensors.get("old_logp"), advantages, mask, others)
        packed = _packed(inputs)
        count = _lengths(packed).shape[0]
        ids, rewards = tensors.get("ids"), tensors.get("rewards")
        if rewards is not None and tuple(rewards.shape) != (count,):
            raise InputError(
                f"rewards has shape {tuple(rewards.shape)}; give one per sequence, ({count},)."
            )
        if ids is not None and ids.shape != inputs.logp.shape:
            raise InputError(
                f"ids has shape {tuple(ids.shape)} and logp {tuple(inputs.logp.shape)}; give one "
                "id per token."
            )
        return cls(
            packed,
            None if rewards is None else rewards.detach().double().cpu(),
            None if ids is None else ids.reshape(-1).cpu(),
            tensors.get("prompts"),
        )

    def replace(self, **changes: Any) -> StoredTokens:
        """The same tokens with other values in some fields."""
        return replace(self, **changes)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, `[S]`, those included that are not trained on."""
        return _lengths(self.inputs)

    @property
    def sequence(self) -> Tensor:
        """Which sequence each token belongs to, `[N]`."""
        return torch.repeat_interleave(self.lengths)

    def sums(self, x: Tensor) -> Tensor:
        """The sum over each sequence, `[…, N]` → `[…, S]`."""
        out = x.new_zeros(*x.shape[:-1], self.lengths.shape[0])
        return out.index_add(-1, self.sequence, x)

    @property
    def advantages(self) -> Tensor:
        """The mean advantage of each sequence's trained tokens, `[S]`."""
        counts = self.sums(self.inputs.mask.double()).clamp(min=1)
        return self.sums(self.inputs.advantages) / counts


def _lengths(inputs: Inputs) -> Tensor:
    assert inputs.cu_seqlens is not None
    return inputs.cu_seqlens.diff()


def _packed(inputs: Inputs) -> Inputs:
    """The same call end to end, in float64, on the CPU; an error names what is not finite."""
    t = inputs.tokens()  # checks every shape
    offsets = inputs.cu_seqlens
    if offsets is None:
        rows, width = inputs.logp.shape
        offsets = torch.arange(rows + 1) * width
    mask = t.mask.reshape(-1).cpu()
    columns: dict[str, Tensor | None] = {"logp": inputs.logp, "advantages": t.advantages}
    columns |= {name: getattr(inputs, name) for name in TOKEN_SHAPED}
    flat: dict[str, Any] = {}
    for name, x in columns.items():
        if x is None:
            continue
        wide = x.detach().reshape(-1).cpu().double()
        flat[name] = torch.where(mask, wide, 0.0)
        # An engine may report −inf for a token that top-p cut.
        bad = flat[name].isnan() | (flat[name] == torch.inf)
        if name != "rollout_logp":
            bad |= flat[name] == -torch.inf
        if bool(bad.any()):
            raise InputError(
                f"{name} is not finite at {int(bad.sum())} of {int(mask.sum())} trained tokens; "
                "leave those sequences out."
            )
    if not bool(mask.any()):
        raise InputError("mask is False everywhere; there is no token to try a loss on.")
    groups = inputs.group_ids
    return Inputs(
        **flat,
        mask=mask,
        cu_seqlens=offsets.long().cpu(),
        group_ids=None if groups is None else groups.long().cpu(),
    )
