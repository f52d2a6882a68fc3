"""What would end a run later is looked for before its first step: prompts, the reward, the disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policyloss.errors import InputError
from policyloss_train.sampler import encode, longest
from policyloss_train.tasks.base import Example, Task
from policyloss_train.tasks.rewards import RewardError, scored

if TYPE_CHECKING:
    from policyloss_train.learner import Learner
    from policyloss_train.loop import Training

SHOWN = 5  # prompts that a message names
TRIED = 8  # examples on one of which at least the reward must work
SPARE = 1 << 20  # bytes for everything that is no checkpoint


def preflight(training: Training) -> None:
    """Raise, on every rank, for what would end the run; or leave out the prompts that cannot be
    used, if the options say so.
    """
    config, task, ranks = training.config, training.task, training.ranks
    problems: list[str] = []
    splits = {"train": task.train, "held_out": task.held_out[: config.eval_prompts]}
    for split, examples in splits.items():
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
    reasons: dict[int, str] = {}
    most = longest(model)
    for i, ids in enumerate(encode(tokenizer, [example.prompt for example in examples])):
        if not ids:
            reasons[i] = "has no token"
        elif most is not None and len(ids) + max_new_tokens > most:
            reasons[i] = (
                f"has {len(ids)} tokens, which with --max-new-tokens {max_new_tokens} are more "
                f"than {most} positions"
            )
    return reasons


def checkpoint_bytes(learner: Learner) -> int:
    """About what a checkpoint takes: weights and moments of what learns, and the reference."""
    copies = ((3, learner.policy), (3, learner.critic), (1, learner.reference))
    return sum(
        number * p.numel() * p.element_size()
        for number, module in copies
        for p in (module.parameters() if module is not None else ())
    )


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
    """A reward that fails on the answers of several examples fails on completions too."""
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
    """All checkpoints that are kept must fit, and a new one beside them."""
    there = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
    needed = max((keep + 1) * size - there, size) + SPARE
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free >= needed:
        return []
    return [
        f"{out} has {free / 1e9:.3f} GB of free space, but {keep + 1} checkpoints of "
        f"{size / 1e9:.3f} GB need {needed / 1e9:.3f} GB; free some, use another disk, or lower "
        "--keep."
    ]
