"""`policyloss explore [LOSS…]`: writes the explorer, and opens it where there is a browser."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from policyloss.explore.page import explorer_page
from policyloss.explore.tables import FIRST, MOST
from policyloss.output import check_output, write_output
from policyloss.presets import read_loss


def explore_command(arguments: Sequence[str]) -> int:
    """Write the page that `arguments` ask for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="policyloss explore",
        description="Write a page to play with losses: curves, gradients, formulas, names. It "
        "opens offline.",
    )
    parser.add_argument(
        "losses",
        nargs="*",
        default=FIRST,
        metavar="LOSS",
        help=f"what it shows at first, at most {MOST}: the name of a preset, or the path of a JSON "
        "file that holds LossSpec.to_dict() (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("explorer.html"), help="the page (default: %(default)s)"
    )
    parser.add_argument("--no-open", action="store_true", help="do not open it in a browser")
    options = parser.parse_args(arguments)
    check_output(options.out, "--out")
    page = explorer_page([read_loss(loss) for loss in options.losses])
    write_output(options.out, page.encode(), "--out")
    opened = not options.no_open and _has_browser() and webbrowser.open(_address(options.out))
    print(f"{options.out}: {'opened' if opened else 'open it'} in a browser.", flush=True)
    return 0


def _address(path: Path) -> str:
    return path.resolve().as_uri()


def _has_browser() -> bool:
    """Whether there is a screen: without one, `webbrowser` would start a browser for terminals."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, screens))
