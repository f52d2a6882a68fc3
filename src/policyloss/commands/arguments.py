"""The arguments of the commands, which are declared here so that no help waits for torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from policyloss.commands import Argument, Count, Place, Whole

JSON = Argument("json", bool, False, "Print JSON instead of text.")


@dataclass(frozen=True)
class Explain:
    """Arguments of `policyloss explain`."""

    loss: Annotated[str, Place("LOSS")]
    """The name of a preset, or the path of a JSON file that holds LossSpec.to_dict()."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class ExplainTrl:
    """Arguments of `policyloss explain-trl`."""

    config: Annotated[str, Place("FILE")]
    """The path of a JSON file with options. An option that it leaves out has TRL's default."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class Diff:
    """Arguments of `policyloss diff`."""

    a: Annotated[str, Place("LOSS")]
    """The name of a preset, or the path of a JSON file that holds LossSpec.to_dict()."""
    b: Annotated[str, Place("OTHER")]
    """The loss to compare it with."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class Report:
    """Arguments of `policyloss report`."""

    runs: Annotated[tuple[Path, ...], Place("RUN")]
    """A run directory, as policyloss train and policyloss.report.Recorder write it, or files of
    TRL, verl, OpenRLHF, prime-rl, TensorBoard, W&B or trackio (docs/report.md)."""
    out: Path = Path("report.html")
    """The page."""
    json: Path | None = None
    """Write the same data as JSON, too."""
    serve: bool = False
    """Write nothing; show the page on this machine, and update it while the runs train."""
    port: int = 8321
    """The port of --serve; 0 takes any that is free."""


@dataclass(frozen=True)
class Doctor:
    """Arguments of `policyloss doctor`."""

    path: Annotated[Path, Place("PATH")]
    """A .jsonl or .safetensors file of tokens (rollout_logp, old_logp, …), a run directory,
    trainer_state.json, TensorBoard events, verl's metrics, or a CSV export."""
    model: str | None = None
    """The folder of the trainer's model, to simulate causes with; needs transformers."""
    json: bool = False
    """Print JSON instead of text."""
    threshold: tuple[str, ...] = ()
    """Change numbers of the verdict, each as NAME=NUMBER (docs/doctor.md lists them)."""


@dataclass(frozen=True)
class Explore:
    """Arguments of `policyloss explore`."""

    losses: Annotated[tuple[str, ...], Place("LOSS")] = ("ppo", "gspo")
    """The losses that it shows at first, at most three: names of presets, or paths of JSON files
    that hold LossSpec.to_dict()."""
    out: Path = Path("explorer.html")
    """The page."""
    open: bool = True
    """Open the page in a browser."""


@dataclass(frozen=True)
class WhatIfTokens:
    """Arguments of `policyloss what-if`."""

    path: Annotated[Path, Place("PATH")]
    """A run directory with rollouts.jsonl, or a .jsonl or .safetensors file of tokens."""
    presets: tuple[str, ...] = ()
    """The losses to try; every preset if not given."""
    loss: str | None = None
    """Your loss: a preset, or a JSON file of a spec; that of the run if not given."""
    step: str | None = None
    """The stored step to take, or all; by default the last one with an advantage that is not 0."""
    out: Path | None = None
    """Write the page here, such as page.html."""
    json: bool = False
    """Print JSON instead of text."""
    model: str | None = None
    """The folder of the model, for a file with ids and prompt_ids; needs transformers."""
    through: Literal["tokens", "head", "parameters"] | None = None
    """Where gradients end: at each log-probability, without a model; at the weight of the model's
    head; or at all parameters. By default the last of these that is there and fits into memory."""


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
