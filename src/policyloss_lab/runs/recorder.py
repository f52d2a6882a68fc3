"""`Recorder`: records any training loop in the files that the report reads."""

from __future__ import annotations

import math
import operator
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from policyloss.catalogue import as_spec
from policyloss.errors import InputError, safe_repr
from policyloss.metrics import Metrics
from policyloss.spec import LossSpec
from policyloss_lab.limits import LARGEST_STEP
from policyloss_lab.runs import files
from policyloss_lab.runs.files import environment
from policyloss_lab.runs.lock import lock_folder
from policyloss_lab.runs.records import JsonLines, line_of

Column = list[Any] | None  # one entry for each completion
Decode = Callable[[list[int]], str]
ROLLOUT_BYTES = 256 * 2**20
LEFT_OUT = "completions_left_out"
_FILES = ("metrics", "timing", "rollouts", "findings")


class Recorder:
    """Records any training loop in a run directory: metrics per step, and completions.

        with lab.Recorder("runs/mine", spec="dapo", config={"lr": 1e-6}) as recorder:
            for step in range(1, 1001):
                ...
                recorder.step({"reward/mean": rewards.mean(), "policy": out.metrics}, step=step)
                recorder.completions(step, prompts=prompts, texts=texts, rewards=rewards)

    Each method writes complete lines before it returns, so `kill -9` loses nothing. Create one in
    one process only, such as rank 0: a second one cannot open the folder, and in a forked child the
    calls only warn. Threads may share a recorder. A wrong argument raises an error at the call. A
    failing disk causes a warning, and the training goes on without a record.

    path: a folder, created if it is missing; a folder with a run is refused. spec: the loss, or the
    name of its preset; the report page explains it. config: settings that JSON can hold; "steps" is
    the planned number of steps, and the page shows "model" and "task" at the top. resume_after:
    continue the run in `path` after this step; later steps are dropped. rollout_bytes: the largest
    size of rollouts.jsonl. Whenever the file is full, every second step in it is dropped, and from
    then on only half as many calls of `completions` are stored, so that the stored steps are evenly
    spaced over the run. A warning and the metric `completions_left_out` report the dropped rows.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        spec: LossSpec | str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_after: int | None = None,
        rollout_bytes: int = ROLLOUT_BYTES,
    ) -> None:
        try:
            self.path = Path(path)
        except TypeError:
            raise InputError(f"path is {safe_repr(path)}; give the path of a folder.") from None
        self._bytes, self._left_out = whole_number(rollout_bytes, "rollout_bytes"), 0
        self._calls, self._stride = 0, 1
        if resume_after is not None:
            resume_after = whole_number(resume_after, "resume_after", LARGEST_STEP)
        if not isinstance(config, (Mapping, NONE)):
            raise InputError(f"config is {safe_repr(config)}; give a dict of settings.")
        settings = dict(config or {})
        if isinstance(spec, str):
            settings.setdefault("loss", spec)
        loss = None if spec is None else as_spec(spec).to_dict()
        about = environment()
        version = about["packages"].get("policyloss", "")
        contents = {"policyloss": version, "config": settings, "loss": loss}
        data = files.to_json(contents, "config", indent=2)
        with lock_folder(self.path) as self._lock:
            there = [name for name in files.FILES if (self.path / name).exists()]
            runs = [name for name in there if name not in ("lock", "environment.json")]
            if runs and resume_after is None:
                raise InputError(
                    f"{path} holds a run already ({', '.join(runs)}); give another path, or "
                    "resume_after=STEP to continue it."
                )
            files.replace_file(self.path / "config.json", data)
            started = files.to_json(about, "environment", indent=2)
            files.replace_file(self.path / "environment.json", started)
            self._lines = {name: JsonLines(self.path / f"{name}.jsonl") for name in _FILES}
            for lines in self._lines.values():
                lines.truncate(resume_after)
        self._began = time.perf_counter()
        self._guard = threading.Lock()
        self._ended: str | None = None  # the reason why nothing is written

    def step(
        self,
        metrics: Mapping[str, Any] | Metrics,
        *,
        step: int | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Write the metrics of a step: one line.

        metrics: {name: number}, or a tensor with one number; or the `Metrics` of a loss, alone or
        under a name ("policy" for `policy_loss`). docs/report.md lists the names that have a chart,
        and the known names of other trainers. step: by default, the one after the last. tokens: the
        number of trained tokens. seconds: the duration of the step; by default, the time since the
        last call.
        """
        numbers = metric_numbers(metrics)
        step = None if step is None else whole_number(step, "step", LARGEST_STEP)
        tokens = None if tokens is None else whole_number(tokens, "tokens")
        seconds = None if seconds is None else duration(seconds)
        self._write(self._append_step, numbers, step, tokens, seconds)

    def _append_step(
        self, numbers: dict[str, float], step: int | None, tokens: int | None, seconds: float | None
    ) -> None:
        last, now = self._lines["metrics"].last, time.perf_counter()
        step = (0 if last is None else last) + 1 if step is None else step
        if last is not None and step <= last:
            raise InputError(f"step={step} was recorded already, the last one is {last}.")
        row = {"step": step, **numbers}
        seconds = now - self._began if seconds is None else seconds
        timing: dict[str, Any] = {"step": step, "step_s": seconds}
        if tokens is not None:
            row["tokens"] = tokens
            if seconds > 0:
                timing["tokens_per_s"] = tokens / seconds
        if self._left_out:
            row[LEFT_OUT] = self._left_out
        self._lines["metrics"].append([row])
        self._lines["timing"].append([timing])
        self._began = now

    def completions(
        self,
        step: int,
        *,
        prompts: Sequence[str],
        texts: Sequence[str] | None = None,
        ids: Any = None,
        tokens: Sequence[Sequence[str]] | None = None,
        decode: Decode | None = None,
        mask: Any = None,
        rewards: Any = None,
        advantages: Any = None,
        groups: Any = None,
        answers: Sequence[str] | None = None,
        finish_reasons: Sequence[str | None] | None = None,
        logp: Any = None,
        old_logp: Any = None,
        rollout_logp: Any = None,
        ref_logp: Any = None,
        teacher_logp: Any = None,
        entropy: Any = None,
    ) -> None:
        """Write B completions of a step: one line each. `step` must not decrease between calls.

        prompts, texts: input and output of the model. ids: the tokens of the completions; tokens:
        their texts; decode: turns a list of ids into text where texts or tokens are missing.
        rewards: `[B]`. advantages: `[B]`, or one per token. groups: `[B]`, equal for completions of
        one prompt (by default, equal prompts are a group). answers: the right answers.
        finish_reasons: "stop", "length", or another reason of the engine.

        logp (current policy), old_logp, rollout_logp, ref_logp, teacher_logp, entropy: a number per
        token. Arguments per token are `[B, T]` with `mask` `[B, T]`, True at the tokens of the
        completion, or B lists with one value per token.
        """
        step = whole_number(step, "step", LARGEST_STEP)
        prompts = as_list(prompts, "prompts", str)
        count = len(prompts)
        per_token = {"logp": logp, "old_logp": old_logp, "rollout_logp": rollout_logp}
        per_token |= {"ref_logp": ref_logp, "teacher_logp": teacher_logp, "entropy": entropy}
        flags = rows_of(mask, "mask", count, None, *NUMBER)
        columns = {
            "ids": rows_of(ids, "ids", count, flags, int),
            "tokens": rows_of(tokens, "tokens", count, flags, str),
            **{n: rows_of(x, n, count, flags, *NUMBER) for n, x in per_token.items()},
        }
        each = None if advantages is None else as_list(advantages, "advantages")
        if each and isinstance(each[0], list):
            columns["token_advantage"] = rows_of(each, "advantages", count, flags, *NUMBER)
            each = None
        plain = {
            "reward": column(rewards, "rewards", count, *NUMBER, NONE),
            "group": column(groups, "groups", count, str, int),
            "completion": column(texts, "texts", count, str),
            "answer": column(answers, "answers", count, str, NONE),
            "finish_reason": column(finish_reasons, "finish_reasons", count, str, NONE),
            "advantage": column(each, "advantages", count, *NUMBER, NONE),
        }
        if plain["group"] is None:
            numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
            plain["group"] = [numbers[prompt] for prompt in prompts]
        plain = {"step": [step] * count, "prompt": prompts, **plain}
        rows = [_row(i, plain, columns, decode) for i in range(count)]
        self._write(self._append_completions, rows)

    def _append_completions(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows if this call is to be stored; make room first if the file is full."""
        size = sum(len(line_of(row)) + 1 for row in rows)
        lines, left_out = self._lines["rollouts"], 0
        dropped = 1
        while self._is_turn and dropped and 0 < size <= self._bytes < size + lines.size:
            dropped = lines.thin()  # 0 if all rows are of one step
            left_out += dropped
            self._stride *= 2
        if self._is_turn and size + lines.size <= self._bytes:
            lines.append(rows)
        else:
            left_out += len(rows)
        if left_out and not self._left_out:
            warnings.warn(
                f"{lines.path} has reached rollout_bytes={self._bytes}; from here on, completions "
                "of every second step are left out, and of more as the run goes on.",
                stacklevel=4,
            )
        self._left_out += left_out
        self._calls += 1

    def findings(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the doctor's findings about a step's tokens (`Finding._asdict()`) for the report
        page, which finds the symptoms in the metrics itself.
        """
        self._write(self._lines["findings"].append, rows)

    @property
    def _is_turn(self) -> bool:
        return self._calls % self._stride == 0

    def _write(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action`, which writes files, in one thread at a time; warn if it fails."""
        owner = self._lock.owner["pid"]
        problem: str | None = f"process {owner} records it, and this is another one"
        if os.getpid() == owner:
            with self._guard:
                try:
                    if self._ended is None:
                        action(*arguments)
                        return
                except (OSError, files.StorageError) as error:
                    self._ended = str(error)
                problem = self._ended
        text = f"{self.path} is no longer recorded: {problem} The training goes on."
        warnings.warn(text, stacklevel=3)

    def close(self) -> None:
        """Sync all files to the disk, and release the folder."""
        if self._ended is None and os.getpid() == self._lock.owner["pid"]:
            self._write(self._close_files)
        self._lock.release()

    def _close_files(self) -> None:
        self._ended = "it is closed."
        for lines in self._lines.values():
            lines.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _row(
    place: int, plain: Mapping[str, Column], columns: Mapping[str, Column], decode: Decode | None
) -> dict[str, Any]:
    """One completion as a row of rollouts.jsonl."""
    every = {**plain, **columns}
    row = {name: values[place] for name, values in every.items() if values is not None}
    lengths = {name: len(row[name]) for name in columns if name in row}
    if len(set(lengths.values())) > 1:
        raise InputError(f"completion {place} has different numbers of tokens: {lengths}.")
    ids = row.get("ids")
    if decode is not None and ids is not None:
        words = {token: decode_ids(decode, [token]) for token in set(ids)}
        row.setdefault("tokens", [words[token] for token in ids])
        row.setdefault("completion", decode_ids(decode, ids))
    if "completion" not in row:
        row["completion"] = "".join(row.get("tokens", ()))
    if "tokens" not in row and lengths:
        row["tokens"] = [f"#{token}" for token in ids or range(next(iter(lengths.values())))]
    if "logp" in row and "old_logp" in row:
        pairs = zip(row["logp"], row["old_logp"], strict=True)
        row["ratio"] = [math.exp(min(new - old, 700.0)) for new, old in pairs]
    if "token_advantage" in row:
        each = row["token_advantage"]
        row["advantage"] = sum(each) / len(each) if each else None
    elif "advantage" in row and lengths:
        row["token_advantage"] = [row["advantage"]] * len(row["tokens"])
    if row.get("finish_reason") is not None:
        row["finished"] = row["finish_reason"] != "length"
    return row


NUMBER, NONE = (int, float), type(None)
_LARGEST = 2**63


def metric_numbers(metrics: Mapping[str, Any] | Metrics) -> dict[str, float]:
    """Metrics by name; the metrics of a loss are prefixed with its name."""
    if isinstance(metrics, Metrics):
        metrics = {"policy": metrics}
    if not isinstance(metrics, Mapping):
        raise InputError(f"metrics is {safe_repr(metrics)}; give {{name: number}} or `Metrics`.")
    out: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or name == "step":
            raise InputError(f"metrics has the key {safe_repr(name)}; give names, and step=… .")
        if isinstance(value, Metrics):
            out |= {f"{name}/{inner}": x for inner, x in value.compute().items()}
            continue
        number = _float(value)
        if number is None:
            raise InputError(
                f"metrics[{name!r}] is a {type(value).__name__} and no number; give a number, a "
                "tensor with one, or leave it out."
            )
        out[name] = number
    return out


def _float(value: Any) -> float | None:
    """A number, or a tensor with one, as a float; None for everything else."""
    try:
        return None if isinstance(value, str) else float(value)
    except Exception:  # somebody else's object may raise anything
        return None


def duration(value: Any) -> float:
    """Seconds."""
    seconds = None if isinstance(value, bool) else _float(value)
    if seconds is None or not 0 <= seconds < math.inf:
        raise InputError(f"seconds is {safe_repr(value)}; give a finite number from 0 on.")
    return seconds


def whole_number(value: Any, name: str, end: int = _LARGEST) -> int:
    """A whole number in [0, `end`), or a tensor with one."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except Exception:  # somebody else's object may raise anything
        number = -1
    if not 0 <= number < end:
        raise InputError(f"{name} is {safe_repr(value)}; give a whole number from 0 to {end - 1}.")
    return number


def _as_lists(values: Any) -> Any:
    """A tensor or an array as lists; everything else unchanged."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    return values.tolist() if hasattr(values, "tolist") else values


def as_list(values: Any, name: str, *kinds: type) -> list[Any]:
    """The values of a sequence or tensor as a list. kinds: the legal types; none means any."""
    try:
        entries = _as_lists(values)
        if isinstance(entries, (str, bytes, Mapping)):
            raise TypeError
        plain = [_as_lists(x) for x in entries]
    except Exception:  # somebody else's object may raise anything
        raise InputError(f"{name} is {safe_repr(values)}; give a list or a tensor.") from None
    if kinds and not set(map(type, plain)) <= {*kinds} - {int}:
        for i, x in enumerate(plain):
            if not isinstance(x, kinds) or (isinstance(x, int) and abs(x) >= _LARGEST):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise InputError(f"{name}[{i}] is {safe_repr(x)}; give {names}.")
    return plain


def column(values: Any, name: str, count: int, *kinds: type) -> Column:
    """One value per completion."""
    if values is None:
        return None
    entries = as_list(values, name, *kinds)
    if len(entries) != count:
        raise InputError(f"{name} has {len(entries)} entries for {count} prompts; give one each.")
    return entries


def rows_of(values: Any, name: str, count: int, mask: Column, *kinds: type) -> Column:
    """One list per completion, with only the tokens of `mask`."""
    rows = column(values, name, count)
    if rows is None:
        return None
    for i, row in enumerate(rows):
        rows[i] = row = as_list(row, f"{name}[{i}]", *kinds)
        if mask is not None:
            if len(row) != len(mask[i]):
                sizes = f"{len(row)} tokens and mask[{i}] {len(mask[i])}"
                raise InputError(f"{name}[{i}] has {sizes}; they must be equal.")
            rows[i] = [x for x, used in zip(row, mask[i], strict=True) if used]
    return rows


def decode_ids(decode: Decode, ids: list[int]) -> str:
    """The text that `decode` returns for ids."""
    try:
        text: Any = decode(ids)
    except Exception as error:  # the user's own function may raise anything
        raise InputError(f"decode({safe_repr(ids)}) raised {safe_repr(error)}.") from error
    if not isinstance(text, str):
        raise InputError(f"decode({safe_repr(ids)}) is {safe_repr(text)}; it must be a text.")
    return text
