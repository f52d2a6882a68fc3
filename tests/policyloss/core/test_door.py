"""A user's first calls: a preset by name, one number changed, a symmetric clip; and their types."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import assert_same, make_batch
from policyloss.catalogue import PRESETS, PresetName

BATCH = make_batch()
HIDDEN, WEIGHT = torch.randn(*BATCH.mask.shape, 5), torch.randn(11, 5)
IDS = torch.randint(0, 11, BATCH.mask.shape, generator=torch.Generator().manual_seed(0))
ARGUMENTS = {name: x for name, x in BATCH.kwargs.items() if name != "logp"}
OF_THE_HEAD = {name: x for name, x in ARGUMENTS.items() if name not in ("entropy", "divergence")}

# Every public function that takes a spec, as one number that depends on which spec it was.
TAKES_A_SPEC: dict[str, Callable[[Any], Any]] = {
    "policy_loss": lambda spec: pl.policy_loss(spec, **BATCH.kwargs).loss,
    "measure": lambda spec: pl.measure(spec, **BATCH.kwargs).tokens,
    "linear_policy_loss": lambda spec: (
        pl.linear_policy_loss(spec, HIDDEN, WEIGHT, IDS, **OF_THE_HEAD).loss
    ),
    "explain_plan": lambda spec: pl.explain_plan(
        spec, HIDDEN.requires_grad_(), WEIGHT, IDS, **OF_THE_HEAD
    ),
    "compiled_loss": lambda spec: pl.compiled_loss(spec).spec,
    "accumulate": lambda spec: pl.accumulate(spec, [ARGUMENTS]).spec,
    "check_loss": lambda spec: str(pl.check_loss(spec)),
    "check_loss base": lambda spec: str(
        pl.check_loss(lambda t: -t.advantages * t.ratio, base=spec)
    ),
    "explain": lambda spec: pl.explain(spec).spec,
    "diff": lambda spec: pl.diff(spec, "ppo").changes,
}


@walked("function", TAKES_A_SPEC)
def test_a_name_is_taken_wherever_a_spec_is(function: str) -> None:
    by_name, by_value = TAKES_A_SPEC[function]("dapo"), TAKES_A_SPEC[function](pl.preset("dapo"))
    if isinstance(by_name, torch.Tensor):
        assert_same(by_name, by_value, what=function)
    else:
        assert by_name == by_value
    with pytest.raises(pl.SpecError, match="unknown preset 'dappo'; did you mean 'dapo'"):
        TAKES_A_SPEC[function]("dappo")


@walked("typed", ["DAPO", "Dapo", " dapo "])
def test_letter_case_makes_no_difference(typed: str) -> None:
    assert pl.preset(typed) == pl.preset("dapo")


def test_a_hyphen_stands_for_an_underscore() -> None:
    assert pl.preset("Dr-GRPO") == pl.preset("dr_grpo")
    assert pl.advantage.estimator("Dr-GRPO") is pl.advantage.dr_grpo


@walked("typed", ["GRPP", "grp"])
def test_the_suggestion_sees_through_letter_case(typed: str) -> None:
    with pytest.raises(pl.SpecError, match="did you mean 'grpo'"):
        pl.preset(typed)


def test_one_number_is_changed_by_its_name() -> None:
    assert pl.preset("dapo", eps_high=0.3) == pl.preset("dapo").replace(trust=pl.Clip(0.2, 0.3))
    assert pl.preset("tis", high=5.0).correction == (
        dataclasses.replace(pl.preset("tis").correction[0], high=5.0),
    )
    assert pl.preset("grpo", coef=0.001, entropy_coef=0.01) == pl.preset("grpo").replace(
        kl=pl.KL("k3", 0.001), entropy_coef=0.01
    )


def test_a_changed_number_is_checked() -> None:
    with pytest.raises(pl.SpecError, match=r"Clip\.eps_high"):
        pl.preset("dapo", eps_high=-1)


def test_an_ambiguous_number_is_refused_with_its_places() -> None:
    with pytest.raises(
        pl.SpecError,
        match=(
            r"log_clamp is ambiguous: this loss has ratio\.log_clamp and correction\.0\.log_clamp"
        ),
    ):
        pl.preset("tis", log_clamp=10.0)


def test_an_unknown_number_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        pl.SpecError, match="unknown number of this loss 'eps_hi'; did you mean 'eps_high'"
    ):
        pl.preset("dapo", eps_hi=0.3)


@walked("name", PRESETS)
def test_every_number_can_be_set_to_itself(name: str) -> None:
    """Each field of each part, by its name alone: the same loss,
    or an error because two parts have it.
    """
    spec = pl.preset(name)
    parts = [spec.ratio, spec.trust, *spec.correction, spec.kl, spec.aggregate]
    fields = [
        (f.name, getattr(p, f.name)) for p in parts if p is not None for f in dataclasses.fields(p)
    ]
    names = [field for field, _ in fields]
    for field, value in fields:
        if dataclasses.is_dataclass(value):
            continue
        if names.count(field) == 1:
            assert pl.preset(name, **{field: value}) == spec
        else:
            with pytest.raises(pl.SpecError, match=f"{field} is ambiguous"):
                pl.preset(name, **{field: value})


def test_a_clip_of_one_number_is_symmetric() -> None:
    assert pl.Clip(0.2) == pl.Clip(0.2, 0.2)
    assert pl.Clip(0.1, dual=3.0) == pl.Clip(0.1, 0.1, 3.0)
    assert pl.Clip(math.inf).eps_high == math.inf
    assert pl.LossSpec(trust=pl.Clip(0.3)).to_dict()["trust"] == {
        "type": "Clip",
        "eps_low": 0.3,
        "eps_high": 0.3,
        "dual": None,
    }
    assert pl.Clip(0.2, None) == pl.Clip(0.2)  # type: ignore[arg-type]  # as TRL's epsilon_high=None


def test_the_literal_type_lists_the_presets() -> None:
    names = [name for line in get_args(PresetName) for name in get_args(line)]
    assert names == list(PRESETS)
