"""Inputs that are wrong or doubtful without being malformed: nothing of it may pass in silence."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import PRESETS, make_batch
from policyloss import advantage
from policyloss.functional.segments import Sequences
from policyloss.records import Invalid

SUM = pl.LossSpec(trust=pl.Unbounded("ratio"), aggregate=pl.TokenSum())
X = torch.zeros(2)


def loss(advantages, cu_seqlens, tokens=X, spec=SUM):
    """`−Σ advantage`, as every ratio is 1."""
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return pl.policy_loss(spec, tokens, tokens, advantages, mask, cu_seqlens=cu_seqlens).loss


# --- As many packed tokens as sequences ---------------------------------------------------------

TWO_AND_NONE = torch.tensor([0, 2, 2])  # lengths 2 and 0


def test_an_advantage_that_may_be_of_tokens_or_of_sequences_is_an_error():
    with pytest.raises(pl.InputError, match=r"advantages has shape \(2,\).*\(2, 1\).*\(1, 2\)"):
        loss(torch.tensor([5.0, -7.0]), TWO_AND_NONE)


def test_both_meanings_can_be_written():
    """One per sequence: both tokens have 5, so −(5 + 5) = −10; one per token: −(5 − 7) = 2."""
    both = torch.tensor([5.0, -7.0])
    assert loss(both.unsqueeze(1), TWO_AND_NONE) == -10
    assert loss(both.unsqueeze(0), TWO_AND_NONE) == 2


def test_sequences_of_one_token_need_no_choice():
    assert loss(torch.tensor([5.0, -7.0]), torch.tensor([0, 1, 2])) == 2
    assert loss(torch.zeros(0), torch.tensor([0]), torch.zeros(0)) == 0


def test_where_lengths_cannot_be_read_the_shape_alone_decides():
    offsets = torch.tensor([0, 1, 2], device="meta")
    tokens = torch.zeros(2, device="meta")
    with pytest.raises(pl.InputError, match="may mean one per token or one per sequence"):
        loss(tokens, offsets, tokens)
    assert loss(tokens.unsqueeze(1), offsets, tokens).shape == ()


def test_a_row_of_packed_advantages_is_one_per_token_whatever_the_lengths():
    a = torch.tensor([1.0, 2.0, 4.0])
    assert loss(a.unsqueeze(0), torch.tensor([0, 2, 3]), torch.zeros(3)) == -7


@walked("scan", ["gae", "discounted_returns", "reinforce_pp"])
def test_rewards_that_may_be_of_tokens_or_of_sequences_are_an_error(scan):
    mask = torch.ones(2, dtype=torch.bool)
    rewards = torch.tensor([5.0, -7.0])

    def run(rewards):
        if scan == "gae":
            return pl.gae(rewards, torch.zeros(2), mask, cu_seqlens=TWO_AND_NONE).returns
        return getattr(advantage, scan)(rewards, mask, cu_seqlens=TWO_AND_NONE)

    with pytest.raises(pl.InputError, match=r"rewards has shape \(2,\).*\(2, 1\).*\(1, 2\)"):
        run(rewards)
    if scan != "reinforce_pp":
        # One per sequence: 5 on the last token, so that both tokens have 5 to go. One per token: 5
        # − 7 = −2, then −7.
        assert run(rewards.unsqueeze(1)).tolist() == [5.0, 5.0]
        assert run(rewards.unsqueeze(0)).tolist() == [-2.0, -7.0]


def test_a_compiled_loss_needs_a_clear_shape():
    """It serves every pack of one shape; the shape must mean the same in all of them."""
    compiled = pl.compiled_loss(SUM)
    a = torch.tensor([5.0, -7.0])
    mask = torch.ones(2, dtype=torch.bool)
    for lengths in (torch.tensor([0, 1, 2]), TWO_AND_NONE):
        with pytest.raises(pl.InputError, match="one per sequence"):
            compiled(X, X, a, mask, cu_seqlens=lengths)


def test_other_functions_of_a_pack_know_what_they_pass_on():
    """Sums and measurements over a pack of as many tokens as sequences: no advantage of theirs is
    ambiguous.
    """
    mask = torch.ones(2, dtype=torch.bool)
    assert (
        pl.aggregate_tokens(torch.tensor([1.0, 2.0]), mask, pl.TokenSum(), cu_seqlens=TWO_AND_NONE)
        == 3
    )
    spec = pl.LossSpec(correction=pl.Band(0.5, 2.0), rejected="renormalise")
    micro = {
        "mask": mask,
        "cu_seqlens": TWO_AND_NONE,
        "old_logp": X,
        "rollout_logp": X,
        "advantages": torch.ones(2, 1),
    }
    assert pl.accumulate(spec, [micro], logp=lambda _: X).totals.tokens == 2


# --- Values that could not be checked at once
# ------------------------------------------------------


def compiled(function):
    return torch.compile(function, backend="eager", fullgraph=True)


@walked("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_other_values_shows_and_raises_when_the_host_waits(dtype):
    """Half of 64 entries are 1, the others −100 (156 as uint8): 32 are wrong."""
    tokens = torch.full((4, 16), -1.0)
    right = (torch.arange(64).view(4, 16) % 2).to(dtype)
    wrong = torch.where(right == 0, torch.tensor(-100).to(dtype), right)

    @compiled
    def call(mask):
        return pl.policy_loss(pl.preset("ppo"), tokens, tokens, tokens, mask).metrics

    good = call(right)
    assert good["invalid_mask_values"].item() == 0
    assert good.compute()["tokens"] == 32
    bad = call(wrong)
    assert bad["invalid_mask_values"].item() == 32
    for metrics in (bad, good + bad, bad + good):
        with pytest.raises(pl.InputError, match="mask held 32 values that are neither 0 nor 1"):
            metrics.compute()


def test_a_mask_that_was_checked_has_no_counter():
    tokens = torch.full((2, 3), -1.0)
    for mask in (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.int64)):
        assert (
            "invalid_mask_values" not in pl.policy_loss(SUM, tokens, tokens, tokens, mask).metrics
        )
    with pytest.raises(pl.InputError, match="mask must be bool or hold only 0 and 1"):
        pl.policy_loss(SUM, tokens, tokens, tokens, torch.full((2, 3), -100))


def test_wrong_offsets_show_and_raise_when_the_host_waits():
    """Nothing reads beyond the tokens: with wrong offsets, all tokens are of the first sequence."""
    spec = pl.preset("grpo").replace(kl=None)
    tokens = torch.full((4,), -1.0)
    mask = torch.ones(4, dtype=torch.bool)

    @compiled
    def call(cu_seqlens):
        return pl.policy_loss(spec, tokens, tokens, tokens, mask, cu_seqlens=cu_seqlens)

    good = call(torch.tensor([0, 1, 4]))
    assert good.metrics.compute()["tokens"] == 4
    for offsets in ([0, 2, 5], [1, 2, 4], [0, 5, 4], [0, 9, 4]):
        out = call(torch.tensor(offsets))
        assert out.loss.isfinite()
        with pytest.raises(pl.InputError, match="cu_seqlens of 1 calls did not rise"):
            out.metrics.compute()


def test_value_loss_counts_them_too():
    x = torch.ones(2, 3)

    @compiled
    def call(mask):
        return pl.value_loss(x, x, x, mask).metrics

    with pytest.raises(pl.InputError, match="mask held 6 values"):
        call(torch.full((2, 3), 2)).compute()


def test_one_rank_reduces_what_it_knows_to_be_wrong():
    """`reduce_metrics` need not wait here, so that the count travels to `compute`."""
    metrics = pl.Metrics({"invalid_mask_values": Invalid(torch.tensor(3))})
    step = pl.accumulate(pl.preset("ppo"), [{"mask": torch.ones(1, 1, dtype=torch.bool)}])
    step.add(metrics)
    for micro in step:
        micro.is_used = True
    with pytest.raises(pl.InputError, match="held 3 values"):
        step.reduce_metrics().compute()


# --- Numbers that contradict their name ------------------------------------------------------

BATCH = make_batch(seed=3)


def call(spec=None, **changes):
    return pl.policy_loss(pl.preset("ppo") if spec is None else spec, **{**BATCH.kwargs, **changes})


def test_an_entropy_bonus_without_gradient_is_an_error():
    spec = pl.LossSpec(entropy_coef=0.01)
    logp = BATCH.logp.clone().requires_grad_()
    with pytest.raises(pl.InputError, match=r"entropy carries no gradient.*entropy_coef=0\.01"):
        call(spec, logp=logp)
    call(spec, logp=logp, entropy=BATCH.entropy.clone().requires_grad_())
    call(logp=logp)  # only measured
    call(spec)  # nothing trains here
    with torch.no_grad():
        call(spec, logp=logp)


def test_probabilities_in_the_place_of_log_probabilities_are_told():
    assert call().metrics.compute()["positive_logp_tokens"] == 0
    valid = int(BATCH.mask.sum())
    metrics = call(old_logp=BATCH.old_logp.exp()).metrics
    expected = (BATCH.old_logp.exp() > 0.1)[BATCH.mask].sum()
    assert metrics["positive_logp_tokens"].item() == expected > valid / 2
    with pytest.warns(
        UserWarning, match="more than half of the valid tokens have a positive log-probability"
    ):
        metrics.compute()


def test_a_few_positive_numbers_are_counted_without_a_warning():
    ref = BATCH.ref_logp.clone()
    i, j = BATCH.mask.nonzero()[0].tolist()
    ref[i, j] = 0.2
    assert call(ref_logp=ref).metrics.compute()["positive_logp_tokens"] == 1


LOGPROBS = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp")
REJECTING = {
    f"icepop, {rejected}": pl.preset("icepop").replace(rejected=rejected)
    for rejected in ("renormalise", "drop_sequence")
}


def test_an_infinite_log_probability_is_counted_also_where_a_clamp_hides_it():
    """By every preset, whether it reads the tensor or not, and where the token is rejected."""
    wrong = {}
    (i, j), (row, column) = BATCH.mask.nonzero()[0].tolist(), (~BATCH.mask).nonzero()[0].tolist()
    for (name, spec), of in itertools.product({**PRESETS, **REJECTING}.items(), LOGPROBS):
        for bad in (-math.inf, math.inf, math.nan):
            x = getattr(BATCH, of).clone()
            x[row, column] = bad
            outside = call(spec, **{of: x}).metrics["nonfinite_tokens"].item()
            x[i, j] = bad
            inside = call(spec, **{of: x}).metrics["nonfinite_tokens"].item()
            if not inside >= 1 or outside:
                wrong[name, of, bad] = inside, outside
    assert not wrong


def test_a_log_probability_that_was_never_filled_is_told():
    """All zeros, in any tensor other than logp, of any dtype."""
    assert call().metrics.compute()["zero_logp_tokens"] == 0
    for name, dtype in itertools.product(LOGPROBS[1:], (torch.float32, torch.bfloat16)):
        metrics = call(**{name: torch.zeros_like(BATCH.logp, dtype=dtype)}).metrics
        assert metrics["zero_logp_tokens"].item() == BATCH.mask.sum(), name
        with pytest.warns(UserWarning, match="log-probability of exactly 0"):
            metrics.compute()
    # A sure token has this log-probability, and one that is not sure shows that the tensor is full.
    i, j = BATCH.mask.nonzero()[0].tolist()
    old = torch.zeros_like(BATCH.logp)
    old[i, j] = -0.5
    n = int(BATCH.mask.sum())
    assert call(old_logp=old).metrics.compute()["zero_logp_tokens"] == n - 1


@walked(
    ("aggregate", "totals", "beyond"),
    [
        (pl.TokenMean(), pl.Totals(4, 100), 2),  # 6 tokens
        (pl.SeqMeanTokenMean(), pl.Totals(1, 1), 1),  # 2 sequences
        (pl.SeqMeanTokenSumNorm(8.0), pl.Totals(1, torch.tensor(1)), 1),
        (pl.TokenMean(), pl.Totals(torch.tensor(6), 1), 0),
        (pl.TokenSum(), pl.Totals(1, 1), 0),  # divides by neither
    ],
)
def test_totals_below_what_a_call_holds_are_told(aggregate, totals, beyond):
    x = torch.full((2, 3), -1.0)
    metrics = pl.policy_loss(
        pl.LossSpec(aggregate=aggregate), x, x, x, x < 0, totals=totals
    ).metrics
    if not beyond:
        assert metrics.compute().get("beyond_totals") == beyond
        return
    assert metrics["beyond_totals"].item() == beyond
    with pytest.warns(UserWarning, match="more than its totals count"):
        metrics.compute()


# --- Micro-batches
# ---------------------------------------------------------------------------------


def step_of(number):
    x = torch.full((1, 2), -1.0)
    return x, pl.accumulate(
        pl.preset("ppo"), [{"mask": x < 0, "old_logp": x, "advantages": x} for _ in range(number)]
    )


def test_a_loss_is_taken_once_of_each_micro_batch():
    x, step = step_of(2)
    for micro in step:
        micro.loss(x)
        with pytest.raises(pl.InputError, match="was taken already"):
            micro.loss(x)
    assert step.reduce_metrics().compute()["tokens"] == 4


def test_a_loss_that_failed_may_be_taken_again():
    x, step = step_of(1)
    for micro in step:
        with pytest.raises(pl.InputError, match="logp"):
            micro.loss(x[:, :1])
        micro.loss(x)
    assert step.reduce_metrics().compute()["tokens"] == 2


def test_a_micro_batch_that_was_never_used_is_told():
    x, step = step_of(3)
    for i, micro in enumerate(step):
        if i == 0:
            micro.loss(x)
    with pytest.raises(pl.InputError, match="2 micro-batches of this step were never used"):
        step.reduce_metrics()


def test_arguments_for_another_loss_are_a_use():
    x, step = step_of(2)
    for micro in step:
        step.add(pl.policy_loss(step.spec, x, **micro.arguments()).metrics)
    assert step.reduce_metrics().compute()["tokens"] == 4


# --- Groups and bounds
# -------------------------------------------------------------------------------


@walked("name", ["grpo", "dr_grpo", "rloo", "grpo_loo", "maxrl", "gpg"])
def test_ids_that_are_all_different_are_told(name):
    rewards = torch.tensor([1.0, 0.0, 2.0])
    estimate = getattr(advantage, name)
    with pytest.warns(UserWarning, match="all 3 ids are different"):
        assert estimate(rewards, torch.tensor([4, 9, 2])).tolist() == [0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate(rewards, torch.tensor([4, 4, 2]))
        estimate(rewards[:1], torch.tensor([4]))
        if name != "grpo_loo":
            estimate(rewards, torch.tensor([4, 9, 2]), single="raw")


def test_percentages_are_no_bounds():
    for make in (
        lambda: pl.Clip(20, 28),
        lambda: pl.TwoSidedClip(4.0, 20, 28),
        lambda: pl.CovClip(20, 28),
    ):
        with pytest.raises(
            pl.SpecError, match=r"eps_low=20 puts the lower bound at -19.*0\.2 for 20 %.*math\.inf"
        ):
            make()


def test_bounds_of_the_ratio_are_no_distances():
    with pytest.warns(UserWarning, match=r"\[0\.2, 2\.2\].*eps_low=0\.2, eps_high=0\.2"):
        pl.Clip(0.8, 1.2)
    with pytest.warns(UserWarning, match=r"eps_low=0\.2, eps_high=0\.28"):
        pl.Clip(0.8, 1.28)


def test_bounds_that_are_meant_stay_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for low, high in (
            (0.2, 0.28),
            (3e-4, 4e-4),
            (0.2, math.inf),
            (math.inf, 0.2),
            (1.0, 0.28),
            (0.2, 5.0),
            (0.0, 0.0),
            (0.9, 0.9),
        ):
            pl.Clip(low, high)
        pl.DetachedClip(0.8, 1.2)
        pl.DetachedClip.around_one(10.0, 0.2)
        pl.GeometricClip(3.0, 3.0)  # distances of the logarithm
        for name in pl.presets():
            pl.preset(name)


# --- Sequences
# ------------------------------------------------------------------------------------------


def test_wrong_offsets_put_all_tokens_into_the_first_sequence():
    """As on a device: the layout that stands in for a wrong one sums 1 + 2 + 4 = 7 into the first
    of three.
    """

    @compiled
    def sums(x, cu_seqlens):
        sequences = Sequences.of(x, cu_seqlens)
        return sequences.sum(x), sequences.invalid

    x = torch.tensor([1.0, 2.0, 4.0])
    total, invalid = sums(x, torch.tensor([0, 1, 1, 3]))
    assert (total.tolist(), invalid.item()) == ([1, 0, 6], 0)
    total, invalid = sums(x, torch.tensor([0, 1, 1, 9]))
    assert (total.tolist(), invalid.item()) == ([7, 0, 0], 1)


def test_with_context_parallel_a_packs_numbers_in_one_dimension_are_of_tokens():
    """N is the size of a shard, and differs by rank: the meaning of a shape may not depend on
    it.
    """
    one_rank_of_several = object()
    offsets = torch.tensor([0, 2, 3])
    shard = Sequences((3,), offsets, torch.tensor([0, 0, 1]), one_rank_of_several)
    assert shard.with_clear_shape(torch.zeros(3), "advantages").shape == (1, 3)
    with pytest.raises(
        pl.InputError, match=r"with cp_group the 1-D numbers of a pack are one per token"
    ):
        shard.with_clear_shape(torch.zeros(2), "advantages")
    full = Sequences((2,), TWO_AND_NONE, torch.tensor([0, 0]), one_rank_of_several)
    assert full.with_clear_shape(torch.zeros(2), "advantages").shape == (1, 2)
