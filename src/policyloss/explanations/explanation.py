"""`explain` describes a loss in verifiable words, as a page of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

from policyloss.catalogue import AnyLoss, Preset, as_spec, presets_equal_to
from policyloss.catalogue.nearest import nearest_preset
from policyloss.explanations.difference import entry, plain
from policyloss.explanations.formula import Formula, formula
from policyloss.explanations.framework_names import FrameworkNames
from policyloss.explanations.sources import SourcedValue, sources
from policyloss.explanations.traits import describe, elsewhere
from policyloss.explanations.traps import Trap, traps
from policyloss.explanations.zero_gradient import Condition, ZeroGradient, zero_gradient
from policyloss.mixture import Mixture
from policyloss.notebook import heading, html_list, html_text, paragraphs, table
from policyloss.output import section
from policyloss.parts.wording import number
from policyloss.spec import LossSpec


@dataclass(frozen=True)
class Explanation:
    """A loss in words. `str()` returns a page of plain text, `to_dict()` JSON-ready data.

    preset: the name of this preset, or None. also: other presets with the same loss. near: the
    preset of which it is a small change. advantage: the estimator of `policyloss.advantage` with
    which the preset (or the nearest one) is defined, None for any; advantage_source: its source.
    formula: lines in the argument names of `policy_loss`. words: a sentence per slot. numbers:
    every choice and number with its source. reads: the tensors it needs. zero: the tokens that get
    exactly no gradient from the policy term. elsewhere: the names of its parts in frameworks.
    traps: common surprises.
    """

    spec: LossSpec
    title: str
    preset: str | None
    also: tuple[str, ...]
    near: str | None
    paper: str
    note: str
    advantage: str | None
    advantage_source: str
    formula: Formula
    words: dict[str, str]
    numbers: tuple[SourcedValue, ...]
    reads: tuple[str, ...]
    zero: ZeroGradient
    elsewhere: tuple[FrameworkNames, ...]
    traps: tuple[Trap, ...]

    @property
    def still_moved_by(self) -> str:
        """The other terms that move a token without policy gradient, as a sentence or ""."""
        pulls, of_teacher = self.spec.kl_parts, self.spec.divergence is not None
        terms = ["the KL term"] if len(pulls) > of_teacher else []
        terms += ["the divergence from the teacher"] if of_teacher else []
        terms += ["the entropy bonus"] if self.spec.entropy_coef else []
        unless = "" if self.spec.rejected == "keep" else ", unless it was rejected"
        if not terms:
            return ""
        moves = "move" if terms[1:] else "moves"
        return f"There {' and '.join(terms)} still {moves} the token{unless}."

    @property
    def advantages(self) -> str:
        """A sentence on the advantages that the loss is defined with."""
        if self.advantage is None:
            return "any: it is not defined with advantages of its own."
        return f"advantage.{self.advantage}; {self.advantage_source}."

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        plain_fields = ("title", "preset", "near", "paper", "note", "advantage", "advantage_source")
        return {
            **{name: getattr(self, name) for name in plain_fields},
            "also": list(self.also),
            "formula": [line._asdict() for line in self.formula.lines],
            "formula_is_exact": self.formula.exact,
            "callables": [c._asdict() for c in self.formula.callables],
            "vocabulary": self.formula.vocabulary,
            "words": self.words,
            "reads": list(self.reads),
            "numbers": [
                {"where": n.where, "value": plain(n.value), "source": n.source}
                for n in self.numbers
            ],
            "zero_gradient": {
                "known": self.zero.known,
                "alone": [c._asdict() for c in self.zero.alone],
                "together": [c._asdict() for c in self.zero.together],
                "group": self.zero.group if self.zero.together else None,
                "still_moved_by": self.still_moved_by,
            },
            "elsewhere": [{"part": e.part, "names": e.names} for e in self.elsewhere],
            "traps": [{"slot": t.slot, "text": t.text} for t in self.traps],
        }

    def __str__(self) -> str:
        names = [
            line
            for one in self.elsewhere
            for line in (f"{one.part}:", *(f"  {who}: {x}" for who, x in one.names.items()))
        ]
        sections = [
            ("", _heading(self)),
            ("Formula", _formula(self)),
            ("In words", [f"{slot}: {text}." for slot, text in self.words.items()]),
            ("Reads", [", ".join(self.reads)]),
            ("Advantages", [self.advantages]),
            ("Numbers", _numbers(self)),
            ("No gradient", _zero_lines(self)),
            ("Elsewhere", names),
            ("Traps", [f"- {t.text}" for t in self.traps]),
        ]
        return "\n\n".join(section(title, lines) for title, lines in sections if lines)

    def _repr_html_(self) -> str:
        """The explanation as HTML, for a notebook."""
        title, *rest = _heading(self)
        remarks = [line for line in _formula(self) if not line.startswith("  ")]
        numbers = [
            (n.where, entry(n.value), source)
            for n, source in zip(self.numbers, shorten_sources(self.numbers), strict=True)
        ]
        sections = {
            "Formula": html_text(str(self.formula)) + paragraphs(*remarks),
            "In words": html_list(f"{slot}: {text}." for slot, text in self.words.items()),
            "Reads": paragraphs(", ".join(self.reads)),
            "Numbers": table(("", "value", "source"), numbers),
            "No gradient": html_text("\n".join(_zero_lines(self))),
            "Elsewhere": html_list(
                f"{e.part}, {who}: {called}"
                for e in self.elsewhere
                for who, called in e.names.items()
            ),
            "Traps": html_list(trap.text for trap in self.traps),
        }
        body = "".join(heading(name) + html for name, html in sections.items() if html)
        return heading(title) + paragraphs(*rest) + body


@dataclass(frozen=True)
class MixtureExplanation:
    """A mixture in words: its sum, and the explanation of each stream.

    `str()` returns a page of plain text, `to_dict()` JSON-ready data.
    """

    mixture: Mixture
    streams: dict[str, Explanation]

    @property
    def formula(self) -> str:
        """The sum over the streams, as one line."""
        weights = {name: stream.weight for name, stream in self.mixture.streams.items()}
        terms = [n if w == 1 else f"{number(w)} * {n}" for n, w in weights.items()]
        return f"loss = {' + '.join(terms)}"

    @property
    def tokens(self) -> dict[str, str]:
        """The tokens and advantages of each stream, in words."""
        sentences = {}
        for name, stream in self.mixture.streams.items():
            masks = "mask" if stream.mask is None else f"mask & extras[{stream.mask!r}]"
            of_call = stream.advantage is None
            numbers = "of the call" if of_call else f"{number(stream.advantage)} at every token"
            sentences[name] = f"over {masks} and its own counts of the step; advantages: {numbers}"
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        streams = {name: each.to_dict() for name, each in self.streams.items()}
        return {"formula": self.formula, "tokens": self.tokens, "streams": streams}

    def __str__(self) -> str:
        lines = [f"  {self.formula}", *(f"  {n}: {text}" for n, text in self.tokens.items())]
        pages = [f"# {name}\n\n{each}" for name, each in self.streams.items()]
        title = f"A mixture of {len(self.streams)} streams"
        return "\n\n".join([title, section("Formula", lines), *pages])

    def _repr_html_(self) -> str:
        """The explanation as HTML, for a notebook."""
        rows = list(self.tokens.items())
        pages = "".join(heading(n) + each._repr_html_() for n, each in self.streams.items())
        return html_text(self.formula) + table(("stream", "tokens"), rows) + pages


@overload
def explain(spec: Mixture) -> MixtureExplanation: ...
@overload
def explain(spec: AnyLoss) -> Explanation: ...
def explain(spec: AnyLoss | Mixture) -> Explanation | MixtureExplanation:
    """Explain `spec`: a `LossSpec`, the name of a preset, a function of `Tokens`, or a `Mixture`.

    The explanation has the formula, the settings with their sources, where the gradient is zero,
    the names in other frameworks, and pitfalls; for a mixture, it has these for each stream. For a
    TRL `GRPOConfig`, see `policyloss.compat.trl.explain_config`.
    """
    if isinstance(spec, Mixture):
        streams = {name: explain(stream.loss) for name, stream in spec.streams.items()}
        return MixtureExplanation(spec, streams)
    spec = as_spec(spec)
    base, is_preset = nearest_preset(spec)
    exact = base if is_preset else None
    return Explanation(
        spec=spec,
        title=_title(exact, base),
        preset=exact.name if exact else None,
        also=tuple(p.name for p in presets_equal_to(spec) if p is not base),
        near=base.name if base and not exact else None,
        paper=base.paper if base else "",
        note=exact.note if exact else "",
        advantage=base.advantage if base else None,
        advantage_source=base.sources.get("advantage", "") if base else "",
        formula=formula(spec),
        words=describe(spec),
        numbers=sources(spec, base),
        reads=("logp", "advantages", "mask", *spec.reads),
        zero=zero_gradient(spec),
        elsewhere=elsewhere(spec),
        traps=traps(spec),
    )


def _title(exact: Preset | None, base: Preset | None) -> str:
    if exact is not None:
        return exact.title
    return f"A change of {base.name} ({base.title})" if base is not None else "A loss of your own"


def _heading(e: Explanation) -> list[str]:
    lines = [e.title]
    if e.preset:
        also = f", the same loss as {', '.join(e.also)}" if e.also else ""
        lines.append(f'preset "{e.preset}"{also}; {e.paper}')
    elif e.near:
        lines.append(f'nearest preset "{e.near}", {e.paper}; `diff` shows the change')
    return [*lines, e.note] if e.note else lines


def _formula(e: Explanation) -> list[str]:
    lines = [f"  {line}" for line in e.formula.lines]
    for c in e.formula.callables:
        doc = f" Its docstring: {c.doc}" if c.doc else ""
        text = "slot is a callable, whose formula cannot be printed."
        lines.append(f"{c.name} in the {c.slot} {text}{doc}")
    if e.formula.vocabulary:
        lines.append("where " + "; ".join(e.formula.vocabulary.values()) + ".")
    if any(line.name == "mask" for line in e.formula.lines):
        lines.append(
            "Sums and counts use the mask of their line: below `mask = mask & keep`, the survivors."
        )
    return lines


def _numbers(e: Explanation) -> list[str]:
    width = max(len(n.where) for n in e.numbers)
    values = [str(entry(n.value, n.where)) for n in e.numbers]
    column = max(len(v) for v in values)
    rows = zip(e.numbers, values, shorten_sources(e.numbers), strict=True)
    return [f"  {n.where:<{width}}  {value:<{column}}  {source}" for n, value, source in rows]


def shorten_sources(numbers: tuple[SourcedValue, ...]) -> list[str]:
    """The sources, with "the same" for a long source that repeats the row above."""
    above = ["", *(n.source for n in numbers[:-1])]
    return [
        "the same" if n.source == a and "." in n.where and len(a) > 24 else n.source
        for n, a in zip(numbers, above, strict=True)
    ]


def _zero_lines(e: Explanation) -> list[str]:
    """When the policy term gives a token no gradient, in lines."""
    if not e.zero.known:
        return ["A callable decides which tokens get no gradient, so they are not known here."]
    lines, start = [], "The gradient is shared: a token gets exactly none where"
    if e.zero.alone:
        lines += ["A token gets exactly no gradient from the policy term where"]
        lines += _conditions(e.zero.alone)
        start = "It also gets none where"
    if e.zero.together:
        lines += [f"{start} every token of its {e.zero.group} meets one of"]
        lines += _conditions(e.zero.together)
    return [*lines, e.still_moved_by] if e.still_moved_by else lines


def _conditions(conditions: tuple[Condition, ...]) -> list[str]:
    width = max(len(c.expression) for c in conditions)
    return [f"  {c.expression:<{width}}  {c.meaning}" for c in conditions]
