"""`bits_check` finds whether functions are batch-invariant, and where two first differ."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import policyloss as pl
from policyloss.check import bits

VOCAB, SIZE = 1000, 64
G = torch.Generator().manual_seed(0)
EMBEDDING = torch.randn(VOCAB, SIZE, generator=G)
WEIGHT = torch.randn(VOCAB, SIZE, generator=G) / SIZE**0.5
SEQUENCES = [torch.randint(VOCAB, (n,), generator=G) for n in (5, 21, 1, 12)]
RUNS = ("once more", "alone", "in the reverse order", "with one other", "every sequence twice")


def head(sequences: list[Tensor]) -> list[Tensor]:
    """The head on a pack, in whatever mode is on."""
    ids = torch.cat(sequences)
    logp = pl.linear_logprobs(EMBEDDING[ids], WEIGHT, ids).logp
    return list(logp.split([len(x) for x in sequences]))


def by_hand(sequences: list[Tensor]) -> list[Tensor]:
    """Invariant by construction: each number is a function of its token alone."""
    return [-(x.float() + 1).sqrt() for x in sequences]


def different(report: pl.BitsReport) -> dict[str, int]:
    return {result.name: result.different for result in report.arrangements}


def test_an_invariant_function():
    report = pl.bits_check(by_hand, SEQUENCES)
    assert report.is_invariant
    assert report.is_equal
    assert different(report) == dict.fromkeys(RUNS, 0)
    report.raise_if_different()
    assert str(report).startswith(
        "The function is batch-invariant (4 sequences, 39 log-probabilities)."
    )


def test_products_with_a_kernel_chosen_by_shape():
    """MKL multiplies one row and three in another order than many."""
    report = pl.bits_check(head, SEQUENCES)
    assert not report.is_invariant
    assert different(report)["once more"] == 0
    assert different(report)["alone"] > 0


def test_the_exact_head():
    with pl.exact():
        assert pl.bits_check(head, SEQUENCES).is_invariant


@pytest.mark.parametrize(
    ("shift", "names"),
    [
        (lambda sequences, i: i, {"in the reverse order", "with one other", "alone"}),
        (lambda sequences, i: len(sequences), {"alone", "with one other", RUNS[-1]}),
        (lambda sequences, i: max(map(len, sequences)), {"alone", "with one other"}),
    ],
    ids=["by the place", "by the number", "by the padding"],
)
def test_dependences_made_on_purpose(shift, names):
    """A number moves by as many ulps as the place, the batch size or the longest sequence."""

    def spoiled(sequences: list[Tensor]) -> list[Tensor]:
        return [
            (-x.float() - 1).view(torch.int32).add(shift(sequences, i)).view(torch.float32)
            for i, x in enumerate(sequences)
        ]

    report = pl.bits_check(spoiled, SEQUENCES)
    assert not report.is_invariant
    assert {name for name, n in different(report).items() if n} >= names
    with pytest.raises(AssertionError, match="is not batch-invariant"):
        report.raise_if_different()


def test_a_function_that_is_not_deterministic():
    calls = itertools.count()
    report = pl.bits_check(lambda xs: [-x.float() - next(calls) for x in xs], SEQUENCES)
    assert "does not give the same bits twice" in str(report)


def test_where_the_first_bits_differ_by_hand():
    """Sequence 1 differs at its token 0 by 1 ulp (2⁻²³ at −1), sequence 0 at its token 2 by 3."""
    ours = [torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0])]
    step = 2.0**-23
    theirs = [[-1.0, -1.0, -1.0 - 3 * step], [-1.0 - step, -1.0]]
    report = pl.bits_check(lambda xs: [ours[i] for i in xs], [0, 1], against=theirs)
    result = report.against
    assert result is not None
    assert (result.tokens, result.different, result.ulps) == (5, 2, 3)
    assert result.first == (1, 0)
    assert result.values == (-1.0 - step, -1.0)
    assert result.histogram == {1: 1, 4: 1}
    assert report.is_invariant
    assert not report.is_equal
    assert (
        "2 of 5 log-probabilities have other bits. The first is token 0 of sequence 1: -1 where "
        "-1.00000012 was expected. They differ by units in the last place: 1 by 1, 1 by at most 4."
    ) in " ".join(str(report).split())


def test_another_function():
    report = pl.bits_check(by_hand, SEQUENCES, against=by_hand)
    assert report.is_equal
    assert "all 39 log-probabilities have the same bits" in " ".join(str(report).split())
    other = pl.bits_check(
        by_hand, SEQUENCES, against=lambda xs: [y.nextafter(y + 1) for y in by_hand(xs)]
    )
    assert other.against is not None
    assert (other.against.different, other.against.ulps) == (39, 1)


def test_numbers_of_two_types_are_compared_in_the_narrower():
    exact = [torch.tensor([-0.1], dtype=torch.float64)]
    rounded = [torch.tensor([-0.1])]
    assert pl.bits_check(lambda xs: exact * len(xs), [0], against=rounded).is_equal
    halves = [torch.tensor([-0.1], dtype=torch.bfloat16)]
    report = pl.bits_check(lambda xs: rounded * len(xs), [0], against=halves)
    assert report.is_equal
    assert report.against is not None
    assert report.against.dtype == torch.bfloat16


def test_distances_by_hand():
    """Zero has two signs and one value; the smallest numbers are one step from it on each side."""
    least = 2.0**-149
    a = torch.tensor([0.0, least, math.nan, math.nan, 1.0, math.inf])
    b = torch.tensor([-0.0, -least, math.nan, 1.0, 2.0, 3.4028234663852886e38])
    assert bits._distances(a, b).tolist() == [0, 2, 0, bits._BEYOND, 2**23, 1]


def test_numbers_of_two_signs():
    """The likely mistake: negative log-likelihoods. In float64 the distance leaves an int64."""
    for x in (1.0, 2.0, 2.5, 1e300):
        ours, theirs = [torch.tensor([-x], dtype=torch.float64)], [[x]]
        report = pl.bits_check(lambda xs, ours=ours: ours * len(xs), [0], against=theirs)
        assert report.against is not None
        assert (report.against.different, report.against.ulps) == (1, 2**61)
        assert "NaN" not in str(report)
        assert f"1 by at most {2**61}" in " ".join(str(report).split())


def test_numbers_that_are_none_are_named():
    """The same NaN everywhere is invariant, and no log-probability."""
    report = pl.bits_check(lambda xs: [torch.tensor([-1.0, math.nan])] * len(xs), [0, 1])
    assert report.is_invariant
    assert report.not_numbers == 2
    assert "2 of the 4 log-probabilities are NaN." in " ".join(str(report).split())
    assert "NaN" not in str(pl.bits_check(by_hand, SEQUENCES))


def test_a_buffer_that_every_call_writes_into():
    """The first result must not change when the function is called again."""
    buffer = torch.zeros(4)

    def by_number(sequences: list[int]) -> list[Tensor]:
        buffer[:] = -float(len(sequences))
        return [buffer[i : i + 1] for i in range(len(sequences))]

    assert not pl.bits_check(by_number, [0, 1]).is_invariant


def test_a_report_names_the_remedy():
    def text(report: pl.BitsReport) -> str:
        return " ".join(str(report).split())

    calls = itertools.count()
    random = pl.bits_check(lambda xs: [-x.float() - next(calls) for x in xs], SEQUENCES)
    assert "model.eval()" in text(random)
    dependent = text(pl.bits_check(lambda xs: [-x.float() - len(xs) for x in xs], SEQUENCES))
    assert "with policyloss.exact()" in dependent
    assert "model.eval()" not in dependent
    other = text(pl.bits_check(by_hand, SEQUENCES, against=lambda xs: [2 * y for y in by_hand(xs)]))
    assert "compare their hidden states, then their logits" in other
    assert "policyloss.exact()" not in other


def test_an_error_of_the_function_names_the_run():
    def fails_alone(sequences: list[Tensor]) -> list[Tensor]:
        if len(sequences) == 1:
            raise KeyError("too short")
        return by_hand(sequences)

    with pytest.raises(KeyError, match="too short") as raised:
        pl.bits_check(fails_alone, SEQUENCES)
    if sys.version_info >= (3, 11):
        notes = ["bits_check called fn with sequence 0 of 4 (run: alone)."]
        assert raised.value.__notes__ == notes


def test_a_number_against_nan_is_named():
    report = pl.bits_check(lambda xs: [torch.tensor([1.0])] * len(xs), [0], against=[[math.nan]])
    assert "1 against NaN" in str(report)


def test_a_notebook_shows_the_table():
    html = pl.bits_check(by_hand, SEQUENCES)._repr_html_()
    assert "batch-invariant" in html
    assert html.count("<tr>") == 1 + len(RUNS)


@pytest.mark.parametrize(
    ("fn", "sequences", "against", "message"),
    [
        (by_hand, [], None, "sequences is empty"),
        (lambda xs: by_hand(xs)[:-1], SEQUENCES, None, "one entry per sequence, 4, got 3"),
        (lambda xs: 1.0, SEQUENCES, None, "one entry per sequence, 4, got float"),
        (lambda xs: [x[None].float() for x in xs], SEQUENCES, None, r"shape \(1, 5\)"),
        (lambda xs: list(xs), SEQUENCES, None, "dtype torch.int64"),
        (lambda xs: [None] * len(xs), SEQUENCES, None, "sequence 0: NoneType"),
        (lambda xs: [["a"]] * len(xs), SEQUENCES, None, "sequence 0: list"),
        (lambda xs: dict(enumerate(by_hand(xs))), SEQUENCES, None, "got dict"),
        (by_hand, SEQUENCES, "abcd", "against must hold .* got str"),
        (lambda xs: [x[:0].float() for x in xs], SEQUENCES, None, "no log-probability at all"),
        (lambda xs: [x.float().to(torch.float8_e5m2) for x in xs], SEQUENCES, None, "float8"),
        (by_hand, SEQUENCES, [[-1.0]] * 4, "against: sequence 0 has 5 log-probabilities, and 1"),
        (by_hand, SEQUENCES, [[-1.0]], "against must hold one entry per sequence, 4, got 1"),
    ],
)
def test_wrong_arguments(fn: Any, sequences: Any, against: Any, message: str):
    with pytest.raises(pl.InputError, match=message):
        pl.bits_check(fn, sequences, against=against)
