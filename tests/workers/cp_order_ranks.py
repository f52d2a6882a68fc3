"""What four gloo processes compute, for `test_cp_order`: turns and scans that cross ranks, and
groups of samples spread over them.

Nothing is asserted here: a rank that stopped at a failed assertion would leave the others waiting.
The cases with two ranks run as two pairs side by side: ranks 0, 1 and 2, 3 are context-parallel
groups, ranks 0, 2 and 1, 3 data-parallel ones.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import policyloss as pl
from cases import BY_AGGREGATE, PRESETS, Batch, make_batch, run, step_totals, with_turns
from policyloss import advantage
from policyloss.compat.verl.advantages import ADVANTAGE_ESTIMATORS

BATCH = with_turns(make_batch(seed=21, width=13))
SEQUENCES = len(BATCH.lengths)
TURN_SPECS = {
    "gspo_turn": PRESETS["gspo_turn"],
    "turn means": BY_AGGREGATE["turn:TurnMean()"],
    "fewer tokens": PRESETS["gspo_turn"].replace(
        correction=(pl.Band(0.8, 1.25),), rejected="renormalise"
    ),
    "weights of turns": PRESETS["dapo"].replace(correction=pl.Truncate(1.1, level="turn")),
    "future": pl.LossSpec(trust=pl.FutureKL(half_life=3.0, weight_min=0.5, weight_max=2.0)),
    "two ratios": pl.LossSpec(ratio=pl.MixedRatio("arithmetic")),
    "budget": pl.LossSpec(correction=pl.MomentBudget(0.02), rejected="renormalise"),
}
# Turns are the runs of the mask, in the order of positions, or the tokens with one id.
KINDS: dict[str, dict[str, Any]] = {"runs": {"turn_ids": None}, "ids": {}}
LAYOUTS = ("padded", "packed")


def owners(ranks: int) -> dict[str, Tensor]:
    """Which of the ranks holds each token `[B, T]`, by the name of the sharding."""
    columns = torch.arange(BATCH.width)
    chunk = columns * 2 * ranks // BATCH.width
    g = torch.Generator().manual_seed(ranks)
    scattered = torch.randint(ranks, BATCH.mask.shape, generator=g)
    some = scattered.clone()
    some[some == 0] = ranks - 1
    some[1], some[4] = 1, 0
    return {
        "contiguous": (columns * ranks // BATCH.width).expand(BATCH.mask.shape),
        "zigzag": torch.minimum(chunk, 2 * ranks - 1 - chunk).expand(BATCH.mask.shape),
        "scattered": scattered,
        "one rank with one sequence": some,
        "a rank with nothing": scattered.clamp(max=ranks - 2),
    }


SHARDINGS = tuple(owners(2))
# Each sharding over two ranks in one layout and over four in the other: size, sharding, layout.
CASES = [
    (size, name, LAYOUTS[(i + size // 2) % 2])
    for size in (2, 4)
    for i, name in enumerate(SHARDINGS)
]
COUNTED = ("gspo", "gspo_token", "gspo_turn")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rank's part of `BATCH`. columns: the place of each of its tokens in the whole row.
    positions: the argument of the calls.
    """

    batch: Batch
    columns: Tensor
    positions: Tensor

    def split(self, x: Tensor) -> Tensor:
        """This rank's part of `x` `[B, T]`, token-shaped; NaN (False, or −1) in the padding."""
        b = self.batch
        rows = torch.arange(SEQUENCES)[:, None].expand(b.inside.shape)
        nothing = torch.nan if x.is_floating_point() else 0 if x.dtype == torch.bool else -1
        empty = torch.full(b.inside.shape, nothing, dtype=x.dtype)
        found = empty.masked_scatter(b.inside, x[rows[b.inside], self.columns[b.inside]])
        return found if b.cu_seqlens is None else found[b.inside]


def begins() -> Tensor:
    """Where a sequence counts its positions from `[B]`:
    its first valid one follows the last of the sequence before it.
    """
    found, following = [], 5
    for valid in BATCH.mask:
        at = valid.nonzero()
        found.append(following - int(at[0]) if len(at) else 0)
        following += int(at[-1] - at[0]) + 1 if len(at) else 0
    return torch.tensor(found)


def shard(sharding: str, rank: int, ranks: int, layout: str) -> Shard:
    """The tokens that `rank` holds. Scattered ones lie in any order; masked ones lie about their
    positions, or are left out.
    """
    mine = BATCH.inside & (owners(ranks)[sharding] == rank)
    if sharding == "zigzag":
        mine &= BATCH.mask | (torch.arange(SEQUENCES) % 2 == 0)[:, None]
    lengths = mine.sum(1)
    width = max(int(lengths.max()), 1)
    key = torch.arange(BATCH.width).expand(mine.shape)
    if sharding == "scattered":
        key = torch.rand(mine.shape, generator=torch.Generator().manual_seed(rank)).argsort(1)
    columns = torch.where(mine, key, key + BATCH.width).argsort(1)[:, :width]
    batch = dataclasses.replace(BATCH, lengths=lengths, width=width)
    part = Shard(batch, columns, columns)
    batch = batch.map(part.split, *batch.token_shaped)
    positions = torch.where(batch.mask, columns + begins()[:, None], 3)
    if layout == "padded":
        return Shard(batch, columns, positions)
    return Shard(batch.packed(), columns, positions[batch.inside].int())


def whole(parts: list[Tensor], sharding: str) -> Tensor:
    """The ranks' token-shaped results (as rows) back at the places their tokens have in `BATCH`."""
    found = torch.zeros_like(BATCH.logp)
    for rank, x in enumerate(parts):
        part = shard(sharding, rank, len(parts), "padded")
        rows = torch.arange(SEQUENCES)[:, None].expand(part.batch.inside.shape)[part.batch.inside]
        found[rows, part.columns[part.batch.inside]] = x[part.batch.inside]
    return torch.where(BATCH.mask, found, 0)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The groups of this process. cp: by size. data: the rank of the other pair
    in the same place. alone: itself.
    """

    cp: dict[int, Any]
    data: Any
    alone: Any


def totals_of(spec: pl.LossSpec, part: Shard, **groups: Any) -> pl.Totals:
    """The step's totals, for ranks whose gradients add up."""
    positions = {"positions": part.positions} if spec.needs_statistics else {}
    return step_totals(spec, part.batch, dp_size=1, **groups, **positions)


def kind_of(name: str, size: int, sharding: str) -> str:
    """The turns of a loss under a sharding: both kinds in turn, so that each loss has each kind
    under half of the shardings of each size.
    """
    number = list(TURN_SPECS).index(name) + SHARDINGS.index(sharding) + size // 2
    return list(KINDS)[number % 2]


def turns(groups: Ranks) -> dict[str, Any]:
    """Every turn-level loss, its sequences spread over two and over four ranks."""
    said: dict[str, Any] = {}
    for size, sharding, layout in CASES:
        cp = groups.cp[size]
        part = shard(sharding, dist.get_rank(cp), size, layout)
        for name, spec in TURN_SPECS.items():
            kind = kind_of(name, size, sharding)
            totals = totals_of(spec, part, cp_group=cp, group=groups.alone)
            place: Any = {"positions": part.positions, **KINDS[kind]}
            out = run(spec, part.batch, totals, cp_group=cp, **place)
            numbers = {
                "loss": out.loss,
                "dlogp": out.dlogp,
                "metrics": out.records.all_reduce(cp).compute(),
            }
            said[f"turns: {name}, {size}, {sharding}, {layout}"] = numbers
    return said


def through_the_head(part: Shard | None, **spread: Any) -> dict[str, Tensor]:
    """A turn-level loss of `BATCH`, or of a shard (packed), from hidden states,
    and its gradient in the head's weight.
    """
    g = torch.Generator().manual_seed(5)
    hidden, weight = (
        torch.randn(*shape, 4, generator=g, dtype=torch.float64)
        for shape in (BATCH.mask.shape, (6,))
    )
    ids, b = torch.arange(BATCH.mask.numel()).view(BATCH.mask.shape) % 6, BATCH
    if part is not None:
        b, inside = part.batch, part.batch.inside
        at = torch.arange(SEQUENCES)[:, None].expand(inside.shape)[inside], part.columns[inside]
        hidden, ids, spread["positions"] = hidden[at], ids[at], part.positions
    weight.requires_grad_()
    given = {"cu_seqlens": b.cu_seqlens, "totals": "local", **spread}
    out = pl.linear_policy_loss(
        TURN_SPECS["gspo_turn"],
        hidden,
        weight,
        ids,
        b.old_logp,
        b.kwargs["advantages"],
        b.mask,
        **given,
    )
    out.loss.backward()
    assert weight.grad is not None
    return {"loss": out.loss.detach(), "gradient": weight.grad}


def entrances(groups: Ranks) -> dict[str, Any]:
    """The other functions that pass positions on: the head, and a compiled loss,
    which runs eagerly here.
    """
    cp = groups.cp[4]
    part = shard("zigzag", dist.get_rank(cp), 4, "packed")
    compiled = pl.compiled_loss(TURN_SPECS["gspo_turn"])
    loss = compiled(**part.batch.kwargs, totals="local", cp_group=cp, positions=part.positions).loss
    return {"head": through_the_head(part, cp_group=cp), "compiled": loss}


def over_time(
    call: Callable[..., Tensor],
    per_sequence: bool,
    poisoned: bool,
    part: Shard | None,
    **spread: Any,
) -> Tensor:
    """A scan over `BATCH`, or over a shard of it. call: given rewards, values, mask,
    last_values and the layout.

    poisoned: a NaN at a valid token of row 0.
    """
    b, rewards, values = BATCH, BATCH.advantages.clone(), BATCH.ref_logp
    if poisoned:
        rewards[0, int(BATCH.mask[0].nonzero()[1])] = torch.nan
    if part is not None:
        b, rewards, values, spread["positions"] = (
            part.batch,
            part.split(rewards),
            part.split(values),
            part.positions,
        )
    if per_sequence:  # as [S, 1] where a rank's pack may hold as many tokens as there are sequences
        rewards = torch.linspace(-1, 2, SEQUENCES, dtype=torch.float64).view(
            (-1, 1) if b.cu_seqlens is not None else (-1,)
        )
    elif b.cu_seqlens is not None:
        rewards = rewards.unsqueeze(0)  # for the same reason
    last = torch.linspace(2, -3, SEQUENCES, dtype=torch.float64)
    where = b.turn_ids if call in BY_TURN.values() else b.mask
    return b.as_rows(call(rewards, values, where, last, cu_seqlens=b.cu_seqlens, **spread))


BY_TURN: dict[str, Callable[..., Tensor]] = {
    "turn_gae": lambda r, v, i, last, **layout: (
        advantage.turn_gae(r, v, i, 0.9, 0.8, last_values=last, **layout).advantages
    ),
    "turn_returns": lambda r, v, i, last, **layout: advantage.turn_returns(r, i, 0.7, **layout),
    "turn_loo": lambda r, v, i, last, **layout: advantage.turn_loo(
        r, i, BATCH.group_ids, 0.7, group="local", **layout
    ),
    "mt_grpo": lambda r, v, i, last, **layout: advantage.mt_grpo(
        r, last, i, BATCH.group_ids, group="local", **layout
    ),
    "gigpo": lambda r, v, i, last, **layout: advantage.gigpo(
        r, i, i % 2, BATCH.group_ids, 0.7, group="local", **layout
    ),
}
SCANS: dict[str, Callable[..., Tensor]] = {
    **BY_TURN,
    "advantages": lambda r, v, m, last, **layout: (
        pl.gae(r, v, m, 0.9, 0.8, last_values=last, **layout).advantages
    ),
    "returns": lambda r, v, m, last, **layout: pl.gae(r, v, m, 0.97, 1.0, **layout).returns,
    "discounted": lambda r, v, m, last, **layout: advantage.discounted_returns(r, m, 0.7, **layout),
    "optimal_token_baseline": lambda r, v, m, last, cu_seqlens, **layout: (
        advantage.optimal_token_baseline(
            r, BATCH.group_ids, m, v, v.exp(), weights=1 - v, **{"group": "local", **layout}
        )
    ),
    "reinforce_pp": lambda r, v, m, last, **layout: advantage.reinforce_pp(
        r, m, 0.7, **{"group": "local", **layout}
    ),
    "iw_opd": lambda r, v, m, last, **layout: advantage.iw_opd(
        v, 0.5 * v, m, 0.8, 0.7, r, **layout
    ),
    "centered_kl": lambda r, v, m, last, positions=None, **layout: advantage.centered_kl(
        v, 0.5 * v, m, 0.7, r, **{"group": "local", **layout}
    ),
    "kl_in_reward": lambda r, v, m, last, **layout: advantage.kl_in_reward(
        r, v, 0.5 * v, m, 0.7, estimator="k3", **layout
    ),
}
PADDED_ONLY = ("optimal_token_baseline",)


def scan_cases(size: int, layout: str) -> list[tuple[str, bool, bool]]:
    """Name, rewards per sequence, a NaN among them: those that the layout can have, and of the last
    two one for each number of ranks.
    """
    kinds = ((False, False), (size == 2, size == 4))
    return [
        (name, *kind)
        for name in SCANS
        if layout == "padded" or name not in PADDED_ONLY
        for kind in kinds
    ]


def scans(groups: Ranks) -> dict[str, Any]:
    """Every scan over time, spread over two and over four ranks."""
    said: dict[str, Any] = {}
    for size, sharding, layout in CASES:
        cp = groups.cp[size]
        part = shard(sharding, dist.get_rank(cp), size, layout)
        for name, per_sequence, poisoned in scan_cases(size, layout):
            found = over_time(SCANS[name], per_sequence, poisoned, part, cp_group=cp)
            said[f"scan: {name}, {per_sequence}, {poisoned}, {size}, {sharding}, {layout}"] = found
    half = [[0, 1, 5], [2, 3, 4, 6]][dist.get_rank() // 2]  # each pair holds other sequences
    part = shard("zigzag", dist.get_rank(groups.cp[2]), 2, "padded")
    b, positions = part.batch.rows(half), part.positions[half]
    whitened = advantage.reinforce_pp(
        b.advantages, b.mask, 0.9, group=groups.data, cp_group=groups.cp[2], positions=positions
    )
    said["pairs"] = b.as_rows(whitened)
    return said


# Prompts 7 and 40 lie on several ranks; 40 and 3 are constant, 5 is a group of one;
# the third rank has no sequence.
ROWS = ([0, 1, 2, 9, 11], [3, 4, 5], [], [6, 7, 8, 10])
IDS = torch.tensor([7, 40, 7, 40, 3, 7, 7, 7, 40, 5, 3, 7])
REWARDS = torch.tensor(
    [1.0, 2.0, 0.0, 2.0, 0.5, 1.0, 0.25, 0.0, 2.0, 3.0, 0.5, 0.1], dtype=torch.float64
)
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 0, 5, 8])
ESTIMATES: dict[str, Callable[..., Tensor]] = {
    **{
        name: advantage.ESTIMATORS[name]
        for name in ("grpo", "dr_grpo", "rloo", "grpo_loo", "maxrl", "passk_max_gap")
    },
    "raw": lambda r, i, **k: advantage.grpo(r, i, single="raw", **k),
    "batch_std": lambda r, i, **k: pl.group_advantages(r, i, scale="batch_std", **k),
    "opo": lambda r, i, **k: advantage.opo(r, i, LENGTHS[places(r)], **k),
    "gpg": advantage.gpg,
    "gpg nonzero": lambda r, i, **k: advantage.gpg(r, i, valid="nonzero", single="raw", **k),
    "gdpo": lambda r, i, **k: advantage.gdpo(
        torch.stack((r, r.square() - 1), 1), i, weights=(1.0, 0.5), **k
    ),
    "gdpo by length": lambda r, i, **k: advantage.gdpo(
        r[:, None], i, lengths=LENGTHS[places(r)], **k
    ),
    "passk_combinatorial": lambda r, i, **k: advantage.passk_combinatorial(r, i, 2, **k),
    "reinforce_pp_baseline": lambda r, i, **k: advantage.reinforce_pp_baseline(
        r, i, LENGTHS[places(r)], **k
    ),
    "whiten": lambda r, i, **k: pl.whiten(r, r != 2, **k),
    "optimal_token_baseline": lambda r, i, **k: optimal(r, i, **k),
}


def places(r: Tensor) -> Tensor:
    """Which rows of `REWARDS` these are: all, or those of this rank."""
    return (
        torch.arange(len(REWARDS))
        if len(r) == len(REWARDS)
        else torch.tensor(ROWS[dist.get_rank()], dtype=torch.int64)
    )


def optimal(r: Tensor, ids: Tensor, **given: Any) -> Tensor:
    """The optimal token baseline of each row's first token, over rows as wide as a rank needs."""
    lengths = LENGTHS[places(r)]
    mask = torch.arange(int(lengths.max()) + 1 if len(lengths) else 1) < lengths[:, None]
    logp = -0.1 * (1 + torch.arange(mask.shape[1])) - 0.01 * places(r)[:, None]
    return advantage.optimal_token_baseline(
        r, ids, mask, logp.double(), 0.5 * torch.ones(mask.shape), **given
    ).sum(1)


def estimates() -> dict[str, Any]:
    """Every estimator on rows that are spread over the four ranks,
    with their warnings when no group is named.
    """
    said: dict[str, Any] = {}
    rows = torch.tensor(ROWS[dist.get_rank()], dtype=torch.int64)
    r, ids = REWARDS[rows], IDS[rows]
    for name, estimate in ESTIMATES.items():
        said[f"estimate: {name}"] = estimate(r, ids, group=dist.group.WORLD)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Some rank has one row of each prompt.
            warnings.filterwarnings("ignore", message="group_ids: all")
            said[f"local: {name}"] = estimate(r, ids, group="local")
            quiet = len(caught)
            said[f"unsaid: {name}"] = estimate(r, ids)
        said[f"warnings: {name}"] = [
            quiet,
            [(w.category.__name__, str(w.message), Path(w.filename).name) for w in caught],
        ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        score = torch.arange(8.0).view(4, 2)
        given = {
            "token_level_rewards": score,
            "response_mask": torch.ones(4, 2),
            "index": [0, 0, 1, 1],
            "config": {},
        }
        for name in ("grpo", "grpo_passk", "reinforce_plus_plus_baseline"):
            ADVANTAGE_ESTIMATORS[name](**given)
        ADVANTAGE_ESTIMATORS["optimal_token_baseline"](
            **given, old_log_probs=-score, sum_pi_squared=0.1 * score
        )
    said["warnings: drop-ins"] = [str(w.message) for w in caught]
    return said


def by_hand(groups: Ranks) -> dict[str, Any]:
    """One sequence over the two ranks of a pair, in numbers that can be followed."""
    cp = groups.cp[2]
    first = dist.get_rank(cp) == 0
    rewards, values, at = (
        ([1.0, 3.0], [0.5, 1.5], [0, 2]) if first else ([2.0, torch.nan], [1.0, torch.nan], [1, 0])
    )
    mask = torch.tensor([[True, first]])
    r, v = (torch.tensor([x], dtype=torch.float64) for x in (rewards, values))
    found = pl.gae(r, v, mask, 0.9, 0.5, cp_group=cp, positions=torch.tensor([at]))
    spec = pl.LossSpec(
        ratio=pl.SegmentRatio(), trust=pl.Unbounded("ratio"), aggregate=pl.TokenSum()
    )
    log_ratio, at, valid = (
        ([0.5, 0.1], [4, 0], [1, 1]) if first else ([9.0, 0.2, 0.6], [3, 1, 2], [0, 1, 1])
    )
    logp = torch.tensor([log_ratio], dtype=torch.float64) - 1
    spread = {"cp_group": cp, "positions": torch.tensor([at])}
    one, old = torch.ones(1, dtype=torch.float64), torch.full_like(logp, -1)
    out = pl.policy_loss(spec, logp, old, one, torch.tensor([valid]), totals="local", **spread)
    return {"hand": {"gae": found.advantages, "loss": out.loss}}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each collective is called meanwhile."""
    counts: Counter[str] = Counter()
    kept = {
        name: getattr(dist, name)
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast")
    }

    def count(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return kept[name](*args, **kwargs)

        return call

    try:
        for name in kept:
            setattr(dist, name, count(name))
        yield counts
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def costs(groups: Ranks) -> dict[str, Any]:
    """Collectives of the forward and of the backward of some losses,
    and of a scan and an estimate.
    """
    cp = groups.cp[4]
    part = shard("zigzag", dist.get_rank(cp), 4, "packed")
    said: dict[str, Any] = {}
    for name in COUNTED:
        spec = PRESETS[name]
        totals = totals_of(spec, part, cp_group=cp)
        logp = part.batch.logp.clone().requires_grad_()
        with counted() as forward:
            arguments = {
                **part.batch.kwargs,
                "logp": logp,
                "totals": totals,
                "cp_group": cp,
                "positions": part.positions,
            }
            loss = pl.policy_loss(spec, **arguments).loss
        with counted() as backward:
            loss.backward()
        said[f"cost: {name}"] = [dict(forward), dict(backward)]
    with counted() as scan:
        over_time(SCANS["advantages"], False, False, part, cp_group=cp)
    with counted() as estimate:
        advantage.opo(REWARDS, IDS + 100 * dist.get_rank(), LENGTHS, group=cp)
    said["cost: scan"], said["cost: estimate"] = dict(scan), dict(estimate)
    return said


def errors(groups: Ranks) -> dict[str, str]:
    """The errors of invalid calls. Every rank must raise, or the others would wait."""
    cp, rank = groups.cp[4], dist.get_rank()
    part = shard("contiguous", rank, 4, "padded")
    # Places in the shard, not in the sequence.
    b, shift = (
        part.batch,
        part.columns - part.columns[:, :1],
    )
    mask = torch.ones(3, 2, dtype=torch.bool)

    def loss(positions: Any) -> Any:
        where = {"cp_group": cp, "positions": positions, "turn_ids": None}
        return run(PRESETS["gspo_turn"], b, "local", **where)

    def scan(positions: Any, rows: int = 3) -> Any:
        values = torch.zeros(rows, 2)
        return pl.gae(values, values, mask[:rows], cp_group=cp, positions=positions)

    return {
        "missing": _error(lambda: loss(None)),
        "twice": _error(lambda: loss(shift)),
        "float": _error(lambda: loss(part.positions.double())),
        "shape": _error(lambda: loss(part.positions[:, :1])),
        "scan missing": _error(lambda: scan(None)),
        "scan twice": _error(lambda: scan(torch.arange(6).view(3, 2))),
        "other sequences": _error(
            lambda: scan(torch.arange(6).view(3, 2)[: 3 - (rank == 2)], 3 - (rank == 2))
        ),
        "mixed": _error(lambda: _mixed(cp, rank)),
        "columns": _error(
            lambda: SCANS["optimal_token_baseline"](
                *([b.logp] * 2), b.mask, 0, None, cp_group=cp, bridge=False
            )
        ),
        "name": _error(lambda: advantage.grpo(REWARDS, IDS, group="world")),
    }


def _mixed(cp: Any, rank: int) -> Any:
    """One reward per sequence, but on rank 1 there are as many tokens as sequences."""
    n = 2 if rank == 1 else 4
    positions = torch.arange(n) + 10 * rank
    return advantage.discounted_returns(
        torch.ones(2),
        torch.ones(n),
        cu_seqlens=torch.tensor([0, 1, n]),
        cp_group=cp,
        positions=positions,
    )


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except pl.InputError as error:
        return str(error)
    return "no error"


def work(rank: int, folder: str) -> None:
    """The body of each of the four processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    pairs, across = (
        [dist.new_group(ranks) for ranks in two] for two in (([0, 1], [2, 3]), ([0, 2], [1, 3]))
    )
    alone = [dist.new_group([r]) for r in range(4)][rank]
    groups = Ranks({2: pairs[rank // 2], 4: dist.group.WORLD}, across[rank % 2], alone)
    said = {
        **turns(groups),
        **entrances(groups),
        **scans(groups),
        **by_hand(groups),
        **estimates(),
        **costs(groups),
    }
    said |= errors(groups)
    torch.save(said, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
