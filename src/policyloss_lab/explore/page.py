"""`explorer_page`: the explorer as one HTML file; `policyloss explore` writes and opens it."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from policyloss.catalogue import read_loss
from policyloss.commands import read_options
from policyloss.output import check_output, write_output
from policyloss.spec import LossSpec
from policyloss_lab.commands import Explore
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
    """The page of the explorer. losses: one to three to show first, presets by name or specs.

    The page makes no request; a content policy forbids requests and other scripts.
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


def explore_command(arguments: Sequence[str]) -> int:
    """Write the page, and open it in a browser; returns the exit code."""
    options = read_options("explore", Explore, arguments)
    check_output(options.out, "--out")
    page = explorer_page([read_loss(loss) for loss in options.losses])
    write_output(options.out, page.encode(), "--out")
    opened = options.open and _has_browser() and webbrowser.open(_address(options.out))
    print(f"{options.out}: {'opened' if opened else 'open it'} in a browser.", flush=True)
    return 0


def _address(path: Path) -> str:
    return path.resolve().as_uri()


def _has_browser() -> bool:
    """Whether there is a screen; without one, `webbrowser` would start a text browser."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, screens))
