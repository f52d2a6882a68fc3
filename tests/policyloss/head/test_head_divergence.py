"""The divergence from a teacher, from hidden states: against float64 autograd over all logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from divergences import of_distributions
from head_cases import (
    CUDA,
    DEVICE,
    FLOAT,
    LOGPROB_PLANS,
    MatmulRows,
    Poison,
    assert_near,
    forced_rows,
    leaf,
    make_head_batch,
    peaked_case,
    run_loss,
    run_oracle,
)
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.functional.divergence import Measure, on_support, support_of

N, V, D, E = 40, 50, 6, 4
TOL = 1e-12 if torch.float64 == FLOAT else 2e-5
RESTS = ("entry", "drop", "renormalise")
KINDS = ("forward", "reverse", "jsd", "generalised", "skew_forward", "skew_reverse", "tv")
CASE = peaked_case(N, V, D, FLOAT, seed=3, peak=5.0)
MASK = (torch.arange(N, device=DEVICE) % 5 != 2) & (torch.arange(N, device=DEVICE) != 7)
UP = CASE.dlogp


def teacher_of(dtype: torch.dtype = FLOAT, **options: Any) -> pl.Teacher:
    """A teacher of another width that mostly agrees with the student."""
    g = torch.Generator().manual_seed(8)
    mix = torch.randn(D, E, generator=g, dtype=torch.float64).to(DEVICE) / 2
    hidden = CASE.hidden.double() @ mix
    weight = CASE.weight.double() @ torch.linalg.pinv(mix).T
    return pl.Teacher(hidden.to(dtype), weight.to(dtype), **options)


def log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: Any = 1.0,
    softcap: float | None = None,
) -> Tensor:
    z = hidden @ weight.T
    z = z if bias is None else z + bias
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    t = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    return (z / t).log_softmax(-1)


def expected(
    measure: Measure, teacher: Tensor, mask: Tensor | None = MASK, **options: Any
) -> tuple[Tensor, ...]:
    """The divergence and its gradients by hidden, weight and (if there is one) bias, in float64."""
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    leaves = [leaf(x, torch.float64) for x in (CASE.hidden, CASE.weight)]
    if "bias" in wide:
        wide["bias"] = leaf(wide["bias"])
        leaves.append(wide["bias"])
    student = log_probabilities(*leaves[:2], **wide)
    if measure.top is None:
        value = of_distributions(student, teacher, measure)
    else:
        ids, keep = support_of(student, teacher, measure.top, measure.k or 0)
        value = on_support(student.gather(-1, ids), teacher.gather(-1, ids), measure, keep)
    value = value if mask is None else torch.where(mask, value, 0)
    return value.detach(), *torch.autograd.grad((value * UP.double()).sum(), leaves)


def found(teacher: Any, plan: Any = "auto", mask: Tensor | None = MASK, **options: Any) -> tuple:
    leaves = [leaf(x) for x in (CASE.hidden, CASE.weight)]
    if "bias" in options:
        options["bias"] = leaf(options["bias"])
        leaves.append(options["bias"])
    value = pl.linear_divergence(*leaves[:2], teacher, mask=mask, plan=plan, **options)
    return value.detach(), *torch.autograd.grad((value * UP).sum(), leaves)


def assert_all_near(
    actual: tuple[Tensor, ...], truth: tuple[Tensor, ...], tol: float = TOL
) -> None:
    names = ("divergence", "dhidden", "dweight", "dbias")
    for name, a, b in zip(names, actual, truth, strict=False):
        assert_near(a, b, tol, name)
    assert len(actual) == len(truth)


def plans(teacher: Any, **options: Any) -> list[Any]:
    """Every plan with its own sizes, and in windows of seven rows and ten columns."""
    hidden, weight = leaf(CASE.hidden), leaf(CASE.weight)
    small = []
    for plan in LOGPROB_PLANS:
        told = pl.explain_plan(
            None, hidden, weight, CASE.ids, mask=MASK, plan=plan, teacher=teacher, **options
        )
        small.append(forced_rows(told, 7))
    return ["auto", *LOGPROB_PLANS, *small]


@walked("kind", KINDS)
def test_every_kind_under_every_plan(kind: str) -> None:
    teacher = teacher_of()
    wide = log_probabilities(teacher.hidden.double(), teacher.weight.double())
    truth = expected(Measure(kind, 0.3), wide)
    assert truth[0].abs().max() > 0.01
    for plan in plans(teacher, kind=kind):
        assert_all_near(found(teacher, plan, kind=kind, beta=0.3), truth)


@walked("top", ["student", "teacher", "union", "intersection"])
@walked("kind", KINDS)
def test_the_most_probable_entries(kind: str, top: str) -> None:
    teacher = teacher_of()
    wide = log_probabilities(teacher.hidden.double(), teacher.weight.double())
    for rest in RESTS:
        truth = expected(Measure(kind, 0.3, rest, top, 6), wide)
        options = {"kind": kind, "beta": 0.3, "rest": rest, "top": top, "k": 6}
        for plan in LOGPROB_PLANS:
            assert_all_near(found(teacher, plan, **options), truth, 10 * TOL)


def test_scalings_of_either_model() -> None:
    """Bias, temperature per token and softcap of student and teacher, each on its own side."""
    g = torch.Generator().manual_seed(5)
    biases = [torch.randn(V, generator=g).to(DEVICE, FLOAT) for _ in range(2)]
    per_token = (0.5 + torch.rand(N, generator=g)).to(DEVICE, FLOAT)
    teacher = teacher_of(bias=biases[1], temperature=per_token.flip(0), softcap=9.0)
    of_teacher = {
        "bias": biases[1].double(),
        "temperature": per_token.flip(0).double(),
        "softcap": 9.0,
    }
    wide = log_probabilities(teacher.hidden.double(), teacher.weight.double(), **of_teacher)
    options = {"bias": biases[0], "temperature": per_token, "softcap": 7.0}
    for measure in (
        Measure("jsd", 0.3),
        Measure("reverse"),
        Measure("forward", 0.5, "entry", "union", 5),
    ):
        truth = expected(measure, wide, **options)
        how = {"kind": measure.kind, "beta": measure.beta, "top": measure.top, "k": measure.k}
        assert_all_near(found(teacher, "recompute", **how, **options), truth, 10 * TOL)


def known_entries(k: int) -> tuple[pl.TopK, Tensor]:
    """A teacher by its k most probable entries, one of them missing in row 3; and as all logits."""
    teacher = teacher_of()
    logp = log_probabilities(teacher.hidden.double(), teacher.weight.double())
    top = logp.topk(k, -1)
    ids, values = top.indices.clone(), top.values.clone()
    ids[3, 0] = -1
    return pl.TopK.sorted(ids, values.to(FLOAT)), logp


@walked("rest", RESTS)
@walked("kind", KINDS)
def test_a_teacher_known_by_some_entries(kind: str, rest: str) -> None:
    teacher, logp = known_entries(6)
    leaves = [leaf(x, torch.float64) for x in (CASE.hidden, CASE.weight)]
    student = log_probabilities(*leaves)
    ids = teacher.ids.clamp(min=0)
    measure, keep = Measure(kind, 0.3, rest), teacher.ids >= 0
    value = on_support(student.gather(-1, ids), teacher.logp.double(), measure, keep)
    value = torch.where(MASK, value, 0)
    truth = (value.detach(), *torch.autograd.grad((value * UP.double()).sum(), leaves))
    for plan in plans(teacher, kind=kind):
        assert_all_near(found(teacher, plan, kind=kind, beta=0.3, rest=rest), truth, 10 * TOL)
    everything = pl.TopK.sorted(
        torch.arange(V, device=DEVICE).expand(N, V), logp.to(FLOAT).contiguous()
    )
    of_all = found(everything, "recompute", kind=kind, beta=0.3, rest=rest)
    assert_all_near(of_all, expected(Measure(kind, 0.3), logp), 10 * TOL)


def test_entries_that_are_among_the_students_best() -> None:
    teacher, logp = known_entries(6)
    student = log_probabilities(CASE.hidden.double(), CASE.weight.double())
    best = student.topk(4, -1).indices
    keep = (teacher.ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1)
    assert 0 < int(keep.sum()) < keep.numel()
    ids = teacher.ids.clamp(min=0)
    truth = on_support(student.gather(-1, ids), logp.gather(-1, ids), Measure("reverse"), keep)
    options = {"kind": "reverse", "top": "intersection", "k": 4}
    value = pl.linear_divergence(CASE.hidden, CASE.weight, teacher, **options)
    assert_near(value, truth, 10 * TOL, "divergence")


def test_the_top_entries_of_a_partial_teacher() -> None:
    """Row 3 lacks its first: the three best after it are taken."""
    teacher, logp = known_entries(6)
    options = {"kind": "forward", "top": "teacher", "k": 3}
    value = pl.linear_divergence(CASE.hidden, CASE.weight, teacher, **options)
    ids = logp.topk(4, -1).indices
    ids = torch.where(torch.arange(N, device=DEVICE)[:, None] == 3, ids[:, 1:], ids[:, :3])
    student = log_probabilities(CASE.hidden.double(), CASE.weight.double())
    truth = on_support(student.gather(-1, ids), logp.gather(-1, ids), Measure("forward"))
    assert_near(value, truth, 10 * TOL, "divergence")


@walked("kind", KINDS)
def test_logits_that_exist(kind: str) -> None:
    """Of the teacher in `linear_divergence`, of both in `divergence`."""
    teacher = teacher_of()
    logits = teacher.hidden @ teacher.weight.T
    truth = expected(Measure(kind, 0.3), logits.double().log_softmax(-1))
    for plan in plans(logits, kind=kind):
        assert_all_near(found(logits, plan, kind=kind, beta=0.3), truth)
    leaves = [leaf(x) for x in (CASE.hidden, CASE.weight)]
    student = (leaves[0] @ leaves[1].T).view(4, 10, V)
    value = pl.divergence(
        student, logits.view(4, 10, V), kind=kind, beta=0.3, mask=MASK.view(4, 10)
    ).view(N)
    actual = (value.detach(), *torch.autograd.grad((value * UP).sum(), leaves))
    assert_all_near(actual, truth, 4 * TOL)
    known, _ = known_entries(6)
    by_ids = pl.divergence(student.view(N, V), known, kind=kind)
    alone = pl.linear_divergence(CASE.hidden, CASE.weight, known, kind=kind)
    assert_near(by_ids.detach(), alone.double(), 10 * TOL, "by ids")


@walked("kind", KINDS)
def test_an_equal_teacher_moves_nothing(kind: str) -> None:
    """The student itself, its weight tied to the teacher's: 0 and no gradient, exactly."""
    hidden, weight = leaf(CASE.hidden), leaf(CASE.weight)
    teacher = pl.Teacher(hidden, weight)
    for plan in LOGPROB_PLANS:
        value = pl.linear_divergence(hidden, weight, teacher, kind=kind, plan=plan)
        assert (value == 0).all()
        gradients = torch.autograd.grad(value.sum(), (hidden, weight))
        assert all((g == 0).all() for g in gradients)
    other = pl.Teacher(hidden.flip(0), weight)
    value = pl.linear_divergence(hidden, weight, other, kind=kind)
    dhidden, dweight = torch.autograd.grad(value.sum(), (hidden, weight))
    apart = pl.Teacher(hidden.detach().flip(0), weight.detach().clone())
    again = pl.linear_divergence(hidden, weight, apart, kind=kind)
    for a, b in zip(
        (dhidden, dweight), torch.autograd.grad(again.sum(), (hidden, weight)), strict=True
    ):
        assert torch.equal(a, b)


def test_a_frozen_weight_or_hidden_state() -> None:
    teacher = teacher_of()
    _, dhidden, dweight = found(teacher, kind="jsd")
    for plan in LOGPROB_PLANS:
        hidden = leaf(CASE.hidden)
        value = pl.linear_divergence(hidden, CASE.weight, teacher, kind="jsd", mask=MASK, plan=plan)
        (alone,) = torch.autograd.grad((value * UP).sum(), hidden)
        assert_near(alone, dhidden.double(), TOL, "dhidden")
        weight = leaf(CASE.weight)
        value = pl.linear_divergence(CASE.hidden, weight, teacher, kind="jsd", mask=MASK, plan=plan)
        (alone,) = torch.autograd.grad((value * UP).sum(), weight)
        assert_near(alone, dweight.double(), TOL, "dweight")


def test_masked_rows_are_never_read() -> None:
    """Garbage in hidden states, teacher and ids of masked rows changes nothing; nor does memory."""
    teacher, known = teacher_of(), known_entries(6)[0]
    spoilt = CASE.hidden.clone()
    spoilt[~MASK] = torch.nan
    of_teacher = teacher.hidden.clone()
    of_teacher[~MASK] = torch.inf
    ids, logp = known.ids.clone(), known.logp.clone()
    ids[~MASK], logp[~MASK] = 10**6, 5.0
    pairs = (
        (teacher, dataclasses.replace(teacher, hidden=of_teacher)),
        (known, pl.TopK(ids, logp)),
    )
    for clean, dirty in pairs:
        truth = found(clean, "recompute", kind="jsd")
        leaves = [leaf(spoilt), leaf(CASE.weight)]
        with Poison():
            value = pl.linear_divergence(*leaves, dirty, kind="jsd", mask=MASK, plan="recompute")
            gradients = torch.autograd.grad((value * UP).sum(), leaves)
        for a, b in zip((value.detach(), *gradients), truth, strict=True):
            assert torch.equal(a, b)


SPEC = pl.LossSpec(
    kl=(pl.KL("k3", 0.1), pl.Divergence("reverse", 0.3, weight="ratio", clamp=(None, 6.0))),
    entropy_coef=0.01,
)
BATCH = make_head_batch(seed=4)


@walked("layout", ["padded", "packed"])
@walked("kind", KINDS)
def test_with_a_policy_loss_in_the_same_pass(kind: str, layout: str) -> None:
    batch = BATCH if layout == "padded" else BATCH.packed()
    some = [{"top": "union", "k": 4, "rest": rest} for rest in RESTS]
    for fields in ({}, *some):
        part = dataclasses.replace(SPEC.divergence, kind=kind, **fields)
        spec = SPEC.replace(kl=(pl.KL("k3", 0.1), part))
        truth = run_oracle(spec, batch)
        for plan in ("one_pass", "recompute", "stash"):
            ours = run_loss(spec, batch, plan=plan)
            assert_near(ours.loss, truth.loss, 10 * TOL, "loss")
            assert_near(ours.dhidden, truth.dhidden, 10 * TOL, "dhidden")
            assert_near(ours.dweight, truth.dweight, 10 * TOL, "dweight")
            expected = pytest.approx(truth.metrics["divergence"], rel=1e-5)
            assert ours.metrics["divergence"] == expected


@walked("top", [None, "teacher"])
def test_the_entropy_of_rows_that_nothing_else_moves(top: str | None) -> None:
    """Without an advantage, and with a divergence above its clamp, only the bonus has a slope."""
    held = pl.Divergence("reverse", 0.3, top=top, k=top and 4, clamp=(None, 1e-6))
    spec = pl.LossSpec(kl=held, entropy_coef=0.05)
    batch = BATCH.with_tokens(advantages=torch.zeros_like(BATCH.tokens.advantages))
    truth = run_oracle(spec, batch)
    assert truth.dhidden.abs().max() > 1e-4
    for plan in ("one_pass", "recompute", "stash"):
        ours = run_loss(spec, batch, plan=plan)
        assert_near(ours.dhidden, truth.dhidden, 10 * TOL, plan)


def test_the_fields_of_the_output() -> None:
    teacher = BATCH.teacher()
    arguments = {**BATCH.kwargs, "teacher": teacher}
    hidden, weight = leaf(BATCH.hidden), leaf(BATCH.weight)
    out = pl.linear_policy_loss(SPEC, hidden, weight, BATCH.ids, **arguments)
    mask = BATCH.kwargs["mask"]
    alone = pl.linear_divergence(hidden, weight, teacher, kind="reverse", mask=mask)
    assert out.divergence is not None
    assert not out.divergence.requires_grad
    assert_near(out.divergence, alone.detach().double(), TOL, "divergence")
    plain = pl.linear_policy_loss("ppo", hidden, weight, BATCH.ids, **BATCH.kwargs)
    assert plain.divergence is None


def test_four_matmuls() -> None:
    """Student, teacher, d hidden and d weight, of the rows that count; without a teacher three."""
    mask = BATCH.kwargs["mask"]
    live, (vocab, width) = int(mask.sum()), BATCH.weight.shape
    teacher = BATCH.teacher()
    share = teacher.hidden.shape[-1] / width
    hidden, weight = leaf(BATCH.hidden), leaf(BATCH.weight)
    arguments = {**BATCH.kwargs, "teacher": teacher}
    told = pl.explain_plan(SPEC, hidden, weight, BATCH.ids, **arguments)
    assert told.name == "one_pass"
    assert "a window holds the teacher's logits too" in str(told)
    assert told.matmuls == pytest.approx((3 + share) * live / mask.numel())
    with MatmulRows(vocab, width) as work:
        pl.linear_policy_loss(SPEC, hidden, weight, BATCH.ids, **arguments).loss.backward()
    assert work.rows == pytest.approx((3 + share) * live)
    for plan, matmuls in (("stash", 3 + share), ("recompute", 4 + 2 * share)):
        options = {"teacher": teacher, "mask": mask, "plan": plan}
        told = pl.explain_plan(None, hidden, weight, BATCH.ids, **options)
        assert told.matmuls == pytest.approx(matmuls * live / mask.numel())
        with MatmulRows(vocab, width) as work:
            pl.linear_divergence(hidden, weight, kind="jsd", **options).sum().backward()
        assert work.rows == pytest.approx(matmuls * live)
    with MatmulRows(vocab, width) as work, torch.no_grad():
        pl.linear_divergence(hidden, weight, teacher, kind="jsd", mask=mask)
    assert work.rows == pytest.approx((1 + share) * live)


def test_a_window_holds_half_as_many_rows() -> None:
    """Two models' logits take the memory of one's."""
    hidden, weight = leaf(torch.randn(4000, 8)), leaf(torch.randn(20000, 8))
    teacher = pl.Teacher(torch.randn(4000, 3), torch.randn(20000, 3))
    ids = torch.zeros(4000, dtype=torch.int64)
    alone = pl.explain_plan(None, hidden, weight, ids, plan="recompute")
    shared = pl.explain_plan(None, hidden, weight, ids, plan="recompute", teacher=teacher)
    assert abs(shared.rows - alone.rows // 2) <= 16
    assert shared.extra_bytes <= 1.05 * alone.extra_bytes


@walked("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """Errors of the value are those of float32 statistics, of the gradients those of the dtype."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, of_teacher, other = (
        torch.randn(*shape, generator=g).div(2).to(DEVICE, dtype)
        for shape in ((64, 16), (200, 16), (64, 8), (200, 8))
    )
    for kind in KINDS:
        wide = [leaf(x, torch.float64) for x in (hidden, weight)]
        teacher = log_probabilities(of_teacher.double(), other.double())
        truth = of_distributions(log_probabilities(*wide), teacher, Measure(kind))
        gradients = torch.autograd.grad(truth.mean(), wide)
        for plan in LOGPROB_PLANS:
            leaves = [leaf(x) for x in (hidden, weight)]
            value = pl.linear_divergence(
                *leaves, pl.Teacher(of_teacher, other), kind=kind, plan=plan
            )
            assert value.dtype == torch.float32
            assert_near(value.detach(), truth.detach(), 1e-5, kind)
            for a, b in zip(torch.autograd.grad(value.mean(), leaves), gradients, strict=True):
                assert a.dtype == dtype
                assert (a.double() - b).norm() <= 4e-3 * b.norm(), (kind, plan)


def test_a_second_backward() -> None:
    teacher = teacher_of()
    for plan in LOGPROB_PLANS:
        hidden = leaf(CASE.hidden)
        value = pl.linear_divergence(hidden, CASE.weight, teacher, kind="forward", plan=plan)
        one, other = (
            torch.autograd.grad((value * UP).sum(), hidden, retain_graph=True)[0] for _ in range(2)
        )
        assert_near(one, other.double(), TOL, "dhidden")


def test_no_tokens() -> None:
    hidden, weight = leaf(CASE.hidden), leaf(CASE.weight)
    nothing = torch.zeros(N, dtype=torch.bool, device=DEVICE)
    value = pl.linear_divergence(hidden, weight, teacher_of(), kind="jsd", mask=nothing)
    assert (value == 0).all()
    gradients = torch.autograd.grad(value.sum(), (hidden, weight))
    assert all((g == 0).all() for g in gradients)


def call(teacher: Any, **options: Any) -> Any:
    return pl.linear_divergence(CASE.hidden, CASE.weight, teacher, **{"kind": "reverse", **options})


TEACHER = teacher_of()
LOGP = torch.full((N, 2), -3.0, device=DEVICE)
FEW = torch.tensor([[1, 4]], device=DEVICE).expand(N, 2)
WRONG: dict[str, tuple[Any, list[str]]] = {
    "no teacher": (lambda: call(None), ["teacher must be a Teacher", "None"]),
    "a larger vocabulary": (
        lambda: call(pl.Teacher(TEACHER.hidden, torch.zeros(V + 2, E).to(TEACHER.hidden))),
        ["teacher.weight", f"{V + 2}", f"{V}", f"teacher.prefix({V})"],
    ),
    "a smaller vocabulary": (
        lambda: call(TEACHER.prefix(V - 1)),
        [f"{V - 1}", f"weight[:{V - 1}]", "student"],
    ),
    "a prefix that is not there": (lambda: TEACHER.prefix(V + 1), [f"{V + 1}", f"{V}"]),
    "larger logits": (
        lambda: call(torch.zeros(N, V + 1).to(TEACHER.hidden)),
        ["teacher has", f"teacher[..., :{V}]"],
    ),
    "other tokens": (
        lambda: call(pl.Teacher(TEACHER.hidden[1:], TEACHER.weight)),
        ["teacher.hidden", f"({N - 1}, {E})", f"({N}, D)"],
    ),
    "another width": (
        lambda: call(pl.Teacher(TEACHER.hidden, TEACHER.weight[:, :2])),
        ["teacher.hidden has shape", "teacher.weight"],
    ),
    "a teacher's temperature": (
        lambda: call(teacher_of(temperature=torch.linspace(-1, 1, N).to(DEVICE, FLOAT))),
        ["teacher.temperature", "positive"],
    ),
    "ids beyond": (lambda: call(pl.TopK(FEW + V, LOGP)), [f"{N} token(s)", f"{V} entries"]),
    "ids that fall": (lambda: call(pl.TopK(FEW.flip(-1), LOGP)), ["do not rise", "TopK.sorted"]),
    "an id twice": (lambda: call(pl.TopK(FEW * 0, LOGP)), ["one id twice"]),
    "logits": (lambda: call(pl.TopK(FEW, -LOGP)), ["log-probability above 0", "not logits"]),
    "NaN": (lambda: call(pl.TopK(FEW, LOGP * torch.nan)), ["NaN"]),
    "too much mass": (lambda: call(pl.TopK(FEW, LOGP / 100)), ["sum to more than 1"]),
    "ids of floats": (lambda: pl.TopK(LOGP, LOGP), ["TopK.ids", "integers"]),
    "another shape": (lambda: pl.TopK(FEW, LOGP[:, :1]), ["TopK.ids has shape", f"({N}, 1)"]),
    "entries that a TopK lacks": (
        lambda: call(pl.TopK(FEW, LOGP), top="student", k=2),
        ["top='student'", "TopK", "Teacher"],
    ),
    "one entry normalised over itself": (
        lambda: call(pl.TopK(FEW[:, :1], LOGP[:, :1]), rest="renormalise"),
        ["one entry", "renormalise", "identically zero"],
    ),
    "a Teacher of logits": (
        lambda: pl.divergence(LOGP, TEACHER, kind="reverse"),
        ["linear_divergence"],
    ),
    "a kind": (lambda: call(TEACHER, kind="sideways"), ["kind", "sideways"]),
    "one pass": (lambda: call(TEACHER, plan="one_pass"), ["one_pass"]),
}


@walked("name", WRONG)
def test_errors_name_the_remedy(name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(pl.PolicyLossError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_teacher_and_a_divergence_go_together() -> None:
    arguments = {**BATCH.kwargs, "teacher": BATCH.teacher()}
    with pytest.raises(pl.InputError, match="nothing in the spec compares with it"):
        pl.linear_policy_loss("ppo", BATCH.hidden, BATCH.weight, BATCH.ids, **arguments)
    with pytest.raises(pl.InputError, match="pass teacher="):
        pl.linear_policy_loss(SPEC, BATCH.hidden, BATCH.weight, BATCH.ids, **BATCH.kwargs)
    with pytest.raises(TypeError, match="divergence is not an argument of linear_policy_loss"):
        pl.linear_policy_loss(
            SPEC, BATCH.hidden, BATCH.weight, BATCH.ids, **arguments, divergence=BATCH.hidden
        )


def test_a_common_prefix() -> None:
    """A teacher with a longer vocabulary, over the student's entries: normalised over them."""
    teacher = teacher_of()
    longer = torch.cat([teacher.weight, torch.ones_like(teacher.weight[:3])])
    wide = pl.Teacher(teacher.hidden, longer, bias=torch.ones(V + 3).to(longer))
    ours = pl.linear_divergence(CASE.hidden, CASE.weight, wide.prefix(V), kind="jsd")
    truth = pl.linear_divergence(CASE.hidden, CASE.weight, teacher, kind="jsd")
    assert_near(ours, truth.double(), TOL, "divergence")


@pytest.mark.skipif(not CUDA, reason="kernels run on a GPU")
@walked("kind", KINDS)
def test_large_vocabulary_on_a_gpu(kind: str) -> None:
    """An odd vocabulary, bfloat16, under every plan, against float64 rows."""
    case = peaked_case(512, 50257, 256, torch.bfloat16, peak=20.0)
    g = torch.Generator().manual_seed(1)
    noise = torch.randn(512, 256, generator=g).to(case.hidden)
    teacher = pl.Teacher(case.hidden + 0.05 * noise, case.weight.clone())
    wide = [leaf(x, torch.float64) for x in (case.hidden, case.weight)]
    of_teacher = log_probabilities(teacher.hidden.double(), teacher.weight.double())
    truth = of_distributions(log_probabilities(*wide), of_teacher, Measure(kind))
    gradients = torch.autograd.grad(truth.mean(), wide)
    for plan in LOGPROB_PLANS:
        leaves = [leaf(x) for x in (case.hidden, case.weight)]
        value = pl.linear_divergence(*leaves, teacher, kind=kind, plan=plan)
        assert (value.double() - truth).square().mean().sqrt() < 2e-5
        for a, b in zip(torch.autograd.grad(value.mean(), leaves), gradients, strict=True):
            assert (a.double() - b).norm() <= 6e-3 * b.norm(), plan
