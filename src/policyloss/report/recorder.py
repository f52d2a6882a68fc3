"""`Recorder`: writes down what any training loop does, in the files that the report reads."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from policyloss.errors import InputError
from policyloss.metrics import Metrics
from policyloss.presets import as_spec
from policyloss.spec import LossSpec
from policyloss.train.run import files
from policyloss.train.run.environment import environment
from policyloss.train.run.lock import Lock
from policyloss.train.run.records import JsonLines, line_of

ROLLOUT_BYTES = 256 * 2**20
LEFT_OUT = "completions_left_out"
_FILES = ("metrics", "timing", "rollouts")
_TOKEN_NUMBERS = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp", "entropy")


class Recorder:
    """Writes a run directory from any loop: metrics of a step, completions with their tokens.

        with pl.report.Recorder("runs/mine", spec="dapo", config={"lr": 1e-6}) as recorder:
            for step in range(1, 1001):
                ...
                recorder.step({"reward/mean": rewards.mean(), "policy": out.metrics}, step=step)
                recorder.completions(step, prompts=prompts, texts=texts, rewards=rewards)

    A line is written as a whole when a method returns, so that `kill -9` loses nothing that came
    before. In a run of several processes, only one of them records.

    path: a folder, made if need be; one that holds a run is refused. spec: the loss, or the name of
    its preset; the page explains it. config: settings, as JSON can hold them; "steps" is the
    planned number of them, "model" and "task" are shown at the top. resume_after: continue the run
    in `path` after this step; what was recorded of later steps is dropped. rollout_bytes: the most
    that rollouts.jsonl may grow to. When it is full, every second step in it is dropped, and from
    then on every second call of `completions` is stored, and so forth: what is there is evenly
    spaced over the run. A warning and the metric `completions_left_out` say so.
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
        self.path = Path(path)
        self._bytes, self._left_out = rollout_bytes, 0
        self._calls, self._stride = 0, 1
        settings = dict(config or {})
        if isinstance(spec, str):
            settings.setdefault("loss", spec)
        loss = None if spec is None else as_spec(spec).to_dict()
        about = environment()
        version = about["packages"].get("policyloss", "")
        contents = {"policyloss": version, "config": settings, "loss": loss}
        data = files.to_json(contents, "config", indent=2)
        try:
            files.make_folder(self.path)
        except OSError as error:
            raise files.write_error(self.path, error, "Nothing was written.") from error
        files.refuse_links(self.path)
        self._lock = Lock(self.path)
        try:
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
        except BaseException:
            self._lock.release()
            raise
        self._began = time.perf_counter()

    def step(
        self,
        metrics: Mapping[str, Any] | Metrics,
        *,
        step: int | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Write the metrics of a step: one line.

        metrics: {name: number}, or a tensor with one number; the `Metrics` of a loss may stand
        under a name, "policy" for those of `policy_loss`, or alone. docs/report.md lists the names
        that have a chart, and those of other trainers that are understood. step: by default, the
        one after the last. tokens: how many were trained on. seconds: what the step took; by
        default, the time since the last call.
        """
        last, now = self._lines["metrics"].last, time.perf_counter()
        step = (0 if last is None else last) + 1 if step is None else step
        if last is not None and step <= last:
            raise InputError(
                f"step={step} was recorded already, the last one is {last}; steps must grow."
            )
        row = {"step": step, **_numbers(metrics)}
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
        decode: Callable[[list[int]], str] | None = None,
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
        """Write B completions of a step: one line each. Steps may not go back.

        prompts, texts: as the model saw and wrote them. ids: the tokens of the completions; tokens:
        their texts; decode: makes a text of a list of ids, for what is not given. rewards: `[B]`.
        advantages: `[B]`, or one per token. groups: `[B]`, equal for completions of one prompt (by
        default, those with equal prompts). answers: what is right. finish_reasons: "stop",
        "length", or what the engine says.

        logp (current policy), old_logp, rollout_logp, ref_logp, teacher_logp, entropy: a number per
        token. What is per token is `[B, T]` with `mask` `[B, T]`, True at the tokens of the
        completion, or a list of B lists of the same lengths.
        """
        count = len(prompts)
        per_token = dict(
            zip(
                _TOKEN_NUMBERS,
                (logp, old_logp, rollout_logp, ref_logp, teacher_logp, entropy),
                strict=True,
            )
        )
        flags = _rows(mask, "mask", count, None)
        columns = {
            name: _rows(values, name, count, flags)
            for name, values in {"ids": ids, "tokens": tokens, **per_token}.items()
        }
        each = _column(advantages, "advantages", count)
        if each and isinstance(each[0], list):
            columns["token_advantage"], each = _rows(each, "advantages", count, flags), None
        plain = {
            "reward": _column(rewards, "rewards", count),
            "group": _column(groups, "groups", count),
            "completion": _column(texts, "texts", count),
            "answer": _column(answers, "answers", count),
            "finish_reason": _column(finish_reasons, "finish_reasons", count),
            "advantage": None
            if "token_advantage" in columns
            else _column(each, "advantages", count),
        }
        rows = [_row(step, i, prompts, plain, columns, decode) for i in range(count)]
        if plain["group"] is None:
            numbers: dict[str, int] = {}
            for row in rows:
                row["group"] = numbers.setdefault(row["prompt"], len(numbers))
        self._store(rows)

    def _store(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows if it is their turn, and make room first if there is none."""
        size = sum(len(line_of(row)) + 1 for row in rows)
        file = self.path / "rollouts.jsonl"
        left_out = 0
        while 0 < size <= self._bytes < size + file.stat().st_size:
            left_out += self._lines["rollouts"].thin()
            self._stride *= 2
        if self._calls % self._stride == 0 and size <= self._bytes:
            self._lines["rollouts"].append(rows)
        else:
            left_out += len(rows)
        if left_out and not self._left_out:
            warnings.warn(
                f"{file} has reached rollout_bytes={self._bytes}; from here on, completions of "
                "every second step are left out, and of more as the run goes on.",
                stacklevel=3,
            )
        self._left_out += left_out
        self._calls += 1

    def close(self) -> None:
        """Bring everything to the disk, and release the folder."""
        try:
            for lines in self._lines.values():
                lines.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _numbers(metrics: Mapping[str, Any] | Metrics) -> dict[str, float]:
    if isinstance(metrics, Metrics):
        metrics = {"policy": metrics}
    out: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Metrics):
            out |= {f"{name}/{inner}": x for inner, x in value.compute().items()}
            continue
        try:
            out[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"metrics[{name!r}] is a {type(value).__name__} and no number; give a number, a "
                "tensor with one, or leave it out."
            ) from None
    return out


def _plain(values: Any) -> Any:
    """A tensor or an array as lists; everything else as it is."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    return values.tolist() if hasattr(values, "tolist") else values


def _column(values: Any, name: str, count: int) -> list[Any] | None:
    """One value per completion."""
    values = _plain(values)
    if values is not None and len(values) != count:
        raise InputError(f"{name} has {len(values)} entries for {count} prompts; give one each.")
    return None if values is None else list(values)


def _rows(values: Any, name: str, count: int, mask: list[Any] | None) -> list[Any] | None:
    """One list per completion, without what `mask` leaves out."""
    rows = _column(values, name, count)
    if rows is None:
        return None
    for i, row in enumerate(rows):
        rows[i] = row = _plain(row)
        if mask is not None:
            if len(row) != len(mask[i]):
                raise InputError(
                    f"{name}[{i}] has {len(row)} tokens and mask[{i}] {len(mask[i])}; they must be "
                    "equal."
                )
            rows[i] = [x for x, used in zip(row, mask[i], strict=True) if used]
    return rows


def _row(
    step: int,
    place: int,
    prompts: Sequence[str],
    plain: Mapping[str, list[Any] | None],
    columns: Mapping[str, list[Any] | None],
    decode: Callable[[list[int]], str] | None,
) -> dict[str, Any]:
    """One completion as a row of rollouts.jsonl."""
    row: dict[str, Any] = {"step": step, "prompt": prompts[place]}
    row |= {name: values[place] for name, values in plain.items() if values is not None}
    row |= {name: values[place] for name, values in columns.items() if values is not None}
    lengths = {name: len(row[name]) for name, values in columns.items() if values is not None}
    if len(set(lengths.values())) > 1:
        raise InputError(f"completion {place} has different numbers of tokens: {lengths}.")
    ids = row.get("ids")
    if decode is not None and ids is not None:
        words = {token: decode([token]) for token in set(ids)}
        row.setdefault("tokens", [words[token] for token in ids])
        row.setdefault("completion", decode(ids))
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
