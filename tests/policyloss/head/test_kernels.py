"""The Triton row kernels against float64 formulas written here: every option, edges of the
vocabulary, aliasing, NaN and −inf.

Without a GPU the kernels run in Triton's interpreter, on small sizes; tiles are made small so that
rows have several and a tail.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor
from walk import in_shares, walked

from policyloss.functional.scale_kernel import write_scaled as scaled_copy
from policyloss.head import kernels, tiles
from policyloss.head import softmax_rows as rows
from policyloss.head.kernels import row_partials
from policyloss.head.matmul import Room
from policyloss.head.softmax_rows import ABSENT, Partials, Scaling
from policyloss.head.vocab_parallel import Vocabulary

ROWS = 6
KINDS = ("plain", "temperature", "per row", "bias", "softcap", "all")
# The forward reads 32 lanes · 16 bytes at once: 128 float32 or 256 halves.
# A block of 256 is then 2 or 1 entries per lane.
FORWARD, BACKWARD = (dict.fromkeys((4, 2), (block, 1)) for block in (256, 64))
# The interpreter computes with NumPy, which warns of the NaN and inf that some rows here hold.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def logits(
    vocabulary: int, dtype: torch.dtype = torch.float32, size: float = 10.0, rows: int = ROWS
) -> Tensor:
    g = torch.Generator().manual_seed(vocabulary)
    return (size * torch.randn(rows, vocabulary, generator=g)).to(dtype).to(DEVICE)


def ids_of(vocabulary: int) -> Tensor:
    """Both ends of the vocabulary, one past each of them, and two in between."""
    return torch.tensor(
        [0, vocabulary - 1, -1, vocabulary, vocabulary // 2, vocabulary // 3], device=DEVICE
    )


def scalings(vocabulary: int, rows: int = ROWS) -> dict[str, Scaling]:
    g = torch.Generator().manual_seed(1)
    per_row = (0.5 + torch.rand(rows, generator=g)).to(DEVICE)
    bias = (3 * torch.randn(vocabulary, generator=g)).to(DEVICE)
    return {
        "plain": Scaling(1.0),
        "temperature": Scaling(1 / 0.7),
        "per row": Scaling(per_row),
        "bias": Scaling(1.0, bias=bias),
        "softcap": Scaling(1.3, softcap=7.0),
        "all": Scaling(per_row, softcap=15.0, bias=bias.bfloat16()),
    }


def write_scaled(z: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """s in float64, and the derivative of s with respect to z."""
    u = z.double() + (0 if scaling.bias is None else scaling.bias.double())
    slope = torch.ones_like(u)
    if scaling.softcap is not None:
        u = scaling.softcap * torch.tanh(u / scaling.softcap)
        slope = 1 - (u / scaling.softcap) ** 2
    t = scaling.inverse_temperature
    rate = t.double()[:, None] if isinstance(t, Tensor) else t
    return u * rate, slope * rate


def expected_partials(z: Tensor, ids: Tensor, scaling: Scaling) -> Partials:
    s, _ = write_scaled(z, scaling)
    top = s.max(-1).values
    shift = s - top[:, None]
    e = shift.exp()
    target = [
        shift[i, y].item() if 0 <= y < z.shape[1] else 0.0 for i, y in enumerate(ids.tolist())
    ]
    moment = torch.where(e > 0, e * shift, 0).sum(-1)
    return Partials(
        top, e.sum(-1), moment, torch.tensor(target, dtype=torch.float64, device=z.device)
    )


def expected_gradient(
    z: Tensor, ids: Tensor, g: Tensor, h: Tensor | None, scaling: Scaling
) -> tuple[Tensor, Tensor, Tensor]:
    """lse, entropy and dz in float64; dz from the formula `g·(1[y] − p) − h·p·(log p + H)` times
    ds/dz.
    """
    s, slope = write_scaled(z, scaling)
    lse = s.logsumexp(-1)
    log_p = s - lse[:, None]
    p = log_p.exp()
    finite_log_p = torch.where(p > 0, log_p, 0)
    entropy = -(p * finite_log_p).sum(-1)
    onehot = torch.arange(z.shape[1], device=z.device) == ids[:, None]
    d = g.double()[:, None] * (onehot.double() - p)
    if h is not None:
        d = d - h.double()[:, None] * p * (finite_log_p + entropy[:, None])
    return lse, entropy, d * slope


def row_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    g: Tensor,
    h: Tensor | None,
    scaling: Scaling,
) -> None:
    """The kernel, given the log-probability of each row's own id from float64."""
    s, _ = write_scaled(z, scaling)
    column = ids.clamp(0, z.shape[1] - 1)[:, None]
    log_p = s.gather(1, column).squeeze(1) - s.logsumexp(-1)
    statistics = rows.Statistics(log_p.float(), entropy, lse)
    kernels.row_gradient(z, out, ids, statistics, g, statistics.spread(h), scaling)


@pytest.fixture(autouse=True)
def tiles_are_small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Except where a test names the default tiles."""
    if "default_tiles" not in request.node.name:
        monkeypatch.setattr(kernels, "FORWARD", FORWARD)
        monkeypatch.setattr(kernels, "BACKWARD", BACKWARD)


def derivatives(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(rows, generator=g).to(DEVICE), torch.randn(rows, generator=g).to(DEVICE)


def assert_partials(got: Partials, want: Partials) -> None:
    """Each within a few float32 roundings of its own size: logits are of size 30, so 2e-6 is one
    rounding of max and target.
    """
    torch.testing.assert_close(got.max.double(), want.max, rtol=3e-7, atol=2e-6)
    torch.testing.assert_close(got.target.double(), want.target, rtol=3e-7, atol=2e-6)
    torch.testing.assert_close(got.sum.double(), want.sum, rtol=4e-6, atol=0)
    if got.moment is not None and want.moment is not None:
        torch.testing.assert_close(got.moment.double(), want.moment, rtol=4e-6, atol=4e-6)


@walked(
    ("vocabulary", "kind"),
    [(v, k) for k in KINDS for v in (300, 1)]
    + [(33, "plain"), (33, "all"), (256, "temperature"), (517, "all")],
)
def test_partials_equal_the_formula(vocabulary: int, kind: str) -> None:
    z, ids, scaling = logits(vocabulary), ids_of(vocabulary), scalings(vocabulary)[kind]
    got = row_partials(z, ids, scaling, entropy=True)
    assert_partials(got, expected_partials(z, ids, scaling))
    assert all(x.shape == (ROWS,) and x.dtype == torch.float32 for x in got if x is not None)


def test_partials_without_entropy_are_the_same() -> None:
    z, ids, scaling = logits(300), ids_of(300), scalings(300)["all"]
    got = row_partials(z, ids, scaling, entropy=True)
    without = row_partials(z, ids, scaling, entropy=False)
    assert without.moment is None
    assert torch.equal(without.max, got.max)
    assert torch.equal(without.sum, got.sum)
    assert torch.equal(without.target, got.target)


@walked("dtype", [torch.bfloat16, torch.float16])
def test_partials_of_half_precision_logits(dtype: torch.dtype) -> None:
    z, ids, scaling = logits(300, dtype), ids_of(300), Scaling(0.8)
    assert_partials(row_partials(z, ids, scaling, entropy=True), expected_partials(z, ids, scaling))


def test_log_probabilities_of_peaked_logits_are_exact_to_2e_5() -> None:
    """Logits of size ±30 with one that stands out by 24: entropy below a nat."""
    z = logits(500, size=10.0, rows=24).clamp(-30, 30)
    ids = torch.arange(24, device=DEVICE) * 20
    z[torch.arange(24), ids] = 30.0
    s = rows.row_statistics(row_partials(z, ids, Scaling(1.0), entropy=True))
    want = z.double().log_softmax(-1)
    assert s.entropy is not None
    assert (s.logp - want[torch.arange(24), ids]).square().mean().sqrt() <= 2e-5
    assert (s.entropy + (want.exp() * want).sum(-1)).square().mean().sqrt() <= 2e-5


def test_by_hand() -> None:
    """z = (0, log 3): p = (1/4, 3/4), max = log 3, sum = 1/3 + 1 = 4/3,
    moment = 1/3·(−log 3), target of id 0 = −log 3.

    H = log(4/3) − (−log 3/3)/(4/3) = log(4/3) + log(3)/4.
    With g = 2, h = 0: dz = 2·(1 − 1/4, −3/4) = (1.5, −1.5).
    With g = 0, h = 1: dz₀ = −1/4·(log 1/4 + H) = −1/4·(−log 4 + log 4 − log 3 + log(3)/4) =
    3/16·log 3 = −dz₁.
    """
    z, ids = (
        torch.tensor([[0.0, math.log(3)]] * 2, device=DEVICE),
        torch.tensor([0, 0], device=DEVICE),
    )
    p = row_partials(z, ids, Scaling(1.0), entropy=True)
    assert p.moment is not None
    for got, want in zip(p, (math.log(3), 4 / 3, -math.log(3) / 3, -math.log(3)), strict=True):
        assert got.tolist() == pytest.approx([want] * 2, abs=3e-7)  # type: ignore[union-attr]
    lse = torch.full((2,), math.log(4), device=DEVICE)
    entropy = torch.full((2,), math.log(4 / 3) + math.log(3) / 4, device=DEVICE)
    out = torch.full_like(z, math.nan)
    g, h = torch.tensor([2.0, 0.0], device=DEVICE), torch.tensor([0.0, 1.0], device=DEVICE)
    row_gradient(z, out, ids, lse, entropy, g, h, Scaling(1.0))
    assert out[0].tolist() == pytest.approx([1.5, -1.5], abs=5e-7)
    assert out[1].tolist() == pytest.approx([3 / 16 * math.log(3), -3 / 16 * math.log(3)], abs=5e-7)


@walked(
    ("vocabulary", "kind"),
    [(150, k) for k in KINDS]
    + [(1, "plain"), (1, "all"), (33, "plain"), (128, "temperature"), (33, "all")],
)
def test_gradient_equals_the_formula(vocabulary: int, kind: str) -> None:
    z, ids, scaling = logits(vocabulary, size=3.0), ids_of(vocabulary), scalings(vocabulary)[kind]
    g, h = derivatives()
    for dentropy in (None, h):
        lse, entropy, want = expected_gradient(z, ids, g, dentropy, scaling)
        out = torch.full_like(z, math.nan)
        row_gradient(z, out, ids, lse.float(), entropy.float(), g, dentropy, scaling)
        # lse is given in float32: at a size of 20 its rounding, 1e-6,
        # is the relative error of every p.
        torch.testing.assert_close(out.double(), want, rtol=0, atol=8e-6)


@walked("dtype", [torch.bfloat16, torch.float16])
def test_gradient_in_place(dtype: torch.dtype) -> None:
    """Over z itself, same type: the same bits as into a separate tensor."""
    z, ids, scaling = logits(300, dtype, size=3.0), ids_of(300), Scaling(1 / 0.9)
    g, h = derivatives()
    lse, entropy, want = expected_gradient(z, ids, g, h, scaling)
    apart = torch.full_like(z, math.nan)
    row_gradient(z, apart, ids, lse.float(), entropy.float(), g, h, scaling)
    torch.testing.assert_close(apart.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    row_gradient(z, z, ids, lse.float(), entropy.float(), g, h, scaling)
    assert torch.equal(z, apart)


@walked(
    ("vocabulary", "dtype"), [(33, torch.bfloat16), (128, torch.float16), (300, torch.bfloat16)]
)
def test_gradient_in_the_first_half_of_its_own_float32_rows(
    vocabulary: int, dtype: torch.dtype
) -> None:
    """Each row of a float32 buffer is overwritten by its gradient in half precision,
    from its first byte.
    """
    z, ids, scaling = logits(vocabulary, size=3.0), ids_of(vocabulary), Scaling(1.0)
    g, h = derivatives()
    lse, entropy, want = expected_gradient(z, ids, g, h, scaling)
    apart = torch.full((ROWS, vocabulary), math.nan, dtype=dtype, device=DEVICE)
    row_gradient(z, apart, ids, lse.float(), entropy.float(), g, h, scaling)
    torch.testing.assert_close(apart.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    before, narrow = z.clone(), z.view(dtype)[:, :vocabulary]
    row_gradient(z, narrow, ids, lse.float(), entropy.float(), g, h, scaling)
    assert torch.equal(narrow, apart)
    # The memory behind the gradient is unchanged.
    kept = -(-vocabulary // 2)
    assert torch.equal(z[:, kept:], before[:, kept:])


def test_rows_with_a_stride_are_read_and_written_within_their_columns() -> None:
    wide, ids, scaling = logits(340), ids_of(300), Scaling(1.0)
    z = wide[:, 7:307]
    assert_partials(row_partials(z, ids, scaling, entropy=True), expected_partials(z, ids, scaling))
    g, h = derivatives()
    lse, entropy, want = expected_gradient(z, ids, g, h, scaling)
    buffer = torch.full((ROWS, 331), math.nan, device=DEVICE)
    row_gradient(z, buffer[:, 11:311], ids, lse.float(), entropy.float(), g, h, scaling)
    torch.testing.assert_close(buffer[:, 11:311].double(), want, rtol=0, atol=8e-6)
    assert buffer[:, :11].isnan().all()
    assert buffer[:, 311:].isnan().all()


@walked("nothing", [-math.inf, ABSENT])
@walked("place", [slice(0, 290), slice(256, None), slice(3, 299, 2), slice(0, 0)])
def test_minus_infinity_is_probability_zero(place: slice, nothing: float) -> None:
    """A whole first tile, a tail, every other entry: each counts as if it were not there."""
    z, ids, scaling = logits(300, size=3.0), torch.full((ROWS,), 297, device=DEVICE), Scaling(0.9)
    z[1::2, place] = nothing
    z[:, 297] = 1.0
    got = row_partials(z, ids, scaling, entropy=True)
    assert_partials(got, expected_partials(z, ids, scaling))
    g, h = derivatives()
    lse, entropy, want = expected_gradient(z, ids, g, h, scaling)
    for dentropy, reference in ((h, want), (None, expected_gradient(z, ids, g, None, scaling)[2])):
        out = torch.full_like(z, math.nan)
        row_gradient(z, out, ids, lse.float(), entropy.float(), g, dentropy, scaling)
        torch.testing.assert_close(out.double(), reference, rtol=0, atol=8e-6)
        assert (out[z == nothing] == 0).all()


def test_a_row_of_nothing_but_minus_infinity_has_an_empty_sum() -> None:
    """As one shard of a vocabulary may have: it adds nothing to the other shards."""
    z = torch.full((1, 300), -math.inf, device=DEVICE)
    got = row_partials(z, torch.tensor([-1], device=DEVICE), Scaling(1.0), entropy=True)
    assert [x.item() for x in got if x is not None] == [-math.inf, 0.0, 0.0, 0.0]


@walked("column", [0, 255, 299])
def test_nan_stays_in_its_row(column: int) -> None:
    z, ids = logits(300, size=3.0), ids_of(300)
    clean = row_partials(z, ids, Scaling(1.0), entropy=True)
    z[2, column] = math.nan
    got = row_partials(z, ids, Scaling(1.0), entropy=True)
    others = torch.tensor([0, 1, 3, 4, 5], device=DEVICE)
    for x, before in zip(got, clean, strict=True):
        assert x is not None
        assert before is not None
        assert torch.equal(x[others], before[others])
    assert got.max[2].isnan()
    assert got.sum[2].isnan()
    statistics = rows.row_statistics(got)
    g, h = derivatives()
    out = torch.zeros_like(z)
    row_gradient(z, out, ids, statistics.lse, statistics.entropy, g, h, Scaling(1.0))
    assert out[2].isnan().all()
    assert out[others].isfinite().all()


def test_rows_without_a_derivative_are_zero_whatever_they_hold() -> None:
    z, ids = logits(300), ids_of(300)
    z[1], z[4, 7] = math.nan, math.inf
    statistics = rows.row_statistics(row_partials(z, ids, Scaling(1.0), entropy=True))
    g, h = torch.ones(ROWS, device=DEVICE), torch.ones(ROWS, device=DEVICE)
    g[[1, 4]] = h[[1, 4]] = 0
    out = torch.full_like(z, math.nan)
    row_gradient(z, out, ids, statistics.lse, statistics.entropy, g, h, Scaling(1.0))
    assert (out[[1, 4]] == 0).all()
    assert (out[[0, 2, 3, 5]].abs().amax(-1) > 0).all()
    out.fill_(math.nan)
    row_gradient(z, out, ids, statistics.lse, None, g, None, Scaling(1.0))
    assert (out[[1, 4]] == 0).all()
    assert out[[0, 2, 3, 5]].isfinite().all()


def test_shards_of_the_vocabulary_merge_into_the_whole() -> None:
    """Each shard sees an id outside of it as none of its own;
    targets and sums are moved to the larger maximum.
    """
    z, ids = logits(300), torch.tensor([0, 299, 120, 121, 5, 200], device=DEVICE)
    whole = expected_partials(z, ids, Scaling(1.0))
    a = row_partials(z[:, :121], ids, Scaling(1.0), entropy=True)
    b = row_partials(z[:, 121:], ids - 121, Scaling(1.0), entropy=True)
    top = torch.maximum(a.max, b.max)
    assert [(x == 0).tolist() for x in (a.target, b.target)] == [
        [x > 120 for x in ids.tolist()],
        [x < 121 for x in ids.tolist()],
    ]
    target = torch.where(ids < 121, a.target + a.max, b.target + b.max) - top
    torch.testing.assert_close(target.double(), whole.target, rtol=3e-7, atol=4e-6)
    total = a.sum * (a.max - top).exp() + b.sum * (b.max - top).exp()
    torch.testing.assert_close(total.double(), whole.sum, rtol=4e-6, atol=0)


def test_no_rows_launch_nothing() -> None:
    z, ids = torch.empty(0, 33, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    got = row_partials(z, ids, Scaling(1.0), entropy=True)
    assert [tuple(x.shape) for x in got if x is not None] == [(0,)] * 4
    row_gradient(z, z, ids, got.max, got.sum, got.max, got.sum, Scaling(1.0))


def test_the_same_input_gives_the_same_bits() -> None:
    z, ids, (g, h) = logits(517), ids_of(517), derivatives()
    first, second = (row_partials(z, ids, Scaling(0.9), entropy=True) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None
    )
    statistics = rows.row_statistics(first)
    outs = [torch.full_like(z, math.nan) for _ in range(2)]
    for out in outs:
        row_gradient(
            z,
            out,
            ids,
            statistics.lse,
            statistics.entropy,
            g,
            h,
            Scaling(0.9),
        )
    assert torch.equal(*outs)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: real sizes")
@walked("vocabulary", [151936, 128256, 50257])
@walked("dtype", [torch.float32, torch.bfloat16])
def test_real_vocabularies_with_the_default_tiles(vocabulary: int, dtype: torch.dtype) -> None:
    z, ids, (g, h) = logits(vocabulary, dtype, size=4.0), ids_of(vocabulary), derivatives()
    got = row_partials(z, ids, Scaling(1.0), entropy=True)
    assert_partials(got, expected_partials(z, ids, Scaling(1.0)))
    lse, entropy, want = expected_gradient(z, ids, g, h, Scaling(1.0))
    narrow = z if dtype == torch.bfloat16 else z.view(torch.bfloat16)[:, :vocabulary]
    row_gradient(z, narrow, ids, lse.float(), entropy.float(), g, h, Scaling(1.0))
    torch.testing.assert_close(narrow.double(), want, rtol=2**-7, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: more than 2³¹ elements")
def test_rows_past_two_to_the_31_elements() -> None:
    """2¹⁷ rows of 2¹⁴ + 32 entries: the last row starts past element 2³¹."""
    z = torch.zeros(1 << 17, (1 << 14) + 32, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.zeros(1 << 17, dtype=torch.int64, device=DEVICE)
    z[-1, 0] = 20.0
    got = row_partials(z, ids, Scaling(1.0), entropy=False)
    # One rounding of 20.
    assert got.max[[0, -2, -1]].tolist() == pytest.approx([0.0, 0.0, 20.0], abs=2e-6)
    assert got.target[[0, -2, -1]].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=2e-6)
    assert got.target[0] == 0
    g = torch.zeros(1 << 17, device=DEVICE)
    g[-1] = 1.0
    row_gradient(z, z, ids, got.max + got.sum.log(), None, g, None, Scaling(1.0))
    # 1 − p of the last row's id, with p = e²⁰/(e²⁰ + 16415)
    assert z[-1, 0].item() == pytest.approx(16415 / (math.exp(20) + 16415), rel=2e-2)
    assert (z[:-1] == 0).all()


@walked("n", [0, 1, 4096, 9001])
@walked("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_copy(n: int, dtype: torch.dtype) -> None:
    """`out = x * factor` in the type of out; nothing is written past its end. In place too.

    A GPU rounds float32 to the nearest bfloat16.
    Triton's interpreter cuts off the lower half of its bits.
    """
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    factor = torch.tensor(0.3, device=DEVICE)
    room = torch.full((n + 7,), math.nan, dtype=dtype, device=DEVICE)
    scaled_copy(x, factor, room[:n])
    want = x * factor
    cut = (
        (want.view(torch.int32) & -65536).view(torch.float32)
        if DEVICE == "cpu" and dtype == torch.bfloat16
        else want
    )
    assert torch.equal(room[:n], cut.to(dtype))
    assert room[n:].isnan().all()
    scaled_copy(x, factor, x)
    assert torch.equal(x, want)


@in_shares(2)
@walked("kind", KINDS)
def test_parts_of_a_vocabulary_are_rows_to_the_kernel(
    kind: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the exact mode one launch serves all parts, with the bits of a launch for each."""
    entropy = (KINDS.index(kind) + share) % 2 == 0
    monkeypatch.setattr(tiles, "row_partials", partial(kernels.row_partials))
    monkeypatch.setattr(tiles, "kernels_for", lambda z, scaling: kernels)
    vocabulary = 8 * 144
    parts = tiles.Tiles.of_vocabulary(Vocabulary(vocabulary, vocabulary), logits(vocabulary).t())
    z = logits(vocabulary, rows=2)  # the interpreter takes 14 ms for each part of each row
    apart = torch.cat([z, z], 1)[:, :vocabulary]  # rows that do not follow each other
    tables = [
        parts.partials(x, ids_of(vocabulary)[:2], scalings(vocabulary, 2)[kind], entropy)
        for x in (z, apart)
    ]
    assert tables[0].shape == (8, 4 if entropy else 3, 2)
    assert torch.equal(tables[0], tables[1])
    assert tables[0][0, 2, 0] != 0  # the first id lies in the first part


def test_a_lone_row_is_read_with_the_stride_of_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is compiled for another alignment of rows sums in another order."""
    strides = []

    def noticed(z: Tensor, *rest: object) -> Partials:
        strides.append(z.stride(0))
        return rows.row_partials(z, *rest)

    monkeypatch.setattr(tiles, "row_partials", noticed)
    monkeypatch.setattr(tiles, "kernels_for", lambda z, scaling: kernels)
    for vocabulary, expected in ((17, 64), (48, 64), (128, 16)):
        parts = tiles.Tiles.of_vocabulary(
            Vocabulary(vocabulary, vocabulary), logits(vocabulary).t()
        )
        for count in (1, 2):
            z = Room(count, vocabulary, logits(vocabulary), torch.float32).logits(count, vocabulary)
            z.copy_(logits(vocabulary)[:count])
            parts.partials(z, torch.zeros_like(z[:, 0]).long(), Scaling(1.0), True)
            assert set(strides) == {expected}
        strides.clear()
