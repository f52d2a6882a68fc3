"""The preset that a loss is called a change of: the one a reader would name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from trl_configs import config

import policyloss as pl
from policyloss.compat.trl.config import LOSS_TYPES, spec_from_config
from policyloss.explain.sources import distance, nearest
from policyloss.presets import PRESETS, presets_equal_to


def one_change(spec: pl.LossSpec) -> Iterator[tuple[str, pl.LossSpec]]:
    """Every loss that differs from `spec` in one thing that people do change."""
    yield "entropy bonus", spec.replace(entropy_coef=0.01)
    yield "another average", spec.replace(aggregate=pl.PromptMean())
    yield "unclamped ratio", spec.replace(ratio=dataclasses.replace(spec.ratio, log_clamp=None))
    if not spec.correction:
        yield "a veto", spec.replace(correction=pl.Veto())
    if spec.kl is None:
        yield "a KL", spec.replace(kl=pl.KL("k3", 0.01))
    else:
        yield "no KL", spec.replace(kl=None)
        yield (
            "another coefficient",
            spec.replace(kl=dataclasses.replace(spec.kl, coef=spec.kl.coef / 10)),
        )
        if isinstance(spec.kl, pl.KL):
            yield "another estimator", spec.replace(kl=dataclasses.replace(spec.kl, estimator="k1"))
    for field in dataclasses.fields(spec.trust):
        value = getattr(spec.trust, field.name)
        if isinstance(value, float) and math.isfinite(value) and value:
            yield (
                f"trust.{field.name}",
                spec.replace(trust=dataclasses.replace(spec.trust, **{field.name: value * 1.1})),
            )
    for i, part in enumerate(spec.correction):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if (
                isinstance(value, float)
                and math.isfinite(value)
                and value
                and field.name != "log_clamp"
            ):
                parts = list(spec.correction)
                parts[i] = dataclasses.replace(part, **{field.name: value * 1.0005})
                yield f"correction.{field.name}", spec.replace(correction=parts)


# By the loss that a change leads to: the presets it is one change of.
# Usually one; two where they differ in nothing else.
REACHED: dict[pl.LossSpec, set[str]] = {}


def as_read(spec: pl.LossSpec) -> pl.LossSpec:
    """The same loss without a ratio that nothing reads."""
    return spec if spec.reads_ratio else spec.replace(ratio=pl.TokenRatio())


for _name, _preset in PRESETS.items():
    for _, _spec in one_change(_preset.spec):
        REACHED.setdefault(as_read(_spec), set()).add(_name)


@pytest.mark.parametrize("name", pl.presets())
def test_a_preset_with_one_change_is_a_change_of_that_preset(name: str) -> None:
    wrong: dict[str, Any] = {}
    for change, spec in one_change(PRESETS[name].spec):
        if presets_equal_to(spec):
            continue  # it has become another preset
        found = nearest(spec)
        if found is None or found.name not in REACHED[as_read(spec)]:
            wrong[change] = (
                found and found.name,
                {p: round(distance(spec, PRESETS[p].spec), 2) for p in (name, "ppo")},
            )
    assert not wrong


def test_few_changes_lead_to_the_same_loss() -> None:
    shared = {frozenset(names) for names in REACHED.values() if len(names) > 1}
    same = {
        frozenset(("ppo", "bnpo")),
        frozenset(("ppo", "bnpo", "dr_grpo")),
        frozenset(("gpg", "iw_opd")),
        frozenset(("reinforce", "gpg", "iw_opd")),
        # Without a teacher, or with another average, they are one loss.
        frozenset(("gkd_forward", "opsd")),
        frozenset(("gkd_reverse", "opd_exact")),
        frozenset(("gpg", "iw_opd", "mopd_topk", "opd_exact", "opd_kl", "opsd")),
        frozenset(("gkd", "gkd_forward", "gkd_reverse", "sdpo", "sdft")),
    }
    assert shared == same


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (pl.preset("grpo").replace(kl=None), "grpo"),
        (pl.preset("grpo").replace(kl=None, ratio=pl.TokenRatio(log_clamp=None)), "grpo"),
        (
            pl.preset("ppo").replace(aggregate=pl.SeqMeanTokenMean()),
            "grpo",
        ),  # the same loss as the first
        (pl.preset("gspo").replace(trust=pl.Clip(0.2, 0.2)), "gspo"),
        (pl.preset("dapo").replace(trust=pl.Clip(0.2, 0.3)), "dapo"),
        (pl.preset("dapo").replace(trust=pl.Clip(0.2, 0.28, dual=3.0)), "dapo"),
        (pl.preset("ppo").replace(trust=pl.Clip(0.2, 0.2, dual=10.0)), "ppo_dual_clip"),
        (pl.preset("dr_grpo").with_horizon(8).replace(kl=pl.KL("k3", 0.04)), "dr_grpo"),
        (
            pl.preset("gpg").replace(ratio=pl.SequenceProduct(), entropy_coef=0.1),
            "gpg",
        ),  # nothing reads its ratio
        (pl.preset("rloo_loss").replace(kl=pl.KL("k3", 0.05)), "rloo_loss"),
    ],
)
def test_what_a_reader_would_say(spec: pl.LossSpec, name: str) -> None:
    found = nearest(spec)
    assert found is not None
    assert found.name == name


# What TRL's loss types are called here: their names,
# but for the two whose average or clip makes them another preset's.
CALLED = {"dapo": "ppo", "bnpo": "ppo"}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_loss_types_of_trl(loss_type: str, beta: float) -> None:
    level = "sequence" if loss_type == "luspo" else "token"
    spec = spec_from_config(
        config(loss_type=loss_type, beta=beta, importance_sampling_level=level, epsilon_high=0.2)
    )
    explained = pl.explain(spec)
    assert (explained.preset or explained.near) == CALLED.get(loss_type, loss_type)


def test_the_page_on_grpo_without_kl() -> None:
    text = str(pl.explain(spec_from_config(config(loss_type="grpo", beta=0.0))))
    assert text.startswith(
        "A change of grpo (GRPO, clipped surrogate with a KL penalty in the loss)"
    )
