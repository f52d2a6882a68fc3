"""`show`: a report inside a notebook."""

from __future__ import annotations

from html import escape
from pathlib import Path

from policyloss.report.collect import collect
from policyloss.report.render import render
from policyloss.report.seeds import listed


class InlineReport:
    """The page in a frame that can neither read nor change the notebook around it."""

    def __init__(self, page: str, names: list[str], height: int) -> None:
        self.page, self.names, self.height = page, names, height

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="Training report" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{self.height}px;border:0" srcdoc="{escape(self.page)}">'
            "</iframe>"
        )

    def __repr__(self) -> str:
        return (
            f"the report of {listed(self.names)}; it is drawn where a notebook shows it, and "
            "`policyloss report` writes it to a file"
        )


def show(*paths: str | Path, height: int = 800) -> InlineReport:
    """The report of the runs in `paths`, for the last line of a notebook's cell. height: of the
    frame, in pixels.
    """
    data = collect(paths)
    return InlineReport(render(data), [run["label"] for run in data["runs"]], int(height))
