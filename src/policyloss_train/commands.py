"""The commands of this package. This module does not import torch, so that help texts are fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from policyloss.commands import Command, Count, NotNegative, Positional, Whole
from policyloss_train.config import TrainConfig


@dataclass(frozen=True)
class FromRun:
    """A run, one of its checkpoints, and replacements for names in its config.json."""

    run: Annotated[Path, Positional("RUN")]
    """The run directory. It is only data: code and models that it names are run or downloaded only
    if you name them here."""
    checkpoint: Path | None = None
    """One of its checkpoints; the default is the last one."""
    model: str | None = None
    """The model that the run started from: a folder, or a hub name, which is downloaded if
    needed."""
    task: str | None = None
    """A task to use instead of the run's, or the new path of its file."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model."""
    device: str = "auto"
    """cpu, cuda, or auto."""


@dataclass(frozen=True)
class EvalOptions(FromRun):
    """Arguments of `policyloss eval`."""

    prompts: Count = 1024
    """Number of held-out prompts."""
    reward: str | None = None
    """Reward: exact, math, or module:function. A function that the run names is used only if you
    name it here."""
    success: float | None = None
    """Smallest reward that counts as correct. Accuracy is the share of completions that reach it.
    The default is the value of the run."""
    reward_timeout: NotNegative = 60.0
    """Time limit for one call of the reward in seconds; 0 is no limit."""
    show: Whole = 5
    """Number of wrong answers to show."""
    json: bool = False
    """Print JSON with every prompt and its answer."""


@dataclass(frozen=True)
class SampleOptions(FromRun):
    """Arguments of `policyloss sample`."""

    prompts: Annotated[tuple[str, ...], Positional("PROMPT")] = ()
    """Prompts; the default is the first held-out ones."""
    number: Count = 4
    """Completions per prompt."""
    temperature: NotNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    seed: Whole = 0
    """Sampling seed."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(FromRun):
    """Arguments of `policyloss export`."""

    folder: Annotated[Path, Positional("FOLDER")]
    """The folder to write, which must not exist."""
    adapter: bool = False
    """Write only the adapter of a run with --lora-rank, for peft. Without this option it is merged
    into the weights."""


@dataclass(frozen=True)
class BenchOptions:
    """Arguments of `policyloss bench`."""

    loss: Annotated[str, Positional("LOSS")]
    """Your loss: the path of a JSON file with a LossSpec, a preset's name, or your own code, as
    module:name or path/to/file.py:name."""
    against: tuple[str, ...] = ("grpo", "dapo", "gspo", "cispo")
    """Losses to compare with."""
    conditions: tuple[str, ...] = ("on_policy", "stale_4", "fp8", "noisy", "lr_4")
    """Difficulties, each of which is tried alone."""
    seeds: Count = 2
    """Runs of each loss under each condition."""
    jobs: Count = 2
    """Runs at a time, one processor core each."""
    out: Path = Path("runs/bench")
    """The folder of the results. Runs that it holds already are not repeated."""


_COMMAND = "policyloss_train.command"
COMMANDS = {
    "train": Command(
        "Train a model by reinforcement learning with any policy loss.", TrainConfig, _COMMAND
    ),
    "eval": Command(
        "Evaluate the policy of a run on held-out prompts, greedily.", EvalOptions, _COMMAND
    ),
    "sample": Command("Sample completions from the policy of a run.", SampleOptions, _COMMAND),
    "export": Command(
        "Write a run's policy for Hugging Face: weights, tokenizer.", ExportOptions, _COMMAND
    ),
    "bench": Command(
        "Train with your loss and others under several difficulties, and compare.",
        BenchOptions,
        "policyloss_train.bench.command",
    ),
}
