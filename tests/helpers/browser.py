"""The Chromium of this machine, if it has one."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
