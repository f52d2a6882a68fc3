"""Trackers for the numbers of a run: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import importlib
import re
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from policyloss.errors import InputError, safe_repr
from policyloss_lab.runs.files import StorageError, from_json, read_plain, replace_file, to_json


class TensorBoard:
    """Event files in `folder`, created with the first numbers. resumed_after: the step after which
    a resumed run continues; older events of later steps are hidden.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self.resumed_after: int | None = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers as scalars."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            purge = None if self.resumed_after is None else self.resumed_after + 1
            self._writer = SummaryWriter(str(self._folder), purge_step=purge)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write logged numbers to the file, so that they survive if the process is killed."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write queued numbers and close the file."""
        if self._writer is not None:
            self._writer.close()


class Tracker:
    """Weights & Biases or trackio, which share an interface, with one run of the service per run
    directory `folder`; a resumed run continues it. If the service fails, the run warns once.
    """

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._name, self._module, self._works = name, service_module(name), True
        about = {"project": "policyloss", "config": dict(config), "resume": "allow"}
        run_id = _run_id(folder)
        if name == "wandb":
            about |= {"name": folder.name, "id": run_id, "dir": str(folder.absolute())}
        else:  # trackio identifies a run by its name, and folders of different runs may share one
            about["name"] = f"{folder.name}-{run_id}"
        try:
            self._module.init(**about)
        except Exception as error:  # another package may raise anything
            remedy = f"Set {name} up, or leave --track out."
            raise InputError(f"--track {name} cannot begin: {error}. {remedy}") from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers."""
        self._try(lambda: self._module.log(dict(numbers), step=step))

    def close(self) -> None:
        """End the run of the service."""
        self._try(self._module.finish)

    def _try(self, call: Callable[[], Any]) -> None:
        if not self._works:
            return
        try:
            call()
        # A network service may fail in any way, which must not end a run of days.
        except Exception as error:
            self._works = False
            warnings.warn(
                f"{self._name} failed ({error}); the run continues without it, and writes its own "
                "files.",
                stacklevel=2,
            )


def service_module(name: str) -> Any:
    """The package of a tracker; raises an error with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        remedy = f"pip install {name}, or leave --track out"
        raise InputError(f"--track {name} needs the package {name}: {remedy}.") from None


def _run_id(folder: Path) -> str:
    """The id of this run in the services: made once and kept in the run directory."""
    path = folder / "track.json"
    if not path.exists():
        replace_file(path, to_json({"id": uuid.uuid4().hex[:12]}, "track"))
    try:
        run_id = from_json(read_plain(path))["id"]
        if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", run_id):
            raise ValueError(f"the id {safe_repr(run_id)} is no name of letters and digits")
        return str(run_id)
    except (OSError, ValueError, TypeError, KeyError) as error:
        again = "Delete it: the services then see a new run."
        raise StorageError(f"cannot read {path}: {error}. {again}") from None
