"""The three packages of src/, read from their files: a box for each top-level module or folder,
and the layers they form.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import policyloss as pl
import policyloss_lab as lab

SOURCE = Path(pl.__file__).resolve().parents[1]
CORE, LAB, TRAIN = PACKAGES = ("policyloss", "policyloss_lab", "policyloss_train")
TRAINER = "trainer"  # one box: the folders of policyloss_train and its modules import each other
# These modules hold names only.
LEFT_OUT = {CORE: {"__init__", "__main__", "public"}, LAB: {"__init__", "public", "commands"}}
MODULE_NAME = re.compile(r"policyloss(_lab|_train)?(\.\w+)+")


@dataclass(frozen=True)
class Box:
    """A top-level module or folder of a package. path: relative to src. about: the first sentence
    of its docstring. imports: the other boxes that it imports.
    """

    name: str
    path: str
    about: str
    files: int
    lines: int
    imports: frozenset[str]

    @property
    def size(self) -> str:
        """Rounded, for a reader."""
        lines = f"{rounded(self.lines)} lines"
        return lines if self.files == 1 else f"{self.files} files, {lines}"


@dataclass(frozen=True)
class Layer:
    """Boxes of one height, from left to right. A box may import boxes of lower layers or of its
    own, without a cycle.
    """

    title: str
    names: tuple[str, ...]
    package: str = CORE


# From the ground up. The drawing keeps this order from left to right, so neighbours should import
# each other.
# `policy_loss` imports its other ways to run when it is called; they are made of its pipeline.
LATE = {"loss": ("compiled",)}
LAYERS = (
    Layer(
        "Foundations",
        (
            *("errors", "arguments", "functional", "records", "notebook", "output", "lazy"),
            "commands",
        ),
    ),
    Layer("The tensors of a call", ("advantage", "teacher", "tokens", "totals", "metrics")),
    Layer("The loss as a value", ("parts", "spec", "catalogue", "mixture")),
    Layer("The loss", ("policy_metrics", "loss", "value", "preference")),
    Layer("Around the loss", ("accumulation", "head", "compiled", "check", "explanations")),
    Layer("The edge", ("compat", "choose", "porting", "cli")),
    Layer("The files of a run", ("limits", "reading", "completions", "runs", "logs"), LAB),
    Layer("Reading a run", ("explore", "whatif", "report", "diagnosis"), LAB),
    Layer("Attaching to a run", ("attachment", "trainers"), LAB),
    Layer("Making a run", (TRAINER,), TRAIN),
)


@cache
def boxes(source: Path = SOURCE) -> dict[str, Box]:
    """Every box by its name."""
    files: dict[str, list[Path]] = {}
    for package, left_out in LEFT_OUT.items():
        for path in (source / package).glob("*/__init__.py"):
            files[path.parent.name] = sorted(path.parent.rglob("*.py"))
        modules = (source / package).glob("*.py")
        files |= {path.stem: [path] for path in modules if path.stem not in left_out}
    files[TRAINER] = sorted((source / TRAIN).rglob("*.py"))
    names = frozenset(files)
    return {name: _box(source, name, files[name], names) for name in sorted(names)}


def _box(source: Path, name: str, files: list[Path], names: frozenset[str]) -> Box:
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = [ast.parse(text) for text in texts.values()]
    imported = {
        box
        for tree in trees
        for module in _imported_modules(tree)
        if (box := _box_of(module, names))
    }
    # The first file of a folder is its __init__.py.
    about = first_sentence(ast.get_docstring(trees[0]))
    lines = sum(len(text.splitlines()) for text in texts.values())
    first = files[0].relative_to(source)
    path = f"{first.parent.as_posix()}/" if first.name == "__init__.py" else first.as_posix()
    return Box(
        name, path, about, len(files), lines, frozenset(imported - {name, *LATE.get(name, ())})
    )


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    """The modules of the packages that a file imports, at load or later, but not for types alone.

    A string that is the name of a module counts, because that is how a command is loaded when it is
    first called. `pl.name` and `lab.name` count as the module that defines the public name.
    """
    for node in _runtime_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (
                [f"{module}.{alias.name}" for alias in node.names]
                if module in PACKAGES
                else [module]
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("pl", "lab")
        ):
            yield f"{CORE if node.value.id == 'pl' else LAB}.{node.attr}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and MODULE_NAME.fullmatch(node.value)
        ):
            yield node.value


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node except those under `if TYPE_CHECKING`."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        stack.extend(
            node.orelse if for_types and isinstance(node, ast.If) else ast.iter_child_nodes(node)
        )


def _box_of(module: str, names: frozenset[str]) -> str | None:
    """The box that holds `policyloss.name…`, where the name is a module or a public name of its
    package.
    """
    package, _, rest = module.partition(".")
    name = rest.split(".")[0]
    if package not in PACKAGES:
        return None
    if package == TRAIN:
        return TRAINER
    public = getattr(pl if package == CORE else lab, name, None)
    if name in names and (public is None or inspect.ismodule(public) or "." in rest):
        return name
    home = (getattr(public, "__module__", None) or "").split(".")[1:2]
    return home[0] if home and home[0] in names else None


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, in one line; with the next sentence if it is one word. A
    colon before a list ends it too.
    """
    paragraph = " ".join((docstring or "").strip().split("\n\n")[0].split())
    end = re.compile(r"\.(?=\s|$)|:(?= [A-Z]|$)").search(paragraph, 6)
    return (paragraph[: end.start()] if end else paragraph) + "."


def rounded(lines: int) -> str:
    """A number of lines as a reader remembers it, so that few changes of code change the page."""
    steps = [step * 10**power for power in range(1, 6) for step in (1, 1.5, 2, 3, 5, 7)]
    return f"{min([5, *steps], key=lambda step: abs(step - lines) / step):,.0f}"


def layers(by_name: Mapping[str, Box]) -> list[Layer]:
    """The layers with every box in one of them: a box that no layer names goes into the lowest
    layer that its imports allow.
    """
    height = {name: i for i, layer in enumerate(LAYERS) for name in layer.names}
    if gone := sorted(set(height) - set(by_name)):
        raise LookupError(
            f"no package has {gone[0]}: take it out of LAYERS in docs/architecture_imports.py"
        )
    unnamed = [name for name in by_name if name not in height]
    height |= dict.fromkeys(unnamed, 0)
    for _ in unnamed:  # a box waits for the boxes that it imports
        height |= {
            name: max((height[other] for other in by_name[name].imports), default=0)
            for name in unnamed
        }
    for name, box in by_name.items():
        if above := sorted(other for other in box.imports if height[other] > height[name]):
            raise LookupError(
                f"{name} imports {above[0]}, which is in a higher layer "
                "(docs/architecture_imports.py)"
            )
    return [
        replace(layer, names=(*layer.names, *(n for n in unnamed if height[n] == i)))
        for i, layer in enumerate(LAYERS)
    ]


def direct_imports(by_name: Mapping[str, Box]) -> list[tuple[str, str]]:
    """Pairs (box, imported box) without the pairs that follow from two others."""

    @cache
    def below(name: str) -> frozenset[str]:
        return by_name[name].imports.union(*(below(other) for other in by_name[name].imports))

    pairs = []
    for name, box in by_name.items():
        implied: frozenset[str] = frozenset().union(*(below(other) for other in box.imports))
        pairs += [(name, other) for other in sorted(box.imports - implied)]
    return pairs
