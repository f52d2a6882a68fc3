"""`policyloss train`, `eval`, `sample` and `export`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import policyloss as pl
from policyloss.commands import read_options
from policyloss.errors import InputError
from policyloss.output import temporary_prefix
from policyloss_lab.runs.files import make_folder, refuse_name, sync, write_error
from policyloss_train.arguments import read_arguments
from policyloss_train.chat import with_template
from policyloss_train.collect import mean_outcomes, score_answers
from policyloss_train.commands import EvalOptions, ExportOptions, FromRun, SampleOptions
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.loop import train
from policyloss_train.models import has_adapter, merged_weights, save_all_weights, without_bars
from policyloss_train.run import resume
from policyloss_train.sampler import Sample, encode, sample, uniforms
from policyloss_train.setup import Setup, build
from policyloss_train.tasks import Example, Task
from policyloss_train.tasks.base import Reward
from policyloss_train.tasks.rewards import tolerant_reward


def train_command(arguments: Sequence[str]) -> int:
    """`policyloss train [options]`."""
    config, spec, named = read_arguments(arguments)
    of_a_run = config.resume or config.like is not None
    return train(
        config,
        spec,
        offline=of_a_run and "model" not in named,
        named_out=config.resume or "out" in named,
    )


def eval_command(arguments: Sequence[str]) -> int:
    """`policyloss eval RUN`."""
    options = read_options("eval", EvalOptions, arguments)
    config, spec = _options(options)
    changes = {
        name: x
        for name in ("reward", "success", "trust_remote_code")
        if (x := getattr(options, name)) is not None and x is not False
    }
    config = replace(config, **changes)
    resume.refuse_unnamed_code(config, frozenset(changes))
    (task, tokenizer, model, _), step = load_run(options, config, spec)
    examples = list(task.held_out[: options.prompts])
    score = tolerant_reward(task, options.reward_timeout, _warn)
    answers = evaluate(model, tokenizer, examples, score, stop=config.stop, **_limits(config, task))
    means = mean_outcomes([(s.reward, len(s.completion_ids)) for s in answers], task.success)
    results = list(zip(examples, answers, strict=True))
    if options.json:
        rows = [
            {"prompt": e.prompt, "answer": e.answer, "completion": a.text, "reward": a.reward}
            for e, a in results
        ]
        report = {
            "step": step,
            "accuracy": means["accuracy"],
            "success": task.success,
            "mean_length": means["length"],
            "results": rows,
        }
        print(json.dumps(report, indent=2))
        return 0
    reached = "" if task.success == 1 else f" (reward ≥ {task.success:g})"
    print(
        f"{options.run}, step {step}: accuracy {means['accuracy']:.3f}{reached} on "
        f"{len(examples)} held-out prompts of {task.name}"
    )
    wrong = [(e, a) for e, a in results if a.reward < task.success]
    for example, answer in wrong[: options.show]:
        print(f"  {example.prompt!r} → {answer.text!r}, not {example.answer!r}")
    return 0


def evaluate(
    model: Any, tokenizer: Any, examples: Sequence[Example], score: Reward, **limits: Any
) -> list[Sample]:
    """The greedy completion of each prompt, with its score; errors are raised.
    limits: `max_new_tokens`, `batch_tokens`, `stop` and `tool` of `sample`.
    """
    rows = [(example.id, place, example.prompt) for place, example in enumerate(examples)]
    greedy: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "uniforms": None}
    samples = sample(model, tokenizer, rows, **greedy, **limits)
    return score_answers(examples, samples, score)


def sample_command(arguments: Sequence[str]) -> int:
    """`policyloss sample RUN [PROMPT …]`."""
    options = read_options("sample", SampleOptions, arguments)
    config, spec = unscored_options(options)
    (task, tokenizer, model, _), _ = load_run(options, config, spec)
    prompts = tuple(example.prompt for example in task.held_out[:3])
    if options.prompts:
        prompts = _as_in_training(task, tokenizer, config, options.prompts)
    if len(prompts) * options.number * config.max_new_tokens >= 2**31:
        wish = f"--number {options.number} completions of {len(prompts)} prompts"
        raise InputError(f"{wish} are too many for one call.")
    rows = [(0, i, prompt) for i, prompt in enumerate(prompts) for _ in range(options.number)]
    samples = sample(
        model,
        tokenizer,
        rows,
        temperature=options.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        uniforms=uniforms(options.seed, 0, len(rows), config.max_new_tokens),
        stop=config.stop,
        **_limits(config, task),
    )
    for i, prompt in enumerate(prompts):
        print(repr(prompt))
        for s in samples[i * options.number : (i + 1) * options.number]:
            cut = "" if s.finished else ", cut"
            print(f"  {s.text!r}  logp {s.rollout_logp.sum().item():.3f}{cut}")
    return 0


def _limits(config: TrainConfig, task: Task) -> dict[str, Any]:
    """The longest completion, the tokens of a batch, and the tool of the task."""
    limits = {"max_new_tokens": config.max_new_tokens, "batch_tokens": config.sampling_tokens}
    return {**limits, "tool": task.tool}


def _as_in_training(
    task: Task, tokenizer: Any, config: TrainConfig, prompts: Sequence[str]
) -> tuple[str, ...]:
    """Prompts in the format of the run: user messages, if the task's prompts are messages."""
    chat = bool(task.train[0].messages)
    examples = tuple(
        Example(text, "", i, messages=({"role": "user", "content": text},) if chat else ())
        for i, text in enumerate(prompts)
    )
    prompt_task = Task("prompts", examples, (), task.score)
    rendered = with_template(prompt_task, tokenizer, config.system_prompt, config.chat_template)
    return tuple(example.prompt for example in rendered.train)


def _options(options: FromRun) -> tuple[TrainConfig, pl.LossSpec]:
    """The stored options and loss of a run, overridden by the user's options. A loss defined by
    user code is not imported, because these commands do not train.
    """
    config, spec = resume.stored_options(options.run)
    return replace(
        config,
        task=options.task or config.task,
        model=options.model or config.model,
        device=options.device,
    ), spec or pl.LossSpec()


def unscored_options(options: FromRun) -> tuple[TrainConfig, pl.LossSpec]:
    """The options of a command that loads no reward; a .jsonl task needs one and gets "exact"."""
    config, spec = _options(options)
    config = replace(config, reward="exact" if config.task.endswith(".jsonl") else None)
    named = {"trust_remote_code"} if options.trust_remote_code else set()
    resume.refuse_unnamed_code(config, frozenset(named))
    return config, spec


def load_run(options: FromRun, config: TrainConfig, spec: pl.LossSpec) -> tuple[Setup, int]:
    """The policy of a run with the weights of a checkpoint, and the step of that checkpoint."""
    if config.engine != "built-in":
        raise InputError(
            f"the weights of {options.run} are on the server {config.engine}, not in its "
            "checkpoints, so only the server can sample from them or give them away."
        )
    checkpoint, step, tensors = resume.stored_weights(options.run, options.checkpoint)
    ranks = replace(Ranks.start(config.device), world=1, rank=0, group=None)
    bare = spec.replace(kl=None)  # no reference is needed here
    config = replace(config, advantage="grpo", group_size=max(config.group_size, 2), teacher=None)
    offline = options.model is None
    setup = build(config, bare, ranks, say=lambda text: None, warn=_warn, offline=offline)
    with resume.name_damage(checkpoint):
        setup.learner.load_policy(tensors)
    return setup, step


class StoredPolicy(NamedTuple):
    """The policy of a run's last checkpoint. encode: a list of prompts → their token ids."""

    model: Any
    encode: Callable[[list[str]], list[list[int]]]
    temperature: float
    step: int


def load_policy(run: Path) -> StoredPolicy:
    """The policy of a run directory, on the CPU."""
    options = FromRun(run=run, device="cpu")
    config, spec = unscored_options(options)
    setup, step = load_run(options, config, spec)
    return StoredPolicy(setup.model, partial(encode, setup.tokenizer), config.temperature, step)


def _warn(text: str) -> None:
    print(f"policyloss: warning: {text}", file=sys.stderr)


def export_command(arguments: Sequence[str]) -> int:
    """`policyloss export RUN DIR`."""
    options = read_options("export", ExportOptions, arguments)
    refuse_name(options.folder)
    if options.folder.exists():
        raise InputError(f"{options.folder} is there already; name a folder that is not.")
    config, spec = unscored_options(options)
    if options.adapter and not config.lora_rank:
        raise InputError(f"{options.run} has no adapter: it trained all weights. Omit --adapter.")
    setup, step = load_run(options, config, spec)
    save_policy(setup.model, setup.tokenizer, options.folder, adapter=options.adapter)
    print(f"{options.folder}: the policy of {options.run} after step {step}")
    return 0


def save_policy(model: Any, tokenizer: Any, folder: Path, *, adapter: bool = False) -> None:
    """Write model and tokenizer under a temporary name next to `folder`, then rename them.

    adapter: write only the adapters; by default, the adapters are merged into the weights.
    """
    temporary = folder.with_name(f"{temporary_prefix(folder)}tmp")
    try:
        make_folder(temporary)
        with without_bars():
            if adapter or not has_adapter(model):
                model.save_pretrained(temporary)
            else:
                with save_all_weights(model):
                    model.save_pretrained(temporary, state_dict=merged_weights(model))
        tokenizer.save_pretrained(temporary)
        for file in (*(file for file in temporary.rglob("*") if file.is_file()), temporary):
            sync(file)
        os.rename(temporary, folder)
        sync(folder.parent)
    except Exception as error:  # other packages raise anything for a full disk
        raise write_error(folder, error, "Nothing is there under that name.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
