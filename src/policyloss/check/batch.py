"""`Batch`: the tensors of one call as a value that a test of a loss can cut, pack and spoil."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policyloss.inputs import DIFFERENTIATED
from policyloss.loss import policy_loss
from policyloss.spec import LossSpec
from policyloss.tokens import LOGP_ARGUMENTS

_PER_SEQUENCE = ("advantages", "weights")  # may be one per sequence, too
TOKEN_TENSORS = ("logp", *LOGP_ARGUMENTS.values(), "entropy", "divergence", *_PER_SEQUENCE)


@dataclass(frozen=True)
class Batch:
    """One call: padded `[B, width]`, with tokens up to `lengths`, or packed with `cu_seqlens`."""

    logp: Tensor
    old_logp: Tensor
    rollout_logp: Tensor
    ref_logp: Tensor
    teacher_logp: Tensor
    entropy: Tensor
    divergence: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    group_ids: Tensor
    lengths: Tensor
    width: int
    cu_seqlens: Tensor | None = None
    turn_ids: Tensor | None = None
    ages: Tensor | None = None

    @classmethod
    def random(cls, rows: int = 6, width: int = 9, seed: int = 0) -> Batch:
        """Ragged rows with holes, one of them empty; ratios on both sides of the usual bounds."""
        g = torch.Generator().manual_seed(seed)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(rows, width, generator=g, dtype=torch.float64)

        logp = -(0.05 + 2.5 * torch.rand(rows, width, generator=g, dtype=torch.float64))
        old = logp + noise(0.25)
        mask = torch.rand(rows, width, generator=g) < 0.75
        mask[0], mask[1] = True, False
        entropy = 0.1 + torch.rand(rows, width, generator=g, dtype=torch.float64)
        # Even rows stay within the narrow bands that sequence-level corrections use, odd rows leave
        # them.
        mismatch = torch.where(torch.arange(rows)[:, None] % 2 == 0, 1e-4, 0.1) * noise(1.0)
        ref = logp + noise(0.3)
        policies, advantages = (old + mismatch, ref, 0.5 * (ref + logp) - 0.1), noise(1.0)
        divergence, half = torch.rand(2, rows, width, generator=g, dtype=torch.float64)
        rest = (*policies, entropy, divergence, advantages, 0.5 + half, mask)
        lengths = torch.where(mask.any(1), width - mask.flip(1).int().argmax(1), 0)
        ages = torch.randint(0, 4, (rows, width), generator=g)
        layout = {"group_ids": torch.arange(rows) // 2, "lengths": lengths, "ages": ages}
        return cls(logp, old, *rest, **layout, width=width)

    def map(self, change: Callable[[Tensor], Tensor], *names: str) -> Batch:
        """The batch with `change` applied to the named tensors (default: `TOKEN_TENSORS`)."""
        chosen = names or TOKEN_TENSORS
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in chosen}
        return replace(self, **changed)

    @property
    def token_shaped(self) -> tuple[str, ...]:
        """The names of the token-shaped tensors of this batch."""
        integers = [name for name in ("turn_ids", "ages") if getattr(self, name) is not None]
        return (*TOKEN_TENSORS, "mask", *integers)

    def rows(self, index: Sequence[int] | Tensor) -> Batch:
        """The sequences at `index`, in that order. Padded only."""
        i = torch.as_tensor(index, dtype=torch.int64)
        return self.map(lambda x: x[i], *self.token_shaped, "group_ids", "lengths")

    @property
    def inside(self) -> Tensor:
        """A mask of the positions `[B, width]` that hold a token."""
        return torch.arange(self.width) < self.lengths[:, None]

    def packed(self) -> Batch:
        """The same sequences end to end, without padding; an empty row is an empty sequence."""
        offsets = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        return replace(self.map(lambda x: x[self.inside], *self.token_shaped), cu_seqlens=offsets)

    def as_rows(self, x: Tensor) -> Tensor:
        """A token-shaped result as `[B, width]`, 0 in the padding of a packed batch."""
        if self.cu_seqlens is None:
            return x
        empty = torch.zeros(len(self.lengths), self.width, dtype=x.dtype)
        return empty.masked_scatter(self.inside, x)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of `policy_loss` and `measure`."""
        names = (*self.token_shaped, "cu_seqlens", "group_ids")
        arguments = {name: getattr(self, name) for name in names}
        sequences = None if self.cu_seqlens is None else (len(self.cu_seqlens) - 1,)
        for name in _PER_SEQUENCE:
            if getattr(self, name).shape == self.mask.shape == sequences:
                # If N = S, `[1, N]` marks one number per token.
                arguments[name] = arguments[name].unsqueeze(0)
        return arguments

    def others(self, spec: LossSpec | None = None) -> dict[str, Any]:
        """Every argument except logp; the tensors that `spec` differentiates require a gradient."""
        reads = () if spec is None else spec.reads
        return {
            name: x.detach().requires_grad_() if name in DIFFERENTIATED and name in reads else x
            for name, x in self.kwargs.items()
            if name != "logp"
        }

    def loss(self, spec: LossSpec, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Loss and gradient in logp (zero at masked positions by contract)."""
        logp = self.logp.detach().requires_grad_()
        out = policy_loss(spec, logp, **{**self.others(spec), **kwargs})
        if not out.loss.requires_grad:
            return out.loss, torch.zeros_like(logp)
        (gradient,) = torch.autograd.grad(out.loss, logp, materialize_grads=True)
        return out.loss.detach(), gradient
