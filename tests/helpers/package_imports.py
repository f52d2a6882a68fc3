"""Which modules of the package import which, read from their source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import policyloss as pl

PACKAGE = Path(pl.__file__).parent
FILES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


def _runtime_statements(tree: ast.AST) -> list[ast.stmt]:
    """Every import of a module, also inside functions, but not those under `if TYPE_CHECKING`."""
    found: list[ast.stmt] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        stack.extend(ast.iter_child_nodes(node))
    return found


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def imports_of(module: str) -> set[str]:
    """The full names of the modules that `module` imports."""
    names: set[str] = set()
    for node in _runtime_statements(parsed(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(n if n in FILES or f"{n}.__init__" in FILES else node.module for n in inner)
    return names
