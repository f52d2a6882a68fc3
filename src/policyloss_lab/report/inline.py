"""`show`: a report inside a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.report.collect import collect
from policyloss_lab.report.limits import INLINE_BYTES, MIB
from policyloss_lab.report.render import render
from policyloss_lab.report.text import listed


class InlineReport:
    """The page in a frame that can neither read nor change the notebook around it."""

    def __init__(self, page: str, names: list[str], height: int) -> None:
        self.page, self.names, self.height = page, names, height

    def _repr_html_(self) -> str:
        # Within single quotes, only these two have a meaning; JSON is full of double ones.
        inside = self.page.replace("&", "&amp;").replace("'", "&#39;")
        return (
            f'<iframe title="Training report" sandbox="allow-scripts allow-downloads" '
            f"style=\"width:100%;height:{self.height}px;border:0\" srcdoc='{inside}'></iframe>"
        )

    def __repr__(self) -> str:
        return (
            f"the report of {listed(self.names)}; it is drawn where a notebook shows it, and "
            "`policyloss report` writes it to a file"
        )


def show(*paths: str | Path, height: int = 800) -> InlineReport:
    """The report of the runs in `paths`, for the last line of a notebook's cell. height: of the
    frame, in pixels.

    A notebook stores what it shows, so that a page of more than 10 MiB is shown without its
    completions, which a note says, and is an `InputError` if it is still too large.
    """
    data = collect(paths)
    page = render(data)
    if len(page.encode()) > INLINE_BYTES:
        page = render(_without_completions(data))
    if (size := len(page.encode())) > INLINE_BYTES:
        raise InputError(
            f"paths: the page of {len(data['runs'])} run(s) has {size / MIB:.0f} MiB, and a "
            f"notebook shows up to {INLINE_BYTES // MIB}; give fewer runs, or write the page to a "
            "file with policyloss_lab.report.write_report(paths, out)."
        )
    return InlineReport(page, [run["label"] for run in data["runs"]], int(height))


def _without_completions(data: dict[str, Any]) -> dict[str, Any]:
    note = (
        f"With completions, this page would have more than {INLINE_BYTES // MIB} MiB, which is too "
        "much for a notebook; `policyloss report` writes it to a file with all of them."
    )
    runs = [
        {**run, "rollouts": [], "answers": [], "notes": [note, *run["notes"]]}
        if run["rollouts"] or run["answers"]
        else run
        for run in data["runs"]
    ]
    return {**data, "runs": runs}
