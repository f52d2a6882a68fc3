"""The pages of *Reference*: each public name with its signature, its docstring and an example.

The examples stand in docs/examples: a section `## name, other_name` holds the example of these
names, as a session of Python's prompt. A test runs them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import policyloss as pl
from docs.markdown import fenced, join

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODULES = {"": pl, "advantage.": pl.advantage, "functional.": pl.functional, "hf.": pl.hf}
# The pages: an address, a title, and the modules of `policyloss` whose names stand there. A name
# stands on the first page that fits, so the last one takes what no other has.
TOPICS = (
    ("loss", "The loss", ("loss", "value", "compiled")),
    ("spec", "Losses as values", ("spec", "presets", "errors")),
    ("explain", "Explain and compare", ("explain",)),
    ("own", "A part of your own", ("tokens",)),
    ("ratio", "Parts: ratio", ("parts.ratio",)),
    ("trust", "Parts: trust region", ("parts.trust",)),
    ("correction", "Parts: rollout correction", ("parts.correction",)),
    ("pulls", "Parts: KL and divergence", ("parts.kl", "parts.divergence")),
    ("aggregate", "Parts: aggregation", ("parts.aggregate",)),
    ("step", "A whole optimizer step", ("accumulate", "totals", "metrics", "records")),
    ("advantage", "Advantages", ("advantage",)),
    ("head", "The head", ("head", "teacher", "hf")),
    ("check", "Checks", ("check", "functional.exact")),
    ("doctor", "The doctor", ("doctor",)),
    ("whatif", "What if", ("whatif",)),
    ("functional", "Pure functions", ("functional",)),
    ("others", "Others", ("",)),
)


DROP_INS = (
    "The names are those of the framework. [How to use them](../guides/frameworks.md) has the "
    "examples, and [what was compared](../guides/conformance.md) the results."
)


@dataclass(frozen=True)
class Entry:
    """A public name. name: as written after `pl.`; value: what it names."""

    name: str
    value: Any

    @property
    def topic(self) -> str:
        """The address of the page it stands on."""
        module = getattr(self.value, "__module__", "policyloss.").removeprefix("policyloss.")
        if "." in self.name:
            module = self.name
        for address, _, prefixes in TOPICS:
            if module.startswith(prefixes):
                return address
        return TOPICS[-1][0]


def entries() -> list[Entry]:
    """Every public name of the library, without the modules themselves and without second names
    for the same thing.
    """
    names: dict[int, Entry] = {}
    for prefix, module in MODULES.items():
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                names.setdefault(id(value), Entry(prefix + name, value))
    return list(names.values())


def examples(folder: Path = EXAMPLES) -> dict[str, str]:
    """The example of each name, as the text of a session."""
    sessions = {}
    for page in sorted(folder.glob("*.md")):
        sections = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for names, body in zip(sections[1::2], sections[2::2], strict=True):
            blocks = re.findall(r"^```pycon\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)
            for name in names.split(", "):
                sessions[name] = "\n".join(block.strip("\n") for block in blocks)
    return sessions


def batch() -> str:
    """What every example begins with, as a block."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    return str(re.findall(r"^```pycon\n.*?^```$", text, re.DOTALL | re.MULTILINE)[0])


def without_example() -> list[str]:
    """The public names that no example uses."""
    written = {name for name, session in examples().items() if f"pl.{name}" in session}
    return [entry.name for entry in entries() if entry.name not in written]


def reference_pages() -> dict[str, tuple[str, str]]:
    """The plain page and the one for Sphinx by their file name, in the order of `TOPICS`."""
    missing = without_example()
    if missing:
        raise SystemExit(f"These public names need an example in {EXAMPLES}: {', '.join(missing)}.")
    by_topic: dict[str, list[Entry]] = {}
    for entry in entries():
        by_topic.setdefault(entry.topic, []).append(entry)
    sessions = examples()
    pages = {}
    for address, title, _ in TOPICS:
        if address in by_topic:
            top = join(f"# {title}", "Every example begins with this batch:", batch())
            pages[f"{address}.md"] = _page(top, by_topic[address], sessions)
    for name in pl.compat.__all__:
        module = import_module(f"policyloss.compat.{name}")
        functions = [
            Entry(f"compat.{name}.{public}", getattr(module, public)) for public in module.__all__
        ]
        top = join(f"# Drop-ins: {name}", prose(module), DROP_INS)
        named = [entry for entry in functions if not inspect.ismodule(entry.value)]
        pages[f"compat_{name}.md"] = _page(top, named, {})
    return pages


def _page(top: str, found: list[Entry], sessions: dict[str, str]) -> tuple[str, str]:
    """The plain page and the one for Sphinx; a name that has no session stands without one."""
    plain, marked = [top], [top]
    for entry in sorted(found, key=lambda entry: entry.name.lower()):
        session = fenced(sessions[entry.name], "pycon") if entry.name in sessions else ""
        plain.append(join(f"## {entry.name}", *_plain(entry, session)))
        marked.append(_marked(entry, session))
    return join(*plain), join(*marked)


def _plain(entry: Entry, session: str) -> Iterator[str]:
    yield fenced(f"pl.{entry.name}{_signature(entry.value)}", "python")
    yield prose(entry.value)
    for name, member in members(entry.value):
        yield f"**`.{name}{_signature(member)}`** {prose(member)}"
    yield f"Example:\n\n{session}" if session else ""


def _marked(entry: Entry, session: str) -> str:
    """The same as a directive, by which Sphinx fills its index and finds the name in a search."""
    kind = "class" if inspect.isclass(entry.value) else "function"
    kind = kind if callable(entry.value) else "data"
    body = [prose(entry.value), *(["**Example**", session] if session else [])]
    for name, member in members(entry.value):
        inner = "method" if callable(member) else "property"
        body.append(f":::{{py:{inner}}} {name}{_signature(member)}\n\n{prose(member)}\n:::")
    text = "\n\n".join(body)
    directive = f"::::{{py:{kind}}} {entry.name}{_signature(entry.value)}"
    return f"{directive}\n:module: policyloss\n\n{text}\n::::"


def _signature(value: Any) -> str:
    """The arguments, without annotations that a line could not hold."""
    if isinstance(value, property) or not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "()"
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"<([\w.]+)[^>]*>", r"\1", text)


def members(value: Any) -> list[tuple[str, Any]]:
    """The documented methods and properties that a class defines itself."""
    if not inspect.isclass(value) or value.__module__.startswith("policyloss.parts."):
        return []  # what a part computes is its docstring; its methods serve the pipeline
    chosen = []
    for name, member in vars(value).items():
        member = getattr(member, "__func__", member)
        described = isinstance(member, property) or inspect.isfunction(member)
        if not name.startswith("_") and described and member.__doc__:
            chosen.append((name, member))
    return chosen


def prose(value: Any) -> str:
    """A docstring as Markdown: what Markdown would read as a mark of its own is escaped."""
    if not callable(value) and not isinstance(value, (property, ModuleType)):
        return f"A `{type(value).__name__}`."
    text = inspect.getdoc(value) or ""
    if is_dataclass(value) and text.startswith(f"{value.__name__}("):  # type: ignore[union-attr]
        return ""
    parts = re.split(r"(`[^`]*`|^    .*$)", text, flags=re.MULTILINE)
    return "".join(
        part if i % 2 else re.sub(r"([*<\[\]])", r"\\\1", part) for i, part in enumerate(parts)
    )
