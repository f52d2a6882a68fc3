"""TRL's GRPOConfig as a spec, its denominators as totals, a micro-batch as a call. TRL itself is
compared in `conformance`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_configs import config, grpo_config
from walk import walked

import policyloss as pl
from policyloss.compat.trl import (
    batch_loss,
    explain_config,
    loss_mask,
    spec_from_config,
    totals_for,
)
from policyloss.compat.trl.config import EXTRA_OPTIONS, LOSS_TYPES
from policyloss.compat.trl.parts import (
    RolloutProduct,
    WrittenKL,
    replace_term,
    tokens_of_window,
    where_scored,
)
from policyloss.compat.trl.trainer import checked_loss

LOG_BOUNDS = (math.log(1e-8), 20.0)
VLLM = {"use_vllm": True}


def close(a: torch.Tensor, b: Any) -> None:
    torch.testing.assert_close(
        a.detach(), torch.as_tensor(b, dtype=torch.float64), rtol=1e-14, atol=1e-15
    )


# --- what each option becomes ---------------------------------------------------------------------

TOKEN, CLIP = pl.TokenRatio(log_clamp=None), pl.Clip(0.2, 0.2)
MEANS: dict[str, pl.LossSpec] = {
    "grpo": pl.LossSpec(TOKEN, CLIP, aggregate=pl.SeqMeanTokenMean()),
    "bnpo": pl.LossSpec(TOKEN, CLIP, aggregate=pl.TokenMean()),
    "dr_grpo": pl.LossSpec(TOKEN, CLIP, aggregate=pl.SeqMeanTokenSumNorm(512)),
    "dapo": pl.LossSpec(TOKEN, CLIP, aggregate=pl.TokenMean()),
    "luspo": pl.LossSpec(TOKEN, CLIP, aggregate=pl.LengthWeighted()),
    "cispo": pl.LossSpec(TOKEN, pl.DetachedClip(0.0, 0.2), aggregate=pl.TokenMean()),
    # 1.05 is no float32; TRL picks the temperature with torch.where, which makes it one.
    "sapo": pl.LossSpec(
        TOKEN, pl.SoftGate(1.0, 1.0499999523162842), aggregate=pl.SeqMeanTokenMean()
    ),
    "vespo": pl.LossSpec(
        pl.SequenceProduct(log_clamp=LOG_BOUNDS, token_clamp=20.0),
        pl.GammaWeight(2.0, 3.0, 3.0, 2.0),
        aggregate=pl.TokenMean(),
    ),
}


def test_every_loss_type_of_the_release_is_here() -> None:
    assert set(MEANS) == set(LOSS_TYPES)


@walked("loss_type", LOSS_TYPES)
def test_a_loss_type_with_default_options(loss_type: str) -> None:
    assert spec_from_config(config(loss_type=loss_type)) == MEANS[loss_type]


def test_the_default_config_is_dapo() -> None:
    assert spec_from_config(config()) == MEANS["dapo"]


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"importance_sampling_level": "sequence"}, {"ratio": pl.SequenceRatio(log_clamp=None)}),
    ({"epsilon": 0.1, "epsilon_high": 0.28}, {"trust": pl.Clip(0.1, 0.28)}),
    ({"delta": 4.0}, {"trust": pl.TwoSidedClip(4.0, 0.2, 0.2)}),
    ({"off_policy_mask_threshold": 0.5}, {"correction": (pl.OPSM(0.5),)}),
    ({"beta": 0.04}, {"kl": WrittenKL("k3", 0.04, weight="ratio", clamp=None)}),
    ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl": WrittenKL("k3", 0.04, clamp=None)}),
    ({"vllm_importance_sampling_correction": True}, {}),  # vLLM does not generate
    ({**VLLM, "vllm_importance_sampling_correction": False}, {}),
    (
        VLLM,
        {
            "correction": (
                pl.SequenceMask(0.0, 3.0, level="product", weight="sequence", log_clamp=None),
            )
        },
    ),
    (
        {
            **VLLM,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": 0.5,
        },
        {"correction": (pl.Truncate(3.0, 0.5, log_clamp=None),)},
    ),
    (
        {
            **VLLM,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_max": None,
        },
        {"correction": (pl.Band(0.0, math.inf, log_clamp=None),)},
    ),
    (
        {
            **VLLM,
            "vllm_importance_sampling_mode": "sequence_truncate",
            "off_policy_mask_threshold": 0.1,
        },
        {
            "correction": (
                pl.OPSM(0.1, source="rollout"),
                pl.Truncate(3.0, 0.0, level="product", log_clamp=None),
            )
        },
    ),
    (
        {
            **VLLM,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_cap": 2.0,
        },
        {"correction": (pl.Truncate(2.0, log_clamp=None),)},
    ),
]


@walked(("options", "slots"), OPTIONS, ids=[" ".join(o) for o, _ in OPTIONS])
def test_an_option_fills_its_slot_and_no_other(
    options: dict[str, Any], slots: dict[str, Any]
) -> None:
    assert spec_from_config(config(**options)) == MEANS["dapo"].replace(**slots)


def test_vespo_takes_vllm_weights_into_its_product() -> None:
    made = spec_from_config(
        config(loss_type="vespo", **VLLM, vllm_importance_sampling_mode="token_mask")
    )
    ratio = RolloutProduct(log_clamp=LOG_BOUNDS, token_clamp=20.0, outside="mask", high=3.0)
    assert made == MEANS["vespo"].replace(ratio=ratio)
    assert made.reads == ("old_logp", "rollout_logp")


@walked("level", ["token", "sequence"])
def test_vespos_level_acts_on_the_kl_alone(level: str) -> None:
    made = spec_from_config(config(loss_type="vespo", beta=0.1, importance_sampling_level=level))
    assert made == MEANS["vespo"].replace(kl=WrittenKL("k3", 0.1, clamp=None, ratio_level=level))


def test_vespos_numbers_are_float32_and_its_decay_at_least_1e_4() -> None:
    trust = spec_from_config(
        config(loss_type="vespo", vespo_k_pos=0.1, vespo_lambda_pos=0.0, vespo_lambda_neg=0.7)
    ).trust
    assert trust == pl.GammaWeight(
        0.10000000149011612, 9.999999747378752e-05, 3.0, 0.699999988079071
    )


def test_the_entropy_bonus_is_in_the_spec_where_it_is_averaged_alike() -> None:
    assert spec_from_config(config(loss_type="bnpo", entropy_coef=0.01)) == MEANS["bnpo"].replace(
        entropy_coef=0.01
    )


def test_options_outside_the_policy_loss_can_be_left_to_the_caller() -> None:
    handled_by_trl = config(top_entropy_quantile=0.2, entropy_coef=0.01, use_adaptive_entropy=True)
    assert spec_from_config(handled_by_trl, handled=EXTRA_OPTIONS) == MEANS["dapo"]


# --- configs without a spec -----------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "ppo"}, "loss_type 'ppo'"),
    ({"importance_sampling_level": "turn"}, "importance_sampling_level 'turn'"),
    ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2"),
    ({"use_adaptive_entropy": True}, "use_adaptive_entropy=True"),
    ({"entropy_coef": 0.01}, "entropy_coef=0.01 with loss_type='dapo'"),
    ({"delta": 0.5}, "delta=0.5"),
    ({"epsilon": -0.1}, "epsilon=-0.1"),
    ({"loss_type": "cispo", "epsilon_high": 0.0}, "epsilon_high=0.0"),
    ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg=0.0"),
    ({"loss_type": "vespo", "vespo_k_neg": -1.0}, "vespo_k_neg=-1.0"),
    ({"loss_type": "dr_grpo", "max_completion_length": None}, "max_completion_length=None"),
    ({"beta": -0.1}, "beta=-0.1"),
    ({"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold=-0.1"),
    ({**VLLM, "vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode 'token'"),
    ({**VLLM, "vllm_importance_sampling_clip_min": 3.0}, "vllm_importance_sampling_clip_min=3.0"),
    (
        {
            **VLLM,
            "vllm_importance_sampling_mode": "sequence_truncate",
            "vllm_importance_sampling_clip_max": None,
        },
        "vllm_importance_sampling_clip_max are both None",
    ),
    ({**VLLM, "loss_type": "vespo"}, "vllm_importance_sampling_mode='sequence_mask'"),
    (
        {
            **VLLM,
            "loss_type": "vespo",
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_max": 0.9,
        },
        "vllm_importance_sampling_clip_max=0.9",
    ),
]


@walked(("options", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_unsupported_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(pl.SpecError) as error:
        spec_from_config(config(**options))
    assert said in str(error.value)


def test_an_object_that_is_no_config_is_refused() -> None:
    with pytest.raises(pl.SpecError, match="no 'loss_type'"):
        spec_from_config(SimpleNamespace(beta=0.0))


def test_only_options_outside_the_policy_loss_can_be_handled_elsewhere() -> None:
    with pytest.raises(pl.SpecError, match="unknown option in handled 'delta'"):
        spec_from_config(config(), handled=("delta",))


# --- denominators ---------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])  # 5 tokens, one row of three empty


def test_rows_count_even_if_empty_and_micro_batches_are_averaged() -> None:
    totals = totals_for(
        config(loss_type="grpo"), MASK, gradient_accumulation_steps=4, num_processes=2
    )
    assert (totals.sequences, totals.dp_size) == (3 * 4 * 2, 2)


def test_bnpo_divides_by_the_micro_batch_and_dapo_by_the_generation_batch() -> None:
    items = torch.tensor(18)
    step = {"gradient_accumulation_steps": 2, "num_processes": 2}
    options = {"steps_per_generation": 4}
    # 5 tokens here, as many in 2 micro-batches on 2 ranks;
    # 18 tokens in 4 micro-batches, so 9 in the 2 of one step.
    assert float(totals_for(config(loss_type="bnpo", **options), MASK, items, **step).tokens) == 20
    assert float(totals_for(config(loss_type="dapo", **options), MASK, items, **step).tokens) == 9
    assert (
        float(
            totals_for(
                config(loss_type="dapo", **options), MASK, items, num_processes=2, training=False
            ).tokens
        )
        == 18
    )


def test_a_rank_s_share_of_the_tokens_is_a_float32() -> None:
    # TRL's count is an integer tensor, so its quotient is float32:
    # 17 · 1 / 3 is 5.6666665077…, not 5.666666666….
    tokens = tokens_of_window(torch.tensor(17), ranks=1, calls=1, generated=3)
    assert tokens.item() == torch.tensor(17 / 3, dtype=torch.float32).item() != 17 / 3


def test_an_empty_window_divides_by_one() -> None:
    assert tokens_of_window(torch.tensor(0), ranks=1, calls=1, generated=1).item() == 1
    assert float(totals_for(config(loss_type="bnpo"), torch.zeros_like(MASK)).tokens) == 1


# --- one micro-batch ------------------------------------------------------------------------------


def batch(**changes: Any) -> dict[str, Any]:
    """Two rows, four positions, the last of row 1 padding;
    advantages 1 and −2 per sequence, as TRL gives them.
    """
    made = {
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "advantages": torch.tensor([1.0, -2.0], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(7),
    }
    return {**made, **changes}


def logp() -> torch.Tensor:
    return torch.tensor(
        [[-1.0, -0.5, -2.0, -0.1], [-0.3, -1.5, -0.7, -9.0]],
        dtype=torch.float64,
        requires_grad=True,
    )


def run(
    options: dict[str, Any], inputs: dict[str, Any], **extra: Any
) -> tuple[pl.LossOutput, torch.Tensor]:
    c, x = config(**options), logp()
    totals = totals_for(c, loss_mask(inputs), inputs["num_items_in_batch"])
    out = batch_loss(spec_from_config(c, handled=EXTRA_OPTIONS), x, inputs, totals=totals, **extra)
    (gradient,) = torch.autograd.grad(out.loss, x)
    return out, gradient


def test_without_old_log_probabilities_the_batch_is_on_policy() -> None:
    out, gradient = run({}, batch())
    # Ratio 1 everywhere: −(4·1 + 3·(−2)) / 7 = 2/7;
    # the slope of a token is −A / 7, and 0 at the padding.
    close(out.loss, 2 / 7)
    close(gradient, [[-1 / 7] * 4, [2 / 7] * 3 + [0.0]])


def test_an_empty_row_counts_as_a_row() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    out, _ = run({"loss_type": "grpo"}, batch(completion_mask=mask))
    close(out.loss, -0.5)  # (−1 + 0) / 2


def test_a_tool_s_tokens_are_left_out() -> None:
    tool = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]])
    out, gradient = run({}, batch(tool_mask=tool, num_items_in_batch=torch.tensor(5)))
    close(out.loss, (-2 * 1 + 3 * 2) / 5)
    assert gradient[0, 1:3].tolist() == [0.0, 0.0]


def test_cispo_caps_the_weight_at_epsilon_high_itself() -> None:
    old = logp().detach() - math.log(3.0)  # every ratio is 3
    out, gradient = run({"loss_type": "cispo", "epsilon_high": 2.5}, batch(old_per_token_logps=old))
    # −2.5·A·logp over 7 tokens: row 0 sums logp −3.6 with A = 1, row 1 −2.5 with A = −2.
    close(out.loss, (2.5 * 3.6 - 2.5 * 2 * 2.5) / 7)
    close(gradient, [[-2.5 / 7] * 4, [5 / 7] * 3 + [0.0]])


def test_vllm_weights_multiply_and_mask_whole_sequences() -> None:
    x = logp().detach()
    # log-weights old − sampling: row 0 sums to log 2, row 1 to log 4 > log 3,
    # so row 1 is dropped and row 0 weighs 2.
    away = torch.tensor([[math.log(2.0), 0, 0, 0], [math.log(4.0), 0, 0, 7.0]], dtype=torch.float64)
    out, gradient = run(VLLM, batch(old_per_token_logps=x, sampling_per_token_logps=x - away))
    close(out.loss, -2 * 4 / 7)
    close(gradient, [[-2 / 7] * 4, [0.0] * 4])


def test_a_token_that_vllm_could_not_score_weighs_one() -> None:
    x = logp().detach()
    sampling = x.clone()
    sampling[0, 1], sampling[0, 2] = torch.nan, x[0, 2] - math.log(1.5)
    inputs = batch(old_per_token_logps=x, sampling_per_token_logps=sampling)
    out, _ = run({**VLLM, "vllm_importance_sampling_mode": "token_truncate"}, inputs)
    close(out.loss, -(3 + 1.5 - 6) / 7)


def test_an_unscored_token_shows_no_drift_although_it_drifted_from_old() -> None:
    x = logp().detach()
    # Row 1 (A < 0) drifted by (0.9 + 0 + 0)/3 = 0.3 from what vLLM reports; its second token is
    # unscored and old is 3 away there, which would be a drift of 1.3 if old stood in for it. Row 0
    # has A > 0 and is kept whatever its drift.
    sampling, old = (
        x + torch.tensor([[9.0] * 4, [0.9, 0.0, 0.0, 0.0]], dtype=torch.float64),
        x.clone(),
    )
    sampling[1, 1], old[1, 1] = torch.nan, x[1, 1] + 3.0
    inputs = batch(old_per_token_logps=old, sampling_per_token_logps=sampling)
    off = {**VLLM, "vllm_importance_sampling_correction": False}
    kept, _ = run({**off, "off_policy_mask_threshold": 0.5}, inputs)
    dropped, _ = run({**off, "off_policy_mask_threshold": 0.25}, inputs)
    # Kept: row 1 is 2 + 2·e^{-3}, but clipped below at 0.8 where A < 0, so 2 + 2·0.8 + 2.
    close(kept.loss, (-4 + 2 + 1.6 + 2) / 7)
    close(dropped.loss, -4 / 7)
    assert dropped.metrics["rejected_fraction/off_policy"].item() == 3 / 7


def test_a_filter_drops_the_policy_term_and_keeps_the_kl() -> None:
    x = logp().detach()
    keep = torch.tensor([[True, False, False, False], [False] * 4])
    inputs = batch(ref_per_token_logps=x + 1.0)
    out, _ = run({"beta": 0.5, "use_bias_correction_kl": False}, inputs, keep=keep)
    close(out.loss, (-1 + 0.5 * 7 * (math.e - 2)) / 7)  # k3 at d = 1 is e − 2
    assert out.metrics["rejected_fraction/low_entropy"].item() == 6 / 7


def test_vespo_by_hand() -> None:
    x = logp().detach()
    old = x - torch.tensor([[0.2, 0, 0, 0], [0, -0.1, 0, 5.0]], dtype=torch.float64)
    out, gradient = run({"loss_type": "vespo"}, batch(old_per_token_logps=old))
    # W is e^0.2 in row 0 (k 2, λ 3) and e^−0.1 in row 1 (k 3, λ 2);
    # φ = exp(λ + k·log W − λ·W), the loss −φ·A·logp.
    phi = [math.exp(3 + 2 * 0.2 - 3 * math.exp(0.2)), math.exp(2 - 3 * 0.1 - 2 * math.exp(-0.1))]
    close(out.loss, (phi[0] * 3.6 - phi[1] * 2 * 2.5) / 7)
    close(gradient, [[-phi[0] / 7] * 4, [phi[1] * 2 / 7] * 3 + [0.0]])


# --- the parts that VESPO needs of the core -------------------------------------------------------


def ratio_of(
    part: Any, x: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor | None = None
) -> float:
    """The mean ratio over the tokens of one sequence, which is that sequence's."""
    ones = torch.ones_like(x)
    spec = pl.LossSpec(ratio=part, trust=pl.Unbounded())
    return -pl.policy_loss(spec, x, old, ones, ones, rollout_logp=rollout).loss.item()


def test_a_product_may_clamp_each_token_first() -> None:
    x, old = (
        torch.tensor([[-1.0, -1.0]], dtype=torch.float64),
        torch.tensor([[-3.0, -0.7]], dtype=torch.float64),
    )
    # log-ratios 2 and −0.3; with each held within ±0.5 the product is e^(0.5 − 0.3).
    assert ratio_of(pl.SequenceProduct(), x, old) == pytest.approx(math.exp(1.7), rel=1e-14)
    assert ratio_of(pl.SequenceProduct(token_clamp=0.5), x, old) == pytest.approx(
        math.exp(0.2), rel=1e-14
    )


def test_a_product_may_reach_to_the_engine_through_bounded_weights() -> None:
    x = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    # Weights 5 and 1.5.
    rollout = x - torch.tensor([[math.log(5.0), math.log(1.5)]], dtype=torch.float64)
    truncated = RolloutProduct(outside="truncate", high=3.0)
    masked = RolloutProduct(outside="mask", high=3.0)
    assert ratio_of(truncated, x, x, rollout) == pytest.approx(3.0 * 1.5, rel=1e-14)
    assert ratio_of(masked, x, x, rollout) == pytest.approx(1e-8 * 1.5, rel=1e-12)


def test_parts_of_trl_refuse_invalid_values() -> None:
    with pytest.raises(pl.SpecError, match="anchor must be 'old'"):
        RolloutProduct(anchor="rollout", outside="mask")
    with pytest.raises(pl.SpecError, match="outside"):
        RolloutProduct(outside="drop")
    with pytest.raises(pl.SpecError, match="weight and ratio_level"):
        WrittenKL("k3", 0.1, weight="ratio", ratio_level="token")
    with pytest.raises(pl.SpecError, match="ratio_level"):
        WrittenKL("k3", 0.1, ratio_level="turn")


def test_the_policy_gradient_survives_a_weighted_kl_far_from_the_old_policy() -> None:
    # One token, log-ratio 80, reference = policy: the KL is 0 and pulls nowhere, so d loss / d logp
    # = −min(r, 5)·A = −5. TRL adds that to one of two KL terms of 0.04·e^80 that cancel,
    # and gets 0.
    spec = spec_from_config(config(loss_type="cispo", epsilon_high=5.0, beta=0.04))
    for dtype in (torch.float64, torch.float32):
        logp = torch.full((1, 1), -0.5, dtype=dtype, requires_grad=True)
        ones = torch.ones(1, 1, dtype=dtype)
        pl.policy_loss(
            spec, logp, logp.detach() - 80, ones, ones, ref_logp=logp.detach()
        ).loss.backward()
        assert logp.grad.item() == -5.0


def test_the_kl_may_be_weighted_by_another_ratio_than_the_surrogate() -> None:
    x = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    old, ref = x - torch.tensor([[0.6, 0.2]], dtype=torch.float64), x + 1.0
    ones = torch.ones_like(x)
    k3 = math.e - 2  # at d = 1, for both tokens
    ratios = {
        pl.KL("k3", 1.0, weight="ratio"): [math.exp(0.8)] * 2,
        WrittenKL("k3", 1.0, ratio_level="token"): [math.exp(0.6), math.exp(0.2)],
        WrittenKL("k3", 1.0, ratio_level="sequence"): [math.exp(0.4)] * 2,
    }
    for kl, expected in ratios.items():
        spec = pl.LossSpec(pl.SequenceProduct(), pl.Unbounded("logp"), kl=kl)
        assert spec.reads == ("old_logp", "ref_logp")
        out = pl.policy_loss(spec, x, old, ones, ones, ref_logp=ref)
        assert out.metrics["kl_ref"].item() == pytest.approx(k3 * sum(expected) / 2, rel=1e-14)


def test_k3_as_written_has_the_rounding_of_its_terms() -> None:
    d = torch.tensor([1e-9], dtype=torch.float64)
    exact, written = (
        pl.functional.kl.estimate(d, "k3", as_written=terms).item()
        for terms in (None, "exp(d) - d - 1")
    )
    assert exact == pytest.approx(5e-19, rel=1e-6)  # d²/2
    assert written == (math.exp(1e-9) - 1e-9 - 1)


def test_terms() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    # 6 − 2 + 10; the gradient of the old term stays with the total
    total = replace_term(3 * x, x, 5 * x)
    total.backward()
    assert (total.item(), x.grad.item()) == (14.0, 8.0)
    scored = where_scored(torch.tensor([1.0, torch.nan]), torch.tensor([7.0, 8.0]))
    assert scored.tolist() == [1.0, 8.0]


# --- a loss of one's own --------------------------------------------------------------------------


def plain_gradient(t: pl.Tokens) -> torch.Tensor:
    return -t.advantages * t.ratio


def test_a_given_loss_is_a_spec_a_name_a_function_or_none() -> None:
    assert checked_loss(None, grpo_config()) is None
    assert checked_loss("gspo", grpo_config()) == pl.preset("gspo")
    assert checked_loss(pl.preset("dapo"), grpo_config()) == pl.preset("dapo")
    own = checked_loss(plain_gradient, grpo_config())
    assert own == pl.LossSpec(trust=plain_gradient)
    with pytest.raises(pl.InputError, match="policy_loss must be"):
        checked_loss(3, grpo_config())  # type: ignore[arg-type]


KL = pl.KL("k3", 0.1)
SILENT: list[tuple[dict[str, Any], pl.LossSpec, str]] = [
    ({"epsilon": 0.1}, pl.preset("gspo"), "epsilon=0.1"),
    (
        {"loss_type": "sapo"},
        pl.preset("gspo").replace(aggregate=pl.TokenMean()),
        "loss_type='sapo'",
    ),
    (
        {"importance_sampling_level": "sequence"},
        pl.preset("dapo"),
        "importance_sampling_level='sequence'",
    ),
    ({"off_policy_mask_threshold": 0.5}, pl.preset("dapo"), "off_policy_mask_threshold=0.5"),
    ({"beta": 0.1}, pl.preset("dapo"), "beta=0.1"),
    ({"beta": 0.2}, pl.preset("dapo").replace(kl=KL), "beta=0.2"),
    ({}, pl.preset("dapo").replace(kl=KL), "set beta=0.1"),
    ({}, pl.preset("dapo").replace(entropy_coef=0.01), "entropy_coef=0.01"),
    (VLLM, pl.preset("dapo"), "vllm_importance_sampling_correction=True"),
    ({}, pl.preset("dapo").replace(aggregate=pl.PromptMean()), "group_ids"),
    ({}, pl.preset("dapo").replace(correction=pl.Stale(1)), "ages"),
    (
        {"gradient_accumulation_steps": 2},
        pl.LossSpec(trust=pl.CovClip()),
        "gradient_accumulation_steps=2",
    ),
    ({"world_size": 2}, pl.LossSpec(trust=pl.CovClip()), "2 process"),
    (
        {"gradient_accumulation_steps": 2},
        pl.LossSpec(aggregate=pl.LocalTokenMean()),
        "gradient_accumulation_steps=2",
    ),
]


@walked(("options", "spec", "said"), SILENT, ids=[said for *_, said in SILENT])
def test_no_option_falls_silent(options: dict[str, Any], spec: pl.LossSpec, said: str) -> None:
    with pytest.raises(pl.SpecError) as error:
        checked_loss(spec, grpo_config(**options))
    assert said in str(error.value)


def test_options_that_still_act_are_no_error() -> None:
    args = grpo_config(loss_type="sapo", beta=0.1, **VLLM)
    spec = spec_from_config(args).replace(rejected="keep", ratio=pl.SequenceRatio())
    assert checked_loss(spec, args) == spec
    # A step is one call.
    assert checked_loss(pl.LossSpec(trust=pl.CovClip()), grpo_config()) is not None


# --- the page -------------------------------------------------------------------------------------


def test_the_page_on_a_config_lists_effective_ignored_and_surprising_options() -> None:
    page = explain_config(
        config(loss_type="cispo", delta=4.0, beta=0.04, **VLLM, top_entropy_quantile=0.2)
    )
    flat = " ".join(page.split())
    for part in (
        "loss_type='cispo': the surrogate",
        "epsilon_high=None (default): the largest ratio itself",
        "delta=4.0: loss_type clips nothing with it",
        "caps every weight at epsilon=0.2",
        "a correction is on by default",
        "top_entropy_quantile=0.2: only this share",
        "surrogate = -sg(min(ratio, 0.2)) * advantages * logp",
        "kl = (exp(d) - d - 1) * ratio",
    ):
        assert part in flat, part


def test_the_page_of_the_default_config_names_the_default_that_surprises() -> None:
    flat = " ".join(explain_config(config()).split())
    assert "loss_type is 'dapo' unless it is set" in flat
    assert "without effect" not in flat


def test_a_config_is_explained_here_and_not_by_the_core() -> None:
    """`explain` takes specs and presets; a config needs `explain_config`."""
    made = grpo_config(loss_type="grpo", importance_sampling_level="sequence")
    assert str(pl.explain(spec_from_config(made))) in explain_config(made)
    with pytest.raises(pl.InputError, match="LossSpec or the name of a preset, got GRPOConfig"):
        pl.explain(made)


@walked("name", ["tis", "importance_sampling", "decoupled_ppo"])
def test_a_loss_on_the_engines_log_probabilities_needs_vllm(name: str) -> None:
    with pytest.raises(pl.SpecError, match=r"rollout_logp.*use_vllm=True"):
        checked_loss(name, grpo_config())
