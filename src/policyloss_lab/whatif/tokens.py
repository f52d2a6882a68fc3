"""`StoredTokens`: the tokens that losses are tried on, read from a run directory or from a file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policyloss.advantage import grpo
from policyloss.arguments import is_number
from policyloss.errors import InputError
from policyloss.inputs import OPTIONAL, TOKEN_SHAPED, Inputs
from policyloss_lab.diagnosis.read import COLUMNS, first_names, read_rows, read_safetensors
from policyloss_lab.limits import TOKEN_LENGTH, cut
from policyloss_lab.reading import finite, integer, json_object
from policyloss_lab.report.rollouts import read_rollouts

# Further tensors: the input of a model, and rewards for the page.
EXTRA = ("rewards", "ids", "prompts")
NEEDED = ("logp", "advantages", "mask")


@dataclass(frozen=True)
class StoredTokens:
    """N tokens of S sequences.

    inputs: the tensors of a loss, packed `[N]` in float64, with one advantage per token, and 0
    where the mask is False. rewards: `[S]`. ids: `[N]`. prompts: the token ids before each
    sequence; prompt_texts: the same as texts. texts: the text of each token. loss: the loss in the
    config.json of the run. horizon: the longest completion of the run. notes: about omitted data.
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
        """From the arguments of `policy_loss` by name, padded or packed, and the `EXTRA` ones."""
        missing = [name for name in NEEDED if tensors.get(name) is None]
        if missing:
            there = ", ".join(sorted(map(str, tensors))) or "nothing"
            raise InputError(f"the tokens need {' and '.join(missing)}; there is {there}.")
        others = {name: x for name, x in tensors.items() if name in OPTIONAL}
        unknown = set(tensors) - {*OPTIONAL, *NEEDED, *EXTRA, "old_logp"}
        if unknown:
            raise InputError(
                f"unknown tensors {', '.join(sorted(map(str, unknown)))}; known are the names of "
                f"policy_loss and {', '.join(EXTRA)}."
            )
        logp, advantages, mask = (tensors[name] for name in NEEDED)
        inputs = Inputs.of(logp, tensors.get("old_logp"), advantages, mask, others)
        packed = _pack_inputs(inputs)
        count = _lengths(packed).shape[0]
        ids, rewards = tensors.get("ids"), tensors.get("rewards")
        if rewards is not None and tuple(rewards.shape) != (count,):
            shape = tuple(rewards.shape)
            raise InputError(f"rewards has shape {shape}; give one per sequence, ({count},).")
        if ids is not None and ids.shape != inputs.logp.shape:
            shapes = f"shape {tuple(ids.shape)} and logp {tuple(inputs.logp.shape)}"
            raise InputError(f"ids has {shapes}; give one id per token.")
        return cls(
            packed,
            None if rewards is None else rewards.detach().double().cpu(),
            None if ids is None else ids.reshape(-1).cpu(),
            tensors.get("prompts"),
        )

    def replace(self, **changes: Any) -> StoredTokens:
        """The tokens with some fields replaced."""
        return replace(self, **changes)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence, `[S]`, masked tokens included."""
        return _lengths(self.inputs)

    @property
    def sequence(self) -> Tensor:
        """The sequence of each token, `[N]`."""
        return torch.repeat_interleave(self.lengths)

    def sums(self, x: Tensor) -> Tensor:
        """The sum over each sequence, `[…, N]` → `[…, S]`."""
        out = x.new_zeros(*x.shape[:-1], self.lengths.shape[0])
        return out.index_add(-1, self.sequence, x)


def _lengths(inputs: Inputs) -> Tensor:
    assert inputs.cu_seqlens is not None
    return inputs.cu_seqlens.diff()


def _pack_inputs(inputs: Inputs) -> Inputs:
    """The packed inputs in float64 on the CPU; an error names a nonfinite tensor."""
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


TOKEN_BUDGET = 2_000_000  # tokens read from a run
# One number per token.
PER_TOKEN = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp", "entropy")
# The names of stored columns in different trainers, ours first.
NAMES: dict[str, tuple[str, ...]] = {
    **COLUMNS,
    "entropy": ("entropy", "entropys"),
    "ref_logp": ("ref_logp", "ref_log_prob", "ref_log_probs", "ref_per_token_logps"),
    "teacher_logp": ("teacher_logp", "teacher_log_probs"),
    "token_advantage": ("token_advantage", "advantages", "advantage"),
    "reward": ("reward", "rewards", "score", "scores"),
    "group": ("group", "group_ids", "group_id", "uid"),
    "tokens": ("tokens", "texts"),
    "prompt": ("prompt",),
    "step": ("step",),
}
_NO_LOGP = "There is no logp; the policy is taken to be the old one, so that every ratio is 1."
_LARGEST = 1e6  # larger log-probabilities and advantages are invalid


def read(path: Path, step: int | str | None = None) -> StoredTokens:
    """The tokens of a run directory or a file. step: as in `tokens_of`."""
    if path.is_dir():
        return _of_run(path, step)
    if path.suffix == ".safetensors":
        tensors = read_safetensors(path)
        columns = first_names(NAMES, tensors)
        return _of_tensors({ours: tensors[name] for ours, name in columns.items()})
    if path.suffix == ".jsonl":
        rows = read_rows(path)
        columns = first_names(NAMES, rows[0])
        return tokens_of([{ours: row.get(n) for ours, n in columns.items()} for row in rows], step)
    if not os.path.lexists(path):
        raise InputError(f"{path} does not exist; give the folder of a run, or a file of tokens.")
    raise InputError(f"{path} is neither a run directory nor a .jsonl or .safetensors file.")


def _of_run(folder: Path, step: int | str | None) -> StoredTokens:
    notes: list[str] = []
    contents = json_object(folder / "config.json", notes)
    config = contents.get("config")
    config = config if isinstance(config, dict) else {}
    rows = read_rollouts(folder / "rollouts.jsonl", notes, TOKEN_BUDGET)
    if not rows:
        raise InputError(f"{folder} stored no completions. {' '.join(notes)}")
    tokens = tokens_of(rows, step)
    return tokens.replace(
        loss=contents.get("loss"),
        horizon=integer(config.get("max_new_tokens")),
        notes=(*notes, *tokens.notes),
    )


def _of_tensors(tensors: dict[str, Tensor]) -> StoredTokens:
    """The tokens of `[B, T]` tensors, with `[B]` numbers of sequences."""
    renamed = {"token_advantage": "advantages", "reward": "rewards", "group": "group_ids"}
    named = {renamed.get(name, name): x for name, x in tensors.items()}
    for name in ("tokens", "prompt", "prompts", "step"):
        named.pop(name, None)
    notes = []
    if "logp" not in named and "old_logp" in named:
        named["logp"] = named["old_logp"]
        notes.append(_NO_LOGP)
    if "logp" in named:
        named.setdefault("mask", torch.ones_like(named["logp"], dtype=torch.bool))
        if "ids" in named and named["ids"].shape != named["logp"].shape:
            del named["ids"]  # in some files, prompt and completion together
    return StoredTokens.of(named).replace(notes=tuple(notes))


def tokens_of(rows: Sequence[Mapping[str, Any]], step: int | str | None = None) -> StoredTokens:
    """The completions of one step, or of "all", concatenated. rows: with the keys of `NAMES`. step:
    by default the last one with a nonzero advantage, or the last one if there is none.
    """
    steps = sorted({row["step"] for row in rows if integer(row.get("step")) is not None})
    if not steps or step == "all":
        return _end_to_end(rows)
    if step is not None and step not in steps:
        shown = ", ".join(map(str, steps[-10:]))
        raise InputError(f"step={step!r} is not stored; there are {shown}, or step='all'.")
    candidates = steps[::-1] if step is None else [step]
    tried = ((i, _end_to_end([row for row in rows if row.get("step") == i])) for i in candidates)
    last = next(tried)
    number, tokens = next((x for x in chain([last], tried) if x[1].inputs.advantages.any()), last)
    if len(steps) == 1:
        return tokens
    later = "" if number == last[0] else "; in the later ones every advantage is 0"
    note = f"These are the tokens of step {number}, one of {len(steps)} stored steps{later}."
    return tokens.replace(notes=(note, *tokens.notes))


def _end_to_end(rows: Sequence[Mapping[str, Any]]) -> StoredTokens:
    notes: list[str] = []
    has_advantage = any(row.get("token_advantage") is not None for row in rows)
    kept = []
    for i, row in enumerate(rows):
        x, reward = _numbers(row, i), finite(row.get("reward"))
        if x and ("token_advantage" in x if has_advantage else reward is not None):
            kept.append((row, x, reward))
    if not kept:
        raise InputError(
            "no completion has a logp or old_logp for each of its tokens and an advantage or a "
            "reward; docs/what_if.md lists the names."
        )
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} completions lack numbers and were left out.")
    rows, numbers, rewards = zip(*kept, strict=True)
    tensors: dict[str, Any] = {
        name: torch.tensor([value for x in numbers for value in x[name]], dtype=torch.float64)
        for name in (*PER_TOKEN, "ids", "token_advantage")
        if all(name in x for x in numbers)
    }
    if "logp" not in tensors:
        tensors["logp"] = tensors.get("old_logp")
        notes.append(_NO_LOGP)
    lengths, groups = torch.tensor([len(x["mask"]) for x in numbers]), _groups(rows)
    every_reward = None if None in rewards else torch.tensor(rewards, dtype=torch.float64)
    advantages = tensors.pop("token_advantage", None)
    if advantages is None:
        if groups is None:
            raise InputError(
                "there are no advantages, and without a group or a prompt for each completion "
                "they cannot be computed from the rewards; store one of these."
            )
        assert every_reward is not None
        advantages = grpo(every_reward, groups).repeat_interleave(lengths)
        notes.append("There are no advantages; GRPO's advantages were computed from the rewards.")
    tensors |= {
        "advantages": advantages,
        "rewards": every_reward,
        "mask": torch.tensor([used for x in numbers for used in x["mask"]]),
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        "group_ids": groups,
    }
    prompts, texts = ([row.get(name) for row in rows] for name in ("prompts", "prompt"))
    stored = StoredTokens.of({name: x for name, x in tensors.items() if x is not None})
    return stored.replace(
        ids=None if stored.ids is None else stored.ids.long(),
        prompts=prompts if all(isinstance(p, list) for p in prompts) else None,
        prompt_texts=texts if all(isinstance(p, str) for p in texts) else None,
        texts=[
            text
            for row, x in zip(rows, numbers, strict=True)
            for text in _texts(row, len(x["mask"]))
        ],
        notes=tuple(notes),
    )


def _numbers(row: Mapping[str, Any], place: int) -> dict[str, list[Any]]:
    """The numbers of each token of a completion by name, 0 for masked tokens, and its "mask", all
    True by default; {} without log-probabilities. A column that lacks a number is left out.
    """
    lists = {name: row[name] for name in (*PER_TOKEN, "mask") if isinstance(row.get(name), list)}
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"completion {place + 1} has lists of different lengths: {lengths}.")
    count = next(iter(lengths.values()), 0)
    used = [value is None or bool(value) for value in lists.get("mask", [True] * count)]
    out: dict[str, list[Any]] = {"mask": used}
    for name in (*PER_TOKEN, "ids", "token_advantage"):
        values = row.get(name)
        values = [values] * count if is_number(values) else values
        if not isinstance(values, list) or len(values) != count:
            continue
        floor = -math.inf if name == "rollout_logp" else -_LARGEST
        good = [is_number(x) and floor <= x <= _LARGEST for x in values]
        if all(fine or not trained for fine, trained in zip(good, used, strict=True)):
            pairs = zip(values, good, strict=True)
            out[name] = [float(x) if fine else 0.0 for x, fine in pairs]
    usable = any(name in lists and name in out for name in ("logp", "old_logp"))
    return out if usable and count else {}


def _groups(rows: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """A number for each prompt of each step; None if a completion has neither group nor prompt."""
    keys = [
        (row.get("step"), row.get("prompt") if row.get("group") is None else row["group"])
        for row in rows
    ]
    if any(key is None or isinstance(key, (list, dict)) for _, key in keys):
        return None
    numbers = {key: i for i, key in enumerate(dict.fromkeys(map(str, keys)))}
    return torch.tensor([numbers[str(key)] for key in keys])


def _texts(row: Mapping[str, Any], count: int) -> list[str]:
    """A text for each token: the stored one, its id, or its number."""
    texts, ids = row.get("tokens"), row.get("ids")
    if isinstance(texts, list) and len(texts) == count:
        return [cut(str(text), TOKEN_LENGTH) for text in texts]
    numbers = ids if isinstance(ids, list) and len(ids) == count else range(1, count + 1)
    return [f"#{x}" for x in numbers]
