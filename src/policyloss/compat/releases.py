"""Compares releases: where a framework changed a number, its drop-in takes `release=`."""

from __future__ import annotations

import re

from policyloss.errors import SpecError, safe_repr

# 0.9.1, v0.9.1, 0.3.0.post1, 0.9.0rc1, 1.0.dev0, 0.9.1+cu128
_VERSION = re.compile(
    r"v?(?P<numbers>\d+(?:\.\d+)*)(?:[.\-_]?(?P<stage>a|b|rc|dev|post)\d*)?(?:\+[a-z0-9.]+)?",
    re.IGNORECASE,
)
_Key = tuple[tuple[int, ...], int]


def at_least(release: str | None, version: str) -> bool:
    """Whether `release` is `version` or newer; None means the current release, so True.

    Missing numbers are 0 (0.9 is 0.9.0). A pre-release (a, b, rc, dev) comes before its release, a
    .post after it, and whatever follows a + is ignored.
    """
    return release is None or _key(release, "release") >= _key(version, "version")


def _key(text: str, called: str) -> _Key:
    """A key that sorts releases. called: the argument that an error names."""
    match = _VERSION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SpecError(
            f"{called}={safe_repr(text)} is not a release; give it as numbers with dots, such as "
            f'{called}="0.9.1".'
        )
    numbers = [int(n) for n in match["numbers"].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    stage = (match["stage"] or "").lower()
    return tuple(numbers), {"": 0, "post": 1}.get(stage, -1)
