"""Texts are written for reading: lines that fit a page, an index in order, names that describe a
thing.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from walk import walked

ROOT = Path(__file__).resolve().parents[2]
# Ruff holds code, docstrings and comments to this number, and the tests below hold prose to it.
WIDTH = int(re.findall(r"^line-length = (\d+)$", (ROOT / "pyproject.toml").read_text(), re.M)[0])

PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if not re.search("<!-- (Made|Generated) by", page.read_text(encoding="utf-8"))
]
SOURCE = ROOT / "src"
# Words that fit any variable, and so describe none.
VAGUE = {"found", "given", "held", "made", "own", "said", "seen", "told", "whole"}


def long_paragraph_lines(text: str) -> list[str]:
    """The lines beyond `WIDTH` of a page, apart from tables and code."""
    outside_code = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        line
        for line in outside_code.split("\n")
        if len(line) > WIDTH and not line.startswith(("|", "    "))
    ]


def vague_names(source: str) -> set[str]:
    """The words of `VAGUE` that name a variable, an argument, a field or a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id.lstrip("_"))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr.lstrip("_"))
        elif isinstance(node, ast.arg):
            names.add(node.arg.lstrip("_"))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name.lstrip("_").lower())
    return names & VAGUE


@walked("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paragraphs_fit_the_page(page: Path) -> None:
    assert long_paragraph_lines(page.read_text(encoding="utf-8")) == []


def test_names_are_not_vague() -> None:
    names = {
        path.relative_to(SOURCE).as_posix(): vague_names(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
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
    assert vague_names("def _held(own):\n    found, x.whole = 1, seen(own)\n    return made") == {
        "held",
        "own",
        "found",
        "whole",
    }
