"""`render`: turns the data of `collect` into one HTML page with its styles, scripts and data, which
makes no request. `write_report` writes it to a file, and `show` puts it into a notebook.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.output import check_output, write_output
from policyloss_lab import limits
from policyloss_lab.report import sections
from policyloss_lab.report.data import collect
from policyloss_lab.report.markup import asset, document, escape, in_sentence
from policyloss_lab.report.panels import OTHER
from policyloss_lab.report.sources import split_run
from policyloss_lab.report.view import view
from policyloss_lab.runs.files import FILES

ASSETS = tuple(
    f"report/{name}"
    for name in (
        *("page.css", "draw.js", "charts.js", "lines.js", "panels.js", "export.js", "runs.js"),
        *("ratios.js", "tokens.js", "completions.js", "live.js", "page.js"),
    )
)


def render(data: Mapping[str, Any], *, live: int = 0) -> str:
    """The HTML page of `data`, the result of `collect`. live: the interval in milliseconds at which
    the page reloads itself from its server, and from nowhere else; 0 disables it.
    """
    shown, runs = view(data), data["runs"]
    labels = ", ".join(run["label"] for run in runs)
    charts = _charts(shown["panels"])
    more = charts.pop(OTHER, "")
    with_ratios, with_tokens = (
        any(run[name] for run in shown["runs"]) for name in ("histogram", "rollouts")
    )
    tokens = asset("report/tokens.html") if with_tokens else _NO_TOKENS
    parts = [
        *(charts.pop(name, "") for name in ("Learning", "Policy")),
        _section(
            "ratios", "Ratio distribution", asset("report/ratios.html") if with_ratios else ""
        ),
        *charts.values(),
        _section("tokens", "Completions", tokens),
        _section("losses", "The loss" if len(runs) == 1 else "The losses", sections.losses(data)),
        _section("settings", "Settings", sections.settings(data, "config")),
        _section("names", "Names of the metrics", sections.origins(runs)),
        more,
        _section("environment", "Environment", sections.settings(data, "environment")),
    ]
    parts = parts if shown["panels"] else [_NO_STEPS, *parts]
    body = f"""<header><h1>Training report</h1>{sections.verdict(data)}{sections.overview(runs)}\
{sections.health(runs)}{sections.notes(runs)}</header>
<noscript><p class="card">\
The charts and the token view are drawn by a script in this file, which is switched off.\
</p></noscript>
{asset("report/toolbar.html")}<main>{"".join(parts)}</main>\
<div id="tip" role="status" hidden></div>"""
    return document(f"{escape(labels)} · training report", body, shown, ASSETS, live)


def _section(name: str, title: str, body: str) -> str:
    """A section of the page; "" without a body."""
    return f'<section id="{name}"><h2>{title}</h2>{body}</section>' if body else ""


def _charts(panels: list[dict[str, Any]]) -> dict[str, str]:
    """The charts by section: a figure for each panel, into which the script draws."""
    figures: dict[str, list[str]] = {}
    for i, panel in enumerate(panels):
        figures.setdefault(panel["section"], []).append(
            _figure(i, *(escape(panel[name]) for name in ("title", "hint", "judge")))
        )
    grids = {name: f'<div class="grid">{"".join(inside)}</div>' for name, inside in figures.items()}
    sections = {x: _section(x.lower(), x, grid) for x, grid in grids.items() if x != OTHER}
    if OTHER in grids:
        summary = f"<summary><h2>{OTHER} ({len(figures[OTHER])})</h2></summary>"
        sections[OTHER] = f'<section id="more"><details>{summary}{grids[OTHER]}</details></section>'
    return sections


def _figure(index: int, title: str, hint: str, judge: str) -> str:
    tools = "".join(
        f'<button type="button" class="{name}" aria-label="{label}: {title}"{state}>{text}</button>'
        for name, text, label, state in (
            ("log", "log", "Log scale", ' aria-pressed="false"'),
            ("csv", "CSV", "Save the numbers as CSV", ""),
            ("svg", "SVG", "Save the picture as SVG", ""),
        )
    )
    judge = re.sub(r"\b(Good|Bad):", r"<b>\1:</b>", judge)
    words = "".join(f'<span class="quiet">{text}</span>' for text in (hint, judge) if text)
    return f'''<figure class="chart" data-panel="{index}"><figcaption><h3>{title}</h3> {words}\
<span class="tools">{tools}</span></figcaption><svg tabindex="0" role="img" aria-label="{title}">\
</svg><div><p class="keys"></p><p class="same quiet"></p>\
<details class="numbers"><summary>Numbers</summary></details></div></figure>
'''


_NO_STEPS = '<p class="quiet">No step has been written yet.</p>'
_NO_TOKENS = (
    '<p class="quiet">There are no completions to show: none were recorded (rollouts.jsonl), or a '
    "note at the top of the page says why they were left out.</p>"
)


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
        if path.resolve() in runs or (path.name in FILES and path.parent.resolve() in runs):
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
            f"the report of {in_sentence(self.names)}; a notebook draws it, and "
            "`policyloss report` writes it to a file"
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
