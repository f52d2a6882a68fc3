"""What every loss does to the same tokens: hand-computed numbers, identities, every preset, the
smallest cure.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
import policyloss_lab as lab
from policyloss.catalogue import PRESETS
from policyloss.errors import InputError
from policyloss_lab.whatif.outcome import FACTORS, Limits, outcome_of, problems
from policyloss_lab.whatif.tokens import StoredTokens

WIDE = torch.float64


def logs(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=WIDE).log()


def four_tokens(**changes: Any) -> dict[str, Any]:
    """Two sequences of two tokens: A = 1 with ratios 1 and 1.5, A = -1 with ratios 1.5 and 0.5."""
    return {
        "logp": logs([[1.0, 1.5], [1.5, 0.5]]) - 1,
        "old_logp": torch.full((2, 2), -1.0, dtype=WIDE),
        "advantages": torch.tensor([1.0, -1.0], dtype=WIDE),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        **changes,
    }


def random_tokens(seed: int = 0, **more: Any) -> dict[str, Any]:
    """Six ragged sequences of three prompts, with everything that a loss may read."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(6, 7, generator=g, dtype=WIDE) * 2 - 0.1

    def near(scale: float) -> Tensor:
        return old + scale * torch.randn(6, 7, generator=g, dtype=WIDE)

    mask = torch.arange(7) < torch.tensor([7, 5, 3, 7, 1, 6])[:, None]
    return {
        "logp": near(0.3),
        "old_logp": old,
        "rollout_logp": near(0.1),
        "ref_logp": near(0.2),
        "teacher_logp": near(0.2),
        "entropy": torch.rand(6, 7, generator=g, dtype=WIDE),
        "divergence": torch.rand(6, 7, generator=g, dtype=WIDE),
        "advantages": torch.randn(6, generator=g, dtype=WIDE),
        "mask": mask,
        "group_ids": torch.tensor([0, 0, 1, 1, 2, 2]),
        **more,
    }


PPO, SAMPLING = pl.LossSpec(), pl.LossSpec(trust=pl.Unbounded())


def test_hand_computed_weights_and_sample_size() -> None:
    """PPO clips at 0.8 and 1.2. Tokens 2 and 4 are clipped: the gradients are -A·r/4 of the others,
    -1/4 and 1.5/4. On policy every token has ±1/4, so half of it is lost, the importance is
    1, 0, 1.5, 0, and the effective sample size is 2.5² / (4·3.25).
    """
    outcome = lab.what_if(four_tokens(), {"ppo": PPO})["ppo"]
    assert outcome.gradient.tolist() == pytest.approx([-0.25, 0, 0.375, 0])
    assert outcome.on_policy.tolist() == pytest.approx([-0.25, -0.25, 0.25, 0.25])
    assert outcome.lost == pytest.approx(0.5)
    assert outcome.effective == pytest.approx(6.25 / 13)
    assert outcome.share("upper", "lower") == 0.5
    assert outcome.share("rejected") == 0


def test_hand_computed_masses() -> None:
    """Of 0.25 + 0.375, 0.375 is at A < 0 and at the ratio 1.5, and all at the first of two tokens.
    By branch the on-policy gradient counts, a quarter of it at each token.
    """
    result = lab.what_if(four_tokens(), {"ppo": PPO})
    masses = result["ppo"].masses(result.tokens)
    assert masses["sign"] == pytest.approx(
        {"advantage below 0": 0.6, "no advantage": 0, "advantage above 0": 0.4}
    )
    ratios = {name: x for name, x in masses["ratio"].items() if x}
    assert ratios == pytest.approx({"0.95–1.05": 0.4, "1.25–2": 0.6})
    assert masses["position"]["0–10 %"] == pytest.approx(1)
    assert masses["branch"] == pytest.approx({"plain": 0.5, "upper": 0.25, "lower": 0.25})


def test_hand_computed_cosine_and_change() -> None:
    """Without a trust region the gradients are (-2, -3, 3, 1)/8, and PPO's (-2, 0, 3, 0)/8: the
    cosine is 13/√(13·23). PPO's step raises the first sequence by 0.25 and lowers the second by
    0.375, in units of its length √13/8.
    """
    result = lab.what_if(four_tokens(), {"ppo": PPO, "sampling": SAMPLING})
    assert float(result.by_token.cosine[0, 1]) == pytest.approx(math.sqrt(13 / 23))
    assert result.by_token.change[0].tolist() == pytest.approx([0.25, -0.375])
    length = math.sqrt(13) / 8
    assert result.by_token.unit_change[0].tolist() == pytest.approx(
        [0.25 / length, -0.375 / length]
    )


def test_a_gradient_through_a_model_needs_one() -> None:
    with pytest.raises(pl.InputError, match="through='head' needs a model"):
        lab.what_if(four_tokens(), {"ppo": PPO}, through="head")


def test_a_rejected_token_is_named() -> None:
    """The band keeps weights exp(old - rollout) from 0.5 to 2, and the last token has 3."""
    tokens = four_tokens(rollout_logp=-1 - logs([[1.0, 1.0], [1.0, 3.0]]))
    outcome = lab.what_if(tokens, {"band": PPO.replace(correction=pl.Band(0.5, 2.0))})["band"]
    assert outcome.share("rejected") == 0.25
    assert outcome.gradient[3] == 0


def test_a_loss_is_exactly_like_itself_and_scales_with_the_advantages() -> None:
    result = lab.what_if(random_tokens())
    alive = torch.tensor([outcome.norm > 0 for outcome in result.outcomes])
    assert result.by_token.cosine.diagonal()[alive].sub(1).abs().max() < 1e-12
    assert bool((result.by_token.cosine.diagonal()[~alive] == 0).all())
    names = ("ppo", "dapo", "gspo", "cispo", "tis", "reinforce", "dr_grpo")
    doubled = random_tokens()
    doubled["advantages"] = 2 * doubled["advantages"]
    once, twice = (lab.what_if(x, names) for x in (random_tokens(), doubled))
    assert torch.allclose(once.by_token.cosine, twice.by_token.cosine, atol=1e-12)
    assert torch.allclose(once.by_token.unit_change, twice.by_token.unit_change, atol=1e-12)
    for name in names:
        assert once[name].lost == pytest.approx(twice[name].lost)
        assert once[name].effective == pytest.approx(twice[name].effective)


@walked("name", pl.presets())
def test_every_preset_gives_the_gradient_of_policy_loss(name: str) -> None:
    """Tokens end to end give the gradient that the padded rows have."""
    tokens = random_tokens()
    outcome = lab.what_if(tokens, [name])[name]
    spec = PRESETS[name].spec.for_run(7)
    leaves = {n: tokens[n].clone().requires_grad_() for n in ("logp", "entropy", "divergence")}
    out = pl.policy_loss(spec, **{**tokens, **leaves})
    (slope,) = torch.autograd.grad(out.loss, leaves["logp"], allow_unused=True)
    slope = torch.zeros_like(tokens["logp"]) if slope is None else slope
    assert torch.allclose(outcome.gradient, slope.flatten(), atol=1e-14)
    assert outcome.metrics["loss"] == pytest.approx(out.loss.item())


def test_a_preset_that_cannot_be_tried_names_the_missing_tensor() -> None:
    result = lab.what_if(four_tokens())
    tried = {outcome.name for outcome in result.outcomes}
    assert tried | set(result.refused) == set(pl.presets())
    assert "dapo" in tried
    assert "ref_logp" in result.refused["grpo"]
    assert "divergence" in result.refused["gkd"]
    assert "rollout_logp" in result.refused["tis"]
    with pytest.raises(InputError, match="grpo could not be tried: it reads ref_logp"):
        result["grpo"]
    with pytest.raises(InputError, match="did you mean 'gspo'"):
        result["gsp"]


def test_garbage_at_masked_tokens_changes_nothing() -> None:
    dirty = random_tokens()
    for name in ("logp", "old_logp", "rollout_logp", "ref_logp"):
        dirty[name] = dirty[name].masked_fill(~dirty["mask"], math.nan)
    a, b = lab.what_if(random_tokens(), spec="dapo"), lab.what_if(dirty, spec="dapo")
    assert torch.equal(a.by_token.gram, b.by_token.gram)


def tokens_with_ratio(ratio: float, share: int) -> StoredTokens:
    """Ten tokens with A = 1 of which `share` have this ratio, the others 1."""
    ratios = [[ratio] * share + [1.0] * (10 - share)]
    return StoredTokens.of(
        {
            "logp": logs(ratios),
            "old_logp": torch.zeros(1, 10, dtype=WIDE),
            "advantages": torch.ones(1, dtype=WIDE),
            "mask": torch.ones(1, 10, dtype=torch.bool),
        }
    )


def test_the_smallest_change_that_cures_is_found() -> None:
    """Three of ten tokens lie at 1.24, beyond 1 + 0.2. A bound of 0.22 (a tenth more) holds them
    still, 0.25 (a quarter more) does not.
    """
    tokens = tokens_with_ratio(1.24, 3)
    (remedy,) = lab.what_if(tokens, ["ppo"], spec=PPO).remedies
    assert remedy.problem.name == "lost"
    assert "30%" in remedy.problem.sentence
    assert remedy.change == "trust.eps_high 0.2 → 0.25"
    assert remedy.spec == PPO.with_fields(eps_high=0.25)
    assert FACTORS[:2] == (1.1, 1.25)
    still = outcome_of("yours", PPO.with_fields(eps_high=0.22), tokens)
    assert [p.name for p in problems(still, Limits())] == ["lost"]
    assert problems(outcome_of("yours", remedy.spec, tokens), Limits()) == ()


def test_a_mismatch_is_cured_by_a_correction() -> None:
    """k3 of a difference of ±0.5 is 0.149 and 0.107."""
    tokens = random_tokens()
    signs = torch.where(torch.arange(7) % 2 == 0, 0.5, -0.5)
    tokens |= {"logp": tokens["old_logp"], "rollout_logp": tokens["old_logp"] - signs}
    (remedy,) = lab.what_if(tokens, ["ppo"], spec="ppo").remedies
    assert remedy.problem.name == "mismatch"
    assert remedy.spec is not None
    assert remedy.spec.correction == PRESETS["tis"].spec.correction
    assert "as the preset tis has it" in remedy.sentence


def test_few_heavy_tokens_are_a_problem() -> None:
    """One token with a ratio of 40 and nine of 1: 49² / (10·1609) = 0.149."""
    (remedy,) = lab.what_if(tokens_with_ratio(40.0, 1), ["ppo"], spec=SAMPLING).remedies
    assert remedy.problem.name == "effective"
    assert "0.15" in remedy.problem.sentence
    assert remedy.spec is not None
    assert problems(outcome_of("x", remedy.spec, tokens_with_ratio(40.0, 1)), Limits()) == ()


def test_an_incurable_problem_is_named() -> None:
    """A spec with a function in it cannot be changed by numbers."""
    custom = PPO.replace(aggregate=lambda t: t.mask.double() / 10)
    (remedy,) = lab.what_if(tokens_with_ratio(9.0, 5), ["ppo"], spec=custom).remedies
    assert remedy.spec is None
    assert remedy.sentence.startswith("No change")


def test_a_healthy_loss_has_no_remedy() -> None:
    assert lab.what_if(tokens_with_ratio(1.1, 5), ["ppo"], spec="ppo").remedies == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": torch.zeros(2, 2, dtype=torch.bool)}, "mask is False everywhere"),
        ({"logp": torch.full((2, 2), math.nan)}, "logp is not finite at 4 of 4"),
        ({"advantages": None}, "the tokens need advantages"),
        ({"advantages": torch.ones(3)}, "advantages has shape"),
        ({"logpp": torch.ones(2, 2)}, "unknown tensors logpp"),
        ({"rewards": torch.ones(3)}, r"rewards has shape \(3,\); give one per sequence, \(2,\)"),
        ({"ids": torch.ones(2, 3, dtype=torch.long)}, "give one id per token"),
    ],
)
def test_bad_tokens_are_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        lab.what_if(four_tokens(**changes))


def test_bad_options_are_refused_in_words() -> None:
    with pytest.raises(InputError, match="unknown through 'weights'"):
        lab.what_if(four_tokens(), through="weights")
    with pytest.raises(InputError, match="losses must be a list"):
        lab.what_if(four_tokens(), "ppo")
    with pytest.raises(InputError, match=r"no loss could be tried.*grpo: it reads ref_logp"):
        lab.what_if(four_tokens(), ["grpo"])


def test_the_table_and_the_data_hold_the_same_numbers() -> None:
    result = lab.what_if(random_tokens(), ["gspo", "cispo"], spec="dapo")
    data = result.to_dict()
    text, markup = str(result), result._repr_html_()
    for row in data["losses"]:
        for shown in (f"{row['effective']:.2f}", f"{row['cosine']:.3f}"):
            assert shown in text
            assert shown in markup
    assert [row["name"] for row in data["losses"]] == ["yours", "gspo", "cispo"]
    assert data["losses"][0]["cosine"] == pytest.approx(1)


def test_other_limits_are_other_verdicts() -> None:
    tokens = tokens_with_ratio(1.24, 3)
    assert lab.what_if(tokens, ["ppo"], spec=PPO, limits=Limits(lost=0.4)).remedies == ()
