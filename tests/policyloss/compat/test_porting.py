"""`policyloss port`: options of one framework as those of another, by hand, by the losses that they
compute, and for every preset.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from docs.names.called import Option
from docs.names.options import OPTIONS

import policyloss as pl
from cases import make_batch
from policyloss import cli
from policyloss.catalogue import PRESETS
from policyloss.compat import verl
from policyloss.compat.options import FRAMEWORKS, nest_options
from policyloss.porting import Reading, _as_data, port_loss, read_options
from policyloss.spec import SLOTS

ACTOR = "actor_rollout_ref.actor."
QUICK = ("dapo", "gspo_token", "luspo", "icepop", "kdrl", "up_grpo")


def ported(preset: str, to: str) -> tuple[dict[str, Any], list[str]]:
    """The options, and the losses of meaning without guards."""
    port = port_loss(Reading(pl.preset(preset), PRESETS[preset].advantage), to)
    return port.options, [text for text in port.lost if "a guard" not in text]


def translated(source: str, to: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    port = port_loss(read_options(source, options), to)
    return port.options, [text for text in port.lost if "a guard" not in text]


def test_a_grpo_config_of_trl_in_verl_by_hand() -> None:
    """TRL's delta above 1 + epsilon_high is verl's dual clip. Its KL has a factor that verl lacks,
    and its average counts empty rows.
    """
    options, lost = translated(
        "trl",
        "verl",
        loss_type="grpo",
        epsilon_high=0.28,
        delta=3.5,
        beta=0.04,
        scale_rewards="none",
        use_vllm=True,
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_min=0.5,
        vllm_importance_sampling_clip_max=5.0,
    )
    assert options == {
        f"{ACTOR}loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}clip_ratio_high": 0.28,
        f"{ACTOR}clip_ratio_c": 3.5,
        f"{ACTOR}use_kl_loss": True,
        f"{ACTOR}kl_loss_coef": 0.04,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0",
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
    }
    assert lost == [
        "kl, weight: ratio becomes None in verl",
        "TRL counts an empty completion as a row of the average",
    ]


def test_verl_in_openrlhf_by_hand() -> None:
    options, lost = translated(
        "verl",
        "openrlhf",
        **{
            f"{ACTOR}clip_ratio_high": 0.28,
            f"{ACTOR}clip_ratio_c": 10.0,
            f"{ACTOR}entropy_coeff": 0.001,
            f"{ACTOR}use_kl_loss": True,
            f"{ACTOR}kl_loss_type": "mse",
            "algorithm.adv_estimator": "reinforce_plus_plus_baseline",
        },
    )
    assert options == {
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.dual_clip": 10.0,
        "actor.entropy_coef": 0.001,
        "algo.kl.use_loss": True,
        "algo.kl.init_coef": 0.001,
        "algo.kl.estimator": "k2",
        "algo.advantage.estimator": "reinforce_baseline",
    }
    assert lost == []


def test_openrlhf_in_trl_by_hand() -> None:
    """OpenRLHF's KL in the reward, on by default, is no part of a loss."""
    gspo = {"actor.policy_loss_type": "gspo", "actor.eps_clip": 3e-4}
    options, lost = translated(
        "openrlhf", "trl", **gspo, **{"algo.advantage.estimator": "group_norm"}
    )
    assert options == {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
    }
    assert lost == [
        "OpenRLHF subtracts 0.01 times the KL from the rewards",
        "TRL counts an empty completion as a row of the average",
    ]


@pytest.mark.parametrize(
    ("preset", "to", "options", "lost"),
    [
        ("dapo", "trl", {"epsilon_high": 0.28}, []),
        ("cispo", "trl", {"loss_type": "cispo", "epsilon_high": 5.0}, []),
        ("ppo_dual_clip", "verl", {}, []),
        # No dual clip: the ratio never reaches 1e9.
        ("bnpo", "verl", {f"{ACTOR}clip_ratio_c": 1e9}, []),
        ("two_sided", "openrlhf", {"actor.dual_clip": 4.0, "algo.kl.init_coef": 0}, []),
        # A pull to a teacher is not a pull to the reference model.
        (
            "opd_kl",
            "openrlhf",
            {"algo.kl.init_coef": 0},
            ["trust: openrlhf has no", "kl: openrlhf has no KL(estimator='k1', coef=1"],
        ),
        (
            "opsm",
            "verl",
            {f"{ACTOR}loss_agg_mode": "seq-mean-token-mean", f"{ACTOR}clip_ratio_c": 1e9},
            ["correction: verl has no OPSM(delta=0.0001) (tokens with negative advantage"],
        ),
    ],
)
def test_presets_by_hand(preset: str, to: str, options: Any, lost: list[str]) -> None:
    found, sentences = ported(preset, to)
    assert found == options
    assert len(sentences) == len(lost)
    assert all(text.startswith(begin) for text, begin in zip(sentences, lost, strict=True))


def test_a_narrow_delta_is_no_dual_clip() -> None:
    """TRL's delta below 1 + epsilon_high also limits positive advantages."""
    options, lost = translated("trl", "verl", epsilon=0.2, epsilon_high=0.5, delta=1.25)
    assert "clip_ratio_c" not in str(options)
    assert lost[0].startswith("trust: verl has no TwoSidedClip(delta=1.25, eps_high=0.5)")


def test_each_of_several_pulls_is_kept_or_named() -> None:
    two = pl.LossSpec(kl=(pl.KL("k3", 0.1), pl.KL("k2", 0.2, anchor="teacher")))
    options, lost = port_loss(Reading(two), "verl")
    assert options[f"{ACTOR}kl_loss_coef"] == 0.1
    assert f"{ACTOR}kl_loss_type" not in options  # low_var_kl is k3
    (kl,) = (text for text in lost if text.startswith("kl"))
    assert "verl has no KL(estimator='k3', coef=0.1) + KL(estimator='k2', coef=0.2" in kl


def check_round_trip(preset: str, to: str) -> None:
    """The ported options describe the same loss, or a sentence names each slot that differs."""
    spec = pl.preset(preset)
    port = port_loss(Reading(spec, PRESETS[preset].advantage), to)
    got = read_options(to, port.options).spec
    horizon = getattr(got.aggregate, "horizon", None)
    spec = spec if horizon is None else spec.for_run(horizon)
    wanted, found = _as_data(spec), _as_data(got)
    unread = set() if spec.reads_ratio or got.reads_ratio else {"ratio"}
    different = {slot for slot in SLOTS if wanted[slot] != found[slot]} - unread
    assert {slot for slot in SLOTS for text in port.lost if text.startswith(slot)} == different


@pytest.mark.parametrize("to", FRAMEWORKS)
@pytest.mark.parametrize("preset", QUICK)
def test_a_port_reads_back_or_names_each_loss(preset: str, to: str) -> None:
    check_round_trip(preset, to)


@pytest.mark.slow
@pytest.mark.parametrize("to", FRAMEWORKS)
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - set(QUICK)))
def test_every_port_reads_back_or_names_each_loss(preset: str, to: str) -> None:
    check_round_trip(preset, to)


@pytest.mark.parametrize(
    "preset", ["dapo", "ppo_dual_clip", "cispo", "sapo", "gspo_token", "dppo_tv", "dro", "gpg"]
)
def test_verl_computes_the_ported_loss(preset: str) -> None:
    """verl's own function with the ported options gives the preset's loss and gradient."""
    options, lost = ported(preset, "verl")
    assert lost == []
    actor = nest_options({**FRAMEWORKS["verl"].defaults, **options})["actor_rollout_ref"]["actor"]
    b = make_batch()
    logp = b.logp.requires_grad_()
    tensors = (b.old_logp, logp, b.advantages, b.mask)
    theirs, _ = verl.POLICY_LOSSES[actor["policy_loss"]["loss_mode"]](
        *tensors, actor["loss_agg_mode"], SimpleNamespace(**actor)
    )
    ours = pl.policy_loss(preset, logp, b.old_logp, b.advantages, b.mask).loss
    torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, logp)[0] for loss in (theirs, ours)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("average", "correction"),
    [
        ("token-mean", {"rollout_is": "token"}),
        ("seq-mean-token-mean", {"rollout_is": "sequence", "rollout_is_threshold": "0.5_1.5"}),
        ("token-mean", {"rollout_is": "token", "rollout_is_batch_normalize": True}),
        ("token-mean", {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "1.2,0.1"}),
        (
            "seq-mean-token-sum-norm",
            {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
        ),
    ],
)
def test_a_spec_of_verl_is_the_sum_of_its_terms(average: str, correction: Any) -> None:
    """Weights, rejection, policy loss, KL and entropy as verl computes them one after the other."""
    options = {
        f"{ACTOR}loss_agg_mode": average,
        f"{ACTOR}loss_scale_factor": 8,
        f"{ACTOR}use_kl_loss": True,
        f"{ACTOR}kl_loss_coef": 0.1,
        f"{ACTOR}entropy_coeff": 0.01,
        **{f"algorithm.rollout_correction.{name}": x for name, x in correction.items()},
    }
    spec = read_options("verl", options).spec
    actor = nest_options({**FRAMEWORKS["verl"].defaults, **options})["actor_rollout_ref"]["actor"]
    b = make_batch()
    logp, entropy = b.logp.requires_grad_(), b.entropy.requires_grad_()
    weights, mask, _ = verl.compute_rollout_correction_and_rejection_mask(
        b.old_logp, b.rollout_logp, b.mask, **correction
    )
    assert (mask.sum() < b.mask.sum()) == ("rollout_rs" in correction)
    theirs, _ = verl.compute_policy_loss_vanilla(
        *(b.old_logp, logp, b.advantages, mask, average),
        SimpleNamespace(**actor, global_batch_info={"loss_scale_factor": 8}),
        None if weights is None else weights.batch["rollout_is_weights"],
    )
    kl = verl.kl_penalty(logp, b.ref_logp, "low_var_kl")
    theirs = theirs + 0.1 * verl.agg_loss(kl, mask, average, loss_scale_factor=8)
    theirs = theirs - 0.01 * verl.agg_loss(entropy, mask, average, loss_scale_factor=8)
    tensors = (logp, b.old_logp, b.advantages, b.mask)
    others = {"rollout_logp": b.rollout_logp, "ref_logp": b.ref_logp, "entropy": entropy}
    ours = pl.policy_loss(spec, *tensors, **others).loss
    torch.testing.assert_close(theirs, ours, rtol=1e-7, atol=0)
    gradients = [torch.autograd.grad(loss, logp)[0] for loss in (theirs, ours)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


def test_the_tables_have_the_options_and_defaults_of_the_names_page() -> None:
    """`make conformance` compares that page with the frameworks themselves."""
    shown = {
        who: {
            said.name.removeprefix("--"): said.default
            for rows in OPTIONS.values()
            for row in rows
            for said in row.cell(called)
            if isinstance(said, Option)
        }
        for who, called in {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}.items()
    }
    for name, framework in FRAMEWORKS.items():
        for option, default in framework.defaults.items():
            known = option.removeprefix("actor_rollout_ref.")
            assert shown[name][known] == default, option
    assert get_args(cli._Framework) == tuple(FRAMEWORKS)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"loss_type": "cispo", "epsilon_high": 5.0, "learning_rate": 1e-6}))
    assert cli.main(["port", str(path), "--from", "trl", "--to", "verl"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{ACTOR}policy_loss.loss_mode=cispo",
        f"{ACTOR}clip_ratio_low=1.0",
        f"{ACTOR}clip_ratio_high=4.0",
        "algorithm.adv_estimator=grpo",
    ]
    assert err.splitlines() == [
        "lost: ratio, log_clamp: None becomes 20 in verl "
        "(a guard: it acts on extreme log-ratios alone).",
        "not of the loss, left out: learning_rate.",
    ]
    tree = nest_options({f"{ACTOR}clip_ratio_high": 0.28, f"{ACTOR}use_kl_loss": True})
    path.write_text(json.dumps(tree))
    assert cli.main(["port", str(path), "--from", "verl", "--to", "openrlhf"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "--actor.eps_clip_low_high 0.2 0.28",
        "--actor.dual_clip 3.0",
        "--algo.kl.use_loss",
        "--algo.kl.init_coef 0.001",
        "--algo.kl.estimator k3",
    ]
    assert cli.main(["port", "dapo", "--to", "trl", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["options"] == {"epsilon_high": 0.28}
    assert data["not_of_the_loss"] == []


@pytest.mark.parametrize(
    ("options", "source", "words"),
    [
        ({f"{ACTOR}clip_ratio_hihg": 0.3}, "verl", "did you mean 'clip_ratio_high'?"),
        ({"loss_type": "dappo"}, "trl", "'dapo'"),
        ({f"{ACTOR}loss_agg_mode": "mean"}, "verl", "'mean'"),
        ({"algorithm.rollout_correction.bypass_mode": True}, "verl", "bypass_mode=true"),
        ([1], "verl", "one JSON object"),
    ],
)
def test_bad_options_are_one_line(
    options: Any, source: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(options))
    assert cli.main(["port", str(path), "--from", source, "--to", "trl"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_the_target_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["port", "dapo"]) == 2
    assert "--to is missing; name the framework: trl, verl, openrlhf" in capsys.readouterr().err
