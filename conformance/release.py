"""The release of a framework that this process compares with."""

from __future__ import annotations

_current: list[str] = []


def set_current(version: str) -> None:
    """Set the release under test, before any comparison runs (or is replayed)."""
    _current[:] = [version]


def current() -> str:
    """The release under test, such as "0.9.1"."""
    if not _current:
        raise RuntimeError("no release was set; call conformance.release.set_current first.")
    return _current[0]
