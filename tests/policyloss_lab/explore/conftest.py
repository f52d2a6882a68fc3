"""The explorer in a real browser, opened from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from started import started_once

from policyloss_lab.explore.page import explorer_page


@pytest.fixture(scope="session")
def explorer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page; parallel test workers share one."""

    def write(folder: Path) -> None:
        (folder / "explorer.html").write_text(explorer_page(), encoding="utf-8")

    return started_once(tmp_path_factory, "explorer", write) / "explorer.html"


@pytest.fixture(scope="session")
def explorer_html(explorer_file: Path) -> str:
    return explorer_file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(browser: Any, explorer_file: Path) -> Any:
    """One page for tests that only compute."""
    shown = browser.new_page()
    shown.goto(explorer_file.as_uri())
    return shown


@pytest.fixture
def open_page(browser: Any, explorer_file: Path) -> Iterator[Callable[..., Any]]:
    """Opens the explorer at a fragment. Any console output or request fails the test."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 900})

    def opened(fragment: str = "", **viewport: int) -> Any:
        shown = context.new_page()
        if viewport:
            shown.set_viewport_size(viewport)
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("dialog", lambda dialog: complaints.append(dialog.message))
        asked = "only the file itself"
        shown.on(
            "request",
            lambda request: (
                None if request.url.startswith(explorer_file.as_uri()) else complaints.append(asked)
            ),
        )
        shown.goto(explorer_file.as_uri() + fragment)
        return shown

    yield opened
    context.close()
    assert complaints == []
