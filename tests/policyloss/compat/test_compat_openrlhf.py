"""OpenRLHF's drop-ins on numbers done by hand, in both families of arguments; and `install()` on a
package made for the test.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import rows
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.compat import openrlhf

# Two rows, the last token of the second masked. Ratios to old: 1.5, 0.5 | 1.
# Weights exp(old − rollout): 2, ½ | 4.
RATIO = rows([[1.5, 0.5], [1, 7]])
WEIGHT = rows([[2, 0.5], [4, 9]])
ADVANTAGES = rows([[1, -2], [3, 100]])
MASK = rows([[1, 1], [1, 0]])
OLD = rows([[log(0.4), log(0.3)], [log(0.2), -1]])
ROLLOUT = OLD - WEIGHT.log()
# With eps 0.2 the three tokens give −1.2 (held), 2·0.8 = 1.6 (held), −3·1.
SURROGATE = (-1.2, 1.6, -3.0)
NEW = (
    "is_correction_level",
    "is_correction_mode",
    "is_correction_gating",
    "is_correction_threshold",
)


def call(loss: Any, mask: Tensor | None = MASK, **more: Any) -> tuple[tuple[Any, ...], Tensor]:
    """The values a loss returns on these tokens, as floats, and the gradient in log_probs."""
    leaf = (OLD + RATIO.log()).requires_grad_()
    values = loss(leaf, OLD, ADVANTAGES, mask, ROLLOUT, **more)
    values[0].backward()
    assert leaf.grad is not None
    return tuple(None if v is None else v.item() for v in values), leaf.grad


def close(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, rel=1e-12, abs=1e-15)


# --- PPO without a correction ---------------------------------------------------------------------

# clip_ratio: two of three tokens are held. ppo_kl: the mean of −log ratio,
# −(ln 1.5 + ln ½ + 0)/3 = −ln 0.75 / 3.
PLAIN = (2 / 3, -log(0.75) / 3)


def test_token_level():
    values, grad = call(openrlhf.PolicyLoss())
    close(values, (sum(SURROGATE) / 3, *PLAIN, None, None))
    torch.testing.assert_close(grad, rows([[0, 0], [-3 / 3, 0]]), rtol=1e-12, atol=0)


def test_sample_level_adds_1e_8_to_a_length():
    values, _ = call(openrlhf.PolicyLoss(token_level_loss=False))
    e = 1e-8
    want = ((-1.2 + 1.6) / (2 + e) + -3 / (1 + e)) / 2
    assert values[0] == pytest.approx(want, rel=1e-14)
    assert abs(values[0] - (0.2 - 3) / 2) > 1e-9  # which is not the mean itself
    # In which OpenRLHF's 1e-8 is rounded away.
    for mask in (
        MASK.bool(),
        MASK.long(),
        MASK.float(),
    ):
        assert call(openrlhf.PolicyLoss(token_level_loss=False), mask)[0][0] == pytest.approx(
            (0.2 - 3) / 2, rel=1e-14
        )


def test_dual_clip_holds_negative_advantages():
    # Token 2 at ratio 0.5 is not concerned; at ratio 5 with A = −2 the loss is 10, held at 2·3 = 6;
    # and not counted as clipped.
    leaf = rows(log(5.0)).requires_grad_()
    zero, a = rows(0.0), rows(-2.0)
    loss, clip_ratio, *_ = openrlhf.PolicyLoss(dual_clip=3.0)(leaf, zero, a, torch.ones(1, 1))
    assert (loss.item(), clip_ratio.item()) == (6.0, 0.0)
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 0
    assert openrlhf.PolicyLoss()(leaf, zero, a, torch.ones(1, 1))[0].item() == pytest.approx(
        10, rel=1e-14
    )


def test_counts_of_the_step():
    """The count that matters is divided by, and multiplied by dp_size;
    without it dp_size is not used.
    """
    by_token = {"batch_num_tokens": 12.0, "global_batch_size": 1000, "dp_size": 4}
    assert call(openrlhf.PolicyLoss(), **by_token)[0][0] == pytest.approx(
        sum(SURROGATE) / 12 * 4, rel=1e-14
    )
    by_sample = {"batch_num_tokens": 1000.0, "global_batch_size": 8, "dp_size": 4}
    loss = openrlhf.PolicyLoss(token_level_loss=False)
    assert call(loss, MASK.bool(), **by_sample)[0][0] == pytest.approx((0.2 - 3) / 8 * 4, rel=1e-14)
    assert call(openrlhf.PolicyLoss(), dp_size=4)[0][0] == pytest.approx(
        sum(SURROGATE) / 3, rel=1e-14
    )


def test_the_log_ratio_is_clamped():
    far = rows(30.0)
    args = (far, rows(0.0), rows(-1.0), torch.ones(1, 1, dtype=torch.bool))
    assert openrlhf.PolicyLoss()(*args)[0].item() == pytest.approx(exp(20), rel=1e-14)
    assert openrlhf.PolicyLoss()(*args)[2].item() == -30  # ppo_kl is never clamped


def test_precision_of_the_values():
    """Shares come in float32 unless the mask is wider, as OpenRLHF makes them; the loss in the
    log-probabilities' precision.
    """
    kinds = {"is_correction_level": "seq", "is_correction_threshold": (0.5, 3.0)}
    for mask, share in ((MASK.long(), torch.float32), (MASK, torch.float64)):
        values = openrlhf.PolicyLoss(**kinds)(OLD, OLD, ADVANTAGES, mask, ROLLOUT)
        assert [v.dtype for v in values] == [
            torch.float64,
            share,
            torch.float64,
            torch.float64,
            torch.float32,
        ]


# --- Corrections ----------------------------------------------------------------------------------

# vllm_kl: the mean of rollout − old, −(ln 2 + ln ½ + ln 4)/3.
# Row 0 has the geometric mean 1, row 1 has 4.
# p = exp(rollout) = 0.2, 0.6 | 0.05; q = exp(old) = 0.4, 0.3 | 0.2:
# |p − q| = 0.2, 0.3 | 0.15, row 0's mean 0.25.
KL = [
    p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))
    for p, q in ((0.2, 0.4), (0.6, 0.3), (0.05, 0.2))
]
CORRECTIONS = [
    (("token", "clip", "ratio", (0.75, 3.0)), "tis", (2, 0.75, 3), 2 / 3),
    (("token", "mask", "ratio", (0.75, 3.0)), "icepop", (2, 0, 0), 2 / 3),
    (("token", "mask", "ratio", (0.4, 5.0)), "icepop", (2, 0.5, 4), 0),
    (("seq", "mask", "ratio", (0.5, 3.0)), "seq-mask-tis", (2, 0.5, 0), 1 / 2),
    (("seq", "mask", "ratio", (2.0, 5.0)), "seq-mask-tis", (0, 0, 4), 1 / 2),
    (("token", "mask", "tv", (0.0, 0.22)), None, (2, 0, 4), 1 / 3),
    (("seq", "mask", "tv", (0.0, 0.22)), None, (0, 0, 4), 1 / 2),
    (("token", "mask", "binary_kl", (0.0, (KL[0] + KL[1]) / 2)), None, (2, 0, 4), 1 / 3),
    (("seq", "mask", "binary_kl", (0.0, (KL[0] + KL[1]) / 2 + 1e-9)), None, (2, 0.5, 4), 0),
    (("seq", "mask", "binary_kl", (-1.0, KL[2] - 1e-9)), None, (0, 0, 0), 1),
]


@walked(("words", "older", "weights", "filtered"), CORRECTIONS, ids=lambda x: str(x))
def test_corrections(words, older, weights, filtered):
    want = sum(w * s for w, s in zip(weights, SURROGATE, strict=True)) / 3
    vllm_kl = -log(4) / 3
    values, grad = call(openrlhf.PolicyLoss(**dict(zip(NEW, words, strict=True))))
    if words[0] == "seq":
        assert values[4] == pytest.approx(filtered, rel=1e-7)  # of the rows, in float32
    close(values[:4], (want, *PLAIN, vllm_kl))
    assert words[0] == "seq" or values[4] == pytest.approx(filtered, rel=1e-14)
    torch.testing.assert_close(grad, rows([[0, 0], [-3 * weights[2] / 3, 0]]), rtol=1e-12, atol=0)
    # The same in the words of earlier releases, by name and by place: four values.
    if older is not None:
        named = {
            "enable_vllm_is_correction": True,
            "vllm_is_truncated_threshold": list(words[3]),
            "vllm_is_correction_type": older,
        }
        for loss in (
            openrlhf.PolicyLoss(**named),
            openrlhf.PolicyLoss(0.2, 0.2, None, True, "ppo", *named.values()),
        ):
            close(call(loss)[0], (want, *PLAIN, vllm_kl))


def test_an_empty_row_counts_as_filtered_at_sequence_level():
    mask = rows([[1, 1], [0, 0]])
    values, _ = call(openrlhf.PolicyLoss(is_correction_level="seq"), mask)
    assert values[4] == 0.5  # row 0 lies inside, row 1 has nothing to compare
    assert call(openrlhf.PolicyLoss(is_correction_level="token"), mask)[0][4] == 0


def test_agreement_below_zero():
    """OpenRLHF's lower bound of 0 drops numbers that rounding puts below it; the spec states that,
    and -1 avoids it.
    """
    p = torch.linspace(0.05, 0.95, 200, dtype=torch.float32).reshape(1, -1)
    old, rollout = (p * (1 + 1e-6)).log(), p.log()
    flat = torch.ones_like(p)
    shares = []
    for low in (0.0, -1.0):
        loss = openrlhf.PolicyLoss(
            is_correction_level="token",
            is_correction_gating="binary_kl",
            is_correction_threshold=(low, 0.1),
        )
        shares.append(loss(old, old, flat, flat, rollout)[4].item())
    assert shares[0] > 0.3
    assert shares[1] == 0


# --- GSPO -----------------------------------------------------------------------------------------


def test_gspo_is_a_mean_over_samples_of_sequence_ratios():
    # Row 0: geometric mean of 1.5 and 0.5 is √0.75 = 0.866, inside the band: −s·(1 − 2) = s;
    # row 1: −3·1. e is the 1e-8.
    s, e = 0.75**0.5, 1e-8
    for token_level in (True, False):
        loss = openrlhf.PolicyLoss(token_level_loss=token_level, policy_loss_type="gspo")
        assert not loss.token_level_loss
        values, grad = call(loss)
        close(values, ((s / (2 + e) - 3 / (1 + e)) / 2, 0, PLAIN[1], None, None))
    # d/dlogp_t of s/(2+e)/2 is half of it, as s = exp(mean):
    # through the sequence, so both tokens get the same.
    want = rows([[s / (2 + e) / 4, s / (2 + e) / 4], [-3 / (1 + e) / 2, 0]])
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=0)


def test_gspo_with_a_correction_is_anchored_at_the_rollout_and_not_weighted():
    # Ratios to rollout: ratio · weight = 3, ¼ | 4.
    # Row 0: √0.75 again, as 3·¼ = 0.75; row 1: 4, A = 3, held at 1.2.
    s = 0.75**0.5
    for words in ({"is_correction_level": "token"}, {"enable_vllm_is_correction": True}):
        values, _ = call(openrlhf.PolicyLoss(policy_loss_type="gspo", **words), MASK.bool())
        close((values[0], values[2], values[3]), ((s / 2 - 3.6) / 2, PLAIN[1], None))
        assert values[1] == pytest.approx(1 / 3, rel=1e-7)


# --- Nothing valid, no mask, wrong arguments ------------------------------------------------------


@walked(
    "words",
    [
        {},
        {"token_level_loss": False},
        {"policy_loss_type": "gspo"},
        {"is_correction_level": "token"},
    ],
)
def test_nothing_valid_is_zero(words):
    values, grad = call(openrlhf.PolicyLoss(**words), torch.zeros_like(MASK))
    assert [v for v in values if v is not None] == [0.0] * (
        5 if "is_correction_level" in words else 3
    )
    assert torch.equal(grad, torch.zeros_like(grad))


def test_no_mask_where_openrlhf_needs_none():
    # All four tokens: the fourth has ratio 7 and A = 100, held at −120.
    assert call(openrlhf.PolicyLoss(), None)[0][0] == pytest.approx(
        (sum(SURROGATE) - 120) / 4, rel=1e-14
    )
    for loss, more in (
        (openrlhf.PolicyLoss(token_level_loss=False), {}),
        (openrlhf.PolicyLoss(policy_loss_type="gspo"), {}),
        (openrlhf.PolicyLoss(), {"batch_num_tokens": 4}),
    ):
        with pytest.raises(pl.InputError, match="action_mask"):
            call(loss, None, **more)


BOTH = {"is_correction_level": "token", "enable_vllm_is_correction": True}
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    (BOTH, ["is_correction_level", "enable_vllm_is_correction"]),
    (
        {"release": "0.11.2", "enable_vllm_is_correction": False},
        ["0.11.2", "enable_vllm_is_correction"],
    ),
    ({"release": "0.11.1", "is_correction_level": "seq"}, ["0.11.1", "is_correction_"]),
    ({"release": "0.12.0"}, ["0.12.0", "0.11.0", "0.11.2"]),
    ({"release": "0.10.3"}, ["0.10.3", "0.11.0"]),
    ({"policy_loss_type": "grpo"}, ["policy_loss_type", "gspo, ppo"]),
    ({"dual_clip": 1.0}, ["dual_clip", "1.0"]),
    ({"is_correction_level": "sequence"}, ["is_correction_level", "off, seq, token"]),
    ({"is_correction_mode": "drop"}, ["is_correction_mode", "clip, mask"]),
    ({"is_correction_gating": "kl"}, ["is_correction_gating", "binary_kl, ratio, tv"]),
    (
        {"is_correction_level": "seq", "is_correction_mode": "clip"},
        ['is_correction_mode="clip"', "token"],
    ),
    (
        {"is_correction_level": "token", "is_correction_gating": "tv"},
        ["is_correction_threshold", "tv", "upper bound only", "(0, high)"],
    ),
    (
        {"is_correction_level": "token", "is_correction_threshold": (1.0,)},
        ["is_correction_threshold", "(1.0,)"],
    ),
    ({"enable_vllm_is_correction": True}, ["vllm_is_truncated_threshold", "None"]),
    ({"is_correction_level": True, "is_correction_mode": 3.0}, ["(low, high)", "3.0"]),
    (
        {"vllm_is_correction_type": "cispo"},
        ["vllm_is_correction_type", "icepop, seq-mask-tis, tis"],
    ),
    (
        {"is_correction_level": True, "is_correction_threshold": (1, 2)},
        ["enable_vllm_is_correction", "sixth"],
    ),
    ({"clip_eps_low": -0.1}, ["eps_low", "-0.1"]),
]


@walked(("words", "said"), WRONG, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_wrong_arguments_are_named(words, said):
    with pytest.raises(pl.SpecError) as error:
        openrlhf.PolicyLoss(**words)
    assert [word for word in said if word not in str(error.value)] == []


def test_a_correction_needs_the_rollout():
    for words in (
        {"is_correction_level": "token"},
        {"policy_loss_type": "gspo", "enable_vllm_is_correction": True},
    ):
        with pytest.raises(pl.InputError, match="rollout_log_probs"):
            openrlhf.PolicyLoss(**words)(OLD, OLD, ADVANTAGES, MASK)


def test_which_release_is_followed():
    assert openrlhf.PolicyLoss().release == "0.11.2"
    assert openrlhf.PolicyLoss(0.2, 0.2, None, True, "ppo", False).release == "0.11.1"
    assert openrlhf.PolicyLoss(enable_vllm_is_correction=False).release == "0.11.1"
    assert len(call(openrlhf.PolicyLoss(release="0.11.1"))[0]) == 4
    assert len(call(openrlhf.PolicyLoss())[0]) == 5


def test_attributes_and_signatures_as_upstream():
    loss = openrlhf.PolicyLoss(0.1, 0.3, 2.0, False, "ppo", "seq", "mask", "tv", [0, 0.2])
    assert isinstance(loss, torch.nn.Module)
    assert (loss.clip_eps_low, loss.clip_eps_high, loss.dual_clip, loss.token_level_loss) == (
        0.1,
        0.3,
        2.0,
        False,
    )
    assert [getattr(loss, name) for name in NEW] == ["seq", "mask", "tv", [0, 0.2]]
    loss.clip_eps_high = 0.5  # read when the loss is called, as upstream
    assert loss.spec.trust == pl.Clip(0.1, 0.5, 2.0)
    assert loss.spec.correction == (pl.DivergenceMask("tv", 0.2, 0, "sequence", log_clamp=None),)
    older = openrlhf.PolicyLoss(0.1, 0.3, None, True, "ppo", True, [0.5, 2.0], "icepop")
    seen = (
        older.enable_vllm_is_correction,
        older.vllm_is_truncated_threshold,
        older.vllm_is_correction_type,
    )
    assert seen == (True, [0.5, 2.0], "icepop")
    places = [
        name
        for name, p in inspect.signature(openrlhf.PolicyLoss).parameters.items()
        if p.kind is not p.KEYWORD_ONLY
    ]
    assert places == [
        "clip_eps_low",
        "clip_eps_high",
        "dual_clip",
        "token_level_loss",
        "policy_loss_type",
        *NEW,
    ]


# --- Values, means, KL ----------------------------------------------------------------------------


def test_value_loss():
    # Token 0: v 1, old 0, R 2: (1 − 2)² = 1, clipped at 0.5: 2.25. Token 1: v = old = 1, R 0: 1.
    # Token 2: 4. Half of each.
    v, old, returns = rows([[1, 1], [2, 9]]), rows([[0, 1], [2, 0]]), rows([[2, 0], [0, 0]])
    args = (old, returns, MASK)
    assert openrlhf.ValueLoss(0.5)(v, *args).item() == pytest.approx(
        (2.25 + 1 + 4) / 2 / 3, rel=1e-14
    )
    assert openrlhf.ValueLoss()(v, *args).item() == pytest.approx((1 + 1 + 4) / 2 / 3, rel=1e-14)
    e = 1e-8
    by_sample = openrlhf.ValueLoss(None, False)
    assert by_sample(v, *args).item() == pytest.approx((1 / (2 + e) + 2 / (1 + e)) / 2, rel=1e-14)
    assert by_sample(v, *args, 3, None, 10).item() == pytest.approx(
        (1 / (2 + e) + 2 / (1 + e)) / 10 * 3, rel=1e-14
    )
    leaf = v.clone().requires_grad_()
    openrlhf.ValueLoss(0.5)(leaf, *args).backward()
    torch.testing.assert_close(leaf.grad, rows([[0, 1 / 3], [2 / 3, 0]]), rtol=1e-12, atol=0)
    with pytest.raises(pl.SpecError, match="clip_eps"):
        openrlhf.ValueLoss(0.0)
    with pytest.raises(pl.InputError, match="action_mask"):
        by_sample(v, old, returns)


def test_aggregate_loss():
    x, e = rows([[1, 2], [5, 100]]), 1e-8
    assert openrlhf.aggregate_loss(x, MASK).item() == pytest.approx(8 / 3, rel=1e-14)
    assert openrlhf.aggregate_loss(x, MASK, True, 2, 16).item() == pytest.approx(1, rel=1e-14)
    assert openrlhf.aggregate_loss(x, MASK, False).item() == pytest.approx(
        (3 / (2 + e) + 5 / (1 + e)) / 2, rel=1e-14
    )
    assert openrlhf.aggregate_loss(x, MASK.bool(), False, 2, None, 13).item() == pytest.approx(
        1, rel=1e-14
    )
    with pytest.raises(pl.InputError, match="loss_mask"):
        openrlhf.aggregate_loss(x, None, False)


def test_compute_approx_kl():
    # log_probs − base = 0.5, −2, 12, −12: k1 unchanged within ±10; k2 half its square;
    # k3 = e^−x − 1 + x.
    x = torch.tensor([0.5, -2.0, 12.0, -12.0])
    for name, want, slope in (
        ("k1", [0.5, -2, 10, -10], [1, 1, 0, 0]),
        ("k2", [0.125, 2, 10, 10], [0.5, -2, 0, 0]),
        ("k3", [exp(-0.5) - 0.5, exp(2) - 3, 10, 10], [1 - exp(-0.5), 1 - exp(2), 0, 0]),
    ):
        # Up to 0.11.0 the third argument.
        for arguments in (
            {"kl_estimator": name},
            {"log_probs_old": name},
        ):
            leaf = x.double().requires_grad_()
            kl = openrlhf.compute_approx_kl(leaf, torch.zeros(4), **arguments)
            assert kl.dtype == torch.float32
            torch.testing.assert_close(kl, torch.tensor(want), rtol=2e-7, atol=2e-7)
            kl.sum().backward()
            torch.testing.assert_close(
                leaf.grad, torch.tensor(slope, dtype=torch.float64), rtol=1e-6, atol=1e-6
            )
    with pytest.raises(pl.SpecError, match="kl_estimator"):
        openrlhf.compute_approx_kl(x, x, kl_estimator="k4")
    # E^200 is infinite in float32; its gradient is not 0·inf.
    far = torch.tensor([-200.0], requires_grad=True)
    kl = openrlhf.compute_approx_kl(far, torch.zeros(1), kl_estimator="k3")
    kl.backward()
    assert (kl.item(), far.grad.item()) == (10, 0)


def test_unbiased_gradient_keeps_the_value():
    # The gradient is w·(log_probs − base), w = min(ratio to old, 10): ratios 2, e^−1, e^9.
    x, old = torch.tensor([0.5, -2.0, 3.0]), torch.tensor([0.5 - log(2), -1.0, -6.0])
    for given, w in ((old, [2, exp(-1), 10]), (None, [1, 1, 1])):
        leaf = x.clone().requires_grad_()
        kl = openrlhf.compute_approx_kl(leaf, torch.zeros(3), given, "k1", True)
        assert torch.equal(kl, x)
        kl.sum().backward()
        torch.testing.assert_close(leaf.grad, torch.tensor(w) * x, rtol=1e-6, atol=0)


# --- install() ------------------------------------------------------------------------------------

LOSS = "class PolicyLoss: ...\nclass ValueLoss: ...\ndef aggregate_loss(): ...\n"
UTILS = "def compute_approx_kl(): ...\n"
FILES = {
    "__init__": "",
    "models/__init__": "from .loss import PolicyLoss, ValueLoss, aggregate_loss\n",
    "models/loss": LOSS,
    "models/utils": UTILS,
    "trainer/__init__": "",
    "trainer/actor": (
        "from openrlhf.models import PolicyLoss\n"
        "from openrlhf.models.utils import compute_approx_kl as kl\n"
    ),
    "trainer/critic": "from openrlhf.models import ValueLoss\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An importable `openrlhf` with the modules that bind the losses."""
    for name, text in FILES.items():
        path = tmp_path / "openrlhf" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    openrlhf.uninstall()
    for name in [n for n in sys.modules if n == "openrlhf" or n.startswith("openrlhf.")]:
        del sys.modules[name]


def test_install_reaches_every_binding(package):
    actor, models = import_module("openrlhf.trainer.actor"), import_module("openrlhf.models")
    theirs = models.PolicyLoss
    assert openrlhf.install("0.11.2") == "0.11.2"
    assert openrlhf.install("0.11.2") == "0.11.2"  # once more changes nothing
    assert models.PolicyLoss is models.loss.PolicyLoss is actor.PolicyLoss is not theirs
    assert issubclass(models.PolicyLoss, openrlhf.PolicyLoss)
    assert actor.kl is openrlhf.compute_approx_kl
    assert models.aggregate_loss is openrlhf.aggregate_loss
    critic = import_module("openrlhf.trainer.critic")  # imported after the installation
    assert issubclass(critic.ValueLoss, openrlhf.ValueLoss)
    assert len(call(models.PolicyLoss())[0]) == 5
    openrlhf.uninstall()
    assert models.PolicyLoss is models.loss.PolicyLoss is actor.PolicyLoss is theirs
    assert critic.ValueLoss is models.ValueLoss
    assert not issubclass(critic.ValueLoss, torch.nn.Module)


def test_install_serves_the_release(package):
    openrlhf.install("0.11.0")
    loss = import_module("openrlhf.models").PolicyLoss()
    assert len(call(loss)[0]) == 4
    with pytest.raises(pl.SpecError, match=r"0\.11\.0"):
        type(loss)(is_correction_level="token")
    assert openrlhf.PolicyLoss().release == "0.11.2"  # imports from here do not change


@pytest.mark.parametrize("release", ["0.8.5", "0.10.3", "0.11.3", "1.0.0"])
def test_install_refuses_unknown_modules(package, release):
    with pytest.raises(pl.SpecError, match=release.replace(".", r"\.")):
        openrlhf.install(release)
    assert not issubclass(import_module("openrlhf.models").PolicyLoss, torch.nn.Module)
