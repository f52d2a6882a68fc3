"""Which modules of the packages import which, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
PACKAGES = ("policyloss", "policyloss_lab", "policyloss_train")  # each may import those before it
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
    for path in sorted(SOURCE.rglob("*.py"))
}


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


def imports_in(source: str, files: Collection[str] = FILES) -> set[str]:
    """The full names of the modules that `source` imports; `files` are those of this repository."""
    names: set[str] = set()
    for node in _runtime_statements(parsed(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"a relative import: {ast.unparse(node)}"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(
                n if n in files or f"{n}.__init__" in files else node.module for n in inner
            )
    return names


@cache
def imports_of(module: str) -> set[str]:
    """The full names of the modules that `module` imports."""
    return imports_in(FILES[module].read_text())


def own(names: set[str]) -> set[str]:
    return {n for n in names if n.split(".")[0] in PACKAGES}


def holds_kernels(module: str) -> bool:
    """Whether a module holds Triton kernels, judged by its name."""
    return module.endswith(("kernel", "kernels"))


def named_modules(source: str, files: Collection[str]) -> set[str]:
    """Modules of the package whose names are strings in `source`, as for `import_module`."""
    strings = {
        node.value
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {
        s if s in files else f"{s}.__init__"
        for s in strings
        if s in files or f"{s}.__init__" in files
    }


def loads(module: str) -> set[str]:
    """Every module that importing or running `module` may load: by statement, lazily, by name, and
    the packages around them.

    Importing a module runs the `__init__` of its packages first; packages that also hold `module`
    are already running. Kernels are left out: they are imported by name, and import their caller's
    types.
    """
    imported = {n if n in FILES else f"{n}.__init__" for n in own(imports_of(module))}
    # A table of commands names their modules, which import their arguments from it.
    is_table = module.endswith(".commands")
    named = set() if is_table else named_modules(FILES[module].read_text(), FILES)
    there = {n for n in imported | named if not holds_kernels(n)}
    around = {
        f"{'.'.join(n.split('.')[:i])}.__init__" for n in there for i in range(1, n.count(".") + 1)
    }
    running = {
        p
        for p in around | named
        if p.endswith("__init__") and module.startswith(p.removesuffix("__init__"))
    }
    return (there | around) - (running - imported) - {module}
