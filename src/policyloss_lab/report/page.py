"""`render`: turns the data of `collect` into one HTML page with its styles, scripts and data. The
page makes no request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from policyloss_lab.report import sections
from policyloss_lab.report.markup import asset, document, escaped
from policyloss_lab.report.panels import OTHER
from policyloss_lab.report.view import view

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
    parts = [
        *(charts.pop(name, "") for name in ("Learning", "Policy")),
        _section("ratios", "Ratio distribution", asset("report/ratios.html"))
        if any(run["histogram"] for run in shown["runs"])
        else "",
        *charts.values(),
        _section(
            "tokens",
            "Completions",
            asset("report/tokens.html")
            if any(run["rollouts"] for run in shown["runs"])
            else _NO_TOKENS,
        ),
        _section("losses", "The loss" if len(runs) == 1 else "The losses", sections.losses(data)),
        _section("settings", "Settings", sections.settings(data, "config")),
        _section("names", "Names of the metrics", names)
        if (names := sections.origins(runs))
        else "",
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
    return document(f"{escaped(labels)} · training report", body, shown, ASSETS, live)


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{body}</section>'


def _charts(panels: list[dict[str, Any]]) -> dict[str, str]:
    """The charts by section: a figure for each panel, into which the script draws."""
    figures: dict[str, list[str]] = {}
    for i, panel in enumerate(panels):
        figures.setdefault(panel["section"], []).append(
            _figure(i, *(escaped(panel[name]) for name in ("title", "hint", "judge")))
        )
    grids = {name: f'<div class="grid">{"".join(inside)}</div>' for name, inside in figures.items()}
    sections = {
        name: _section(name.lower(), name, grid) for name, grid in grids.items() if name != OTHER
    }
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
