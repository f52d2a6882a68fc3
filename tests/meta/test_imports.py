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
from typing import Any

import pytest
from package_imports import FILES, PACKAGE, holds_kernels, imports_of, loads, named_modules, own
from walk import walked

import policyloss as pl

# What each part of the core may import of the package. A module that is not listed (explain, cli,
# …) stands above all of these: it may import any of them, and none of them may import it.
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
    "micro_batches": {"arguments", "errors", "functional", "tokens", "totals"},
    "parts": {"arguments", "errors", "functional", "tokens", "totals", "parts"},
    "spec": {"arguments", "errors", "tokens", "parts"},
    "presets": {"arguments", "errors", "parts", "spec", "presets"},
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
        "presets",
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
        "presets",
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
        "presets",
        "policy_metrics",
        "loss",
        "head",
        "hf",
    },
    "accumulate": {
        "arguments",
        "errors",
        "functional",
        "tokens",
        "inputs",
        "totals",
        "micro_batches",
        "metrics",
        "records",
        "spec",
        "presets",
        "policy_metrics",
        "loss",
    },
    "advantage": ADVANTAGE,
}


# What the parts that are not the core may import beside torch: the extras of pyproject.toml.
EXTRAS = {
    "train": {
        "math_verify",
        "numpy",
        "peft",
        "reasoning_gym",
        "vllm",
        "rich",
        "safetensors",
        "tokenizers",
        "tomli",  # of Python 3.10
        "torchao",
        "transformers",
    }
}


def part_of(module: str) -> str:
    """`policyloss.parts.trust` → `parts`; the package itself → `__init__`."""
    return [*module.split("."), "__init__"][1]


@walked("module", [m for m in FILES if part_of(m) in MAY_IMPORT])
def test_imports_point_one_way(module: str) -> None:
    allowed = MAY_IMPORT[part_of(module)]
    wrong = sorted(n for n in own(imports_of(module)) if part_of(n) not in allowed)
    assert not wrong, f"{module} imports {wrong}; it may import only {sorted(allowed)}"


def test_every_part_of_the_rule_exists() -> None:
    assert set(MAY_IMPORT) <= {part_of(m) for m in FILES}


def test_there_is_no_cycle() -> None:
    graph = {m: loads(m) for m in FILES}
    # Raises CycleError, which names the modules.
    order = list(TopologicalSorter(graph).static_order())
    assert (
        order.index("policyloss.errors")
        < order.index("policyloss.loss")
        < order.index("policyloss.__init__")
    )


def test_a_module_named_in_a_string_is_an_import() -> None:
    source = (
        "def f():\n"
        '    return import_module("policyloss.cli"), import_module("policyloss.compat"), '
        '"policyloss of nothing"'
    )
    assert named_modules(source, FILES) == {"policyloss.cli", "policyloss.compat.__init__"}
    assert "policyloss_train.command" in loads("policyloss.cli")


def test_the_core_needs_torch_only() -> None:
    known = {"torch", "policyloss", "__future__", *sys.stdlib_module_names}
    foreign = {}
    for module in FILES:
        allowed = known | EXTRAS.get(part_of(module), set())
        allowed |= {"triton"} if holds_kernels(module) else set()
        foreign[module] = {n.split(".")[0] for n in imports_of(module)} - allowed
    assert {module: names for module, names in foreign.items() if names} == {}


def test_nothing_imports_a_module_of_kernels() -> None:
    """They are asked for by name when a tensor on a GPU is met:
    Triton is neither needed nor imported before. One of them may use another's functions.
    """
    others = [module for module in FILES if not holds_kernels(module)]
    wrong = {m: [n for n in own(imports_of(m)) if holds_kernels(n)] for m in others}
    assert {module: names for module, names in wrong.items() if names} == {}


def test_the_kernels_are_where_the_rule_says() -> None:
    """Triton is imported by the modules that are named for kernels, by each of them,
    and by no other.
    """
    assert {m for m in FILES if "triton" in {n.split(".")[0] for n in imports_of(m)}} == {
        m for m in FILES if holds_kernels(m)
    }


def test_the_file_of_public_names_only_names_things() -> None:
    """`public` holds a docstring, imports of the package, and `__all__`."""
    for node in ast.parse((PACKAGE / "public.py").read_text()).body[1:]:
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] == "policyloss"
        else:
            assert isinstance(node, ast.Assign)
            assert ast.unparse(node.targets[0]) == "__all__"


SCRIPT = """
import json, sys
absent = "numpy triton transformers trl verl openrlhf matplotlib pydantic pandas scipy tensordict"
for name in (*absent.split(), "rich"):
    sys.modules[name] = None  # importing it now raises ImportError
import torch
before = set(sys.modules)
from time import process_time
start = process_time()
import policyloss.accumulate, policyloss_lab.diagnosis, policyloss.explain, policyloss.presets
import policyloss as pl
pl.policy_loss
seconds = process_time() - start
added = sorted({name.split(".")[0] for name in set(sys.modules) - before})
logp = torch.zeros(1, 2, requires_grad=True)
mask = torch.ones(1, 2, dtype=torch.bool)
out = pl.policy_loss(pl.preset("ppo"), logp, torch.zeros(1, 2), torch.ones(1), mask)
out.loss.backward()
same = {"accumulate", "doctor", "explain", "presets"}
print(json.dumps({
    "functions": sorted(name for name in same if callable(getattr(pl, name))),
    "listed": set(pl.__all__) <= set(dir(pl)),
    "added": added, "seconds": seconds, "cli": "policyloss.cli" in sys.modules,
    "loss": out.metrics.compute()["loss"], "gradient": logp.grad.tolist(),
}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, Any]:
    """What a new interpreter says of `import policyloss`,
    with every framework made impossible to import.
    """
    path = {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_importing_the_package_imports_nothing_foreign(fresh_import: dict[str, Any]) -> None:
    assert set(fresh_import["added"]) <= {"policyloss", "torch"} | set(sys.stdlib_module_names)
    assert not fresh_import["cli"]


def test_importing_the_package_is_quick(fresh_import: dict[str, Any]) -> None:
    """Beyond torch's own import, which takes seconds.
    0.05 s of processor time where this was written.
    """
    assert fresh_import["seconds"] < 1.0


def test_the_package_works_with_torch_alone(fresh_import: dict[str, Any]) -> None:
    """Two tokens at ratio 1 with A = 1 under a token mean: loss −1, gradient −1/2 each."""
    assert fresh_import["loss"] == -1.0
    assert fresh_import["gradient"] == [[-0.5, -0.5]]


def test_a_module_hides_no_function_of_its_name(fresh_import: dict[str, Any]) -> None:
    """Not even one that is imported before the public names are."""
    modules = {path.stem for path in PACKAGE.iterdir()}
    same = [name for name in pl.__all__ if name in modules and callable(getattr(pl, name))]
    assert fresh_import["functions"] == sorted(same)
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
    assert len(set(pl.__all__)) == len(pl.__all__)
    missing = [name for name in pl.__all__ if not hasattr(pl, name)]
    undocumented = [
        name for name in pl.__all__ if name not in missing and not documented(getattr(pl, name))
    ]
    assert not missing
    assert not undocumented


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


def test_the_functional_module_lists_what_it_has() -> None:
    assert all(callable(getattr(pl.functional, name)) for name in pl.functional.__all__)
    assert sorted(pl.functional.__all__) == list(pl.functional.__all__)


def test_every_module_of_explain_is_used_by_the_package() -> None:
    """Data that only the documentation reads lies in docs/, not in what is installed."""
    used = set().union(*(imports_of(module) for module in FILES))
    inside = {
        name
        for name in FILES
        if name.startswith("policyloss.explain.") and not name.endswith("__init__")
    }
    assert inside - used == set()
