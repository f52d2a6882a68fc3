"""Collecting tests and showing a command's help stay quick:
model libraries are loaded when used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Modules that a test run loads while it collects. Examples are read as documentation, and import
# what they use at the top.
FOLDERS = ("src", "tests", "benchmarks", "conformance", "docs")
HEAVY = {
    "transformers",
    "tokenizers",
    "deepspeed",
    "accelerate",
    "lightning",
    "reasoning_gym",
    "math_verify",
}


def imported_at_load(tree: ast.Module) -> Iterator[str]:
    """The packages that importing a module loads: none for types alone or inside a function."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        stack.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import transformers.utils", {"transformers"}),
        ("try:\n    from transformers import X\nexcept ImportError:\n    pass", {"transformers"}),
        ("class A:\n    import tokenizers", {"tokenizers"}),
        ("def f():\n    import transformers", set()),
        ("if TYPE_CHECKING:\n    import transformers\nelse:\n    import torch", {"torch"}),
    ],
)
def test_imports_at_load_are_the_ones_that_run(text: str, expected: set[str]) -> None:
    assert set(imported_at_load(ast.parse(text))) == expected


def test_no_module_loads_a_model_library_at_the_top() -> None:
    """They take seconds. A function that uses one imports it;
    a type is imported under TYPE_CHECKING.
    """
    slow = [
        f"{path.relative_to(ROOT)}: {', '.join(sorted(loaded))}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (loaded := HEAVY & set(imported_at_load(ast.parse(path.read_text(encoding="utf-8")))))
    ]
    assert not slow
