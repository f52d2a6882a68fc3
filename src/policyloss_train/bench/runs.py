"""The runs of a bench, and their outcomes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from policyloss.spec import LossSpec
from policyloss_train.arguments import read_spec
from policyloss_train.bench.conditions import COMMON, CONDITIONS, EVERY, GOAL, LR
from policyloss_train.bench.tasks import FILE, TASKS, write_task
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.loop import train
from policyloss_train.models import load_model
from policyloss_train.rollout.protocol import Weights
from policyloss_train.setup import warm_up


class Cell(NamedTuple):
    """One run: a loss (a preset, a JSON file or code) under a condition, with a seed, on a task."""

    loss: str
    condition: str
    seed: int
    task: str = "sort"

    @property
    def start(self) -> tuple[str, int]:
        """The task and the seed, which decide the model that the run starts from."""
        return CONDITIONS[self.condition].task or self.task, self.seed

    @property
    def spec(self) -> LossSpec:
        """The loss."""
        return read_spec(self.loss).for_run(COMMON["max_new_tokens"])

    def config(self, out: Path, start: Path) -> TrainConfig:
        """The options of the trainer. start: the folder of the model and of the task."""
        condition = CONDITIONS[self.condition]
        rates = {"lr": LR * condition.rate, "critic_lr": 2 * LR * condition.rate}
        task = TASKS[self.start[0]].options(start)
        options = {**COMMON, **task, **rates, **condition.options}
        return TrainConfig(loss=self.loss, seed=self.seed, out=out, model=str(start), **options)

    def digest(self) -> str:
        """A digest of the loss and of every option; "" if the loss is code."""
        spec = self.spec
        if not spec.is_data:
            return ""
        config = self.config(Path("-"), Path(self.start[0])).with_loss(spec)
        options = {name: x for name, x in config.to_dict().items() if name != "loss"}
        everything = json.dumps([options, spec.to_dict()], sort_keys=True)
        return hashlib.sha256(everything.encode()).hexdigest()[:16]


class Outcome(NamedTuple):
    """The result of a run. digest: of its cell. accuracy: at each evaluation. grad_norm: the
    largest. error: "" unless the run failed.
    """

    cell: Cell
    digest: str
    accuracy: tuple[float, ...]
    grad_norm: float
    error: str = ""

    @property
    def final(self) -> float:
        """The last accuracy; 0 if the run failed."""
        return 0.0 if self.error else self.accuracy[-1]

    @property
    def steps_to_goal(self) -> int | None:
        """The first evaluated step whose accuracy reaches `GOAL`, or None."""
        return next((i * EVERY for i, x in enumerate(self.accuracy) if x >= GOAL), None)

    @property
    def collapsed(self) -> bool:
        """Whether the run failed, or ended below half of its best accuracy."""
        return bool(self.error) or self.final < max(self.accuracy) / 2

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**self._asdict(), "cell": self.cell._asdict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        """The outcome that `to_dict` wrote."""
        cell, accuracy = Cell(**data["cell"]), tuple(map(float, data["accuracy"]))
        return cls(**{**data, "cell": cell, "accuracy": accuracy})


def make_start(folder: Path, name: str, seed: int) -> Path:
    """The model that runs of a task with this seed start from, made once by the trainer's warm-up,
    and the file of the task.
    """
    torch.set_num_threads(1)
    path, chosen = folder / f"start-{name}-{seed}", TASKS[name]
    if not path.is_dir():
        task, cpu = chosen.make(seed), torch.device("cpu")
        model, tokenizer = load_model("tiny", task, dtype=torch.float32, device=cpu, seed=seed)
        warm_up(model, tokenizer, task, steps=chosen.steps, seed=seed, lr=chosen.lr)
        Weights(model, tokenizer, Ranks(0, 1, cpu)).save(path)
        if not chosen.name:
            write_task(task, path / FILE)
    return path


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Train in a temporary folder, from the start in `folder`."""
    error = ""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "run")
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                if train(cell.config(out, make_start(folder, *cell.start)), cell.spec):
                    raise KeyboardInterrupt
        # A loss that cannot be trained must not end the other runs.
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        lines = out / "metrics.jsonl"
        rows = [json.loads(x) for x in lines.read_text().splitlines()] if lines.exists() else []
    accuracy = tuple(row["eval/accuracy"] for row in rows if "eval/accuracy" in row)
    norms = [norm for row in rows if math.isfinite(norm := row.get("grad_norm") or 0.0)]
    return Outcome(cell, cell.digest(), accuracy, max(norms, default=0.0), error)
