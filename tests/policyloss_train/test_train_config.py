"""Options of a run: the parsed command line, and the errors of invalid options."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import get_type_hints

import pytest
from walk import walked

import policyloss as pl
from policyloss.catalogue import PRESETS, presets_equal_to
from policyloss.commands import Within
from policyloss_train.arguments import read_arguments, read_spec
from policyloss_train.config import TrainConfig
from policyloss_train.models import TINY


def test_a_preset_with_changes() -> None:
    config, spec, _ = read_arguments(
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
        (["--loss.kl.coef", "1"], ["no part 'kl'", "trust"]),
        (["--loss.trust.eps-high"], ["needs a value"]),
        (["--loss", "tis", "--old-logp", "rollout"], ["tis", "--old-logp recompute"]),
        (["--group-size", "1"], ["--group-size 1", "'grpo'", "gae"]),
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
        ({"group_size": 1, "advantage": "grpo"}, ["--group-size 1", "gae"]),
        ({"model": "path/to/model"}, ["path/to/model", "--max-new-tokens"]),
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


def test_every_way_to_name_a_loss_gives_the_same_advantages(tmp_path: Path) -> None:
    """By name in any spelling, by value from a file or from code, and with a number changed. Two
    presets have the numbers of another one: a file does not show which of the two it is, and counts
    as the first of them.
    """
    wrong: list[str] = []
    for name, preset in PRESETS.items():
        by_value = presets_equal_to(preset.spec)[0].advantage or "grpo"
        file, code = tmp_path / f"{name}.json", tmp_path / f"{name}.py"
        file.write_text(json.dumps(preset.spec.to_dict()))
        code.write_text(f"import policyloss as pl\nspec = pl.preset({name!r})\n")
        spellings = (name, name.upper(), name.replace("_", "-"), f" {name} ", f"{code}:spec")
        ways = dict.fromkeys(spellings, preset.advantage or "grpo")
        ways[str(file)] = by_value
        for way, advantage in ways.items():
            for changes in ([], [("entropy_coef", "0.01")]):
                spec = read_spec(way, changes).for_run(16)
                config = TrainConfig(loss=way, teacher=tmp_path).with_loss(spec)
                if (config.advantage, config.with_critic) != (advantage, advantage == "gae"):
                    wrong.append(f"{way} {changes}: {config.advantage}, not {advantage}")
    assert not wrong, "\n".join(wrong)


def test_who_gets_a_critic() -> None:
    assert TrainConfig(loss="dapo", advantage="gae").with_loss(pl.preset("dapo")).with_critic
    # A custom loss that equals no preset works with any advantages.
    config = TrainConfig(loss="mine.py:f").with_loss(pl.LossSpec(trust=lambda tokens: tokens.ratio))
    assert config.advantage == "grpo"


def test_the_first_line_names_loss_advantages_critic_and_rate() -> None:
    for words, line in {
        "": "loss dapo; advantages grpo; no critic; learning rate 0.0005",
        "--loss PPO": "loss PPO (the preset ppo); advantages gae; a critic (learning rate 0.001); "
        "learning rate 0.0005",
        "--loss dr_grpo --loss.trust.eps-high 0.3 --lr 1e-4": "loss dr_grpo (the preset dr_grpo, "
        "changed); advantages dr_grpo; no critic; learning rate 0.0001",
        "--loss tis --advantage rloo": "loss tis; advantages rloo; no critic; learning rate 0.0005",
        "--loss dr_grpo --advantage grpo --model m --max-new-tokens 9": "loss dr_grpo; advantages "
        f"grpo (the loss is defined with dr_grpo: {PRESETS['dr_grpo'].sources['advantage']}); "
        "no critic; learning rate 1e-06",
    }.items():
        config, spec, _ = read_arguments(words.split())
        assert config.headline(spec) == line


def test_learning_rates_follow_the_model() -> None:
    """A rate that is named stays, on every way to a run's options."""
    for options, rates in (
        ({}, (5e-4, 1e-3)),
        ({"model": "tiny32", "lora_rank": 4}, (5e-4, 1e-3)),
        ({"model": "m", "max_new_tokens": 9}, (1e-6, 1e-5)),
        ({"model": "m", "max_new_tokens": 9, "lora_rank": 4}, (1e-5, 1e-5)),
        ({"model": "m", "max_new_tokens": 9, "lr": 3e-5, "critic_lr": 2e-5}, (3e-5, 2e-5)),
    ):
        config = TrainConfig(**options)  # type: ignore[arg-type]
        words = [f"--{name.replace('_', '-')}={x}" for name, x in options.items()]
        stored = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        for one in (config, read_arguments(words).config, stored):
            assert (one.lr, one.critic_lr) == rates, options


def test_options_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    """All options in TOML equal the options on the command line, which beats the file."""
    file = tmp_path / "run.toml"
    file.write_text(
        'loss = "dapo"\n"loss.trust.eps-high" = 0.3\n"loss.entropy_coef" = 0.01\nlr = 1\n'
        'group-size = 4\nstop = ["\\n", "--"]\nbetas = [0.8, 0.95]\nout = "runs/mine"\n'
        "sampling_mask = false\nsuccess = -1.5\n"
    )
    config, spec, named = read_arguments(["--config", str(file), "--lr", "0.25", "--seed=3"])
    assert spec == pl.preset("dapo", eps_high=0.3, entropy_coef=0.01)
    assert config.to_dict() == {
        **TrainConfig().to_dict(),
        "config": str(file),
        "lr": 0.25,
        "seed": 3,
        "group_size": 4,
        "stop": ("\n", "--"),
        "betas": (0.8, 0.95),
        "out": "runs/mine",
        "sampling_mask": False,
        "success": -1.5,
        "advantage": "grpo",
    }
    assert {"out", "lr", "seed", "group_size", "loss"} <= named
    words = ["--config", str(file), "--loss.trust.eps-high", "0.4"]
    assert read_arguments(words).spec.trust == pl.Clip(0.2, 0.4)
    missing = tmp_path / "none.toml"
    for text, message in {
        "lr = ": "cannot read --config",
        "lrr = 1": "unknown option 'lrr'; did you mean 'lr'?",
        'lr = "fast"': "the option 'lr' is 'fast'; it must be a finite number",
        "resume = true": "unknown option 'resume'",
        "[loss]\ntrust = 1": "the option 'loss' is {'trust': 1}; it must be a string",
        '"loss.trust.eps" = 1': "eps",
        "x = " + "[" * 9999: "cannot read --config",
        "lr = -1": "--lr must be at least 0",
    }.items():
        file.write_text(text)
        with pytest.raises(pl.PolicyLossError) as caught:
            read_arguments(["--config", str(file)])
        assert message in str(caught.value), text
    with pytest.raises(pl.InputError, match=r"cannot read --config .*none\.toml"):
        read_arguments(["--config", str(missing)])


def limits() -> list[tuple[str, float]]:
    """Every option with limits, and a number just outside of each."""
    return [
        (name, outside)
        for name, hint in get_type_hints(TrainConfig, include_extras=True).items()
        for limit in getattr(hint, "__metadata__", ())
        for outside in (limit.least - 1, limit.above, limit.most + 1, limit.below)
        if math.isfinite(outside)
    ]


@walked(("name", "outside"), limits())
def test_a_number_outside_of_its_limits_is_refused(name: str, outside: float) -> None:
    value = (0.5, outside) if name == "betas" else outside
    with pytest.raises(
        pl.InputError, match=f"^--{name.replace('_', '-')} must be (at|above|below)"
    ):
        TrainConfig(**{name: value})  # type: ignore[arg-type]


def test_limits_are_in_the_errors() -> None:
    assert str(Within(least=0, below=2**32)) == "at least 0 and below 4294967296"
    assert [x in Within(above=0, most=1) for x in (0, 1e-9, 1, 1.1)] == [False, True, True, False]
    assert len(limits()) > 40


def test_the_commands_of_the_documents_start_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one that is written out, with the files that it names."""
    docs = Path(__file__).parents[2] / "docs"
    texts = {name: (docs / name).read_text() for name in ("train.md", "rollout.md", "scale.md")}
    commands = {
        (name, match[1].replace("\\\n", " "))
        for name, text in texts.items()
        for match in re.finditer(r"policyloss train((?: |\\\n)[^#`\n\\]*(?:\\\n[^#`\n\\]*)*)", text)
        if "-" in match[1] and "…" not in match[1]
    }
    assert len(commands) >= 20
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(texts["train.md"].split("```toml\n")[1].split("```")[0])
    Path("my_loss.json").write_text(json.dumps(pl.LossSpec().to_dict()))
    Path("my_losses.py").write_text(
        "def half_clip(tokens): ...\ndef mine(rewards, group_ids): ...\n"
    )
    wrong = []
    for name, command in sorted(commands):
        words = shlex.split(command)
        if {"--resume", "--like", "--teacher"} & set(words):
            continue  # these need a run
        try:
            config = read_arguments(words).config
        except (pl.PolicyLossError, SystemExit) as error:
            wrong.append(f"{name}: policyloss train{command}: {error}")
            continue
        if config.model not in TINY and config.lr > 1e-5:
            wrong.append(f"{name}: {command}: learning rate {config.lr}")
    assert not wrong, "\n".join(wrong)
