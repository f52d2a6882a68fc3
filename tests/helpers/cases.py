"""Shared material of the property tests: batches in both layouts, a part of every kind for every
slot, and the comparisons.

A test that should hold for every loss takes its specs from here, and `test_invariance` checks that
the lists leave no part out.
Legend: B rows (sequences), T columns, N packed tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import policyloss as pl
from policyloss.check.batch import TOKEN_TENSORS as TOKEN_TENSORS  # the tests get both from here
from policyloss.check.batch import Batch as Batch

RATIOS = (
    pl.TokenRatio(),
    pl.TokenRatio(anchor="rollout", log_clamp=0.6),
    pl.TokenRatio(anchor="current"),
    pl.SequenceRatio(),
    pl.SequenceRatio(grad="token", anchor="rollout"),
    pl.SequenceProduct(log_clamp=(-1.5, None)),
    pl.TokenRatio(anchor="teacher"),
    pl.SegmentRatio(),
    pl.MixedRatio("arithmetic"),
    pl.MixedRatio("geometric", anchor="ref", log_clamp=0.4),
)
TRUSTS = (
    pl.Clip(0.2, 0.28, dual=1.4),
    pl.TwoSidedClip(1.5),
    pl.DetachedClip(0.8, 1.2),
    pl.DetachedClip(0.8, 1.2, outside="zero_by_sign"),
    pl.DetachedClip(0.8, 1.2, outside="zero"),
    pl.DetachedClip(0.8, 1.2, outside="zero_by_sign", weight="one"),
    pl.DetachedClip(0.8, 1.2, outside="zero", weight="one"),
    pl.SoftGate(1.0, 1.05),
    pl.ProbabilityBand("tv", 0.05, 0.08),
    pl.ProbabilityBand("kl", 0.02, 0.03, sides="both", form="ratio"),
    pl.GeometricClip(0.2, 0.3),
    pl.FutureKL(0.2, 0.28, half_life=2.0, weight_min=0.7, weight_max=1.3, safe_ratio=1.1),
    pl.GammaWeight(),
    pl.CovClip(fraction=0.2, cov_low=-1.0, cov_high=5.0, seed=3),
    pl.CovKL(fraction=0.2),
    pl.Quadratic(0.3),
    pl.Regression(0.7),
    pl.TaperedNegative(),
    pl.Unbounded("ratio"),
    pl.Unbounded("logp"),
    pl.Unbounded("current"),
    pl.Unbounded("probability"),
    pl.Unbounded("uncertainty"),
    pl.BySign(pl.Unbounded("current"), pl.Clip(0.2, 0.28, dual=1.4)),
    pl.BySign(pl.CovKL(fraction=0.2), pl.DetachedClip(0.8, 1.2, outside="zero")),
)
CORRECTIONS = (
    (pl.Truncate(1.1),),
    (pl.Truncate(1.05, low=0.95, level="geomean"),),
    (pl.Truncate(2.0, level="product"),),
    (pl.Truncate(1.1, level="turn"),),
    (pl.Band(0.8, 1.25),),
    (pl.Band(0.7, 1.4, level="product"),),
    (pl.SequenceMask(0.95, 1.05),),
    (pl.SequenceMask(0.8, 1.3, level="product", weight="sequence"),),
    (pl.SequenceMask(0.9, 1.1, weight=None),),
    (pl.DivergenceMask("tv", 0.05),),
    (pl.DivergenceMask("kl", 0.02, level="sequence"),),
    (pl.DivergenceMask("kl", 0.02, direction="both"),),
    (pl.DivergenceMask("kl", 0.03, low=-1.0, weight=None),),
    (pl.Reject("k1", low=-0.2, high=0.2),),
    (pl.Reject("k2", "sum", high=0.1),),
    (pl.Reject("k3", "mean", high=0.02),),
    (pl.Reject("k1", "max", high=0.25),),
    (pl.Veto(0.75, 1.5),),
    (pl.MomentBudget(0.02),),
    (pl.MomentBudget(0.02), pl.Truncate(1.1), pl.SelfNormalise()),
    (pl.OPSM(0.01),),
    (pl.OPSM(0.01, source="rollout"),),
    (pl.Stale(2),),
    (pl.Stale(math.inf, 0.75),),
    (pl.TruncateRatio(1.2, 0.9),),
    (pl.Stale(3, 0.875), pl.Truncate(1.1), pl.SelfNormalise()),
    (pl.Truncate(1.1), pl.SelfNormalise()),
    (pl.Band(0.8, 1.25), pl.Veto(0.7), pl.SelfNormalise("sequences")),
)
KLS = (
    pl.KL("k1", 0.1),
    pl.KL("abs", 0.1),
    pl.KL("k2", 0.1),
    pl.KL("k3", 0.1),
    pl.KL("k1", 0.1, grad="k2"),
    pl.KL("k3", 0.1, grad="score"),
    pl.KL("k3", 0.1, weight="ratio"),
    pl.KL("k3", 0.1, clamp=0.4, value_clamp=0.03, anchor="old"),
    pl.KL("k2", 0.1, anchor="rollout"),
    pl.KL("k1", 0.1, grad="k2", weight="detached_ratio", weight_max=1.1, anchor="teacher"),
    pl.Divergence("reverse", 0.2),
    pl.Divergence("jsd", 0.2, weight="ratio", clamp=(None, 0.8)),
    (pl.KL("k3", 0.1), pl.Divergence("forward", 0.2, clamp=0.9)),
)
AGGREGATES = (
    pl.TokenMean(),
    pl.SeqMeanTokenMean(),
    pl.SeqMeanTokenSum(),
    pl.SeqMeanTokenSumNorm(100),
    pl.TokenSum(),
    pl.TokenSumNorm(50),
    pl.PromptMean(),
    pl.TurnMean(),
    pl.WeightMean(),
    pl.LengthWeighted(),
    pl.LocalTokenMean(),
    pl.LocalSeqMeanTokenMean(),
)
# The parts of `KLS`, which holds pairs too.
PULLS = tuple(part for parts in KLS for part in (parts if isinstance(parts, tuple) else (parts,)))
LOCAL = (pl.LocalTokenMean, pl.LocalSeqMeanTokenMean)
REJECTED = ("keep", "renormalise", "drop_sequence")


def label(part: Any) -> str:
    """A short name for a part or a tuple of parts, to find a failing case by:
    `Clip(0.2,0.28,1.4)`.
    """
    if isinstance(part, tuple):
        return "+".join(label(p) for p in part) or "none"
    if not dataclasses.is_dataclass(part):
        return str(part)
    defaults = {f.name: f.default for f in dataclasses.fields(part)}
    values = [
        str(getattr(part, name)) for name in defaults if getattr(part, name) != defaults[name]
    ]
    return f"{type(part).__name__}({','.join(values)})"


def swapped(spec: pl.LossSpec, **slots: Any) -> pl.LossSpec | None:
    """`spec.replace(**slots)`, or None where the parts do not fit together."""
    try:
        return spec.replace(**slots)
    except pl.SpecError:
        return None


def neighbours(spec: pl.LossSpec) -> dict[str, pl.LossSpec]:
    """Every loss that differs from `spec` in one slot, by its new part."""
    choices: dict[str, Iterable[Any]] = {
        "ratio": RATIOS,
        "trust": TRUSTS,
        "correction": (
            (),
            *{tuple(map(type, c)): c for c in CORRECTIONS}.values(),
        ),  # one of each kind
        "kl": (None, *KLS),
        "entropy_coef": (0.0, 0.01),
        "aggregate": [
            a for a in AGGREGATES if not isinstance(a, LOCAL)
        ],  # in one call they are the means they are local to
        "rejected": REJECTED,
    }
    found = {}
    for slot, parts in choices.items():
        for part in parts:
            other = swapped(spec, **{slot: part})
            if other is not None and other != spec:
                found[f"{slot}={label(part)}"] = other
    return found


def unique(groups: dict[str, dict[str, pl.LossSpec]]) -> dict[str, dict[str, pl.LossSpec]]:
    """The same groups of specs, each spec kept only where it is met first."""
    seen: set[pl.LossSpec] = set()
    kept: dict[str, dict[str, pl.LossSpec]] = {}
    for group, specs in groups.items():
        fresh = {name: s for name, s in specs.items() if s not in seen}
        seen.update(fresh.values())
        kept[group] = fresh
    return kept


# Those that divide by a length of the user's run, by one that no batch here has.
PRESETS = {name: pl.preset(name).for_run(12) for name in pl.presets()}
NEIGHBOURS = unique({name: neighbours(spec) for name, spec in PRESETS.items()})
_FULL = pl.LossSpec(trust=pl.Clip(0.2, 0.28, dual=1.4), kl=pl.KL("k3", 0.1), entropy_coef=0.01)
_BASES = {
    "token": _FULL,
    "sequence": _FULL.replace(ratio=pl.SequenceRatio()),
    "turn": _FULL.replace(ratio=pl.SegmentRatio()),
}
BY_AGGREGATE = {
    f"{b}:{label(a)}": spec.replace(aggregate=a) for b, spec in _BASES.items() for a in AGGREGATES
}
BY_CORRECTION = {
    f"{label(c)}:{rejected}": _FULL.replace(
        correction=c, rejected=rejected, aggregate=pl.SeqMeanTokenMean()
    )
    for c in CORRECTIONS
    for rejected in REJECTED
}
# Every preset, every aggregation (under a token, a sequence and a turn ratio), every correction
# under every rejection mode.
SPECS = {**PRESETS, **BY_AGGREGATE, **BY_CORRECTION}
# Streams that overlap, that share no token, and that need a measured step; one mixture of single
# tokens, one with sequences, one with a divergence.
_CROSS_ENTROPY = pl.LossSpec(trust=pl.Unbounded("logp"))
MIXTURES = {
    "tokens": pl.Mixture(
        {"rl": _FULL, "ce": pl.Stream(_CROSS_ENTROPY, 0.3, mask="some", advantage=1.0)}
    ),
    "sequences": pl.Mixture(
        {
            "rl": pl.Stream("gspo", 0.8, mask="others"),
            "dft": pl.Stream(
                _CROSS_ENTROPY.replace(
                    trust=pl.Unbounded("probability"), aggregate=pl.SeqMeanTokenMean()
                ),
                0.2,
                mask="some",
                advantage=1.0,
            ),
        }
    ),
    "measured": pl.Mixture(
        {
            "rl": BY_CORRECTION["Truncate(1.1)+SelfNormalise():renormalise"].replace(
                entropy_coef=0.0  # in `Result` its gradient shares a leaf with the divergence
            ),
            "by_weight": pl.Stream(pl.LossSpec(aggregate=pl.WeightMean()), 0.5, mask="some"),
            "kl": pl.Stream("gkd", 0.4, mask="others", advantage=0.0),
        }
    ),
}
NAMED = {**PRESETS, **MIXTURES}
LOSSES = {**SPECS, **MIXTURES}


def make_batch(
    seed: int = 0,
    rows: int = 7,
    width: int = 8,
    dtype: torch.dtype = torch.float64,
    spread: float = 0.3,
) -> Batch:
    """A random batch with everything that goes wrong in it.

    One row has no tokens and one has tokens but none to train on (if there are four rows or more);
    masks have holes (turns); lengths are uneven; advantages differ within a sequence; in row 0 the
    two engines agree to 1e-4, elsewhere they do not; groups interleave, their ids are not 0, 1, 2,
    and one has nothing to train on.
    """
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=g, dtype=torch.float64)

    lengths = torch.randint(2, width + 1, (rows,), generator=g)
    lengths[0] = width
    mask = torch.rand(rows, width, generator=g) < 0.75
    mask[:, 1] = True
    if rows >= 4:
        lengths[2] = 0
        mask[3] = False
    mask &= torch.arange(width) < lengths[:, None]
    logp = -0.05 - 2.5 * torch.rand(rows, width, generator=g, dtype=torch.float64)
    old = (logp + noise(spread)).clamp(max=-0.01)
    mismatch = noise(0.2)
    mismatch[0] *= 5e-4
    rollout = (old + mismatch).clamp(max=-0.01)
    ref = (old + noise(spread)).clamp(max=-0.01)
    entropy = 2 * torch.rand(rows, width, generator=g, dtype=torch.float64)
    groups = torch.tensor([70, 11, 70, 99, 11, -5, 42])[torch.arange(rows) % 7]
    teacher = 0.5 * (ref + logp) - 0.1
    advantages = 1.5 * noise(1.0)
    divergence = torch.rand(rows, width, generator=g, dtype=torch.float64)
    weights = 2 * torch.rand(rows, width, generator=g, dtype=torch.float64)
    tokens = (logp, old, rollout, ref, teacher, entropy, divergence, advantages, weights)
    tensors = [x.to(dtype) for x in tokens]
    ages = torch.randint(0, 5, (rows, width), generator=g)
    return Batch(*tensors, mask, groups, lengths, width, ages=ages)


def unweighted(batch: Batch) -> Batch:
    """The batch with the weight 1 at every token, for formulas without weights."""
    return dataclasses.replace(batch, weights=torch.ones_like(batch.weights))


class Result(NamedTuple):
    """The result of a call: the loss, its gradients as `[B, T]`, the metrics as records and as
    numbers.

    dentropy: the gradient by the entropy and four times that by the divergence (see
    `with_divergence`), so that a test follows both.
    """

    loss: Tensor
    dlogp: Tensor
    dentropy: Tensor
    records: pl.Metrics

    @property
    def metrics(self) -> dict[str, float]:
        return self.records.compute()


def with_divergence(batch: Batch, entropy: Tensor) -> Tensor:
    """The batch's divergence, with four times the gradient of `entropy`: one leaf carries both,
    and a power of two rounds nothing.
    """
    return batch.divergence.detach() + 4 * (entropy - entropy.detach())


def with_streams(spec: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with the masks that the streams of a mixture read."""
    if not isinstance(spec, pl.Mixture):
        return arguments
    some = arguments["weights"].reshape(arguments["mask"].shape) > 1
    return {**arguments, "extras": {"some": some, "others": ~some}}


def run(spec: Any, batch: Batch, totals: Any = None, **kwargs: Any) -> Result:
    """`policy_loss` and its gradients with respect to logp
    and entropy (0 where the spec reads no entropy).
    """
    logp, entropy = (x.detach().clone().requires_grad_() for x in (batch.logp, batch.entropy))
    carried = {"logp": logp, "entropy": entropy, "divergence": with_divergence(batch, entropy)}
    arguments = {**batch.kwargs, **carried, "totals": totals, **kwargs}
    out = pl.policy_loss(spec, **with_streams(spec, arguments))
    dlogp, dentropy = torch.autograd.grad(out.loss, (logp, entropy), allow_unused=True)
    assert dlogp is not None, "the loss is not connected to logp"
    dentropy = torch.zeros_like(entropy) if dentropy is None else dentropy
    return Result(out.loss.detach(), batch.as_rows(dlogp), batch.as_rows(dentropy), out.metrics)


def step_totals(spec: Any, batch: Batch, **kwargs: Any) -> pl.Totals:
    """The totals of the whole step, counted or measured as the spec needs."""
    if spec.needs_statistics or isinstance(spec, pl.Mixture):
        return pl.measure(spec, **with_streams(spec, batch.kwargs), **kwargs)
    return pl.Totals.count(batch.mask, **layout_of(batch), **kwargs)


def layout_of(batch: Batch) -> dict[str, Any]:
    """The arguments of `Totals.count`, `value_loss` and `aggregate_tokens` that belong to the
    layout.
    """
    return {name: batch.kwargs[name] for name in ("cu_seqlens", "group_ids", "weights")}


def with_turns(batch: Batch) -> Batch:
    """The batch with turn_ids: two tokens of the mask to a turn, whatever lies between them, the
    ids not in order; −1 where the mask is False.
    """
    turn = 7 - batch.mask.cumsum(-1).add(1).div(2, rounding_mode="floor")
    return dataclasses.replace(batch, turn_ids=torch.where(batch.mask, turn, -1))


def assert_same(actual: Any, expected: Any, tol: float = 1e-12, what: str = "result") -> None:
    """Equal tensors, or dicts of numbers: bit for bit if `tol` is 0, else to `tol` relative or
    absolute. NaN equals NaN.
    """
    if not isinstance(expected, dict):
        torch.testing.assert_close(
            actual, expected, rtol=tol, atol=tol, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )
        return
    assert actual.keys() == expected.keys(), (
        f"{what}: {sorted(actual.keys() ^ expected.keys())} on one side only"
    )
    for name, e in expected.items():
        a = actual[name]
        same = a == e or (math.isnan(a) and math.isnan(e)) or abs(a - e) <= tol * max(1.0, abs(e))
        assert same, f"{what} {name}: {a!r} is not {e!r}"


def assert_same_result(actual: Result, expected: Result, tol: float = 1e-12) -> None:
    """Loss, both gradients and every metric agree."""
    assert_same(actual.loss, expected.loss, tol, "loss")
    assert_same(actual.dlogp, expected.dlogp, tol, "gradient")
    assert_same(actual.dentropy, expected.dentropy, tol, "entropy gradient")
    assert_same(actual.metrics, expected.metrics, tol, "metric")
