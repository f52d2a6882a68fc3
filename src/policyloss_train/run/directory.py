"""The directory of a run: its options, metrics and checkpoints, in files that any tool reads.

    config.json        {"policyloss": version, "config": {…}, "loss": {…}}
    environment.json   versions and hardware at the start, and at each resume under "resumed"
    metrics.jsonl      one line per step, only numbers that a rerun reproduces bit for bit
    timing.jsonl       seconds and tokens per second of each step
    rollouts.jsonl     sampled completions, token by token
    answers.jsonl      the answers to some held-out prompts at each evaluation, token by token
    tensorboard/       events
    checkpoints/       step_000010/, …
    chat_template.jinja  the text of --chat-template
    lock               the process that uses the directory

JSON has no NaN: lines hold null instead, and the value under "nonfinite" (see `records.line_of`).
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.runs import files
from policyloss_lab.runs.files import environment
from policyloss_lab.runs.lock import Lock, is_held, lock_folder
from policyloss_lab.runs.records import JsonLines
from policyloss_train.run.checkpoint import discard_after
from policyloss_train.view.track import TensorBoard, Tracker

# A directory with one of these holds a run. A start that was killed
# may leave only a lock or an environment.
_OF_A_START = ("lock", "environment.json", "track.json")
_OF_A_RUN = (*(name for name in files.FILES if name not in _OF_A_START), *files.FOLDERS)


class RunDir:
    """An open run directory, locked by this process until `close`; a context manager."""

    def __init__(self, path: Path, lock: Lock, contents: Mapping[str, Any]) -> None:
        self.path, self._lock = path, lock
        self.config: dict[str, Any] = contents["config"]
        names = ("metrics", "timing", "rollouts", "answers")
        self._lines = {name: JsonLines(path / f"{name}.jsonl") for name in names}
        self._board = TensorBoard(path / "tensorboard")
        self._trackers: list[TensorBoard | Tracker] = [self._board]

    @classmethod
    def create(
        cls,
        path: Path,
        config: dict[str, Any],
        spec: dict[str, Any],
        defaults: dict[str, Any] | None = None,
        template: str | None = None,
    ) -> RunDir:
        """Start a run in `path`, and create the directory if needed. Raises if `path` already
        holds a run, which `open` resumes. config, spec: JSON. defaults: the default options; a
        report marks options that differ. template: the text of the chat template to store.
        """
        import policyloss

        path = Path(path)
        contents: dict[str, Any] = {"policyloss": policyloss.__version__, "config": config}
        contents |= {"loss": spec} | ({} if defaults is None else {"defaults": defaults})
        data = files.to_json(contents, "run", indent=2)
        with lock_folder(path) as lock:
            there = [name for name in _OF_A_RUN if (path / name).exists()]
            if _holds_run(path):
                reason = f"{path} holds a run already ({', '.join(there)})"
                raise InputError(f"{reason}; resume it, or use another directory.")
            # The last start ended before its first checkpoint: there is nothing to resume.
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
        with lock_folder(path) as lock:
            started = _environment(path)
            started["resumed"].append(environment())
            _write_environment(path, started)
            return cls(path, lock, contents)

    @staticmethod
    def read_config(path: Path) -> dict[str, Any]:
        """Read config.json, `{"policyloss": …, "config": …, "loss": …}`, without a lock."""
        file = Path(path) / "config.json"
        files.refuse_links(Path(path))
        try:
            contents: Any = files.from_json(files.read_plain(file))
        except FileNotFoundError:
            raise InputError(f"{path} holds no run: there is no {file}; name another.") from None
        except (OSError, ValueError) as error:
            raise files.StorageError(f"cannot read {file}: {error}.") from None
        needed = {"policyloss", "config", "loss"}
        if not isinstance(contents, dict) or not needed <= contents.keys():
            raise InputError(f"{file} is not of a run: it lacks policyloss, config or loss.")
        return contents

    def rewrite(self, config: dict[str, Any]) -> None:
        """Rewrite config.json, for a run that continues with changed options."""
        contents = {**self.read_config(self.path), "config": config}
        files.replace_file(self.path / "config.json", files.to_json(contents, "run", indent=2))
        self.config = config

    def note(self, **facts: str) -> None:
        """Add facts about this start, or this resume, to environment.json."""
        started = _environment(self.path)
        (started["resumed"][-1] if started["resumed"] else started).update(facts)
        _write_environment(self.path, started)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def track(self, name: str) -> None:
        """Send the numbers to a service as well: "wandb" or "trackio"."""
        self._trackers.append(Tracker(name, self.path, self.config))

    def log(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Write the numbers of a step to trackers, and as lines of metrics.jsonl and timing.jsonl,
        which survive kill -9 once this method returns. Steps must increase between calls, except
        after `truncate`.

        metrics: numbers by name, and histograms as `{"edges": […], "counts": […]}`.
        """
        self._lines["metrics"].append([{"step": step, **metrics}])
        self._lines["timing"].append([{"step": step, **timing}])
        numbers = {name: x for name, x in metrics.items() if not isinstance(x, Mapping)}
        numbers |= {f"timing/{name}": x for name, x in timing.items()}
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of completions, each with its "step". name: "rollouts" or "answers"."""
        self._lines[name].append(rows)

    def size(self, name: str) -> int:
        """The size of a file of lines, in bytes."""
        return self._lines[name].size

    def truncate(self, step: int) -> None:
        """Go back to the end of `step`: drop later lines, set aside later checkpoints, and make
        TensorBoard hide later events.

        The remaining lines keep their bytes. After a crash in the middle, call it again.
        """
        # First, so that there is never a checkpoint of a step without lines.
        discard_after(self.checkpoints, step)
        for lines in self._lines.values():
            lines.truncate(step)
        last = self._lines["metrics"].last
        if (-1 if last is None else last) < step:
            warnings.warn(
                f"{self.path / 'metrics.jsonl'} ends at step {last}, before step {step} where the "
                "run continues: lines are lost.",
                stacklevel=2,
            )
        self._board.resumed_after = step

    def sync(self) -> None:
        """Sync every line to the disk before a checkpoint, so that a crash of the machine cannot
        lose lines before it. kill -9 loses nothing even without a sync.
        """
        try:
            for lines in self._lines.values():
                lines.sync()
            files.sync(self.path)  # the file names too
        except OSError as error:
            raise files.write_error(self.path, error, "Checkpoints are untouched.") from error
        self._board.flush()

    def close(self) -> None:
        """Flush everything, end the trackers' runs, and unlock the directory."""
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


def _holds_run(path: Path) -> bool:
    """Whether the directory holds more than a start that ended before its first checkpoint."""
    return any((path / name).exists() for name in _OF_A_RUN) and (
        not (path / "config.json").is_file() or any((path / "checkpoints").glob("step_*"))
    )


def free_directory(path: Path) -> Path:
    """The first of `path`, path-2, path-3, … that holds no run and no starting run."""
    number, candidate = 1, path
    while _holds_run(candidate) or is_held(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _environment(run: Path) -> dict[str, Any]:
    """The contents of environment.json, with a list "resumed"; empty if the file is damaged."""
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
