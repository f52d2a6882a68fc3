"""Homonyms: their meanings really differ, each has the numbers of the framework's drop-in, and the
page shows them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from docs.names.called import FRAMEWORKS
from docs.names.homonyms import HOMONYMS, SAME
from docs.names.meanings import Homonym, Meaning
from torch import Tensor
from walk import walked

import policyloss as pl
from docs import names_page
from policyloss.catalogue import PRESETS
from policyloss.compat import colossalai, openrlhf, verl
from policyloss.compat.trl import spec_from_config, totals_for
from policyloss.compat.trl.config import DEFAULTS

PAGE = (Path(__file__).resolve().parents[3] / "docs/names.md").read_text(encoding="utf-8")
MEANINGS = [(h, m) for h in HOMONYMS for m in h.meanings]


def numbers(meaning: Meaning) -> list[Tensor]:
    found = names_page.measured(meaning)
    return [] if found is None else [x for x in found if x is not None]


@walked("homonym", HOMONYMS, ids=lambda h: h.name)
def test_the_meanings_of_a_name_really_differ(homonym: Homonym) -> None:
    measured = {m.who: numbers(m) for m in homonym.meanings if numbers(m)}
    assert len(measured) > 1
    for (a, mine), (b, theirs) in itertools.combinations(measured.items(), 2):
        assert all(x.dtype == torch.float64 for x in (*mine, *theirs))
        same_kind = [x.shape for x in mine] == [x.shape for x in theirs]
        assert not same_kind or any(
            (x - y).abs().max() > 1e-4 for x, y in zip(mine, theirs, strict=True)
        ), f"{a} is {b}"


@walked("same", SAME, ids=lambda s: s.says)
def test_homonyms_listed_as_equal_are_equal(same: Any) -> None:
    (loss, gradient), (other_loss, other_gradient) = names_page.same_numbers(same)
    assert same.a != same.b
    assert gradient.abs().max() > 0.01
    torch.testing.assert_close(loss, other_loss, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-14, atol=1e-14)


def test_sapo_does_not_care_for_the_temperature_where_the_advantage_is_zero() -> None:
    batch = names_page.batch()
    batch["advantages"] = batch["advantages"].clone()
    batch["advantages"][:, 1] = 0.0
    loss, gradient = names_page.loss_and_gradient(pl.preset("sapo"), batch, "step")
    assert gradient[:, 1].abs().max() == 0
    assert gradient[0, 0] != 0
    batch["mask"][:, 1] = False
    other = names_page.loss_and_gradient(
        pl.preset("sapo").replace(aggregate=pl.TokenSum()), batch, "step"
    )[0]
    batch["mask"][:3, 1] = True
    assert (
        names_page.loss_and_gradient(
            pl.preset("sapo").replace(aggregate=pl.TokenSum()), batch, "step"
        )[0]
        == other
    )
    assert loss.isfinite()


@walked(("homonym", "meaning"), MEANINGS, ids=lambda x: x.name if isinstance(x, Homonym) else x.who)
def test_a_meaning_of_a_preset_is_that_preset(homonym: Homonym, meaning: Meaning) -> None:
    for name in re.findall(r"preset `(\w+)`", meaning.who):
        expected = names_page.measured(Meaning("", "", PRESETS[name].spec))
        assert expected is not None
        for ours, theirs in zip(numbers(meaning), [expected.loss, expected.gradient], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# The blocks of the page, run unchanged: their results are the numbers of the tables.


def sections() -> Iterator[tuple[str, str]]:
    page = PAGE.split("## One name, several meanings")[1]
    for name, text in re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", page, re.DOTALL | re.MULTILINE):
        if "```python" in text:
            yield name, text


def test_every_homonym_has_its_section() -> None:
    assert [name for name, _ in sections()] == [h.name for h in HOMONYMS]


@walked(("name", "text"), list(sections()), ids=[name for name, _ in sections()])
def test_the_code_on_the_page_gives_the_numbers_on_the_page(name: str, text: str) -> None:
    given: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)[0], given)
    block = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)[0]
    said: dict[str, str] = dict(
        re.findall(r"^# (.*?)\n(.*?)(?=^#|\Z)", block, re.DOTALL | re.MULTILINE)
    )
    for row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)[2:]:
        who, _, value, norm = (
            cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\) \|", row)
        )
        comment = next(
            (comment for comment in said if comment == who or comment.startswith(f"{who}; ")), None
        )
        assert (comment is None) == (value == "")
        if comment is None:
            continue
        exec(said.pop(comment), given)
        if "spec" in given:
            loss, gradient = by_hand(
                given.pop("spec"), given["batch"], comment.removeprefix(who).removeprefix("; ")
            )
            assert f"{loss.item():.6g}" == value
            assert f"{gradient.norm().item():.6g}" == norm
        else:
            shown = torch.as_tensor(given.pop("value"), dtype=torch.float64).reshape(-1).tolist()
            assert shown == pytest.approx([float(x) for x in value.split(",")], rel=1e-5, abs=1e-12)
    assert not said, "code without a row"


def by_hand(spec: pl.LossSpec, batch: dict[str, Tensor], comment: str) -> tuple[Tensor, Tensor]:
    """Loss and gradient, counted as in the comment above the spec."""
    batch = {**batch, "logp": batch["logp"].clone().requires_grad_()}
    if comment.startswith("totals="):
        loss = pl.policy_loss(spec, **batch, totals=eval(comment.removeprefix("totals="))).loss
    elif comment.startswith("each half"):
        halves = [
            {name: x[rows] for name, x in batch.items()} for rows in (slice(2), slice(2, None))
        ]
        loss = (pl.policy_loss(spec, **halves[0]).loss + pl.policy_loss(spec, **halves[1]).loss) / 2
    else:
        assert comment == ""
        loss = pl.policy_loss(spec, **batch).loss
    return loss, torch.autograd.grad(loss, batch["logp"])[0]


# The meaning ascribed to a framework has the numbers of its drop-in on the same batch.

Given = dict[str, Tensor]


def verl_config(**changes: Any) -> SimpleNamespace:
    options = SimpleNamespace(dro_beta=0.1)
    fields = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "global_batch_info": {},
    }
    return SimpleNamespace(**{**fields, "policy_loss": options, **changes})


NO_DUAL = {"clip_ratio_c": 1e9}


def of_verl(
    name: str, mode: str = "token-mean", release: str | None = None, **config: Any
) -> Callable[[Given], Tensor]:
    def loss(g: Given, weights: Tensor | None = None) -> Tensor:
        function = verl.POLICY_LOSSES[name]
        arguments = (
            g["old_logp"],
            g["logp"],
            g["advantages"],
            g["mask"],
            mode,
            verl_config(**config),
            weights,
        )
        return function(*arguments, release=release)[0]

    return loss


def corrected_by_verl(rollout_is: str, threshold: float | str) -> Callable[[Given], Tensor]:
    def loss(g: Given) -> Tensor:
        log_ratio = g["old_logp"] - g["rollout_logp"]
        weights, _ = verl.compute_rollout_correction_weights(
            log_ratio, g["mask"], rollout_is, threshold
        )
        return of_verl("vanilla", **NO_DUAL)(g, weights)  # type: ignore[call-arg]

    return loss


def rejected_by_verl(g: Given) -> Tensor:
    mask, _ = verl.compute_rollout_rejection_mask(
        g["old_logp"] - g["rollout_logp"], g["mask"], "token_k1", "0.6_1.4"
    )
    return of_verl("vanilla", **NO_DUAL)({**g, "mask": mask})


def pulled_by_verl(g: Given) -> Tensor:
    penalty = verl.agg_loss(
        verl.kl_penalty(g["logp"], g["ref_logp"], "low_var_kl"), g["mask"], "token-mean"
    )
    return of_verl("vanilla", **NO_DUAL)(g) + 0.1 * penalty


def pulled_by_openrlhf(g: Given) -> Tensor:
    penalty = openrlhf.compute_approx_kl(g["logp"], g["ref_logp"], kl_estimator="k3")
    return of_openrlhf()(g) + 0.1 * openrlhf.aggregate_loss(penalty.double(), g["mask"])


def of_openrlhf(**options: Any) -> Callable[[Given], Tensor]:
    def loss(g: Given) -> Tensor:
        return openrlhf.PolicyLoss(**options)(
            g["logp"], g["old_logp"], g["advantages"], g["mask"], g["rollout_logp"]
        )[0]

    return loss


def of_trl(**options: Any) -> Callable[[Given], Tensor]:
    config = SimpleNamespace(
        **{**DEFAULTS, "gradient_accumulation_steps": 1, "steps_per_generation": 1, **options}
    )

    def loss(g: Given) -> Tensor:
        spec, totals = spec_from_config(config), totals_for(config, g["mask"])
        tensors = {
            name: g[name]
            for name in ("logp", "old_logp", "advantages", "mask", "rollout_logp", "ref_logp")
        }
        return pl.policy_loss(spec, **tensors, totals=totals).loss

    return loss


def trl_micro(g: Given) -> Tensor:
    """bnpo over two micro-batches, whose losses TRL adds up."""
    config = SimpleNamespace(
        **{
            **DEFAULTS,
            "loss_type": "bnpo",
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 2,
        }
    )
    losses = []
    for half in names_page.halves(g):
        tensors = {name: half[name] for name in ("logp", "old_logp", "advantages", "mask")}
        losses.append(
            pl.policy_loss(
                spec_from_config(config), **tensors, totals=totals_for(config, half["mask"])
            ).loss
        )
    return losses[0] + losses[1]


def of_coati(**options: Any) -> Callable[[Given], Tensor]:
    def loss(g: Given) -> Tensor:
        d = g["ref_logp"] - g["logp"]
        made = colossalai.PolicyLoss(**options)
        tokens = torch.tensor(9.0)
        return made(
            g["logp"],
            g["old_logp"],
            g["advantages"],
            d.exp() - d - 1,
            g["mask"],
            total_effective_tokens_in_batch=tokens,
        )[0]

    return loss


def vllm(mode: str, **bounds: Any) -> Callable[[Given], Tensor]:
    return of_trl(use_vllm=True, vllm_importance_sampling_mode=mode, **bounds)


SEQUENCES = "seq-mean-token-mean"
SEQUENCE = {"importance_sampling_level": "sequence"}
ICEPOP = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0}
CHECKS: dict[tuple[str, str], dict[str, Callable[[Given], Tensor]]] = {
    ("cispo", "verl, NeMo-RL"): {"verl": of_verl("cispo")},
    ("cispo", "TRL, Liger, Unsloth, Axolotl, ms-swift"): {"TRL": of_trl(loss_type="cispo")},
    ("gspo", "OpenRLHF, NeMo-RL, slime"): {"OpenRLHF": of_openrlhf(policy_loss_type="gspo")},
    ("gspo", 'TRL, importance_sampling_level="sequence"'): {"TRL": of_trl(**SEQUENCE)},
    ("gspo", "verl up to 0.9.0, SkyRL"): {"verl": of_verl("gspo", release="0.9.0")},
    ("gspo", "verl from 0.9.1"): {"verl": of_verl("gspo")},
    ("grpo", "TRL"): {"TRL": of_trl(loss_type="grpo")},
    ("grpo", "verl"): {"verl": of_verl("vanilla")},
    ("grpo", "ColossalChat"): {"ColossalChat": of_coati()},
    ("dapo", "preset `dapo`, ColossalChat, open-instruct"): {
        "ColossalChat": of_coati(clip_eps_high=0.28, beta=0, loss_variation="token_level")
    },
    ("dapo", "TRL"): {"TRL": of_trl()},
    ("token mean, bnpo", "verl, OpenRLHF, preset `bnpo`, TRL's `dapo`"): {
        "verl": of_verl("vanilla", **NO_DUAL),
        "OpenRLHF": of_openrlhf(),
        "TRL": of_trl(),
    },
    ("token mean, bnpo", "TRL's `bnpo`, SkyRL's `token_mean_legacy`, torchtune"): {
        "TRL": trl_micro
    },
    ("seq-mean-token-mean", "verl, OpenRLHF"): {
        "verl": of_verl("vanilla", SEQUENCES, **NO_DUAL),
        "OpenRLHF": of_openrlhf(token_level_loss=False),
    },
    ("seq-mean-token-mean", "TRL, ColossalChat, SkyRL"): {
        "TRL": of_trl(loss_type="grpo"),
        "ColossalChat": of_coati(beta=0),
    },
    ("seq-mean-token-sum-norm", "verl"): {
        "verl": of_verl("vanilla", "seq-mean-token-sum-norm", **NO_DUAL)
    },
    ("seq-mean-token-sum-norm", "TRL's `dr_grpo`, SkyRL"): {
        "TRL": of_trl(loss_type="dr_grpo", max_completion_length=4)
    },
    ("dual clip", "verl"): {"verl": of_verl("vanilla")},
    ("dual clip", "OpenRLHF, NeMo-RL, AReaL, slime"): {"OpenRLHF": of_openrlhf()},
    ("luspo", 'TRL, importance_sampling_level="sequence"'): {
        "TRL": of_trl(loss_type="luspo", importance_sampling_level="sequence")
    },
    ("luspo", "TRL's default level"): {"TRL": of_trl(loss_type="luspo")},
    ("gmpo, geo_mean", "verl"): {"verl": of_verl("geo_mean")},
    ("dppo", "verl"): {"verl": of_verl("dppo_tv")},
    ("dro", "verl (beta 0.1), ROLL's kimi15"): {"verl": of_verl("dro")},
    ("k3, low_var_kl", "verl, OpenRLHF, SkyRL"): {
        "verl": pulled_by_verl,
        "OpenRLHF": pulled_by_openrlhf,
    },
    ("k3, low_var_kl", "ColossalChat, slime's `k3`"): {
        "ColossalChat": of_coati(beta=0.1, loss_variation="token_level")
    },
    ("k3, low_var_kl", "TRL"): {"TRL": of_trl(beta=0.1)},
    ("tis", "verl, SkyRL"): {"verl": corrected_by_verl("token", 2.0)},
    ("tis", "OpenRLHF"): {
        "OpenRLHF": of_openrlhf(is_correction_level="token", is_correction_mode="clip")
    },
    ("tis", "TRL's `token_truncate`"): {"TRL": vllm("token_truncate")},
    ("sequence-level importance sampling", 'verl\'s rollout_is="sequence", SkyRL'): {
        "verl": corrected_by_verl("sequence", 2.0)
    },
    ("sequence-level importance sampling", "TRL's `sequence_truncate`"): {
        "TRL": vllm("sequence_truncate")
    },
    ("sequence_mask, seq-mask-tis", "TRL's `sequence_mask`"): {"TRL": vllm("sequence_mask")},
    ("sequence_mask, seq-mask-tis", "OpenRLHF, NeMo-RL"): {
        "OpenRLHF": of_openrlhf(is_correction_level="seq")
    },
    ("icepop", "verl, OpenRLHF, TRL's `token_mask`, NeMo-RL"): {
        "verl": corrected_by_verl("token", "0.5_5.0"),
        "OpenRLHF": of_openrlhf(is_correction_level="token"),
        "TRL": vllm("token_mask", **ICEPOP),
    },
    ("k1 rejection", "verl"): {"verl": rejected_by_verl},
    ("off-policy sequence masking", "slime, TRL without vLLM"): {
        "TRL": of_trl(off_policy_mask_threshold=1e-4)
    },
    ("off-policy sequence masking", "TRL with vLLM, ms-swift, cosmos-rl"): {
        "TRL": of_trl(
            off_policy_mask_threshold=1e-4, use_vllm=True, vllm_importance_sampling_correction=False
        )
    },
}
# Meanings of these frameworks for which there is no drop-in:
# parts of TRL that are not its GRPOTrainer.
WITHOUT = {
    ("gmpo, geo_mean", "TRL"),
    ("ppo_kl", "TRL"),
    ("rloo", "TRL"),
    ("grpo, as an advantage", "TRL"),
}
WITHOUT |= {("grpo, as an advantage", "ColossalChat")}


@walked(("key", "framework"), [(key, who) for key, checks in CHECKS.items() for who in checks])
def test_a_meaning_matches_the_drop_in(key: tuple[str, str], framework: str) -> None:
    meaning = next(m for h, m in MEANINGS if (h.name, m.who) == key)
    given = names_page.batch()
    given["logp"].requires_grad_()
    loss = CHECKS[key][framework](given)
    (gradient,) = torch.autograd.grad(loss, given["logp"])
    ours = numbers(meaning)
    # OpenRLHF's KL is float32.
    tolerance = 1e-6 if (key[0], framework) == ("k3, low_var_kl", "OpenRLHF") else 1e-12
    torch.testing.assert_close(ours[0], loss.detach().double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], gradient, rtol=tolerance, atol=tolerance)


def verl_outcome(function: Callable[..., Any], g: Given, rows: int) -> Tensor:
    """verl's outcome advantages of the page's rewards, one per sample."""
    token_rewards = g["rewards"][:rows, None] * torch.tensor([1.0, 0.0])
    return function(token_rewards, torch.ones(rows, 2), g["prompt"][:rows].tolist())[0][:, 0]


def verl_metric(name: str, metric: str, g: Given) -> float:
    config = verl_config(policy_loss=SimpleNamespace(kl_cov_ratio=0.2, ppo_kl_coef=1.0))
    return verl.POLICY_LOSSES[name](
        g["old_logp"], g["logp"], g["advantages"], g["mask"], "token-mean", config
    )[1][metric]


def openrlhf_metric(place: int, g: Given) -> Tensor:
    return openrlhf.PolicyLoss()(g["logp"], g["old_logp"], g["advantages"], g["mask"])[place]


def trl_clip_fraction(g: Given) -> float:
    tensors = {name: g[name] for name in ("logp", "old_logp", "advantages", "mask")}
    return pl.policy_loss(
        spec_from_config(SimpleNamespace(**DEFAULTS)), **tensors
    ).metrics.compute()["clip_fraction"]


def passk(*arguments: Any) -> Any:
    return verl.compute_grpo_passk_outcome_advantage(
        *arguments, config=SimpleNamespace(norm_adv_by_std_in_grpo=True)
    )


VALUES: dict[tuple[str, str], dict[str, Callable[[Given], Any]]] = {
    ("clip fraction", "verl, OpenRLHF, TRL, SkyRL, AReaL"): {
        "verl": lambda g: verl_metric("vanilla", "actor/pg_clipfrac", g),
        "OpenRLHF": lambda g: openrlhf_metric(1, g),
        "TRL": trl_clip_fraction,
    },
    ("clip fraction", "verl's and SkyRL's `cispo`, agilerl"): {
        "verl": lambda g: verl_metric("cispo", "actor/pg_clipfrac", g)
    },
    ("ppo_kl", "verl (clamped at ±20), OpenRLHF (not clamped), slime"): {
        "verl": lambda g: verl_metric("vanilla", "actor/ppo_kl", g),
        "OpenRLHF": lambda g: openrlhf_metric(2, g),
    },
    ("ppo_kl", "verl's `kl_cov`"): {"verl": lambda g: verl_metric("kl_cov", "actor/ppo_kl", g)},
    ("rloo", "verl's `rloo`"): {
        "verl": lambda g: verl_outcome(verl.compute_rloo_outcome_advantage, g, 5)
    },
    ("rloo", "verl's `rloo_vectorized`, SkyRL"): {
        "verl": lambda g: verl_outcome(verl.compute_rloo_vectorized_outcome_advantage, g, 5)
    },
    ("grpo, as an advantage", "verl"): {
        "verl": lambda g: verl_outcome(verl.compute_grpo_outcome_advantage, g, 5)
    },
    # verl refuses a group of one here.
    ("pass@k", "verl's and EasyR1's `grpo_passk`"): {
        "verl": lambda g: torch.cat(
            [verl_outcome(passk, g, 4), torch.zeros(1, dtype=torch.float64)]
        )
    },
}


@walked(("key", "framework"), [(key, who) for key, checks in VALUES.items() for who in checks])
def test_a_value_matches_the_drop_in(key: tuple[str, str], framework: str) -> None:
    meaning = next(m for h, m in MEANINGS if (h.name, m.who) == key)
    given: dict[str, Any] = names_page.batch()
    given |= {
        "rewards": torch.tensor([1.0, 0.6, 0.0, 0.2, 0.5], dtype=torch.float64),
        "prompt": torch.tensor([0, 0, 0, 0, 1]),
    }
    value = torch.as_tensor(VALUES[key][framework](given), dtype=torch.float64)
    # Shares and verl's metrics are float32.
    torch.testing.assert_close(numbers(meaning)[0], value, rtol=1e-6, atol=1e-6)


def test_every_meaning_ascribed_to_a_framework_with_a_drop_in_is_checked() -> None:
    for homonym, meaning in MEANINGS:
        if meaning.spec is None and not meaning.expression:
            continue
        checks = {
            **CHECKS.get((homonym.name, meaning.who), {}),
            **VALUES.get((homonym.name, meaning.who), {}),
        }
        for framework in FRAMEWORKS:
            if re.search(rf"\b{framework}\b", meaning.who):
                assert framework in checks or (homonym.name, framework) in WITHOUT, (
                    f"{homonym.name}: {meaning.who}"
                )
