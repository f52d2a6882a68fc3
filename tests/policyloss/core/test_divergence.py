"""The divergences of a teacher and a student: numbers by hand, identities, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from divergences import of_distributions, whole_gradient
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.functional.divergence import (
    KINDS,
    TOPS,
    Measure,
    on_support,
    support_of,
    support_slopes,
    terms,
)

FORWARD, REVERSE, GENERALISED = Measure("forward"), Measure("reverse"), Measure("generalised")
MEASURES = [FORWARD, REVERSE, GENERALISED, *(Measure("jsd", b) for b in (0.0, 0.1, 0.5, 0.9, 1.0))]
MEASURES += [Measure("skew_forward", b) for b in (0.0, 0.1)]
MEASURES += [Measure("skew_reverse", b) for b in (0.9, 1.0)]
MEASURES += [Measure("tv")]
RESTS = ("entry", "drop", "renormalise")
by_measure = walked("measure", MEASURES, ids=lambda m: f"{m.kind}-{m.beta}")


def logits(seed: int, rows: int = 5, entries: int = 12, scale: float = 2.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, entries, generator=g, dtype=torch.float64)


def rows(scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits of a student, and a teacher's log-probabilities."""
    return logits(0, scale=scale), logits(1, scale=scale).log_softmax(-1)


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


# Student (1/2, 1/4, 1/4), teacher (1/4, 1/4, 1/2), in units of log 2:
# forward ¼·(log ¼ − log ½) + 0 + ½·(log ½ − log ¼) = −¼ + ½ = ¼; reverse the same by symmetry.
# jsd at ½: m = (3/8, 1/4, 3/8); ½·[¼·log(2/3) + ½·log(4/3)]·2 = ¼·log(2/3) + ½·log(4/3).
HAND = [
    (FORWARD, 0.25 * math.log(2)),
    (REVERSE, 0.25 * math.log(2)),
    (GENERALISED, 0.25 * math.log(2)),
    (Measure("jsd", 0.5), 0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)),
    # The same m: KL(teacher‖m) = ¼·log(2/3) + ½·log(4/3), and by symmetry KL(student‖m).
    (Measure("skew_forward", 0.5), 0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)),
    (Measure("skew_reverse", 0.5), 0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)),
    (Measure("tv"), 0.25),  # ½·(¼ + 0 + ¼)
]


@walked(("measure", "value"), HAND, ids=lambda x: getattr(x, "kind", ""))
def test_hand_computed(measure: Measure, value: float) -> None:
    assert of_distributions(
        log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5), measure
    ).item() == pytest.approx(value, rel=1e-14)


# The same two rows, known on the first two entries: ¼ of the student is outside, ½ of the teacher.
# forward on the two: ¼·log ½ + 0 = −¼·log 2, and the bucket adds ½·log(½/¼) = ½·log 2.
# reverse on the two: ½·log 2; the bucket adds ¼·log(¼/½) = −¼·log 2.
# generalised: ½·log 2 − ¾ + ½.
# Normalised over the two, the student is (⅔, ⅓) and the teacher (½, ½): forward
# ½·log ¾ + ½·log 3/2, reverse ⅔·log 4/3 + ⅓·log ⅔, total variation ½·(⅙ + ⅙).
CUT = [
    (Measure("forward", rest="drop"), -0.25 * math.log(2)),
    (Measure("forward"), 0.25 * math.log(2)),
    (Measure("reverse", rest="drop"), 0.5 * math.log(2)),
    (Measure("reverse"), 0.25 * math.log(2)),
    (Measure("generalised"), 0.5 * math.log(2) - 0.25),
    (Measure("forward", rest="renormalise"), 0.5 * math.log(9 / 8)),
    (Measure("reverse", rest="renormalise"), 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)),
    (Measure("tv", rest="renormalise"), 1 / 6),
]


@walked(("measure", "value"), CUT, ids=str)
def test_hand_computed_on_a_support(measure: Measure, value: float) -> None:
    found = on_support(log(0.5, 0.25), log(0.25, 0.25), measure)
    assert found.item() == pytest.approx(value, rel=1e-14)
    keep = torch.tensor([True, True, False])
    padded = on_support(log(0.5, 0.25, 0.1), log(0.25, 0.25, 0.2), measure, keep)
    assert padded.item() == pytest.approx(value, rel=1e-14)


def test_unequal_beta_hand_computed() -> None:
    """Student (½, ½), teacher (1, 0), β = ¼: m = (5/8, 3/8).

    ¼·1·log(8/5) + ¾·(½·log(4/5) + ½·log(4/3)).
    """
    value = 0.25 * math.log(8 / 5) + 0.375 * (math.log(4 / 5) + math.log(4 / 3))
    found = of_distributions(log(0.5, 0.5), log(1.0, 0.0), Measure("jsd", 0.25))
    assert found.item() == pytest.approx(value, rel=1e-14)
    # Its two halves: KL(teacher‖m) = log(8/5), KL(student‖m) = ½·log(4/5) + ½·log(4/3).
    for kind, half in (
        ("skew_forward", math.log(8 / 5)),
        ("skew_reverse", (math.log(4 / 5) + math.log(4 / 3)) / 2),
    ):
        found = of_distributions(log(0.5, 0.5), log(1.0, 0.0), Measure(kind, 0.25))
        assert found.item() == pytest.approx(half, rel=1e-14)


@by_measure
def test_the_gradient_is_that_of_autograd(measure: Measure) -> None:
    for scale in (0.1, 2.0, 15.0):
        z, teacher = rows(scale)
        z.requires_grad_()
        value = of_distributions(z.log_softmax(-1), teacher, measure)
        (expected,) = torch.autograd.grad(value.sum(), z)
        found = whole_gradient(z.detach().log_softmax(-1), teacher, measure)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        # Total variation saturates: where student and teacher share nothing it hardly moves.
        assert expected.abs().max() > (1e-6 if measure.kind == "tv" else 1e-5)


@by_measure
def test_gradcheck(measure: Measure) -> None:
    z, teacher = rows(1.0)
    assert torch.autograd.gradcheck(
        lambda x: of_distributions(x.log_softmax(-1), teacher, measure), z.requires_grad_()
    )


@walked("rest", RESTS)
@by_measure
def test_the_gradient_on_a_support_is_that_of_autograd(measure: Measure, rest: str) -> None:
    measure = measure._replace(rest=rest)
    z, teacher = rows()
    ids, keep = support_of(z.log_softmax(-1), teacher, "union", 4)
    student, teacher = z.log_softmax(-1).gather(-1, ids), teacher.gather(-1, ids)
    student.requires_grad_()
    value = on_support(student, teacher, measure, keep)
    (expected,) = torch.autograd.grad(value.sum(), student)
    found = support_slopes(student.detach(), teacher, measure, keep)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (found[~keep] == 0).all()


@walked("rest", RESTS)
@by_measure
def test_gradcheck_on_a_support(measure: Measure, rest: str) -> None:
    z, teacher = rows(1.0)
    few = measure._replace(rest=rest)

    def value(x: Tensor) -> Tensor:
        return on_support(x.log_softmax(-1)[..., :5], teacher[..., :5], few)

    assert torch.autograd.gradcheck(value, z.requires_grad_())


@by_measure
def test_renormalised_entries_are_a_softmax_over_their_logits(measure: Measure) -> None:
    """As ms-swift computes it: both models' logits of the entries, each through its own softmax."""
    z, other = logits(0).requires_grad_(), logits(1)
    ids = other.topk(4, -1).indices
    few, chosen = measure._replace(rest="renormalise"), z.gather(-1, ids)
    expected = of_distributions(
        chosen.log_softmax(-1), other.gather(-1, ids).log_softmax(-1), measure
    )
    student, teacher = (x.log_softmax(-1).gather(-1, ids) for x in (z, other))
    torch.testing.assert_close(on_support(student, teacher, few), expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(expected.sum(), z)
    slopes = support_slopes(student.detach(), teacher, few)
    assert slopes.sum(-1).abs().max() < 1e-15  # so the entries outside get no gradient
    found = torch.zeros_like(gradient).scatter(-1, ids, slopes)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    assert (on_support(student, teacher, few, nothing) == 0).all()
    assert (support_slopes(student.detach(), teacher, few, nothing) == 0).all()


@by_measure
def test_a_tail_that_is_held_has_no_slope(measure: Measure) -> None:
    """The student has nothing outside the support: 1 − Σp is held at the rounding error of 1.

    A multiple of p_s, which has no effect here, may be left out of the slopes. It may not be large.
    """
    student, teacher = log(0.75, 0.25).requires_grad_(), log(0.25, 0.25)
    (expected,) = torch.autograd.grad(on_support(student, teacher, measure), student)
    found = support_slopes(student.detach(), teacher, measure)
    assert found.abs().max() < 2
    by_logits = [x - student.detach().exp() * x.sum() for x in (found, expected)]
    torch.testing.assert_close(*by_logits, rtol=1e-12, atol=1e-12)


def test_the_limits_of_the_jsd_are_the_two_kls() -> None:
    z, teacher = rows()
    student = z.log_softmax(-1)
    for beta, kl in ((0.0, FORWARD), (1.0, REVERSE)):
        jsd = Measure("jsd", beta)
        assert torch.equal(
            of_distributions(student, teacher, jsd), of_distributions(student, teacher, kl)
        )
        assert torch.equal(
            whole_gradient(student, teacher, jsd), whole_gradient(student, teacher, kl)
        )
    # And they are limits: JSD/β and JSD/(1−β) approach them.
    near = of_distributions(student, teacher, Measure("jsd", 1e-7)) / 1e-7
    torch.testing.assert_close(near, of_distributions(student, teacher, FORWARD), rtol=1e-4, atol=0)
    near = of_distributions(student, teacher, Measure("jsd", 1 - 1e-7)) / 1e-7
    torch.testing.assert_close(near, of_distributions(student, teacher, REVERSE), rtol=1e-4, atol=0)


@walked("dtype", [torch.float64, torch.float32])
@by_measure
def test_an_equal_teacher_gives_nothing(measure: Measure, dtype: torch.dtype) -> None:
    student = logits(3).to(dtype).log_softmax(-1)
    assert (of_distributions(student, student, measure) == 0).all()
    each = terms(student, student, measure)
    assert (each == 0).all()
    # Of the forward KL the gradient is p_s − p_t, of the others a multiple of a zero.
    assert (whole_gradient(student, student, measure) == 0).all()


@by_measure
def test_never_negative(measure: Measure) -> None:
    z, teacher = rows(6.0)
    assert (of_distributions(z.log_softmax(-1), teacher, measure) > 0).all()


@walked("rest", RESTS)
@by_measure
def test_all_entries_are_the_whole(measure: Measure, rest: str) -> None:
    """k = V: the support's value and gradient are those of the whole divergence."""
    z, teacher = rows()
    measure = measure._replace(rest=rest)
    student = z.log_softmax(-1)
    for which in TOPS:
        ids, keep = support_of(student, teacher, which, z.shape[-1])
        s, t = student.gather(-1, ids), teacher.gather(-1, ids)
        value = on_support(s, t, measure, keep)
        torch.testing.assert_close(
            value, of_distributions(student, teacher, measure), rtol=1e-12, atol=1e-12
        )
        slopes = support_slopes(s, t, measure, keep)
        each = torch.zeros_like(z).scatter_add_(-1, ids, slopes)
        gradient = each - student.exp() * slopes.sum(-1, keepdim=True)
        expected = whole_gradient(student, teacher, measure)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@walked("measure", [m for m in MEASURES if m.kind != "generalised"])
def test_a_tail_bucket_is_never_negative_and_grows_with_k(measure: Measure) -> None:
    z, teacher = rows(1.0)  # a tail far above the rounding error of 1, in which 1 − Σp is measured
    student = z.log_softmax(-1)
    values = []
    for k in range(1, z.shape[-1] + 1):
        ids, keep = support_of(student, teacher, "teacher", k)
        s, t = student.gather(-1, ids), teacher.gather(-1, ids)
        values.append(on_support(s, t, measure, keep))
    steps = torch.stack([torch.zeros_like(values[0]), *values]).diff(dim=0)
    assert (steps >= -1e-13).all()
    assert (steps[0] > 0).all()


def test_the_generalised_form_is_least_at_equality() -> None:
    """On any support. The un-tailed reverse KL is not: there the student gains by leaving it."""
    teacher = logits(5).log_softmax(-1)
    few = slice(0, 4)
    generalised, cut = Measure("generalised"), Measure("reverse", rest="drop")
    z = teacher.clone().requires_grad_()
    at_equality = on_support(z.log_softmax(-1)[..., few], teacher[..., few], generalised)
    (gradient,) = torch.autograd.grad(at_equality.sum(), z)
    assert (at_equality == 0).all()
    assert gradient.abs().max() < 1e-15
    for seed in range(20):
        student = (teacher + 0.5 * logits(seed)).log_softmax(-1)
        assert (on_support(student[..., few], teacher[..., few], generalised) > 0).all()
    (gradient,) = torch.autograd.grad(
        on_support(z.log_softmax(-1)[..., few], teacher[..., few], cut).sum(), z
    )
    assert gradient.abs().max() > 0.01
    away = (teacher + torch.where(torch.arange(12) < 4, -3.0, 0.0)).log_softmax(-1)
    assert (on_support(away[..., few], teacher[..., few], cut) < 0).all()


def test_supports() -> None:
    student = log(0.5, 0.3, 0.15, 0.05)
    teacher = log(0.1, 0.6, 0.05, 0.25)

    def chosen(which: str) -> set[int]:
        ids, keep = support_of(student, teacher, which, 2)
        assert len(ids[keep]) == len(set(ids[keep].tolist()))
        return set(ids[keep].tolist())

    assert chosen("student") == {0, 1}
    assert chosen("teacher") == {1, 3}
    assert chosen("union") == {0, 1, 3}
    assert chosen("intersection") == {1}


@by_measure
def test_entries_unknown_to_both_count_for_nothing(measure: Measure) -> None:
    z, teacher = rows()
    student = z.log_softmax(-1)
    nothing = torch.full((5, 3), -torch.inf, dtype=torch.float64)
    wide = [torch.cat([x, nothing], -1) for x in (student, teacher)]
    assert torch.equal(
        of_distributions(*wide, measure), of_distributions(student, teacher, measure)
    )
    gradient = whole_gradient(*wide, measure)
    torch.testing.assert_close(
        gradient[:, :12], whole_gradient(student, teacher, measure), rtol=0, atol=1e-16
    )
    assert (gradient[:, 12:] == 0).all()


def test_an_entry_that_one_side_excludes() -> None:
    """KL(p‖q) is infinite where q excludes what p allows; a JSD stays finite."""
    sure, open_ = log(1.0, 0.0), log(0.5, 0.5)
    assert of_distributions(sure, open_, FORWARD).item() == math.inf
    assert of_distributions(sure, open_, REVERSE).item() == pytest.approx(math.log(2))
    assert of_distributions(open_, sure, FORWARD).item() == pytest.approx(math.log(2))
    assert of_distributions(open_, sure, REVERSE).item() == math.inf
    for pair in ((sure, open_), (open_, sure)):
        jsd = of_distributions(*pair, Measure("jsd", 0.5))
        assert 0 < jsd.item() < math.log(2)
        assert whole_gradient(*pair, Measure("jsd", 0.5)).isfinite().all()


def test_a_divergence_in_the_slot() -> None:
    """Two tokens: coef·weight·divergence on top of the policy term, the weight not moved."""
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -2.0]], dtype=torch.float64)
    divergence = torch.tensor([[0.5, 2.0]], dtype=torch.float64, requires_grad=True)
    zero, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    spec = pl.LossSpec(kl=pl.Divergence("reverse", 0.1, weight="ratio", clamp=(None, 1.0)))
    out = pl.policy_loss(spec, logp, old, zero, mask, divergence=divergence)
    bounded = spec.with_fields(weight_max=1.25)
    # token 1: 0.1·e^0.5·0.5; token 2: 0.1·1·1.0 (held); the mean of the two.
    assert out.loss.item() == pytest.approx((0.05 * math.exp(0.5) + 0.1) / 2, rel=1e-14)
    held = pl.policy_loss(bounded, logp, old, zero, mask, divergence=divergence)
    assert held.loss.item() == pytest.approx((0.05 * 1.25 + 0.1) / 2, rel=1e-14)
    dlogp, ddivergence = torch.autograd.grad(out.loss, (logp, divergence))
    assert (dlogp == 0).all()
    assert ddivergence.tolist() == [[pytest.approx(0.05 * math.exp(0.5)), 0.0]]
    assert out.metrics.compute()["divergence"] == pytest.approx(1.25)
    assert "kl_ref" not in out.metrics.compute()


def test_a_weight_of_extras_is_not_differentiated() -> None:
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    divergence = torch.tensor([[0.5, 2.0]], dtype=torch.float64, requires_grad=True)
    importance = torch.tensor([[3.0, 0.25]], dtype=torch.float64, requires_grad=True)
    zero, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    spec = pl.LossSpec(kl=pl.Divergence("forward", 2.0, weight="importance"))
    given = {"divergence": divergence, "extras": {"importance": importance}}
    out = pl.policy_loss(spec, logp, logp.detach(), zero, mask, **given)
    assert out.loss.item() == pytest.approx(2 * (3 * 0.5 + 0.25 * 2.0) / 2)
    gradients = torch.autograd.grad(out.loss, (divergence, importance), allow_unused=True)
    assert gradients[0].tolist() == [[3.0, 0.25]]
    assert gradients[1] is None
    with pytest.raises(pl.InputError, match="importance"):
        pl.policy_loss(spec, logp, logp.detach(), zero, mask, divergence=divergence)


def test_together_with_a_kl() -> None:
    """The two pulls add up, in either order, and `kl_ref` is the KL's alone."""
    g = torch.Generator().manual_seed(0)
    logp, old, ref = (
        -torch.rand(2, 3, generator=g, dtype=torch.float64).requires_grad_(i == 0) for i in range(3)
    )
    divergence = torch.rand(2, 3, generator=g, dtype=torch.float64).requires_grad_()
    mask, zero = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2)
    kl, pull = pl.KL("k3", 0.3), pl.Divergence("jsd", 0.7)

    def loss(parts: object) -> pl.LossOutput:
        spec = pl.LossSpec(kl=parts)
        return pl.policy_loss(spec, logp, old, zero, mask, ref_logp=ref, divergence=divergence)

    alone = [loss(part).loss.item() for part in (kl, pull)]
    for parts in ((kl, pull), [pull, kl]):
        both = loss(parts)
        assert both.loss.item() == pytest.approx(sum(alone), rel=1e-14)
        metrics = both.metrics.compute()
        assert metrics["kl_ref"] == pytest.approx(alone[0] / 0.3, rel=1e-12)
        assert metrics["divergence"] == pytest.approx(alone[1] / 0.7, rel=1e-12)


def test_one_or_none_in_a_tuple() -> None:
    kl = pl.KL("k3", 0.1)
    assert pl.LossSpec(kl=(kl,)) == pl.LossSpec(kl=kl)
    assert pl.LossSpec(kl=()) == pl.LossSpec(kl=None)
    both = pl.LossSpec(kl=[kl, pl.Divergence("jsd", 0.5, beta=0.1, clamp=(None, 5.0))])
    assert both.kl == (kl, pl.Divergence("jsd", 0.5, beta=0.1, clamp=(None, 5.0)))
    assert both.reads == ("old_logp", "ref_logp", "divergence")
    assert pl.LossSpec.from_dict(both.to_dict()) == both
    assert both.with_fields(estimator="k1", beta=0.2).divergence.beta == 0.2
    assert both.divergence.beta == 0.1
    with pytest.raises(pl.SpecError, match=r"kl\.0\.coef and kl\.1\.coef"):
        both.with_fields(coef=0.5)


@walked(
    ("fields", "words"),
    [
        ({"kind": "sideways"}, ["kind", "sideways", "forward"]),
        ({"coef": -1.0}, ["coef", "-1.0"]),
        ({"beta": 1.5}, ["beta", "1.5", "<= 1", "0: forward KL"]),
        ({"weight": 0.5}, ["weight", "0.5", "extras"]),
        ({"clamp": -1.0}, ["clamp", "-1.0"]),
        ({"weight_max": 2.0}, ["weight_max", "2.0", "none"]),
        ({"weight": "ratio", "weight_max": 0.0}, ["weight_max", "0.0"]),
        ({"rest": True}, ["rest", "True", "renormalise"]),
        ({"top": "everyone", "k": 3}, ["top", "everyone", "union"]),
        ({"top": "student"}, ["top='student'", "k=None", "give both"]),
        ({"k": 3}, ["top=None", "k=", "3"]),
        ({"top": "student", "k": 0}, ["k=", "0", "positive"]),
        ({"top": "student", "k": 1, "rest": "renormalise"}, ["k=1", "identically zero", "two"]),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_fields(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(pl.SpecError) as error:
        pl.Divergence(**{"kind": "reverse", "coef": 1.0, **fields})  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words), str(error.value)


def test_two_divergences_are_refused() -> None:
    pair = (pl.Divergence("forward", 0.5), pl.Divergence("reverse", 0.5))
    with pytest.raises(pl.SpecError, match="one Divergence at most"):
        pl.LossSpec(kl=pair)


def test_a_divergence_that_trains_nothing_is_refused() -> None:
    logp = torch.full((1, 2), -1.0, requires_grad=True)
    mask, divergence = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2)
    spec = pl.LossSpec(kl=pl.Divergence("reverse", 0.5))
    arguments = (logp, logp.detach(), torch.zeros(1), mask)
    with pytest.raises(pl.InputError, match="divergence carries no gradient"):
        pl.policy_loss(spec, *arguments, divergence=divergence)
    with pytest.raises(pl.InputError, match="linear_divergence"):
        pl.policy_loss(spec, *arguments)
    with torch.no_grad():
        out = pl.policy_loss(spec, *arguments, divergence=divergence)
    assert out.loss.item() == 0.5


def test_in_words() -> None:
    spec = pl.LossSpec(
        kl=(
            pl.KL("k3", 0.1),
            pl.Divergence(
                "jsd", 0.5, beta=0.9, weight="ratio", clamp=(None, 4.0), top="union", k=100
            ),
        )
    )
    text = " ".join(str(pl.explain(spec)).split())
    assert "token_loss = surrogate + 0.1 * kl + 0.5 * kl_2" in text
    assert "kl_2 = min(divergence, 4) * sg(ratio)" in text
    assert "the JSD of student and teacher at beta 0.9" in text
    assert "the student's or the teacher's 100 most probable entries and one for the rest" in text
    assert "held at most 4, times the ratio, without its gradient" in text
    assert "the KL term and the divergence from the teacher still move" in text
    assert "beta" not in str(pl.explain(pl.LossSpec(kl=pl.Divergence("reverse", 0.5))))
    named = pl.LossSpec(kl=pl.Divergence("forward", 1.0, weight="importance"))
    assert "kl = divergence * importance" in str(pl.explain(named))
    skewed = pl.LossSpec(kl=pl.Divergence("skew_reverse", 0.5, beta=0.9))
    assert "KL(student, mixture with 0.9 of the teacher)" in " ".join(
        str(pl.explain(skewed)).split()
    )
    assert tuple(KINDS) == (
        *("forward", "reverse", "jsd", "generalised", "skew_forward", "skew_reverse", "tv"),
    )
