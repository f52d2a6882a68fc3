"""The named preference losses: data, with a source for every number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from policyloss.arguments import description
from policyloss.errors import InputError, match_name, unknown_name
from policyloss.preference.spec import (
    Hinge,
    Logistic,
    LogisticOrExponential,
    PreferenceSpec,
    ReverseKL,
    Score,
    Sigmoid,
    Square,
    Term,
)

AnyPreference: TypeAlias = PreferenceSpec | str


@dataclass(frozen=True)
class NamedPreference:
    """A preference loss, its paper, and where each number comes from, by the name of its field."""

    spec: PreferenceSpec
    paper: str
    sources: dict[str, str]


def _entry(terms: Any, source: str, **settings: Any) -> NamedPreference:
    """source: the paper, then "; field: source" for the numbers."""
    paper, *numbers = source.split("; ")
    spec = PreferenceSpec(terms, **settings)
    return NamedPreference(spec, paper, dict(entry.split(": ", 1) for entry in numbers))


def _both_sides(link: Any, weight: float = 1.0) -> tuple[Term, Term]:
    return Term(link, "chosen", weight=weight), Term(link, "rejected", weight=weight)


_DPO, _TRL = Logistic(0.1), "beta: default of TRL 1.16"
_APO = "beta: arXiv 2408.06266, section 5.2"

PREFERENCES: dict[str, NamedPreference] = {
    "dpo": _entry(_DPO, "arXiv 2305.18290; beta: arXiv 2305.18290, appendix B"),
    "hinge": _entry(Hinge(0.1), f"arXiv 2305.10425 (SLiC-HF), section 2; {_TRL}"),
    "ipo": _entry(
        Term(Square(0.1), score=Score(length="mean")), f"arXiv 2310.12036, equation 17; {_TRL}"
    ),
    "exo_pair": _entry(
        ReverseKL(0.1, 1e-3),
        "arXiv 2402.00856, equation 16; beta: arXiv 2402.00856, appendix B; "
        "smoothing: arXiv 2402.00856, by TRL 1.16's DPOConfig",
    ),
    "nca_pair": _entry(
        (
            Term(Logistic(0.01), "chosen"),
            Term(Logistic(0.01), "against_chosen", weight=0.5),
            Term(Logistic(0.01), "rejected", weight=0.5),
        ),
        "arXiv 2402.05369, section 4.1; beta: arXiv 2402.05369, appendix C; "
        "weight: arXiv 2402.05369, one of two answers",
    ),
    "robust": _entry(
        Logistic(0.01, smoothing=-0.125),
        "arXiv 2403.00409, section 3.1; beta: arXiv 2403.00409, appendix B; "
        "smoothing: −ε/(1 − 2ε), ε = 0.1 in arXiv 2403.00409, section 6",
    ),
    "bco_pair": _entry(
        _both_sides(Logistic(0.01)),
        "arXiv 2404.04656, section 4, without its reward shift; beta: arXiv 2404.04656, appendix C",
    ),
    "sppo_hard": _entry(_both_sides(Square(0.1)), f"arXiv 2405.00675, equation 4.7; {_TRL}"),
    "aot": _entry(Term(_DPO, "ranked_pair"), f"arXiv 2406.05882, section 3; {_TRL}"),
    "aot_unpaired": _entry(Term(_DPO, "ranked_sides"), f"arXiv 2406.05882, section 3; {_TRL}"),
    "apo_zero": _entry(_both_sides(Sigmoid(0.1)), f"arXiv 2408.06266, equation 7; {_APO}"),
    "apo_down": _entry(
        (Sigmoid(0.1), Term(Sigmoid(0.1), "against_chosen")),
        f"arXiv 2408.06266, equation 8; {_APO}",
    ),
    "discopop": _entry(
        LogisticOrExponential(0.05, 0.05),
        "arXiv 2406.08414, equation 5; beta: arXiv 2406.08414, appendix B.1; "
        "tau: arXiv 2406.08414, appendix E",
    ),
    "mpo": _entry(
        (Term(_DPO, weight=0.8), *_both_sides(_DPO, 0.2)),
        f"arXiv 2411.10442; {_TRL}; weight: TRL 1.16's DPOConfig for MPO; "
        "nll: TRL 1.16's DPOConfig for MPO",
        nll=1.0,
    ),
    "kto": _entry(
        _both_sides(Sigmoid(0.1)),
        f"arXiv 2402.01306, equation 7; {_TRL}",
        over="sequences",
        baseline=True,
    ),
    "orpo": _entry(
        Term(Logistic(1.0), score=Score(None, "mean", shape="log_odds"), weight=0.1),
        "arXiv 2403.07691, equations 4 and 7; beta: arXiv 2403.07691, equation 7 has no scale; "
        "weight: default of TRL 1.16's ORPOConfig (beta); nll: arXiv 2403.07691, one",
        nll=1.0,
    ),
    "cpo": _entry(
        Term(_DPO, score=Score(reference=None)),
        f"arXiv 2401.08417, equation 3; {_TRL}; nll: default of TRL 1.16's CPOConfig (cpo_alpha)",
        nll=1.0,
    ),
    "simpo": _entry(
        Term(Logistic(2.0, target=1.0), score=Score(None, "mean")),
        "arXiv 2405.14734; beta: the authors' README, Llama3-Base; "
        "target: the authors' README, Llama3-Base, γ/β = 0.5",
    ),
    "alphapo": _entry(
        Term(Logistic(2.5, target=0.1), score=Score(None, "mean", alpha=0.75)),
        "arXiv 2501.03884; beta: arXiv 2501.03884, table 3, Mistral-Instruct; target: as beta; "
        "alpha: as beta, 1 − 0.25",
    ),
}


def presets() -> tuple[str, ...]:
    """The names of all preference losses."""
    return tuple(PREFERENCES)


def preset(name: str, **values: Any) -> PreferenceSpec:
    """The preference loss called `name`; `values` replace fields in every part that has them.

    pl.preference.preset("dpo", beta=0.05)  # presets() lists the names
    """
    return as_preference(name).with_fields(**values)


def as_preference(spec: AnyPreference) -> PreferenceSpec:
    """`spec` itself, or the preference loss of that name; an error suggests the nearest name."""
    if isinstance(spec, PreferenceSpec):
        return spec
    if not isinstance(spec, str):
        raise InputError(
            "spec must be a PreferenceSpec or the name of a preference loss, got "
            f"{description(spec)}; policyloss.preference.presets() lists the names."
        )
    known = match_name(spec, PREFERENCES)
    if known is None:
        raise InputError("spec: " + unknown_name("preference loss", spec, PREFERENCES))
    return PREFERENCES[known].spec
