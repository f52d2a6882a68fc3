"""A loss and an advantage of the user's own: the same numbers as the library's, recorded, and never
run because a run directory names them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from train_loop_ranks import lines, resume, train

import policyloss as pl
from policyloss.cli import main
from policyloss.errors import InputError
from policyloss_train.advantages import judge
from policyloss_train.arguments import read_arguments, read_spec
from policyloss_train.batches import Pack
from policyloss_train.config import TrainConfig
from policyloss_train.user_code import load_code

CODE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
import policyloss as pl

@dataclass(frozen=True)
class Settings:
    eps: float = 0.2

ppo = pl.LossSpec()

def dapo():
    return pl.preset("dapo")

def clipped(t: pl.Tokens):
    eps = Settings().eps
    free = -t.advantages * t.ratio
    return torch.maximum(free, -t.advantages * t.ratio.clamp(1 - eps, 1 + eps))

def two(a, b):
    return a

def centred(rewards, group_ids):
    return torch.stack([r - rewards[group_ids == g].mean() for r, g in zip(rewards, group_ids)])

def per_token(rewards, group_ids, *, mask, cu_seqlens, lengths, group):
    assert group == "local" and len(lengths) == len(rewards)
    return (rewards / lengths).repeat_interleave(cu_seqlens.diff()) * mask

def fails(rewards, group_ids):
    raise KeyError("who")

def short(rewards, group_ids):
    return rewards[:-1]

number = 3
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("code") / "mine.py"
    file.write_text(CODE)
    return file


def test_a_loss_of_ones_own_is_a_spec_or_a_function(code: Path) -> None:
    assert read_spec(f"{code}:ppo") == pl.LossSpec()
    assert read_spec(f"{code}:dapo", [("trust.eps_high", "0.3")]) == pl.preset("dapo").replace(
        trust=pl.Clip(0.2, 0.3)
    )
    spec = read_spec(f"{code}:clipped")
    assert spec == pl.LossSpec(trust=load_code(f"{code}:clipped", "the loss"))
    assert not spec.is_data
    config, same, _ = read_arguments(["--loss", f"{code}:clipped"])
    assert (config.loss, same) == (f"{code}:clipped", spec)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "is 3; give a LossSpec, a function without arguments that returns one, or"),
        ("two", "give a LossSpec"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_invalid_losses_are_refused(name: str, says: str, code: Path) -> None:
    with pytest.raises(InputError, match=says):
        read_spec(f"{code}:{name}")


def test_code_that_is_not_there(tmp_path: Path, code: Path) -> None:
    with pytest.raises(InputError, match=r"the loss .*there is no file .*nowhere\.py"):
        read_spec(f"{tmp_path}/nowhere.py:f")
    with pytest.raises(InputError, match="is not of the form module:function or path/to/file"):
        read_spec("my-module:f")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(InputError, match=r"broken\.py' raised ZeroDivisionError"):
        read_spec(f"{tmp_path}/broken.py:f")
    with pytest.raises(InputError, match=r"is code: change that, not --loss\.trust\.eps"):
        read_spec(f"{code}:clipped", [("trust.eps_high", "0.3")])


def pack() -> Pack:
    """Three sequences of two places each, in two groups; the last place of the third is masked."""
    mask = torch.tensor([True, True, True, True, True, False])
    return Pack(
        {"mask": mask, "ids": torch.zeros(6, dtype=torch.int64)},
        {"rewards": torch.tensor([1.0, 0.0, 3.0]), "group_ids": torch.tensor([0, 0, 1])},
        [2, 2, 2],
    )


def judged(reference: str) -> list[float]:
    config = TrainConfig(advantage=reference)
    return judge(config, pack(), "local")[0].tolist()


def test_an_advantage_of_ones_own(code: Path) -> None:
    """Group 0 has the rewards 1 and 0 around ½; group 1 has one. By token: 1/2, 0/2, 3/1."""
    assert judged(f"{code}:centred") == [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]
    assert judged(f"{code}:per_token") == [0.5, 0.5, 0.0, 0.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "raised KeyError: 'who'"),
        ("short", r"returned \[2\]; give a tensor with one number for each sequence, \[3\]"),
        ("number", "raised TypeError: 3 is not a callable object"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_an_advantage_that_does_not_work(name: str, says: str, code: Path) -> None:
    with pytest.raises(InputError, match=says):
        judged(f"{code}:{name}")


def same_numbers(run: Path, other: Path) -> None:
    """But for the clip fractions, which a plain function does not report."""
    for row, wanted in zip(lines(run), lines(other), strict=True):
        names = [name for name in wanted if not name.startswith("policy/clip")]
        assert {name: row[name] for name in names} == {name: wanted[name] for name in names}


def test_a_run_with_both(
    model: str, code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`clipped` is PPO's clip and `centred` is dr_grpo, so the run equals one with the
    library's.
    """
    mine: dict[str, Any] = {"loss": f"{code}:clipped", "advantage": f"{code}:centred"}
    spec = tmp_path / "ppo.json"
    spec.write_text(json.dumps(pl.LossSpec().to_dict()))
    out, library = tmp_path / "own", tmp_path / "library"
    assert train(out, model=model, **mine, steps=2) == 0
    assert train(library, model=model, loss=str(spec), advantage="dr_grpo", steps=2) == 0
    same_numbers(out, library)
    stored = json.loads((out / "config.json").read_text())
    assert stored["loss"] == {"code": mine["loss"]}
    assert stored["config"]["advantage"] == mine["advantage"]

    capsys.readouterr()
    assert resume(out, extend=3) == 2
    assert f"names the loss '{code}:clipped', which is code" in capsys.readouterr().err
    assert resume(out, extend=3, loss=mine["loss"]) == 2
    assert f"names the advantage '{code}:centred', which is code" in capsys.readouterr().err
    assert resume(out, extend=3, loss=f"{code}:ppo", advantage=mine["advantage"]) == 2
    printed = capsys.readouterr().err
    assert f"--loss is {code}:ppo, and the run has {code}:clipped" in printed
    assert resume(out, extend=3, **mine) == 0
    assert resume(library, extend=3) == 0
    same_numbers(out, library)

    (tmp_path / "mine.py").write_text("raise RuntimeError('nobody named this')")
    assert main(["eval", str(out), "--prompts", "4", "--reward", "train_loop_ranks:graded"]) == 0
    assert main(["sample", str(out), "--number", "1"]) == 0
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    assert "which a report does not run" in (tmp_path / "page.html").read_text()


def test_a_spec_of_ones_own_is_stored_as_numbers(model: str, code: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(out, model=model, loss=f"{code}:dapo", steps=1) == 0
    stored = json.loads((out / "config.json").read_text())
    assert stored["loss"] == pl.preset("dapo").to_dict()
    assert resume(out, extend=2, loss=f"{code}:dapo") == 0


def test_a_loss_named_again_has_the_horizon_of_the_run(model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(out, model=model, loss="dr_grpo", steps=1) == 0
    assert resume(out, extend=2, loss="dr_grpo") == 0
