"""Everything a run needs before its first step: task, tokenizer, policy, reference, teacher and
critic; and warm-up, a short supervised start.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import policyloss as pl
from policyloss.errors import InputError
from policyloss_train import models
from policyloss_train.attention import Rows, choose
from policyloss_train.batches import Pack
from policyloss_train.chat import with_template
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks, Say, wrap_for_ranks
from policyloss_train.learner import Learner
from policyloss_train.optimizers import adamw
from policyloss_train.policy import Critic, Policy, Routing
from policyloss_train.run.checkpoint import subtree
from policyloss_train.run.directory import RunDir
from policyloss_train.run.resume import name_damage, stored_weights
from policyloss_train.sampler import Completed, Sample, take_turns
from policyloss_train.tasks import Task, make_task
from policyloss_train.tasks.base import Tool
from policyloss_train.tinker.learner import ServerLearner

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Setup(NamedTuple):
    """model: the language model, which samples. learner: trains the policy, which wraps `model`."""

    task: Task
    tokenizer: Any
    model: Any
    learner: Learner


def build(
    config: TrainConfig, spec: pl.LossSpec, ranks: Ranks, say: Say, warn: Say, offline: bool = False
) -> Setup:
    """Make or load everything. offline: download nothing; the user did not name the model."""
    task = make_task(config.task, reward=config.reward, seed=config.seed, success=config.success)
    load = partial(
        models.load_model,
        task=task,
        dtype=getattr(torch, config.dtype),
        device=ranks.device,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        warn=warn,
    )
    on_server = config.engine != "built-in"
    # In eval mode: with dropout, the trained policy would differ from the sampled one.
    model, tokenizer = load(config.model, offline=offline, empty=on_server)
    _check_vocabulary(model, tokenizer)
    task = with_template(task, tokenizer, config.system_prompt, config.chat_template)
    if on_server:
        say(f"task {task.name}: {len(task.train)} prompts, {len(task.held_out)} held out")
        remote = ServerLearner.connect(config, spec, ranks, say, warn)
        return Setup(task, tokenizer, model, remote)
    attention, sentence = choose(model, config.attention)
    say(
        f"task {task.name}: {len(task.train)} prompts, {len(task.held_out)} held out; "
        f"model of {_size(model)} parameters; {sentence}"
    )
    if config.gradient_checkpointing:
        models.checkpoint_gradients(model)
    reference = critic = critic_optimizer = None
    if "ref_logp" in spec.reads and not config.lora_rank:
        reference = Policy(copy.deepcopy(model), attention).requires_grad_(False)
    if config.with_critic:
        critic = Critic(model, attention).to(ranks.device)
        critic_optimizer = adamw(critic, config.critic_lr, config)
    if config.lora_rank:
        models.add_adapter(model, config)
    policy = Policy(model, attention)
    if config.compile:  # after `observe_head`, whose forward would compile for its shape
        models.compile_blocks(model.base_model)
    optimizer = adamw(policy, config.lr, config)
    modules = (policy, optimizer, reference, critic, critic_optimizer)
    learner = Learner(config, spec, ranks, *modules, warn=warn)
    learner.routing = Routing(model)
    learner.stores_frozen = not config.lora_rank or warmup_steps(config) > 0
    if config.teacher is not None:
        learner.teacher = _teacher(config, load, model, tokenizer)
    return Setup(task, tokenizer, model, learner)


def _teacher(config: TrainConfig, load: Callable[..., Any], model: Any, tokenizer: Any) -> Policy:
    """The teacher that `config` names, frozen: a stored model, or the policy of another run;
    nothing is downloaded. It must read and write the same tokens as the model.
    """
    folder = config.teacher
    assert folder is not None
    is_run = (folder / "checkpoints").is_dir()
    stored = RunDir.read_config(folder).get("config", {}) if is_run else {"model": folder}
    teacher, its_tokenizer = load(str(stored.get("model", "tiny")), offline=True)
    policy = Policy(teacher, choose(teacher, config.attention)[0]).requires_grad_(False)
    if is_run:
        path, _, tensors = stored_weights(folder)
        with name_damage(path):
            models.load_weights(models.weights(policy), subtree(tensors, "policy"))
    sizes = [models.vocabulary_size(x) for x in (teacher, model)]
    if sizes[0] != sizes[1] or its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"the teacher {folder} has another vocabulary ({sizes[0]} entries) than the model "
            f"({sizes[1]}); a teacher must have the model's tokenizer."
        )
    return policy


def teach(setup: Setup, config: TrainConfig, start: Callable[[int], Callable[..., None]]) -> None:
    """Make supervised steps on the task's demonstrations, then copy the policy into the reference
    and the critic.

    start: takes the number of steps, and returns a function to call after each.
    """
    steps, (task, tokenizer, model, learner) = warmup_steps(config), setup
    if steps:
        with models.train_base(model):
            report, seed = start(steps), config.seed
            warm_up(model, tokenizer, task, steps=steps, seed=seed, progress=report)
    learner.start_copies()


def warmup_steps(config: TrainConfig) -> int:
    """The number of warm-up steps; by default some for a tiny model on a built-in task."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    by_task = {"sort": WARMUP_STEPS, "lookup": 2 * WARMUP_STEPS}
    return by_task.get(config.task, 0) if config.model in models.TINY else 0


def distribute(learner: Learner) -> None:
    """Wrap policy and critic for several ranks, after their initial weights are set."""
    config, ranks = learner.config, learner.ranks
    if ranks.world == 1:
        return
    model: Any = learner.policy.model
    # The blocks of the model's body, which a sharded model gathers one at a time.
    lists = [list(m) for m in model.base_model.modules() if isinstance(m, nn.ModuleList)]
    layers: list[nn.Module] = max(lists, key=len, default=[])
    learner.policy = wrap_for_ranks(learner.policy, ranks, config.parallel, layers)
    learner.optimizer = adamw(learner.policy, config.lr, config)
    if config.parallel == "fsdp":
        with torch.no_grad():  # FSDP must run the root module before a part of it, which samples
            learner.logprobs(learner.policy, Pack.nothing().to(ranks.device).micro_batch())
    if learner.critic is not None:
        learner.critic = wrap_for_ranks(learner.critic, ranks, config.parallel, [])
        learner.critic_optimizer = adamw(learner.critic, config.critic_lr, config)


def _check_vocabulary(model: Any, tokenizer: Any) -> None:
    size = models.vocabulary_size(model)
    # Ids may have gaps.
    count = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
    if count > size:
        sizes = f"the tokenizer has {count} tokens, but the model's head has {size}"
        raise InputError(f"{sizes}; they do not belong together.")


def _size(model: nn.Module) -> str:
    n = sum(p.numel() for p in model.parameters())
    return f"{n / 1e6:.1f} M" if n >= 1e6 else f"{n / 1e3:.0f} k"


WARMUP_STEPS = 200  # for the model "tiny" on the task "sort": six seconds of one core
BATCH, LR = 32, 3e-3


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    steps: int = WARMUP_STEPS,
    seed: int,
    progress: Callable[[int, float], object] | None = None,
    lr: float = LR,
) -> None:
    """`steps` AdamW steps on `−mean log p(completion, end | prompt)` of the task's demonstrations,
    in eval mode, on training prompts only. progress: called as `progress(done, loss)`.
    """
    rng = Random(f"warm-up {seed}")
    rows = [example for example in task.train if task.demonstration(example, Random(0)) is not None]
    if not rows:
        raise InputError(f"the task {task.name} has no answers to warm up on: --warmup-steps 0.")
    policy = Policy(model, Rows())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        chosen = rng.sample(rows, min(BATCH, len(rows)))
        texts = [(example.prompt, task.demonstration(example, rng) or "") for example in chosen]
        for group in optimizer.param_groups:
            # The first steps of AdamW are large for any gradient.
            group["lr"] = lr * min(1.0, (step + 1) / 10)
        micro = _pack(tokenizer, texts, task.tool).to(model.device).micro_batch()
        loss = policy(micro, partial(_loss, micro["targets"], micro["mask"]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress:
            progress(step + 1, loss.item())
    optimizer.zero_grad()


def _pack(
    tokenizer: PreTrainedTokenizerBase, texts: list[tuple[str, str]], tool: Tool | None
) -> Pack:
    """Prompts and their completions, each with the end token, and with the answers of the tool to
    the calls in it.
    """
    prompts = tokenizer([prompt for prompt, _ in texts])["input_ids"]
    answers = tokenizer([answer for _, answer in texts], add_special_tokens=False)["input_ids"]
    left = [[*answer, tokenizer.eos_token_id] for answer in answers]

    def go_on(rows: list[int], starts: list[list[int]], ends: list[int]) -> list[Completed]:
        turns = []
        for row in rows:
            n = next((i + 1 for i, token in enumerate(left[row]) if token in ends), len(left[row]))
            turns.append(Completed(left[row][:n], torch.zeros(n)))
            left[row] = left[row][n:]
        return turns

    shown = [prompt for prompt, _ in texts]
    completed = take_turns(tool, tokenizer, shown, prompts, sys.maxsize, go_on)
    samples = []
    for prompt, one in zip(prompts, completed, strict=True):
        ids = torch.tensor(prompt), torch.tensor(one.tokens)
        samples.append(Sample(0, 0, *ids, one.logp, True, "", turn_ids=one.turn_ids))
    return Pack.of(samples)


def _loss(
    targets: Tensor, mask: Tensor, hidden: Tensor, weight: Tensor, bias: Any, softcap: Any
) -> Tensor:
    """−mean log p(target) over the targets where `mask` is True; a scalar."""
    logp = pl.linear_logprobs(hidden[mask], weight, targets[mask], bias, softcap=softcap).logp
    return -logp.mean()
