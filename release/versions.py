"""Runs the tests of core, head and drop-ins with this interpreter and a release of torch, in an
environment without this project's extras, and records the result.

    python3.10 -m release.versions 2.6.0          (`make test-versions` runs every pair)

It writes docs/versions.json and, from that, the table in docs/versions.md. The classifiers in
pyproject.toml name the interpreters that passed, which `make dist` compares.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import subprocess
import sys
from typing import Any

from release.runs import ROOT, run_tests

TESTS = ("tests/policyloss/core", "tests/policyloss/head", "tests/policyloss/compat")
# Triton of torch 2.6 imports setuptools, which it does not depend on.
NEEDS = ("numpy", "hypothesis", "pytest", "setuptools")
RECORDS, PAGE = ROOT / "docs/versions.json", ROOT / "docs/versions.md"
Record = dict[str, Any]


WHOLE = "3.11"  # the interpreter of `make test`, which runs all tests


def pythons_that_passed(records: list[Record]) -> set[str]:
    """The interpreters that passed with every release of torch that they ran with."""
    failed = {record["python"] for record in records if record["failed"]}
    return {WHOLE, *(record["python"] for record in records)} - failed


def table(records: list[Record]) -> str:
    """The records in Markdown."""
    head = ["Python", "torch", "passed", "failed", "skipped", "date"]
    rows = [
        head,
        ["---"] * len(head),
        *([str(record[name.lower()]) for name in head] for record in records),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(page: str, records: list[Record]) -> str:
    """The page with the table of these records in the place of its own."""
    return re.sub(r"^\| Python \|.*\n(\|.*\n)*", table(records), page, flags=re.MULTILINE)


def main() -> None:
    """The command."""
    (torch,) = sys.argv[1:]
    python = "{}.{}".format(*sys.version_info)
    folder = ROOT / "build/versions" / f"{python}-{torch}"
    inside = folder / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    packages = (f"torch=={torch}", *NEEDS, str(ROOT))
    subprocess.run([inside, "-m", "pip", "install", "--quiet", *packages], check=True)
    counts = run_tests(inside, TESTS, {})
    record = {"python": python, "torch": torch, **counts, "date": str(dt.date.today())}
    records = json.loads(RECORDS.read_text(encoding="utf-8"))
    records = [old for old in records if (old["python"], old["torch"]) != (python, torch)]
    records = sorted(
        [*records, record], key=lambda each: _numbers(each["python"] + "." + each["torch"])
    )
    lines = ",\n".join(json.dumps(each) for each in records)
    RECORDS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    sys.exit(bool(record["failed"]))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


if __name__ == "__main__":
    main()
