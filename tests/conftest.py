"""One thread and fixed hypothesis settings for every test:
small tensors gain nothing from more, and failures repeat.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from browser import CHROMIUM
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # decided when triton is imported, which some libraries do by themselves
    )

torch.set_num_threads(1)

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("fixed")


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
