"""Writes tests/recorded/doctor/logs and tests/recorded/report: files that the packages themselves
wrote, for the readers. TRL's in tests/recorded/report are written by conformance/trl_report_run.py.

    PYTHONPATH=src:. python tests/helpers/record_logs.py trl|verl|verl_dumps   # its Python

`make conformance` builds these environments (.conformance/trl, .conformance/verl).
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import os
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "recorded/doctor/logs"
REPORT = Path(__file__).parents[1] / "recorded/report"
STEPS = 12


def trl() -> None:
    """trainer_state.json of TRL's GRPOTrainer: two updates for each batch, a KL term, held-out
    prompts, and a learning rate far too high.
    """
    from conformance.trl_report_run import train

    with tempfile.TemporaryDirectory() as scratch:
        options = {"num_iterations": 2, "optim": "sgd", "learning_rate": 3.0, "eval_steps": 4}
        text = train(Path(scratch), STEPS, **options).read_text()
    (FOLDER / "trainer_state.json").write_text(text)


def verl() -> None:
    """The file and the console output of verl's loggers. verl's own `compute_data_metrics` computes
    the numbers of the batch from random batches with rising rewards; the numbers of the actor have
    the names of its losses.
    """
    torch: Any = import_module("torch")
    protocol, metric_utils = import_module("verl"), import_module("verl.trainer.ppo.metric_utils")
    torch.manual_seed(0)
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(printed):
        os.environ["VERL_FILE_LOGGER_PATH"] = str(FOLDER / "verl.jsonl")
        os.chdir(scratch)
        tracking = import_module("verl.utils.tracking").Tracking("p", "e", ["console", "file"])
        for step in range(1, STEPS + 1):
            mask = torch.ones(8, 6)
            scores = torch.zeros(8, 6)
            scores[:, -1] = (torch.rand(8) < step / 16).float()
            batch = protocol.DataProto.from_dict(
                tensors={
                    "token_level_scores": scores,
                    "token_level_rewards": scores,
                    "advantages": torch.randn(8, 6),
                    "returns": torch.randn(8, 6),
                    "prompts": torch.ones(8, 3, dtype=torch.long),
                    "responses": torch.ones(8, 6, dtype=torch.long),
                    "response_mask": mask,
                    "attention_mask": torch.ones(8, 9),
                }
            )
            data = metric_utils.compute_data_metrics(batch, use_critic=False)
            data |= {
                "actor/entropy": 2.0 * math.exp(-step),
                "actor/pg_loss": 0.01,
                "actor/ppo_kl": (-1) ** step * 1e-4,
                "actor/pg_clipfrac": 0.01,
                "actor/pg_clipfrac_lower": 0.0,
                "actor/grad_norm": 0.3,
                "training/global_step": step,
            }
            if step % 4 == 0:
                data["val-core/openai/gsm8k/reward/mean@1"] = 0.05 * step
            tracking.log(data=data, step=step)
    (FOLDER / "verl_console.txt").write_text(printed.getvalue().replace(str(FOLDER), "."))


def verl_dumps() -> None:
    """verl's files in `trainer.rollout_data_dir`: two steps, two prompts, two answers each.

    Its module needs Ray and a dozen more packages, so only the function is taken from it.
    """
    package = find_spec("verl")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent / "trainer/ppo/ray_trainer.py"
    (function,) = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "_write_generations"
    ]
    function.decorator_list = []
    scope: dict[str, Any] = {"json": json, "os": os}
    exec(compile(ast.Module([function], []), str(source), "exec"), scope)
    prompts = ["2+2=", "2+2=", "3+3=", "3+3="]
    for step, answers in ((1, ["4", "5", "5", "é<b>"]), (2, ["4", "4", "6", "7"])):
        right = ["4", "4", "6", "6"]
        scores = [float(a == b) for a, b in zip(answers, right, strict=True)]
        extra = {"acc": [score == 1 for score in scores], "of another length": [1]}
        folder = REPORT / "verl/rollouts"
        scope["_write_generations"](prompts, answers, right, scores, extra, str(folder), step)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    {"trl": trl, "verl": verl, "verl_dumps": verl_dumps}[sys.argv[1]]()
