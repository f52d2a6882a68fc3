"""The source keeps the promises of SECURITY.md."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest
from benchmarks.harness import write_json

from docs import generate
from policyloss.errors import InputError

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
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
    assert len(paths) > 200
    by_file = {path.relative_to(SOURCE): breaches(path.read_text("utf-8")) for path in paths}
    assert {str(file): calls for file, calls in by_file.items() if calls} == {
        WRITES_KERNELS: {"exec"}
    }


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_the_tour_the_benchmarks_and_the_generator_refuse_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious").write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="is a symbolic link"):
        write_json(link, {})
    tour = runpy.run_path(str(ROOT / "examples/tour.py"))
    tour["main"].__globals__["draw"] = lambda names: b"png"
    out = tmp_path / "tour"
    out.mkdir()
    (out / "tour.html").symlink_to(tmp_path / "precious")
    monkeypatch.setattr(sys, "argv", ["tour.py", "--out", str(out)])
    with pytest.raises(InputError, match=r"tour\.html' is a symbolic link"):
        tour["main"]()
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "pages", lambda: {"docs/x.md": "x"})
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/x.md").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match=r"x\.md' is a symbolic link"):
        generate.write()
    assert (tmp_path / "precious").read_text() == "precious"
