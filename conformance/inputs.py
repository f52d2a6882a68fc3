"""Random batches, in every shape that has broken a loss: ragged, full, with holes, empty rows,
nothing at all, wild ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = (
    "ragged",
    "full",
    "holes",
    "empty_rows",
    "single_token",
    "on_policy",
    "extreme",
    "sequence_advantages",
    "no_advantage",
    "all_masked",
)


@dataclass(frozen=True)
class Batch:
    """One random batch `[B, T]`: log-probabilities (all ≤ 0), advantages, rewards, values, a float
    0/1 mask, and group ids `[B]`.

    kind: "ragged" right-padded rows; "full" no padding; "holes" several turns; "empty_rows" some
    rows without a valid token; "single_token" one valid token per row; "on_policy" old = current;
    "extreme" log-ratios up to ±30, to old, rollout and reference; "sequence_advantages" one
    advantage per row; "no_advantage" zeros among them; "all_masked" nothing valid.
    """

    seed: int
    kind: str
    dtype: torch.dtype
    logp: Tensor
    old_logp: Tensor
    rollout_logp: Tensor
    ref_logp: Tensor
    entropy: Tensor
    advantages: Tensor
    rewards: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    mask: Tensor
    group_ids: Tensor

    def generator(self, salt: int = 0) -> torch.Generator:
        """A random generator of this case, for the draws of a comparison beyond the batch."""
        return torch.Generator().manual_seed(1_000_003 * self.seed + salt)


def draw(seed: int, kind: str, dtype: torch.dtype) -> Batch:
    """The batch of this seed and kind. Drawn in float64 and rounded,
    so both dtypes see the same numbers.
    """
    g = torch.Generator().manual_seed(seed)
    rows, width = (
        int(torch.randint(2, 7, (), generator=g)),
        int(torch.randint(3, 13, (), generator=g)),
    )

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(rows, width, generator=g, dtype=torch.float64)

    def away(logp: Tensor, scale: float) -> Tensor:
        """Log-probabilities `scale` away from `logp`; a positive one is reflected,
        as a probability is at most 1.
        """
        return -(logp + normal(scale)).abs()

    logp = -0.02 - 2.5 * torch.rand(rows, width, generator=g, dtype=torch.float64)
    old, rollout, ref = away(logp, 0.4), away(logp, 0.3), away(logp, 0.5)
    if kind == "extreme":
        far = 30 * (2 * torch.rand(4, rows, width, generator=g, dtype=torch.float64) - 1)
        # Half of the tokens far away: up to 30 in either direction,
        # the nearer policy at −0.02 … −2.5.
        wild = torch.rand(rows, width, generator=g) < 0.5
        base = logp.clone()
        logp = torch.where(wild & (far[0] < 0), base + far[0], base)
        old = torch.where(wild & (far[0] > 0), base - far[0], old)
        rollout = torch.where(wild & (far[2] > 0), base - far[2], rollout)
        ref = torch.where(wild & (far[3] > 0), base - far[3], ref)
    if kind == "on_policy":
        old = logp.clone()
    advantages = normal(1.3)
    if kind == "sequence_advantages":
        advantages = advantages[:, :1].expand(rows, width).clone()
    if kind == "no_advantage":
        advantages = torch.where(torch.rand(rows, width, generator=g) < 0.5, 0, advantages)
        advantages[0] = 0
    values = normal()
    numbers = {
        "logp": logp,
        "old_logp": old,
        "rollout_logp": rollout,
        "ref_logp": ref,
        "entropy": 2 * torch.rand(rows, width, generator=g, dtype=torch.float64),
        "advantages": advantages,
        "rewards": normal(),
        "values": values,
        "old_values": values + normal(0.4),
        "returns": normal(),
    }
    mask = _mask(kind, rows, width, g).to(dtype)
    group_ids = torch.arange(rows) // 2
    return Batch(
        seed,
        kind,
        dtype,
        mask=mask,
        group_ids=group_ids,
        **{name: x.to(dtype) for name, x in numbers.items()},
    )


def _mask(kind: str, rows: int, width: int, g: torch.Generator) -> Tensor:
    columns = torch.arange(width)
    if kind == "full":
        return torch.ones(rows, width)
    if kind == "all_masked":
        return torch.zeros(rows, width)
    if kind == "single_token":
        return (columns == torch.randint(0, width, (rows, 1), generator=g)).double()
    mask = (columns < torch.randint(1, width + 1, (rows, 1), generator=g)).double()
    if kind == "holes":
        keep = torch.rand(rows, width, generator=g) < 0.6
        keep[:, 0] = True
        mask = mask * keep
    if kind == "empty_rows":
        mask[torch.rand(rows, generator=g) < 0.4] = 0
        mask[-1], mask[0, 0] = 0, 1
    return mask


Draw = Callable[[int, str, torch.dtype], Batch]
