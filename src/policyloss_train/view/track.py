"""Trackers for the numbers of a run: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import importlib
import math
import re
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from policyloss.errors import InputError, safe_repr, unknown_name
from policyloss_lab.runs.files import StorageError, from_json, read_plain, replace_file, to_json

PROJECT = "policyloss"
SERVICES = ("wandb", "trackio")
# The columns of the table of completions; a row may lack some.
COLUMNS = (
    *("step", "group", "prompt", "completion", "answer", "reward", "advantage"),
    *("finished", "finish_reason", "length"),
)


class TensorBoard:
    """Event files in `folder`, created with the first numbers.

    resumed_after: the step after which a resumed run continues; older events of later steps are
    hidden.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self.resumed_after: int | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers as scalars, `{"edges": […], "counts": […]}` as histograms."""
        if self._writer is None:
            self._writer = self._opened()
        for name, value in metrics.items():
            if not isinstance(value, Mapping):
                self._writer.add_scalar(name, value, step)
            elif sum(value["counts"]):
                self._writer.add_histogram_raw(name, **_histogram(**value), global_step=step)

    def completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: TensorBoard has no tables."""

    def flush(self) -> None:
        """Write logged numbers to the file, so that they survive if the process is killed."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write queued numbers and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "TensorBoard events need tensorboard: pip install 'policyloss[train]'."
            ) from None
        purge = None if self.resumed_after is None else self.resumed_after + 1
        return SummaryWriter(str(self._folder), purge_step=purge)


def _histogram(edges: list[float], counts: list[int]) -> dict[str, Any]:
    """The histogram that TensorBoard takes: the upper limit of each bucket, and moments, with every
    value counted at the middle of its bucket. Buckets lie between adjacent edges.
    """
    buckets = [
        ((low + high) / 2, n) for (low, high), n in zip(pairwise(edges), counts, strict=True)
    ]
    filled = [i for i, n in enumerate(counts) if n]
    return {
        "min": edges[filled[0]],
        "max": edges[filled[-1] + 1],
        "num": sum(counts),
        "sum": math.fsum(middle * n for middle, n in buckets),
        "sum_squares": math.fsum(middle**2 * n for middle, n in buckets),
        "bucket_limits": edges[1:],
        "bucket_counts": counts,
    }


class Service:
    """Weights & Biases or trackio, which share an interface, with one run of the service per run
    directory `folder`; a resumed run continues it. A failure of the service is warned of once, and
    training goes on.
    """

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._name, self._module, self._works = name, service_module(name), True
        about = {"project": PROJECT, "config": dict(config), "resume": "allow"}
        run_id = _run_id(folder)
        if name == "wandb":
            about |= {"name": folder.name, "id": run_id, "dir": str(folder.absolute())}
        else:  # trackio identifies a run by its name, and folders of different runs may share one
            about["name"] = f"{folder.name}-{run_id}"
        try:
            self._module.init(**about)
        except Exception as error:  # another package may raise anything
            raise InputError(
                f"--track {name} cannot begin: {error}. Set {name} up, or leave --track out."
            ) from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers; histograms are left to TensorBoard and the report."""
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Mapping)}
        self._try(lambda: self._module.log(numbers, step=step))

    def completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send rows of rollouts.jsonl as a table "completions" at their step, without tokens."""
        if not rows:
            return
        rows = [{**row, "length": len(row.get("ids", ()))} for row in rows]
        columns = [name for name in COLUMNS if any(name in row for row in rows)]
        data = [[row.get(name) for name in columns] for row in rows]
        self._try(
            lambda: self._module.log(
                {"completions": self._module.Table(columns=columns, data=data)},
                step=rows[-1]["step"],
            )
        )

    def flush(self) -> None:
        """Nothing to do: both services send from a process or thread of their own."""

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
                f"{self._name} failed ({error}); the run goes on without it, and its own files "
                "have all.",
                stacklevel=2,
            )


def service_module(name: str) -> Any:
    """The package of a tracker; raises an error with the install command if it is missing."""
    if name not in SERVICES:
        raise InputError(unknown_name("tracker", name, SERVICES))
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(
            f"--track {name} needs the package {name}: pip install {name}, or leave --track out."
        ) from None


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
        raise StorageError(
            f"cannot read {path}: {error}. Delete it: the services then see a new run."
        ) from None
