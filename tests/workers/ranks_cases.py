"""What `test_ranks` compares: a small model, a batch for it, the losses,
and the ways to cut the batch over ranks.

Every number that goes in is a float32, so the float64 numbers of the whole batch
are the reference of both precisions.
Legend: B rows (sequences), T columns, N packed tokens, V ids, H features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from cases import (
    AGGREGATES,
    BY_AGGREGATE,
    BY_CORRECTION,
    LOCAL,
    PRESETS,
    label,
    make_batch,
    with_turns,
)

V, H = 6, 4
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
# The two `Local…` means depend on the cut on purpose; everything else must not.
GLOBAL = [a for a in AGGREGATES if not isinstance(a, LOCAL)]

# ---------------------------------------------------------------------------------------- the model


def parameters(dtype: torch.dtype) -> list[Tensor]:
    """Embedding `[V, H]`, output `[V, H]` and value head `[H]` of a model
    that predicts a token from the one before it.
    """
    g = torch.Generator().manual_seed(5)
    shapes = ((V, H), (V, H), (H,))
    return [(0.4 * torch.randn(shape, generator=g)).to(dtype).requires_grad_() for shape in shapes]


def predict(model: list[Tensor], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and value of each token; `ids` holds V·(the id before) + the id.
    All token-shaped.
    """
    embedding, output, value = model
    hidden = embedding[ids // V]
    log_p = torch.log_softmax(hidden @ output.T, -1)
    logp = log_p.gather(-1, (ids % V).unsqueeze(-1)).squeeze(-1)
    return logp, -(log_p.exp() * log_p).sum(-1), hidden @ value


def flat(gradients: tuple[Tensor | None, ...], model: list[Tensor]) -> Tensor:
    """The gradients of all parameters in one vector, 0 for one that the loss does not reach."""
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).reshape(-1)
            for g, p in zip(gradients, model, strict=True)
        ]
    )


# ---------------------------------------------------------------------------------------- the batch


@cache
def _whole() -> dict[str, Tensor]:
    # Small logits, ratios near 1 and advantages with a mean: then float32 holds 1e-6 of every loss
    # when it is not cut at all.
    made = make_batch(seed=12, rows=8, width=9, spread=0.2)
    g = torch.Generator().manual_seed(6)
    ids = torch.randint(0, V * V, made.mask.shape, generator=g)
    with torch.no_grad():
        logp, _, values = predict(parameters(torch.float64), ids)
    moved = {
        name: logp + getattr(made, name) - made.logp
        for name in ("old_logp", "rollout_logp", "ref_logp", "teacher_logp")
    }
    floats = {name: x.clamp(max=-0.01) for name, x in moved.items()}
    floats["advantages"] = made.advantages + 1
    floats["old_values"] = values + 0.2 * made.advantages
    floats["returns"] = values + made.advantages
    floats["weights"] = made.weights
    positions = torch.arange(made.width).expand(made.mask.shape)
    return {
        **{name: x.float().double() for name, x in floats.items()},
        "ids": ids,
        "mask": made.mask,
        "positions": positions,
        "inside": made.inside,
        "group_ids": made.group_ids,
        "turn_ids": with_turns(made).turn_ids,
        "ages": made.ages,
        "rewards": torch.tensor([1, 0, 0.5, 1, 0.25, 1, 0, 0], dtype=torch.float64),
        "lengths": made.mask.sum(1).double(),
    }


PER_SEQUENCE = ("group_ids", "rewards", "lengths")
ROWS = list(range(8))
WIDTH = 9
EVERYWHERE = torch.ones(8, WIDTH, dtype=torch.bool)


def part(rows: list[int], held: Tensor, packed: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The tokens of some sequences that lie where `held` `[B, T]` is True, moved together; NaN in
    the padding that is left.
    """
    whole = _whole()
    index = torch.tensor(rows, dtype=torch.int64)
    mine = (whole["inside"] & held)[index]
    lengths = mine.sum(1)
    left = torch.arange(max(int(lengths.max()) if rows else 0, 1)) < lengths[:, None]

    def taken(x: Tensor) -> Tensor:
        x = x[index].to(dtype) if x.is_floating_point() else x[index]
        return (
            x[mine]
            if packed
            else x.new_full(left.shape, torch.nan if x.is_floating_point() else 0).masked_scatter(
                left, x[mine]
            )
        )

    tokens: dict[str, Any] = {
        name: taken(x) for name, x in whole.items() if name not in (*PER_SEQUENCE, "inside")
    }
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) if packed else None
    return {
        **tokens,
        **{name: whole[name][index] for name in PER_SEQUENCE},
        "cu_seqlens": cu_seqlens,
    }


def placed(x: Tensor, rows: list[int], held: Tensor) -> Tensor:
    """A result for the tokens of `part`, padded or packed,
    at their places in the whole batch `[B, T]`; 0 elsewhere.
    """
    mine = (_whole()["inside"] & held)[torch.tensor(rows, dtype=torch.int64)]
    tokens = x if x.dim() == 1 else x[torch.arange(x.shape[1]) < mine.sum(1)[:, None]]
    whole = x.new_zeros(len(ROWS), WIDTH)
    whole[rows] = x.new_zeros(len(rows), WIDTH).masked_scatter(mine, tokens)
    return whole


# ----------------------------------------------------------------------------------------- the cuts


@dataclass(frozen=True)
class Cut:
    """How the batch lies on the ranks. Rank r is data-parallel rank r // C
    and context-parallel rank r % C.

    rows: `rows[d]` are the micro-batches of data-parallel rank d. shards: `shards[c]` `[B, T]` is
    True at the tokens that context-parallel rank c holds of each sequence; C = len(shards).
    summed: the engine adds gradients up instead of averaging them. everything: all losses
    are cut so, in both precisions.
    """

    rows: tuple[tuple[list[int], ...], ...]
    shards: tuple[Tensor, ...] = (EVERYWHERE,)
    packed: bool = False
    summed: bool = False
    everything: bool = False

    @property
    def ranks(self) -> int:
        return len(self.rows) * len(self.shards)

    def place(self, rank: int) -> tuple[tuple[list[int], ...], Tensor]:
        """The micro-batches of a rank, and the tokens it holds of them."""
        d, c = divmod(rank, len(self.shards))
        return self.rows[d], self.shards[c]


def contiguous(count: int) -> tuple[Tensor, ...]:
    """Each rank holds one stretch of the columns."""
    stretch = torch.arange(WIDTH) * count // WIDTH
    return tuple((stretch == rank).expand(8, WIDTH) for rank in range(count))


def zigzag(count: int) -> tuple[Tensor, ...]:
    """Each rank holds a stretch from the front and its mirror image from the back, so that causal
    attention costs all the same.
    """
    stretch = torch.arange(WIDTH) * 2 * count // WIDTH
    return tuple(
        ((stretch == rank) | (stretch == 2 * count - 1 - rank)).expand(8, WIDTH)
        for rank in range(count)
    )


def _some_rows_whole() -> tuple[Tensor, ...]:
    first = contiguous(2)[0].clone()
    first[1], first[4] = True, False
    return first, ~first


def _nothing_valid_on_the_second() -> tuple[Tensor, ...]:
    first = _whole()["mask"] | (torch.arange(WIDTH) < 2)
    return first, ~first


# Row 2 has no token and row 3 none to train on; group 70 is rows 0, 2 and 7, group 11 rows 1 and 4.
CUTS = {
    "accumulation, even": Cut((([0, 2, 4, 6], [1, 3, 5, 7]),)),
    "accumulation, uneven": Cut((([6], [5, 0, 2, 4, 1], [3, 7]),), packed=True),
    "accumulation, a micro-batch without a row": Cut((([0, 1], [2, 3], [], [4, 5, 6, 7]),)),
    "accumulation, a micro-batch without a valid token": Cut(
        (([0, 1], [2, 3], [4, 5, 6, 7]),), everything=True
    ),
    "DP": Cut((([0, 1, 2, 3, 6],), ([5, 4, 7],)), everything=True),
    "DP, a rank without a valid token": Cut((([0, 1, 4, 5, 6, 7],), ([2, 3],)), packed=True),
    "DP, summed": Cut((([0, 1, 2, 3, 6],), ([5, 4, 7],)), summed=True),
    "packing": Cut((([7, 0, 3, 5],), ([6, 2, 1, 4],)), packed=True, everything=True),
    "packing, other packs": Cut((([1], [4, 6, 0]), ([2], [7, 5, 3])), packed=True),
    "CP, contiguous": Cut(((ROWS,),), contiguous(2), packed=True),
    "CP, zig-zag": Cut(((ROWS,),), zigzag(2), everything=True),
    "CP, a rank without a sequence": Cut(((ROWS,),), _some_rows_whole()),
    "CP, a rank without a valid token": Cut(
        ((ROWS,),), _nothing_valid_on_the_second(), packed=True
    ),
    "CP, summed": Cut(((ROWS,),), zigzag(2), packed=True, summed=True),
    "DP over 4 ranks": Cut((([0],), ([2, 3],), ([1, 7, 5],), ([4, 6],))),
    "CP over 4 ranks": Cut(((ROWS,),), zigzag(4), packed=True),
    "DP x CP x accumulation": Cut(
        (([0, 1, 5], [2]), ([4, 3], [6, 7])), zigzag(2), packed=True, everything=True
    ),
    "DP x CP x accumulation, padded": Cut((([0, 1], [5], [2]), ([4], [3], [6, 7])), contiguous(2)),
}
FULL = [name for name, cut in CUTS.items() if cut.everything]

# --------------------------------------------------------------------------------------- the losses

PRESET_BY_AGGREGATE = {
    f"{name}:{label(a)}": spec.replace(aggregate=a)
    for name, spec in PRESETS.items()
    for a in GLOBAL
    if a != spec.aggregate
}
EVERY_AGGREGATE = {
    name: spec for name, spec in BY_AGGREGATE.items() if not isinstance(spec.aggregate, LOCAL)
}
PRESETS_AND_AGGREGATES = {**PRESETS, **PRESET_BY_AGGREGATE}
SPECS = {**PRESETS_AND_AGGREGATES, **EVERY_AGGREGATE, **BY_CORRECTION}


@cache
def specs_of(cut: str, dtype: str, every_pair: bool) -> dict[str, pl.LossSpec]:
    """The losses that are cut so: all of them (in float32 every preset with every aggregation),
    or the presets in float64.

    every_pair: each loss is cut in each of the `FULL` ways, in both types. Otherwise only a preset
    in float64 is; a preset in float32 and any other loss in float64 are cut in one of them.
    """
    if not CUTS[cut].everything:
        return PRESETS if dtype == "float64" else {}
    specs = SPECS if dtype == "float64" else PRESETS_AND_AGGREGATES
    if every_pair:
        return specs
    turns = slice(FULL.index(cut), None, len(FULL))
    if dtype == "float32":
        return dict([*PRESETS.items()][turns])
    mine = set([name for name in SPECS if name not in PRESETS][turns])
    return {name: spec for name, spec in SPECS.items() if name in PRESETS or name in mine}


POLICY_INPUTS = (
    "old_logp",
    "advantages",
    "mask",
    "rollout_logp",
    "ref_logp",
    "teacher_logp",
    "cu_seqlens",
    "group_ids",
    "weights",
    "turn_ids",
    "ages",
)
VALUE_INPUTS = ("returns", "old_values", "mask", "cu_seqlens", "group_ids", "weights", "turn_ids")


def only(tensors: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: tensors[name] for name in names}
