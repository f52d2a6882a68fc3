"""The core belongs to everyone: no function, class or constant of it is there
for one framework's drop-ins alone.

A framework's own arithmetic (its epsilons, counts and roundings) lives in
`policyloss.compat.<framework>`, and what several drop-ins share in `policyloss.compat`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import policyloss as pl

SOURCES = Path(pl.__file__).parent
CORE = ("functional", "advantage", "parts", "tokens", "totals", "metrics", "spec", "loss", "value")
# A module and a name at its top level; the name is "" for code outside of any definition.
Name = tuple[str, str]


def modules_of(folder: Path) -> dict[str, str]:
    """The source of every module under `folder`, by its dotted name below that folder."""
    paths = {
        path: path.relative_to(folder).with_suffix("").parts
        for path in sorted(folder.rglob("*.py"))
    }
    return {
        ".".join(parts).removesuffix("__init__").removesuffix("."): path.read_text()
        for path, parts in paths.items()
    }


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def defined_by(statement: ast.stmt) -> list[str]:
    """The names that a statement defines: of a function, of a class, or of constants."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [getattr(statement, "target", None)]
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def definitions(source: str) -> frozenset[str]:
    """Functions, classes and constants at the top level of a module."""
    return frozenset(name for statement in parsed(source).body for name in defined_by(statement))


@cache
def imported_names(source: str) -> tuple[tuple[str, str, str], ...]:
    """A module's imports of the package: (module, name, its name in the importing module)."""
    statements = (node for node in ast.walk(parsed(source)) if isinstance(node, ast.ImportFrom))
    of_package = [node for node in statements if (node.module or "").split(".")[0] == "policyloss"]
    return tuple(
        (
            (node.module or "").removeprefix("policyloss").removeprefix("."),
            alias.name,
            alias.asname or alias.name,
        )
        for node in of_package
        for alias in node.names
    )


def imported(source: str, modules: dict[str, str]) -> tuple[dict[str, str], dict[str, Name]]:
    """A module's names for the modules and names of the package that it imports."""
    as_module: dict[str, str] = {}
    as_name: dict[str, Name] = {}
    for module, name, called in imported_names(source):
        inner = f"{module}.{name}".removeprefix(".")
        if inner in modules:
            as_module[called] = inner
        else:
            as_name[called] = (module, name)
    return as_module, as_name


def users(modules: dict[str, str]) -> dict[Name, set[Name]]:
    """Which definitions use each name of the package.
    A package's `__init__` passes a name on, and uses nothing.
    """
    tops = {module: definitions(source) for module, source in modules.items()}
    passed_on = {
        (m, n): origin
        for m, source in modules.items()
        for n, origin in imported(source, modules)[1].items()
    }
    uses: dict[Name, set[Name]] = defaultdict(set)
    for module, source in modules.items():
        as_module, as_name = imported(source, modules)
        for statement in parsed(source).body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            owners = defined_by(statement) or [""]
            for node in ast.walk(statement):
                target: Name | None = None
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    target = as_name.get(node.id) or (
                        (module, node.id) if node.id in tops[module] else None
                    )
                elif (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id in as_module
                ):
                    target = (as_module[node.value.id], node.attr)
                while target in passed_on:
                    target = passed_on[target]
                if target is not None:
                    uses[target] |= {
                        (module, owner) for owner in owners if (module, owner) != target
                    }
    return uses


def framework_of(module: str) -> str | None:
    """The framework whose drop-ins a module belongs to;
    "compat" for what several of them share; None for the rest.
    """
    parts = module.split(".")
    if parts[0] != "compat":
        return None
    return parts[1] if len(parts) > 2 or (SOURCES / "compat" / parts[-1]).is_dir() else "compat"


def names_of_one_framework(modules: dict[str, str], public: set[str]) -> dict[str, str]:
    """The names of the core that only one framework's drop-ins use,
    directly or through other such names.
    """
    uses = users(modules)
    core = {
        (m, n)
        for m, source in modules.items()
        if m.split(".")[0] in CORE
        for n in definitions(source)
    }
    shared = {name for name in core if name[1] in public}
    serves: dict[Name, set[str]] = defaultdict(set)
    changed = True
    while changed:
        changed = False
        for name in core - shared:
            for user in uses.get(name, ()):
                framework = framework_of(user[0])
                if user in shared or (framework is None and user not in core):
                    shared.add(name)
                    changed = True
                    break
                more = {framework} if framework else serves[user]
                if not more <= serves[name]:
                    serves[name] |= more
                    changed = True
    single = {
        name: next(iter(serves[name]))
        for name in core - shared
        if len(serves[name]) == 1 and serves[name] != {"compat"}
    }
    return {f"{module}.{name}": framework for (module, name), framework in sorted(single.items())}


def public_names() -> set[str]:
    return {*pl.__all__, *pl.advantage.__all__}


def test_nothing_in_the_core_is_there_for_one_framework() -> None:
    modules = modules_of(SOURCES)
    assert {module.partition(".")[0] for module in modules} >= set(CORE), "it looks at all of them"
    assert names_of_one_framework(modules, public_names()) == {}


CORE_MODULE = """
LIMIT = 3
def shared(x): return x
def helper(x): return x + LIMIT
def guarded(x): return helper(x)
class Public: pass
"""


def test_the_scan_sees_helpers_constants_and_names_passed_on() -> None:
    modules = {
        "functional": "from policyloss.functional.counts import guarded, shared",
        "functional.counts": CORE_MODULE,
        "loss": (
            "from policyloss.functional import counts\ndef policy_loss(x): return counts.shared(x)"
        ),
        "head.loss": "from policyloss.loss import policy_loss\ndef head(x): return policy_loss(x)",
        "compat.verl.losses": (
            "from policyloss.functional import guarded\ndef drop_in(x): return guarded(x)"
        ),
    }
    only_verl = dict.fromkeys(
        ("functional.counts.LIMIT", "functional.counts.guarded", "functional.counts.helper"), "verl"
    )
    assert names_of_one_framework(modules, {"Public"}) == only_verl
    modules["compat.trl.counts"] = (
        "from policyloss.functional.counts import guarded\nx = guarded(1)"
    )
    assert names_of_one_framework(modules, {"Public"}) == {}
