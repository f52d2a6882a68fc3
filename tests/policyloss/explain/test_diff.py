"""`diff` shows what differs between two losses, all of it, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from walk import walked

import policyloss as pl
from cases import NEIGHBOURS, PRESETS
from policyloss.spec import SLOTS


def test_one_number() -> None:
    d = pl.diff("ppo", "dapo")
    assert not d.equal
    assert [c.slot for c in d.changes] == ["trust"]
    assert d.changes[0].fields == (("eps_high", 0.2, 0.28),)
    assert str(d).split("\n") == [
        "a: ppo",
        "b: dapo",
        "",
        "trust: Clip(eps_low=0.2, eps_high=0.2) -> Clip(eps_low=0.2, eps_high=0.28)",
        "  eps_high: 0.2 -> 0.28",
        "  a: the gradient stops where the advantage pushes the ratio out of [0.8, 1.2].",
        "  b: the gradient stops where the advantage pushes the ratio out of [0.8, 1.28].",
    ]


def test_equal_losses_say_so() -> None:
    assert pl.diff("ppo", "bnpo").equal
    assert str(pl.diff("ppo", "bnpo")) == "ppo and bnpo are the same loss."
    assert str(pl.diff(pl.preset("dapo"), "dapo")) == "dapo and dapo are the same loss."


@walked("name", pl.presets())
def test_exactly_the_changed_slots_are_shown(name: str) -> None:
    spec = PRESETS[name]
    for other in NEIGHBOURS[name].values():
        changed = [slot for slot in SLOTS if getattr(spec, slot) != getattr(other, slot)]
        d = pl.diff(spec, other)
        assert [c.slot for c in d.changes] == changed
        for c in d.changes:
            mine, theirs = getattr(spec, c.slot), getattr(other, c.slot)
            for f in c.fields:
                part = mine[0] if c.slot == "correction" else mine
                assert getattr(part, f.field) == f.a != f.b
            assert (
                c.fields
                or type(mine) is not type(theirs)
                or c.slot in ("correction", "rejected", "entropy_coef")
            )
        json.dumps(d.to_dict())


def test_a_term_that_only_one_has() -> None:
    d = pl.diff("ppo", "grpo")
    kl = next(c for c in d.changes if c.slot == "kl")
    assert (kl.a, kl.b) == ("none", "KL(estimator='k3', coef=0.04)")
    assert kl.meaning == ("b alone: plus 0.04 times k3, an estimate of KL(current, ref).",)


@walked(
    ("slots", "other", "note"),
    [
        (
            {"aggregate": pl.LengthWeighted()},
            {"aggregate": pl.SeqMeanTokenSum()},
            "give every token the same weight",
        ),
        (
            {"trust": pl.Clip(0.2, 0.2, dual=4.0)},
            {"trust": pl.TwoSidedClip(4.0)},
            "are the same surrogate",
        ),
        (
            {"trust": pl.Clip(0.2, 0.2, dual=float("inf"))},
            {"trust": pl.Clip(0.2, 0.2)},
            "the difference has no effect",
        ),
    ],
)
def test_different_parts_that_are_one_loss_are_noted(
    slots: dict[str, Any], other: dict[str, Any], note: str
) -> None:
    a, b = pl.LossSpec(**slots), pl.LossSpec(**other)
    for first, second in ((a, b), (b, a)):
        d = pl.diff(first, second)
        assert not d.equal
        assert any(note in n for n in d.notes)
        assert note in str(d)


def test_no_note_where_the_losses_differ() -> None:
    assert (
        pl.diff(
            pl.LossSpec(trust=pl.Clip(0.2, 0.2, dual=3.0)), pl.LossSpec(trust=pl.TwoSidedClip(4.0))
        ).notes
        == ()
    )
    assert pl.diff("ppo", "dapo").notes == ()


def test_a_ratio_that_nothing_reads_makes_no_difference() -> None:
    d = pl.diff("gpg", pl.preset("gpg").replace(ratio=pl.SequenceRatio()))
    assert "Neither loss reads the ratio" in str(d)
    assert any("no effect" in n for n in d.notes)


def test_callables_are_named() -> None:
    def mine(t: pl.Tokens) -> Any:
        return -t.advantages * t.logp

    d = pl.diff("ppo", pl.LossSpec(trust=mine))
    assert "trust: Clip(eps_low=0.2, eps_high=0.2) -> mine" in str(d)
    assert d.changes[0].meaning[1] == "b: your own function mine."
