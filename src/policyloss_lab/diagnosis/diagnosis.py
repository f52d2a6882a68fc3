"""`Diagnosis`: the verdict, what it rests on, what to do, and what else was tested."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from policyloss import notebook
from policyloss_lab.diagnosis.causes import CAUSES, Correction


class Alternative(NamedTuple):
    """A hypothesis that was tested. unexplained: the share of the scale of the differences that it
    leaves, 1 for all of it.
    """

    cause: str
    sentence: str
    unexplained: float
    score: float

    @property
    def leaves(self) -> str:
        """The share in words; a hypothesis that makes things worse leaves all."""
        return f"{self.unexplained:.0%}" if self.unexplained < 0.995 else "all"


@dataclass(frozen=True)
class Diagnosis:
    """Why the engine and the trainer disagree.

    cause: a name of `CAUSES`, "healthy" or "not_explained". causes: all that were found, the
    largest first (two at most). confidence: from 0 to 1. evidence, remedy: sentences. correction:
    parts for the slot of that name that would have bounded the damage; None where there is none.
    floor: the noise that was measured, in nats of an unlikely token. details: the numbers that were
    fitted. alternatives: what else was tested, best first.
    """

    cause: str
    causes: tuple[str, ...]
    confidence: float
    evidence: tuple[str, ...]
    remedy: str
    correction: tuple[Correction, ...] | None
    floor: float
    tokens: int
    details: Mapping[str, Any] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return self.cause == "healthy"

    @property
    def title(self) -> str:
        """The causes in a few words."""
        return " and ".join(CAUSES[cause].title for cause in self.causes)

    def because_of(self, cause: str, evidence: Sequence[str]) -> Diagnosis:
        """The same with a cause that is known for certain in the first place."""
        return replace(
            self,
            cause=cause,
            causes=(cause,),
            confidence=0.99,
            evidence=(*evidence, *(e for e in self.evidence if e not in evidence)),
            remedy=CAUSES[cause].remedy,
            correction=CAUSES[cause].correction,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; the correction as the parts' names and numbers."""
        return {
            "cause": self.cause,
            "causes": list(self.causes),
            "confidence": round(self.confidence, 4),
            "tokens": self.tokens,
            "floor": _plain(self.floor),
            "evidence": list(self.evidence),
            "remedy": self.remedy,
            "correction": None if self.correction is None else [repr(p) for p in self.correction],
            "details": {name: _plain(value) for name, value in self.details.items()},
            "alternatives": [
                {**a._asdict(), "unexplained": _plain(a.unexplained), "score": _plain(a.score)}
                for a in self.alternatives
            ],
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [f"{self.title} (confidence {self.confidence:.0%}, {self.tokens} tokens)"]
        lines += [f"  {sentence}" for sentence in self.evidence]
        lines += [f"remedy: {self.remedy}"]
        if self.correction:
            lines.append(f"until then: correction={_parts(self.correction)}")
        if self.alternatives:
            lines.append("also tested, with what each leaves unexplained:")
            lines += [
                f"  {a.leaves:>5}  {CAUSES[a.cause].title}: {a.sentence}"
                for a in self.alternatives[:5]
                if a.cause in CAUSES
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (a.leaves, CAUSES[a.cause].title, a.sentence)
            for a in self.alternatives
            if a.cause in CAUSES
        ]
        until = f"Until then: correction={_parts(self.correction)}" if self.correction else ""
        return (
            notebook.heading(f"{self.title} (confidence {self.confidence:.0%})")
            + notebook.listed(self.evidence)
            + notebook.paragraphs(f"Remedy: {self.remedy}", until)
            + notebook.table(("unexplained", "cause", "hypothesis"), rows)
        )


def _parts(correction: tuple[Correction, ...]) -> str:
    texts = [repr(part) for part in correction]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _plain(value: Any) -> Any:
    """A number that strict JSON can hold."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value
