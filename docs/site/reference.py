"""The pages of *Reference*: each public name with its signature, its docstring and an example.

The examples are in docs/examples: a section `## name, other_name` holds the example of these
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
from typing import Any, NamedTuple

import policyloss as pl
import policyloss_lab as lab
from docs.markdown import fenced, join

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODULES = {"": pl, "advantage.": pl.advantage, "functional.": pl.functional}
MODULES |= {"preference.": pl.preference, "hf.": pl.hf, "lab.": lab, "lab.report.": lab.report}


class Topic(NamedTuple):
    """A page: its address, title and summary, the modules whose names are there, and the first
    name.
    """

    address: str
    title: str
    about: str
    modules: tuple[str, ...]
    first: str = ""


# A name goes to the first page that fits, so the last page takes the remaining names.
TOPICS = (
    Topic(
        "loss",
        "The loss",
        "Policy and value losses of log-probabilities, their averages, and their metrics.",
        ("loss", "value", "compiled"),
        "policy_loss",
    ),
    Topic(
        "spec",
        "Losses as values",
        "A loss is a frozen value: take a preset, change a number or a part, write it as JSON.",
        ("spec", "mixture", "catalogue", "errors"),
        "preset",
    ),
    Topic(
        "explain",
        "Explain and compare",
        "The formula of a loss, the source of each number, its traps, and how two losses differ.",
        ("explanations",),
        "explain",
    ),
    Topic(
        "own",
        "A part of your own",
        "The tensors that your own function receives in a slot of a loss.",
        ("tokens",),
    ),
    Topic(
        "ratio",
        "Parts: ratio",
        "Parts for the slot `ratio`: one ratio per token, sequence or turn.",
        ("parts.ratio",),
        "TokenRatio",
    ),
    Topic(
        "trust",
        "Parts: trust region",
        "Parts for the slot `trust`, which limit how far a step moves the policy.",
        ("parts.trust",),
        "Clip",
    ),
    Topic(
        "correction",
        "Parts: rollout correction",
        "Parts for the slot `correction`, for completions of an engine that is not the trainer.",
        ("parts.correction",),
        "Truncate",
    ),
    Topic(
        "pulls",
        "Parts: KL and divergence",
        "Parts for the slot `kl`: a pull to a reference model or to a teacher.",
        ("parts.kl",),
        "KL",
    ),
    Topic(
        "aggregate",
        "Parts: aggregation",
        "Parts for the slot `aggregate`, which average the losses of the tokens.",
        ("parts.aggregate",),
        "TokenMean",
    ),
    Topic(
        "step",
        "A whole optimizer step",
        "Micro-batches and ranks with the counts of the whole step, and metrics that add up.",
        ("accumulation", "totals", "metrics", "records", "controllers", "mismatch"),
        "accumulate",
    ),
    Topic(
        "advantage",
        "Advantages",
        "Advantages from rewards, from a critic, or from a teacher.",
        ("advantage",),
        "advantage.grpo",
    ),
    Topic(
        "preference",
        "Preference losses",
        "DPO, KTO, ORPO, CPO and their relatives, as compositions of score, margin and link.",
        ("preference",),
        "preference_loss",
    ),
    Topic(
        "head",
        "The head",
        "The loss and log-probabilities of hidden states, without keeping all logits.",
        ("head", "teacher", "hf"),
        "linear_policy_loss",
    ),
    Topic(
        "check",
        "Checks",
        "Tests for your training loop, your own loss, and the bits of a result.",
        ("check", "functional.exact"),
        "partition_check",
    ),
    Topic(
        "doctor",
        "The doctor",
        "Why the rollout engine and the trainer disagree, and the faults of a run.",
        ("policyloss_lab.diagnosis",),
        "lab.doctor",
    ),
    Topic(
        "whatif",
        "What if",
        "Every loss on the tokens that a run stored.",
        ("policyloss_lab.whatif",),
        "lab.what_if",
    ),
    Topic(
        "report",
        "Recorder and report",
        "Write down the steps of your own loop, and draw runs as one HTML page.",
        ("policyloss_lab",),
        "lab.Recorder",
    ),
    Topic(
        "functional",
        "Pure functions",
        "The formulas as functions of tensors, for a loss that you write yourself.",
        ("functional",),
    ),
)


DROP_INS = (
    "The names are those of the framework. [How to use them](../guides/frameworks.md) has the "
    "examples, and [conformance](../guides/conformance.md) the results."
)


@dataclass(frozen=True)
class Entry:
    """A public name. name: as written after `pl.`, or with `lab.`; value: the thing it names."""

    name: str
    value: Any

    @property
    def written(self) -> str:
        """The name as a user writes it."""
        return self.name if self.name.startswith("lab.") else f"pl.{self.name}"

    @property
    def topic(self) -> str:
        """The address of its page."""
        module = getattr(self.value, "__module__", "policyloss.").removeprefix("policyloss.")
        if "." in self.name and not self.name.startswith("lab."):
            module = self.name
        return next(topic.address for topic in TOPICS if module.startswith(topic.modules))


def entries() -> list[Entry]:
    """Every public name of the library and the lab, without the modules themselves and without
    second names for the same thing.
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
    """The common beginning of all examples, as a block."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    return str(re.findall(r"^```pycon\n.*?^```$", text, re.DOTALL | re.MULTILINE)[0])


def without_example() -> list[str]:
    """The public names that no example uses."""
    sessions = examples()
    return [e.name for e in entries() if e.written not in sessions.get(e.name, "")]


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
    for topic in TOPICS:
        top = join(
            f"# {topic.title}", topic.about, "Every example begins with this batch:", batch()
        )
        pages[f"{topic.address}.md"] = _page(top, by_topic[topic.address], sessions, topic.first)
    for name in pl.compat.__all__:
        module = import_module(f"policyloss.compat.{name}")
        functions = [
            Entry(f"compat.{name}.{public}", getattr(module, public)) for public in module.__all__
        ]
        top = join(f"# Drop-ins: {name}", prose(module), DROP_INS)
        named = [entry for entry in functions if not inspect.ismodule(entry.value)]
        pages[f"compat_{name}.md"] = _page(top, named, {}, "")
    return pages


def _page(top: str, found: list[Entry], sessions: dict[str, str], first: str) -> tuple[str, str]:
    """The plain page and the one for Sphinx; a name may have no session."""
    plain, marked = [top], [top]
    for entry in sorted(found, key=lambda entry: (entry.name != first, entry.name.lower())):
        session = fenced(sessions[entry.name], "pycon") if entry.name in sessions else ""
        plain.append(join(f"## {entry.name}", *_plain(entry, session)))
        marked.append(_marked(entry, session))
    return join(*plain), join(*marked)


def _plain(entry: Entry, session: str) -> Iterator[str]:
    yield fenced(_wrapped(f"{entry.written}{signature(entry.value)}"), "python")
    yield prose(entry.value)
    for name, member in members(entry.value):
        yield f"**`.{name}{signature(member)}`** {prose(member)}"
    yield f"Example:\n\n{session}" if session else ""


def _marked(entry: Entry, session: str) -> str:
    """The same as a directive, by which Sphinx fills its index and finds the name in a search."""
    kind = "class" if inspect.isclass(entry.value) else "function"
    kind = kind if callable(entry.value) else "data"
    body = [prose(entry.value), *(["**Example**", session] if session else [])]
    for name, member in members(entry.value):
        inner = "method" if callable(member) else "property"
        body.append(f":::{{py:{inner}}} {name}{signature(member)}\n\n{prose(member)}\n:::")
    text = "\n\n".join(body)
    module = "policyloss_lab" if entry.written == entry.name else "policyloss"
    directive = f"::::{{py:{kind}}} {entry.name.removeprefix('lab.')}{signature(entry.value)}"
    return f"{directive}\n:module: {module}\n\n{text}\n::::"


def _wrapped(call: str) -> str:
    """A call with one argument on a line, if it does not fit on one line."""
    if len(call) <= 88:
        return call
    head, _, rest = call.partition("(")
    body, _, end = rest.rpartition(")")
    arguments = re.split(r", (?=\w+:|\*|/)", body)
    return "\n".join([f"{head}(", *(f"    {argument}," for argument in arguments), f"){end}"])


class _Type:
    """An annotation that a signature shows without quotes, and without the names of modules."""

    def __init__(self, annotation: Any) -> None:
        written = isinstance(annotation, str)
        text = annotation if written else inspect.formatannotation(annotation)
        self._text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)

    def __repr__(self) -> str:
        return self._text


def signature(value: Any) -> str:
    """The arguments with their types, and the type of the result."""
    if isinstance(value, property) or not callable(value):
        return ""
    try:
        declared = inspect.signature(value)
    except (TypeError, ValueError):
        return "()"
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=a if (a := parameter.annotation) is empty else _Type(a))
        for name, parameter in declared.parameters.items()
        if name != "self"
    ]
    result = declared.return_annotation
    result = empty if inspect.isclass(value) or result is empty else _Type(result)
    text = str(declared.replace(parameters=parameters, return_annotation=result))
    return re.sub(r"<([\w.]+)[^>]*>", r"\1", text)


def members(value: Any) -> list[tuple[str, Any]]:
    """The documented methods and properties that a class defines itself."""
    if not inspect.isclass(value) or value.__module__.startswith("policyloss.parts."):
        return []  # a part's docstring describes its computation; its methods serve the pipeline
    chosen = []
    for name, member in vars(value).items():
        member = getattr(member, "__func__", member)
        described = isinstance(member, property) or inspect.isfunction(member)
        if not name.startswith("_") and described and member.__doc__:
            chosen.append((name, member))
    return chosen


def prose(value: Any) -> str:
    """A docstring as Markdown, with characters escaped that Markdown would read as marks."""
    if not callable(value) and not isinstance(value, (property, ModuleType)):
        return f"A `{type(value).__name__}`."
    text = inspect.getdoc(value) or ""
    if is_dataclass(value) and text.startswith(f"{value.__name__}("):  # type: ignore[union-attr]
        return ""
    parts = re.split(r"(`[^`]*`|^    .*$)", text, flags=re.MULTILINE)
    return "".join(
        part if i % 2 else re.sub(r"([*<\[\]])", r"\\\1", part) for i, part in enumerate(parts)
    )
