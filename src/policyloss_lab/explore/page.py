"""`explorer_page`: the explorer as one HTML file with its styles, scripts and data inside."""

from __future__ import annotations

from collections.abc import Sequence

from policyloss.spec import LossSpec
from policyloss_lab.explore.tables import FIRST, page_data
from policyloss_lab.report.markup import asset, content_policy, island

_SCRIPTS = (
    "formula.js",
    "spec.js",
    "controls.js",
    "curves.js",
    "tokens.js",
    "written.js",
    "explorer.js",
)


def explorer_page(losses: Sequence[LossSpec | str] = FIRST) -> str:
    """The page. losses: one to three that it shows at first, presets by name or specs.

    It makes no request; a content policy in its head forbids all of them, and every other script.
    """
    package = "policyloss_lab.explore"
    style = asset("policyloss_lab.report", "page.css") + asset(package, "explorer.css")
    scripts = [
        asset("policyloss_lab.report", "draw.js"),
        *(asset(package, name) for name in _SCRIPTS),
    ]
    script = "(() => {\n" + "\n".join(scripts) + "})();"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">\
<meta http-equiv="Content-Security-Policy" content="{content_policy(style, script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">\
<title>Loss explorer · policyloss</title>
<style>{style}</style></head><body>
{asset(package, "explorer.html")}
<script type="application/json" id="data">{island(page_data(losses))}</script>
<script>{script}</script></body></html>
"""
