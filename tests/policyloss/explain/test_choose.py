"""`choose`: every combination of answers gives a loss that can be built, with reasons; the printed
code builds that loss; the terminal prints the same.
"""

from __future__ import annotations

import json

import pytest
import torch
from walk import walked

import policyloss as pl
from policyloss.choose import QUESTIONS, RULES, all_choices, choose
from policyloss.cli import main

CHOICES = all_choices()


def test_every_combination_gives_a_loss_and_its_code() -> None:
    assert len(CHOICES) == 4 * 2 * 3 * 2 * 2 * 2
    for choice in CHOICES:
        assert eval(choice.code, {"pl": pl}) == choice.spec, choice.code
        assert choice.reasons
        assert all(text.endswith(".") and source for text, source in choice.reasons)


def test_every_rule_and_every_answer_matters() -> None:
    """A rule that never fits, or a question whose answer changes nothing, would be a dead one."""
    texts = {reason.text for choice in CHOICES for reason in choice.reasons}
    assert {rule.why for rule in RULES} == texts
    for question in QUESTIONS:
        for answer in question.answers:
            others = [other for other in question.answers if other != answer]
            assert any(
                choose(**{**choice.answers, question.name: other}).reasons != choice.reasons
                for choice in CHOICES
                if choice.answers[question.name] == answer
                for other in others
            ), f"{question.name}={answer}"


@walked(
    "choice", {choice.code: choice for choice in CHOICES}.values(), ids=lambda choice: choice.code
)
def test_a_chosen_loss_has_a_gradient(choice) -> None:  # type: ignore[no-untyped-def]
    logp = torch.tensor([[-1.0, -0.5], [-2.0, -0.3]], requires_grad=True)
    near = {name: logp.detach() - 1e-5 for name in choice.spec.reads if name != "divergence"}
    if "divergence" in choice.spec.reads:
        near["divergence"] = logp.exp()
    out = pl.policy_loss(
        choice.spec,
        logp,
        near.pop("old_logp", None),
        torch.tensor([1.0, -1.0]),
        torch.ones(2, 2, dtype=torch.bool),
        **near,
    )
    out.loss.backward()
    assert logp.grad is not None
    assert bool((logp.grad != 0).all())


@walked(
    ("answers", "code"),
    [
        ({}, 'pl.preset("dapo").replace(correction=pl.Truncate(high=2))'),
        ({"engine": "same"}, 'pl.preset("dapo")'),
        ({"updates": "one", "engine": "same"}, 'pl.preset("gpg")'),
        ({"model": "moe"}, 'pl.preset("gspo").replace(correction=pl.Band(low=0.5, high=5))'),
        (
            {"model": "moe", "updates": "stale"},
            "pl.preset(\"cispo\").replace(ratio=pl.TokenRatio(anchor='rollout'))",
        ),
        (
            {"updates": "stale", "engine": "same"},
            "pl.preset(\"dapo\").replace(correction=pl.OPSM(delta=0.01, source='rollout'))",
        ),
        ({"critic": "yes", "engine": "same"}, 'pl.preset("ppo_dual_clip")'),
        ({"signal": "teacher_tokens"}, 'pl.preset("opd_kl")'),
        ({"signal": "teacher_distribution", "critic": "yes"}, 'pl.preset("opd_exact")'),
        ({"signal": "reward_and_teacher", "engine": "same"}, 'pl.preset("kdrl")'),
    ],
)
def test_the_choices(answers: dict[str, str], code: str) -> None:
    assert choose(**answers).code == code


def test_a_loss_against_the_engine_has_no_correction_and_others_have_one() -> None:
    """A correction compares old_logp with rollout_logp, so it would count the mismatch twice."""
    for choice in CHOICES:
        against_engine = getattr(choice.spec.ratio, "anchor", None) == "rollout"
        assert not (against_engine and choice.spec.correction)
        answers = choice.answers
        stale = answers["updates"] == "stale" and answers["model"] == "dense"
        needs_one = "reward" in answers["signal"] and (stale or answers["engine"] == "separate")
        assert needs_one == (against_engine or bool(choice.spec.correction))


@walked("gap", [-0.001, 0.001])
def test_the_mismatch_of_an_engine_alone_silences_nobody(gap: float) -> None:
    """A thousandth of a nat between engine and trainer, which half precision makes, is not a reason
    to drop a token. It is a reason for the band of GSPO, [1 - 0.0003, 1 + 0.0004], if the ratio is
    to the
    engine: exp(0.001) is 1.001.
    """
    logp = torch.tensor([[-1.0, -0.5], [-2.0, -0.3]], requires_grad=True)
    now = logp.detach()
    for choice in CHOICES:
        if "rollout_logp" not in choice.spec.reads or "divergence" in choice.spec.reads:
            continue
        tensors = dict.fromkeys(set(choice.spec.reads) - {"old_logp"}, now)
        tensors["rollout_logp"] = now - gap
        mask = torch.ones(2, 2, dtype=torch.bool)
        out = pl.policy_loss(choice.spec, logp, now, torch.tensor([1.0, -1.0]), mask, **tensors)
        (slope,) = torch.autograd.grad(out.loss, logp)
        assert bool((slope != 0).all()), choice.code


def test_a_wrong_answer_is_an_error_that_names_the_right_ones() -> None:
    with pytest.raises(pl.InputError, match=r"model is 'sparse'; the answers are 'dense', 'moe'"):
        choose(model="sparse")
    with pytest.raises(pl.InputError, match=r"unknown question 'modle'; did you mean 'model'"):
        choose(modle="moe")


def test_the_command_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "--model", "moe", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert pl.LossSpec.from_dict(data["spec"]) == choose(model="moe").spec
    assert data["answers"]["model"] == "moe"
    assert main(["choose", "--updates", "stale"]) == 0
    assert capsys.readouterr().out == f"{choose(updates='stale')}\n"
    assert main(["choose", "--model", "sparse"]) == 2
    assert "invalid choice: 'sparse'" in capsys.readouterr().err
