"""Texts are written for reading: lines that fit a page, an index in order,
names that say what a thing is.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100

PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if not re.search("<!-- (Made|Generated) by", page.read_text(encoding="utf-8"))
]
PACKAGE = ROOT / "src/policyloss"
SOURCES = [
    *(
        path
        for room in ("check", "compat", "report")
        for path in sorted((PACKAGE / room).rglob("*.py"))
    ),
    *(PACKAGE / f"{name}.py" for name in ("cli", "notebook", "output")),
]
SOURCES.remove(PACKAGE / "check/loss.py")
# Words that fit any variable, and so say nothing about one.
VAGUE = {"found", "given", "held", "made", "own", "said", "seen", "told", "whole"}


def long_paragraph_lines(text: str) -> list[str]:
    """The lines beyond `WIDTH` of a page, apart from tables and code."""
    outside_code = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        line
        for line in outside_code.split("\n")
        if len(line) > WIDTH and not line.startswith(("|", "    "))
    ]


def long_text_lines(source: str) -> list[str]:
    """The lines beyond `WIDTH` that hold a comment, or a part of a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    numbers = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            numbers.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return [
        line
        for number, line in enumerate(source.split("\n"), 1)
        if number in numbers and len(line) > WIDTH
    ]


def vague_names(source: str) -> set[str]:
    """The words of `VAGUE` that name a variable, an argument, a field or a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name.lstrip("_"))
    return names & VAGUE


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paragraphs_fit_the_page(page: Path) -> None:
    assert long_paragraph_lines(page.read_text(encoding="utf-8")) == []


def test_docstrings_and_comments_fit_the_page() -> None:
    lines = {
        path.relative_to(PACKAGE).as_posix(): long_text_lines(path.read_text(encoding="utf-8"))
        for path in SOURCES
    }
    assert {name: long for name, long in lines.items() if long} == {}


def test_names_say_what_a_thing_is() -> None:
    names = {
        path.relative_to(PACKAGE).as_posix(): vague_names(path.read_text(encoding="utf-8"))
        for path in SOURCES
    }
    assert {name: vague for name, vague in names.items() if vague} == {}


def test_decisions_are_listed_in_the_order_of_their_numbers() -> None:
    """Each file has one line, with the number in its name and the title at its top."""
    folder = ROOT / "docs/decisions"
    expected = []
    for page in sorted(folder.glob("[0-9]*.md")):
        number, title = (
            page.read_text(encoding="utf-8").split("\n")[0].removeprefix("# ").split(". ", 1)
        )
        assert int(page.name[:4]) == int(number)
        expected.append(f"{number}. [{title}]({page.name})")
    index = (folder / "README.md").read_text(encoding="utf-8").split("\n")
    assert [line for line in index if line[:1].isdigit()] == expected


def test_the_checks_of_text_can_fail() -> None:
    text = "a word " * 20
    assert long_paragraph_lines(f"# Page\n\n{text}\n\n| {text} |\n\n```\n{text}\n```\n") == [text]
    source = f'"""A page.\n\n{text}\n"""\n\nx = 1  # {text}\ny = "{text}"\n'
    assert long_text_lines(source) == [text, f"x = 1  # {text}"]
    assert vague_names("def _held(own):\n    found, x.whole = 1, seen(own)\n    return made") == {
        "held",
        "own",
        "found",
        "whole",
    }
