"""The display of a run in progress: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from policyloss.errors import visible

# Heading, metric, number format. A column without numbers is left out.
COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "accuracy", ".3f"),
    ("held-out", "eval/accuracy", ".3f"),
    ("KL old", "policy/kl_old_k3", ".2g"),
    ("KL ref", "policy/kl_ref", ".2g"),
    ("clip", "policy/clip_fraction", ".3f"),
    ("grad norm", "grad_norm", ".3g"),
    ("tokens/s", "tokens_per_s", ",.0f"),
)
ROWS = 8  # steps that the live table shows
RECENT = 20  # steps for the estimate of the time left
REFRESH_S = 0.1  # a table that is drawn more often flickers


class Display:
    """Shows the `total` steps of a run. A context manager, outside of which `say` and `warn` work.

    quiet: show nothing, as on every rank but the first. Without a terminal, print about 20 evenly
    spaced lines, and one for the first step, the last, and each evaluation.
    """

    def __init__(self, total: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self._total, self._every = total, max(1, math.ceil(total / 20))
        self._console = Console(quiet=quiet) if console is None else console
        self._rows: deque[dict[str, str]] = deque(maxlen=ROWS)
        self._titles: set[str] = set()
        self._held_out = ""
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._done = 0
        self._live: Live | None = None
        self._drawn = -math.inf

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(self.view(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self.view(), refresh=True)
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Print a line that begins with "warning"."""
        self._print(f"warning: {text}", style="yellow")

    def warmup(self, total: int) -> Callable[..., None]:
        """A `progress(done, loss)` for a warm-up of `total` steps; it prints one line or four."""

        def progress(done: int, loss: float) -> None:
            text = f"warm-up {done:>{len(str(total))}}/{total}  loss {loss:.3f}"
            if self._console.is_terminal:
                self._print(text.ljust(60), end="\n" if done >= total else "\r")
            elif done >= total or done % math.ceil(total / 4) == 0:
                self._print(text)

        return progress

    def update(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Show the numbers after `step` steps. timing: "step_s" and "tokens_per_s" of the step."""
        self._done = step
        if step:  # step 0 is only an evaluation
            self._seconds.append(timing.get("step_s", math.nan))
        known = {**metrics, **timing}
        row = {"step": f"{self._done:>{len(str(self._total))}}/{self._total}"}
        shown = [column for column in COLUMNS if known.get(column[1]) is not None]
        row |= {title: format(known[name], form) for title, name, form in shown}
        row["ETA"] = self._time_left()
        # Held-out accuracy is not measured at every step; the table shows the last one.
        self._held_out = row.get("held-out", self._held_out)
        self._rows.append({"held-out": self._held_out, **row})
        self._titles |= row.keys()
        if self._live is not None:
            due = time.monotonic() >= self._drawn + REFRESH_S
            self._live.update(self.view(), refresh=due)
            self._drawn = time.monotonic() if due else self._drawn
        elif step in (0, 1, self._total) or step % self._every == 0 or "eval/accuracy" in metrics:
            self._print("  ".join(f"{title} {text}" for title, text in row.items()))

    def view(self) -> Group:
        """The bar and the table of the last steps."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        titles = ["step", *(title for title, _, _ in COLUMNS), "ETA"]
        shown = [title for title in titles if title in self._titles]
        for title in shown:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(Text(row.get(title, "")) for title in shown))
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=max(self._total, 1), completed=self._done))
        return Group(bar, table)

    def _time_left(self) -> str:
        """The mean time of recent steps times the number of steps left."""
        mean = math.fsum(self._seconds) / len(self._seconds) if self._seconds else math.nan
        seconds = mean * max(self._total - self._done, 0)
        return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "?"

    def _print(self, text: str, *, style: str = "", end: str = "\n") -> None:
        # A `Text` has no markup. Lines are not cut at the width of the terminal.
        self._console.print(Text(visible(text), style), end=end, soft_wrap=True)
