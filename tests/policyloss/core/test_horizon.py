"""The horizon, the user's constant that divides token sums: required, taken over from settings,
never assumed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from formula_evaluator import Evaluator
from trl_configs import grpo_config
from walk import walked

import policyloss as pl
from cases import make_batch, run, unweighted
from policyloss.compat.trl.trainer import checked_loss
from policyloss.explanations.formula import formula
from policyloss.parts import aggregate

UNSET = (pl.SeqMeanTokenSumNorm(), pl.TokenSumNorm())


def test_a_preset_has_no_length_of_a_run() -> None:
    """No preset may fix a number that only the user's run can give;
    every part that has one begins without it.
    """
    assert pl.preset("dr_grpo").needs_horizon
    for name in pl.presets():
        assert getattr(pl.preset(name).aggregate, "horizon", None) is None, name
    for part in aggregate.VARIANTS:
        if "horizon" in part.__dataclass_fields__:
            assert part().horizon is None
            assert pl.LossSpec(aggregate=part()).needs_horizon


@walked("part", UNSET, ids=lambda p: type(p).__name__)
def test_computing_without_a_horizon_names_the_remedy(part: Any) -> None:
    batch = make_batch()
    spec = pl.LossSpec(aggregate=part)
    calls = {
        "policy_loss": lambda: run(spec, batch),
        "value_loss": lambda: pl.value_loss(
            batch.logp, batch.old_logp, batch.old_logp, batch.mask, aggregate=part
        ),
        "aggregate_tokens": lambda: pl.loss.aggregate_tokens(batch.logp, batch.mask, part),
        "accumulate": lambda: pl.accumulate(spec, [batch.kwargs]),
        "compiled_loss": lambda: pl.compiled_loss(spec),
        "measure": lambda: pl.measure(spec, **batch.kwargs),
    }
    for call in calls.values():
        with pytest.raises(
            pl.InputError, match=rf"{type(part).__name__}.*spec\.with_horizon\(tokens\)"
        ):
            call()
    assert pl.check_loss(spec)  # a common factor, which no check depends on


def test_with_horizon_sets_it_and_for_run_only_a_missing_one() -> None:
    spec = pl.preset("dr_grpo")
    set_to_8 = spec.replace(aggregate=pl.SeqMeanTokenSumNorm(8))
    assert spec.with_horizon(8) == spec.for_run(8) == set_to_8
    assert not set_to_8.needs_horizon
    assert set_to_8.with_horizon(9) == spec.with_horizon(9)
    assert set_to_8.for_run(9) is set_to_8  # the user's own number stays
    for wrong in (0, -1, None, float("inf"), "8"):
        with pytest.raises(pl.SpecError, match="horizon"):
            spec.with_horizon(wrong)  # type: ignore[arg-type]


def test_a_loss_without_a_horizon_refuses_one() -> None:
    """Every preset, every aggregation and a function: a horizon is taken or refused, never lost."""
    specs = [pl.preset(name) for name in pl.presets()]
    specs += [pl.LossSpec(aggregate=part()) for part in aggregate.VARIANTS]
    specs.append(pl.LossSpec(aggregate=lambda t: t.mask.sum()))
    refused = 0
    for spec in specs:
        if spec.needs_horizon:
            assert spec.with_horizon(100).aggregate.horizon == 100
            continue
        with pytest.raises(pl.SpecError, match="no horizon to set to 100"):
            spec.with_horizon(100)
        assert spec.for_run(100) is spec
        refused += 1
    assert refused > len(pl.presets()) / 2


def test_the_number_is_divided_by() -> None:
    # Two sequences of 2 and 1 tokens, ratio 1, A = (1, 4): sums 2 and 4; their mean, 3, over the
    # horizon; minus for a loss.
    logp = torch.zeros(2, 2, dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    spec = pl.preset("dr_grpo").with_horizon(8)
    out = pl.policy_loss(spec, logp, logp, torch.tensor([1.0, 4.0], dtype=torch.float64), mask)
    assert out.loss.item() == -3 / 8


def test_as_data() -> None:
    spec = pl.preset("dr_grpo")
    data = json.loads(json.dumps(spec.to_dict()))
    assert data["aggregate"] == {"type": "SeqMeanTokenSumNorm", "horizon": None}
    assert pl.LossSpec.from_dict(data) == spec
    del data["aggregate"]["horizon"]
    assert pl.LossSpec.from_dict(data) == spec


def test_the_printed_formula_names_a_missing_horizon() -> None:
    printed = formula(pl.preset("dr_grpo"))
    assert printed.lines[-1].expression == "sum(surrogate) / (B * horizon)"
    assert "with_horizon" in printed.vocabulary["horizon"]
    batch = unweighted(make_batch())
    loss = Evaluator(printed, batch, horizon=7).names["loss"].item()
    assert loss == pytest.approx(
        run(pl.preset("dr_grpo").with_horizon(7), batch).loss.item(), rel=1e-12
    )


def test_the_explanation() -> None:
    unset, filled = (
        str(pl.explain("dr_grpo")),
        str(pl.explain(pl.preset("dr_grpo").with_horizon(512))),
    )
    assert "aggregate.horizon" in unset
    assert "not set" in unset
    for text in (unset, filled):
        assert text.startswith(
            'Dr. GRPO: GRPO without length and std normalisation\npreset "dr_grpo"'
        )
    assert "512" in filled
    assert "sum(surrogate) / (B * 512)" in filled


def test_the_difference() -> None:
    difference = pl.diff("dr_grpo", pl.preset("dr_grpo").with_horizon(16))
    assert "horizon: not set -> 16" in str(difference)
    assert difference.to_dict()["changes"][0]["fields"] == [
        {"field": "horizon", "a": None, "b": 16}
    ]


def test_trl_gives_its_longest_completion() -> None:
    args = grpo_config(max_completion_length=8)
    args.scale_rewards = "none"
    for asked in ("dr_grpo", pl.preset("dr_grpo")):
        spec = checked_loss(asked, args)
        assert spec == pl.preset("dr_grpo").with_horizon(8)
    chosen = pl.preset("dr_grpo").with_horizon(100)
    assert checked_loss(chosen, args) == chosen
    args.max_completion_length = None
    with pytest.raises(pl.SpecError, match=r"max_completion_length=None.*horizon"):
        checked_loss("dr_grpo", args)
