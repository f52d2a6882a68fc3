"""`policyloss train`, `eval`, `sample`: each reads its options by tyro, does one thing, and returns an exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

import policyloss as pl
from policyloss.errors import InputError
from policyloss.train.checkpoint import latest, subtree
from policyloss.train.config import TrainConfig, read_arguments
from policyloss.train.distributed import Ranks
from policyloss.train.evaluate import evaluate
from policyloss.train.loop import started_with, train
from policyloss.train.rollout import sample, uniforms
from policyloss.train.setup import Models, build
from policyloss.train.sharded import load_sharded
from policyloss.train.stored import load_weights


def train_command(arguments: Sequence[str]) -> int:
    """`policyloss train [options]`."""
    return train(*read_arguments(arguments))


@dataclass(frozen=True)
class EvalOptions:
    """Evaluate the policy of a run on held-out prompts, greedily."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    prompts: int = 1024
    """How many held-out prompts."""
    checkpoint: Path | None = None
    """One of its checkpoints; the last one if not given."""
    show: int = 5
    """Wrong answers to show."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON, every prompt with its answer."""


def eval_command(arguments: Sequence[str]) -> int:
    """`policyloss eval RUN`."""
    options = tyro.cli(EvalOptions, args=list(arguments), prog="policyloss eval")
    config, models, step = load_run(options.run, options.checkpoint)
    examples = list(models.task.held_out[: options.prompts])
    found = evaluate(
        models.model,
        models.tokenizer,
        models.task,
        examples,
        max_new_tokens=config.max_new_tokens,
        batch_tokens=config.sampling_tokens,
    )
    results = list(zip(examples, found.results, strict=True))
    if options.as_json:
        rows = [{"prompt": e.prompt, "answer": e.answer, "completion": a.text, "reward": a.score} for e, a in results]
        print(json.dumps({"step": step, "accuracy": found.accuracy, "mean_length": found.mean_length, "results": rows}, indent=2))
        return 0
    print(f"{options.run}, step {step}: accuracy {found.accuracy:.3f} on {len(examples)} held-out prompts of {models.task.name}")
    for example, answer in [row for row in results if row[1].score < 1][: options.show]:
        print(f"  {example.prompt!r} → {answer.text!r}, not {example.answer!r}")
    return 0


@dataclass(frozen=True)
class SampleOptions:
    """Sample completions from the policy of a run."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    prompt: tyro.conf.Positional[tuple[str, ...]] = ()
    """Prompts; the first held-out ones if none is given."""
    number: int = 4
    """Completions of each."""
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    """Of the draws."""
    checkpoint: Path | None = None
    """One of its checkpoints; the last one if not given."""


def sample_command(arguments: Sequence[str]) -> int:
    """`policyloss sample RUN [PROMPT …]`."""
    options = tyro.cli(SampleOptions, args=list(arguments), prog="policyloss sample")
    if options.number < 1:
        raise InputError(f"--number must be at least 1, got {options.number}.")
    config, models, _ = load_run(options.run, options.checkpoint)
    prompts = options.prompt or tuple(example.prompt for example in models.task.held_out[:3])
    rows = [(0, i, prompt) for i, prompt in enumerate(prompts) for _ in range(options.number)]
    found = sample(
        models.model,
        models.tokenizer,
        rows,
        max_new_tokens=config.max_new_tokens,
        temperature=options.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        uniforms=uniforms(options.seed, 0, len(rows), config.max_new_tokens),
        batch_tokens=config.sampling_tokens,
    )
    for i, prompt in enumerate(prompts):
        print(repr(prompt))
        for s in found[i * options.number : (i + 1) * options.number]:
            print(f"  {s.text!r}  logp {s.rollout_logp.sum().item():.3f}{'' if s.finished else ', cut'}")
    return 0


def load_run(path: Path, checkpoint: Path | None = None) -> tuple[TrainConfig, Models, int]:
    """The options of a run, its policy as a checkpoint has it, and the step of that checkpoint."""
    config, spec = started_with(TrainConfig(out=path, resume=True))
    chosen = checkpoint or latest(path / "checkpoints")
    if chosen is None:
        raise InputError(f"{path / 'checkpoints'} holds no checkpoint that can be read.")
    ranks = replace(Ranks.start(config.device), world=1, rank=0, group=None)
    bare = spec.replace(kl=None) if isinstance(spec, pl.LossSpec) else spec  # no reference is needed here
    models = build(replace(config, advantage="grpo", group_size=max(config.group_size, 2)), bare, ranks, say=lambda text: None)
    tensors, _ = load_sharded(chosen, {})
    load_weights(models.policy, subtree(tensors, "policy"))
    return config, models, int(chosen.name.rpartition("_")[2])
