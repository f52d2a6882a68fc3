"""Runs tests in a separate process and counts their results."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent


def run_tests(
    python: str | Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> dict[str, int]:
    """Passed, failed, skipped and seconds of a run of pytest.

    python: the interpreter. arguments: of pytest. variables: additional environment variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Tests of Hypothesis record a property, which only this form of the report takes.
        options = (f"--junitxml={report}", "-ojunit_family=legacy")
        subprocess.run(
            [python, "-m", "pytest", *options, *arguments],
            cwd=ROOT,
            env={**os.environ, **variables},
            check=False,
        )
        suite = ET.parse(report).getroot()[0].attrib
    failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    return {
        "passed": int(suite["tests"]) - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(float(suite["time"])),
    }
