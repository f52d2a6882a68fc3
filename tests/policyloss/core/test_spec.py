"""A LossSpec is a value: frozen, hashable, written and read as data without loss,
and strict about its fields.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from math import inf, nan
from typing import Any

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import AGGREGATES, CORRECTIONS, KLS, RATIOS, TRUSTS, label, make_batch, run
from policyloss.compat.trl.parts import RolloutProduct, WrittenKL

SPECS = {
    **{name: pl.preset(name) for name in pl.presets()},
    **{label(x): pl.LossSpec(ratio=x) for x in RATIOS},
    **{label(x): pl.LossSpec(trust=x) for x in TRUSTS},
    **{label(x): pl.LossSpec(correction=x, rejected="drop_sequence") for x in CORRECTIONS},
    **{label(x): pl.LossSpec(kl=x) for x in KLS},
    **{label(x): pl.LossSpec(aggregate=x) for x in AGGREGATES},
    "infinite": pl.LossSpec(
        trust=pl.Clip(inf, inf, dual=inf), correction=pl.Truncate(inf), entropy_coef=-0.25
    ),
    "pairs": pl.LossSpec(ratio=pl.TokenRatio(log_clamp=(-inf, 3.0)), trust=pl.Unbounded("logp")),
    "open pair": pl.LossSpec(
        ratio=pl.SequenceProduct(log_clamp=(None, 10)), correction=pl.Truncate(2.0, log_clamp=None)
    ),
}


# --- A value --------------------------------------------------------------------------------------


@walked("name", SPECS)
def test_round_trip_through_json(name):
    spec = SPECS[name]
    text = json.dumps(spec.to_dict(), allow_nan=False)  # allow_nan=False: real JSON, no Infinity
    back = pl.LossSpec.from_dict(json.loads(text))
    assert back == spec
    assert hash(back) == hash(spec)
    assert json.dumps(back.to_dict()) == text


def test_values_that_differ_are_not_equal():
    specs = set(SPECS.values())
    assert pl.LossSpec() in specs, "the library's defaults are one of them"
    assert pl.LossSpec(trust=pl.Clip(0.2, 0.21)) not in specs
    assert pl.preset("ppo") != pl.preset("dapo")


def test_frozen():
    spec = pl.preset("ppo")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.trust = pl.Clip(0.1, 0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.trust.eps_low = 0.1
    for part in (*RATIOS, *TRUSTS, *KLS, *AGGREGATES, *(c for group in CORRECTIONS for c in group)):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            part.anything = 1


def test_replace_changes_one_slot():
    spec = pl.preset("dapo")
    other = spec.replace(trust=pl.Clip(0.2, 0.28, dual=3.0))
    assert other.trust.dual == 3.0
    assert spec.trust.dual is None, "the original must not change"
    assert other.replace(trust=spec.trust) == spec


def test_pickle():
    for spec in SPECS.values():
        assert pickle.loads(pickle.dumps(spec)) == spec


def test_one_correction_is_a_tuple_of_one():
    part = pl.Truncate(2.0)
    assert (
        pl.LossSpec(correction=part)
        == pl.LossSpec(correction=(part,))
        == pl.LossSpec(correction=[part])
    )
    assert pl.LossSpec(correction=None) == pl.LossSpec(correction=()) == pl.LossSpec()


def test_defaults_of_a_dict_are_the_defaults_of_the_spec():
    assert pl.LossSpec.from_dict({}) == pl.LossSpec()
    assert pl.LossSpec.from_dict({"trust": {"type": "SoftGate"}}) == pl.LossSpec(
        trust=pl.SoftGate()
    )


# --- Needed tensors -------------------------------------------------------------------------------

ENGINE = RolloutProduct()
READS = [
    (pl.LossSpec(), ("old_logp",)),
    (pl.LossSpec(trust=pl.Unbounded("logp")), ()),
    (pl.LossSpec(trust=pl.Unbounded("logp"), ratio=pl.TokenRatio(anchor="rollout")), ()),
    (
        pl.LossSpec(trust=pl.Unbounded("logp"), kl=pl.KL("k3", 0.1, weight="ratio")),
        ("old_logp", "ref_logp"),
    ),
    (pl.LossSpec(ratio=ENGINE), ("old_logp", "rollout_logp")),
    (pl.LossSpec(ratio=ENGINE, trust=pl.Unbounded("logp")), ()),  # nothing uses the ratio
    (
        pl.LossSpec(
            ratio=ENGINE, trust=pl.Unbounded("logp"), kl=WrittenKL("k3", 0.1, ratio_level="token")
        ),
        ("old_logp", "ref_logp"),  # the KL weighs by the token's own ratio, without the engine
    ),
    (
        pl.LossSpec(ratio=ENGINE, trust=pl.Unbounded("logp"), kl=pl.KL("k3", 0.1, weight="ratio")),
        ("old_logp", "rollout_logp", "ref_logp"),
    ),
    (pl.LossSpec(ratio=pl.TokenRatio(anchor="rollout")), ("rollout_logp",)),
    (pl.LossSpec(ratio=pl.SequenceRatio(anchor="current")), ()),
    (
        pl.LossSpec(ratio=pl.TokenRatio(anchor="rollout"), correction=pl.Veto()),
        ("old_logp", "rollout_logp"),
    ),
    (pl.LossSpec(correction=pl.OPSM(0.1, source="rollout")), ("old_logp", "rollout_logp")),
    (pl.LossSpec(correction=pl.OPSM(0.1), ratio=pl.TokenRatio(anchor="current")), ("old_logp",)),
    (pl.LossSpec(kl=pl.KL("k2", 0.1, anchor="rollout")), ("old_logp", "rollout_logp")),
    (
        pl.LossSpec(kl=pl.KL("k2", 0.1), entropy_coef=0.1, aggregate=pl.PromptMean()),
        ("old_logp", "ref_logp", "entropy", "group_ids"),
    ),
]


@walked(("spec", "reads"), READS, ids=lambda x: "+".join(x) if isinstance(x, tuple) else "")
def test_reads(spec, reads):
    assert spec.reads == reads


# --- Errors: each message names the field, its value and the valid values -------------------------

REFUSED = {
    "dual at 1": (
        lambda: pl.Clip(0.2, 0.2, dual=1.0),
        ["Clip.dual", "1.0", "> 1", "None turns it off"],
    ),
    "dual below 1": (lambda: pl.Clip(0.2, 0.2, dual=0.5), ["Clip.dual", "0.5", "> 1"]),
    "negative eps_low": (
        lambda: pl.Clip(-0.1, 0.2),
        ["Clip.eps_low", "-0.1", ">= 0", "distances from 1"],
    ),
    "negative eps_high": (lambda: pl.Clip(0.1, -0.2), ["Clip.eps_high", "-0.2", ">= 0"]),
    "nan eps": (lambda: pl.Clip(nan, 0.2), ["Clip.eps_low", "nan", "finite"]),
    "bool eps": (lambda: pl.Clip(True, 0.2), ["Clip.eps_low", "True", "a number"]),
    "text eps": (lambda: pl.Clip("0.2", 0.2), ["Clip.eps_low", "'0.2'", "a number"]),
    "tensor eps": (lambda: pl.Clip(torch.tensor(0.2), 0.2), ["Clip.eps_low", "a number"]),
    "delta at 1": (lambda: pl.TwoSidedClip(1.0), ["TwoSidedClip.delta", "1.0", "> 1"]),
    "two-sided eps": (lambda: pl.TwoSidedClip(4.0, -1), ["TwoSidedClip.eps_low", "-1"]),
    "negative ratio": (
        lambda: pl.DetachedClip(-0.1, 1.0),
        ["DetachedClip.ratio_min", "-0.1", "not distances"],
    ),
    "zero ratio_max": (lambda: pl.DetachedClip(0.0, 0.0), ["DetachedClip.ratio_max", "0.0", "> 0"]),
    "swapped ratios": (
        lambda: pl.DetachedClip(1.2, 0.8),
        ["ratio_min=1.2", "ratio_max=0.8", "swap"],
    ),
    "unknown outside": (
        lambda: pl.DetachedClip(0.8, 1.2, outside="zeros"),
        ["'zeros'", "did you mean 'zero'"],
    ),
    "one without a band": (
        lambda: pl.DetachedClip(0.8, 1.2, weight="one"),
        ["weight='one'", "outside='clip'", "Unbounded('logp')"],
    ),
    "tau": (lambda: pl.SoftGate(0.0), ["SoftGate.tau_positive", "0.0", "> 0"]),
    "infinite tau": (lambda: pl.SoftGate(1.0, inf), ["SoftGate.tau_negative", "inf", "finite"]),
    "band kind": (
        lambda: pl.ProbabilityBand("js", 0.2, 0.2),
        ["ProbabilityBand.divergence", "'js'", "kl, tv"],
    ),
    "band low": (lambda: pl.ProbabilityBand("tv", -0.2, 0.2), ["ProbabilityBand.low", "-0.2"]),
    "band sides": (
        lambda: pl.ProbabilityBand("tv", 0.2, 0.2, sides="up"),
        ["ProbabilityBand.sides", "'up'", "advantage, both"],
    ),
    "band form": (
        lambda: pl.ProbabilityBand("tv", 0.2, 0.2, form="scores"),
        ["ProbabilityBand.form", "did you mean 'score'"],
    ),
    "band cap": (
        lambda: pl.ProbabilityBand("tv", 0.2, 0.2, cap=0),
        ["ProbabilityBand.cap", "0", "math.inf is no cap"],
    ),
    "geometric": (lambda: pl.GeometricClip(0.4, -0.4), ["GeometricClip.eps_high", "-0.4"]),
    "gamma k": (lambda: pl.GammaWeight(k_positive=-1), ["GammaWeight.k_positive", "-1", ">= 0"]),
    "gamma lambda": (
        lambda: pl.GammaWeight(lambda_negative=0),
        ["GammaWeight.lambda_negative", "0", "> 0"],
    ),
    "beta": (lambda: pl.Quadratic(0.0), ["Quadratic.beta", "0.0", "> 0", "pull"]),
    "tapered": (lambda: pl.TaperedNegative(0), ["TaperedNegative.ratio_max", "0", "> 0"]),
    "unbounded form": (
        lambda: pl.Unbounded("log"),
        ["Unbounded.form", "'log'", "did you mean 'logp'"],
    ),
    "cov fraction": (lambda: pl.CovClip(fraction=0.0), ["CovClip.fraction", "0.0", "> 0"]),
    "cov window": (
        lambda: pl.CovClip(cov_low=5.0, cov_high=1.0),
        ["cov_low=5.0", "cov_high=1.0", "swap"],
    ),
    "cov window nan": (lambda: pl.CovClip(cov_low=nan), ["CovClip.cov_low", "nan"]),
    "cov window text": (lambda: pl.CovClip(cov_high="5"), ["CovClip.cov_high", "'5'"]),
    "seed text": (lambda: pl.CovClip(seed="a"), ["CovClip.seed", "'a'"]),
    "seed float": (lambda: pl.CovClip(seed=1.5), ["CovClip.seed", "1.5", "integer"]),
    "seed negative": (lambda: pl.CovClip(seed=-1), ["CovClip.seed", "-1"]),
    "cov coef": (lambda: pl.CovKL(coef=-1.0), ["CovKL.coef", "-1.0"]),
    "anchor": (
        lambda: pl.TokenRatio(anchor="reference"),
        ["TokenRatio.anchor", "'reference'", "current, old, ref, rollout"],
    ),
    "ratio grad": (
        lambda: pl.SequenceRatio(grad="tokens"),
        ["SequenceRatio.grad", "did you mean 'token'"],
    ),
    "zero log_clamp": (
        lambda: pl.TokenRatio(log_clamp=0),
        ["TokenRatio.log_clamp", "0", "> 0", "pair"],
    ),
    "text log_clamp": (lambda: pl.SegmentRatio(log_clamp="20"), ["SegmentRatio.log_clamp", "'20'"]),
    "swapped log_clamp": (
        lambda: pl.TokenRatio(log_clamp=(3.0, -3.0)),
        ["TokenRatio.log_clamp", "(3.0, -3.0)"],
    ),
    "long log_clamp": (
        lambda: pl.TokenRatio(log_clamp=(1.0, 2.0, 3.0)),
        ["TokenRatio.log_clamp", "(1.0, 2.0, 3.0)"],
    ),
    "nan log_clamp": (
        lambda: pl.SequenceProduct(log_clamp=nan),
        ["SequenceProduct.log_clamp", "nan"],
    ),
    "nan in log_clamp": (
        lambda: pl.SequenceProduct(log_clamp=(None, nan)),
        ["SequenceProduct.log_clamp", "nan"],
    ),
    "truncate": (lambda: pl.Truncate(0.0), ["Truncate.high", "0.0", "> 0", "no truncation"]),
    "truncate low": (lambda: pl.Truncate(2.0, low=-1.0), ["Truncate.low", "-1.0"]),
    "truncate swapped": (lambda: pl.Truncate(2.0, low=3.0), ["low=3.0", "high=2.0", "swap"]),
    "truncate level": (
        lambda: pl.Truncate(2.0, level="sequence"),
        ["Truncate.level", "'sequence'", "geomean, product, token"],
    ),
    "truncate clamp": (lambda: pl.Truncate(2.0, log_clamp=-1), ["Truncate.log_clamp", "-1"]),
    "band swapped": (lambda: pl.Band(5.0, 0.5), ["low=5.0", "high=0.5", "swap"]),
    "mask level": (
        lambda: pl.SequenceMask(0.9, 1.1, level="token"),
        ["SequenceMask.level", "'token'", "geomean, product"],
    ),
    "mask weight": (
        lambda: pl.SequenceMask(0.9, 1.1, weight="seq"),
        ["SequenceMask.weight", "'seq'", "sequence, token"],
    ),
    "divergence": (
        lambda: pl.DivergenceMask("js", 0.1),
        ["DivergenceMask.divergence", "'js'", "kl, tv"],
    ),
    "divergence level": (
        lambda: pl.DivergenceMask("tv", 0.1, level="seq"),
        ["DivergenceMask.level", "'seq'", "sequence, token"],
    ),
    "divergence swapped": (
        lambda: pl.DivergenceMask("tv", 0.1, low=0.2),
        ["low=0.2", "high=0.1", "swap"],
    ),
    "divergence floor": (
        lambda: pl.DivergenceMask("kl", 0.1, floor=0.5),
        ["DivergenceMask.floor", "0.5"],
    ),
    "divergence no floor": (
        lambda: pl.DivergenceMask("kl", 0.1, floor=0.0),
        ["DivergenceMask.floor", "0.0", "> 0"],
    ),
    "divergence weight": (
        lambda: pl.DivergenceMask("kl", 0.1, weight="sequence"),
        ["DivergenceMask.weight", "'sequence'", "token"],
    ),
    "reject estimator": (
        lambda: pl.Reject("k4", high=1.0),
        ["Reject.estimator", "'k4'", "k1, k2, k3"],
    ),
    "reject reduce": (
        lambda: pl.Reject("k1", "avg", high=1.0),
        ["Reject.reduce", "'avg'", "max, mean, sum, token"],
    ),
    "reject no bound": (lambda: pl.Reject("k1"), ["Reject", "low=", "high="]),
    "reject swapped": (
        lambda: pl.Reject("k1", low=1.0, high=-1.0),
        ["low=1.0", "high=-1.0", "swap"],
    ),
    "reject nan": (lambda: pl.Reject("k1", high=nan), ["Reject.high", "nan"]),
    "veto none": (lambda: pl.Veto(low=None), ["Veto", "low=", "high="]),
    "veto zero": (lambda: pl.Veto(low=0.0), ["Veto.low", "0.0", "> 0"]),
    "opsm": (lambda: pl.OPSM(-0.1), ["OPSM.delta", "-0.1"]),
    "opsm source": (lambda: pl.OPSM(0.1, source="ref"), ["OPSM.source", "'ref'", "old, rollout"]),
    "normalise over": (
        lambda: pl.SelfNormalise("batch"),
        ["SelfNormalise.over", "'batch'", "sequences, tokens"],
    ),
    "kl estimator": (lambda: pl.KL("k4", 0.1), ["KL.estimator", "'k4'", "abs, k1, k2, k3"]),
    "kl coef": (lambda: pl.KL("k1", -0.1), ["KL.coef", "-0.1", "kl=None"]),
    "kl grad": (lambda: pl.KL("k1", 0.1, grad="k3"), ["KL.grad", "'k3'", "k2, score, value"]),
    "kl weight": (lambda: pl.KL("k1", 0.1, weight="r"), ["KL.weight", "'r'", "ratio"]),
    "kl clamp": (lambda: pl.KL("k1", 0.1, clamp=0), ["KL.clamp", "0", "> 0"]),
    "kl value_clamp": (lambda: pl.KL("k1", 0.1, value_clamp=-10), ["KL.value_clamp", "-10"]),
    "kl anchor": (
        lambda: pl.KL("k1", 0.1, anchor="current"),
        ["KL.anchor", "'current'", "old, ref, rollout"],
    ),
    "horizon": (lambda: pl.SeqMeanTokenSumNorm(0), ["SeqMeanTokenSumNorm.horizon", "0", "> 0"]),
    "infinite horizon": (lambda: pl.TokenSumNorm(inf), ["TokenSumNorm.horizon", "inf", "finite"]),
    "rejected": (
        lambda: pl.LossSpec(correction=pl.Veto(), rejected="drop"),
        ["LossSpec.rejected", "'drop'", "drop_sequence"],
    ),
    "rejected alone": (
        lambda: pl.LossSpec(rejected="renormalise"),
        ["rejected='renormalise'", "correction", "'keep'"],
    ),
    "entropy nan": (
        lambda: pl.LossSpec(entropy_coef=nan),
        ["LossSpec.entropy_coef", "nan", "finite"],
    ),
    "entropy bool": (
        lambda: pl.LossSpec(entropy_coef=True),
        ["LossSpec.entropy_coef", "True", "a number"],
    ),
    "class": (
        lambda: pl.LossSpec(aggregate=pl.TokenMean),
        ["aggregate=TokenMean", "class", "TokenMean("],
    ),
    "class as correction": (lambda: pl.LossSpec(correction=pl.Veto), ["correction=Veto", "class"]),
    "wrong slot": (
        lambda: pl.LossSpec(trust=pl.TokenMean()),
        ["TokenMean", "'aggregate'", "'trust'"],
    ),
    "kl in correction": (
        lambda: pl.LossSpec(correction=(pl.KL("k1", 0.1),)),
        ["KL", "'kl'", "'correction'"],
    ),
    "name as part": (
        lambda: pl.LossSpec(trust="Clip"),
        ["trust='Clip'", "not a part", "TwoSidedClip"],
    ),
    "none as ratio": (lambda: pl.LossSpec(ratio=None), ["ratio=None", "TokenRatio"]),
    "two weights": (
        lambda: pl.LossSpec(correction=(pl.Truncate(2.0), pl.Band(0.5, 2.0))),
        ["Truncate and Band", "keep one"],
    ),
    "normalise nothing": (
        lambda: pl.LossSpec(correction=pl.SelfNormalise()),
        ["SelfNormalise", "together with Truncate"],
    ),
    "normalise twice": (
        lambda: pl.LossSpec(
            correction=(pl.Truncate(2.0), pl.SelfNormalise(), pl.SelfNormalise("sequences"))
        ),
        ["SelfNormalise", "once"],
    ),
    "gmpo on sequences": (
        lambda: pl.preset("gmpo").replace(ratio=pl.SequenceRatio()),
        ["GeometricClip", "TokenRatio", "SequenceRatio"],
    ),
    "unknown slot": (
        lambda: pl.preset("ppo").replace(trusts=1),
        ["slot", "'trusts'", "did you mean 'trust'", "aggregate"],
    ),
    "one number measured twice": (
        lambda: pl.LossSpec(correction=(pl.MomentBudget(0.1), pl.MomentBudget(0.2))),
        ["moment_bound", "keep one"],
    ),
    "unknown key": (
        lambda: pl.LossSpec.from_dict({"agregate": {}}),
        ["'agregate'", "did you mean 'aggregate'", "entropy_coef"],
    ),
    "unknown type": (
        lambda: pl.LossSpec.from_dict({"trust": {"type": "Clp"}}),
        ["trust type", "'Clp'", "did you mean 'Clip'"],
    ),
    "unhashable type": (
        lambda: pl.LossSpec.from_dict({"trust": {"type": ["Clip"]}}),
        ["trust type", "Clip"],
    ),
    "unknown field": (
        lambda: pl.LossSpec.from_dict({"trust": {"type": "Clip", "eps": 0.2}}),
        ["Clip field", "'eps'", "dual, eps_high, eps_low"],
    ),
    "field of none": (
        lambda: pl.LossSpec.from_dict({"aggregate": {"type": "TokenMean", "n": 3}}),
        ["TokenMean", "'n'", "no fields"],
    ),
    "missing field": (
        lambda: pl.LossSpec.from_dict({"trust": {"type": "Clip", "eps_high": 0.2}}),
        ["Clip", "needs", "eps_low"],
    ),
    "no type": (lambda: pl.LossSpec.from_dict({"kl": {"coef": 0.1}}), ["'kl'", '"type"', "KL"]),
    "type of another slot": (
        lambda: pl.LossSpec.from_dict({"ratio": {"type": "Clip"}}),
        ["ratio type", "'Clip'", "TokenRatio"],
    ),
    "text for a part": (
        lambda: pl.LossSpec.from_dict({"trust": "Clip"}),
        ["'trust'", "mapping", "'Clip'"],
    ),
    "correction not a list": (
        lambda: pl.LossSpec.from_dict({"correction": {"type": "Veto"}}),
        ["correction", "list"],
    ),
    "not a mapping": (lambda: pl.LossSpec.from_dict([1]), ["mapping", "list"]),
    "bad number in data": (
        lambda: pl.LossSpec.from_dict(
            {"trust": {"type": "Clip", "eps_low": "0.2", "eps_high": 0.2}}
        ),
        ["Clip.eps_low", "'0.2'"],
    ),
    "preset": (lambda: pl.preset("dapoo"), ["preset", "'dapoo'", "did you mean 'dapo'", "gspo"]),
}


def test_infinity_in_data_is_a_bound_that_never_binds_or_is_refused():
    """In every number of every part, alone and in all at once: the loss stays finite, and some
    token is kept.
    """
    wrong, refused = {}, set()
    batch = make_batch()
    for (name, spec), word in itertools.product(SPECS.items(), ("inf", "-inf")):
        data = spec.for_run(12).to_dict()
        for slot, part in data.items():
            parts = part if isinstance(part, list) else [part]
            for one in (x for x in parts if isinstance(x, dict)):
                fields = [k for k, x in one.items() if isinstance(x, float) or x == "inf"]
                for changed in [*([k] for k in fields), fields]:
                    number = {**one, **dict.fromkeys(changed, word)}
                    other = [number if x is one else x for x in parts]
                    try:
                        there = {**data, slot: other if isinstance(part, list) else number}
                        infinite = pl.LossSpec.from_dict(there)
                    except pl.SpecError:
                        refused.add((one["type"], *changed))
                        continue
                    out = run(infinite, batch)
                    rejected = out.metrics.get("rejected_fraction", 0)
                    if not out.loss.isfinite() or rejected == 1:
                        wrong[f"{name}, {one}, {changed} = {word}"] = out.loss.item(), rejected
    assert not wrong
    assert ("Truncate", "low") in refused


def nested(depth):
    part = {"type": "Clip", "eps_low": 0.2, "eps_high": 0.2}
    for _ in range(depth):
        part = {"type": "BySign", "positive": part, "negative": {"type": "Clip", "eps_low": 0.2}}
    return part


def test_data_that_is_nested_too_deeply_is_refused():
    assert pl.LossSpec.from_dict({"trust": nested(3)}).trust.positive.positive.positive
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"type": deep}
    lists: list[Any] = []
    for _ in range(100_000):
        lists = [lists]
    for data in (
        {"trust": nested(100)},
        {"trust": nested(20_000)},
        {"kl": lists},
        {"correction": lists},
        {"ratio": {"type": "TokenRatio", "log_clamp": lists}},
        {"rejected": deep},
        deep,
    ):
        with pytest.raises(pl.SpecError, match="nested too deeply"):
            pl.LossSpec.from_dict(data)


@walked("name", REFUSED)
def test_refused(name):
    make, words = REFUSED[name]
    with pytest.raises(pl.SpecError) as error:
        make()
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"the message does not say {missing}: {error.value}"


PARTS = (*RATIOS, *TRUSTS, *(c for cs in CORRECTIONS for c in cs), *KLS, *AGGREGATES)
FIELDS = {
    f"{type(part).__name__}.{field.name}": (part, field.name)
    for part in PARTS
    if dataclasses.is_dataclass(part)
    for field in dataclasses.fields(part)
    if not dataclasses.is_dataclass(getattr(part, field.name))
}
# The name of any tensor.
LEGAL = {("Divergence.weight", "nonsense")}


@walked("name", FIELDS)
def test_every_field_of_every_part_is_checked(name):
    """No number is NaN and no word is nonsense: a field without a check would take them."""
    part, field = FIELDS[name]
    for value in (nan, "nonsense", True, (1, 2, 3)):
        if (name, value) in LEGAL:
            continue
        with pytest.raises(pl.SpecError, match=rf"{type(part).__name__}\b.*\b{field}\b"):
            dataclasses.replace(part, **{field: value})


def test_errors_are_value_errors():
    assert issubclass(pl.SpecError, pl.PolicyLossError)
    assert issubclass(pl.InputError, pl.PolicyLossError)
    assert issubclass(pl.PolicyLossError, ValueError)


# --- Callables in slots ---------------------------------------------------------------------------


def halved(t: pl.Tokens) -> torch.Tensor:
    return -0.5 * t.advantages * t.ratio


def drop_first(t: pl.Tokens) -> pl.Corrected:
    keep = torch.ones_like(t.mask)
    keep[:, 0] = False
    return pl.Corrected(keep=keep)


CALLABLES = {
    # At logp = −1, old = −1 − ln 2 (ratio 2) and A = (1, 1):
    # the usual loss is −2 under Unbounded and TokenMean.
    "trust": (halved, -1.0),
    "ratio": (lambda t: t.log_ratio_to("old") * 2, -4.0),  # 2² = 4
    "correction": (drop_first, -1.0),  # one of two tokens left, both counted
    "kl": (lambda t: t.logp**2, -1.0),  # −2 + 1·(−1)²
    "aggregate": (lambda t: torch.full((), 3.0, dtype=t.dtype), -12.0),  # 3·(−2 − 2)
}


@walked("slot", CALLABLES)
def test_a_callable_fills_a_slot_but_is_no_data(slot):
    part, loss = CALLABLES[slot]
    spec = pl.LossSpec(trust=pl.Unbounded("ratio")).replace(**{slot: part})
    logp = torch.full((1, 2), -1.0, dtype=torch.float64)
    old, ones = logp - torch.tensor(2.0, dtype=torch.float64).log(), torch.ones_like(logp)
    out = pl.policy_loss(spec, logp, old, ones, ones, ref_logp=logp)
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    with pytest.raises(pl.SpecError, match=f"'{slot}' slot holds a callable"):
        spec.to_dict()


def test_a_callable_surrogate_reports_its_bounds():
    def capped(t: pl.Tokens) -> pl.Surrogate:
        return pl.Surrogate(-t.advantages * t.ratio.clamp(max=1.5), upper=t.ratio > 1.5)

    logp = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    out = pl.policy_loss(
        pl.LossSpec(trust=capped),
        logp,
        logp - torch.tensor([[0.5, 0.0]]),
        torch.ones(1),
        torch.ones(1, 2),
    )
    assert out.metrics.compute()["clip_fraction"] == 0.5


# --- A function as a loss -------------------------------------------------------------------------


def plain_gradient(t):
    return -t.advantages * t.ratio


def test_a_function_is_a_loss_everywhere():
    """Whatever takes a spec takes a function of Tokens, and a trust part, in its place."""
    batch = make_batch().map(lambda x: x.float())
    hidden, weight = torch.randn(*batch.mask.shape, 4), torch.randn(11, 4)
    ids = torch.zeros(batch.mask.shape, dtype=torch.int64)
    rest = (batch.old_logp, batch.advantages, batch.mask)

    def accumulated(loss):
        (micro,) = pl.accumulate(loss, [{k: x for k, x in batch.kwargs.items() if k != "logp"}])
        return micro.loss(batch.logp)

    calls = {
        "policy_loss": lambda loss: pl.policy_loss(loss, **batch.kwargs).loss,
        "compiled": lambda loss: pl.compiled_loss(loss)(**batch.kwargs).loss,
        "in a graph": lambda loss: torch.compile(
            lambda x: pl.policy_loss(loss, x, *rest).loss, fullgraph=True, backend="eager"
        )(batch.logp),
        "measure": lambda loss: pl.measure(loss, **batch.kwargs).tokens,
        "accumulate": accumulated,
        "linear_policy_loss": lambda loss: (
            pl.linear_policy_loss(loss, hidden, weight, ids, *rest).loss
        ),
        "explain": lambda loss: str(pl.explain(loss)),
        "diff": lambda loss: str(pl.diff("ppo", loss)).replace("a LossSpec", ""),
        "check_loss": lambda loss: str(pl.check_loss(loss)),
    }
    if torch.__version__ < (2, 13):  # its compiler cannot make a LossSpec, see docs/versions.md
        del calls["in a graph"]
    wrong = {}
    for name, function in calls.items():
        for part in (plain_gradient, pl.Clip(0.1)):
            got, expected = function(part), function(pl.LossSpec(trust=part))
            if got != expected:
                wrong[name, part] = got, expected
        for other, words in (
            (3, r"must be a LossSpec.*pl\.LossSpec\(trust=f\)"),
            (pl.Clip, r"must be a LossSpec.*pl\.LossSpec\(trust=f\)"),
            (pl.KL("k3", 0.1), r"KL belongs in the 'kl' slot.*pl\.LossSpec\(kl=KL\(…\)\)"),
        ):
            if name != "in a graph":  # Dynamo wraps errors raised inside
                with pytest.raises(pl.errors.PolicyLossError, match=words):
                    function(other)
    assert not wrong
