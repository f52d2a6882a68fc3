"""What SECURITY.md says that the library never does, read from its source."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FORBIDDEN_MODULES = {"dill", "joblib", "marshal", "pickle", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "torch.load", "urllib.request.urlopen"}


# Kernels are written from the library's own operations: see `test_kernels_name_nothing_else` in
# tests/policyloss/compiled/test_fused.py. No text of a user or of a file is in them.
WRITES_KERNELS = "policyloss/compiled/token_program.py"


def breaches(source: str) -> set[str]:
    """The forbidden imports and calls in a source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {
                alias.name
                for alias in node.names
                if alias.name.partition(".")[0] in FORBIDDEN_MODULES
            }
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES
        ):
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.add(ast.unparse(node.func))
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "shell"
            and ast.unparse(node.value) != "False"
        ):
            found.add("shell")
    return found


def test_the_check_can_fail() -> None:
    source = (
        "import pickle\n"
        "from marshal import loads\n"
        "torch.load('x')\n"
        "eval('1')\n"
        "model.eval()\n"
        "run('x', shell=True)\n"
    )
    assert breaches(source) == {"pickle", "marshal", "torch.load", "eval", "shell"}


def test_no_module_unpickles_or_evaluates_text() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 300
    by_file = {path.relative_to(SOURCE): breaches(path.read_text("utf-8")) for path in paths}
    assert {str(file): calls for file, calls in by_file.items() if calls} == {
        WRITES_KERNELS: {"exec"}
    }
