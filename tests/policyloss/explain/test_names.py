"""The names page: every default is the drop-in's own, no argument is left out,
and all of it is on the page.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docs.names.called import FRAMEWORKS, REQUIRED, Argument, Option, Row
from docs.names.options import OPTIONS
from walk import walked

import policyloss as pl
from policyloss.compat.trl.config import DEFAULTS
from policyloss.errors import unknown_name
from policyloss.explanations.framework_names import ELSEWHERE

PAGE = (Path(__file__).resolve().parents[3] / "docs/names.md").read_text(encoding="utf-8")
ROWS: list[Row] = [row for rows in OPTIONS.values() for row in rows]
MODULES = {"verl": "verl", "OpenRLHF": "openrlhf", "ColossalChat": "colossalai", "TRL": "trl"}

# Options ------------------------------------------------------------------------------------------


def said(kind: type, framework: str | None = None) -> Iterator[tuple[str, Any]]:
    """Every Option or Argument in the tables, with its framework."""
    for row in ROWS:
        for who in ("policyloss", *FRAMEWORKS) if framework is None else (framework,):
            yield from ((who, one) for one in row.cell(who) if isinstance(one, kind))


def the_callable(who: str, dotted: str) -> Any:
    found: Any = (
        pl if who == "policyloss" else importlib.import_module(f"policyloss.compat.{MODULES[who]}")
    )
    for name in dotted.split("."):
        found = getattr(found, name)
    return found


def label(x: Any) -> str:
    return f"{x.function}.{x.parameter}" if isinstance(x, Argument) else str(x)


@walked(("who", "argument"), list(said(Argument)), ids=label)
def test_a_stated_default_is_the_drop_ins_own(who: str, argument: Argument) -> None:
    parameter = inspect.signature(the_callable(who, argument.function)).parameters[
        argument.parameter
    ]
    expected = REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default
    assert argument.default == expected
    assert type(argument.default) is type(expected)


def test_defaults_by_heart() -> None:
    """A few well-known defaults, so that the tables and the drop-ins cannot be wrong together."""
    stated = {(who, f"{a.function}.{a.parameter}"): a.default for who, a in said(Argument)}
    stated |= {(who, option.name): option.default for who, option in said(Option)}
    assert stated["OpenRLHF", "PolicyLoss.clip_eps_low"] == 0.2
    assert stated["verl", "compute_policy_loss.clip_ratio_c"] == 3.0
    assert stated["ColossalChat", "PolicyLoss.beta"] == 0.01
    assert stated["TRL", "loss_type"] == "dapo"
    assert stated["TRL", "beta"] == 0.0
    assert stated["verl", "actor.loss_agg_mode"] == "token-mean"
    assert stated["policyloss", "TokenRatio.log_clamp"] == 20.0


def test_all_options_of_trl_are_listed_with_the_defaults_of_the_drop_in() -> None:
    stated = {option.name: option.default for _, option in said(Option, "TRL")}
    assert {name: stated[name] for name in DEFAULTS if name in stated} == DEFAULTS
    # An option of the advantages, which the drop-in leaves to TRL.
    assert set(stated) - set(DEFAULTS) == {"scale_rewards"}


@walked(
    ("who", "function"),
    [
        ("verl", "compute_policy_loss"),
        ("verl", "agg_loss"),
        ("verl", "compute_rollout_correction_weights"),
        ("verl", "compute_rollout_rejection_mask"),
        ("OpenRLHF", "PolicyLoss"),
        ("OpenRLHF", "PolicyLoss.forward"),
        ("ColossalChat", "PolicyLoss"),
        ("ColossalChat", "PolicyLoss.forward"),
    ],
)
def test_no_argument_of_a_drop_in_is_left_out(who: str, function: str) -> None:
    """Every parameter with a default is in the tables, except parameters that only the drop-in
    has.
    """
    ours_alone = {"release", "log_clamp", "returns"}
    parameters = inspect.signature(the_callable(who, function)).parameters.values()
    wanted = {p.name for p in parameters if p.default is not p.empty} - ours_alone
    # A remark names arguments that only earlier releases have.
    remarks = " ".join(remark for _, remark in said(str, who))
    stated = {a.parameter for _, a in said(Argument, who) if a.function == function}
    assert {name for name in wanted - stated if f"{name}=" not in remarks} == set()


def shown(one: Option | Argument | str) -> str:
    if isinstance(one, Option):
        return f"{one.name}={one.default!r}"
    return one.parameter if isinstance(one, Argument) else one


def test_the_tables_are_on_the_page() -> None:
    for row in ROWS:
        line = next(line for line in PAGE.split("\n") if line.startswith(f"| {row.what} | "))
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        assert len(cells) == 2 + len(FRAMEWORKS)
        for who, cell in zip(("policyloss", *FRAMEWORKS), cells[1:], strict=True):
            for one in row.cell(who):
                assert shown(one) in cell


# Parts --------------------------------------------------------------------------------------------


def test_every_name_of_every_part_is_on_the_page() -> None:
    section = PAGE.split("## What each framework calls it")[1].split(
        "## One name, several meanings"
    )[0]
    labels = [(entry.part, entry.what) for entry in ELSEWHERE]
    assert len(set(labels)) == len(labels), "two rows of a table with one label"
    for entry in ELSEWHERE:
        row = next(line for line in section.split("\n") if line.startswith(f"| {entry.what} | "))
        for who, name in entry.names.items():
            assert name.replace("|", "\\|") in row
            assert who.split(", ")[0] in FRAMEWORKS or f"{who}: {name}" in row


def test_an_error_suggests_our_name_for_a_frameworks_field() -> None:
    """Every name in the tables of a number or a word that one field of a part holds."""
    groups = ("Ratio and trust region", "Average", "KL and entropy")
    unknown, tried = {}, 0
    for row in (row for group in groups for row in OPTIONS[group]):
        ours = {one.parameter for one in row.policyloss if isinstance(one, Argument)}
        named = [one for who in FRAMEWORKS for one in row.cell(who) if not isinstance(one, str)]
        words = {
            one.name.split(".")[-1].strip("-") if isinstance(one, Option) else one.parameter
            for one in named
            if not isinstance(one.default, bool)  # a switch
        }
        for word in words - ours if len(ours) == 1 else ():
            (field,), tried = ours, tried + 1
            text = unknown_name("field", word, [field, "reach", "level"])
            if f"did you mean {field!r}?" not in text:
                unknown[word] = text
    assert not unknown
    assert tried > 15


def test_every_way_to_name_a_field_gives_the_hint() -> None:
    both = "did you mean 'eps_low' and 'eps_high'?"
    calls: dict[Callable[[], Any], str] = {
        lambda: pl.preset("grpo", beta=0.1): "did you mean 'coef'?",
        lambda: pl.KL("k3", beta=0.1): "did you mean 'coef'?",
        lambda: pl.preset("dapo", clip_ratio=0.2): both,
        lambda: pl.Clip(clip_ratio=0.2): both,
        lambda: pl.Clip(0.2, clip_ratio_c=3.0): "did you mean 'dual'?",
        lambda: pl.preset("dapo").with_fields(cliprange=0.2): both,
        lambda: pl.LossSpec.from_dict({"trust": {"type": "Clip", "clip_ratio": 0.2}}): both,
        lambda: pl.LossSpec(loss_agg_mode="token-mean"): "did you mean 'aggregate'?",
        lambda: pl.LossSpec().replace(loss_agg_mode=pl.TokenMean()): "did you mean 'aggregate'?",
        lambda: dataclasses.replace(pl.Clip(0.2), epsilon=0.1): both,
        lambda: pl.Truncate(rollout_is_threshold=2.0): "did you mean 'high'?",
        lambda: pl.SeqMeanTokenSumNorm(loss_scale_factor=100): "did you mean 'horizon'?",
        # A name of this library that is spelled wrongly is found as before.
        lambda: pl.KL("k3", coeff=0.1): "did you mean 'coef'?",
    }
    wrong = {}
    for call, words in calls.items():
        with pytest.raises(pl.SpecError) as refused:
            call()
        if words not in str(refused.value):
            wrong[words] = str(refused.value)
    assert not wrong
    with pytest.raises(TypeError):
        pl.KL("k3", beta=0.1)  # type: ignore[call-arg]
