"""Makes docs/architecture.md: the picture of the code, the contents of each room, the place of a
new line, and three walks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from docs.architecture_figure import drawing
from docs.architecture_imports import Box, boxes, layers
from docs.architecture_walks import Stop, walks
from docs.markdown import GENERATED, join, table

ROOT = Path(__file__).resolve().parent.parent
FIGURE = "docs/figures/architecture.svg"


@dataclass(frozen=True)
class NewLine:
    """Where a line of some kind goes. files: to change, relative to the root. test: fails if the
    line is missing or wrong.
    """

    kind: str
    files: tuple[str, ...]
    how: str
    test: str


PLACES = (
    NewLine(
        "a loss made of parts that exist",
        ("src/policyloss/catalogue",),
        "A preset: a `LossSpec`, and a source for every number.",
        "tests/policyloss/core/test_presets.py",
    ),
    NewLine(
        "a new part of a loss",
        ("src/policyloss/functional", "src/policyloss/parts", "src/policyloss/public.py"),
        "The formula as a pure function, the part that calls it, its public name ([a worked "
        "example](../CONTRIBUTING.md)).",
        "tests/policyloss/core/test_invariance.py",
    ),
    NewLine(
        "a way to compute advantages",
        ("src/policyloss/advantage/estimators.py",),
        "A function of rewards and groups, and its entry in `ESTIMATORS`.",
        "tests/policyloss/advantage/test_advantage.py",
    ),
    NewLine(
        "a metric",
        ("src/policyloss/policy_metrics.py", "docs/metric_formulas.py"),
        "A record that adds up over micro-batches and ranks, and its formula in `FORMULAS`.",
        "tests/docs/test_docs.py",
    ),
    NewLine(
        "a check of an argument",
        ("src/policyloss/arguments.py",),
        "A function that raises an `InputError` with the argument, its value, and the remedy.",
        "tests/policyloss/core/test_door.py",
    ),
    NewLine(
        "a framework's word",
        ("src/policyloss/compat", "docs/names/options.py"),
        "The translation in the folder of that framework, the word in the table of names.",
        "tests/policyloss/explain/test_names.py",
    ),
    NewLine(
        "a framework's number",
        ("src/policyloss/compat", "conformance/peers"),
        "Its epsilons, counts and roundings in its folder; a comparison with the package itself.",
        "tests/policyloss/compat/test_recorded.py",
    ),
    NewLine(
        "an option of the trainer",
        ("src/policyloss_train/config.py",),
        "A field of `TrainConfig` with its help text and its check.",
        "tests/policyloss_train/test_train_config.py",
    ),
    NewLine(
        "a chart or a table of the report",
        ("src/policyloss_lab/report/panels.py",),
        "Plain data; the page draws it.",
        "tests/policyloss_lab/report/test_report_page.py",
    ),
    NewLine(
        "a command",
        ("src/policyloss/cli.py", "src/policyloss_lab/commands.py"),
        "Its arguments as a dataclass and its line in the table of its package, and the function "
        "that prints and returns the exit code.",
        "tests/meta/test_cli.py",
    ),
    NewLine(
        "a page",
        ("docs",),
        "A Markdown file if a person writes it, or a `*_page.py` that `docs/generate.py` calls if "
        "it is made from code or data.",
        "tests/docs/test_docs.py",
    ),
    NewLine(
        "a choice that someone may question",
        ("docs/decisions",),
        "A numbered file with the choice and its reason, and its line in the list.",
        "tests/docs/test_docs.py",
    ),
    NewLine(
        "a batch or a helper of tests",
        ("tests/helpers",),
        "Code that two test files share; code for another process goes to `tests/workers`.",
        "tests/meta/test_mutants.py",
    ),
)


INTRODUCTION = """
The three packages build on each other: `policyloss` is the library and needs only torch;
`policyloss_lab` reads runs; `policyloss_train` makes them. The library imports neither of the other
two, and the lab does not import the trainer. Their commands reach `policyloss` by entry points.

The drawing is made from the imports of `src`. An arrow leads from a module to one that it imports;
arrows that follow from others are left out. **A module may import modules of its own layer or of a
lower one, and none above.** For the library, `tests/meta/test_imports.py` lists exactly which.
`compat` imports a framework only when it hooks into it.
"""
MAY_TOUCH = """
- Public are the names in `policyloss.__all__`, the names that the pages show, and the fields of
  parts, which stored specs hold. Everything else may change, together with its tests.
- A number that a test computes by hand, and a tolerance, change only with a reason in the commit. A
  formula exists once: change it in `functional`, and its explanation follows.
- Pages that begin with “Made by `python -m docs.generate`” are written by `make docs`,
  `tests/recorded` by `make record`, `requirements.lock` by `make lock`. Change their sources.
- Odd code may be a [decision](decisions/README.md). Read it first; if you decide otherwise, write
  it there.
"""
ABOUT_WALKS = """
Each list is the path of a real call: the page is written only if a call enters these functions in
this order.
"""


def architecture_pages() -> dict[str, str]:
    """The page and its drawing by their paths."""
    return {"docs/architecture.md": architecture_page(), FIGURE: drawing(boxes())}


def architecture_page() -> str:
    """The whole page."""
    return join(
        "# A picture of the code",
        GENERATED,
        "![The three packages and their modules in layers](figures/architecture.svg)",
        INTRODUCTION,
        "## The rooms",
        rooms_table(boxes()),
        "## Where a new line goes",
        places_table(),
        "## What you may touch",
        MAY_TOUCH,
        "## Three walks",
        ABOUT_WALKS,
        *(
            block
            for walk, stops in walks()
            for block in (f"### {walk.title}", walk.about, _listed(stops))
        ),
    )


def rooms_table(by_name: Mapping[str, Box]) -> str:
    """Every box with its content, from the top layer to the ground."""
    rows = [
        [
            layer.title,
            _room(by_name[name]),
            by_name[name].about,
            by_name[name].size,
            _names(by_name[name]),
        ]
        for layer in reversed(layers(by_name))
        for name in layer.names
    ]
    return table(["layer", "room", "content", "size", "imports"], rows)


def _room(box: Box) -> str:
    return f"[`{box.path}`](../src/{box.path})"


def _names(box: Box) -> str:
    return ", ".join(sorted(box.imports)) or "nothing"


def places_table() -> str:
    """Where each kind of line goes; raises if a place does not exist."""
    for path in (path for line in PLACES for path in (*line.files, line.test)):
        if not (ROOT / path).exists():
            raise LookupError(f"{path} does not exist: correct PLACES in docs/architecture_page.py")
    rows = [
        [line.kind, ", ".join(_link(path) for path in line.files), line.how, _link(line.test)]
        for line in PLACES
    ]
    return table(["a new line", "goes to", "how", "what notices"], rows)


def _link(path: str) -> str:
    return f"[`{path.removeprefix('src/')}`](../{path})"


def _listed(stops: list[Stop]) -> str:
    return "\n".join(
        f"{i}. `{stop.name}` in [`{stop.file}`](../src/{stop.file}): {stop.about}"
        for i, stop in enumerate(stops, 1)
    )
