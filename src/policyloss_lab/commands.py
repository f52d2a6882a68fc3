"""The commands of this package. This module imports no torch, so that --help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from policyloss.commands import Command, Positional


@dataclass(frozen=True)
class Report:
    """Arguments of `policyloss report`."""

    runs: Annotated[tuple[Path, ...], Positional("RUN")]
    """A run directory of policyloss train or policyloss_lab.Recorder, or files of TRL, verl,
    OpenRLHF, prime-rl, TensorBoard, W&B or trackio (docs/report.md)."""
    out: Path = Path("report.html")
    """File for the page."""
    json: Path | None = None
    """File for the same data as JSON."""
    serve: bool = False
    """Serve the page on this machine and update it while the runs train; write no file."""
    port: int = 8321
    """Port of --serve; 0 takes any free port."""


@dataclass(frozen=True)
class Doctor:
    """Arguments of `policyloss doctor`."""

    path: Annotated[Path, Positional("PATH")]
    """A .jsonl or .safetensors file of tokens (rollout_logp, old_logp, …) or of distributions
    (rollout_top_logp, …), a run directory, trainer_state.json, TensorBoard events, verl's metrics,
    or a CSV export."""
    model: str | None = None
    """Folder of the trainer's model, which simulates causes; needs transformers."""
    json: bool = False
    """Print JSON instead of text."""
    threshold: tuple[str, ...] = ()
    """Thresholds of the verdict to change, each as NAME=NUMBER (docs/doctor.md lists them)."""


@dataclass(frozen=True)
class Explore:
    """Arguments of `policyloss explore`."""

    losses: Annotated[tuple[str, ...], Positional("LOSS")] = ("ppo", "gspo")
    """One to three losses to show first: names of presets, or JSON files with
    LossSpec.to_dict()."""
    out: Path = Path("explorer.html")
    """File for the page."""
    open: bool = True
    """Open the page in a browser."""


@dataclass(frozen=True)
class WhatIfTokens:
    """Arguments of `policyloss what-if`."""

    path: Annotated[Path, Positional("PATH")]
    """A run directory with rollouts.jsonl, or a .jsonl or .safetensors file of tokens."""
    presets: tuple[str, ...] = ()
    """Losses to try; by default, every preset."""
    loss: str | None = None
    """Your loss: a preset, or a JSON file of a spec; by default, the loss of the run."""
    step: str | None = None
    """Stored step to use, or all; by default, the last step with a nonzero advantage."""
    out: Path | None = None
    """File for the page, such as page.html."""
    json: bool = False
    """Print JSON instead of text."""
    model: str | None = None
    """Folder of the model, for a file with ids and prompt_ids; needs transformers."""
    through: Literal["tokens", "head", "parameters"] | None = None
    """The weights of the gradients: each log-probability (no model), the weight of the model's
    head, or all parameters. By default, the last of these that exists and fits into memory."""


COMMANDS = {
    "explore": Command(
        "Write an offline page to experiment with losses: curves, gradients, formulas.",
        Explore,
        "policyloss_lab.explore.page",
    ),
    "report": Command(
        "Draw one or more runs on one HTML page that opens offline.",
        Report,
        "policyloss_lab.report.command",
    ),
    "doctor": Command(
        "Find out why engine and trainer disagree, or diagnose the logs of a run. Exit code: 0 "
        "healthy, 1 a cause, 2 wrong input, 3 a gap without a known cause.",
        Doctor,
        "policyloss_lab.diagnosis.command",
    ),
    "what-if": Command(
        "Try every loss on the stored tokens of a run, and find the smallest change of your loss "
        "that cures its problems.",
        WhatIfTokens,
        "policyloss_lab.whatif.command",
    ),
}
