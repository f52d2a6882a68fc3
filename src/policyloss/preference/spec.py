"""`PreferenceSpec`: a preference loss as a value, and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policyloss.errors import SpecError, safe_repr, unknown_name
from policyloss.parts.data import check_depth, make_part
from policyloss.parts.validate import LowerBound, Part
from policyloss.preference.parts import LINKS, ONE_SIDED, RANKED, Score, Term


@dataclass(frozen=True)
class PreferenceSpec(Part):
    """A preference loss: the mean over pairs of `Σ weight · link(margin)`, plus `nll` times the
    mean of `−logp` over the chosen tokens.

    terms: one `Term` or several; a link stands for `Term(link)`. over: the mean is over "pairs", or
    over "sequences" that have a label each and no partner (KTO). baseline: whether the call passes
    a number z from which scores are measured (see `Term`). weighting: "wpo" multiplies the terms of
    a pair by `exp` of the mean of `logp − log Σp²` over the tokens of each of its answers.
    """

    terms: Any
    nll: LowerBound = 0.0
    over: Literal["pairs", "sequences"] = "pairs"
    baseline: bool = False
    weighting: Literal["wpo"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        terms = self.terms if isinstance(self.terms, (tuple, list)) else (self.terms,)
        terms = tuple(term if isinstance(term, Term) else Term(term) for term in terms)
        object.__setattr__(self, "terms", terms)
        if not isinstance(self.baseline, bool):
            raise SpecError(f"baseline must be True or False, got {safe_repr(self.baseline)}.")
        if self.over == "sequences" and any(
            term.margin not in ONE_SIDED or term.score.tail != 1 for term in terms
        ):
            raise SpecError(
                'over="sequences" has no pairs: every margin must be one of '
                f"{', '.join(ONE_SIDED)}, and every Score.tail 1."
            )
        if self.ranks and self.weighting:
            raise SpecError("a margin by rank mixes pairs, which then have no weight each.")

    @property
    def ranks(self) -> bool:
        """Whether a margin depends on the rank of a pair among all pairs (AOT)."""
        return any(term.margin in RANKED for term in self.terms)

    def with_fields(self, **values: Any) -> PreferenceSpec:
        """The same loss with other numbers or words, in every part that has them: `beta=0.2`."""
        data: Any = self.to_dict()
        for name, value in values.items():
            names: set[str] = set()
            data = _with_value(data, name, value, names)
            if name not in names:
                raise SpecError(unknown_name("field of this loss", name, sorted(names)))
        return self.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON-ready): each part as {"type": its name, …its fields}."""
        return {f.name: _encoded(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PreferenceSpec:
        """The inverse of `to_dict`. Strict: an error names the valid fields, types or values."""
        if not isinstance(data, Mapping):
            raise SpecError(f"data must be a mapping, as to_dict makes it, got {safe_repr(data)}.")
        check_depth(data)
        spec: PreferenceSpec = make_part(cls, {name: _decoded(x) for name, x in data.items()})
        return spec


_PARTS: dict[str, Any] = {part.__name__: part for part in (Term, Score, *LINKS)}


def _encoded(x: Any) -> Any:
    if isinstance(x, tuple):
        return [_encoded(part) for part in x]
    if type(x) in _PARTS.values():
        fields = {f.name: _encoded(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"type": type(x).__name__, **fields}
    if callable(x):
        raise SpecError(f"this loss holds a callable ({x!r}), which cannot be written as data.")
    return x


def _decoded(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(map(_decoded, x))
    if not isinstance(x, Mapping):
        return x
    name, values = x.get("type"), {key: _decoded(y) for key, y in x.items() if key != "type"}
    if not isinstance(name, str) or name not in _PARTS:
        raise SpecError(unknown_name("type of a part", name, _PARTS))
    return make_part(_PARTS[name], values)


def _with_value(data: Any, name: str, value: Any, names: set[str]) -> Any:
    """`data` with `value` under every key `name` of a number or word; collects all such names."""
    if isinstance(data, list):
        return [_with_value(x, name, value, names) for x in data]
    if not isinstance(data, dict):
        return data
    names |= {key for key, x in data.items() if not isinstance(x, (dict, list)) and key != "type"}
    changed = {key: _with_value(x, name, value, names) for key, x in data.items()}
    return {**changed, name: value} if name in changed and name in names else changed
