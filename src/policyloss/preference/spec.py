"""`PreferenceSpec`: a preference loss as a value and as plain data. Its parts are the score of a
sequence, the margin of a pair, and the link.

Legend: w the chosen answer of a pair, l the rejected one; `x` `[S]` one number per sequence, `m`
`[P]` the margin of each pair. A link is called with `m` and returns a loss `[P]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from policyloss.errors import SpecError, safe_repr, unknown_name
from policyloss.functional import preference
from policyloss.parts.data import check_depth, field_paths, make_part, with_value
from policyloss.parts.validate import Finite, LowerBound, Part, bounds

Scale: TypeAlias = Annotated[float, bounds(above=0, finite=True)]


@dataclass(frozen=True)
class Score(Part):
    """The score of a sequence, `shape(x)`, where x is a sum or a mean over its tokens.

    reference: "ref" takes `logp − ref_logp` of each token, None `logp`. length: whether x is the
    "sum" over tokens or their "mean". tail: the weight of the tokens beyond the length of the
    shorter answer of a pair (LD-DPO); a mean still divides by the number of tokens. shape, with
    u = eˣ: "power" `(u^(α−1) − 1)/(α − 1)`, which is x for alpha = 1 (f-DPO's reverse KL) and
    `1 − 1/u` for alpha = 0 (its forward KL); "jensen_shannon" `log(2u/(1 + u))`; "log_odds"
    `log(u/(1 − u))` (ORPO). Only "power" reads alpha.
    """

    reference: Literal["ref"] | None = "ref"
    length: Literal["sum", "mean"] = "sum"
    tail: Annotated[float, bounds(least=0, most=1)] = 1.0
    shape: Literal["power", "jensen_shannon", "log_odds"] = "power"
    alpha: Finite = 1.0

    def shaped(self, x: Tensor) -> Tensor:
        """The scores `[S]` of sequences, from their sums or means."""
        if self.shape == "power":
            return preference.power_score(x, self.alpha)
        if self.shape == "jensen_shannon":
            return preference.jensen_shannon_score(x)
        return preference.log_odds(x)


@dataclass(frozen=True)
class Logistic(Part):
    """`−(1 − ε)·log σ(z) − ε·log σ(−z)` of `z = beta·m − target`: DPO.

    m is the margin of a `Term`. smoothing: ε, the probability that a label is wrong. For robust
    DPO (unbiased if a share p of the labels is wrong), pass `−p/(1 − 2p)`. target: SimPO's γ.
    """

    beta: Scale
    smoothing: Annotated[float, bounds(most=1, finite=True)] = 0.0
    target: Finite = 0.0

    def __call__(self, m: Tensor) -> Tensor:
        return preference.logistic(self.beta * m - self.target, self.smoothing)


@dataclass(frozen=True)
class Hinge(Part):
    """`max(0, 1 − beta·m)` of the margin m of a `Term` (SLiC)."""

    beta: Scale

    def __call__(self, m: Tensor) -> Tensor:
        return torch.relu(1 - self.beta * m)


@dataclass(frozen=True)
class Square(Part):
    """`(m − 1/(2·beta))²` of the margin m of a `Term` (IPO, whose τ is beta)."""

    beta: Scale

    def __call__(self, m: Tensor) -> Tensor:
        return (m - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True)
class ReverseKL(Part):
    """EXO: `KL(q‖p)`, q = (σ(z), σ(−z)), p = (1 − ε, ε), ε = smoothing, z = beta·m (m: `Term`)."""

    beta: Scale
    smoothing: Annotated[float, bounds(above=0, below=1)]

    def __call__(self, m: Tensor) -> Tensor:
        return preference.reverse_kl(self.beta * m, self.smoothing)


@dataclass(frozen=True)
class LogisticOrExponential(Part):
    """DiscoPOP: `−(1 − g)·log σ(z) + g·e⁻ᶻ` with g = σ(z/tau), z = beta·m (m: `Term`)."""

    beta: Scale
    tau: Scale

    def __call__(self, m: Tensor) -> Tensor:
        return preference.logistic_or_exponential(self.beta * m, self.tau)


@dataclass(frozen=True)
class Sigmoid(Part):
    """`σ(−beta·m)` of the margin m of a `Term`: a large |m| has little gradient (APO, KTO)."""

    beta: Scale

    def __call__(self, m: Tensor) -> Tensor:
        return torch.sigmoid(-self.beta * m)


LINKS = (Logistic, Hinge, Square, ReverseKL, LogisticOrExponential, Sigmoid)
# The margins of a sequence without a partner, and those for which all pairs are sorted.
ONE_SIDED, RANKED = ("chosen", "against_chosen", "rejected"), ("ranked_pair", "ranked_sides")


@dataclass(frozen=True)
class Term(Part):
    """One term of a preference loss: `weight · link(margin)`.

    link: a part of this module, or any callable `[P]` → `[P]`. margin, with the scores s_w and s_l
    (by `score`) and z, the `baseline` of `preference_loss` (or 0): "pair" `s_w − s_l`; "chosen"
    `s_w − z`; "against_chosen" `z − s_w`; "rejected" `z − s_l`; and the two of AOT: "ranked_sides",
    s_w minus the rejected score at the same place in sorted order; "ranked_pair", the difference of
    log-probabilities of w and l minus the reference's difference at the same place.
    """

    link: Any
    margin: Literal[
        "pair", "chosen", "against_chosen", "rejected", "ranked_pair", "ranked_sides"
    ] = "pair"
    score: Score = Score()
    weight: Finite = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.link, type) or not callable(self.link):
            names = ", ".join(link.__name__ for link in LINKS)
            raise SpecError(
                f"link must be one of {names}, or a callable, got {safe_repr(self.link)}."
            )
        if not isinstance(self.score, Score):
            raise SpecError(f"score must be a Score, got {safe_repr(self.score)}.")
        s = self.score
        if self.margin == "ranked_pair" and (s.reference, s.shape, s.alpha) != ("ref", "power", 1):
            raise SpecError(
                f'margin="ranked_pair" subtracts the reference itself; its score is {s!r}, and '
                'must have reference="ref", shape="power" and alpha=1.'
            )


@dataclass(frozen=True)
class PreferenceSpec(Part):
    """A preference loss: the mean over pairs of `Σ weight · link(margin)`, plus `nll` times the
    mean of `−logp` over the chosen tokens.

    terms: one `Term` or several; a link stands for `Term(link)`. over: the mean is over "pairs", or
    over "sequences" that have a label each and no partner (KTO). baseline: whether the call passes
    a number z from which scores are measured (see `Term`). weighting: "wpo" multiplies the terms of
    a pair by one factor for each answer, `exp(mean over its tokens of (logp − log Σp²))`, with Σ
    over the vocabulary.
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
        changed = self
        for name, value in values.items():
            paths = list(field_paths(changed))
            places = [path for path in paths if path[-1] == name]
            if not places:
                names = {str(path[-1]) for path in paths}
                raise SpecError(unknown_name("field of this loss", name, names))
            for place in places:
                changed = with_value(changed, place, value)
        return changed

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON-ready): each part as {"type": its name, …its fields}."""
        return {f.name: _encode(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PreferenceSpec:
        """The inverse of `to_dict`. Strict: an error names the valid fields, types or values."""
        if not isinstance(data, Mapping):
            raise SpecError(f"data must be a mapping, as to_dict makes it, got {safe_repr(data)}.")
        check_depth(data)
        spec: PreferenceSpec = make_part(cls, {name: _decode(x) for name, x in data.items()})
        return spec


_PARTS: dict[str, Any] = {part.__name__: part for part in (Term, Score, *LINKS)}


def _encode(x: Any) -> Any:
    if isinstance(x, tuple):
        return [_encode(part) for part in x]
    if type(x) in _PARTS.values():
        fields = {f.name: _encode(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"type": type(x).__name__, **fields}
    if callable(x):
        raise SpecError(f"this loss holds a callable ({x!r}), which cannot be written as data.")
    return x


def _decode(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(map(_decode, x))
    if not isinstance(x, Mapping):
        return x
    name, values = x.get("type"), {key: _decode(y) for key, y in x.items() if key != "type"}
    if not isinstance(name, str) or name not in _PARTS:
        raise SpecError(unknown_name("type of a part", name, _PARTS))
    return make_part(_PARTS[name], values)
