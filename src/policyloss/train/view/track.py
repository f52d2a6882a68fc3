"""Where the numbers of a run go beside its own files:
TensorBoard, and Weights & Biases or trackio if asked for.
"""

from __future__ import annotations

import importlib
import math
import uuid
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from policyloss.errors import InputError, unknown_name
from policyloss.train.run.atomic import StorageError, from_json, replace_file, to_json
from policyloss.train.run.plain_files import read_plain

PROJECT = "policyloss"


class Tracker(Protocol):
    """Something that shows the metrics of a run while it trains."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a step: numbers, and histograms
        as `{"edges": […], "counts": […]}`.
        """

    def flush(self) -> None:
        """See that what was logged is not lost if the process is killed."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Event files in `folder`. resumed_after: the step a resumed run continues from;
    later events of before are hidden.
    """

    def __init__(self, folder: Path, *, resumed_after: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "TensorBoard events need tensorboard: pip install 'policyloss[train]'."
            ) from None
        purge = None if resumed_after is None else resumed_after + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers as scalars, histograms as histograms."""
        for name, value in metrics.items():
            if not isinstance(value, Mapping):
                self._writer.add_scalar(name, value, step)
            elif sum(value["counts"]):
                self._writer.add_histogram_raw(
                    name, **_histogram(value["edges"], value["counts"]), global_step=step
                )

    def flush(self) -> None:
        """Write out what is queued."""
        self._writer.flush()

    def close(self) -> None:
        """Write out what is queued and close the file."""
        self._writer.close()


def _histogram(edges: list[float], counts: list[int]) -> dict[str, Any]:
    """What TensorBoard wants: the upper limit of each bucket, and moments, here with every value in
    the middle of its bucket.

    One edge more than counts: they enclose the buckets. One less: they separate them, and the first
    and last have no outer end.
    """
    if len(edges) not in (len(counts) + 1, len(counts) - 1):
        raise InputError(
            f"a histogram needs one edge more or one less than its counts, got {len(edges)} edges "
            f"and {len(counts)} counts."
        )
    ends = edges if len(edges) > len(counts) else [edges[0], *edges, edges[-1]]
    middles = [(low + high) / 2 for low, high in pairwise(ends)]
    filled = [i for i, count in enumerate(counts) if count]
    return {
        "min": ends[filled[0]],
        "max": ends[filled[-1] + 1],
        "num": sum(counts),
        "sum": math.fsum(middle * count for middle, count in zip(middles, counts, strict=True)),
        "sum_squares": math.fsum(
            middle**2 * count for middle, count in zip(middles, counts, strict=True)
        ),
        "bucket_limits": ends[1:],
        "bucket_counts": counts,
    }


class Service:
    """Weights & Biases or trackio, which share their calls. A failure of the service is warned of
    once, and training goes on.
    """

    def __init__(self, name: str, module: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self._name, self._module, self._works = name, module, True
        about = {"project": PROJECT, "config": dict(config), "resume": "allow"}
        run_id = _run_id(folder)
        if name == "wandb":
            module.init(**about, name=folder.name, id=run_id, dir=str(folder.absolute()))
        else:  # trackio knows a run by its name, and folders of different runs may have the same
            module.init(**about, name=f"{folder.name}-{run_id}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The numbers; histograms are left to TensorBoard and the report."""
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Mapping)}
        self._try(lambda: self._module.log(numbers, step=step))

    def flush(self) -> None:
        """Nothing to do: both services send from a process or thread of their own."""

    def close(self) -> None:
        """Say that the run has ended."""
        self._try(self._module.finish)

    def _try(self, call: Any) -> None:
        if not self._works:
            return
        try:
            call()
        # A service on the network may fail in any way; a run of days must not end by that.
        except Exception as error:
            self._works = False
            warnings.warn(
                f"{self._name} failed ({error}); the run goes on without it, and its own files "
                "have all.",
                stacklevel=2,
            )


SERVICES = ("wandb", "trackio")


def service(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """The tracker called `name`, with a run of its own for the run directory `folder`;
    a resumed one continues it.
    """
    return Service(name, service_module(name), folder, config)


def service_module(name: str) -> Any:
    """The package of a tracker, or an error that says how to get it:
    to be asked before anything is loaded.
    """
    if name not in SERVICES:
        raise InputError(unknown_name("tracker", name, SERVICES))
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(
            f"--track {name} needs the package {name}: pip install {name}, or leave --track out."
        ) from None


def _run_id(folder: Path) -> str:
    """What the services know this run by: made once and kept in the run directory."""
    path = folder / "track.json"
    if not path.exists():
        replace_file(path, to_json({"id": uuid.uuid4().hex[:12]}, "track"))
    try:
        run_id = from_json(read_plain(path))["id"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"cannot read {path}: {error}. Delete it: the services then see a new run."
        ) from None
    return str(run_id)
