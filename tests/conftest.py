"""One thread, unless OMP_NUM_THREADS sets more, and fixed hypothesis settings for every test: small
tensors gain nothing from more threads, and failures repeat.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import walk
from browser import CHROMIUM
from hypothesis import settings
from summary import summary

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # decided when triton is imported, which some libraries do by themselves
    )

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
STARTED = time.monotonic()

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25, database=None)
settings.register_profile("more", settings.get_profile("fixed"), max_examples=150)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    walk.only_first = config.option.maxfail == 1


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if item.path.parent.name in ("docs", "explore") or "browser" in item.fixturenames:
            item.add_marker("docs")


def pytest_collection_finish() -> None:
    """The search for garbage passes over everything loaded so far, and comes less often: it took a
    tenth of the suite's time.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    skips = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    took = time.monotonic() - STARTED
    for line in summary(took, skips, config.getini("markers"), config.option.markexpr):
        terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium for the tests of one file.

    Not for longer: while it runs, an event loop runs in this thread, which others cannot use.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def shared_tab(browser: Any) -> Any:
    """A page of that browser: a new one takes as long as to load a report."""
    return browser.new_page()


@pytest.fixture
def tab(shared_tab: Any) -> Iterator[Any]:
    """The same for one test: empty, with the pointer in a corner; any error of a page in it fails
    the test.
    """
    complaints: list[str] = []

    def listen(line: Any) -> None:
        # A browser reports a server that does not answer; a test stops one.
        if "ERR_CONNECTION_RE" not in line.text:
            complaints.append(line.text)

    def fail(error: Any) -> None:
        complaints.append(str(error))

    shared_tab.goto("about:blank")
    shared_tab.mouse.move(0, 0)
    shared_tab.on("console", listen)
    shared_tab.on("pageerror", fail)
    yield shared_tab
    shared_tab.emulate_media(media="null")
    shared_tab.goto("about:blank")
    shared_tab.remove_listener("console", listen)
    shared_tab.remove_listener("pageerror", fail)
    assert complaints == []
