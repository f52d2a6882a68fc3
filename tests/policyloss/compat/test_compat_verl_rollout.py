"""verl's rollout correction under its own names: numbers by hand with verl's 1e-8, releases,
refusals and return types.

The comparison with verl itself is `make conformance`.
"""

import inspect
import sys
from math import inf, log, nan, sqrt
from types import SimpleNamespace

import pytest
import torch
from walk import walked

from policyloss.compat.verl import rollout_correction as verl
from policyloss.errors import InputError, SpecError

LN2, E = log(2), 1e-8
# Weights 4, ½ | ⅛ (and garbage) | none: products 2, ⅛, 1.
LOG_RATIO = LN2 * torch.tensor([[2, -1], [-3, 5], [7, 7]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.float64)


def single(x):
    """`x` as float32 holds it: verl counts flags there."""
    return torch.tensor(x, dtype=torch.float32).item()


def check(found, expected):
    for name, value in expected.items():
        assert type(found[name]) is float, name
        assert found[name] == pytest.approx(value, rel=1e-14, abs=1e-14), name


# --- Weights --------------------------------------------------------------------------------------

# rollout_is, threshold, the weights
WEIGHTS = [
    ("token", 2.0, [[2, 0.5], [0.125, 0], [0, 0]]),
    ("token", "2.0", [[2, 0.5], [0.125, 0], [0, 0]]),
    ("token", 3, [[3, 0.5], [0.125, 0], [0, 0]]),
    ("token", "0.25_2", [[0, 0.5], [0, 0], [0, 0]]),
    ("token", " 0.1_5 ", [[4, 0.5], [0.125, 0], [0, 0]]),
    ("sequence", 1.5, [[1.5, 1.5], [0.125, 0], [0, 0]]),
    ("sequence", "0.5_3.0", [[2, 2], [0, 0], [0, 0]]),
]


@walked(("rollout_is", "threshold", "expected"), WEIGHTS)
@walked("mask_dtype", [torch.float64, torch.int64, torch.bool])
def test_weights(rollout_is, threshold, expected, mask_dtype):
    ratio = LOG_RATIO.clone().requires_grad_()
    weights, _ = verl.compute_rollout_correction_weights(
        ratio, MASK.to(mask_dtype), rollout_is, threshold
    )
    assert weights.dtype == torch.float64
    assert not weights.requires_grad
    torch.testing.assert_close(
        weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0
    )


def test_the_logarithm_is_held_at_twenty():
    far, one = (
        torch.tensor([[30.0, -30.0]], dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float64),
    )
    weights, metrics = verl.compute_rollout_correction_weights(far, one, "token", "1e-30_1e30")
    torch.testing.assert_close(
        weights, torch.tensor([[20.0, -20.0]], dtype=torch.float64).exp(), rtol=1e-15, atol=0
    )
    assert metrics["rollout_is_oob_ratio"] == 0


def test_token_metrics():
    # Applied 2.2, ½, ⅛ of raw 4, ½, ⅛; bounds 0.45 and 2.2.
    _, metrics = verl.compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 2.2)
    n, mean, square = 3 + E, 2.825 / (3 + E), (2.2**2 + 0.25 + 1 / 64) / (3 + E)
    rows = [2.7 / (2 + E), 0.125 / (1 + E), 0]
    middle = sum(rows) / 3
    check(
        metrics,
        {
            "rollout_is_mean": mean,
            "rollout_is_max": 2.2,
            "rollout_is_min": 0.125,
            "rollout_is_ratio_fraction_high": 1 / n,
            "rollout_is_ratio_fraction_low": 1 / n,
            "rollout_is_std": sqrt(square - mean**2),
            "rollout_is_eff_sample_size": (mean + E) ** 2 / square,
            "rollout_is_seq_mean": middle,
            "rollout_is_seq_std": sqrt(sum((row - middle) ** 2 for row in rows) / 2),
            "rollout_is_seq_max": rows[0],
            "rollout_is_seq_min": 0,
            "rollout_is_seq_max_deviation": 1,
            # raw means 2.25, 0.125, 0
            "rollout_is_seq_fraction_high": single(1 / 3),
            "rollout_is_seq_fraction_low": single(2 / 3),
        },
    )
    assert len(metrics) == 14


def test_sequence_metrics_look_at_every_row():
    # Products 2, ⅛ and the empty row's 1, against [1/1.5, 1.5].
    _, metrics = verl.compute_rollout_correction_weights(LOG_RATIO, MASK, "sequence", 1.5)
    third = single(1 / 3)
    expected = {"max": 2, "min": 0.125, "ratio_fraction_high": third, "ratio_fraction_low": third}
    check(
        metrics,
        {
            f"rollout_is_{name}": value
            for name, value in {**expected, "mean": 3.125 / (3 + E)}.items()
        },
    )


def test_0_8_0_judged_sequences_by_the_applied_weights():
    def of(release):
        weights, metrics = verl.compute_rollout_correction_weights(
            LOG_RATIO, MASK, "token", 2.2, release=release
        )
        assert weights.max().item() == 2.2
        return metrics

    # 1.35 is not above 2.2.
    assert of("0.9.0") == of(None)
    check(of("0.8.0"), {**of(None), "rollout_is_seq_fraction_high": 0.0})


def test_icepop_reports_zeroed_tokens_and_survives_zeroing_all():
    _, metrics = verl.compute_rollout_correction_weights(LOG_RATIO, MASK, "token", "0.25_2")
    check(metrics, {"rollout_is_oob_ratio": 2 / (3 + E), "rollout_is_mean": 0.5 / (3 + E)})
    weights, metrics = verl.compute_rollout_correction_weights(
        LOG_RATIO, MASK, "token", "0.6_0.7", True
    )
    assert not weights.any()
    check(
        metrics,
        {
            "rollout_is_oob_ratio": 3 / (3 + E),
            "rollout_is_eff_sample_size": 0.0,
            "rollout_is_batch_norm_factor": 1.0,
        },
    )


def test_batch_normalisation():
    def factor(level):
        weights, metrics = verl.compute_rollout_correction_weights(
            LOG_RATIO, MASK, level, 2.0, True
        )
        plain, _ = verl.compute_rollout_correction_weights(LOG_RATIO, MASK, level, 2.0)
        torch.testing.assert_close(
            weights * metrics["rollout_is_batch_norm_factor"], plain, rtol=1e-15, atol=0
        )
        return metrics["rollout_is_batch_norm_factor"]

    assert factor("token") == pytest.approx(2.625 / (3 + E), rel=1e-15)
    # Row means 4/(2+E) and ⅛/(1+E), over the two rows that have tokens.
    total = 4 / (2 + E) + 0.125 / (1 + E)
    assert factor("sequence") == pytest.approx(total / 2, rel=1e-15)


def test_batch_normalisation_is_exact_with_a_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        _, metrics = verl.compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 2.0, True)
    finally:
        torch.distributed.destroy_process_group()
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(2.625 / 3, rel=1e-15)


# --- Rejection ------------------------------------------------------------------------------------

# d in units of ln 2: 2, −1 | −3. k1 = −d; k2 = ½d²: 0.961, 0.240 | 2.162;
# k3 = eᵈ − 1 − d: 1.614, 0.193 | 1.204.
# Sums: k1 −0.693 | 2.079, k2 1.201 | 2.162, k3 1.807 | 1.204;
# means of the first row are half of that.
REJECTIONS = [
    (
        "token_k1",
        "0.25_2.0",
        [[1, 1], [0, 0]],
    ),  # π_rollout/π_train is ¼, 2 | 8, and a bound itself is kept
    ("token_k1", "0.3_9", [[0, 1], [1, 0]]),
    ("token_k1", "4", [[1, 1], [0, 0]]),  # ¼ … 4
    ("token_k1", 3, [[0, 1], [0, 0]]),
    ("token_k2", 1.0, [[1, 1], [0, 0]]),
    ("token_k2", "0.5", [[0, 1], [0, 0]]),
    ("token_k3", 1.5, [[0, 1], [1, 0]]),
    ("seq_sum_k1", "0.4_9", [[1, 1], [1, 0]]),  # products ½ and 8
    ("seq_sum_k1", "0.6_9", [[0, 0], [1, 0]]),
    ("seq_sum_k2", 2.0, [[1, 1], [0, 0]]),
    ("seq_sum_k3", 1.5, [[0, 0], [1, 0]]),
    ("seq_mean_k1", "0.6_9", [[1, 1], [1, 0]]),  # geometric means 0.707 and 8
    ("seq_mean_k1", "0.8_9", [[0, 0], [1, 0]]),
    ("seq_mean_k2", 0.7, [[1, 1], [0, 0]]),
    ("seq_mean_k3", 1.0, [[1, 1], [0, 0]]),
    ("seq_max_k2", 1.0, [[1, 1], [0, 0]]),
    ("seq_max_k3", 1.5, [[0, 0], [1, 0]]),
    ("token_k1,seq_max_k2", "0.3_9, 1.0", [[0, 1], [0, 0]]),
    ("token_k2 , token_k3,token_k2", "1.5", [[0, 1], [0, 0]]),
]


@walked(("rollout_rs", "threshold", "expected"), REJECTIONS)
@walked("mask_dtype", [torch.float64, torch.int64, torch.bool])
def test_rejection(rollout_rs, threshold, expected, mask_dtype):
    mask = MASK.to(mask_dtype)
    kept, metrics = verl.compute_rollout_rejection_mask(LOG_RATIO, mask, rollout_rs, threshold)
    expected = torch.tensor([*expected, [0, 0]])
    assert kept.dtype == mask_dtype
    assert torch.equal(kept.long(), expected)
    lost = 3 - expected.sum().item()
    # 1e-8 in some denominators.
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(lost / 3, abs=4e-9)
    lost_rows = ((MASK - expected) > 0).any(-1)
    assert metrics["rollout_rs_seq_masked_fraction"] == single(lost_rows.sum().item() / 3)
    for option in {part.strip() for part in rollout_rs.split(",")}:
        assert f"rollout_rs_{option}_seq_max_deviation" in metrics
        assert (f"rollout_rs_{option}_seq_fraction_low" in metrics) == option.endswith("k1")


def test_rejection_metrics_of_a_token_option():
    # k1 in units of ln 2: −2, 1 | 3 against [−1, 2]: one below, one above; clamped −1, 1, 2.
    # Row means −½ and 3.
    _, metrics = verl.compute_rollout_rejection_mask(LOG_RATIO, MASK, "token_k1", "0.5_4")
    mean, square, rows = 2 / (3 + E), 6 / (3 + E), [-1 / (2 + E), 3 / (1 + E)]
    expected = {
        "mean": 2 / (3 + E) * LN2,
        "max": 3 * LN2,
        "min": -2 * LN2,
        "fraction_high": 1 / (3 + E),
        "fraction_low": 1 / (3 + E),
        "std": sqrt(square - mean**2) * LN2,
        "seq_mean": sum(rows) / 2 * LN2,
        "seq_std": (rows[1] - rows[0]) / sqrt(2) * LN2,
        "seq_max": rows[1] * LN2,
        "seq_min": rows[0] * LN2,
        "seq_max_deviation": rows[1] * LN2,
        "seq_fraction_high": 0.5,
        "seq_fraction_low": 0.0,
        "masked_fraction": 2 / (3 + E),
        "seq_masked_fraction": 1.0,  # both rows that have tokens lose one
    }
    check(metrics, {f"rollout_rs_token_k1_{name}": value for name, value in expected.items()})
    check(
        metrics,
        {
            "rollout_rs_masked_fraction": 2 / (3 + E),
            "rollout_rs_seq_masked_fraction": single(2 / 3),
        },
    )
    assert len(metrics) == len(expected) + 2


def test_rejection_metrics_of_a_sequence_option():
    # Largest k2: 2 ln²2 | 4.5 ln²2 against 3 ln²2;
    # per token 2, 2, 3 (clamped), the fractions over the two rows.
    unit = LN2**2
    _, metrics = verl.compute_rollout_rejection_mask(LOG_RATIO, MASK, "seq_max_k2", 3 * unit)
    mean, square = 7 / (3 + E), 17 / (3 + E)
    expected = {
        "mean": 8.5 / (3 + E) * unit,
        "max": 4.5 * unit,
        "min": 2 * unit,
        "fraction_high": 0.5,
        "fraction_low": 0.0,
        "std": sqrt(square - mean**2) * unit,
        "seq_mean": 3.25 * unit,
        "seq_std": 2.5 / sqrt(2) * unit,
        "seq_fraction_high": 0.5,
        "seq_masked_fraction": 0.5,
    }
    check(metrics, {f"rollout_rs_seq_max_k2_{name}": value for name, value in expected.items()})


def test_rejection_holds_the_logarithm_at_twenty_and_has_epsilon_in_a_rows_mean():
    ratio = torch.tensor([[30.0, -30.0]], dtype=torch.float64)
    _, metrics = verl.compute_rollout_rejection_mask(
        ratio, torch.ones_like(ratio), "seq_mean_k2,token_k1", "500,1e9"
    )
    check(
        metrics,
        {
            "rollout_rs_seq_mean_k2_max": 400 / (2 + E),
            "rollout_rs_token_k1_max": 20,
            "rollout_rs_token_k1_min": -20,
        },
    )


def test_k3_is_computed_as_verl_writes_it():
    # Near 0, eᵈ − 1 − d is only the rounding of eᵈ; verl reports that.
    d = torch.full((1, 1), 1e-9, dtype=torch.float64)
    _, metrics = verl.compute_rollout_rejection_mask(d, torch.ones_like(d), "token_k3", 1.0)
    assert metrics["rollout_rs_token_k3_max"] == d.exp().item() - 1 - 1e-9 != 0


def test_no_rows_are_given_back_as_they_are():
    mask = torch.ones(0, 4)
    kept, metrics = verl.compute_rollout_rejection_mask(torch.zeros(0, 4), mask, "token_k1", 2.0)
    assert kept is mask
    assert metrics == {}


# --- Together -------------------------------------------------------------------------------------


# So that the trainer's log-probability is the log-ratio, to the bit.
ROLLOUT = torch.zeros_like(LOG_RATIO)


def both(**words):
    return verl.compute_rollout_correction_and_rejection_mask(LOG_RATIO, ROLLOUT, MASK, **words)


def test_without_options_only_diagnostics_are_returned():
    proto, mask, metrics = both()
    assert proto is None
    assert torch.equal(mask, MASK)
    plain = verl.compute_offpolicy_metrics(LOG_RATIO, ROLLOUT, MASK)
    assert metrics == {f"rollout_corr/{name}": value for name, value in plain.items()}
    assert metrics == verl.compute_rollout_corr_metrics_from_logprobs(LOG_RATIO, ROLLOUT, MASK)
    # kl = mean of −d = (−2 + 1 + 3) ln 2 / 3; χ² = mean of w², less 1.
    check(
        plain,
        {
            "kl": 2 * LN2 / (3 + E),
            "chi2_token": (16 + 0.25 + 1 / 64) / (3 + E) - 1,
            "chi2_seq": (4 + 1 / 64 + 1) / 3 - 1,
        },
    )
    assert len(plain) == 13
    assert verl.compute_offpolicy_metrics(LOG_RATIO, None, MASK).keys() == {
        "training_ppl",
        "training_log_ppl",
    }


def test_weights_and_rejection_together(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl.protocol", None)
    proto, mask, metrics = both(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.5)
    assert isinstance(proto, verl.TensorBatch)
    assert proto.batch["rollout_is_weights"].reshape(-1).tolist() == pytest.approx(
        [2, 0.5, 0.125, 0, 0, 0]
    )
    assert mask.tolist() == [[0, 1], [0, 0], [0, 0]]
    alone = (
        verl.compute_rollout_correction_weights(LOG_RATIO, MASK)[1]
        | verl.compute_rollout_rejection_mask(LOG_RATIO, MASK, "token_k2", 0.5)[1]
    )
    check(metrics, {f"rollout_corr/{name}": value for name, value in alone.items()})
    assert len(metrics) == len(alone) + 13
    assert both(rollout_is="token", rollout_is_threshold=None)[0] is None


def test_weights_come_in_verls_own_type_where_there_is_one(monkeypatch):
    made = SimpleNamespace(from_dict=lambda tensors: ("DataProto", tensors))
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verl.protocol", SimpleNamespace(DataProto=made))
    kind, tensors = both(rollout_is="sequence")[0]
    assert kind == "DataProto"
    assert tensors["rollout_is_weights"].reshape(-1).tolist() == pytest.approx(
        [2, 2, 0.125, 0, 0, 0]
    )


def test_add_to_batch(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl.protocol", None)

    def batch():
        return verl.TensorBatch(
            {"old_log_probs": LOG_RATIO, "rollout_log_probs": ROLLOUT, "response_mask": MASK}
        )

    words = {
        "rollout_is": "token",
        "rollout_is_threshold": 3.0,
        "rollout_rs": "token_k2",
        "rollout_rs_threshold": 0.5,
    }
    made, metrics = verl.compute_rollout_correction_and_add_to_batch(batch(), words)
    assert made.batch["response_mask"].tolist() == [[0, 1], [0, 0], [0, 0]]
    assert made.batch["rollout_is_weights"][0, 0].item() == 3
    assert metrics == both(**words)[2]
    made, _ = verl.compute_rollout_correction_and_add_to_batch(batch(), {})
    assert "rollout_is_weights" not in made.batch


def test_bypass_mode():
    batch = SimpleNamespace(batch={"old_log_probs": 1, "rollout_log_probs": 2})
    config = {"loss_mode": "vanilla"}
    assert verl.apply_bypass_mode(batch, {"rollout_is": "token"}, config) is None
    assert batch.batch["old_log_probs"] == 2
    assert config == {"loss_mode": "bypass_mode", "rollout_correction": {"rollout_is": "token"}}
    with pytest.raises(InputError, match="rollout_log_probs"):
        verl.apply_bypass_mode(SimpleNamespace(batch={}), None, {})


# --- Refusals -------------------------------------------------------------------------------------


@walked(
    "threshold",
    ["", " ", "abc", "0.5_", "_2", "0.5_x", -1.0, 0, "0_2", "-1_2", "2_0.5", True, None, [2.0]],
)
def test_malformed_weight_thresholds(threshold):
    with pytest.raises(SpecError, match="rollout_is_threshold") as caught:
        verl.compute_rollout_correction_weights(LOG_RATIO, MASK, "token", threshold)
    assert isinstance(caught.value, TypeError) == (
        not isinstance(threshold, (str, float)) and threshold != 0
    )
    # What verl's own test looks for.
    assert ("not a boolean" in str(caught.value)) == (threshold is True)


@walked(
    ("rollout_rs", "threshold", "said"),
    [
        (None, 2.0, "rollout_rs must be a string"),
        ("token_k1", None, "needs rollout_rs_threshold"),
        ("", 2.0, "names no option"),
        (" , ", 2.0, "names no option"),
        ("seq_max_k1", 2.0, "unknown rollout_rs option 'seq_max_k1'"),
        ("token", 2.0, "unknown"),
        ("token_k1", "", "has 0 bounds"),
        ("token_k1,token_k2,token_k3", "2.0,1.0", "has 2 bounds for the 3 options"),
        ("token_k1,token_k1", "2.0,1.0", "has 2 bounds for the 1 options"),
        ("token_k1", "x", "token_k1 must be a number"),
        ("token_k1", 0, "token_k1 must be positive"),
        ("token_k1", "0.5_-2", "token_k1 must be positive"),
        ("token_k1", inf, "token_k1 must be a positive, finite number"),
        ("token_k1", "2_0.5", "lower <= upper"),
        ("token_k1", True, "must be a number"),
        ("seq_max_k3", "0.5_2", "single upper bound"),
        ("seq_max_k3", -1, "must be positive"),
        ("token_k1", [2.0], "must be a number or a string"),
    ],
)
def test_malformed_rejections(rollout_rs, threshold, said):
    with pytest.raises(SpecError, match=said):
        verl.compute_rollout_rejection_mask(LOG_RATIO, MASK, rollout_rs, threshold)


def test_releases_refuse_different_settings():
    kept, _ = verl.compute_rollout_rejection_mask(
        LOG_RATIO, MASK, "token_k1", "2_0.5", release="0.8.0"
    )
    assert not kept.any()
    for call in (verl.compute_rollout_correction_weights, verl.compute_rollout_rejection_mask):
        with pytest.raises(SpecError, match=r"0\.7\.1.*older than 0\.8\.0"):
            call(LOG_RATIO, MASK, "token", 2.0, release="0.7.1")
    with pytest.raises(SpecError, match="unknown rollout_is 'geometric'"):
        verl.compute_rollout_correction_weights(LOG_RATIO, MASK, "geometric")


def test_a_mask_without_a_valid_token_is_refused():
    nothing = torch.zeros_like(MASK)
    calls = [
        lambda: verl.compute_rollout_correction_weights(LOG_RATIO, nothing),
        lambda: verl.compute_rollout_rejection_mask(LOG_RATIO, nothing, "token_k1", 2.0),
        lambda: verl.compute_rollout_correction_and_rejection_mask(LOG_RATIO, LOG_RATIO, nothing),
        lambda: verl.compute_offpolicy_metrics(LOG_RATIO, LOG_RATIO, nothing),
        lambda: verl.compute_is_metrics(LOG_RATIO, LOG_RATIO, LOG_RATIO, nothing, "token", 2.0),
    ]
    for call in calls:
        with pytest.raises(InputError, match="no valid token"):
            call()


def test_shapes_must_agree():
    with pytest.raises(InputError, match=r"rollout_log_prob has shape \(3, 1\)"):
        verl.compute_rollout_correction_and_rejection_mask(LOG_RATIO, LOG_RATIO[:, :1], MASK)
    with pytest.raises(InputError, match=r"response_mask has shape \(2, 2\)"):
        verl.compute_rollout_correction_and_rejection_mask(LOG_RATIO, LOG_RATIO, MASK[:2])


def test_garbage_at_masked_positions_is_never_seen():
    clean = both(
        rollout_is="sequence", rollout_rs="seq_mean_k3,token_k1", rollout_rs_threshold="2.0, 4"
    )
    for garbage in (nan, inf, -inf):
        old = torch.where(MASK.bool(), LOG_RATIO, garbage)
        found = verl.compute_rollout_correction_and_rejection_mask(
            old,
            ROLLOUT,
            MASK,
            "sequence",
            rollout_rs="seq_mean_k3,token_k1",
            rollout_rs_threshold="2.0, 4",
        )
        assert torch.equal(
            found[0].batch["rollout_is_weights"], clean[0].batch["rollout_is_weights"]
        )
        assert torch.equal(found[1], clean[1])
        assert found[2] == clean[2]


def test_weights_of_one_row_of_tokens_have_no_sequence_metrics():
    w, mask = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    metrics = verl.compute_is_metrics(w, w, w.log(), mask, "token", 1.5)
    assert not any("seq" in name for name in metrics)
    check(metrics, {"rollout_is_mean": 3 / (2 + E), "rollout_is_ratio_fraction_high": 1 / (2 + E)})


# name → its parameters with defaults; keyword-only ones of ours after the star.
SIGNATURES = {
    "compute_rollout_correction_weights": (
        "log_ratio, response_mask, rollout_is='token', rollout_is_threshold=2.0, "
        "rollout_is_batch_normalize=False, *, release=None"
    ),
    "compute_rollout_rejection_mask": (
        "log_ratio, response_mask, rollout_rs='token_k1', rollout_rs_threshold=None, *, "
        "release=None"
    ),
    "compute_rollout_correction_and_rejection_mask": (
        "old_log_prob, rollout_log_prob, response_mask, rollout_is=None, rollout_is_threshold=2.0, "
        "rollout_is_batch_normalize=False, rollout_rs=None, rollout_rs_threshold=None, *, "
        "release=None"
    ),
    "compute_offpolicy_metrics": "old_log_prob, rollout_log_prob, response_mask",
    "compute_is_metrics": (
        "rollout_is_weights, raw_rollout_is_weights, log_ratio_for_metrics, response_mask, "
        "rollout_is, rollout_is_threshold, rollout_is_threshold_lower=None, *, release=None"
    ),
    "compute_rs_metrics": (
        "option_name, rs_statistic, response_mask, seq_valid_mask, *, level, per_sequence_values, "
        "rollout_rs_threshold, rollout_rs_threshold_lower, apply_lower_threshold"
    ),
    "compute_rollout_corr_metrics_from_logprobs": "log_prob, rollout_log_prob, response_mask",
    "compute_rollout_correction_and_add_to_batch": "batch, rollout_corr_config, *, release=None",
    "apply_bypass_mode": "batch, rollout_corr_config=None, policy_loss_config=None",
}


@walked("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(verl, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert shown == f"({SIGNATURES[name]})"


def test_constants():
    assert verl.SAFETY_BOUND == 20
    assert {"token_k1", "token_k2", "token_k3"} == verl.TOKEN_LEVEL_ROLLOUT_RS_OPTIONS
    sequence = {
        f"seq_{reduce}_{k}" for reduce in ("sum", "mean", "max") for k in ("k1", "k2", "k3")
    } - {"seq_max_k1"}
    assert verl.TOKEN_LEVEL_ROLLOUT_RS_OPTIONS | sequence == verl.SUPPORTED_ROLLOUT_RS_OPTIONS
    assert set(SIGNATURES) < set(verl.__all__)
