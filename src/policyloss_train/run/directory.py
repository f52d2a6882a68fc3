"""The directory of a run: what it is, and what it did, in files that any tool reads.

    config.json        {"policyloss": version, "config": {…}, "loss": {…}}
    environment.json   versions and hardware at the start; "resumed" lists those of each resume
    metrics.jsonl      one line per step, only numbers that a rerun repeats bit for bit
    timing.jsonl       seconds and tokens per second of each step
    rollouts.jsonl     sampled completions, token by token
    answers.jsonl      the answers to some held-out prompts at each evaluation, token by token
    tensorboard/       events
    checkpoints/       step_000010/, …
    chat_template.jinja  the text of --chat-template
    lock               the process that uses the directory

JSON has no NaN: in the lines it is null, and the line's "nonfinite" says what it was (see
`records.line_of`).
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.runs import files
from policyloss_lab.runs.files import environment
from policyloss_lab.runs.lock import Lock, is_held
from policyloss_lab.runs.records import JsonLines
from policyloss_train.run.checkpoint_folder import discard_after
from policyloss_train.view.track import Service, TensorBoard

# What makes a directory a run. A lock alone, or an environment,
# is what a start that was killed left.
_OF_A_START = ("lock", "environment.json", "track.json")
_OF_A_RUN = (*(name for name in files.FILES if name not in _OF_A_START), *files.FOLDERS)


class RunDir:
    """An open run directory, locked by this process until `close`. A context manager. path, config
    and spec are what it was made with.
    """

    def __init__(self, path: Path, lock: Lock, contents: Mapping[str, Any]) -> None:
        self.path, self._lock = path, lock
        self.config: dict[str, Any] = contents["config"]
        self.spec: dict[str, Any] = contents["loss"]
        names = ("metrics", "timing", "rollouts", "answers")
        self._lines = {name: JsonLines(path / f"{name}.jsonl") for name in names}
        self._board = TensorBoard(path / "tensorboard")
        self._trackers: list[TensorBoard | Service] = [self._board]

    @classmethod
    def create(
        cls,
        path: Path,
        config: dict[str, Any],
        spec: dict[str, Any],
        defaults: dict[str, Any] | None = None,
        template: str | None = None,
    ) -> RunDir:
        """Start a run in `path`, which is made if need be. A directory that holds a run already is
        refused: resume it with `open`. config and spec: JSON. defaults: the options of a run
        without any argument; a report marks those that differ. template: the text of the chat
        template, of which the run keeps a copy.
        """
        import policyloss

        path = Path(path)
        contents: dict[str, Any] = {"policyloss": policyloss.__version__, "config": config}
        contents |= {"loss": spec} | ({} if defaults is None else {"defaults": defaults})
        data = files.to_json(contents, "run", indent=2)
        try:
            files.make_folder(path)
        except OSError as error:
            raise files.write_error(path, error, "Nothing was written.") from error
        files.refuse_links(path)
        with _locked(path) as lock:
            there = [name for name in _OF_A_RUN if (path / name).exists()]
            if _holds_run(path):
                raise InputError(
                    f"{path} holds a run already ({', '.join(there)}); resume it, or use another "
                    "directory."
                )
            # A start that ended before its first checkpoint: there is nothing to resume.
            for name in there:
                shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
            if template is not None:
                files.replace_file(path / files.TEMPLATE, template.encode())
            files.replace_file(path / "config.json", data)
            _write_environment(path, {**environment(), "resumed": []})
            return cls(path, lock, files.from_json(data))

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open the run in `path` to continue it; next, `truncate` it to its checkpoint."""
        path = Path(path)
        contents = cls.read_config(path)
        with _locked(path) as lock:
            started = _environment(path)
            started["resumed"].append(environment())
            _write_environment(path, started)
            return cls(path, lock, contents)

    @staticmethod
    def read_config(path: Path) -> dict[str, Any]:
        """What config.json says, `{"policyloss": …, "config": …, "loss": …}`; nothing is locked."""
        file = Path(path) / "config.json"
        files.refuse_links(Path(path))
        try:
            contents: Any = files.from_json(files.read_plain(file))
        except FileNotFoundError:
            raise InputError(
                f"{path} holds no run: there is no {file}. Give the directory of a run, or start "
                "one."
            ) from None
        except (OSError, ValueError) as error:
            raise files.StorageError(f"cannot read {file}: {error}.") from None
        if (
            not isinstance(contents, dict)
            or not {"policyloss", "config", "loss"} <= contents.keys()
        ):
            raise InputError(
                f"{file} is not that of a run: it needs the keys policyloss, config and loss."
            )
        return contents

    def rewrite(self, config: dict[str, Any]) -> None:
        """Rewrite config.json, for a run that continues with other options."""
        contents = {**self.read_config(self.path), "config": config}
        files.replace_file(self.path / "config.json", files.to_json(contents, "run", indent=2))
        self.config = config

    def note(self, **facts: str) -> None:
        """Add what was chosen for this start, or this resume, to environment.json."""
        started = _environment(self.path)
        (started["resumed"][-1] if started["resumed"] else started).update(facts)
        _write_environment(self.path, started)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def track(self, name: str) -> None:
        """Send the numbers to a service as well: "wandb" or "trackio"."""
        self._trackers.append(Service(name, self.path, self.config))

    def log(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Write the numbers of a step: a whole line in metrics.jsonl and in timing.jsonl, safe from
        kill -9 when this returns, and to trackers. Steps must grow; `truncate` makes room.

        metrics: numbers by name, and histograms as `{"edges": […], "counts": […]}`.
        """
        last = self._lines["metrics"].last
        if last is not None and step <= last:
            raise InputError(
                f"step {step} was logged already (the last one is {last}); truncate({step - 1}) "
                "first to redo it."
            )
        self._lines["metrics"].append([{"step": step, **metrics}])
        self._lines["timing"].append([{"step": step, **timing}])
        for tracker in self._trackers:
            tracker.log(step, {**metrics, **{f"timing/{name}": x for name, x in timing.items()}})

    def rollouts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write sampled completions, each a dict with its "step"; to trackers as a table."""
        self._lines["rollouts"].append(rows)
        for tracker in self._trackers:
            tracker.completions(rows)

    def answers(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write answers to held-out prompts, each a dict with its "step"."""
        self._lines["answers"].append(rows)

    def size(self, name: str) -> int:
        """How many bytes the lines of a file take."""
        return self._lines[name].size

    def truncate(self, step: int) -> None:
        """Go back to the end of `step`: later lines are dropped, later checkpoints set aside, and
        TensorBoard hides later events.

        The lines that stay keep their bytes. After a crash in the middle, do it again.
        """
        # First: the latest checkpoint must never be of a step whose lines are gone.
        discard_after(self.checkpoints, step)
        for lines in self._lines.values():
            lines.truncate(step)
        last = self._lines["metrics"].last
        if (-1 if last is None else last) < step:
            warnings.warn(
                f"{self.path / 'metrics.jsonl'} ends at step {last}, before step {step} where the "
                "run continues: lines are lost.",
                UserWarning,
                stacklevel=2,
            )
        self._board.resumed_after = step

    def sync(self) -> None:
        """Bring every line to the disk: before a checkpoint, so that a crash of the machine cannot
        lose what comes before it.

        What kill -9 can lose needs no sync: the lines are in the system's hands once `log` returns.
        """
        try:
            for lines in self._lines.values():
                lines.sync()
            files.sync(self.path)  # the names of the files too
        except OSError as error:
            raise files.write_error(
                self.path, error, "Earlier checkpoints are untouched."
            ) from error
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Write out everything, say to trackers that the run ended, and release the directory."""
        try:
            for tracker in self._trackers:
                tracker.close()
            for lines in self._lines.values():
                lines.close()
        finally:
            self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def _locked(path: Path) -> Iterator[Lock]:
    """The lock of a run directory, which stays locked unless what is done inside fails."""
    lock = Lock(path)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _holds_run(path: Path) -> bool:
    """Whether there is more of a run than a start that ended before its first checkpoint."""
    return any((path / name).exists() for name in _OF_A_RUN) and (
        not (path / "config.json").is_file() or any((path / "checkpoints").glob("step_*"))
    )


def free_directory(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … in which no run is or is being started."""
    number, candidate = 1, path
    while _holds_run(candidate) or is_held(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _environment(run: Path) -> dict[str, Any]:
    """What environment.json holds, with a list "resumed"; of a file that is damaged, nothing."""
    try:
        started: Any = files.from_json(files.read_plain(run / "environment.json"))
    except (OSError, ValueError):
        started = {}
    started = started if isinstance(started, dict) else {}
    resumed = started.get("resumed")
    resumed = [x for x in resumed if isinstance(x, dict)] if isinstance(resumed, list) else []
    return {**started, "resumed": resumed}


def _write_environment(run: Path, contents: Mapping[str, Any]) -> None:
    files.replace_file(run / "environment.json", files.to_json(contents, "environment", indent=2))
