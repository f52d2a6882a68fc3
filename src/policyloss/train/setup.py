"""Everything a run needs before its first step:
task, tokenizer, policy, reference, critic, optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import policyloss as pl
from policyloss.errors import InputError
from policyloss.train.adapter import add_adapter, base_trained
from policyloss.train.attention import choose
from policyloss.train.batches import Pack
from policyloss.train.chat import with_template
from policyloss.train.compile import compile_blocks
from policyloss.train.config import TrainConfig
from policyloss.train.distributed import Ranks, wrapped
from policyloss.train.learner import Learner, Policy
from policyloss.train.models import Critic, checkpoint_gradients, load, parts
from policyloss.train.optimizers import adamw
from policyloss.train.routing import Routing
from policyloss.train.tasks import Task, make_task
from policyloss.train.teacher import load_teacher
from policyloss.train.tiny import TINY
from policyloss.train.warmup import WARMUP_STEPS, warm_up


class Setup(NamedTuple):
    """model: the language model, which samples. learner: holds the policy around it,
    which learns.
    """

    task: Task
    tokenizer: Any
    model: Any
    learner: Learner


def build(
    config: TrainConfig,
    spec: pl.LossSpec,
    ranks: Ranks,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    offline: bool = False,
) -> Setup:
    """Make or load all of it. Nothing is trained yet. offline: download nothing,
    because no user named the model.
    """
    task = make_task(config.task, reward=config.reward, seed=config.seed, success=config.success)
    dtype = getattr(torch, config.dtype)
    model, tokenizer = load(
        config.model,
        task,
        dtype=dtype,
        device=ranks.device,
        seed=config.seed,
        offline=offline,
        trust_remote_code=config.trust_remote_code,
        warn=warn,
    )
    # Dropout would make the policy that is trained another one than the policy that sampled.
    model.eval()
    _check_vocabulary(model, tokenizer)
    task = with_template(task, tokenizer, config.system_prompt, config.chat_template)
    attention, sentence = choose(model, config.attention)
    say(
        f"task {task.name}: {len(task.train)} prompts, {len(task.held_out)} held out; "
        f"model of {_size(model)} parameters; {sentence}"
    )
    if config.gradient_checkpointing:
        checkpoint_gradients(model)
    reference = critic = critic_optimizer = None
    if "ref_logp" in spec.reads and not config.lora_rank:
        reference = Policy(copy.deepcopy(model), attention).requires_grad_(False)
    if config.with_critic:
        critic = Critic(model, attention).to(ranks.device)
        critic_optimizer = adamw(critic, config.critic_lr, config)
    if config.lora_rank:
        add_adapter(model, config)
    if config.compile:
        compile_blocks(model.base_model)
    policy = Policy(model, attention)
    learner = Learner(
        config,
        spec,
        ranks,
        policy,
        adamw(policy, config.lr, config),
        reference,
        critic,
        critic_optimizer,
    )
    learner.warn, learner.routing = warn, Routing(model)
    learner.stores_frozen = not config.lora_rank or warmup_steps(config) > 0
    if config.teacher is not None:
        learner.teacher = load_teacher(config, task, ranks, tokenizer, model, warn)
    return Setup(task, tokenizer, model, learner)


def teach(
    setup: Setup, config: TrainConfig, progress: Callable[[int], Callable[..., None]]
) -> None:
    """Supervised steps on the task's own answers, then what starts as a copy of the policy.

    progress: makes, for a number of steps, the function that is told of each.
    """
    steps = warmup_steps(config)
    if steps:
        with base_trained(setup.model):
            warm_up(
                setup.model,
                setup.tokenizer,
                setup.task,
                steps=steps,
                seed=config.seed,
                progress=progress(steps),
            )
    setup.learner.start_copies()


def warmup_steps(config: TrainConfig) -> int:
    """How many there are: by default some for the built-in task, and none for a user's data."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return WARMUP_STEPS if config.model in TINY and config.task == "sort" else 0


def distribute(learner: Learner) -> None:
    """Wrap policy and critic for several ranks, once their weights are what they start from."""
    config, ranks = learner.config, learner.ranks
    if ranks.world == 1:
        return
    learner.policy = wrapped(learner.policy, ranks, config.parallel, _layers(learner.policy.model))
    learner.optimizer = adamw(learner.policy, config.lr, config)
    if config.parallel == "fsdp":
        with torch.no_grad():  # the whole must be run before a part of it, which is what samples
            learner.logprobs(learner.policy, Pack.nothing().to(ranks.device).micro_batch())
    if learner.critic is not None:
        learner.critic = wrapped(learner.critic, ranks, config.parallel, [])
        learner.critic_optimizer = adamw(learner.critic, config.critic_lr, config)


def _layers(model: Any) -> list[nn.Module]:
    """The blocks of the model's body, which a sharded model gathers one after the other."""
    body = parts(model)[0]
    lists = [list(m) for m in body.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _check_vocabulary(model: Any, tokenizer: Any) -> None:
    size = parts(model)[1].shape[0]
    # Ids may have gaps.
    count = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
    if count > size:
        raise InputError(
            f"the tokenizer has {count} tokens, but the model's head has {size}; they do not "
            "belong together."
        )


def _size(model: nn.Module) -> str:
    n = sum(p.numel() for p in model.parameters())
    return f"{n / 1e6:.1f} M" if n >= 1e6 else f"{n / 1e3:.0f} k"
