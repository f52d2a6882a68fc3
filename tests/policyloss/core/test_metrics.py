"""Metrics against the formulas as one would write them in plain Python,
and merging that gives the figure of the whole.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp, inf, isnan, nan
from typing import Any

import pytest
import torch
from docs.metric_formulas import FORMULAS
from walk import walked

import policyloss as pl
from cases import TOKEN_TENSORS, Batch, assert_same, make_batch, run, step_totals
from policyloss.functional import collectives
from policyloss.metrics import RecordPlaces
from policyloss.records import KINDS, EffectiveSampleSize, ExplainedVariance, Max, Min, Sum

CLIP = pl.Clip(0.05, 0.08, dual=1.2)
FULL = pl.LossSpec(
    ratio=pl.TokenRatio(log_clamp=0.3),
    trust=CLIP,
    correction=(pl.Truncate(1.05), pl.Reject("k2", high=0.03), pl.Veto(0.8)),
    kl=pl.KL("k3", 0.1, weight="ratio"),
    entropy_coef=0.01,
)


# --- Each formula, token by token -----------------------------------------------------------------


def tokens_of(batch: Batch) -> list[dict[str, Any]]:
    """The valid tokens as plain Python numbers, each with the row it came from."""
    names = [*(name for name in TOKEN_TENSORS if name != "teacher_logp"), "ages"]
    found = []
    for i, row in enumerate(batch.mask.tolist()):
        found += [
            {"row": i, **{n: getattr(batch, n)[i, j].item() for n in names}}
            for j, valid in enumerate(row)
            if valid
        ]
    return found


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def naive(batch: Batch) -> dict[str, float]:
    """Every metric of `FULL`, written from its formula."""
    tokens = tokens_of(batch)
    vetoed = {t["row"] for t in tokens if exp(t["old_logp"] - t["rollout_logp"]) < 0.8}
    for t in tokens:
        d = t["old_logp"] - t["rollout_logp"]
        t["lr"] = t["logp"] - t["old_logp"]
        t["ratio"] = exp(max(-0.3, min(0.3, t["lr"])))
        t["reject"], t["veto"] = d * d / 2 > 0.03, t["row"] in vetoed
        t["kept"] = not (t["reject"] or t["veto"])
        t["w"] = min(exp(d), 1.05) if t["kept"] else 0.0
        a, r = t["advantages"], t["ratio"]
        t["upper"], t["lower"], t["dual"] = (
            a > 0 and r > 1.08,
            a < 0 and r < 0.95,
            a < 0 and r > 1.2,
        )
        surrogate = max(-a * r, -a * max(0.95, min(1.08, r)))
        surrogate = min(surrogate, -a * 1.2) if a < 0 else surrogate
        k = t["ref_logp"] - t["logp"]
        t["kl"] = r * (exp(k) - k - 1)
        t["loss"] = t["w"] * surrogate + 0.1 * t["kl"] - 0.01 * t["entropy"]
        t["loss"] *= t["weights"]
    weights, weight_sum = [t["w"] for t in tokens], sum(t["w"] for t in tokens)
    mismatch = [t["old_logp"] - t["rollout_logp"] for t in tokens]
    return {
        "loss": mean([t["loss"] for t in tokens]),
        "tokens": len(tokens),
        "advantage_mean": mean([t["advantages"] for t in tokens]),
        "clip_fraction": mean([t["upper"] or t["lower"] or t["dual"] for t in tokens]),
        "clip_fraction_upper": mean([t["upper"] for t in tokens]),
        "clip_fraction_lower": mean([t["lower"] for t in tokens]),
        "clip_fraction_dual": mean([t["dual"] for t in tokens]),
        "ratio_mean": mean([exp(t["lr"]) for t in tokens]),
        "ratio_max": max(exp(t["lr"]) for t in tokens),
        "ratio_min": min(exp(t["lr"]) for t in tokens),
        "clamped_tokens": sum(abs(t["lr"]) > 0.3 for t in tokens),
        "nonfinite_tokens": 0,
        "positive_logp_tokens": sum(
            max(t["logp"], t["old_logp"], t["rollout_logp"], t["ref_logp"]) > 0.1 for t in tokens
        ),
        "zero_logp_tokens": 0,
        "beyond_totals": 0,
        "kl_old_k1": mean([-t["lr"] for t in tokens]),
        "kl_old_k3": mean([exp(t["lr"]) - 1 - t["lr"] for t in tokens]),
        "kl_rollout_k1": mean([-d for d in mismatch]),
        "kl_rollout_k3": mean([exp(d) - 1 - d for d in mismatch]),
        "rollout_logp_difference_max": max(abs(d) for d in mismatch),
        "age_mean": mean([t["ages"] for t in tokens]),
        "age_max": max(t["ages"] for t in tokens),
        "correction_weight_mean": weight_sum / len(tokens),
        "correction_weight_max": max(t["w"] for t in tokens if t["kept"]),
        "effective_sample_size": weight_sum**2 / (len(tokens) * sum(w * w for w in weights)),
        "rejected_fraction": mean([not t["kept"] for t in tokens]),
        "rejected_fraction/Reject": mean([t["reject"] for t in tokens]),
        "rejected_fraction/Veto": mean([t["veto"] for t in tokens]),
        "kl_ref": mean([t["kl"] for t in tokens]),
        "entropy": mean([t["entropy"] for t in tokens]),
        "divergence": mean([t["divergence"] for t in tokens]),
    }


@walked("seed", range(4))
def test_every_metric_is_its_formula(seed):
    batch = make_batch(seed=seed, rows=9, width=12)
    expected = naive(batch)
    for name in (
        "clip_fraction_upper",
        "clip_fraction_lower",
        "clip_fraction_dual",
        "clamped_tokens",
        "rejected_fraction/Veto",
    ):
        assert expected[name] > 0, f"{name} never happens in this batch"
    assert_same(run(FULL, batch).metrics, expected)
    assert_same(run(FULL, batch.packed()).metrics, expected)


def test_every_formula_is_a_metric():
    documented = {name.partition("<")[0] for name in FORMULAS}
    reported = {
        name.partition("/")[0] + "/" if "/" in name else name for name in naive(make_batch())
    }
    reported |= set(run(pl.LossSpec(trust=pl.CovClip()), make_batch()).metrics)
    on_a_device = (
        make_batch().packed().map(lambda x: x.to("meta"), *make_batch().token_shaped, "cu_seqlens")
    )
    layout = {"cu_seqlens": on_a_device.cu_seqlens, "weights": on_a_device.weights}
    layout |= {"turn_ids": on_a_device.mask.long(), "ages": on_a_device.ages}
    tensors = (
        on_a_device.logp,
        on_a_device.old_logp,
        on_a_device.advantages,
        on_a_device.mask.long(),
    )
    # What could not be checked at once.
    reported |= set(pl.policy_loss(pl.LossSpec(), *tensors, **layout).metrics)
    assert reported == documented
    assert all(FORMULAS.values())


def test_metrics_follow_the_given_tensors():
    """A metric is there exactly when its tensors are: nothing is reported that was not measured."""
    batch = make_batch()
    spec = pl.preset("reinforce")
    bare = pl.policy_loss(spec, batch.logp, None, batch.advantages, batch.mask).metrics
    assert set(bare) == {
        "loss",
        "tokens",
        "advantage_mean",
        "nonfinite_tokens",
        "positive_logp_tokens",
        "zero_logp_tokens",
        "beyond_totals",
    }
    drift = {"kl_old_k1", "kl_old_k3", "ratio_mean", "ratio_max", "ratio_min", "clamped_tokens"}
    with_old = pl.policy_loss(
        spec, batch.logp, batch.old_logp, batch.advantages, batch.mask
    ).metrics
    assert set(with_old) - set(bare) == drift
    arguments = (batch.logp, batch.old_logp, batch.advantages, batch.mask)
    with_rollout = pl.policy_loss(
        spec, *arguments, rollout_logp=batch.rollout_logp, entropy=batch.entropy
    ).metrics
    mismatch = {"kl_rollout_k1", "kl_rollout_k3", "rollout_logp_difference_max", "entropy"}
    assert set(with_rollout) - set(with_old) == mismatch


def test_clip_fractions_of_other_trust_regions():
    """Flags against their definitions: the two sides of the ratio for CISPO,
    the direction of the advantage for DPPO, …
    """
    batch = make_batch(seed=3, spread=0.6)
    m, a = batch.mask, batch.advantages
    r = (batch.logp - batch.old_logp).exp()
    moved = batch.logp.exp() - batch.old_logp.exp()
    left = ((a > 0) & (moved > 0.1)) | ((a <= 0) & (moved < -0.1))
    cases = {
        pl.DetachedClip(0.8, 1.3): (r > 1.3, r < 0.8),
        pl.TwoSidedClip(1.5, 0.2, 0.3): (
            (a > 0) & (r > 1.3),
            (a < 0) & (r < 0.8),
            (a < 0) & (r > 1.5),
        ),
        pl.TwoSidedClip(1.2, 0.2, 0.3): (
            (a > 0) & (r > 1.2),
            (a < 0) & (r < 0.8),
            (a < 0) & (r > 1.3),
        ),
        pl.ProbabilityBand("tv", 0.1, 0.1): (left & (a > 0), left & (a <= 0)),
        pl.GeometricClip(0.1, 0.2): ((a > 0) & (r.log() > 0.2), (a < 0) & (r.log() < -0.1)),
        pl.TaperedNegative(1.0): ((a <= 0) & (r > 1.0),),
        pl.BySign(pl.DetachedClip(0.8, 1.3), pl.Clip(0.1, 0.2, dual=1.5)): (
            (a > 0) & (r > 1.3),
            (a > 0) & (r < 0.8) | (a < 0) & (r < 0.9),
            (a < 0) & (r > 1.5),
        ),
    }
    for trust, flags in cases.items():
        metrics = run(pl.LossSpec(trust=trust), batch).metrics
        for name, flag in zip(("upper", "lower", "dual"), flags, strict=False):
            share = (flag & m).sum().item() / m.sum().item()
            assert 0 < share < 1, f"{trust}: {name} is never or always true"
            assert metrics[f"clip_fraction_{name}"] == pytest.approx(share, rel=1e-12), (
                f"{trust} {name}"
            )


def test_a_token_bound_twice_is_counted_once():
    def both(t: pl.Tokens) -> pl.Surrogate:
        return pl.Surrogate(
            -t.advantages * t.ratio, upper=t.ratio > 1, lower=t.ratio > 1, dual=t.ratio > 1
        )

    batch = make_batch()
    share = (batch.mask & (batch.logp > batch.old_logp)).sum().item() / batch.mask.sum().item()
    assert run(pl.LossSpec(trust=both), batch).metrics["clip_fraction"] == pytest.approx(
        share, rel=1e-12
    )


def test_metrics_after_rejection_count_the_survivors():
    """Renormalised: tokens, ratios and KLs are the survivors'; mismatch, weights and rejections are
    those of the whole batch.
    """
    batch = make_batch(seed=2, rows=9, width=12)
    spec = FULL.replace(rejected="renormalise")
    kept, whole = run(spec, batch).metrics, run(FULL, batch).metrics
    survivors = tokens_of(batch)
    vetoed = {t["row"] for t in survivors if exp(t["old_logp"] - t["rollout_logp"]) < 0.8}
    survivors = [
        t
        for t in survivors
        if t["row"] not in vetoed and (t["old_logp"] - t["rollout_logp"]) ** 2 / 2 <= 0.03
    ]
    assert 0 < len(survivors) < whole["tokens"]
    assert kept["tokens"] == len(survivors)
    assert kept["ratio_mean"] == pytest.approx(
        mean([exp(t["logp"] - t["old_logp"]) for t in survivors]), rel=1e-12
    )
    assert kept["entropy"] == pytest.approx(mean([t["entropy"] for t in survivors]), rel=1e-12)
    for name in (
        "rejected_fraction",
        "kl_rollout_k3",
        "correction_weight_mean",
        "effective_sample_size",
    ):
        assert kept[name] == whole[name], f"{name} describes the batch before rejection"


# --- Merging --------------------------------------------------------------------------------------


def test_uneven_micro_batches_merge_to_the_whole():
    batch = make_batch(seed=6, rows=9, width=12)
    totals = step_totals(FULL, batch)
    cuts = [[0], [1, 2, 3, 4], [5, 6], [7, 8]]
    pieces = [run(FULL, batch.rows(cut), totals=totals) for cut in cuts]
    merged, whole = sum(p.records for p in pieces), run(FULL, batch).metrics
    assert_same(merged.compute(), whole)
    mean_of_means = mean([p.metrics["clip_fraction"] for p in pieces])
    assert abs(mean_of_means - whole["clip_fraction"]) > 1e-3, (
        "the cut is even: this test would not notice a mean of means"
    )


def test_loss_metric_is_the_loss_of_the_step():
    """Without dp_size, so that ranks add up; over micro-batches it sums to the loss itself."""
    batch = make_batch(seed=6)
    totals = replace(pl.Totals.count(batch.mask), dp_size=4)
    result = run(pl.preset("ppo"), batch, totals=totals)
    assert result.metrics["loss"] == pytest.approx(result.loss.item() / 4, rel=1e-15)
    assert result.metrics["loss"] == pytest.approx(
        run(pl.preset("ppo"), batch).loss.item(), rel=1e-12
    )


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def stat(total: float, count: float) -> pl.Stat:
    return pl.Stat(scalar(total), scalar(count))


def test_stat_divides_last():
    # 1 of 2 and 0 of 6: the share is 1/8, the mean of the shares 1/4.
    assert float(stat(1, 2).merge(stat(0, 6))) == 1 / 8
    assert stat(3, 4).item() == 0.75


def test_extremes_merge_and_nothing_is_nan():
    assert float(Max(scalar(3)).merge(Max(scalar(-inf)))) == 3
    assert float(Min(scalar(-2)).merge(Min(scalar(5)))) == -2
    assert isnan(float(Max(scalar(-inf))))
    assert isnan(float(Min(scalar(inf)).merge(Min(scalar(inf)))))
    assert isnan(float(stat(0, 0)))
    assert isnan(float(Max(scalar(3)).merge(Max(scalar(nan))))), (
        "a NaN must not be lost in a maximum"
    )


def test_effective_sample_size_merges():
    # Weights (1, 1) and (2, 0): (Σw)² = 16 over n·Σw² = 4·6;
    # apart they are 1 and ½, whose mean is ¾.
    first = EffectiveSampleSize(scalar(2), scalar(2), scalar(2))
    second = EffectiveSampleSize(scalar(2), scalar(4), scalar(2))
    assert float(first) == 1
    assert float(second) == 0.5
    assert float(first.merge(second)) == pytest.approx(16 / 24)


def test_explained_variance_merges():
    def record(errors, targets):
        e, t = torch.tensor(errors, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)
        return ExplainedVariance(
            scalar(len(errors)), e.sum(), (e * e).sum(), t.sum(), (t * t).sum()
        )

    # Errors (1, −1), targets (0, 4): 1 − 1/4. Each alone has no variance to explain.
    assert float(record([1, -1], [0, 4])) == 0.75
    assert float(record([1], [0]).merge(record([-1], [4]))) == 0.75


def test_counts_survive_beyond_float32():
    # 2²⁴ + 1 is not a float32 number; a sum carried in float32 would stay at 2²⁴.
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert float(Sum(big).merge(Sum(one))) == 2**24 + 1
    assert float(Sum(torch.tensor(2**40)).merge(Sum(torch.tensor(3)))) == 2**40 + 3
    total = sum(
        pl.Metrics({"tokens": Sum(torch.tensor(2**24 - 1)), "x": pl.Stat(big, one)})
        for _ in range(5)
    )
    assert total.compute()["tokens"] == 5 * (2**24 - 1)


def test_merging_two_kinds_is_an_error():
    with pytest.raises(TypeError, match="Stat with Sum"):
        stat(1, 2).merge(Sum(scalar(1)))


# --- The mapping ----------------------------------------------------------------------------------


def test_metrics_is_a_mapping():
    metrics = pl.Metrics({"a": stat(1, 2), "b": Sum(scalar(7))})
    assert list(metrics) == ["a", "b"]
    assert len(metrics) == 2
    assert "a" in metrics
    assert "c" not in metrics
    assert metrics["b"].item() == 7
    assert dict(metrics).keys() == {"a", "b"}
    assert metrics.get("c") is None
    assert "a" in repr(metrics)
    with pytest.raises(KeyError, match="'c'"):
        metrics["c"]


def test_metrics_add():
    first, second = (
        pl.Metrics({"a": stat(1, 2), "only": Sum(scalar(1))}),
        pl.Metrics({"a": stat(1, 6)}),
    )
    assert (first + second).compute() == {"a": 0.25, "only": 1.0}
    assert first.compute() == {"a": 0.5, "only": 1.0}, "adding must not change the terms"
    assert sum([first, second, second]).compute()["a"] == pytest.approx(3 / 14)
    assert pl.Metrics({}).compute() == {}
    with pytest.raises(TypeError):
        first + 1
    with pytest.raises(TypeError):
        1 + first


def test_compute_keys_are_the_names_and_floats():
    batch = make_batch()
    metrics = run(FULL, batch).records
    computed = metrics.compute()
    assert list(computed) == list(metrics)
    assert all(type(v) is float for v in computed.values())
    assert not any(p.requires_grad for record in metrics.values() for p in record.parts)


def test_a_batch_with_no_valid_token():
    batch = make_batch()
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    metrics = run(FULL, empty).metrics
    assert metrics["tokens"] == metrics["nonfinite_tokens"] == metrics["loss"] == 0
    for name in (
        "clip_fraction",
        "ratio_mean",
        "ratio_max",
        "ratio_min",
        "kl_old_k3",
        "effective_sample_size",
        "entropy",
    ):
        assert isnan(metrics[name]), (
            f"{name} of nothing must be NaN, not a number that was never measured"
        )
    # …and it adds nothing to a batch that has tokens.
    both = run(FULL, empty).records + run(FULL, batch).records
    assert_same(both.compute(), run(FULL, batch).metrics)


@walked("bad", [nan, inf, -inf])
def test_nonfinite_tokens_are_counted(bad):
    batch = make_batch(seed=1)
    spec = pl.LossSpec(trust=pl.Unbounded("logp"))
    i, j = batch.mask.nonzero()[3].tolist()
    poisoned = batch.logp.clone()
    poisoned[i, j] = bad
    result = run(spec, replace(batch, logp=poisoned))
    assert result.metrics["nonfinite_tokens"] == 1
    assert not torch.isfinite(result.loss)


# --- Packed into one tensor -----------------------------------------------------------------------


def test_packed_metrics_are_the_same_records() -> None:
    """Lookup, names, merging with unpacked ones and the figures:
    only the storage of the numbers differs.
    """
    metrics = run(FULL, make_batch(seed=5)).records
    packed = pl.Metrics.from_packed(RecordPlaces(metrics), RecordPlaces.pack(metrics))
    assert list(packed) == list(metrics)
    assert len(packed) == len(metrics)
    assert_same(packed.compute(), metrics.compute(), tol=0, what="metric")
    assert_same(
        (packed + metrics).compute(), (metrics + metrics).compute(), tol=0, what="merged metric"
    )
    assert all(type(packed[name]) is type(metrics[name]) for name in metrics)
    with pytest.raises(KeyError, match="clip_fractoin"):
        packed["clip_fractoin"]


def test_a_shared_count_is_packed_once_and_stays_exact() -> None:
    """Two means over one count are three numbers. 2**31 − 1 tokens are more than float32 can count:
    its last bit is worth 128.
    """
    n = torch.tensor(2**31 - 1, dtype=torch.int32)
    metrics = pl.Metrics(
        {
            "a": pl.Stat(torch.tensor(1.5), n),
            "b": pl.Stat(torch.tensor(3.0), n),
            "n": Sum(n),
        }
    )
    values = RecordPlaces.pack(metrics, torch.tensor(7.0))
    assert values.tolist() == [1.5, 2**31 - 1, 3.0, 7.0]
    assert pl.Metrics.from_packed(RecordPlaces(metrics), values).compute() == {
        "a": 1.5 / (2**31 - 1),
        "b": 3 / (2**31 - 1),
        "n": 2**31 - 1,
    }


def test_a_maximum_over_ranks_keeps_every_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with (1, NaN, −inf, 5) and (NaN, 2, 3, 4):
    NaN wherever one has it, else the larger.
    """
    other = torch.tensor([torch.nan, 2.0, 3.0, 4.0])

    def reduce_with_the_other_rank(pair: torch.Tensor, op: object, group: object) -> None:
        theirs = torch.stack([other.nan_to_num(torch.inf), other.isnan().float()])
        pair.copy_(torch.maximum(pair, theirs))

    monkeypatch.setattr(collectives.dist, "all_reduce", reduce_with_the_other_rank)
    got = collectives.all_max(torch.tensor([1.0, torch.nan, -torch.inf, 5.0]), group="two ranks")
    torch.testing.assert_close(got, torch.tensor([torch.nan, torch.nan, 3.0, 5.0]), equal_nan=True)


@walked("kind", KINDS.values(), ids=KINDS)
def test_the_record_of_nothing_changes_nothing(kind):
    """A rank without a metric takes part in the reduction of those that others have."""
    record = kind(*(torch.tensor(-1.5 - i) for i in range(len(fields(kind)))))
    nothing = kind.nothing(torch.device("cpu"), torch.float64)
    for merged in (record.merge(nothing), nothing.merge(record)):
        assert [float(p) for p in merged.parts] == [float(p) for p in record.parts]


def test_a_target_that_varies_a_little_has_an_explained_variance():
    """1 ± 2⁻²⁰ has the variance 2⁻⁴⁰. An error of ± 2⁻²¹ leaves a quarter: ¾ is explained."""
    target = 1 + 2.0**-20 * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(500)
    error = (target - 1) / 2
    moments = (error.sum(), (error**2).sum(), target.sum(), (target**2).sum())
    record = ExplainedVariance(torch.tensor(1000), *moments)
    assert record.item() == pytest.approx(0.75, abs=1e-3)
