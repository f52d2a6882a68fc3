"""The trainer follows the advantages and the horizon of a preset."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.evidence_plan import PLANS
from walk import walked

import policyloss as pl
from policyloss.catalogue import PRESETS
from policyloss_train.arguments import read_arguments, read_spec
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks


@walked("name", pl.presets())
def test_the_trainer_takes_the_advantages_of_the_preset(name: str) -> None:
    spec = pl.preset(name).for_run(16)
    config = TrainConfig(loss=name, teacher=Path("t")).with_loss(spec)
    assert config.advantage == (PRESETS[name].advantage or "grpo")
    assert config.with_critic == (PRESETS[name].advantage == "gae")
    assert "is defined with" not in config.headline(spec)


def test_the_evidence_names_its_advantages() -> None:
    """So the figures of the page do not move with the defaults."""
    for name, plan in PLANS.items():
        assert plan.options["advantage"] == (PRESETS[name].advantage or plan.options["advantage"])


def test_a_run_with_other_advantages_prints_a_line_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from policyloss_train import loop

    said: list[str] = []
    monkeypatch.setattr(loop.Display, "say", lambda self, text: said.append(text))
    setup = (SimpleNamespace(held_out=(), success=1.0), None, None, None)
    monkeypatch.setattr(loop, "build", lambda *args, **kwargs: setup)  # nothing is loaded here
    monkeypatch.setattr(loop, "end_ids", lambda *args: [])
    for name in ("Collector", "make_rollout"):
        monkeypatch.setattr(loop, name, lambda *args, **kwargs: None)
    spec = pl.preset("dr_grpo").with_horizon(16)
    for advantage, lines in (("grpo", 1), (None, 0)):
        said.clear()
        config = TrainConfig(loss="dr_grpo", advantage=advantage, out=tmp_path).with_loss(spec)
        loop.Training(config, spec, Ranks(0, 1, torch.device("cpu")), None, False)
        assert said[0] == config.headline(spec)
        assert len([text for text in said if "is defined with" in text]) == lines


def test_the_horizon_is_the_longest_completion() -> None:
    config, spec, _ = read_arguments(["--loss", "dr_grpo", "--max-new-tokens", "24"])
    assert spec.aggregate.horizon == config.max_new_tokens == 24
    assert (
        read_arguments(["--loss", "dr_grpo", "--loss.aggregate.horizon", "100"])[
            1
        ].aggregate.horizon
        == 100
    )
    with pytest.raises(pl.InputError, match=r"with_horizon\(24\)"):
        config.with_loss(read_spec("dr_grpo"))
