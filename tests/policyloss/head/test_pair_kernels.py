"""The Triton kernels for two rows against float64 formulas: every kind, option, edge and alias.

Without a GPU the kernels run in Triton's interpreter, on small sizes with small tiles.
"""

from __future__ import annotations

import pytest
import torch
from divergences import of_distributions, whole_gradient
from interpreted import DEVICE
from test_kernels import FORWARD, ROWS, ids_of, logits, scalings, write_scaled
from torch import Tensor
from walk import walked

from policyloss.functional.divergence import (
    Measure,
    slopes,
    terms,
)
from policyloss.head import kernels
from policyloss.head.softmax_rows import Scaling, Statistics, row_partials, row_statistics
from policyloss.head.teacher import kernels as pair_kernels
from policyloss.head.teacher import rows as pair_rows
from policyloss.head.teacher.rows import PairRows, PairStatistics, pair_gradient, pair_statistics
from policyloss.head.vocab_parallel import Vocabulary

# The interpreter computes with NumPy, which warns of the NaN and inf that some rows here hold.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MEASURES = {
    "forward": Measure("forward"),
    "reverse": Measure("reverse"),
    "jsd": Measure("jsd", 0.3),
}
V = 300
by_measure = walked("kind", MEASURES)
# Rows of tiles and a tail, a row shorter than a tile, and one of tiles alone.
CASES = ((V, "plain"), (V, "all"), (40, "temperature"), (256, "softcap"))
BACKWARD = dict.fromkeys((4, 2), (128, 1))


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels in the place of the plain functions, with small tiles, wherever the test runs."""
    monkeypatch.setattr(pair_kernels, "PAIR_FORWARD", FORWARD)
    for module in (kernels, pair_kernels):
        monkeypatch.setattr(module, "BACKWARD", BACKWARD)
    monkeypatch.setattr(pair_rows, "kernels_for", lambda z, scaling, module: pair_kernels)


def pair(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Logits of a student and of a teacher that mostly agree."""
    z = logits(vocabulary, size=4.0)
    return z, z + logits(vocabulary + 1, size=1.0, rows=ROWS)[:, :vocabulary]


def statistics(
    z: Tensor, u: Tensor, ids: Tensor, ours: Scaling, theirs: Scaling, measure: Measure
) -> tuple[Statistics, PairStatistics]:
    alone = Vocabulary(z.shape[1], z.shape[1])
    return pair_statistics(z, ids, ours, PairRows(u, theirs), measure, alone, True)


@by_measure
def test_statistics(kind: str) -> None:
    """The student's statistics equal those of its own rows; the divergence equals float64's."""
    measure = MEASURES[kind]
    for vocabulary, name in CASES:
        (z, u), ids = pair(vocabulary), ids_of(vocabulary)
        ours, theirs = scalings(vocabulary)[name], scalings(vocabulary)["all"]
        s, found = statistics(z, u, ids, ours, theirs, measure)
        alone = row_statistics(row_partials(z.double(), ids, ours, True))
        here = (ids >= 0) & (ids < vocabulary)
        torch.testing.assert_close(s.lse.double(), alone.lse, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(s.logp.double()[here], alone.logp[here], rtol=1e-5, atol=1e-5)
        assert s.entropy is not None
        assert alone.entropy is not None
        torch.testing.assert_close(s.entropy.double(), alone.entropy, rtol=1e-5, atol=1e-5)
        student, teacher = (write_scaled(*x)[0].log_softmax(-1) for x in ((z, ours), (u, theirs)))
        expected = of_distributions(student, teacher, measure)
        torch.testing.assert_close(found.divergence.double(), expected, rtol=1e-5, atol=3e-6)
        if kind != "forward":
            total = slopes(student, teacher, measure).sum(-1)
            torch.testing.assert_close(found.total.double(), total, rtol=1e-5, atol=3e-6)


@by_measure
def test_gradient(kind: str) -> None:
    measure = MEASURES[kind]
    g = torch.Generator().manual_seed(3)
    dlogp, dentropy, ddivergence = (torch.randn(ROWS, generator=g).to(DEVICE) for _ in range(3))
    dlogp[4], ddivergence[5] = 0, 0
    for vocabulary, name in CASES:
        (z, u), ids, entropy = pair(vocabulary), ids_of(vocabulary), name != "temperature"
        ours, theirs = scalings(vocabulary)[name], scalings(vocabulary)["bias"]
        s, found = statistics(z, u, ids, ours, theirs, measure)
        out = torch.full_like(z, torch.nan)
        derivatives = (dlogp, dentropy if entropy else None, ddivergence)
        pair_gradient(z, out, ids, s, derivatives, ours, PairRows(u, theirs), found, measure)
        scaled_z, slope = write_scaled(z, ours)
        student, teacher = scaled_z.log_softmax(-1), write_scaled(u, theirs)[0].log_softmax(-1)
        ds = ddivergence.double()[:, None] * whole_gradient(student, teacher, measure)
        p = student.exp()
        onehot = torch.stack([(torch.arange(vocabulary, device=z.device) == y) for y in ids])
        ds = ds + dlogp.double()[:, None] * (onehot.double() - p)
        if entropy:
            spread = -(p * student).sum(-1, keepdim=True)
            ds = ds - dentropy.double()[:, None] * p * (student + spread)
        inside = (ids >= 0) & (ids < vocabulary)  # an id of no column has no exact target
        torch.testing.assert_close(out.double()[inside], (ds * slope)[inside], rtol=2e-5, atol=4e-6)


@by_measure
def test_an_equal_teacher_gives_exactly_nothing(kind: str) -> None:
    z, ids, scaling = logits(V), ids_of(V).clamp(0, V - 1), Scaling(1.3)
    measure = MEASURES[kind]
    s, found = statistics(z, z.clone(), ids, scaling, scaling, measure)
    assert (found.divergence == 0).all()
    out, one = torch.full_like(z, torch.nan), torch.ones(ROWS, device=DEVICE)
    rows = PairRows(z.clone(), scaling)
    pair_gradient(z, out, ids, s, (None, None, one), scaling, rows, found, measure)
    assert (out == 0).all()


@by_measure
def test_written_over_the_logits_in_half_precision(kind: str) -> None:
    (z, u), ids, measure = pair(V), ids_of(V).clamp(0, V - 1), MEASURES[kind]
    memory = torch.empty(ROWS, 320, device=DEVICE)
    over = memory[:, :V]
    over.copy_(z)
    plain = Scaling()
    s, found = statistics(over, u, ids, plain, plain, measure)
    one = torch.ones(ROWS, device=DEVICE)
    apart = torch.empty(ROWS, V, dtype=torch.bfloat16, device=DEVICE)
    rest = (ids, s, (one, None, 2 * one), plain, PairRows(u, plain), found, measure)
    pair_gradient(z, apart, *rest)
    out = memory.view(torch.bfloat16)[:, :V]
    pair_gradient(over, out, *rest)
    assert torch.equal(out, apart)
    assert apart.isfinite().all()


@by_measure
def test_silent_rows_are_zero_and_nan_shows(kind: str) -> None:
    (z, u), ids, measure, plain = pair(V), ids_of(V).clamp(0, V - 1), MEASURES[kind], Scaling()
    z[1, 7], u[2, 9] = torch.nan, torch.nan
    s, found = statistics(z, u, ids, plain, plain, measure)
    assert found.divergence[1:3].isnan().all()
    assert found.divergence[[0, 3, 4, 5]].isfinite().all()
    weight = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0], device=DEVICE)
    out = torch.full_like(z, torch.nan)
    rest = (plain, PairRows(u, plain), found, measure)
    pair_gradient(z, out, ids, s, (None, None, weight), *rest)
    assert (out[weight == 0] == 0).all()
    assert (out[weight != 0] != 0).any(-1).all()
    pair_gradient(z, out, ids, s, (None, None, torch.ones_like(weight)), *rest)
    assert out[1:3].isnan().any(-1).all()


@by_measure
def test_entries_of_no_probability(kind: str) -> None:
    """An entry that both exclude counts for nothing."""
    (z, u), ids, measure, plain = pair(V), ids_of(V).clamp(0, 199), MEASURES[kind], Scaling()
    z[:, 200:], u[:, 200:] = -torch.inf, -torch.inf
    s, found = statistics(z, u, ids, plain, plain, measure)
    student, teacher = (x[:, :200].double().log_softmax(-1) for x in (z, u))
    expected = terms(student, teacher, measure).sum(-1)
    torch.testing.assert_close(found.divergence.double(), expected, rtol=1e-5, atol=3e-6)
    out, one = torch.full_like(z, torch.nan), torch.ones(ROWS, device=DEVICE)
    derivatives = (None, None, one)
    pair_gradient(z, out, ids, s, derivatives, plain, PairRows(u, plain), found, measure)
    assert (out[:, 200:] == 0).all()
    assert out.isfinite().all()


@by_measure
def test_two_shards_merge(kind: str) -> None:
    """The sums of two ranks equal those of one rank, whichever shard holds the largest logit."""
    (z, u), ids, measure, plain = pair(V), ids_of(V).clamp(0, V - 1), MEASURES[kind], Scaling()
    u[:, :150] += 20  # the teacher's mass is in one shard, the student's in the other
    z[:, 150:] += 15
    _, expected = statistics(z, u, ids, plain, plain, measure)
    cuts = (slice(0, 150), slice(150, V))
    partials = [
        pair_kernels.pair_partials(
            z[:, c], ids - c.start, plain, u[:, c], plain, measure.computed_kind, False
        )
        for c in cuts
    ]
    if kind == "jsd":
        student, _, _ = pair_kernels.pair_partials(
            z, ids, plain, u, plain, measure.computed_kind, False
        )
        lse = row_statistics(student).lse
        parts = [
            pair_kernels.mixture_sums(
                z[:, c], lse, plain, u[:, c], expected.lse, plain, measure.beta
            )
            for c in cuts
        ]
        of_student, of_teacher = parts[0] + parts[1]
        found = measure.beta * of_teacher + (1 - measure.beta) * of_student
        torch.testing.assert_close(found, expected.divergence, rtol=1e-5, atol=1e-6)
        return
    side = 1 if kind == "forward" else 0
    top = torch.maximum(*(p[side].max for p in partials))
    cross = sum(p[2] * (p[side].max - top).exp() for p in partials)
    total = sum(p[side].sum * (p[side].max - top).exp() for p in partials)
    mean = cross / total
    lse_z, lse_u = z.logsumexp(-1), u.logsumexp(-1)
    shift = lse_u - lse_z
    found = mean - shift if kind == "forward" else mean + shift
    torch.testing.assert_close(found, expected.divergence, rtol=1e-4, atol=1e-4)
