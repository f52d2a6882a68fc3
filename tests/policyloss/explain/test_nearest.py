"""The preset that a loss is called a change of: the one a reader would name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from trl_configs import config
from walk import walked

import policyloss as pl
from policyloss.catalogue import PRESETS, presets_equal_to
from policyloss.catalogue.nearest import distance, nearest_preset
from policyloss.compat.trl.config import LOSS_TYPES, spec_from_config


def by_value(spec: pl.LossSpec) -> str | None:
    """The name of the preset nearest to a loss whose origin is not known."""
    preset, _ = nearest_preset(pl.LossSpec.from_dict(spec.to_dict()))
    return preset.name if preset else None


def test_a_spec_remembers_where_it_began() -> None:
    """A change of a preset stays one, by every way of changing it, while it is a small change."""
    wrong = {}
    for name, preset in PRESETS.items():
        changes = dict(one_change(preset.spec))
        changes["two changes"] = preset.spec.replace(entropy_coef=0.01).replace(
            aggregate=pl.PromptMean()
        )
        changes["by name"] = pl.preset(name, entropy_coef=0.01)
        for change, spec in {**changes, "none": pl.preset(name)}.items():
            nearest, exact = nearest_preset(spec)
            if nearest is not preset and not (exact and spec != preset.spec):
                wrong[f"{name}, {change}"] = nearest and nearest.name
    assert not wrong


def test_the_page_on_a_change_of_dapo() -> None:
    spec = pl.preset("dapo", eps_high=0.3).replace(correction=pl.Truncate(2.0))
    explained = pl.explain(spec)
    assert explained.title.startswith("A change of dapo")
    assert explained.advantage == PRESETS["dapo"].advantage == "grpo"
    # The origin is no part of the value.
    same = pl.preset("tis", eps_high=0.3)
    assert (spec, hash(spec), spec.to_dict()) == (same, hash(same), same.to_dict())
    assert pl.explain(same).near == "tis"


def test_a_spec_that_became_another_loss_is_no_change_of_its_origin() -> None:
    gspo = PRESETS["gspo"].spec
    like_gspo = pl.preset("ppo").replace(ratio=gspo.ratio, aggregate=gspo.aggregate)
    became = like_gspo.replace(trust=gspo.trust)
    assert nearest_preset(became) == (PRESETS["gspo"], True)
    assert nearest_preset(became.replace(entropy_coef=0.1)) == (PRESETS["gspo"], False)
    other_trust = pl.preset("ppo").replace(trust=PRESETS["sapo"].spec.trust, entropy_coef=0.1)
    assert nearest_preset(other_trust) == (PRESETS["sapo"], False)
    assert nearest_preset(pl.LossSpec(trust=lambda t: -t.advantages)) == (None, False)


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


@walked("name", pl.presets())
def test_a_preset_with_one_change_is_a_change_of_that_preset(name: str) -> None:
    wrong: dict[str, Any] = {}
    for change, spec in one_change(PRESETS[name].spec):
        if presets_equal_to(spec):
            continue  # it has become another preset
        found = by_value(spec)
        if found not in REACHED[as_read(spec)]:
            wrong[change] = (
                found,
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


@walked(
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
def test_the_nearest_preset_is_the_one_a_reader_would_name(spec: pl.LossSpec, name: str) -> None:
    assert by_value(spec) == name


# What TRL's loss types are called here: their names,
# but for the two whose average or clip makes them another preset's.
CALLED = {"dapo": "ppo", "bnpo": "ppo"}


@walked("beta", [0.0, 0.04])
@walked("loss_type", LOSS_TYPES)
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
