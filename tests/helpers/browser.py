"""The Chromium of this machine, if it has one."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_skip = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


def needs_browser(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.docs(_skip(test))
