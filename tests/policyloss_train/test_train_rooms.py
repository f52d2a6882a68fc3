"""The rooms of the trainer: what each may import, and that nothing in them is without use."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import policyloss_train

TRAIN = Path(policyloss_train.__file__).parent
SOURCES = {path: path.read_text() for path in sorted(TRAIN.parent.rglob("*.py"))}
# The other modules of the trainer that each room may import. None imports the loop.
OUTSIDE = {
    "tasks": {"time_limit", "user_code"},
    "rollout": {
        "config",
        "distributed",
        "drawing",
        "models",
        "run.shards",
        "sampler",
        "setup",
        "tasks.base",
        "time_limit",
        "tinker.learner",
        "user_code",
    },
    "run": {"config", "distributed", "models", "view.track", "watch"},
    "view": {
        "batches",
        "config",
        "distributed",
        "learner",
        "sampler",
        "tasks",
    },
}


def imported(source: str) -> set[str]:
    """The modules of the trainer that `source` imports, for types as well: `tasks.base`, `loop`."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("policyloss_train")
        ):
            outer = node.module.removeprefix("policyloss_train").lstrip(".")
            inner = [".".join(filter(None, (outer, alias.name))) for alias in node.names]
            modules |= {
                name if (TRAIN / f"{name.replace('.', '/')}.py").exists() else outer
                for name in inner
            }
    return modules


@pytest.mark.parametrize("room", OUTSIDE)
def test_a_folder_imports_few_others(room: str) -> None:
    files = sorted((TRAIN / room).glob("*.py"))
    assert len(files) > 3
    for file in files:
        outside = {
            name for name in imported(SOURCES[file]) if not f"{name}.".startswith(f"{room}.")
        }
        assert outside <= OUTSIDE[room], file.name


def test_every_import_is_counted() -> None:
    source = (
        "from policyloss_train.tasks import Task\n"
        "if TYPE_CHECKING:\n"
        "    from policyloss_train.loop import Training\n"
        "from policyloss_train import learner\n"
        "import os\n"
    )
    assert imported(source) == {"tasks", "loop", "learner"}


def unused(definitions: dict[Path, str], sources: dict[Path, str]) -> list[str]:
    """Functions, classes, methods and options with a default whose names nothing in `sources` uses.

    By name alone, so another thing of the same name hides one. Strings count: a command is called
    by its name.
    """
    names: set[str] = set()
    options: set[str] = set()
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg and ast.unparse(node.value) != node.arg:
                options.add(node.arg)  # `a=a` only passes on a value that may be unset
    lonely = []
    for path, source in definitions.items():
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, (ast.FunctionDef, ast.ClassDef))
                and not node.name.startswith("__")
                and node.name not in names
            ):
                lonely.append(f"{path.stem}.{node.name}")
            if isinstance(node, ast.FunctionDef):
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                lonely += [
                    f"{path.stem}.{node.name}({a.arg}=)"
                    for a, default in pairs
                    if default and a.arg not in options
                ]
    return lonely


def test_everything_in_the_trainer_is_used() -> None:
    """Tests do not count: code that only they call is unused. The commands, and the reward and the
    engines of a bench, are called by name, the reader of a server's answers by `http.client`, and
    the requests of a transfer by vLLM.
    """
    trainer = {path: source for path, source in SOURCES.items() if TRAIN in path.parents}
    assert unused(trainer, SOURCES) == [
        *("command.bench_command", "conditions.noisy_reward", "engines.bf16", "engines.hot"),
        *(f"command.{name}_command" for name in ("train", "eval", "sample", "export")),
        "servers.makefile",
        "servers.readable",
        "servers.readinto",
        "transfer.init_weight_transfer_engine",
        "transfer.start_weight_update",
        "transfer.finish_weight_update",
    ]


def test_unused_names_are_reported() -> None:
    source = (
        "def f(x, *, a=1, b=2): return g(x)\n"
        "def g(x, *, b=3): return f(x, a=2, b=b)\n"
        "class C:\n"
        "    def m(self): pass\n"
        "C()\n"
    )
    assert unused({Path("m.py"): source}, {Path("m.py"): source}) == ["m.f(b=)", "m.g(b=)", "m.m"]
