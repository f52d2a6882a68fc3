"""Sampled completions, token by token. A long run has more completions than a page can show, so
some steps are chosen, and the most informative groups of each step. If a run stored no branches of
the loss for its tokens, they are computed from the stored numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from policyloss.errors import PolicyLossError
from policyloss.spec import LossSpec
from policyloss_lab import limits
from policyloss_lab.completions import BRANCHES, choose_groups, token_branches
from policyloss_lab.limits import cut
from policyloss_lab.reading import Notes, finite, integer, json_lines, open_noted, row_at

NUMBERS = (
    *("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp", "entropy"),
    *("ratio", "token_advantage"),
)
FLAGS = ("mask", "clipped")
INTEGERS = ("ids", "turn_ids")  # turn_ids: −1 at a token that the policy did not write
TEXTS = ("prompt", "completion", "answer")


class StoredRow(NamedTuple):
    """A row outside of memory: its offset, its tokens of the budget, its reward (0: unknown)."""

    offset: int
    size: int
    reward: float


# step → group → its rows, because a file may be larger than memory
Index = dict[int, dict[Any, list[StoredRow]]]


def read_rollouts(
    path: Path,
    notes: Notes,
    budget: int = limits.TOKEN_BUDGET,
    size: int = limits.ROLLOUT_BYTES,
    *,
    by_information: bool = True,
) -> list[dict[str, Any]]:
    """The cleaned rows of a file of completions by step, about `budget` tokens at most. A file of
    more than `size` bytes is read in evenly spaced parts. by_information: prefer the most
    informative groups of a step to the first ones.
    """
    index: Index = {}
    total = without = 0
    with open_noted(path, notes) as file:
        for offset, row in json_lines(file, path.name, notes, size, limits.COMPLETION_PARTS):
            step = integer(row.get("step"))
            if step is None:
                without += 1
                continue
            if total == limits.INDEXED:
                notes.append(
                    f"{path.name} has more than {limits.INDEXED:,} rows; the rows after them were "
                    "left out."
                )
                break
            total += 1
            tokens = max(_size(row), budget // limits.ROWS)
            place = StoredRow(offset, tokens, finite(row.get("reward")) or 0)
            index.setdefault(step, {}).setdefault(group_of(row), []).append(place)
        chosen = _choose(index, budget, by_information)
        shortened: Counter[str] = Counter()
        rows = [
            _clean(row_at(file, offset), step, shortened)
            for step in sorted(chosen)
            for offset in sorted(place.offset for place in chosen[step])
        ]
    if len(rows) < total:
        steps = f"{len(chosen)} of {len(index)} steps"
        notes.append(
            f"{len(rows):,} of {total:,} completions in {path.name} are shown, from {steps}, to "
            "keep the page small."
        )
    if without:
        notes.append(f"{path.name} has {without} line(s) without a step, left out.")
    cuts = (f"{count:,} {what}" for what, count in shortened.items() if count)
    notes += [f"{cut_short} are shown up to there; the rest is left out." for cut_short in cuts]
    return rows


def group_of(row: dict[str, Any]) -> Any:
    """The key of a row's group within a step: its number, the example, or the prompt."""
    names = (_label(row.get("group")), _label(row.get("example")))
    known = [name for name in names if name is not None]
    return known[0] if known else ("prompt", hash(_text(row.get("prompt"))))


def _size(row: dict[str, Any]) -> int:
    """The size of a row in tokens of the budget, texts included."""
    characters = sum(min(len(_text(row.get(name))), limits.TEXT_LENGTH) for name in TEXTS)
    tokens = min(len(_list(row.get("tokens"))), limits.TOKEN_BUDGET)
    return tokens + characters // limits.CHARACTERS_PER_TOKEN


def _choose(index: Index, budget: int, by_information: bool) -> dict[int, list[StoredRow]]:
    """Every k-th step, counted back from the last, with the smallest k for which the first groups
    of all these steps fit into `budget`; then their second groups, and so on, while they fit. If a
    single group is too long, its first rows are chosen.
    """
    groups = {step: list(of_step.values()) for step, of_step in index.items()}
    if by_information:
        for step, of_step in groups.items():
            rewards = [[row.reward for row in group] for group in of_step]
            groups[step] = [of_step[i] for i in choose_groups(rewards, len(of_step))]
    steps = sorted(index)
    stride = limits.stride([_total(groups[step][0]) for step in steps], budget)
    chosen: dict[int, list[StoredRow]] = {}
    left = budget
    for rank in range(max(map(len, groups.values()), default=0)):
        for step in steps[::-stride]:
            for group in groups[step][rank : rank + 1]:
                if _total(group) <= left:
                    chosen.setdefault(step, []).extend(group)
                    left -= _total(group)
    return chosen or {step: _first(groups[step][0], budget) for step in steps[-1:]}


def _total(group: list[StoredRow]) -> int:
    return sum(row.size for row in group)


def _first(group: list[StoredRow], budget: int) -> list[StoredRow]:
    """The first rows of a group that fit into `budget`; at least one row."""
    fitting = sum(total <= budget for total in accumulate(row.size for row in group))
    return group[: max(1, fitting)]


def _clean(row: dict[str, Any], step: int, shortened: Counter[str]) -> dict[str, Any]:
    """One row with every field of the schema: texts are strings, and each list is as long as
    `tokens`, None where unknown. A token that the policy did not write has no numbers. shortened:
    counts texts, tokens and rows that are cut.
    """
    every = _list(row.get("tokens"))
    tokens = [_text(token) for token in every[: limits.TOKEN_BUDGET]]
    texts = {name: _text(row.get(name)) for name in TEXTS}
    for what, most, parts in (
        ("text", limits.TEXT_LENGTH, texts.values()),
        ("token", limits.TOKEN_LENGTH, tokens),
    ):
        long = f"{what}(s) longer than {most:,} characters"
        shortened[long] += sum(len(part) > most for part in parts)
    many = f"rollout(s) with more than {limits.TOKEN_BUDGET:,} tokens"
    shortened[many] += len(every) > len(tokens)
    unknown, count = [None] * len(tokens), len(tokens)
    columns = {
        name: (_list(row.get(name))[:count] + unknown)[:count]
        for name in (*NUMBERS, *FLAGS, *INTEGERS, "branch")
    }
    written = [turn != -1 for turn in columns["turn_ids"]]
    reason = row.get("finish_reason")
    return {
        "step": step,
        "example": _label(row.get("example")),
        "group": _label(row.get("group")),
        "groups": integer(row.get("groups")),
        "weights": integer(row.get("weights")),
        **{name: cut(text, limits.TEXT_LENGTH) for name, text in texts.items()},
        **{name: finite(row.get(name)) for name in ("reward", "advantage")},
        "finished": None if row.get("finished") is None else bool(row["finished"]),
        "finish_reason": cut(reason, limits.TOKEN_LENGTH) if isinstance(reason, str) else None,
        "tokens": [cut(token, limits.TOKEN_LENGTH) for token in tokens],
        **{name: [integer(v) for v in columns[name]] for name in INTEGERS},
        **{
            name: [
                finite(v) if kept else None for kept, v in zip(written, columns[name], strict=True)
            ]
            for name in NUMBERS
        },
        **{name: [None if v is None else bool(v) for v in columns[name]] for name in FLAGS},
        "branch": [v if isinstance(v, str) and v in BRANCHES else None for v in columns["branch"]],
    }


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """A text unchanged, a number in digits, and only the type of a list or an object."""
    if isinstance(value, (dict, list)):
        return f"({type(value).__name__})"
    return value if isinstance(value, str) else "" if value is None else str(value)


def _label(value: Any) -> str | int | None:
    """The name or number of an example or a group."""
    return cut(value, limits.TOKEN_LENGTH) if isinstance(value, str) else integer(value)


def with_branches(rows: Sequence[dict[str, Any]], loss: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with a branch for every token, if the branch follows from the row alone.

    loss: the result of `loss_card` for the run. Stored branches stay. If the trust region ranks all
    tokens of a step, or a row lacks a number, the branch remains unknown.
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
    tensors = {
        name: torch.tensor([x or 0.0 for row in chosen for x in row[name]], dtype=torch.float64)
        for name in {"old_logp", *names}
    }
    mask = torch.tensor([used is not False for row in chosen for used in row["mask"]])
    tensors["advantages"] = tensors.pop("token_advantage")
    try:
        codes = token_branches(spec, mask=mask, **tensors, cu_seqlens=lengths.cumsum(0))
    except PolicyLossError:  # the loss reads a tensor that no file of completions holds
        return list(rows)
    out, branches = list(rows), list(BRANCHES)
    for i, part in zip(open_rows, torch.split(codes, lengths[1:].tolist()), strict=True):
        out[i] = {**rows[i], "branch": [branches[code] for code in part.tolist()]}
    return out


def _lacks_branches(row: Mapping[str, Any], names: set[str]) -> bool:
    """Whether a row has tokens without branches, and all numbers of its trained tokens."""
    if not row["tokens"] or any(branch is not None for branch in row["branch"]):
        return False
    return all(
        value is not None or used is False
        for name in names
        for value, used in zip(row[name], row["mask"], strict=True)
    )
