"""A formula is derived from the code that computes it, and `explain` names no part."""

from __future__ import annotations

import ast
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from formulas import assert_formula_holds, assert_zero_where_said, zero_batch
from walk import walked

import policyloss as pl
from cases import AGGREGATES, CORRECTIONS, KLS, RATIOS, TRUSTS, make_batch, swapped
from policyloss.explanations.algebra.derive import derive_formula, symbolic_tokens
from policyloss.explanations.algebra.expression import Expression, name, parse
from policyloss.explanations.formula import formula
from policyloss.functional import trust as functional_trust
from policyloss.parts import aggregate, correction, kl, ratio, trust
from policyloss.parts.wording import NO_ADVANTAGE, Condition, Slopes

EXPLAIN = Path(pl.__file__).parent / "explanations"


def lines(**slots: Any) -> list[str]:
    """The printed lines but those of the ratio and the average."""
    printed = formula(pl.LossSpec(**slots)).lines
    return [str(line) for line in printed if line.name not in ("log_ratio", "ratio", "loss")]


# Expressions --------------------------------------------------------------------------------------


@walked(
    "text",
    [
        "a - (b - c)",
        "a - b - c",
        "-a * b / c",
        "-(a * b)",
        "(a + b) * c",
        "(-a) ** 2",
        "-a ** 2",
        "2 ** -a",
        "~((a > 0) & (b < -1) | c)",
        "a & b == c",
        "where(a > 0, 1 - 0.2, -inf)",
        "True & ~seq_any(x)",
        "verdict.keep",
    ],
)
def test_a_text_and_its_tree_are_one(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_brackets_follow_pythons_precedences() -> None:
    """Trees built by hand: printed, evaluated by Python, and compared with the value of the
    tree.
    """
    x, y, z = name("x"), name("y"), name("z")
    difference = Expression("-", (y, z))
    for tree, value in (
        (Expression("-", (x, difference)), 7 - (5 - 2)),
        (Expression("/", (x, Expression("*", (y, z)))), 7 / (5 * 2)),
        (Expression("negative", (Expression("+", (x, y)),)), -(7 + 5)),
        (Expression("**", (Expression("negative", (z,)), z)), (-2) ** 2),
        (Expression("negative", (Expression("**", (z, z)),)), -(2**2)),
        (Expression("&", (Expression(">", (x, y)), Expression("<", (x, y)))), (7 > 5) & (7 < 5)),
    ):
        assert eval(str(tree), {}, {"x": 7, "y": 5, "z": 2}) == value
        assert parse(str(tree)) == tree


@walked("text", ["a and b", "a < b < c", "x[0]", "f(a=1)", "'text'", "a @ b"])
def test_an_invalid_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an expression of the printed formulas"):
        parse(text)


def test_every_line_of_every_part_is_a_tree() -> None:
    made = [pl.preset(n) for n in pl.presets()]
    made += [
        spec for r in RATIOS for t in TRUSTS if (spec := swapped(pl.LossSpec(), ratio=r, trust=t))
    ]
    made += [pl.LossSpec(correction=c) for c in CORRECTIONS] + [pl.LossSpec(kl=k) for k in KLS]
    made += [pl.LossSpec(aggregate=a) for a in AGGREGATES]
    for spec in made:
        for line in formula(spec).lines:
            assert parse(str(line.tree)) == line.tree, line


# A user's own functions ---------------------------------------------------------------------------


def half_clip(t: pl.Tokens) -> Any:
    free = -t.advantages * t.ratio
    return torch.where(
        t.advantages > 0, torch.maximum(free, -t.advantages * t.ratio.clamp(max=1.2)), free
    )


def tempered(t: pl.Tokens) -> Any:
    tau = torch.where(t.advantages >= 0, torch.full_like(t.log_ratio, 0.7), 1.3)
    with torch.no_grad():
        weight = torch.sigmoid(tau * t.log_ratio)
    return pl.Surrogate(torch.where(t.mask, -weight * t.advantages * t.logp / tau, 0))


def sequence_level(t: pl.Tokens) -> Any:
    mean = t.sequences.expand(t.sequence_mean(t.log_ratio_to("old")))
    return -t.advantages * (mean - mean.detach()).exp() * torch.expm1(t.log_ratio).abs()


def penalty(t: pl.Tokens) -> Any:
    drift = t.log_ratio_to("ref")
    return 0.1 * drift.square() * (drift.abs() > 0.1)


def my_keep(t: pl.Tokens) -> pl.Corrected:
    seen = t.log_weight().abs() < 0.2
    return pl.Corrected(
        torch.exp(t.log_weight()).clamp(0.9, 1.1), torch.logical_or(seen, t.advantages > 0)
    )


@dataclass(frozen=True)
class Shifted:
    """A user's part: its fields are printed as they are used."""

    shift: float = 0.25

    def __call__(self, t: pl.Tokens) -> Any:
        return -t.advantages * torch.minimum(t.ratio, torch.full_like(t.ratio, 1 + self.shift))


@walked(
    ("slots", "expected"),
    [
        (
            {"trust": half_clip},
            [
                "free = -advantages * ratio",
                "surrogate = where(advantages > 0, max(free, -advantages * min(ratio, 1.2)), free)",
            ],
        ),
        (
            {"trust": tempered},
            [
                "tau = where(advantages >= 0, 0.7, 1.3)",
                "surrogate = -sg(sigmoid(tau * log_ratio)) * advantages * logp / tau",
            ],
        ),
        ({"trust": Shifted()}, ["surrogate = -advantages * min(ratio, 1 + 0.25)"]),
        (
            {"trust": sequence_level},
            [
                "mean = seq_mean(logp - old_logp)",
                "surrogate = -advantages * exp(mean - sg(mean)) * abs(exp(log_ratio) - 1)",
            ],
        ),
        (
            {"kl": penalty},
            [
                "surrogate = max(-advantages * ratio, -advantages * clip(ratio, 1 - 0.2, 1 + 0.2))",
                "drift = logp - ref_logp",
                "kl = 0.1 * drift ** 2 * (abs(drift) > 0.1)",
                "token_loss = surrogate + 1 * kl",
            ],
        ),
        (
            {"correction": my_keep, "trust": pl.Unbounded()},
            [
                "log_weight = old_logp - rollout_logp",
                "weight = clip(exp(log_weight), 0.9, 1.1)",
                "keep = (abs(log_weight) < 0.2) | (advantages > 0)",
                "surrogate = -advantages * ratio",
                "token_loss = where(keep, weight * surrogate, 0)",
            ],
        ),
    ],
    ids=["half_clip", "tempered", "fields", "sequence", "kl", "correction"],
)
def test_the_formula_of_a_users_function_is_derived_and_true(
    slots: dict[str, Any], expected: list[str]
) -> None:
    text = [line.replace("abs(exp(log_ratio) - 1)", "abs(ratio - 1)") for line in expected]
    assert lines(**slots) == text
    assert formula(pl.LossSpec(**slots)).exact
    assert_formula_holds(pl.LossSpec(**slots), make_batch(seed=5, rows=6, width=6))


def branching(t: pl.Tokens) -> Any:
    return t.logp if bool(t.advantages.sum() > 0) else -t.logp


def failing(t: pl.Tokens) -> Any:
    raise RuntimeError("not today")


def with_a_tensor(t: pl.Tokens) -> Any:
    return t.logp * torch.ones(3)


def unknown_function(t: pl.Tokens) -> Any:
    return torch.cumsum(t.logp, -1)


def counting(t: pl.Tokens) -> Any:
    return t.logp * len(t.mask)


def numpy_like(t: pl.Tokens) -> Any:
    return t.logp * float(t.advantages)


@walked("function", [branching, failing, with_a_tensor, unknown_function, counting, numpy_like])
def test_a_function_that_symbols_cannot_follow_is_printed_as_its_name(function: Any) -> None:
    profile = sys.getprofile()
    e = pl.explain(pl.LossSpec(trust=function))
    assert sys.getprofile() is profile
    assert [line.expression for line in e.formula.lines if line.name == "surrogate"] == [
        f"{function.__name__}(tokens)"
    ]
    assert [c.name for c in e.formula.callables] == [function.__name__]
    assert (
        f"{function.__name__} in the trust slot is a callable, whose formula cannot be printed."
        in str(e)
    )


def test_a_formula_is_the_same_without_gradients() -> None:
    with torch.no_grad():
        inside = lines(trust=tempered)
    assert inside == lines(trust=tempered)


def test_a_name_of_the_vocabulary_is_not_given_to_a_line() -> None:
    def shadowing(t: pl.Tokens) -> Any:
        ratio = t.log_ratio_to("old").exp()  # not the ratio slot's: that one is clamped
        mask = ratio * ratio
        return -t.advantages * mask * mask

    assert lines(trust=shadowing) == [
        "surrogate = -advantages * (exp(logp - old_logp) * exp(logp - old_logp)) * (exp(logp - "
        "old_logp) * exp(logp - old_logp))"
    ]
    assert_formula_holds(pl.LossSpec(trust=shadowing), make_batch(seed=6, rows=5, width=5))


# A formula exists once ----------------------------------------------------------------------------


def test_a_change_of_the_code_changes_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def surrogate() -> str:
        made = derive_formula(pl.Clip(0.2, 0.28), symbolic_tokens("old"), lambda label: False)
        assert made is not None
        return str(made.lines["loss"][-1][1])

    assert surrogate() == "max(-advantages * ratio, -advantages * clip(ratio, 1 - 0.2, 1 + 0.28))"
    monkeypatch.setattr(
        functional_trust,
        "_clip_formula",
        lambda r, a, low, high, cap, dual: (-a * r.clamp(low, 2 * high), r),
    )
    assert surrogate() == "-advantages * clip(ratio, 1 - 0.2, 2 * (1 + 0.28))"


PARTS = {
    v.__name__ for module in (ratio, trust, correction, kl, aggregate) for v in module.VARIANTS
}


@walked("file", sorted(EXPLAIN.glob("*.py")), ids=lambda path: path.stem)
def test_explain_names_no_part(file: Path) -> None:
    """The texts of a part are on the part.

    (Texts of `framework_names` and `traps` are data, optional for a new one.)
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name)
    }
    assert not used & PARTS


@walked(
    "module", [ratio, trust, correction, kl, aggregate], ids=lambda m: m.__name__.rsplit(".", 1)[1]
)
def test_every_part_has_a_sentence(module: Any) -> None:
    for variant in module.VARIANTS:
        assert callable(getattr(variant, "sentence", None)), variant
        assert module is not trust or callable(getattr(variant, "slopes", None)), variant
        assert module is not aggregate or callable(getattr(variant, "averaged", None)), variant


@dataclass(frozen=True)
class Squeezed:
    """A trust part made here, with the members of a part and no entry elsewhere."""

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    cap: float = 1.1

    def __call__(self, t: pl.Tokens) -> pl.Surrogate:
        assert t.ratio is not None
        beyond = (t.advantages > 0) & (t.ratio.detach() > self.cap)
        return pl.Surrogate(torch.where(beyond, 0, -t.advantages * t.ratio), upper=beyond)

    def sentence(self) -> str:
        return f"a good token counts until its ratio is {self.cap:g}"

    def slopes(self) -> tuple[Slopes, ...]:
        return (Slopes(through_ratio=(NO_ADVANTAGE, Condition("beyond", "far enough"))),)


def test_a_new_part_is_explained_by_itself() -> None:
    spec = pl.LossSpec(trust=Squeezed())
    e = pl.explain(spec)
    assert lines(trust=Squeezed()) == [
        "beyond = (advantages > 0) & (ratio > 1.1)",
        "surrogate = where(beyond, 0, -advantages * ratio)",
    ]
    assert e.words["trust"] == "a good token counts until its ratio is 1.1"
    assert [c.expression for c in e.zero.alone][:2] == ["advantages == 0", "beyond"]
    assert_formula_holds(spec, make_batch(seed=7, rows=6, width=6))
    zero, other = assert_zero_where_said(spec, zero_batch(3))
    assert zero > 0
    assert other > 0


def test_the_package_has_the_public_functions() -> None:
    """No module of `policyloss.explanations` hides one."""
    from policyloss.explanations import diff, explain

    assert (diff, explain) == (pl.diff, pl.explain)
    assert dataclasses.is_dataclass(pl.explain("ppo"))
