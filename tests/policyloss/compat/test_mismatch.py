"""Diagnostics between trainer and rollout engine, on numbers done by hand."""

from math import inf, isnan, log, nan, sqrt

import pytest
import torch
from walk import walked

import policyloss as pl
from policyloss.compat.verl import rollout_metrics as mismatch
from policyloss.compat.verl.rollout_metrics import Means
from policyloss.compat.verl.rollout_thresholds import reciprocal_band
from policyloss.functional.correction import reduced, within
from policyloss.functional.kl import estimate

LN2 = log(2)
TINY = 1e-300  # vanishes next to any count, and makes an empty sequence's mean 0
# Three sequences: two tokens, one token (with garbage next to it), none.
MASK = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.float64)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def means(epsilon=TINY, mask=MASK):
    return Means(mask, epsilon)


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dim() == 0, name
        assert found[name].item() == pytest.approx(value, rel=1e-14, abs=1e-14), name


def test_policy_gap_by_hand():
    # In units of ln 2: logp −1 −2 | −3 |, rollout −2 −3 | 0 |, so d = 1 1 | −3 |,
    # and the sums of d are 2, −3, 0.
    logp, rollout = (
        LN2 * tensor([-1, -2], [-3, nan], [inf, 5]),
        LN2 * tensor([-2, -3], [0, 7], [nan, -inf]),
    )
    found = mismatch.policy_gap(logp, rollout, means())
    check(
        found,
        {
            # mean logp −1.5, −3, 0: perplexities 2^1.5, 8, 1
            "training_ppl": (2**1.5 + 8 + 1) / 3,
            "training_log_ppl": 1.5 * LN2,
            # mean rollout logp −2.5, 0, 0
            "rollout_ppl": (2**2.5 + 1 + 1) / 3,
            "rollout_log_ppl": 2.5 / 3 * LN2,
            # their differences −1, 3, 0
            "log_ppl_diff": 2 / 3 * LN2,
            "log_ppl_abs_diff": 4 / 3 * LN2,
            "log_ppl_diff_max": 3 * LN2,
            "log_ppl_diff_min": -LN2,
            "ppl_ratio": (0.5 + 8 + 1) / 3,
            "kl": (-1 - 1 + 3) / 3 * LN2,
            # eᵈ − 1 − d: twice 1 − ln 2, and 1/8 − 1 + 3 ln 2
            "k3_kl": (9 / 8 + LN2) / 3,
            "chi2_token": (4 + 4 + 1 / 64) / 3 - 1,
            "chi2_seq": (16 + 1 / 64 + 1) / 3 - 1,
        },
    )


def test_policy_gap_without_the_engine_is_the_trainers_perplexity():
    logp = LN2 * tensor([-1, -2], [-3, nan], [inf, 5])
    check(
        mismatch.policy_gap(logp, None, means()),
        {"training_ppl": (2**1.5 + 9) / 3, "training_log_ppl": 1.5 * LN2},
    )


def test_chi_square_clamps_the_logarithm_and_k3_does_not():
    # d = 3 and sum 3 with a clamp of 2: e⁴ − 1 for both; k3 is e³ − 4.
    mask = torch.ones(1, 1, dtype=torch.float64)
    found = mismatch.policy_gap(tensor([0.0]), tensor([-3.0]), means(mask=mask), log_clamp=2.0)
    e = tensor(1.0).exp().item()
    for name, value in {"chi2_token": e**4 - 1, "chi2_seq": e**4 - 1, "k3_kl": e**3 - 4}.items():
        assert found[name].item() == pytest.approx(value, rel=1e-14)


def test_epsilon_is_added_to_every_count():
    x = tensor([2, 4], [9, nan], [nan, nan])
    m = means(epsilon=1.0)
    assert m.of_tokens(x).item() == 15 / (3 + 1)
    assert m.of_sequences(x).tolist() == [6 / 3, 9 / 2, 0]
    exact = means(epsilon=0.0)
    assert exact.of_tokens(x).item() == 5
    assert exact.of_sequences(x)[:2].tolist() == [3, 9]
    assert isnan(exact.of_sequences(x)[2])


@walked("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_counts_are_taken_in_the_masks_own_dtype(dtype):
    # 10 / (3 + 1e-8) in float64; an integer count plus 1e-8 is float32,
    # where 1e-8 vanishes next to 3.
    m = means(epsilon=1e-8, mask=MASK.to(dtype))
    expected = 10 / (3 + 1e-8) if dtype == torch.float64 else 10 / 3
    assert m.of_tokens(tensor([1, 2], [7, nan], [nan, nan])).item() == pytest.approx(
        expected, rel=1e-15
    )
    assert m.of_sequences(tensor([1, 2], [7, nan], [nan, nan]))[2].item() == 0


def test_sums_are_taken_in_the_wider_dtype_of_values_and_mask():
    tenth = torch.tensor(0.1)
    found = means().of_tokens(tenth.expand(3, 2))
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(tenth.double().item(), rel=1e-15)


def test_flags_are_averaged_in_float32():
    flags = torch.tensor([[True, False], [False, True], [True, True]])
    assert (
        means(mask=MASK.float(), epsilon=1e-8).of_tokens(flags).item()
        == torch.tensor(1 / 3, dtype=torch.float32).item()
    )
    assert means(epsilon=1e-8).of_tokens(flags).item() == 1 / (3 + 1e-8)


def test_bounded_weight_truncates_or_zeroes():
    w = tensor([0.5, 0.4], [2.0, 2.1])
    assert mismatch.bounded_weight(w, None, 2.0).tolist() == [[0.5, 0.4], [2.0, 2.0]]
    assert mismatch.bounded_weight(w, 0.5, 2.0).tolist() == [[0.5, 0], [2.0, 0]]
    assert reciprocal_band(4.0) == (0.25, 4.0)
    assert reciprocal_band(4.0, 0.5) == (0.5, 4.0)


def test_normalised_over_tokens_and_sequences():
    w = tensor([1, 2], [6, 0], [0, 0])
    scaled, factor = mismatch.normalise(w, means(), "tokens")
    assert factor.item() == 3  # (1 + 2 + 6) / 3
    assert scaled.tolist() == [[1 / 3, 2 / 3], [2, 0], [0, 0]]
    _, factor = mismatch.normalise(w, means(), "sequences")
    assert factor.item() == 3.75  # (1.5 + 6) / 2


def test_normalised_has_epsilon_in_the_mean_over_the_tokens_of_one_process():
    w = tensor([1, 2], [6, 0], [0, 0])
    assert mismatch.normalise(w, means(epsilon=1.0), "tokens")[1].item() == 9 / 4
    # Each sequence's own mean has it, (1 + 2) / 3 and 6 / 2; the mean of the two has not.
    assert mismatch.normalise(w, means(epsilon=1.0), "sequences")[1].item() == 2


def test_normalised_over_ranks(monkeypatch):
    # The other rank has 5 tokens of weight 31 in all: (9 + 31) / (3 + 5), with no epsilon.
    others = {9.0: 31.0, 3.0: 5.0}
    monkeypatch.setattr(
        mismatch, "all_sum", lambda x, group: x + others[x.item()] if group == "two ranks" else x
    )
    w = tensor([1, 2], [6, 0], [0, 0])
    assert mismatch.normalise(w, means(epsilon=1.0), "tokens", group="two ranks")[1].item() == 5


def test_weights_that_are_all_zero_stay_so():
    zero = torch.zeros(3, 2, dtype=torch.float64)
    scaled, factor = mismatch.normalise(zero, means(), "tokens")
    assert factor.item() == 1
    assert torch.equal(scaled, zero)
    assert mismatch.normalise(zero + 1e-9, means(epsilon=1e-8), "tokens")[1].item() == 1
    for epsilon in (0.0, TINY, 1e-8):
        found = mismatch.weight_spread(zero, means(epsilon), 2.0)
        assert {name: x.item() for name, x in found.items()} == {
            "mean": 0,
            "std": 0,
            "eff_sample_size": 0,
        }


def test_token_weight_limits_judge_the_raw_weights():
    # Valid raw weights 0.5, 3, 2: one above 2 (2 itself is not), one below 1.
    applied, raw = tensor([0.5, 0], [2, -9], [99, 99]), tensor([0.5, 3], [2, -9], [99, 99])
    found = mismatch.token_weight_limits(applied, raw, means(), 1.0, 2.0)
    check(found, {"max": 2, "min": 0, "ratio_fraction_high": 1 / 3, "ratio_fraction_low": 1 / 3})


def test_sequence_weight_limits_count_every_sequence_in_float32():
    # Weights e³, 1, ½ against [0.7, 2]: one above, one below, of three; e³ is held at e².
    log_weight = tensor([3.0], [0.0], [-LN2])
    found = mismatch.sequence_weight_limits(log_weight, 0.7, 2.0, log_clamp=2.0)
    third = torch.tensor(1 / 3, dtype=torch.float32).item()
    e2 = tensor(2.0).exp().item()
    check(found, {"max": e2, "min": 0.5, "ratio_fraction_high": third, "ratio_fraction_low": third})


def test_sequence_bounds_are_logarithms_in_float32():
    # ln 0.7 in float32 lies 2.5e-8 below the true one;
    # what lies between them is not below the bound.
    true, rounded = log(0.7), torch.tensor(0.7).log().item()
    assert true > rounded
    between, beyond = tensor([(true + rounded) / 2]), tensor([rounded - 1e-9])
    assert mismatch.sequence_weight_limits(between, 0.7, 2.0)["ratio_fraction_low"].item() == 0
    assert mismatch.sequence_weight_limits(beyond, 0.7, 2.0)["ratio_fraction_low"].item() == 1


def test_weight_spread_by_hand():
    # Clamped to [0, 4]: 1, 4, 4. Mean 3, mean square 11: std √2, ESS 9/11.
    # The mean is of the weights as they are.
    found = mismatch.weight_spread(tensor([1, 4], [10, nan], [nan, nan]), means(), 4.0)
    check(found, {"mean": 15 / 3, "std": sqrt(2), "eff_sample_size": 9 / 11})


def test_spread_of_one_token_is_zero():
    # With epsilon 1, E[x²] − E[x]² of a single 2 would be 4/2 − 1 = 1.
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert mismatch.clamped_deviation(tensor([2, 7]), means(1.0, one), 0.0, 5.0).item() == 0


def test_weights_by_sequence_by_hand():
    # Applied means 1.5, 4, 0; raw means 3, 4, 0 against [0.5, 2].
    applied, raw = tensor([1, 2], [4, 9], [9, 9]), tensor([2, 4], [4, 9], [9, 9])
    values, judged = (means().of_sequences(x) for x in (applied, raw))
    found = mismatch.of_each_sequence(values, judged, 0.5, 2.0, center=1.0)
    third = torch.tensor(1 / 3, dtype=torch.float32).item()
    two_thirds = torch.tensor(2 / 3, dtype=torch.float32).item()
    mean = 5.5 / 3
    variance = ((1.5 - mean) ** 2 + (4 - mean) ** 2 + mean**2) / 2
    check(
        found,
        {
            "seq_mean": mean,
            "seq_std": sqrt(variance),
            "seq_max": 4,
            "seq_min": 0,
            "seq_max_deviation": 3,
            "seq_fraction_high": two_thirds,
            "seq_fraction_low": third,
        },
    )


STAT = [1, -5], [4, nan], [nan, nan]
HALF, THIRD = 0.5, 1 / 3


def rejection(low, high, by_sequence, of_sequence=None):
    m = means()
    values = None if of_sequence is None else torch.tensor(of_sequence, dtype=torch.float64)
    return mismatch.rejection_statistics(
        tensor(*STAT), values, m.nonempty, m, low, high, by_sequence
    )


def test_rejection_statistics_over_tokens():
    # Tokens 1, −5, 4 against [−3, 3]; clamped 1, −3, 3: mean 1/3, mean square 19/3.
    # Sequences −2 and 4, deviation from 0.
    expected = {
        "mean": 0,
        "max": 4,
        "min": -5,
        "fraction_high": THIRD,
        "fraction_low": THIRD,
        "std": sqrt(19 / 3 - 1 / 9),
        "seq_mean": 1,
        "seq_std": sqrt(18),
        "seq_max": 4,
        "seq_min": -2,
        "seq_max_deviation": 4,
        "seq_fraction_high": HALF,
        "seq_fraction_low": 0,
    }
    check(rejection(-3.0, 3.0, by_sequence=False), expected)


def test_rejection_statistics_over_sequences_that_have_tokens():
    # The empty sequence's 9 is not looked at.
    found = rejection(-3.0, 3.0, by_sequence=True, of_sequence=[-6.0, 4.0, 9.0])
    values = {name: x.item() for name, x in found.items()}
    assert (values["max"], values["min"], values["fraction_high"], values["fraction_low"]) == (
        4,
        -6,
        HALF,
        HALF,
    )
    assert (values["seq_mean"], values["seq_max_deviation"], values["seq_fraction_low"]) == (
        -1,
        6,
        HALF,
    )
    assert values["mean"] == 0  # always over tokens


def test_rejection_without_a_lower_bound():
    # Nothing is too low, and the spread is of 1, 0, 3: the statistic is a divergence, clamped at 0.
    found = rejection(None, 3.0, by_sequence=False)
    assert found["fraction_low"].item() == 0
    assert "seq_fraction_low" not in found
    assert found["std"].item() == pytest.approx(sqrt(10 / 3 - 16 / 9), rel=1e-14)


def test_rejection_statistics_of_no_sequence():
    m = means()
    none = torch.zeros(3, dtype=torch.bool)
    found = mismatch.rejection_statistics(tensor(*STAT), None, none, m, None, 3.0, by_sequence=True)
    assert {name: x.item() for name, x in found.items() if name.startswith("seq")} == dict.fromkeys(
        (
            f"seq_{x}"
            for x in ("mean", "std", "max", "min", "max_deviation", "fraction_high", "fraction_low")
        ),
        0,
    )
    assert found["max"].item() == 4


def test_rejected_shares():
    # Valid tokens kept, dropped | kept |: one of three tokens,
    # one of two sequences with tokens, one of three in all.
    keep = torch.tensor([[True, False], [True, False], [False, False]])
    assert mismatch.rejected_tokens(keep, means(), torch.float64).item() == THIRD
    assert (
        mismatch.rejected_sequences(keep, means()).item()
        == torch.tensor(THIRD, dtype=torch.float32).item()
    )
    assert mismatch.rejected_sequences(keep, means(), "nonempty", torch.float64).item() == HALF


def test_the_share_outside_a_band():
    w = tensor([0.5, 3], [2, 99], [99, 99])
    assert mismatch.rejected_tokens(within(w, 1.0, 2.0), means()).item() == 2 / 3


def test_epsilon_in_the_mean_of_a_sequence():
    # Sums 4 and 6 over two tokens and one, epsilon 1: 4/3 and 3; without it 2 and 6.
    x, m = tensor([3, 1], [6, 0], [0, 0]), means(1.0)
    assert m.reduce(x, "mean")[:, 0].tolist() == [4 / 3, 3, 0]
    assert reduced(x, "mean", m.valid, m.lengths, m.sequences)[:, 0].tolist() == [2, 6, 0]


def test_only_a_mean_needs_the_lengths():
    x, m = tensor([3, 1], [6, 9], [9, 9]), means()
    x = m.fill(x)
    assert reduced(x, "token", m.valid, None, m.sequences).equal(x)
    assert reduced(x, "sum", m.valid, None, m.sequences)[:, 0].tolist() == [4, 6, 0]
    assert reduced(x, "max", m.valid, None, m.sequences)[:, 0].tolist() == [3, 6, -inf]
    with pytest.raises(pl.InputError, match="divides by lengths"):
        reduced(x, "mean", m.valid, None, m.sequences)


def test_k3_as_written_keeps_the_rounding_of_the_exponential():
    # At d = 1e-9, eᵈ − 1 − d is 5e-19; term by term it is what rounding 1 + 1e-9 leaves,
    # near 8e-17.
    d = tensor(1e-9)
    assert estimate(d, "k3").item() < 1e-17
    assert estimate(d, "k3", as_written="exp(d) - 1 - d").item() == d.exp().item() - 1 - 1e-9 != 0
    large = tensor(3.0)
    assert estimate(large, "k3", as_written="exp(d) - 1 - d").item() == pytest.approx(
        estimate(large, "k3").item(), rel=1e-15
    )
