"""What would end a run later is looked for before its first step: prompts, the reward, the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from policyloss.errors import InputError
from policyloss.train.sampler import encode, longest
from policyloss.train.tasks.base import Example, Task
from policyloss.train.tasks.rewards import RewardError, scored

if TYPE_CHECKING:
    from policyloss.train.learner import Learner
    from policyloss.train.loop import Training

SHOWN = 5  # prompts that a message names
TRIED = 8  # examples on one of which at least the reward must work
SPARE = 1 << 20  # bytes for everything that is no checkpoint


def preflight(training: Training) -> None:
    """Raise, on every rank, for what would end the run; or leave out the prompts that cannot be
    used, if the options say so.
    """
    config, task, ranks = training.config, training.task, training.ranks
    problems: list[str] = []
    for split, examples in (
        ("train", task.train),
        ("held_out", task.held_out[: config.eval_prompts]),
    ):
        bad = unusable(training.model, training.tokenizer, examples, config.max_new_tokens)
        if not bad:
            continue
        text = _listed(split, examples, bad)
        if len(bad) == len(examples):
            problems.append(f"{text}; none is left.")
        elif config.unusable == "refuse":
            problems.append(
                f"{text}. Shorten them, lower --max-new-tokens, or leave them out by --unusable "
                "skip."
            )
        else:
            training.display.warn(f"{text}; they are left out.")
            training.leave_out(split, frozenset(bad))
    problems += _reward_problem(task, config.reward_timeout)
    if ranks.is_first:
        problems += _disk_problem(config.out, checkpoint_bytes(training.learner), config.keep)
    distinct = list(dict.fromkeys(problem for share in ranks.gather(problems) for problem in share))
    if distinct:
        raise InputError(" ".join(distinct))


def unusable(
    model: Any, tokenizer: Any, examples: Sequence[Example], max_new_tokens: int
) -> dict[int, str]:
    """The places of the examples whose prompt the model cannot continue, and why."""
    reasons = {
        i: "is no text: a character is half of a pair"
        for i, e in enumerate(examples)
        if not _is_text(e.prompt)
    }
    rest = [i for i in range(len(examples)) if i not in reasons]
    most = longest(model)
    for i, ids in zip(rest, encode(tokenizer, [examples[i].prompt for i in rest]), strict=True):
        if not ids:
            reasons[i] = "has no token"
        elif most is not None and len(ids) + max_new_tokens > most:
            reasons[i] = (
                f"has {len(ids)} tokens, which with --max-new-tokens {max_new_tokens} are more "
                f"than {most} positions"
            )
    return dict(sorted(reasons.items()))


def checkpoint_bytes(learner: Learner) -> int:
    """About what a checkpoint takes: weights and two moments of what learns, and the weights of
    the reference.
    """
    trained = [learner.policy, *([learner.critic] if learner.critic is not None else [])]
    return sum(3 * _bytes(module) for module in trained) + (
        _bytes(learner.reference) if learner.reference is not None else 0
    )


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _listed(split: str, examples: Sequence[Example], bad: dict[int, str]) -> str:
    rows = [
        f"{examples[i].prompt[:40]!r} (example {examples[i].id}) {why}"
        for i, why in list(bad.items())[:SHOWN]
    ]
    more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return (
        f"{len(bad)} of {len(examples)} prompts of the split {split!r} cannot be used: "
        f"{'; '.join(rows)}{more}"
    )


def _reward_problem(task: Task, seconds: float) -> list[str]:
    """A reward that fails on each of several examples, with their own answers, will not work on
    completions either.
    """
    failures: list[RewardError] = []
    for example in task.train[:TRIED]:
        try:
            scored(task, example, example.answer, seconds)
        except RewardError as error:
            failures.append(error)
        else:
            return []
    return [
        f"the reward fails on each of the first {len(failures)} training prompts, with their own "
        f"answers: {failures[0]}"
    ]


def _disk_problem(out: Path, size: int, keep: int) -> list[str]:
    """All checkpoints that are kept, and a new one beside them, must fit; those that are there
    already do.
    """
    there = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
    needed = max((keep + 1) * size - there, size) + SPARE
    free = shutil.disk_usage(_existing(out)).free
    if free >= needed:
        return []
    return [
        f"{out} has {free / 1e9:.3f} GB of free space, but {keep + 1} checkpoints of "
        f"{size / 1e9:.3f} GB need {needed / 1e9:.3f} GB; free some, use another disk, or lower "
        "--keep."
    ]


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
