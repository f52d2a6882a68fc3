"""Names that describe a thing, and prose that fits on a line."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from walk import walked

PACKAGE = Path(__file__).parents[2] / "src" / "policyloss"
FOLDERS = ("functional", "parts", "advantage", "catalogue", "explanations")
FILES = ("metrics.py", "records.py", "spec.py", "arguments.py", "errors.py")
HEAD = (
    "backward",
    "head",
    "kernels",
    "linear",
    "logits",
    "matmul",
    "plans",
    "softmax_rows",
    "validate",
    "vocab_parallel",
)
# These describe how a value came to be, and neither its meaning nor its type.
VAGUE = frozenset(("found", "given", "held", "made", "own", "said", "told"))
WIDTH = 100
PATHS = [PACKAGE / name for name in (*FILES, *(f"head/{module}.py" for module in HEAD))]
PATHS += [path for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.py"))]
IDS = [str(path.relative_to(PACKAGE)) for path in PATHS]


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a module gives to a function, class, argument, variable, field or alias."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.lineno, node.asname


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Every line of a docstring, and every line that is a comment and nothing else."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            yield from zip(range(first, last + 1), text.splitlines()[first - 1 : last], strict=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            yield token.start[0], token.line.rstrip("\n")


@walked("path", PATHS, ids=IDS)
def test_names_describe_things(path: Path) -> None:
    names = list(bound_names(ast.parse(path.read_text())))
    assert [(line, name) for line, name in names if name.lstrip("_") in VAGUE] == []


@walked("path", PATHS, ids=IDS)
def test_docstrings_and_comments_fit_on_a_line(path: Path) -> None:
    # A line with an instruction for a tool cannot be broken.
    lines = [
        (i, line) for i, line in prose_lines(path.read_text()) if "disable-error-code" not in line
    ]
    assert [(i, line) for i, line in lines if len(line) > WIDTH] == []


def participles(tree: ast.Module) -> list[str]:
    """The functions of a module whose name is one word in -ed: it hides the result."""
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if re.fullmatch("_*[a-z]+ed", name)]


def test_no_function_is_a_bare_participle() -> None:
    """A pure function in `functional` is named for its result; `unfused` is a public context."""
    paths = [path for path in PACKAGE.parent.rglob("*.py") if path.parent.name != "functional"]
    found = {name for path in paths for name in participles(ast.parse(path.read_text()))}
    assert len(paths) > 200
    assert found == {"unfused"}


def test_the_checks_can_fail() -> None:
    vague = "def f(own, *, kept):\n    found, x.held = 1, 2\n    def told(): ...\n"
    assert {name for _, name in bound_names(ast.parse(vague))} == {
        "f",
        "own",
        "kept",
        "found",
        "held",
        "told",
    }
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    # three\n    return 4  # four\n'
    assert [line.strip() for _, line in prose_lines(text)] == [
        '"""One.',
        "",
        "Two.",
        '"""',
        "# three",
    ]
    assert participles(ast.parse("def _asked(): ...\ndef asked_for(): ...\n")) == ["_asked"]
