"""The tutorials run as notebooks, draw their figures, and claim only what their numbers show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from docs.site import notebook

FOLDER = Path(__file__).resolve().parents[2] / "docs/tutorials"


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def test_a_page_becomes_a_notebook() -> None:
    made = notebook.notebook("# Title\n\nText\n\n```python\nx = 1\nx\n```\n\n```sh\nls\n```\n")
    assert [(cell.cell_type, cell.source) for cell in made.cells] == [
        ("markdown", "# Title\n\nText"),
        ("code", "x = 1\nx"),
        ("markdown", "```sh\nls\n```"),
    ]


def test_every_tutorial_is_listed_here() -> None:
    marks = [
        mark.args[1]
        for mark in test_the_statements_of_a_tutorial_are_true.pytestmark  # type: ignore[attr-defined]
        if mark.name == "parametrize"
    ]
    assert {name for name, *_ in marks[0]} == {path.stem for path in FOLDER.glob("*.md")}


def numbers(pattern: str, text: str) -> list[float]:
    return [float(x) for x in re.findall(pattern, text)]


def is_quickstart(text: str) -> bool:
    return "clip_fraction" in text and "<h" in text


def is_trained(text: str) -> bool:
    return len(ends := numbers(r"→ (\d\.\d+)", text)) == 3 and min(ends) > 0.95


def is_counted(text: str) -> bool:
    errors = numbers(r"relative error (\d\S*)", text)
    return errors[3] > 0.5 and max(errors[4:]) < 1e-12 and "taken inside each micro-batch" in text


def is_cured(text: str) -> bool:
    biases = dict(re.findall(r"'([^']+)': (\d\.\d+)", text))
    few = dict(re.findall(r"^(.{18})(\d\.\d\d) with 200", text, re.MULTILINE))
    untruncated, best = (few[name.ljust(18)] for name in ("untruncated", "TIS, at most 2"))
    return (
        "temperature" in text
        and float(biases["untruncated"]) < 0.02 < 0.15 < float(biases["none"])
        and float(best) < float(untruncated)
    )


def is_distilled(text: str) -> bool:
    sampled, exact = numbers(r"→ (\d\.\d+)", text)
    return exact < 0.5 * sampled < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pictures", "holds"),
    [
        ("quickstart", 2, is_quickstart),
        ("first_loss", 1, is_trained),
        ("denominators", 1, is_counted),
        ("mismatch", 1, is_cured),
        ("distil", 1, is_distilled),
    ],
)
def test_the_statements_of_a_tutorial_are_true(name: str, pictures: int, holds: Any) -> None:
    text, files = notebook.executed(page(name), f"start/{name}.md")
    assert text.startswith(page(name).split("\n")[0] + "\n\n{download}")
    drawn = [path for path in files if path.endswith(".png")]
    assert len(drawn) == pictures
    assert all(path.removeprefix("start/") in text and len(files[path]) > 5000 for path in drawn)
    assert holds(text), text
