"""The commands of this package. This module imports no torch, so that a help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from policyloss.commands import Command, Place


@dataclass(frozen=True)
class Report:
    """Arguments of `policyloss report`."""

    runs: Annotated[tuple[Path, ...], Place("RUN")]
    """A run directory, as policyloss train and policyloss_lab.Recorder write it, or files of
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


COMMANDS = {
    "explore": Command(
        "Write a page to play with losses, which opens offline: curves, gradients, formulas.",
        Explore,
        "policyloss_lab.explore.page",
    ),
    "report": Command(
        "Draw one or more runs as one HTML page, which opens offline.",
        Report,
        "policyloss_lab.report.command",
    ),
    "doctor": Command(
        "Find out why engine and trainer disagree, or what is wrong with a run. The exit code is 0 "
        "for healthy, 1 for a cause, 2 for wrong input, 3 for a gap without a known cause.",
        Doctor,
        "policyloss_lab.diagnosis.command",
    ),
    "what-if": Command(
        "Try every loss on the tokens that a run stored, and find the smallest change of the loss "
        "that cures what is wrong.",
        WhatIfTokens,
        "policyloss_lab.whatif.command",
    ),
}
