"""All that changes in a run, to a checkpoint and back; each object gives and takes its state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from policyloss.errors import InputError
from policyloss_lab.runs.files import StorageError, damage_named
from policyloss_train.distributed import Ranks
from policyloss_train.finite import NotFiniteError, listed, nonfinite_names
from policyloss_train.run.checkpoint import checked_index, flatten, latest, load, save
from policyloss_train.run.checkpoint_folder import step_of

# The weights that learn: a checkpoint in which they are not finite is worthless.
_TRAINED = ("policy/", "critic/")


class Stateful(Protocol):
    """Something that changes in a run. Names of tensors must differ from those of the others."""

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors, in mappings and sequences, and numbers that JSON holds."""

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Be as `state` said. tensors: those of all objects, by their flat names."""


def store(
    folder: Path, step: int, changing: Mapping[str, Stateful], ranks: Ranks, *, keep: int
) -> None:
    """Write a checkpoint of everything that changes, as it is between two steps."""
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for name, one in changing.items():
        its_tensors, numbers[name] = one.state()
        tensors |= its_tensors
    _refuse_nonfinite(tensors, step, ranks)
    save(folder, step, tensors, numbers, keep=keep, group=ranks.group)


def restore(
    folder: Path, changing: Mapping[str, Stateful], ranks: Ranks, layout: Mapping[str, Any]
) -> int:
    """Let all be as the last good checkpoint says. → its step. layout: as in `checkpoint.load`."""
    path = latest(folder, refuse_nonfinite_weights, group=ranks.group)
    if path is None:
        raise InputError(
            f"{folder} holds no checkpoint that can be read, so nothing can be resumed; start anew "
            "in another --out."
        )
    tensors, numbers = load(path, layout, group=ranks.group)
    with explained(path):
        for name, one in changing.items():
            one.load_state(tensors, numbers[name])
    return step_of(path)


def stored_weights(
    run: Path, checkpoint: Path | None = None
) -> tuple[Path, int, dict[str, Tensor]]:
    """A checkpoint, by default the last good one, its step and tensors; all bytes are checked."""
    path = checkpoint or latest(run / "checkpoints", refuse_nonfinite_weights)
    if path is None:
        raise InputError(f"{run / 'checkpoints'} holds no checkpoint that can be read.")
    step = int(checked_index(path, sums=True)["step"])
    return path, step, load(path)[0]


def explained(path: Path) -> AbstractContextManager[None]:
    """Around the use of what a checkpoint holds: what is missing is the checkpoint's fault."""
    advice = " Remove it to go on from an older one."
    return damage_named(f"checkpoint {path} does not hold what a run needs", advice)


def _refuse_nonfinite(tensors: Mapping[str, Any], step: int, ranks: Ranks) -> None:
    """Raise, on every rank, if weights are not finite: a good checkpoint must not be replaced."""
    weights = {name: x for name, x in flatten(tensors).items() if name.startswith(_TRAINED)}
    names = sorted({name for share in ranks.gather(nonfinite_names(weights)) for name in share})
    if names:
        raise NotFiniteError(
            f"the weights are not finite after step {step} ({listed(names)}), so no checkpoint of "
            "it is written."
        )


def refuse_nonfinite_weights(path: Path) -> None:
    """Raise a `StorageError` if a checkpoint holds weights that are not finite."""
    for name in checked_index(path, sums=False)["files"]:
        damage = damage_named(f"checkpoint {path} is damaged: {name}", "", SafetensorError, OSError)
        with damage, safe_open(path / name, framework="pt") as file:
            names = file.keys()  # of a file, which is no dictionary
            keys = [key for key in names if key.startswith(_TRAINED)]
            bad = [key for key in keys if nonfinite_names({key: file.get_tensor(key)})]
        if bad:
            raise StorageError(
                f"checkpoint {path} is no good: {len(bad)} of its weights are not finite, {bad[0]} "
                "among them."
            )


def last_good(folder: Path) -> Path | None:
    """The newest checkpoint that is intact and has finite weights. This process looks alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return latest(folder, refuse_nonfinite_weights)
