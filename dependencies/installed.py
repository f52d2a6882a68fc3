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
CORE = "core"  # without any extra
ELSEWHERE = ("tinker",)  # an extra that `make test` does not install; `make engines-skyrl` does
OURS = ("policyloss", "policyloss-lab", "policyloss-train")


def closure(extra: str) -> dict[str, Distribution]:
    """Every package that an extra needs on this platform, by its normalised name.

    extra: one of `extras()`: `CORE`, an extra of policyloss, or `policyloss-train[lora]`.
    """
    found: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    whole = {CORE: "policyloss"}.get(extra, extra if "[" in extra else f"policyloss[{extra}]")
    first = Requirement(whole)
    left = [(first.name, inner) for inner in first.extras or {""}]
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
        if name not in OURS:
            found[name] = package
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                needed = canonicalize_name(requirement.name)
                left += [(needed, inner) for inner in {"", *requirement.extras}]
    return dict(sorted(found.items()))


def extras() -> list[str]:
    """`CORE` and the extras of every pyproject.toml, in its order, without `ELSEWHERE`."""
    lists = {}
    for name in OURS:
        folder = ROOT if name == "policyloss" else ROOT / "packages" / name.replace("-", "_")
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        table = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
        names = re.findall(r"^(\w+) = \[", table, re.MULTILINE)
        lists[name] = [extra for extra in names if extra not in ELSEWHERE]
    own = lists.pop("policyloss")
    return [CORE, *own, *(f"{name}[{extra}]" for name in lists for extra in lists[name])]


def pins() -> dict[str, str]:
    """The versions in constraints.txt, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def public_version(package: Distribution) -> str:
    """The version without the mark of a local build: `2.13.0+cpu` → `2.13.0`."""
    return package.version.partition("+")[0]
