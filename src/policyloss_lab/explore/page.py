"""`explorer_page`: the explorer as one HTML file; `policyloss explore` writes and opens it."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence

from policyloss.catalogue import read_loss
from policyloss.commands import read_options
from policyloss.output import check_output, write_output
from policyloss.spec import LossSpec
from policyloss_lab.commands import Explore
from policyloss_lab.explore.tables import FIRST, page_data
from policyloss_lab.report.markup import asset, document

_ASSETS = (
    *("report/page.css", "explore/explorer.css", "report/draw.js", "explore/formula.js"),
    *("explore/spec.js", "explore/controls.js", "explore/curves.js", "explore/tokens.js"),
    *("explore/written.js", "explore/explorer.js"),
)


def explorer_page(losses: Sequence[LossSpec | str] = FIRST) -> str:
    """The page of the explorer. losses: one to three to show first, presets by name or specs."""
    title, body = "Loss explorer · policyloss", asset("explore/explorer.html")
    return document(title, body, page_data(losses), _ASSETS)


def explore_command(arguments: Sequence[str]) -> int:
    """Write the page, and open it in a browser; returns the exit code."""
    options = read_options("explore", Explore, arguments)
    check_output(options.out, "--out")
    page = explorer_page([read_loss(loss) for loss in options.losses])
    write_output(options.out, page.encode(), "--out")
    opened = options.open and _has_browser() and webbrowser.open(options.out.resolve().as_uri())
    print(f"{options.out}: {'opened' if opened else 'open it'} in a browser.", flush=True)
    return 0


def _has_browser() -> bool:
    """Whether there is a screen; without one, `webbrowser` would start a text browser."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, screens))
