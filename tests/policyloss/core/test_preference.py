"""Preference losses: numbers by hand, gradients, identities, layouts, cuts, refusals and data."""

from __future__ import annotations

import json
from math import exp, log

import pytest
import torch
from walk import walked

import policyloss as pl
from policyloss.preference import (
    Hinge,
    Logistic,
    PreferenceSpec,
    Score,
    Sigmoid,
    Square,
    Term,
    preference_totals,
    preset,
    presets,
)
from policyloss.preference.named_losses import PREFERENCES

F64 = torch.float64
# One pair: the chosen answer has two tokens, the rejected one; -9 stands where the mask is False.
LOGP = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]], dtype=F64)
REF = torch.tensor([[-1.5, -2.5], [-2.0, -9.0]], dtype=F64)
MASK = torch.tensor([[True, True], [True, False]])
# Log-ratios: chosen 0.5 + 0.5 = 1, a mean of 0.5; rejected -1. So m = 2, of means m = 1.5.
# Log-probabilities: chosen -3, a mean of -1.5; rejected -3. L(z) = log(1 + e^-z) = -log sigmoid(z).
BY_HAND = [
    ("dpo", {}, 0.598139),  # L(0.1·2)
    ("dpo", {"length": "mean"}, 0.620957),  # L(0.1·1.5)
    ("dpo", {"tail": 0.5}, 0.609470),  # the second token of the chosen answer counts half: L(0.175)
    ("dpo", {"tail": 0.0}, 0.620957),  # 0.5 - (-1): L(0.15)
    ("dpo", {"alpha": 0.0}, 0.582517),  # (1 - e^-1) - (1 - e^1) = 2.350402: L(0.235040)
    ("dpo", {"alpha": 0.5}, 0.594349),  # -2·(e^-0.5 - e^0.5) = 2.084380: L(0.208438)
    ("dpo", {"shape": "jensen_shannon"}, 0.644397),  # log s(1) - log s(-1) = 1: L(0.1)
    ("dpo", {"smoothing": 0.25}, 0.648139),  # 0.75·L(0.2) + 0.25·(L(0.2) + 0.2)
    ("hinge", {}, 0.8),  # 1 - 0.1·2
    ("ipo", {}, 12.25),  # (1.5 - 1/0.2)²
    ("exo_pair", {}, 2.422015),
    # s(0.2)·(-L(0.2) - log 0.999) + s(-0.2)·(-L(-0.2) - log 0.001)
    ("nca_pair", {}, 1.381319),  # L(0.01) + L(-0.01)/2 + L(0.01)/2
    ("robust", {}, 0.680697),  # (0.9·L(0.02) - 0.1·L(-0.02)) / 0.8
    ("bco_pair", {}, 1.376319),  # L(0.01) + L(0.01)
    ("sppo_hard", {}, 32.0),  # (1 - 5)² + (-1 + 5)²
    ("aot", {}, 0.598139),  # one pair: as DPO
    ("aot_unpaired", {}, 0.598139),
    ("apo_zero", {}, 0.950042),  # 2·s(-0.1)
    ("apo_down", {}, 0.975145),  # s(-0.2) + s(0.1)
    ("discopop", {}, 0.873792),  # g = s(2): (1 - g)·L(0.1) + g·e^-0.1
    ("mpo", {}, 2.236270),  # 0.8·L(0.2) + 0.2·2·L(0.1) + 1.5
    ("orpo", {}, 1.516757),  # odds -1.247518 and -2.948931: 1.5 + 0.1·L(1.701413)
    ("cpo", {}, 2.193147),  # L(0) + 1.5
    ("simpo", {}, 0.126928),  # L(2·1.5 - 1)
    ("alphapo", {}, 0.001472),  # rewards -1.819966 and -4.468000: L(2.5·2.648034 - 0.1)
]


@walked(("name", "fields", "loss"), BY_HAND)
def test_losses_by_hand(name, fields, loss):
    out = pl.preference_loss(preset(name, **fields), LOGP, REF, MASK)
    assert out.loss.item() == pytest.approx(loss, abs=1e-6)


def test_every_preset_has_a_number_by_hand():
    assert {name for name, _, _ in BY_HAND} | {"kto"} == set(presets())


def test_kto_by_hand():
    # z = 0.5: s(-0.1·(1 - 0.5)) = 0.487503 and s(-0.1·(0.5 + 1)) = 0.462570; weights 2 and 3.
    labels = torch.tensor([True, False])
    kto = preset("kto")
    out = pl.preference_loss(kto, LOGP, REF, MASK, chosen=labels, baseline=0.5)
    assert out.loss.item() == pytest.approx((0.487503 + 0.462570) / 2, abs=1e-6)
    weighted = PreferenceSpec(
        (Term(Sigmoid(0.1), "chosen", weight=2.0), Term(Sigmoid(0.1), "rejected", weight=3.0)),
        over="sequences",
        baseline=True,
    )
    out = pl.preference_loss(weighted, LOGP, REF, MASK, chosen=labels, baseline=torch.tensor(0.5))
    assert out.loss.item() == pytest.approx((2 * 0.487503 + 3 * 0.462570) / 2, abs=1e-6)


def test_wpo_by_hand():
    # Means of logp - log Σp²: (-1 + 0.5 - 2 + 1.5)/2 = -0.5 and -3 + 1 = -2: DPO times e^-2.5.
    squares = torch.tensor([[-0.5, -1.5], [-1.0, 0.0]], dtype=F64)
    x = LOGP.clone().requires_grad_()
    wpo = preset("dpo", weighting="wpo")
    out = pl.preference_loss(wpo, x, REF, MASK, log_sum_sq_probs=squares)
    assert out.loss.item() == pytest.approx(0.598139 * exp(-2.5), abs=1e-7)
    # The weights have no gradient: -0.1·s(-0.2)·e^-2.5 at a chosen token.
    (grad,) = torch.autograd.grad(out.loss, x)
    assert grad[0, 0].item() == pytest.approx(-0.1 * 0.450166 * exp(-2.5), abs=1e-8)


def test_metrics_by_hand():
    m = pl.preference_loss("mpo", LOGP, REF, MASK).metrics.compute()
    expected = {"chosen_reward": 0.1, "rejected_reward": -0.1, "margin": 0.2, "accuracy": 1.0}
    expected |= {"chosen_logp": -3.0, "rejected_logp": -3.0, "nll": 1.5, "tokens": 3.0}
    assert m == pytest.approx({**expected, "loss": 2.236270, "nonfinite_sequences": 0.0}, abs=1e-6)


def test_aot_by_hand():
    # Policy differences -1, 4, 1 (ranks 0, 2, 1); the reference's 3, 0, -2 sorted are -2, 0, 3.
    # Margins -1 + 2, 4 - 3, 1 - 0: all 1. DPO's would be -4, 4, 3.
    logp = torch.tensor([-2.0, -1.0, -1.0, -5.0, -1.0, -2.0], dtype=F64)[:, None]
    ref = torch.tensor([-1.0, -4.0, -2.0, -2.0, -3.0, -1.0], dtype=F64)[:, None]
    mask = torch.ones_like(logp, dtype=torch.bool)
    loss = pl.preference_loss("aot", logp, ref, mask).loss
    assert loss.item() == pytest.approx(log(1 + exp(-0.1)))
    # Log-ratios: chosen -1, 1, 2 sorted; rejected 3, -3, -1 sorted -3, -1, 3: margins 2, 2, -1.
    loss = pl.preference_loss("aot_unpaired", logp, ref, mask).loss
    expected = (2 * log(1 + exp(-0.2)) + log(1 + exp(0.1))) / 3
    assert loss.item() == pytest.approx(expected)
    # An empty pair has no rank.
    empty = torch.zeros(2, 1, dtype=F64)
    more = [torch.cat([empty, x]) for x in (logp, ref, mask)]
    for name in ("aot", "aot_unpaired"):
        loss = pl.preference_loss(name, *more[:2], more[2].bool()).loss
        torch.testing.assert_close(loss, pl.preference_loss(name, logp, ref, mask).loss)


def random_batch(rows=6, width=5, seed=0, dtype=F64):
    g = torch.Generator().manual_seed(seed)
    logp, ref, squares = -0.05 - 2 * torch.rand(3, rows, width, generator=g, dtype=dtype)
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[:, 0] = True
    return logp, ref, squares, mask


LABELS = torch.tensor([True, False, False, True, True, True])
SPECS = [preset(name) for name in presets()] + [
    preset("dpo", shape="jensen_shannon"),
    preset("ipo", tail=0.3),
    preset("dpo", alpha=0.4, tail=0.0),
    preset("apo_zero", over="sequences"),
    preset("bco_pair", baseline=True),
    preset("hinge", weighting="wpo"),
    PreferenceSpec((), nll=2.0),
    PreferenceSpec((Square(0.3), Term(Hinge(2.0), score=Score(length="mean"))), nll=0.1),
    PreferenceSpec(torch.nn.functional.softplus),
]


def call(spec, logp, ref, squares, mask, labels=LABELS, **more):
    more |= {"chosen": labels} if spec.over == "sequences" else {}
    more |= {"baseline": 0.2} if spec.baseline else {}
    more |= {"log_sum_sq_probs": squares} if spec.weighting else {}
    return pl.preference_loss(spec, logp, ref, mask, **more)


def value_and_gradient(spec, logp, *others, **more):
    x = logp.clone().requires_grad_()
    out = call(spec, x, *others, **more)
    (grad,) = torch.autograd.grad(out.loss, x)
    return out.loss.detach(), grad, out.metrics


@walked("spec", SPECS)
def test_gradients(spec):
    logp, ref, squares, mask = random_batch(rows=4, width=2)
    if spec.weighting:  # the weights have no gradient: test_wpo_by_hand
        spec = PreferenceSpec(spec.terms, spec.nll)
    x = logp.requires_grad_()
    others = ref, squares, mask, LABELS[:4]
    assert torch.autograd.gradcheck(lambda x: call(spec, x, *others).loss, (x,))


@walked("spec", SPECS)
def test_padding_is_not_read_and_packed_equals_padded(spec):
    logp, ref, squares, mask = random_batch()
    loss, grad, metrics = value_and_gradient(spec, logp, ref, squares, mask)
    hidden = [x.masked_fill(~mask, torch.nan) for x in (logp, ref, squares)]
    garbage = value_and_gradient(spec, *hidden, mask)
    torch.testing.assert_close(garbage[:2], (loss, grad))
    lengths = mask.sum(-1)  # packed without the masked tokens
    flat = [x[mask] for x in (logp, ref, squares, mask)]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    packed = value_and_gradient(spec, *flat, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed[:2], (loss, grad[mask]))
    assert packed[2].compute() == pytest.approx(metrics.compute())


@walked("spec", [spec for spec in SPECS if not spec.ranks])
def test_any_cut_is_the_whole(spec):
    batch = random_batch(rows=12)
    batch[3][4:6] = False  # an empty pair
    labels = torch.cat([LABELS, LABELS.flip(0)])
    loss, grad, metrics = value_and_gradient(spec, *batch, labels=labels)
    chosen = labels if spec.over == "sequences" else None
    totals = preference_totals(batch[3], chosen=chosen, dp_size=2)
    if not spec.nll:
        totals = pl.Totals.count(batch[3], dp_size=2)
    parts = [
        value_and_gradient(spec, *(x[a:b] for x in batch), labels=labels[a:b], totals=totals)
        for a, b in ((0, 2), (2, 8), (8, 12))
    ]
    # Gradients are averaged over dp_size = 2 ranks, so each call is twice its share.
    torch.testing.assert_close(sum(part[0] for part in parts) / 2, loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]) / 2, grad)
    together = sum(part[2] for part in parts).compute()
    assert together == pytest.approx(metrics.compute())


def test_aot_in_micro_batches_by_the_gradient_of_the_step():
    logp, ref, squares, mask = random_batch()
    for name in ("aot", "aot_unpaired"):
        _, grad, _ = value_and_gradient(preset(name), logp, ref, squares, mask)
        weight = torch.randn(6, 5, dtype=F64, requires_grad=True)  # stands for a model
        (whole,) = torch.autograd.grad(
            pl.preference_loss(name, logp * weight / weight.detach(), ref, mask).loss, weight
        )
        for rows in (slice(0, 2), slice(2, 6)):
            (grad * logp * weight / weight.detach())[rows].sum().backward()
        torch.testing.assert_close(weight.grad, whole)


def test_identities():
    logp, ref, squares, mask = random_batch()
    # No margin: log 2, and the slope -beta/2 at every chosen token, of the mean over 3 pairs.
    loss, grad, _ = value_and_gradient(preset("dpo"), ref, ref, squares, mask)
    assert loss.item() == pytest.approx(log(2))
    assert grad[0, 0].item() == pytest.approx(-0.1 / 2 / 3)
    # Swapped answers: labels that are wrong with probability 1.
    swap = torch.tensor([1, 0, 3, 2, 5, 4])
    there = call(preset("dpo", smoothing=0.3), logp, ref, squares, mask).loss
    back = [x[swap] for x in (logp, ref, squares, mask)]
    torch.testing.assert_close(call(preset("dpo", smoothing=0.7), *back).loss, there)
    # Robust DPO: averaged over flips of 10 % of labels, it is DPO on the right ones.
    robust = preset("robust", beta=0.1)
    mean = 0.9 * call(robust, logp, ref, squares, mask).loss + 0.1 * call(robust, *back).loss
    torch.testing.assert_close(mean, call(preset("dpo"), logp, ref, squares, mask).loss)
    # The alpha-divergence tends to the reverse KL.
    near = call(preset("dpo", alpha=1 + 1e-7), logp, ref, squares, mask).loss
    torch.testing.assert_close(near, call(preset("dpo"), logp, ref, squares, mask).loss)
    # KTO from a baseline of 0 on pairs: half of APO-zero, which counts pairs, not sequences.
    kto = preset("kto", baseline=False)
    labels = torch.tensor([True, False] * 3)
    half = call(kto, logp, ref, squares, mask, labels=labels).loss
    torch.testing.assert_close(2 * half, call(preset("apo_zero"), logp, ref, squares, mask).loss)
    # Answers of one token: SimPO without a target is CPO without its likelihood.
    one = mask & (torch.arange(5) == 0)
    simpo, cpo = preset("simpo", target=0.0, beta=0.1), preset("cpo", nll=0.0)
    torch.testing.assert_close(*(call(s, logp, ref, squares, one).loss for s in (simpo, cpo)))


def test_ipo_is_least_at_half_over_tau():
    mask = torch.tensor([[True], [True]])
    ref = torch.tensor([[-6.0], [-1.0]], dtype=F64)
    logp = torch.tensor([[-1.0], [-1.0]], dtype=F64)  # a margin of 5 = 1/(2·0.1)
    loss, grad, _ = value_and_gradient(preset("ipo"), logp, ref, None, mask)
    assert loss.item() == pytest.approx(0)
    assert grad.abs().max().item() == pytest.approx(0)


def test_half_precision_is_upcast_before_it_is_subtracted():
    logp, ref, squares, mask = random_batch(dtype=torch.float32)
    half = logp.bfloat16(), ref.bfloat16()
    got = call(preset("dpo"), *half, squares, mask).loss
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, call(preset("dpo"), half[0].float(), half[1], None, mask).loss)


def test_far_scores_stay_finite():
    logp = torch.tensor([[-900.0], [-1.0], [-1.0], [-900.0]])
    mask = torch.ones(4, 1, dtype=torch.bool)
    for spec in (preset("dpo", alpha=0.0), preset("discopop", beta=1.0), preset("apo_down")):
        loss, grad, _ = value_and_gradient(spec, logp, torch.full_like(logp, -1), None, mask)
        assert loss.isfinite()
        assert grad.isfinite().all()


def test_from_hidden_states_without_logits():
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(4, 5, 8, generator=g, dtype=F64)
    weight = torch.randn(11, 8, generator=g, dtype=F64)
    ids = torch.randint(0, 11, (4, 5), generator=g)
    _, ref, _, mask = random_batch(rows=4)
    heads = []
    for logp_of in (
        lambda h, w: pl.linear_logprobs(h, w, ids, mask=mask).logp,
        lambda h, w: (h @ w.T).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1),
    ):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = pl.preference_loss("dpo", logp_of(*leaves), ref, mask).loss
        heads.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*heads)


def test_kto_s_baseline_by_an_average():
    """The mean over sequences of the sum of log-ratios, at least 0 (docs/preference.md)."""
    z = pl.aggregate_tokens(LOGP - REF, MASK, pl.SeqMeanTokenSum()).clamp(min=0)
    assert z.item() == 0.0  # (1 - 1) / 2
    z = pl.aggregate_tokens(LOGP - REF + 1, MASK, pl.SeqMeanTokenSum()).clamp(min=0)
    assert z.item() == pytest.approx(1.5)  # (3 + 0) / 2


@walked("spec", SPECS[:-1])
def test_data_and_back(spec):
    assert PreferenceSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert hash(spec) == hash(PreferenceSpec.from_dict(spec.to_dict()))


def test_every_number_has_a_source():
    for name, loss in PREFERENCES.items():
        terms = loss.spec.terms
        numbers = {"nll"} if loss.spec.nll else set()
        for part, default in [(t, Term(Hinge(1.0))) for t in terms] + [
            (t.score, Score()) for t in terms
        ]:
            numbers |= {
                key
                for key, x in vars(part).items()
                if isinstance(x, float) and x != getattr(default, key)
            }
        for term in terms:
            zero = {"smoothing": 0.0, "target": 0.0}
            numbers |= {key for key, x in vars(term.link).items() if x != zero.get(key)}
        assert set(loss.sources) == numbers, name


def test_fields_change_in_every_part():
    spec = preset("MPO", beta=0.3)
    assert {term.link.beta for term in spec.terms} == {0.3}
    assert preset("dpo", over="pairs", tail=0.5).terms[0].score.tail == 0.5
    with pytest.raises(pl.SpecError, match="beta"):
        preset("dpo", bet=0.3)
    with pytest.raises(pl.SpecError, match="callable"):
        PreferenceSpec(torch.sigmoid).to_dict()


REFUSED = [
    (lambda: Logistic(0.0), "beta must be > 0"),
    (lambda: Logistic(0.1, smoothing=1.5), "smoothing"),
    (lambda: Term(Hinge), "link must be one of"),
    (lambda: Term(Hinge(0.1), "pairs"), "margin"),
    (lambda: Term(Hinge(0.1), score="sum"), "score must be a Score"),
    (lambda: Term(Hinge(0.1), "ranked_pair", Score(alpha=0.0)), "ranked_pair"),
    (lambda: PreferenceSpec(Hinge(0.1), over="sequences"), "has no pairs"),
    (lambda: PreferenceSpec(Hinge(0.1), baseline=1), "True or False"),
    (lambda: preset("aot", weighting="wpo"), "by rank"),
    (lambda: PreferenceSpec.from_dict({"terms": [{"type": "Hing"}]}), "Hinge"),
    (lambda: PreferenceSpec.from_dict({"term": []}), "terms"),
    (lambda: PreferenceSpec.from_dict({"terms": [{"type": "Hinge"}]}), "Hinge needs beta"),
    (lambda: PreferenceSpec.from_dict(3), "data must be a mapping"),
    (lambda: pl.preference_loss("dop", LOGP, REF, MASK), "dpo"),
    (lambda: pl.preference_loss(pl.preset("dapo"), LOGP, REF, MASK), "PreferenceSpec"),
    (lambda: pl.preference_loss("dpo", LOGP, None, MASK), "reads ref_logp"),
    (lambda: pl.preference_loss("dpo", LOGP, REF[:1], MASK), "ref_logp has shape"),
    (lambda: pl.preference_loss("dpo", LOGP[:1], REF[:1], MASK[:1]), "even number"),
    (lambda: pl.preference_loss("dpo", LOGP, REF, MASK, chosen=MASK[:, 1]), "no chosen="),
    (lambda: pl.preference_loss("kto", LOGP, REF, MASK, baseline=0.0), "chosen must be"),
    (lambda: pl.preference_loss("kto", LOGP, REF, MASK, chosen=MASK, baseline=0.0), "one bool"),
    (lambda: pl.preference_loss("kto", LOGP, REF, MASK, chosen=MASK[0]), "reads a baseline"),
    (lambda: pl.preference_loss("dpo", LOGP, REF, MASK, baseline=0.0), "does not read a baseline"),
    (
        lambda: pl.preference_loss("aot", LOGP, REF, MASK, totals=pl.Totals.count(MASK)),
        "pairs of the whole step",
    ),
    (
        lambda: pl.preference_loss("cpo", LOGP, None, MASK, totals=pl.Totals.count(MASK)),
        "preference_totals",
    ),
    (
        lambda: pl.preference_loss(preset("dpo", weighting="wpo"), LOGP, REF, MASK),
        "reads log_sum_sq_probs",
    ),
]


@walked(("make", "words"), REFUSED)
def test_refusals(make, words):
    with pytest.raises(pl.PolicyLossError, match=words):
        make()
