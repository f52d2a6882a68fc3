"""Where a report goes: to files (`write_report`) or into a notebook (`show`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.output import check_output, write_output
from policyloss_lab import limits
from policyloss_lab.report.data import collect
from policyloss_lab.report.markup import listed
from policyloss_lab.report.page import render
from policyloss_lab.report.sources import split_run

_RUN_FILES = {
    *("answers.jsonl", "config.json", "environment.json", "lock"),
    *("metrics.jsonl", "rollouts.jsonl", "timing.jsonl"),
}


def write_report(
    paths: Sequence[str | Path], out: str | Path, json_out: str | Path | None = None
) -> dict[str, Any]:
    """Write the report of the runs in `paths` to `out` (HTML) and its data to `json_out`, each
    atomically; returns the data.

    Only regular files are written, and no file of a run is overwritten.
    """
    targets = {"out": Path(out)} | ({} if json_out is None else {"json_out": Path(json_out)})
    data = collect(paths)
    for argument, path in targets.items():
        check_output(path, argument)
        runs = {split_run(Path(p))[0].resolve() for p in paths}
        if path.resolve() in runs or (path.name in _RUN_FILES and path.parent.resolve() in runs):
            raise InputError(f"{argument}={str(path)!r} is a file of the run; give another name.")
    if len({path.parent.resolve() / path.name for path in targets.values()}) < len(targets):
        raise InputError(f"out and json_out name the same file, {str(out)!r}; give two.")
    page = render(data)
    if json_out is not None:
        text = json.dumps(data, allow_nan=False, indent=1) + "\n"
        write_output(json_out, text.encode(), "json_out")
    write_output(out, page.encode(), "out")
    return data


class InlineReport:
    """The page in a frame that can neither read nor change the notebook around it."""

    def __init__(self, page: str, names: list[str], height: int) -> None:
        self.page, self.names, self.height = page, names, height

    def _repr_html_(self) -> str:
        # Inside single quotes only these two characters need an escape.
        inside = self.page.replace("&", "&amp;").replace("'", "&#39;")
        return (
            f'<iframe title="Training report" sandbox="allow-scripts allow-downloads" '
            f"style=\"width:100%;height:{self.height}px;border:0\" srcdoc='{inside}'></iframe>"
        )

    def __repr__(self) -> str:
        return (
            f"the report of {listed(self.names)}; a notebook draws it, and `policyloss report` "
            "writes it to a file"
        )


def show(*paths: str | Path, height: int = 800) -> InlineReport:
    """The report of the runs in `paths`, for the last line of a notebook's cell. height: of the
    frame, in pixels.

    A notebook stores its outputs, so a page of more than 10 MiB is shown without completions and
    with a note. A page that is still too large raises an `InputError`.
    """
    data = collect(paths)
    page = render(data)
    if len(page.encode()) > limits.INLINE_BYTES:
        page = render(_without_completions(data))
    if (size := len(page.encode())) > limits.INLINE_BYTES:
        most = limits.INLINE_BYTES // limits.MIB
        raise InputError(
            f"paths: the page of {len(data['runs'])} run(s) has {size / limits.MIB:.0f} MiB, and a "
            f"notebook shows up to {most}; give fewer runs, or write the page to a file with "
            "policyloss_lab.report.write_report(paths, out)."
        )
    return InlineReport(page, [run["label"] for run in data["runs"]], int(height))


def _without_completions(data: dict[str, Any]) -> dict[str, Any]:
    most = limits.INLINE_BYTES // limits.MIB
    note = (
        f"With completions, this page would have more than {most} MiB, which is too much for a "
        "notebook; `policyloss report` writes it to a file with all of them."
    )
    runs = [
        {**run, "rollouts": [], "answers": [], "notes": [note, *run["notes"]]}
        if run["rollouts"] or run["answers"]
        else run
        for run in data["runs"]
    ]
    return {**data, "runs": runs}
