"""A teacher in the trainer: through the advantages, through the loss, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policyloss as pl
from policyloss_train.advantages import judge
from policyloss_train.batches import Pack
from policyloss_train.config import TrainConfig
from policyloss_train.drawing import Rule, draw
from policyloss_train.sampler import Sample

SMALL: dict[str, Any] = {
    "steps": 1,
    "prompts": 2,
    "group_size": 2,
    "max_new_tokens": 4,
    "warmup_steps": 0,
    "eval_every": 0,
    "eval_prompts": 4,
    "rollouts_every": 0,
    "device": "cpu",
}


def a_pack() -> Pack:
    """Two completions of one prompt, of two tokens each, with rewards 1 and 0."""
    samples = [
        Sample(0, 0, torch.tensor([1]), torch.tensor([2, 3]), torch.zeros(2), True, "", reward)
        for reward in (1.0, 0.0)
    ]
    pack = Pack.of(samples)
    return pack.with_tokens(
        teacher_logp=torch.tensor([-1.0, -2.0, -1.0, -1.0]),
        old_logp=torch.tensor([-1.5, -1.0, -1.0, -3.0]),
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # teacher − old = 0.5, −1, 0, 2; no reward
        ({"loss": "dapo"}, [0.5, -1.0, 0.0, 2.0]),
        ({"loss": "opd", "teacher_coef": 2.0}, [1.0, -2.0, 0.0, 4.0]),
        # Dr. GRPO of rewards 1 and 0 is ±0.5, here times 2
        ({"advantage": "dr_grpo", "reward_coef": 2.0}, [1.5, 0.0, -1.0, 1.0]),
        # IW-OPD: |gap| 0.5, 1 | 0, 2; weights 1 + 0.5·(1 − prefix share) = 1.5, 4/3 | 1.5, 1.5
        ({"loss": "iw_opd"}, [0.75, -4 / 3, 0.0, 3.0]),
    ],
)
def test_advantages_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    spec = pl.preset(options.get("loss", "dapo"))
    config = TrainConfig(teacher=Path("t"), **options).with_loss(spec)
    judged = judge(config, a_pack(), "local", by_teacher=True)
    torch.testing.assert_close(judged[0], torch.tensor(expected), rtol=0, atol=1e-6)


def test_rewards_count_if_enabled() -> None:
    assert TrainConfig().reward_share == 1
    assert TrainConfig(teacher=Path("t")).reward_share == 0
    assert TrainConfig(teacher=Path("t"), reward_coef=0.5).reward_share == 0.5
    config = TrainConfig(teacher=Path("t"), loss="gkd")
    judged = judge(config, a_pack(), "local")
    assert not judged[0].any()


@pytest.mark.parametrize("loss", ["gkd", "opd_kl", "opd", "iw_opd", "kdrl"])
def test_a_loss_that_reads_a_teacher_needs_one(loss: str) -> None:
    with pytest.raises(pl.InputError, match="--teacher DIR"):
        TrainConfig(loss=loss).with_loss(pl.preset(loss))
    TrainConfig(loss=loss, teacher=Path("t")).with_loss(pl.preset(loss))


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(pl.InputError, match="--dynamic-sampling"):
        TrainConfig(teacher=Path("t"), dynamic_sampling=True)
    with pytest.raises(pl.InputError, match="--reward-coef must be at least 0"):
        TrainConfig(teacher=Path("t"), reward_coef=-1.0)
    alone = TrainConfig(teacher=Path("t"), group_size=1)
    alone.with_loss(pl.preset("dapo"))  # no completions are compared
    with pytest.raises(pl.InputError, match="--group-size 1"):
        replace(alone, reward_coef=1.0).with_loss(pl.preset("dapo"))


def train(out: Path, **options: Any) -> dict[str, Any]:
    """The last line of the metrics of a run."""
    from policyloss_train.loop import train

    config = TrainConfig(out=out, **{**SMALL, **options})
    spec = pl.preset(config.loss).for_run(config.max_new_tokens)
    assert train(config, spec) == 0
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    numbers: dict[str, Any] = json.loads(lines[-1])
    return numbers


@pytest.mark.slow
def test_a_run_teaches_another(tmp_path: Path) -> None:
    """Through every way in: a divergence by either head, a KL, advantages."""
    teacher = tmp_path / "teacher"
    train(teacher, seed=7)
    fused = train(tmp_path / "fused", loss="gkd", teacher=teacher)
    logits = train(tmp_path / "logits", loss="gkd", teacher=teacher, head="logits")
    assert 0 < fused["policy/loss"] < 0.7  # a JSD is at most log 2
    assert logits["policy/loss"] == pytest.approx(fused["policy/loss"], rel=1e-4)
    assert logits["grad_norm"] == pytest.approx(fused["grad_norm"], rel=1e-3)
    for loss in ("opd", "kdrl"):
        assert train(tmp_path / loss, loss=loss, teacher=teacher)["grad_norm"] > 0


def test_a_teacher_that_cannot_teach(tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match="there is no folder"):
        train(tmp_path / "run", loss="gkd", teacher=tmp_path / "nothing")


def test_the_support_of_a_sampler_is_replayed() -> None:
    """With top-p, log-probabilities of the draw are over the kept tokens; the ratio is 1."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(50, 30, generator=g)
    rule = Rule(0.8, top_p=0.9)
    ids, over_all, kept = draw(logits, torch.rand(50, generator=g, dtype=torch.float64), rule)
    p = (logits / 0.8).softmax(-1)
    assert kept is not None
    assert kept.sum() < kept.numel() / 2
    pair = kept.nonzero()[:, 1], torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    logp = pl.logprobs(logits, ids, 0.8, support=pair).logp
    drawn = (p / (p * kept).sum(-1, keepdim=True)).gather(1, ids[:, None])[:, 0].log()
    torch.testing.assert_close(logp, drawn, rtol=0, atol=1e-5)
    # Over all entries, every ratio would be off by the logarithm of the kept mass.
    assert (logp - over_all).min() > 0.01
    again = pl.logprobs(logits, ids, 0.8, support=pair).logp
    assert torch.equal((again - logp).exp(), torch.ones(50))
