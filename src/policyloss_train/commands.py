"""The commands of this package. This module imports no torch, so that a help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from policyloss.commands import Command, Count, Place, Whole
from policyloss_train.config import TrainConfig


@dataclass(frozen=True)
class FromRun:
    """A run, one of its checkpoints, and replacements for names that its config.json holds."""

    run: Annotated[Path, Place("RUN")]
    """The run directory. It is only data: code that it names is not run, and nothing is
    downloaded, unless you name it here."""
    checkpoint: Path | None = None
    """One of its checkpoints; the last one if not given."""
    model: str | None = None
    """The model that the run started from: a folder, or a name on the hub, which may then be
    downloaded."""
    task: str | None = None
    """Another task than that of the run, or where its file is now."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model."""
    device: str = "auto"
    """cpu, cuda, or auto."""


@dataclass(frozen=True)
class Eval(FromRun):
    """Arguments of `policyloss eval`."""

    prompts: Count = 1024
    """How many held-out prompts."""
    reward: str | None = None
    """How answers are scored: exact, math, or module:function. A function that the run names is
    used only if you name it here."""
    success: float | None = None
    """The smallest reward of a right answer; that of the run if not given, which is 1 unless it was
    set. Accuracy is the share of right answers."""
    reward_timeout: float = 60.0
    """Seconds that one call of the reward may take; 0 is no limit."""
    show: Whole = 5
    """Wrong answers to show."""
    json: bool = False
    """Print JSON, every prompt with its answer."""


@dataclass(frozen=True)
class Sample(FromRun):
    """Arguments of `policyloss sample`."""

    prompts: Annotated[tuple[str, ...], Place("PROMPT")] = ()
    """Prompts; the first held-out ones if none is given."""
    number: Count = 4
    """Completions of each."""
    temperature: float = 1.0
    """The temperature of the draws; 0 is greedy."""
    seed: Whole = 0
    """The seed of the draws."""


@dataclass(frozen=True, kw_only=True)
class Export(FromRun):
    """Arguments of `policyloss export`."""

    folder: Annotated[Path, Place("FOLDER")]
    """The folder to write, which must not be there yet."""
    adapter: bool = False
    """Write the adapter of a run with --lora-rank alone, for peft. Otherwise it is added to the
    weights, and nothing else is needed to load them."""


COMMANDS = {
    "train": Command(
        "Train a language model by reinforcement learning with any policy loss.",
        TrainConfig,
        "policyloss_train.command",
    ),
    "eval": Command(
        "Evaluate the policy of a run on held-out prompts, greedily.",
        Eval,
        "policyloss_train.command",
    ),
    "sample": Command(
        "Sample completions from the policy of a run.", Sample, "policyloss_train.command"
    ),
    "export": Command(
        "Write the policy of a run as a Hugging Face folder: weights, tokenizer, chat template.",
        Export,
        "policyloss_train.command",
    ),
}
