"""Whole distributions of engine and trainer at the same positions, before the first step: their
divergences, the differences by rank, and the first layer where hidden states part.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_tensor
from policyloss.errors import InputError
from policyloss.teacher import TopK
from policyloss_lab.diagnosis.read import read_rows, read_safetensors
from policyloss_lab.diagnosis.verdict import plain

RANKS = 16  # the likeliest tokens whose order is compared; noise permutes the others
NORMALISED = 0.1  # the largest |log of the mass| of log-probabilities in half precision
SMALLEST = 1e-7  # the mass of the rest that rounding leaves
SCALED = 0.05  # a temperature leaves at most this share of the squared differences
NEAR_1 = 0.02  # the distance from 1 of a slope that is no temperature
SIDES = ("rollout", "old")
# One of them is at the beginning of a file of distributions.
COLUMNS = tuple(f"{side}_{what}_logp" for side in SIDES for what in ("all", "top"))


@dataclass(frozen=True)
class DistributionThresholds:
    """kl: the largest healthy mean KL in nats, ten times that of a dense model in bf16. hidden: the
    largest healthy relative difference of hidden states.
    """

    kl: float = 0.002
    hidden: float = 0.05


@dataclass(frozen=True)
class DistributionGap:
    """How the engine's distributions (rollout) differ from the trainer's (old).

    positions: how many are compared. by_rank: the largest |Δ logp| of the trainer's likeliest
    token, of its second likeliest, and so on. kl_rollout_old, kl_old_rollout: mean and maximum of
    KL(rollout‖old) and KL(old‖rollout), in nats. top: how many tokens of each position are
    compared; None: all. With `top`, tokens that are not in both tops are merged into one class,
    which can only lower a KL. swapped: the share of adjacent pairs in the trainer's ranking that
    the engine orders the other way. first_differs: the share of positions where the likeliest
    tokens differ. temperature: the one that turns the trainer's distributions into the engine's,
    None if none does. hidden: the relative difference ‖Δ‖ / ‖old‖ of each layer's hidden states.
    parted: the first layer where it exceeds the threshold. healthy: whether no number exceeds its
    threshold in `compare_distributions`.
    """

    positions: int
    top: int | None
    by_rank: tuple[float, ...]
    kl_rollout_old: tuple[float, float]
    kl_old_rollout: tuple[float, float]
    swapped: float
    first_differs: float
    temperature: float | None
    hidden: Mapping[str, float]
    parted: str | None
    healthy: bool

    def to_json(self) -> str:
        """The fields as JSON; infinite numbers become strings."""
        return json.dumps(plain(asdict(self)), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        scope = "whole distributions" if self.top is None else f"the top {self.top} of each side"
        bound = "" if self.top is None else ", lower bounds, as all other tokens are one class"
        kl = "mean {:.3g}, largest {:.3g}".format
        ranks = ", ".join(f"{rank}: {x:.3g}" for rank, x in enumerate(self.by_rank, 1))
        lines = [
            f"{'healthy' if self.healthy else 'engine and trainer differ'} "
            f"({self.positions} positions, {scope})",
            f"KL in nats{bound}: rollout‖old {kl(*self.kl_rollout_old)}; "
            f"old‖rollout {kl(*self.kl_old_rollout)}",
            f"largest |Δ logp| by the trainer's rank: {ranks}",
            f"{self.swapped:.2%} of neighbouring ranks are swapped, {self.first_differs:.2%} of "
            "positions have another likeliest token",
        ]
        if math.inf in (self.kl_rollout_old[1], self.kl_old_rollout[1]):
            lines.append("one side excludes tokens of the other (top-p, top-k, a grammar)")
        if self.temperature is not None:
            lines.append(f"rollout is old at a temperature of {self.temperature:.3g}")
        if self.parted is not None:
            gaps = ", ".join(f"{name} {x:.2g}" for name, x in self.hidden.items())
            lines.append(f"hidden states part at {self.parted}; relative differences: {gaps}")
        return "\n  ".join(lines)


def compare_distributions(
    rollout: Tensor | TopK,
    old: Tensor | TopK,
    *,
    rollout_hidden: Mapping[str, Tensor] | None = None,
    old_hidden: Mapping[str, Tensor] | None = None,
    thresholds: DistributionThresholds | None = None,
) -> DistributionGap:
    """Compare the rollout engine's token distributions with the trainer's at the same positions.

    The result holds mean and maximum KLs, differences of hidden states, and more
    (`DistributionGap`). rollout, old: log-probabilities of the whole vocabulary, `[..., V]`, or a
    `pl.TopK`: that side's k largest log-probabilities at each position, not renormalised over the
    k. rollout_hidden, old_hidden: hidden states `[..., D]`, keyed by the name of the layer or
    operator, in the order of computation. thresholds: a `DistributionThresholds`, the largest KL
    and the largest difference of hidden states that count as healthy.
    """
    bounds = thresholds or DistributionThresholds()
    rollout, old = (
        _check_distribution(name, x) for name, x in zip(SIDES, (rollout, old), strict=True)
    )
    r, o, known, top = _match_tokens(rollout, old)
    if len(r) == 0:
        raise InputError("rollout and old have no positions; pass at least one.")
    best = (rollout.logp if isinstance(rollout, TopK) else rollout).amax(1)
    forward, backward = (_divergence(*sides, known, top is None) for sides in ((r, o), (o, r)))
    first = slice(0, RANKS)
    gaps = torch.where(known & (r != o), (r - o).abs(), 0)[:, first]
    known, r, o = known[:, first], r[:, first], o[:, first]
    ordered = o[:, :-1] > o[:, 1:]
    swapped = ordered & (r[:, :-1] < r[:, 1:])
    hidden = _relative(rollout_hidden or {}, old_hidden or {})
    parted = next((name for name, x in hidden.items() if not x <= bounds.hidden), None)
    mean = max(float(forward.mean()), float(backward.mean()))
    same = mean <= bounds.kl
    return DistributionGap(
        positions=len(r),
        top=top,
        by_rank=tuple(gaps.amax(0).tolist()),
        kl_rollout_old=(float(forward.mean()), float(forward.max())),
        kl_old_rollout=(float(backward.mean()), float(backward.max())),
        swapped=float(swapped.sum() / ordered.sum().clamp(min=1)),
        first_differs=float((r[:, 0] < best).double().mean()),
        temperature=None if same else _temperature(r, o, known),
        hidden=hidden,
        parted=parted,
        healthy=same and parted is None,
    )


def _check_distribution(name: str, x: Tensor | TopK) -> Tensor | TopK:
    """`x` as float64 `[N, V]`, or as a TopK of `[N, K]`; an error if it is not normalised."""
    ids = x.ids.cpu().flatten(0, -2) if isinstance(x, TopK) else None
    logp = x.logp if isinstance(x, TopK) else x
    check_tensor(name, logp, "float")
    logp = logp.detach().double().cpu().flatten(0, -2)
    logp = logp if ids is None else logp.masked_fill(ids < 0, -math.inf)
    mass = logp.logsumexp(-1)
    if not bool(((mass.abs() if ids is None else mass) <= NORMALISED).all()):
        worst = float(mass[mass.abs().argmax()])
        raise InputError(
            f"{name} must hold log-probabilities, but the logarithm of a position's sum is "
            f"{worst:.3g}, not 0; pass log_softmax of logits, or pl.TopK for a part of the "
            "vocabulary."
        )
    return logp if ids is None else TopK(ids, logp)


def _match_tokens(
    rollout: Tensor | TopK, old: Tensor | TopK
) -> tuple[Tensor, Tensor, Tensor, int | None]:
    """The log-probabilities of both sides for the same tokens, in the trainer's order, which of
    them both sides know, and the size of the lists, None for the whole vocabulary. `[N, K]`.
    """
    shapes = [(x.ids if isinstance(x, TopK) else x).shape for x in (rollout, old)]
    if isinstance(rollout, Tensor) and isinstance(old, Tensor):
        if shapes[0] != shapes[1]:
            raise InputError(f"rollout has the shape {[*shapes[0]]} and old {[*shapes[1]]}.")
        o, order = old.sort(-1, descending=True)
        return rollout.gather(1, order), o, torch.ones_like(o, dtype=torch.bool), None
    if shapes[0][0] != shapes[1][0]:
        raise InputError(f"rollout has {shapes[0][0]} positions and old {shapes[1][0]}.")
    top = min(x.ids.shape[1] for x in (rollout, old) if isinstance(x, TopK))
    (theirs, r), (ours, o) = (_likeliest(x, top) for x in (rollout, old))
    theirs, order = theirs.sort(1)
    place = torch.searchsorted(theirs, ours).clamp(max=theirs.shape[1] - 1)
    known = (theirs.gather(1, place) == ours) & (ours >= 0)
    return r.gather(1, order).gather(1, place).where(known, -math.inf), o, known, top


def _likeliest(x: Tensor | TopK, top: int) -> tuple[Tensor, Tensor]:
    if isinstance(x, Tensor):
        values, ids = x.topk(min(top, x.shape[1]), -1)
        return ids, values
    values, order = x.logp.topk(top, -1)
    return x.ids.gather(1, order), values


def _divergence(a: Tensor, b: Tensor, known: Tensor, complete: bool) -> Tensor:
    """KL(a‖b) of each position, `[N]`: over the known tokens, and one class of all others unless
    the known tokens are `complete`.
    """
    p = torch.where(known, a.exp(), 0)
    q = torch.where(known, b.exp(), 0)
    terms = torch.where(p > 0, p * (a - b), 0).sum(1)
    if complete:
        return terms.clamp(min=0)
    rest, other = ((1 - x.sum(1)).clamp(min=SMALLEST) for x in (p, q))
    return (terms + rest * (rest / other).log()).clamp(min=0)


def _temperature(r: Tensor, o: Tensor, known: Tensor) -> float | None:
    """The temperature that makes the engine's log-probabilities of the trainer's: the slope of one
    on the other, if nearly nothing is left.
    """
    there = known & r.isfinite() & o.isfinite()
    count = there.sum(1, keepdim=True).clamp(min=1)
    x, y = (torch.where(there, z, 0) for z in (o, r))
    x, y = (torch.where(there, z - z.sum(1, keepdim=True) / count, 0) for z in (x, y))
    slope = float((x * y).sum() / x.square().sum().clamp(min=1e-30))
    left = (y - slope * x).square().sum()
    explains = slope > 0 and abs(slope - 1) > NEAR_1 and left < SCALED * (y - x).square().sum()
    return 1 / slope if explains else None


def _relative(rollout: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, float]:
    """‖rollout - old‖ / ‖old‖ of each layer that both sides have."""
    gaps = {}
    for name in (name for name in old if name in rollout):
        a, b = (side[name].detach().double().cpu() for side in (rollout, old))
        if a.shape != b.shape:
            raise InputError(
                f"rollout_hidden[{name!r}] is {tuple(a.shape)} and old_hidden {tuple(b.shape)}; "
                "pass the states of the same positions."
            )
        gaps[name] = float((a - b).norm() / b.norm().clamp(min=1e-30))
    if (rollout or old) and not gaps:
        raise InputError(
            f"rollout_hidden ({', '.join(rollout) or 'none'}) and old_hidden "
            f"({', '.join(old) or 'none'}) have no name in common."
        )
    return gaps


def read_distributions(path: Path) -> dict[str, Any]:
    """The arguments of `compare_distributions` in a file: `rollout_all_logp` `[N, V]`, or
    `rollout_top_ids` and `rollout_top_logp` `[N, k]`, the same with `old_`, and hidden states as
    `rollout_hidden.NAME` and `old_hidden.NAME` `[N, D]`, in the natural order of their names. A
    line of a .jsonl file is one position.
    """
    columns = read_safetensors(path) if path.suffix == ".safetensors" else _stack_layers(path)
    arguments: dict[str, Any] = {}
    for side in SIDES:
        if f"{side}_all_logp" in columns:
            arguments[side] = columns[f"{side}_all_logp"]
        elif {f"{side}_top_ids", f"{side}_top_logp"} <= columns.keys():
            ids, logp = columns[f"{side}_top_ids"], columns[f"{side}_top_logp"]
            arguments[side] = TopK.sorted(ids.long(), logp.double())
        else:
            raise InputError(
                f"{path} has no {side}_all_logp, and not both of {side}_top_ids and "
                f"{side}_top_logp; it has {', '.join(columns)}."
            )
        prefix = f"{side}_hidden."
        layers = sorted((name for name in columns if name.startswith(prefix)), key=_number_key)
        arguments[f"{side}_hidden"] = {name.removeprefix(prefix): columns[name] for name in layers}
    return arguments


def _number_key(name: str) -> list[str | int]:
    """A key by which "layers.2" comes before "layers.10"."""
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def _stack_layers(path: Path) -> dict[str, Tensor]:
    rows = read_rows(path)
    try:
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{path}: each line needs the same lists of numbers, as long as in the first line: "
            f"{type(error).__name__} {error}."
        ) from error
