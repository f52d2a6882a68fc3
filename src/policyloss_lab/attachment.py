"""`Attachment`: records a run, diagnoses it while it trains, and can halt it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.errors import InputError, PolicyLossError, unknown_name
from policyloss.metrics import Metrics
from policyloss_lab.diagnosis.run_doctor import diagnose_rows
from policyloss_lab.diagnosis.symptoms import REMEDIES, Finding
from policyloss_lab.diagnosis.tokens import doctor
from policyloss_lab.diagnosis.verdict import CAUSES, HARMLESS
from policyloss_lab.report.page import write_report
from policyloss_lab.runs.recorder import Decode, Recorder, metric_numbers, whole_number

TOKENS = 2048  # read at an examination, which then takes about 0.1 s
COMPLETIONS = 8  # stored at an examination
VERDICTS = (CAUSES.keys() | REMEDIES.keys()) - {"healthy"}
TOKENWISE = {"ids", "logp", "old_logp", "rollout_logp", "ref_logp"}
PER_TOKEN = TOKENWISE | {"advantages"}  # or one advantage for each completion

Row = dict[str, Any]  # a completion: `[T]` tensors without masked tokens, numbers, and its prompt
P = ParamSpec("P")
logger = logging.getLogger("policyloss_lab")


class RunHaltedError(PolicyLossError):
    """An `Attachment` stops the run: it found `cause`, a name in `halt_on`."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


def never_fails(
    method: Callable[Concatenate[Attachment, P], None],
) -> Callable[Concatenate[Attachment, P], None]:
    """A method whose errors end the attachment, and not the run around it."""

    @wraps(method)
    def call(self: Attachment, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.active:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # the run must go on, whatever happened
            self.active = False
            logger.warning("attach failed and records no more; the run goes on.", exc_info=error)
            with suppress(Exception):
                if self._recorder:
                    self._recorder.close()
                # If ranks halt together, this one must go on to share that it has no verdict.
                if self._ranks == 1 or not self.halt_on:
                    self._unhook()

    return call


class Attachment:
    """Records a running trainer and diagnoses it (`doctor`, `doctor_run`); `attach` returns it.

    path: the run directory, which holds the report page, report.html. findings: each `Finding` (a
    cause or symptom) so far, by name. halt: None, or (name, sentence) once a name in `halt_on` is
    found; then TRL stops after the step, and other trainers get a `RunHaltedError`. active: whether
    it is recording. As a context manager, it detaches on exit.
    """

    def __init__(
        self,
        out: str | Path | None,
        every: int,
        halt_on: str | Sequence[str],
        decode: Decode | None,
        config: Mapping[str, Any],
    ) -> None:
        self.halt_on = (halt_on,) if isinstance(halt_on, str) else tuple(halt_on)
        for name in self.halt_on:
            if name not in VERDICTS:
                raise InputError(f"halt_on: {unknown_name('verdict', name, VERDICTS)}")
        self.every = whole_number(every, "every")
        if not self.every:
            raise InputError("every is 0; give the number of steps between two examinations.")
        self.path = Path(out or time.strftime("runs/attached-%Y%m%d-%H%M%S"))
        self._page, self.decode = self.path / "report.html", decode
        self.findings: dict[str, Finding] = {}
        self.active, self._left = True, False
        self.halt: tuple[str, str] | None = None
        self.undo: list[Callable[[], None]] = []  # takes the hooks out of the trainer
        self.next_step = 1
        self._step = self._examinations = self._judged = 0
        self._log: list[dict[str, float]] = []
        self._numbers: dict[str, float] = {}  # of the step `_step`, not yet written
        self._rows: list[Row] = []
        # One process writes; the others only learn whether to halt.
        self._ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        first = self._ranks == 1 or dist.get_rank() == 0
        self._recorder = Recorder(self.path, config=config) if first else None

    def step(
        self, metrics: Mapping[str, Any] | Metrics, *, step: int | None = None, **batch: Any
    ) -> None:
        """Record a step of your own loop; raises `RunHaltedError` if a finding is in `halt_on`.

        metrics: {name: number}; other values are left out. step: by default, the one after the
        last. batch: tensors `[B, T]` under the names of `Recorder.completions` (ids, mask, logp,
        old_logp, rollout_logp, ref_logp, advantages), `[B]` (advantages, rewards), and prompts, a
        list of texts or of lists of ids. All are optional, but the doctor needs rollout_logp and
        old_logp or logp.
        """
        step = self.next_step if step is None else step
        self.observe(step, lambda: split_rows(batch))
        self.finish_step(step, lambda: metrics)

    def finish_step(self, step: int, metrics: Callable[[], Mapping[str, Any] | Metrics]) -> None:
        """Log and examine a step; raises `RunHaltedError` if a finding is in `halt_on`."""
        self.next_step = step + 1  # on a rank that has failed, too: all examine the same steps
        self.log(step, metrics)
        if halt := self.examine(step):
            self.detach()
            raise RunHaltedError(*halt)

    @never_fails
    def observe(self, step: int, rows: Callable[[], list[Row]]) -> None:
        """Keep completions of the step, if it will be examined; only then is `rows()` called."""
        if self._recorder and self._is_due(step):
            kept = sum(map(_length, self._rows))
            for row in rows() if kept < TOKENS else ():
                if not self._rows or kept + _length(row) <= TOKENS:
                    kept += _length(row)
                    self._rows.append(row)

    @never_fails
    def log(self, step: int, metrics: Callable[[], Mapping[str, Any] | Metrics]) -> None:
        """Add metrics of a step, which may come in several calls."""
        if self._recorder:
            if step != self._step:
                self._write()
            self._step = step
            self._numbers |= plain_numbers(metrics())

    def examine(self, step: int) -> tuple[str, str] | None:
        """Run the doctor if the step is due (`every`); returns `halt`, the same on every rank."""
        if self._left or not self._is_due(step):
            return None
        self._examine(step)
        if self.halt_on and self._ranks > 1:
            shared = [self.halt]
            dist.broadcast_object_list(shared, src=0)
            self.halt = shared[0]
        return self.halt

    def detach(self) -> None:
        """Examine the log once more, write the page, close the files, and unhook the trainer."""
        self._finish()
        self.active, self._left = False, True
        self._unhook()

    def _is_due(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    @never_fails
    def _examine(self, step: int) -> None:
        if self._recorder is None:
            return
        self._write()
        rows, self._rows = self._rows, []
        new = self._name([*examine_rows(rows, step), *self._symptoms()])
        self._recorder.findings([x._asdict() for x in new if x.cause in CAUSES])
        if shown := rows[:COMPLETIONS]:
            names = [n for n in PER_TOKEN | {"rewards"} if all(n in row for row in shown)]
            columns = {name: [row[name] for row in shown] for name in names}
            prompts = [self._text(row.get("prompts", "")) for row in shown]
            self._recorder.completions(step, prompts=prompts, decode=self.decode, **columns)
        # The page of a long run takes a second, so healthy pages become rarer.
        self._examinations += 1
        if new or self._examinations & (self._examinations - 1) == 0:
            write_report([self.path], self._page)

    def _symptoms(self) -> Sequence[Finding]:
        """The symptoms in the log, which is read as a whole, so only when it is a tenth longer."""
        new = self._log[self._judged :]
        if len(new) < self._judged / 10 and all(map(isfinite, chain(*(x.values() for x in new)))):
            return ()
        self._judged = len(self._log)
        return examine_log(self._log)

    def _name(self, findings: Sequence[Finding]) -> list[Finding]:
        """Log the new ones among the findings, and return them."""
        new = [x for x in findings if self.findings.setdefault(x.cause, x) is x]
        for finding in new:
            text = f"{finding.cause}, from step {finding.step}: {finding.evidence}."
            logger.warning("%s %s", text, finding.remedy)
            if finding.cause in self.halt_on and self.halt is None:
                self.halt = finding.cause, f"{text} {finding.remedy} The page is {self._page}."
        return new

    def _text(self, prompt: Any) -> str:
        """A prompt of ids or of text as text."""
        if isinstance(prompt, str):
            return prompt
        return " ".join(map(str, prompt)) if self.decode is None else self.decode(prompt)

    def _write(self) -> None:
        """Write the metrics of the last step."""
        if self._recorder and self._numbers:
            self._log.append({**self._numbers, "step": self._step})
            numbers, self._numbers = self._numbers, {}
            self._recorder.step(numbers, step=self._step)

    @never_fails
    def _finish(self) -> None:
        if self._recorder:
            self._write()
            self._name(examine_log(self._log))
            self._recorder.close()  # before the page, which would show a running run
            write_report([self.path], self._page)

    def _unhook(self) -> None:
        while self.undo:
            self.undo.pop()()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


def examine_rows(rows: Sequence[Row], step: int) -> list[Finding]:
    """The causes of a difference between the log-probabilities of engine and trainer."""
    sides = ("rollout_logp", "old_logp" if all("old_logp" in row for row in rows) else "logp")
    if not rows or any(name not in row for name in sides for row in rows):
        return []
    ends = torch.tensor([0, *map(_length, rows)]).cumsum(0)
    pairs = {name: torch.cat([row[name] for row in rows]) for name in sides}
    known = ~pairs["rollout_logp"].isnan()  # TRL's mark of a token that the engine did not score
    try:
        verdict = doctor(**pairs, mask=known, cu_seqlens=ends)  # type: ignore[arg-type]
    except InputError as error:
        logger.info("the doctor has no verdict at step %d: %s", step, error)
        return []
    if verdict.healthy or verdict.remedy.startswith(HARMLESS):
        return []
    text = f"{verdict.title} (confidence {verdict.confidence:.0%}): {verdict.evidence[-1]}"
    return [Finding(cause, step, text, CAUSES[cause].remedy, "severe") for cause in verdict.causes]


def examine_log(rows: Sequence[Mapping[str, float]]) -> tuple[Finding, ...]:
    """The symptoms in the metrics so far; () if there are too few."""
    try:
        return diagnose_rows(rows).findings
    except InputError:
        return ()


def split_rows(batch: Mapping[str, Any]) -> list[Row]:
    """The completions of a batch, each without masked tokens. batch: as in `Attachment.step`."""
    columns = {
        name: x.detach().cpu() if isinstance(x, Tensor) else x
        for name, x in batch.items()
        if name in PER_TOKEN | {"mask", "rewards", "prompts"} and x is not None
    }
    mask = columns.pop("mask", None)
    if mask is None:
        like = next((columns[name] for name in TOKENWISE & columns.keys()), torch.ones(0, 0))
        mask = torch.ones(like.shape)
    rows = []
    for i, keep in enumerate(mask.bool()):
        row = {name: x[i] for name, x in columns.items()}
        for name in PER_TOKEN & row.keys():
            row[name] = row[name][keep] if row[name].dim() else float(row[name])
        if "rewards" in row:
            row["rewards"] = float(torch.as_tensor(row["rewards"]).sum())
        rows.append(row)
    return rows


def _length(row: Row) -> int:
    return max((len(row[name]) for name in TOKENWISE & row.keys()), default=0)


def plain_numbers(metrics: Mapping[str, Any] | Metrics) -> dict[str, float]:
    """The numbers among metrics; of a list of numbers, the mean."""
    if isinstance(metrics, Metrics):
        return metric_numbers(metrics)
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        with suppress(InputError, TypeError, ValueError, ZeroDivisionError):  # a text, an array
            mean = sum(map(float, value)) / len(value) if isinstance(value, list) else value
            numbers |= metric_numbers({name: mean})
    return numbers
