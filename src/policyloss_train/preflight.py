"""All checks before a run, in order.

1. `option_problems`: options that contradict each other, for every `TrainConfig`.
2. `loss_problems`: options that contradict the loss, in `TrainConfig.with_loss`.
3. `refuse_missing`: files, folders, code and packages that the options name; before a run directory
   is created.
4. `preflight`: prompts, reward and disk, once the model is loaded and before the first step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from policyloss.advantage import ESTIMATORS
from policyloss.compat.tinker.losses import check_spec
from policyloss.errors import InputError, unknown_name
from policyloss.spec import LossSpec
from policyloss_train.chat import read_template
from policyloss_train.models import TINY, refuse_missing_folder
from policyloss_train.optimizers import torchao
from policyloss_train.sampler import encode, unusable_prompts
from policyloss_train.tasks import GYM, IN_TURNS, make_task
from policyloss_train.tasks.base import Task
from policyloss_train.tasks.rewards import RewardError, score_completion
from policyloss_train.tinker.service import sdk, server_problems
from policyloss_train.user_code import is_reference, load_code
from policyloss_train.view.track import service_module

if TYPE_CHECKING:
    from policyloss_train.config import TrainConfig
    from policyloss_train.learner import Learner
    from policyloss_train.loop import Training

ENGINES = ("built-in", "vllm")
BY_COMPARISON = ("grpo", "dr_grpo", "rloo", "grpo_loo", "opo", "maxrl", "gpg")  # within a group
# Equal rewards of completions still have a gradient.
WITHOUT_GROUPS = ("asymre", "flash_reinforce", "gae", "prpo", "reinforce_pp", "remax", "turn_loo")
# The other estimators need numbers that a run does not have.
_NEEDS_MORE = ("gdpo", "hierarchical_grpo", "optimal_token_baseline")
ADVANTAGES = (*(name for name in ESTIMATORS if name not in _NEEDS_MORE), "turn_loo")
SHOWN = 5  # number of prompts in a message
TRIED = 8  # the reward must work on at least one of this many examples
SPARE = 1 << 20  # bytes for all files that are not checkpoints


def option_problems(config: TrainConfig) -> Iterator[str]:
    """Problems of sampling, optimizer and advantages, each a sentence with its remedy."""
    completions, name = config.prompts * config.group_size, config.rollout
    tokens = completions * config.max_new_tokens
    if tokens >= 2**31:
        yield f"--prompts × --group-size × --max-new-tokens is {tokens}; it must be below 2**31."
    if config.minibatches > completions:
        most = f"--prompts × --group-size, {completions}"
        yield f"--minibatches {config.minibatches} must be at most {most}."
    if name not in ENGINES and "://" not in name and not is_reference(name):
        valid = f"{', '.join(ENGINES)}, addresses of servers (http://host:port), or module:factory"
        yield f"--rollout must be one of {valid}; got {name!r}."
    if config.rollout_logp == "raw" and config.replays_support:
        yield (
            "--rollout-logp raw is over all tokens, and the learner's log-probabilities would be "
            "over those that --top-p and --top-k kept; add --no-sampling-mask, or leave it out."
        )
    if config.rollout_logp == "raw" and (name == "vllm" or "://" in name):
        yield (
            f"--rollout {name} gives processed log-probabilities; --rollout-logp raw is for the "
            "built-in sampler and for engines of your own."
        )
    if config.task in IN_TURNS:
        for option, value, fits in (
            ("--rollout", name, ENGINES[0]),
            ("--engine", config.engine, ENGINES[0]),
            ("--parallel", config.parallel, "ddp"),
        ):
            if value != fits:
                yield (
                    f"--task {config.task} calls a tool in the middle of a completion, which "
                    f"{option} {value} cannot do; use {option} {fits}."
                )
    if config.dtype == "float64" and name != ENGINES[0]:
        yield f"--rollout {name} samples in float32 or bfloat16, not --dtype float64."
    if config.dynamic_sampling and config.teacher is not None:
        yield (
            "--dynamic-sampling drops groups whose rewards are equal, but a --teacher judges them, "
            "too; leave one of the two out."
        )
    if "" in config.stop:
        yield "--stop must be texts that are not empty."
    if config.task.endswith(".jsonl") and config.reward is None:
        yield f"--task {config.task} needs --reward exact, math or module:function."
    if config.extend is not None and not config.resume:
        yield f"--extend {config.extend} continues a run: add --resume. A new run takes --steps."
    if not config.lora_rank and (config.lora_alpha is not None or config.lora_target):
        yield "--lora-alpha and --lora-target need --lora-rank."
    if config.optimizer == "adamw8bit" and config.parallel == "fsdp":
        yield (
            "--optimizer adamw8bit keeps its moments in blocks, which --parallel fsdp would cut; "
            "use ddp, or adamw, whose moments fsdp shards."
        )
    if config.optimizer == "adamw8bit" and config.dtype == "float64":
        yield "--optimizer adamw8bit computes in float32, not --dtype float64."
    if config.engine != ENGINES[0]:
        yield from server_problems(config)
    if config.advantage is None:  # `with_loss` sets it
        return
    if config.advantage not in ADVANTAGES and not is_reference(config.advantage):
        yield unknown_name("advantage", config.advantage, ADVANTAGES)
    alone = config.group_size == 1 and config.reward_share
    if alone and config.reward_estimator in BY_COMPARISON:
        yield (
            f"--group-size 1 leaves the advantage {config.estimator!r} nothing to compare a "
            "completion with: all would be 0. Use several completions per prompt, "
            "--advantage gae (with a critic), remax or reinforce_pp."
        )
    if config.estimator == "passk_combinatorial" and config.passk >= config.group_size:
        yield (
            f"--passk {config.passk} must be below --group-size {config.group_size}: where a "
            "subset holds all completions, every advantage is 0."
        )
    if config.dynamic_sampling and config.estimator in WITHOUT_GROUPS:
        yield (
            "--dynamic-sampling drops groups whose rewards are equal, but with the advantage "
            f"{config.estimator!r} they have a gradient; use it with a group advantage such as "
            "grpo."
        )


def loss_problems(config: TrainConfig, spec: LossSpec) -> Iterator[str]:
    """Options that contradict the loss."""
    taught = any(getattr(part, "teaches", False) for part in spec.kl_parts)
    if config.engine != ENGINES[0]:
        check_spec(spec)
        if taught or config.reads_teacher:
            yield (
                f"--engine {config.engine} cannot honour --loss {config.loss} with the advantage "
                f"{config.estimator!r}: it reads a teacher, and the server holds one model."
            )
    if spec.needs_horizon:
        yield (
            f"the loss {config.loss!r} divides by a horizon, which is not set; with these options "
            f"it is spec.with_horizon({config.max_new_tokens}), the longest completion."
        )
    if "rollout_logp" in spec.reads and "old_logp" in spec.reads and config.old_logp == "rollout":
        yield (
            f"the loss {config.loss!r} compares old_logp with rollout_logp, and with --old-logp "
            "rollout they are the same numbers; use --old-logp recompute."
        )
    if spec.divergence is not None and config.replays_support:
        yield (
            f"the loss {config.loss!r} compares complete distributions with a teacher, and with "
            "--top-p or --top-k the learner's covers only the tokens that they kept; add "
            "--no-sampling-mask --rollout-logp raw, so that both cover all tokens."
        )
    if config.teacher is None and (taught or config.reads_teacher):
        yield (
            f"the loss {config.loss!r} with the advantage {config.estimator!r} reads a teacher: "
            "give the folder of one, --teacher DIR."
        )


def refuse_missing(config: TrainConfig) -> None:
    """Raise for a file, folder, code or package that cannot be loaded, or a task that cannot be
    read. The loss was already read with the options.
    """
    if config.track:
        service_module(config.track)
    for name, value in {"advantage": config.advantage, "rollout engine": config.rollout}.items():
        if is_reference(value):
            load_code(str(value), f"the {name}")
    if not config.task.startswith(GYM):  # reasoning_gym's data sets are not files and load slowly
        make_task(config.task, reward=config.reward, seed=config.seed)
    if config.engine != ENGINES[0]:
        sdk()
    if config.model not in TINY:
        refuse_missing_folder(config.model)
    if config.teacher is not None and not config.teacher.is_dir():
        raise InputError(f"--teacher: there is no folder {config.teacher}, of a model or a run.")
    if config.chat_template is not None:
        read_template(config.chat_template)
    if config.optimizer == "adamw8bit":
        torchao()


def preflight(training: Training) -> None:
    """Raise, on every rank, for a problem that would end the run later. Prompts that the model
    cannot continue are left out instead, with `--unusable skip`.
    """
    config, task, ranks = training.config, training.task, training.ranks
    problems: list[str] = []
    splits = {"train": task.train, "held_out": task.held_out[: config.eval_prompts]}
    for split, examples in splits.items():
        ids = encode(training.tokenizer, [example.prompt for example in examples])
        bad = unusable_prompts(training.model, ids, config.max_new_tokens)
        if not bad:
            continue
        rows = [
            f"{examples[i].prompt[:40]!r} (example {examples[i].id}) {why}"
            for i, why in list(bad.items())[:SHOWN]
        ]
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        count = f"{len(bad)} of {len(examples)} prompts of the split {split!r}"
        text = f"{count} cannot be used: {'; '.join(rows)}{more}"
        if len(bad) == len(examples):
            problems.append(f"{text}; none is left.")
        elif config.unusable == "refuse":
            problems.append(
                f"{text}. Shorten them, lower --max-new-tokens, or leave them out by --unusable "
                "skip."
            )
        else:
            training.display.warn(f"{text}; they are left out.")
            if split == "train":
                training.collector.unusable = frozenset(bad)
            else:
                training.held_out = [e for i, e in enumerate(examples) if i not in bad]
    problems += _reward_problem(task, config.reward_timeout)
    if ranks.is_first:
        problems += _disk_problem(config.out, training.learner, config.keep)
    distinct = list(dict.fromkeys(problem for share in ranks.gather(problems) for problem in share))
    if distinct:
        raise InputError(" ".join(distinct))


def _reward_problem(task: Task, seconds: float) -> list[str]:
    """A sentence if the reward fails on the answers of all of the first `TRIED` examples."""
    failures: list[RewardError] = []
    for example in task.train[:TRIED]:
        try:
            score_completion(task, example, example.answer, seconds)
        except RewardError as error:
            failures.append(error)
        else:
            return []
    return [
        f"the reward fails on each of the first {len(failures)} training prompts, with their own "
        f"answers: {failures[0]}"
    ]


def _disk_problem(out: Path, learner: Learner, keep: int) -> list[str]:
    """A sentence if the disk has no room for the kept checkpoints and a new one. A checkpoint holds
    the weights of the reference, and the weights and two moments of policy and critic.
    """
    copies = ((3, learner.policy), (3, learner.critic), (1, learner.reference))
    size = sum(
        number * p.numel() * p.element_size()
        for number, module in copies
        for p in (module.parameters() if module is not None else ())
    )
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
