"""The teacher of a run: a stored model, or the policy of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from policyloss.errors import InputError
from policyloss.train.attention import choose
from policyloss.train.config import TrainConfig
from policyloss.train.distributed import Ranks
from policyloss.train.learner import Policy
from policyloss.train.models import load, load_weights, parts, weights
from policyloss.train.run.checkpoint import latest, subtree
from policyloss.train.run.checkpoint import load as load_checkpoint
from policyloss.train.run.directory import RunDir
from policyloss.train.run.resume import explained, refuse_nonfinite_weights
from policyloss.train.tasks import Task


def load_teacher(
    config: TrainConfig,
    task: Task,
    ranks: Ranks,
    tokenizer: Any,
    model: Any,
    warn: Callable[[str], None],
) -> Policy:
    """The teacher that `config` names, frozen; nothing is downloaded.

    It must read and write the same tokens as the model, whose tokenizer is `tokenizer`.
    """
    folder = config.teacher
    assert folder is not None
    is_run = (folder / "checkpoints").is_dir()
    stored = RunDir.read_config(folder).get("config", {}) if is_run else {}
    teacher, of_teacher = load(
        str(stored.get("model", "tiny")) if is_run else str(folder),
        task,
        dtype=getattr(torch, config.dtype),
        device=ranks.device,
        seed=config.seed,
        offline=True,
        trust_remote_code=config.trust_remote_code,
        warn=warn,
    )
    attention, _ = choose(teacher, config.attention)
    policy = Policy(teacher, attention).requires_grad_(False)
    if is_run:
        _load_run(policy, folder)
    sizes = [parts(x)[1].shape[0] for x in (teacher, model)]
    if sizes[0] != sizes[1] or of_teacher.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"the teacher {folder} has another vocabulary ({sizes[0]} entries) than the model "
            f"({sizes[1]}); a teacher must have the model's tokenizer."
        )
    return policy


def _load_run(policy: Policy, folder: Path) -> None:
    """Give a policy the weights of the newest good checkpoint of a run."""
    chosen = latest(folder / "checkpoints", refuse_nonfinite_weights)
    if chosen is None:
        raise InputError(f"{folder / 'checkpoints'} holds no checkpoint that can be read.")
    tensors, _ = load_checkpoint(chosen)
    with explained(chosen):
        load_weights(weights(policy), subtree(tensors, "policy"))
