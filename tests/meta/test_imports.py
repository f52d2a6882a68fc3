"""Imports point one way, `import policyloss` is light,
and every public name exists and is documented.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from package_imports import (
    FILES,
    PACKAGES,
    SOURCE,
    holds_kernels,
    imports_in,
    imports_of,
    loads,
    named_modules,
    own,
)
from walk import walked

import policyloss as pl
import policyloss_lab as lab

# What each part of the core may import of the package. A module that is not listed (explain, cli,
# …) is above all of these: it may import any of them, and none of them may import it.
ADVANTAGE = {"arguments", "errors", "functional", "tokens", "advantage"}
MAY_IMPORT = {
    "errors": set(),
    "arguments": {"errors"},
    "notebook": set(),
    "functional": {"arguments", "errors", "functional"},
    "tokens": {"arguments", "errors", "functional"},
    "inputs": {"arguments", "errors", "functional", "tokens"},
    "totals": {"arguments", "errors", "functional", "tokens"},
    "teacher": {"arguments", "errors"},
    "records": {"arguments", "errors", "functional"},
    "metrics": {"arguments", "errors", "functional", "notebook", "records"},
    "parts": {"arguments", "errors", "functional", "tokens", "totals", "parts"},
    "spec": {"arguments", "errors", "tokens", "parts"},
    "catalogue": {"arguments", "errors", "parts", "output", "spec", "catalogue"},
    "mixture": {
        "arguments",
        "errors",
        "functional",
        "tokens",
        "inputs",
        "totals",
        "metrics",
        "records",
        "parts",
        "spec",
        "catalogue",
    },
    "policy_metrics": {
        "arguments",
        "errors",
        "functional",
        "tokens",
        "totals",
        "metrics",
        "records",
        "parts",
        "spec",
    },
    "loss": {
        "arguments",
        "errors",
        "functional",
        "tokens",
        "inputs",
        "totals",
        "metrics",
        "parts",
        "spec",
        "catalogue",
        "mixture",
        "policy_metrics",
    },
    "value": {
        "arguments",
        "errors",
        "functional",
        "tokens",
        "totals",
        "metrics",
        "records",
        "parts",
        "spec",
        "loss",
    },
    "head": {
        "arguments",
        "errors",
        "functional",
        "tokens",
        "inputs",
        "totals",
        "metrics",
        "parts",
        "spec",
        "catalogue",
        "mixture",
        "records",
        "policy_metrics",
        "loss",
        "teacher",
        "head",
    },
    "hf": {
        "arguments",
        "errors",
        "inputs",
        "totals",
        "spec",
        "catalogue",
        "mixture",
        "policy_metrics",
        "loss",
        "head",
        "hf",
    },
    "accumulation": {
        "arguments",
        "errors",
        "functional",
        "tokens",
        "inputs",
        "totals",
        "metrics",
        "records",
        "spec",
        "catalogue",
        "mixture",
        "policy_metrics",
        "loss",
    },
    "advantage": ADVANTAGE,
}


# `policy_loss` imports its other ways to run when it is called; they are built from its pipeline.
WAYS_OUT = {"policyloss.compiled.fused", "policyloss.compiled.in_graph"}

# The packages that each may import in addition to torch, by their pyproject.toml.
FOREIGN = {
    "policyloss": set(),
    "policyloss_lab": {"policyloss"},
    "policyloss_train": {
        "policyloss",
        "policyloss_lab",
        "math_verify",
        "numpy",
        "peft",
        "reasoning_gym",
        "tinker",
        "vllm",
        "rich",
        "safetensors",
        "tokenizers",
        "tomli",  # of Python 3.10
        "torchao",
        "transformers",
    },
}


def part_of(module: str) -> str:
    """`policyloss.parts.trust` → `parts`; the package itself → `__init__`."""
    return [*module.split("."), "__init__"][1]


CORE = [module for module in FILES if module.startswith("policyloss.")]


@walked("module", [m for m in CORE if part_of(m) in MAY_IMPORT])
def test_imports_point_one_way(module: str) -> None:
    allowed = MAY_IMPORT[part_of(module)]
    imported = own(imports_of(module)) - (WAYS_OUT if module == "policyloss.loss" else set())
    wrong = sorted(n for n in imported if part_of(n) not in allowed)
    assert not wrong, f"{module} imports {wrong}; it may import only {sorted(allowed)}"


def test_every_part_of_the_rule_exists() -> None:
    assert set(MAY_IMPORT) <= {part_of(m) for m in CORE}


def test_there_is_no_cycle() -> None:
    graph = {m: loads(m) for m in FILES}
    graph["policyloss.loss"] -= {"policyloss.compiled.__init__", *WAYS_OUT}
    # Raises CycleError, which names the modules.
    order = list(TopologicalSorter(graph).static_order())
    assert (
        order.index("policyloss.errors")
        < order.index("policyloss.loss")
        < order.index("policyloss.public")
        < order.index("policyloss_lab.public")
    )


def test_a_module_named_in_a_string_is_an_import() -> None:
    source = (
        "def f():\n"
        '    return import_module("policyloss.cli"), import_module("policyloss.compat"), '
        '"policyloss of nothing"'
    )
    assert named_modules(source, FILES) == {"policyloss.cli", "policyloss.compat.__init__"}


def test_a_package_imports_lower_packages_and_its_requirements_only() -> None:
    """The library needs only torch and names neither of the others, not even in a string; the lab
    does not name the trainer.
    """
    known = {"torch", "__future__", *sys.stdlib_module_names}
    foreign = {}
    for module in FILES:
        package = module.split(".")[0]
        allowed = known | {package} | FOREIGN[package]
        allowed |= {"triton"} if holds_kernels(module) else set()
        named = named_modules(FILES[module].read_text(), FILES)
        foreign[module] = {n.split(".")[0] for n in imports_of(module) | named} - allowed
    assert {module: names for module, names in foreign.items() if names} == {}


def test_the_tests_of_a_package_need_no_package_above_it() -> None:
    """Nor do the helpers, benchmarks and generators that those tests import."""
    root = SOURCE.parent
    rooms = (root / "tests/helpers", root / "tests/workers", root)
    files = {
        ".".join(path.relative_to(room).with_suffix("").parts): path
        for room in rooms
        for pattern in ("*.py", "[bdce]*/**/*.py")  # benchmarks, conformance, docs, examples
        for path in room.glob(pattern)
    }

    def needed(file: Path, visited: set[Path]) -> set[str]:
        visited.add(file)
        names = imports_in(file.read_text(encoding="utf-8"), files)
        here = {files[name] for name in names if name in files} - visited
        return {name.split(".")[0] for name in names}.union(*(needed(f, visited) for f in here))

    for index, package in enumerate(PACKAGES):
        for file in (root / "tests" / package).rglob("*.py"):
            above = needed(file, set()) & set(PACKAGES[index + 1 :])
            assert not above, f"{file}: {above}"


def test_no_function_has_the_name_of_a_module() -> None:
    """`import policyloss.name` is the module of that name, for every module of every package."""
    for module in FILES:
        package, _, name = module.removesuffix(".__init__").rpartition(".")
        if package and not name.startswith("__") and name not in ("hook", "head_hook"):
            if holds_kernels(module) and find_spec("triton") is None:
                continue
            importlib.import_module(f"{package}.{name}")
            assert inspect.ismodule(getattr(sys.modules[package], name)), module


def test_nothing_imports_a_module_of_kernels() -> None:
    """They are imported by name for the first tensor on a GPU: Triton is neither needed nor
    imported before. One of them may use another's functions.
    """
    others = [module for module in FILES if not holds_kernels(module)]
    wrong = {m: [n for n in own(imports_of(m)) if holds_kernels(n)] for m in others}
    assert {module: names for module, names in wrong.items() if names} == {}


def test_kernels_are_in_modules_named_for_them() -> None:
    """Triton is imported by the modules that are named for kernels, by each of them,
    and by no other.
    """
    assert {m for m in FILES if "triton" in {n.split(".")[0] for n in imports_of(m)}} == {
        m for m in FILES if holds_kernels(m)
    }


def test_the_file_of_public_names_only_names_things() -> None:
    """`public` holds a docstring and imports of the package, each `import name as name`: type
    checkers take only these for public names.
    """
    for package in PACKAGES[:2]:
        for node in ast.parse((SOURCE / package / "public.py").read_text()).body[1:]:
            assert isinstance(node, ast.ImportFrom)
            assert (node.module or "").split(".")[0] == package
            assert all(alias.asname == alias.name for alias in node.names)


SCRIPT = """
import json, sys
absent = "numpy triton transformers trl verl openrlhf matplotlib pydantic pandas scipy tensordict"
for name in (*absent.split(), "rich"):
    sys.modules[name] = None  # importing it now raises ImportError
import torch
before = set(sys.modules)
from time import process_time
start = process_time()
import policyloss as pl
pl.policy_loss
seconds = process_time() - start
added = sorted({name.split(".")[0] for name in set(sys.modules) - before})
logp = torch.zeros(1, 2, requires_grad=True)
mask = torch.ones(1, 2, dtype=torch.bool)
out = pl.policy_loss(pl.preset("ppo"), logp, torch.zeros(1, 2), torch.ones(1), mask)
out.loss.backward()
print(json.dumps({
    "listed": set(pl.__all__) <= set(dir(pl)),
    "modules": sum(name.startswith("policyloss") for name in sys.modules),
    "added": added, "seconds": seconds, "cli": "policyloss.cli" in sys.modules,
    "loss": out.metrics.compute()["loss"], "gradient": logp.grad.tolist(),
}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, Any]:
    """The output of `import policyloss` in a new interpreter that cannot import any framework."""
    path = {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_importing_the_package_imports_nothing_foreign(fresh_import: dict[str, Any]) -> None:
    added = set(fresh_import["added"])
    assert added <= {"policyloss", "torch"} | set(sys.stdlib_module_names)
    assert not added & {"sqlite3", "http", "socketserver", "csv", "zipfile", "fcntl"}
    assert not fresh_import["cli"]
    assert fresh_import["modules"] < 125


def test_importing_the_package_is_quick(fresh_import: dict[str, Any]) -> None:
    """Beyond torch's own import, which takes seconds.
    0.05 s of processor time where this was written.
    """
    assert fresh_import["seconds"] < 1.0


def test_the_package_works_with_torch_alone(fresh_import: dict[str, Any]) -> None:
    """Two tokens at ratio 1 with A = 1 under a token mean: loss −1, gradient −1/2 each."""
    assert fresh_import["loss"] == -1.0
    assert fresh_import["gradient"] == [[-0.5, -0.5]]


def test_the_public_names_are_listed_before_one_is_read(fresh_import: dict[str, Any]) -> None:
    assert fresh_import["listed"]
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        getattr(pl, "nonsense")  # noqa: B009


def documented(thing: Any) -> bool:
    """Whether `thing` has a docstring someone wrote (a dataclass without one is given its
    signature).
    """
    text = inspect.getdoc(thing) or ""
    return len(text) > 5 and not text.startswith(f"{getattr(thing, '__name__', '')}(")


def test_every_public_name_exists_and_is_documented() -> None:
    for package in (pl, lab):
        assert len(set(package.__all__)) == len(package.__all__)
        assert [name for name in package.__all__ if not documented(getattr(package, name))] == []


def test_every_public_function_underneath_is_documented() -> None:
    undocumented = []
    for module in FILES:
        if module.endswith(
            ("__main__", "compat.verl.hook", "verl.head_hook")
        ):  # to import these is to run them
            continue
        if holds_kernels(module) and find_spec("triton") is None:
            continue
        loaded = importlib.import_module(module.removesuffix(".__init__"))
        for name, thing in vars(loaded).items():
            public = not name.startswith("_") and (
                inspect.isfunction(thing) or inspect.isclass(thing)
            )
            if public and thing.__module__ == loaded.__name__ and not documented(thing):
                undocumented.append(f"{module}.{name}")
    assert not undocumented


def test_the_functional_module_lists_its_names() -> None:
    assert all(callable(getattr(pl.functional, name)) for name in pl.functional.__all__)
    assert sorted(pl.functional.__all__) == list(pl.functional.__all__)


def test_every_module_of_explain_is_used_by_the_package() -> None:
    """Data that only the documentation reads is in docs/, not in the installed packages."""
    used = set().union(*(imports_of(module) for module in FILES))
    inside = {
        name
        for name in FILES
        if name.startswith("policyloss.explanations.") and not name.endswith("__init__")
    }
    assert inside - used == set()
