"""Hypotheses about the two columns of numbers: their order (shifted, permuted or re-encoded rows),
tokens that do not belong in the mask, numbers that were never filled in, units, and rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from policyloss_lab.diagnosis.hypothesis import Case, Fit
from policyloss_lab.diagnosis.pairs import Pairs

ROWS = 256  # the most rows that are compared with each other
FIRST = 32  # the first tokens of each row, which are compared
WILD = 8.0  # a difference of this many scales of the other tokens is another token's number
LAGS = (-3, -2, -1, 1, 2, 3)  # tokens that a word may gain or lose when it is encoded again
# The least share of rows: every row has a prompt, and rows that were cut have no end token.
EDGES = {"prompt_in_mask": 0.8, "padding_in_mask": 0.5, "end_token": 0.3}
NEAR = 0.05  # the usual difference of two engines at one token, in nats


def fit_shift(case: Case) -> Iterator[Fit]:
    """`rollout_logp` is one token late or early."""
    for lag, later in ((1, "later"), (-1, "earlier")):
        yield Fit(
            "shift",
            f"rollout_logp stands 1 place {later} than the tokens it belongs to",
            source=_index_at_lag(case.pairs, lag),
            freedom=1,
            details={"lag": lag},
        )


def _index_at_lag(pairs: Pairs, lag: int) -> Tensor:
    """The index of the token `lag` columns further in the same row, or −1."""
    index = (torch.arange(pairs.size) + lag).clamp(0, pairs.size - 1)
    there = (pairs.row[index] == pairs.row) & (pairs.column[index] == pairs.column + lag)
    return torch.where(there, index, -1)


def fit_permuted_rows(case: Case) -> Iterator[Fit]:
    """The rows are in different orders: the engine's row that is nearest to each of the trainer."""
    pairs = case.pairs
    starts = pairs.starts
    count = min(starts.numel() - 1, ROWS)
    if count < 2:
        return
    ours = _table(pairs.trainer, starts, count)
    theirs = _table(pairs.rollout, starts, count)
    gaps = torch.stack([(theirs - row).abs().nanmean(1).nan_to_num(torch.inf) for row in ours])
    at_home = gaps.diagonal()
    nearest = gaps.argmin(1)
    best = gaps.gather(1, nearest[:, None])[:, 0]
    nearest = torch.where(best < 0.5 * at_home, nearest, torch.arange(count))
    moved = int((nearest != torch.arange(count)).sum())
    if moved < 2:
        return
    lengths = starts.diff()[:count]
    source = torch.full((pairs.size,), -1)
    for row, other in enumerate(nearest.tolist()):
        common = int(min(lengths[row], lengths[other]))
        begin = int(starts[row])
        source[begin : begin + common] = torch.arange(common) + int(starts[other])
    yield Fit(
        "rows_permuted",
        f"{moved} of {count} rows of rollout_logp belong to other rows",
        source=source,
        freedom=moved,
        details={"rows_moved": moved, "rows_compared": count},
    )


def _table(x: Tensor, starts: Tensor, count: int) -> Tensor:
    """The first tokens of each row, NaN beyond its end."""
    out = torch.full((count, FIRST), torch.nan, dtype=x.dtype)
    for i in range(count):
        row = x[starts[i] : starts[i + 1]][:FIRST]
        out[i, : row.numel()] = row
    return out


def fit_other_tokens(case: Case) -> Iterator[Fit]:
    """The text was encoded again, and a word was split into more or fewer tokens: for each row, the
    index after which a lag fits better than no lag.
    """
    pairs = case.pairs
    starts = pairs.starts
    count = min(starts.numel() - 1, ROWS)
    end = int(starts[count])
    cost = _cost(pairs.difference)
    sources = {lag: _index_at_lag(pairs, lag) for lag in LAGS}
    lagged = {
        lag: torch.where(
            source >= 0, _cost(pairs.rollout[source.clamp(min=0)] - pairs.trainer), cost.mean()
        )
        for lag, source in sources.items()
    }
    chosen = torch.arange(pairs.size)
    changed, tokens = 0, 0
    for i in range(count):
        here = slice(int(starts[i]), int(starts[i + 1]))
        size = here.stop - here.start
        if size < 4:
            continue
        before = torch.cat([cost.new_zeros(1), cost[here].cumsum(0)])
        gain, lag, place = 0.0, 0, 0
        for candidate, their_cost in lagged.items():
            after = their_cost[here].flip(0).cumsum(0).flip(0)
            total = before[1:size] + after[1:]
            j = int(total.argmin()) + 1
            if float(before[-1] - total[j - 1]) > gain:
                gain, lag, place = float(before[-1] - total[j - 1]), candidate, j
        if gain > 4.0 and place > 1:
            changed, tokens = changed + 1, tokens + size - place
            chosen[here.start + place : here.stop] = sources[lag][here.start + place : here.stop]
    if not changed:
        return
    chosen[end:] = -1
    yield Fit(
        "reencoded",
        f"in {changed} of {count} rows, log-probabilities after some place belong to other tokens",
        source=chosen,
        freedom=2 * changed,
        share="rough",  # the word itself and its successors have another context
        details={"rows": changed, "tokens": tokens},
    )


def _cost(gap: Tensor) -> Tensor:
    return torch.log1p((gap / NEAR) ** 2)


def fit_edges(case: Case) -> Iterator[Fit]:
    """Only the first or the last tokens of the rows differ: these tokens should not be in the mask,
    or the engine has no numbers for them. Leading runs are prompt tokens; trailing runs are the end
    token or padding.
    """
    pairs = case.pairs
    size = (pairs.difference / pairs.shape).abs()
    wild = size > max(WILD * 1.4826 * float(size.median()), NEAR)
    for side in ("first", "last"):
        edge, lengths = _runs(wild, pairs, side)
        longest, rows = max(lengths), len(lengths)
        share = sum(length > 0 for length in lengths) / rows
        cause = "prompt_in_mask" if side == "first" else "padding_in_mask"
        if side == "last" and longest == 1:
            cause = "end_token"
        elsewhere = int((wild & ~edge).sum())
        if share < EDGES[cause] or edge.double().mean() > 0.5 or elsewhere > 0.1 * edge.sum():
            continue
        sides = (pairs.rollout[edge], pairs.trainer[edge])
        if longest > 1 and all(torch.unique(x).numel() > 1 for x in sides):
            continue  # no side is empty there
        yield Fit(
            cause,
            f"only the {side} tokens differ, up to {longest} each in {share:.0%} of {rows} rows",
            torch.where(edge, torch.nan, 0.0).double(),
            freedom=1,
            details={"rows": share, "longest": longest, "tokens": int(edge.sum())},
        )


def _runs(wild: Tensor, pairs: Pairs, side: str) -> tuple[Tensor, list[int]]:
    """The tokens of the first (or last) run of each row, and its length: of all runs from that end
    of the row, the one with the largest sum of +1 for each wild token and −2 for each other one.
    """
    edge, lengths = torch.zeros(pairs.size, dtype=torch.bool), []
    flags = wild.tolist()
    for begin, end in pairwise(pairs.starts.tolist()):
        row = flags[begin:end] if side == "first" else flags[begin:end][::-1]
        sums = [0, *accumulate(1 if flag else -2 for flag in row)]
        best = max(sums)
        length = max(i for i, total in enumerate(sums) if total == best) if best else 0
        edge[slice(begin, begin + length) if side == "first" else slice(end - length, end)] = True
        lengths.append(length)
    return edge, lengths


UNITS = {"logarithms of base 2": 1 / math.log(2), "logarithms of base 10": 1 / math.log(10)}
TYPES = {"logp_bf16": torch.bfloat16, "logp_fp16": torch.float16}
APART = 0.02  # nats: a number that is nearer to the other side's may be right
LEAST_EQUAL = 3  # tokens with one and the same number; fewer may be equal by chance


def fit_units(case: Case) -> Iterator[Fit]:
    """One side's logarithms have another base."""
    for what, factor in UNITS.items():
        for side, base, sign in (
            ("rollout_logp", case.pairs.trainer, 1),
            ("old_logp", case.pairs.rollout, -1),
        ):
            yield Fit(
                "units",
                f"{side} holds {what}",
                sign * (factor - 1) * base,
                details={"factor": factor, "side": side},
            )


def fit_unfilled(case: Case) -> Iterator[Fit]:
    """One side has one and the same number at several tokens where the other side varies."""
    pairs = case.pairs
    apart = (pairs.difference / pairs.shape).abs() > APART
    for side, x in (("rollout_logp", pairs.rollout), ("old_logp", pairs.trainer)):
        values, counts = torch.unique(x[apart], return_counts=True)
        if not values.numel():
            continue
        value = float(values[counts.argmax()])
        if value != 0 and int(counts.max()) < LEAST_EQUAL:
            continue  # equal by chance; no sampled token has a log-probability of 0
        where = x == value
        if bool(where.all()):
            continue  # then nothing is left to compare
        yield Fit(
            "unfilled",
            f"{side} is {value:g} at {int(where.sum())} of {pairs.size} tokens",
            torch.where(where, torch.nan, 0.0).double(),
            freedom=1,
            details={"value": value, "tokens": int(where.sum()), "side": side},
        )


def fit_stored(case: Case) -> Iterator[Fit]:
    """One or both sides were rounded after the softmax: bf16 or fp16 holds them exactly."""
    d, sides = case.pairs.difference, (case.pairs.rollout, case.pairs.trainer)
    uncertain = (sides[0] < -1e-3) & (sides[1] < -1e-3)
    if int(uncertain.sum()) < 8:
        return
    for cause, dtype in TYPES.items():
        rollout, trainer = (bool((x.to(dtype).double() == x)[uncertain].all()) for x in sides)
        step = torch.finfo(dtype).eps * sides[1].abs()
        for side, holds, prediction in (
            ("both sides are", rollout and trainer, d.clamp(-step, step)),
            ("rollout_logp is", rollout and not trainer, sides[1].to(dtype).double() - sides[1]),
            ("old_logp is", trainer and not rollout, sides[0] - sides[0].to(dtype).double()),
        ):
            if holds:
                yield Fit(cause, f"{side} rounded to {str(dtype)[6:]}", prediction)


ORDERS = (fit_shift, fit_permuted_rows, fit_other_tokens)
VALUES = (fit_edges, fit_unfilled, fit_units, fit_stored)
