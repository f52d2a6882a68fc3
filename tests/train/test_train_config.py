"""Options of a run: what the command line gives, what is refused and how it says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_type_hints

import pytest

import policyloss as pl
from policyloss.commands import Within
from policyloss.train.config import TrainConfig, check_together, read_arguments
from policyloss.train.loss_options import read_spec


def test_a_preset_with_changes() -> None:
    config, spec = read_arguments(
        [
            "--loss",
            "dapo",
            "--loss.trust.eps-high",
            "0.3",
            "--loss.entropy-coef=0.01",
            "--steps",
            "7",
        ]
    )
    assert (config.loss, config.steps) == ("dapo", 7)
    assert spec == pl.preset("dapo").replace(trust=pl.Clip(0.2, 0.3), entropy_coef=0.01)


def test_a_spec_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    path.write_text(json.dumps(pl.preset("gspo").to_dict()))
    assert read_arguments(["--loss", str(path)])[1] == pl.preset("gspo")
    assert read_spec(str(path), [("trust.eps_low", "0.001")]).trust.eps_low == 0.001  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--loss", "gsop"], ["gsop", "gspo"]),
        (["--loss.trust.epshigh", "1"], ["epshigh", "eps_high"]),
        (["--loss.foo.x", "1"], ["foo", "trust"]),
        (["--loss.kl.coef", "1"], ["kl", "nothing"]),
        (["--loss.trust.eps-high"], ["needs a value"]),
        (["--loss", "tis", "--old-logp", "rollout"], ["tis", "--old-logp recompute"]),
    ],
)
def test_a_loss_that_makes_no_sense(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(pl.PolicyLossError) as caught:
        read_arguments(arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_size": 1}, ["--group-size 1", "gae"]),
        ({"steps": 0}, ["--steps", "at least 1", "0"]),
        ({"lr": -1.0}, ["--lr", "-1.0"]),
        ({"lr": float("nan")}, ["--lr", "nan"]),
        ({"temperature": 0.0}, ["--temperature"]),
        ({"top_p": 0.0}, ["--top-p"]),
        ({"gamma": 1.5}, ["--gamma", "1.5"]),
        ({"advantage": "grop"}, ["grop", "grpo"]),
        ({"minibatches": 200, "prompts": 4}, ["--minibatches 200", "32"]),
        ({"dynamic_sampling": True, "advantage": "gae"}, ["--dynamic-sampling", "gae"]),
        ({"task": "data.jsonl"}, ["data.jsonl", "--reward"]),
        (
            {"advantage": "passk_combinatorial", "passk": 4, "group_size": 4},
            ["--passk 4", "--group-size 4"],
        ),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(pl.InputError) as caught:
        TrainConfig(**options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_unknown_options_end_the_command() -> None:
    with pytest.raises(pl.InputError, match=r"--lrr 1\. See policyloss train --help\."):
        read_arguments(["--lrr", "1"])


def test_to_and_from_json() -> None:
    config = TrainConfig(out=Path("somewhere"), betas=(0.8, 0.95), loss="gspo", staleness=2)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(pl.InputError, match=r"stepss.*steps"):
        TrainConfig.from_dict({**config.to_dict(), "stepss": 1})


def test_who_gets_a_critic() -> None:
    assert TrainConfig(loss="ppo").with_critic
    assert not TrainConfig(loss="dapo").with_critic
    assert TrainConfig(loss="dapo", advantage="gae").with_critic
    check_together(TrainConfig(loss="tis"), pl.preset("tis"))


def limits() -> list[tuple[str, float]]:
    """Every option with limits, and a number just outside of each."""
    return [
        (name, outside)
        for name, hint in get_type_hints(TrainConfig, include_extras=True).items()
        for limit in getattr(hint, "__metadata__", ())
        for outside in (limit.least - 1, limit.above, limit.most + 1, limit.below)
        if math.isfinite(outside)
    ]


@pytest.mark.parametrize(("name", "outside"), limits())
def test_a_number_outside_of_its_limits_is_refused(name: str, outside: float) -> None:
    value = (0.5, outside) if name == "betas" else outside
    with pytest.raises(
        pl.InputError, match=f"^--{name.replace('_', '-')} must be (at|above|below)"
    ):
        TrainConfig(**{name: value})  # type: ignore[arg-type]


def test_what_limits_say() -> None:
    assert str(Within(least=0, below=2**32)) == "at least 0 and below 4294967296"
    assert [x in Within(above=0, most=1) for x in (0, 1e-9, 1, 1.1)] == [False, True, True, False]
    assert len(limits()) > 40
