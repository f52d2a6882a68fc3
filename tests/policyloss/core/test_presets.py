"""The named losses: complete, each number with its source, each with the right inputs, and no two
the same by accident.
"""

from __future__ import annotations

import dataclasses
from itertools import combinations
from math import inf, log

import pytest
from walk import walked

import policyloss as pl
from policyloss.catalogue import PRESETS, Preset
from policyloss.spec import SLOTS

REQUIRED = [
    "ppo",
    "ppo_dual_clip",
    "grpo",
    "dr_grpo",
    "dapo",
    "bnpo",
    "gspo",
    "gspo_token",
    "cispo",
    "cispo_unified",
    "sapo",
    "gmpo",
    "gpg",
    "reinforce",
    "importance_sampling",
    "tis",
    "icepop",
    "seq_mask_tis",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "topr",
    "up_grpo",
    "luspo",
    "vespo",
    "opsm",
    "decoupled_ppo",
    "rloo_loss",
    "two_sided",
    "aipo",
]
# The same arithmetic under two names; each pair's notes say so.
SAME = {frozenset(("ppo", "bnpo")), frozenset(("gpg", "iw_opd"))}


def parts(spec: pl.LossSpec) -> list[tuple[str, object]]:
    """Each part of a spec with the slot it fills; the slots that hold plain values, too."""
    return [
        (s, p)
        for s in SLOTS
        for p in (getattr(spec, s) if s == "correction" else (getattr(spec, s),))
    ]


def test_required_names():
    assert not set(REQUIRED) - set(pl.presets())
    assert len(pl.presets()) == len(set(pl.presets()))
    for name in pl.presets():
        assert pl.preset(name) is PRESETS[name].spec
        assert PRESETS[name].name == name


@walked("preset", PRESETS.values(), ids=lambda p: p.name)
def test_every_choice_has_a_source(preset: Preset):
    """A slot that is not the default, and a number that is not its part's default,
    needs an entry for it or for its slot.
    """
    default = pl.LossSpec()
    for slot, part in parts(preset.spec):
        if part == getattr(default, slot) and slot not in ("trust", "aggregate"):
            continue
        if dataclasses.is_dataclass(part):
            fields = dataclasses.fields(part)
            chosen = [f"{slot}.{f.name}" for f in fields if getattr(part, f.name) != f.default]
        else:
            chosen = []
        unsourced = [
            c for c in chosen or [slot] if c not in preset.sources and slot not in preset.sources
        ]
        assert not unsourced, f"{preset.name} has no source for {unsourced}"


@walked("preset", PRESETS.values(), ids=lambda p: p.name)
def test_sources_name_existing_fields(preset: Preset):
    for key, source in preset.sources.items():
        if key == "advantage":
            assert preset.advantage is not None
            continue
        slot, *fields = key.split(".")
        assert slot in SLOTS, f"{key!r} is no slot"
        held = [part for s, part in parts(preset.spec) if s == slot]
        assert held, f"{key!r} is given a source but {slot} is empty"
        for field in fields:  # of a part inside a part, too
            held = [part for part in held if field in {f.name for f in dataclasses.fields(part)}]
            assert held, f"{key!r} names no field"
            held = [getattr(part, field) for part in held]
        assert len(source) >= 5
    assert preset.title
    assert preset.paper


def test_distinct_unless_documented():
    for a, b in combinations(PRESETS.values(), 2):
        same = a.spec == b.spec
        assert same == (frozenset((a.name, b.name)) in SAME), f"{a.name} and {b.name}"
    for pair in SAME:
        assert any(PRESETS[name].note for name in pair), (
            f"{sorted(pair)} are one loss; a note must say why there are two names"
        )


READS = {
    "reinforce": (),
    "gpg": (),
    "grpo": ("old_logp", "ref_logp"),
    "importance_sampling": ("rollout_logp",),
    "rollout_is": ("rollout_logp",),
    "aipo": ("rollout_logp",),
    "prime_rl": ("rollout_logp",),
    "ipo": ("rollout_logp",),
    "a2po": ("ref_logp",),
    "tis": ("old_logp", "rollout_logp"),
    "seq_tis": ("old_logp", "rollout_logp"),
    "icepop": ("old_logp", "rollout_logp"),
    "seq_mask_tis": ("old_logp", "rollout_logp"),
    "decoupled_ppo": ("old_logp", "rollout_logp"),
    "m2po": ("old_logp", "rollout_logp"),
    "opd_kl": ("teacher_logp",),
    "iw_opd": (),
    "kdrl": ("old_logp", "teacher_logp"),
    "sdpo": ("old_logp", "teacher_logp"),
    "opd_exact": ("divergence",),
    "gkd": ("divergence",),
    "gkd_forward": ("divergence",),
    "gkd_reverse": ("divergence",),
    "mopd_topk": ("divergence",),
    "opsd": ("divergence",),
    "sdft": ("old_logp", "divergence"),
}


@walked("name", pl.presets())
def test_reads(name):
    assert pl.preset(name).reads == READS.get(name, ("old_logp",))


# The numbers of the papers, written once more from the papers' side. (Where a framework's default
# stands in, the source says so.)
NUMBERS = {
    "ppo": {"trust": pl.Clip(0.2, 0.2), "aggregate": pl.TokenMean()},
    "ppo_dual_clip": {"trust": pl.Clip(0.2, 0.2, dual=3.0)},
    "grpo": {
        "trust": pl.Clip(0.2, 0.2),
        "kl": pl.KL("k3", 0.04),
        "aggregate": pl.SeqMeanTokenMean(),
    },
    "dr_grpo": {"aggregate": pl.SeqMeanTokenSumNorm(), "kl": None},
    "dapo": {"trust": pl.Clip(0.2, 0.28), "aggregate": pl.TokenMean(), "kl": None},
    "gspo": {
        "ratio": pl.SequenceRatio(grad="sequence"),
        "trust": pl.Clip(3e-4, 4e-4),
        "aggregate": pl.SeqMeanTokenMean(),
    },
    "gspo_token": {"ratio": pl.SequenceRatio(grad="token"), "trust": pl.Clip(3e-4, 4e-4)},
    "rec_one_side": {"trust": pl.DetachedClip(0.8, 1.2, "zero_by_sign", "one"), "kl": None},
    "sppo_token": {"trust": pl.DetachedClip(1 / 1.3, 1.3, "zero", "one"), "kl": None},
    "sapo": {"trust": pl.SoftGate(1.0, 1.05), "aggregate": pl.SeqMeanTokenMean()},
    "gmpo": {"trust": pl.GeometricClip(0.4, 0.4), "aggregate": pl.SeqMeanTokenMean()},
    "fipo": {"trust": pl.FutureKL(0.2, 0.2, 32.0, 1.0, 1.2, 4.0), "aggregate": pl.TokenMean()},
    "gpg": {"trust": pl.Unbounded("logp"), "aggregate": pl.TokenMean()},
    "importance_sampling": {"trust": pl.Unbounded("ratio"), "aggregate": pl.TokenSum()},
    "tis": {"correction": (pl.Truncate(2.0),)},
    "icepop": {"correction": (pl.Band(0.5, 5.0),), "rejected": "keep"},
    "seq_mask_tis": {
        "correction": (pl.SequenceMask(0.999, 1.002, level="geomean", weight="token"),)
    },
    "clip_cov": {"trust": pl.CovClip(0.2, 0.2, 2e-4, 1.0, 5.0)},
    "kl_cov": {"trust": pl.CovKL(2e-4, 1.0)},
    "m2po": {
        "ratio": pl.TokenRatio("rollout"),
        "trust": pl.Unbounded("ratio"),
        "correction": (pl.MomentBudget(0.04),),
    },
    "opsm": {"correction": (pl.OPSM(1e-4, source="old"),)},
    "decoupled_ppo": {"correction": (pl.Truncate(inf),)},
    "two_sided": {"trust": pl.TwoSidedClip(4.0, 0.2, 0.2)},
    "aipo": {"trust": pl.Clip(inf, 1.0, dual=2.0)},
    "ipo": {
        "ratio": pl.TokenRatio("rollout", log_clamp=None),
        "trust": pl.ProbabilityBand("tv", 0.1, 0.1, sides="both", form="ratio"),
        "kl": pl.KL("k2", 2 * 1e-3, anchor="rollout", clamp=None),
    },
    "vespo": {
        "trust": pl.GammaWeight(2.0, 3.0, 3.0, 2.0),
        "ratio": pl.SequenceProduct(log_clamp=(log(1e-8), 20.0)),
    },
    "rloo_loss": {"ratio": pl.SequenceProduct(), "trust": pl.Clip(0.2, 0.2)},
    "luspo": {
        "ratio": pl.SequenceRatio(),
        "trust": pl.Clip(2e-3, 2.5e-3),
        "aggregate": pl.LengthWeighted(),
    },
    "a2po": {
        "ratio": pl.SequenceProduct(anchor="ref", log_clamp=None),
        "trust": pl.Regression(1e-3),
        "aggregate": pl.SeqMeanTokenMean(),
    },
    "sppo": {"ratio": pl.SequenceProduct(log_clamp=None), "trust": pl.Regression(1.0)},
    "topr": {"trust": pl.TaperedNegative(1.0)},
    "up_grpo": {
        "trust": pl.BySign(pl.Unbounded("current"), pl.Clip(0.2, 0.2, dual=3.0)),
        "aggregate": pl.SeqMeanTokenMean(),
    },
    "opd": {"trust": pl.Unbounded("ratio"), "kl": None, "aggregate": pl.TokenMean()},
    "opd_kl": {
        "kl": pl.KL("k1", 1.0, grad="k2", anchor="teacher", clamp=None),
        "aggregate": pl.TokenMean(),
    },
    "iw_opd": {"trust": pl.Unbounded("logp"), "kl": None, "aggregate": pl.TokenMean()},
    "kdrl": {"trust": pl.Unbounded("ratio"), "kl": pl.KL("k2", 5e-3, anchor="teacher")},
    "sdpo": {
        "kl": pl.KL(
            *("k1", 1.0, "k2", "detached_ratio"), clamp=None, anchor="teacher", weight_max=2.0
        ),
        "aggregate": pl.SeqMeanTokenMean(),
    },
    "opd_exact": {"kl": pl.Divergence("reverse", 1.0), "aggregate": pl.TokenMean()},
    "gkd": {"kl": pl.Divergence("jsd", 1.0, beta=0.5), "aggregate": pl.SeqMeanTokenMean()},
    "gkd_forward": {"kl": pl.Divergence("forward", 1.0)},
    "gkd_reverse": {"kl": pl.Divergence("reverse", 1.0), "aggregate": pl.SeqMeanTokenMean()},
    "mopd_topk": {"kl": pl.Divergence("generalised", 1.0)},
    "opsd": {"kl": pl.Divergence("forward", 1.0), "aggregate": pl.TokenMean()},
    "sdft": {
        "ratio": pl.TokenRatio(log_clamp=(-20.0, log(2.0))),
        "kl": pl.Divergence("jsd", 1.0, beta=0.5, weight="ratio"),
    },
}


@walked("name", NUMBERS)
def test_numbers(name):
    spec = pl.preset(name)
    assert {slot: getattr(spec, slot) for slot in NUMBERS[name]} == NUMBERS[name]


def test_a_loss_with_a_teacher_names_its_comparison():
    by_loss = {name for name, p in PRESETS.items() if any(k.teaches for k in p.spec.kl_parts)}
    taught = by_loss | {"opd", "iw_opd"}
    assert len(taught) == 12
    assert not {name for name in taught if "Compared with" not in PRESETS[name].note}


def test_the_mapping_cannot_be_emptied_by_accident():
    assert isinstance(pl.presets(), tuple)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["ppo"].spec = pl.LossSpec()
