"""`policyloss explore [LOSS…]`: writes the explorer, and opens it where there is a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from policyloss.catalogue import read_loss
from policyloss.commands import read_options
from policyloss.output import check_output, write_output
from policyloss_lab.commands import Explore
from policyloss_lab.explore.page import explorer_page


def explore_command(arguments: Sequence[str]) -> int:
    """Write the page that `arguments` ask for; returns the exit code."""
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
    """Whether there is a screen: without one, `webbrowser` would start a browser for terminals."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, screens))
