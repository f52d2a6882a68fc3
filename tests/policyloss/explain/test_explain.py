"""`explain` describes the code: the printed formula is evaluated and compared with
`policy_loss`, in value and gradient.

The evaluator (`formula_evaluator`) supports only the printed vocabulary. Batches are padded and
ragged, with an empty row, a row that is all masked, and masks with holes.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from formula_evaluator import Evaluator
from formulas import assert_formula_holds, assert_zero_where_said, numbers, zero_batch
from hypothesis import given
from hypothesis import strategies as st
from walk import in_shares, walked

import policyloss as pl
from cases import (
    AGGREGATES,
    CORRECTIONS,
    KLS,
    PRESETS,
    PULLS,
    RATIOS,
    REJECTED,
    TRUSTS,
    label,
    make_batch,
    run,
    swapped,
    unweighted,
)
from policyloss.catalogue import PRESETS as NAMED
from policyloss.explanations.formula import Formula, FormulaLine, formula
from policyloss.explanations.framework_names import ELSEWHERE
from policyloss.explanations.traits import fits, traits
from policyloss.explanations.traps import TRAPS
from policyloss.parts import aggregate, correction, kl, ratio, trust
from policyloss.parts.data import has_fields

BATCHES = [make_batch(seed=s, rows=6, width=6) for s in (11, 12)]
FULL = pl.LossSpec(
    trust=pl.Clip(0.2, 0.28, dual=1.4),
    kl=pl.KL("k3", 0.1),
    entropy_coef=0.01,
    aggregate=pl.SeqMeanTokenMean(),
)
INF = float("inf")
REJECTING_TRUSTS = [
    pl.Clip(0.2, 0.28),
    pl.GeometricClip(0.2, 0.3),
    pl.Quadratic(0.3),
    pl.Unbounded("logp"),
]
MORE_TRUSTS = (
    pl.Clip(INF, INF),
    pl.Clip(INF, 0.1, dual=1.1),
    pl.Clip(1.5, 0.1),
    pl.Clip(0.1, INF, dual=INF),
    pl.TwoSidedClip(1.05, 0.1, 0.2),
    pl.TwoSidedClip(INF, INF, 0.1),
    pl.DetachedClip(0.0, 1.1),
    pl.DetachedClip(0.9, INF, outside="zero"),
    pl.ProbabilityBand("tv", 0.05, 0.08, sides="both", form="ratio"),
    pl.ProbabilityBand("kl", 0.02, 0.03, cap=INF),
    pl.GeometricClip(INF, 0.1),
    pl.CovKL(fraction=0.3, coef=0.7),
    pl.TaperedNegative(INF),
)
MORE_CORRECTIONS = (
    (pl.Reject("k1", high=-9.0),),  # rejects everything
    (pl.Truncate(INF),),
    (pl.MomentBudget(1e-9), pl.OPSM(0.01)),
    (pl.MomentBudget(9.0),),  # rejects nothing
    (pl.Truncate(1.1, low=0.9, log_clamp=None),),
    (pl.Reject("k1", high=-9.0), pl.Truncate(1.1), pl.SelfNormalise()),
    (
        pl.Veto(None, 1.3),
        pl.Reject("k3", "max", low=0.0, high=0.2),
        pl.SequenceMask(0.9, 1.2),
        pl.OPSM(0.0),
    ),
)


@walked("name", pl.presets())
def test_the_printed_formula_of_a_preset_is_the_computed_one(name: str) -> None:
    for batch in BATCHES:
        assert_formula_holds(PRESETS[name], batch)


@walked("part", RATIOS, ids=label)
def test_the_formula_holds_for_every_trust_region_under_every_ratio(part: Any) -> None:
    for trusted in (*TRUSTS, *MORE_TRUSTS):
        spec = swapped(FULL, ratio=part, trust=trusted)
        if spec is not None:
            assert_formula_holds(spec, BATCHES[0])


@in_shares(2)
@walked("rejected", REJECTED)
@walked("part", [pl.TokenRatio(), pl.SequenceRatio(), pl.SegmentRatio()], ids=label)
def test_the_formula_holds_for_every_correction_and_its_denominator(
    part: Any, rejected: Any, share: int
) -> None:
    averages = (
        (pl.SeqMeanTokenMean(), pl.TokenMean(), pl.PromptMean())
        if isinstance(part, pl.TokenRatio)
        else (pl.TokenMean(),)
    )
    first = REJECTED.index(rejected) + share
    for corrections in (*CORRECTIONS, *MORE_CORRECTIONS)[first % 2 :: 2]:
        for average in averages:
            spec = FULL.replace(
                ratio=part, correction=corrections, rejected=rejected, aggregate=average
            )
            assert_formula_holds(spec, BATCHES[1])


@walked("part", [None, *KLS], ids=label)
def test_the_formula_holds_for_every_kl_and_average(part: Any) -> None:
    for average in AGGREGATES:
        assert_formula_holds(FULL.replace(kl=part, aggregate=average), BATCHES[0])
        assert_formula_holds(
            FULL.replace(kl=part, aggregate=average, ratio=pl.SequenceProduct(), entropy_coef=0.0),
            BATCHES[1],
        )


@st.composite
def specs(draw: Any) -> pl.LossSpec:
    """Any parts that fit together, with a random log_clamp on the ratio."""
    part = draw(st.sampled_from(RATIOS))
    part = dataclasses.replace(
        part,
        log_clamp=draw(st.sampled_from([20.0, 0.3, None, (None, 0.2), (-0.1, None), (-0.2, 0.4)])),
    )
    corrections = draw(st.sampled_from([(), *CORRECTIONS, *MORE_CORRECTIONS]))
    chosen: dict[str, Any] = {
        "ratio": part,
        "trust": draw(st.sampled_from([*TRUSTS, *MORE_TRUSTS])),
        "correction": corrections,
        "rejected": draw(st.sampled_from(REJECTED)) if corrections else "keep",
        "kl": draw(st.sampled_from([None, *KLS])),
        "entropy_coef": draw(st.sampled_from([0.0, 0.02])),
        "aggregate": draw(st.sampled_from(AGGREGATES)),
    }
    return swapped(pl.LossSpec(), **chosen) or pl.LossSpec(**{**chosen, "trust": TRUSTS[0]})


@given(spec=specs(), seed=st.integers(0, 10_000))
def test_the_formula_of_a_random_loss_holds_on_random_data(spec: pl.LossSpec, seed: int) -> None:
    assert_formula_holds(spec, make_batch(seed=seed, rows=5, width=5, spread=0.5))


def test_no_part_is_left_out() -> None:
    lists = {
        ratio: RATIOS,
        trust: TRUSTS,
        kl: PULLS,
        aggregate: AGGREGATES,
        correction: [c for cs in CORRECTIONS for c in cs],
    }
    for module, parts in lists.items():
        assert {type(p) for p in parts} == set(module.VARIANTS)
        for part in parts:
            slot = module.__name__.rsplit(".", 1)[1]
            both = (pl.Truncate(2.0), part) if isinstance(part, pl.SelfNormalise) else part
            assert formula(pl.LossSpec(**{slot: both})).exact


def test_a_wrong_formula_is_noticed() -> None:
    printed = formula(pl.preset("dapo"))
    wrong = Formula(
        tuple(
            FormulaLine(line.name, line.expression.replace("1 + 0.28", "1 + 0.2"))
            for line in printed.lines
        )
    )
    batch = unweighted(BATCHES[0])
    right, changed = (Evaluator(f, batch).names["loss"].item() for f in (printed, wrong))
    assert abs(right - run(pl.preset("dapo"), batch).loss.item()) < 1e-12
    assert abs(right - changed) > 1e-3


def test_dapo_reads_as_the_paper_writes_it() -> None:
    assert str(formula(pl.preset("dapo"))).split("\n") == [
        "log_ratio = clip(logp - old_logp, -20, 20)",
        "ratio = exp(log_ratio)",
        "surrogate = max(-advantages * ratio, -advantages * clip(ratio, 1 - 0.2, 1 + 0.28))",
        "loss = sum(surrogate) / N",
    ]


# Which tokens get no gradient ---------------------------------------------------------------------


@in_shares(2)
@walked(
    "part", [*RATIOS, pl.SegmentRatio(log_clamp=0.2), pl.SequenceRatio(log_clamp=0.1)], ids=label
)
def test_the_gradient_is_zero_exactly_where_explain_shows_it(part: Any, share: int) -> None:
    for trusted in (*TRUSTS, *MORE_TRUSTS)[share::2]:
        spec = swapped(pl.LossSpec(), ratio=part, trust=trusted)
        if spec is None:
            continue
        counts = [assert_zero_where_said(spec, zero_batch(seed)) for seed in (1, 2)]
        assert all(sum(c) > 0 for c in zip(*counts, strict=True)) or isinstance(
            trusted, (pl.Quadratic, pl.Regression, pl.CovKL)
        ), spec


@in_shares(3)
@walked("rejected", REJECTED)
@walked("trusted", REJECTING_TRUSTS, ids=label)
def test_the_gradient_of_rejected_tokens_is_zero_where_explain_shows_it(
    trusted: Any, rejected: Any, share: int
) -> None:
    ratios = (pl.TokenRatio(), pl.SequenceRatio(), pl.SegmentRatio())
    first = REJECTING_TRUSTS.index(trusted) + share
    for i, corrections in enumerate((*CORRECTIONS, *MORE_CORRECTIONS), start=first):
        base = pl.LossSpec(correction=corrections, rejected=rejected)
        spec = swapped(base, ratio=ratios[i % 3], trust=trusted)
        if spec is not None:
            assert_zero_where_said(spec, zero_batch(3))


@walked("name", pl.presets())
def test_zero_gradients_of_presets(name: str) -> None:
    assert_zero_where_said(PRESETS[name].replace(kl=None, entropy_coef=0.0), zero_batch(4))


# Numbers and their sources ------------------------------------------------------------------------


@walked("name", pl.presets())
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    said, spec = numbers(pl.explain(name)), pl.preset(name)
    for where, (value, source) in said.items():
        assert source, where
        guard = where.split(".")[-1] in ("log_clamp", "clamp")
        if isinstance(value, (int, float)) and not guard:
            assert source != "library default", f"{name}: {where} = {value}"
    for slot in ("trust", "kl", "aggregate"):
        part = getattr(spec, slot)
        for f in dataclasses.fields(part) if has_fields(part) else ():
            if f.name in getattr(part, "idle_fields", ()):
                continue
            if isinstance(getattr(part, f.name), (int, float)) and not (
                f.name == "cap" and part.form == "ratio"
            ):
                assert said[f"{slot}.{f.name}"][0] == getattr(part, f.name)


@walked("name", pl.presets())
def test_sources_name_real_slots_and_fields(name: str) -> None:
    for key in NAMED[name].sources:
        if key == "advantage":
            continue  # no slot of the loss: an estimator that goes with it
        slot, *fields = key.split(".")
        part = getattr(PRESETS[name], slot)
        part = part[0] if slot == "correction" else part
        assert part is not None
        for field in fields:  # of a part inside a part, too
            assert hasattr(part, field), key
            part = getattr(part, field)


def test_a_changed_number_is_marked() -> None:
    spec = pl.preset("dapo").replace(trust=pl.Clip(0.2, 0.3), kl=pl.KL("k3", 0.01))
    e = pl.explain(spec)
    assert (e.preset, e.near) == (None, "dapo")
    said = numbers(e)
    assert said["trust.eps_high"] == (0.3, "set by you (preset dapo has 0.28)")
    assert said["trust.eps_low"][1].startswith("DAPO, arXiv 2503.14476")
    assert said["kl"] == ("KL", "set by you (preset dapo has none)")
    assert said["kl.coef"] == (0.01, "set by you")
    assert said["kl.clamp"] == (20.0, "library default")


def test_adding_dual_clip_to_dapo_is_a_change_of_dapo() -> None:
    e = pl.explain(pl.preset("dapo").replace(trust=pl.Clip(0.2, 0.28, dual=3.0)))
    assert e.near == "dapo"
    assert numbers(e)["trust.dual"] == (3.0, "set by you (preset dapo has None)")


def test_presets_that_are_one_loss_say_so() -> None:
    assert pl.explain("bnpo").preset == "bnpo"
    assert pl.explain("bnpo").also == ("ppo",)
    assert pl.explain(pl.preset("bnpo")).preset == "bnpo"
    # A loss that was made from no preset: the first preset that is the same.
    assert pl.explain(pl.LossSpec()).preset == "ppo"


def test_a_loss_far_from_all_presets_is_your_own() -> None:
    parts: dict[str, Any] = {
        "ratio": pl.SegmentRatio("rollout"),
        "correction": (pl.Veto(), pl.OPSM(0.1)),
        "entropy_coef": 0.1,
    }
    e = pl.explain(
        pl.LossSpec(
            trust=pl.GammaWeight(1.0, 1.0, 1.0, 1.0),
            aggregate=pl.PromptMean(),
            kl=pl.KL("k2", 0.1),
            **parts,
        )
    )
    assert (e.preset, e.near, e.paper) == (None, None, "")
    assert numbers(e)["trust.k_positive"] == (1.0, "set by you")
    assert numbers(e)["correction[0].low"] == (1e-4, "library default")
    assert e.reads == (
        "logp",
        "advantages",
        "mask",
        "old_logp",
        "rollout_logp",
        "ref_logp",
        "entropy",
        "group_ids",
    )


def my_surrogate(t: pl.Tokens) -> Any:
    """Minus the advantage times logp.

    More.
    """
    return -t.advantages * t.logp


def branching(t: pl.Tokens) -> Any:
    """Minus the advantage times logp, if there is any.

    More.
    """
    return my_surrogate(t) if bool((t.advantages != 0).any()) else 0 * t.logp


def test_a_callable_that_symbols_cannot_follow_is_named_and_not_invented() -> None:
    e = pl.explain(
        pl.LossSpec(trust=branching, correction=lambda t: pl.Corrected(None, t.mask.cpu()))
    )
    assert not e.formula.exact
    assert not e.zero.known
    text = str(e)
    assert "surrogate = branching(tokens)" in text
    assert (
        "branching in the trust slot is a callable, whose formula cannot be printed. Its "
        "docstring: Minus the" in " ".join(text.split())
    )
    assert "your_function in the correction slot is a callable" in text
    assert numbers(e)["trust"] == ("branching", "your own function")
    json.dumps(e.to_dict())


# Names and traps ----------------------------------------------------------------------------------


def test_every_name_and_trap_applies_to_some_loss() -> None:
    made = [
        *PRESETS.values(),
        *(FULL.replace(aggregate=a) for a in AGGREGATES),
        *(FULL.replace(kl=k) for k in KLS),
    ]
    made += [FULL.replace(correction=c, rejected=r) for c in CORRECTIONS for r in REJECTED]
    made += [
        s for p in RATIOS for t in (*TRUSTS, *MORE_TRUSTS) if (s := swapped(FULL, ratio=p, trust=t))
    ]
    made.append(
        FULL.replace(ratio=pl.TokenRatio("rollout"), trust=pl.DetachedClip(0.8, 1.2, "zero"))
    )
    made.append(FULL.replace(ratio=pl.SequenceRatio(), aggregate=pl.TokenMean()))
    bare = [pl.Divergence(kind, 1.0, rest="drop") for kind in ("forward", "reverse")]
    made += [FULL.replace(kl=part) for part in (*bare, pl.KL("k3", 0.1, anchor="teacher"))]
    found = [traits(s) for s in made]
    for entry in (*ELSEWHERE, *TRAPS):
        assert any(fits(entry.needs, f) for f in found), entry.needs


def text_of_traps(spec: Any) -> str:
    return " ".join(t.text for t in pl.explain(spec).traps)


@walked(
    ("loss", "words"),
    [
        ("ppo", "Clipping cannot fire on the first on-policy step"),
        ("ppo", "A loss of 0 does not mean no gradient"),
        ("cispo", "TRL caps the ratio at epsilon_high itself, and with its default of 0.2"),
        ("gspo", "GSPO has two gradients"),
        ("tis", "the product in verl, TRL, SkyRL and slime, and the geometric mean in ms-swift"),
        ("cispo", "pg_variant='tis'"),
        ("seq_mask_tis", "TRL the sequence's"),
        ("icepop", "still counts in the denominator"),
        ("dr_grpo", "Four denominators share this name"),
        ("rloo_loss", "RLOO is an advantage estimator everywhere but in TRL"),
        (pl.preset("gspo").replace(aggregate=pl.TokenMean()), "GSPO averages over sequences"),
        (pl.preset("ppo").replace(kl=pl.KL("k1", 0.1)), "it reports a KL and pulls nowhere"),
        ("gkd", "pass zeros to learn from the teacher alone"),
        ("opd_kl", "The tokens must be the student's own"),
        (
            pl.LossSpec(kl=pl.Divergence("reverse", 1.0, rest="drop")),
            "no minimum where student and teacher are equal",
        ),
        (pl.LossSpec(kl=pl.Divergence("forward", 1.0, rest="drop")), "verl holds it at 0"),
        (
            pl.LossSpec(kl=pl.KL("k3", 1.0, anchor="teacher")),
            "not an estimate of the gradient of the KL",
        ),
    ],
)
def test_known_traps_are_shown_where_they_belong(loss: Any, words: str) -> None:
    assert words in text_of_traps(loss)


def test_traps_are_not_shown_where_they_do_not_belong() -> None:
    assert "Clipping cannot fire" not in text_of_traps("reinforce")
    assert "Clipping cannot fire" not in text_of_traps(
        pl.preset("ppo").replace(ratio=pl.TokenRatio("rollout"))
    )
    assert "denominator" not in text_of_traps("tis")  # truncation rejects nothing


@walked(
    ("loss", "framework", "name"),
    [
        ("ppo", "verl", 'loss_mode="vanilla"'),
        ("gspo", "TRL", 'importance_sampling_level="sequence"'),
        ("gspo_token", "verl", 'loss_mode="gspo"'),
        ("luspo", "TRL, Liger, Unsloth, Axolotl", 'loss_type="luspo"'),
        ("dapo", "OpenRLHF", "token_level_loss=True"),
        ("icepop", "OpenRLHF", 'is_correction_mode="mask"'),
        ("opsm", "slime", "--opsm-delta"),
        ("prime_rl", "prime-rl", '"default"'),
        ("aipo", "cosmos-rl", "aipo_rho"),
        ("dr_grpo", "ColossalChat", "PolicyLoss"),
    ],
)
def test_cross_framework_names(loss: str, framework: str, name: str) -> None:
    names = [
        said
        for entry in pl.explain(loss).elsewhere
        for who, said in entry.names.items()
        if who == framework
    ]
    assert any(name in said for said in names), names


def test_gspo_is_not_attributed_to_verl() -> None:
    surrogates = [e.names for e in pl.explain("gspo").elsewhere if e.part == "surrogate"]
    assert all("verl" not in names for names in surrogates)  # verl's is the token form


# The page -----------------------------------------------------------------------------------------


@walked("name", pl.presets())
def test_the_page_of_a_preset_is_whole_and_json_ready(name: str) -> None:
    e = pl.explain(name)
    text, data = str(e), json.loads(json.dumps(e.to_dict()))
    for section in ("Formula", "In words", "Reads", "Numbers", "No gradient", "Elsewhere"):
        assert f"\n{section}\n" in text
    assert text.startswith(NAMED[name].title)
    assert [f"{line['name']} = {line['expression']}" for line in data["formula"]] == str(
        e.formula
    ).split("\n")
    assert data["preset"] == name
    for line in data["formula"]:
        assert f"    {line['name']} = {line['expression']}" in text


def test_unknown_things_are_errors_that_help() -> None:
    with pytest.raises(pl.SpecError, match="did you mean 'dapo'"):
        pl.explain("dappo")
    with pytest.raises(
        pl.InputError, match="spec must be a LossSpec or the name of a preset, got int"
    ):
        pl.explain(3)  # type: ignore[arg-type]
