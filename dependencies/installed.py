"""The packages that the extras of this project need, directly or not,
as they are installed here.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CORE = "core"  # what is needed without any extra


def closure(extra: str) -> dict[str, Distribution]:
    """Every package that `policyloss[extra]` needs on this platform, by its normalised name;
    `CORE` is no extra.
    """
    found: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    left = [("policyloss", "" if extra == CORE else extra)]
    while left:
        name, wanted = left.pop()
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} is not installed, and {extra} needs it; make the environment first (`make "
                "test` does)."
            ) from None
        if name != "policyloss":
            found[name] = package
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                needed = canonicalize_name(requirement.name)
                left += [(needed, inner) for inner in {"", *requirement.extras}]
    return dict(sorted(found.items()))


def extras() -> list[str]:
    """`CORE` and the extras of pyproject.toml, in its order."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    return [CORE, *re.findall(r"^(\w+) = \[", table, re.MULTILINE)]


def pins() -> dict[str, str]:
    """The versions in constraints.txt, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def public_version(package: Distribution) -> str:
    """The version without the mark of a local build: `2.13.0+cpu` → `2.13.0`."""
    return package.version.partition("+")[0]
