"""Tensors that do not fit: each error is an InputError that names the argument and the valid
values.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import PRESETS, make_batch, run, step_totals
from policyloss.compat.trl.parts import RolloutProduct, WrittenKL

BATCH = make_batch(seed=1)
PACKED = BATCH.packed()
N = int(PACKED.cu_seqlens[-1])


def call(batch=BATCH, spec=None, **changes):
    arguments = {**batch.kwargs, **changes}
    return pl.policy_loss(pl.preset("ppo") if spec is None else spec, **arguments)


def cu(*offsets, dtype=torch.int64):
    return torch.tensor(offsets, dtype=dtype)


# As many rows as columns: numbers per row look like numbers per column.
SQUARE = make_batch(seed=1, rows=8)


def per_row(t):
    return torch.ones(t.mask.shape[0], dtype=t.dtype)


BAD = {
    "aggregate returns one weight per row": (
        lambda: call(SQUARE, pl.LossSpec(aggregate=per_row)),
        ["aggregation", "(8, 8)", "(8,)", "expand"],
    ),
    "correction returns one weight per row": (
        lambda: call(SQUARE, pl.LossSpec(correction=lambda t: pl.Corrected(weight=per_row(t)))),
        ["correction", "(8, 8)", "(8,)", "expand"],
    ),
    "correction returns one verdict per row": (
        lambda: call(SQUARE, pl.LossSpec(correction=lambda t: pl.Corrected(keep=per_row(t) > 0))),
        ["correction", "(8, 8)", "(8,)", "expand"],
    ),
    "logp is a list": (lambda: call(logp=[[1.0]]), ["logp", "tensor", "list"]),
    "logp is integer": (
        lambda: call(logp=torch.zeros(7, 8, dtype=torch.int64)),
        ["logp", "floating-point", "int64"],
    ),
    "logp is 3-D": (lambda: call(logp=torch.zeros(7, 8, 2)), ["[B, T]", "(7, 8, 2)", "cu_seqlens"]),
    "logp is 1-D without cu_seqlens": (
        lambda: call(logp=torch.zeros(7)),
        ["[B, T]", "(7,)", "cu_seqlens"],
    ),
    "logp is 2-D with cu_seqlens": (
        lambda: call(cu_seqlens=cu(0, 56)),
        ["cu_seqlens", "[N]", "(7, 8)"],
    ),
    "old_logp shape": (
        lambda: call(old_logp=BATCH.old_logp[:, :-1]),
        ["old_logp", "(7, 7)", "(7, 8)"],
    ),
    "rollout_logp shape": (
        lambda: call(rollout_logp=BATCH.rollout_logp[:1]),
        ["rollout_logp", "(1, 8)", "(7, 8)"],
    ),
    "ref_logp shape": (lambda: call(ref_logp=BATCH.ref_logp.T), ["ref_logp", "(8, 7)"]),
    "entropy shape": (lambda: call(entropy=torch.zeros(7)), ["entropy", "(7,)"]),
    "old_logp broadcasts": (lambda: call(old_logp=torch.zeros(7, 1)), ["old_logp", "(7, 1)"]),
    "mask is a list": (lambda: call(mask=[[True]]), ["mask", "tensor", "list"]),
    "mask shape": (lambda: call(mask=BATCH.mask[:, :4]), ["mask", "(7, 4)", "(7, 8)"]),
    "mask is per sequence": (lambda: call(mask=torch.ones(7)), ["mask", "(7,)"]),
    "mask has a half": (lambda: call(mask=BATCH.mask * 0.5), ["mask", "0 and 1", "weights="]),
    "mask is negative": (lambda: call(mask=-BATCH.mask.long()), ["mask", "0 and 1"]),
    "mask has nan": (lambda: call(mask=torch.full((7, 8), float("nan"))), ["mask", "0 and 1"]),
    "mask is two": (lambda: call(mask=2 * BATCH.mask.long()), ["mask", "0 and 1"]),
    "advantages are a number": (lambda: call(advantages=1.0), ["advantages", "tensor", "float"]),
    "advantages per column": (
        lambda: call(advantages=torch.zeros(8)),
        ["advantages", "(8,)", "(7, 8)", "(7,)"],
    ),
    "advantages 3-D": (lambda: call(advantages=torch.zeros(7, 8, 1)), ["advantages", "(7, 8, 1)"]),
    "advantages scalar": (lambda: call(advantages=torch.tensor(1.0)), ["advantages", "()"]),
    "packed advantages": (
        lambda: call(PACKED, advantages=torch.zeros(3)),
        ["advantages", "(3,)", "packed", f"({N},)", "(7,)"],
    ),
    "cu_seqlens float": (
        lambda: call(PACKED, cu_seqlens=cu(0, N, dtype=torch.float32)),
        ["cu_seqlens", "float32", "cumsum"],
    ),
    "cu_seqlens 2-D": (
        lambda: call(PACKED, cu_seqlens=cu(0, N)[None]),
        ["cu_seqlens", "1-D", "(1, 2)"],
    ),
    "cu_seqlens too short": (lambda: call(PACKED, cu_seqlens=cu(0)), ["cu_seqlens", "S+1"]),
    "cu_seqlens not from 0": (
        lambda: call(PACKED, cu_seqlens=cu(1, N)),
        ["cu_seqlens", "from 0", str(N)],
    ),
    "cu_seqlens not to N": (
        lambda: call(PACKED, cu_seqlens=cu(0, N - 1)),
        ["cu_seqlens", str(N), str(N - 1)],
    ),
    "cu_seqlens falls": (
        lambda: call(PACKED, cu_seqlens=cu(0, 9, 5, N)),
        ["cu_seqlens", "rise", "[0, 9, 5"],
    ),
    "cu_seqlens are lengths": (
        lambda: call(PACKED, cu_seqlens=BATCH.lengths),
        ["cu_seqlens", "rise"],
    ),
    "group_ids per token": (
        lambda: call(group_ids=torch.zeros(7, 8)),
        ["group_ids", "(7, 8)", "(7,)"],
    ),
    "spec is a number": (lambda: call(spec=0.2), ["LossSpec", "float", "preset"]),
    "spec is a class": (lambda: call(spec=pl.Clip), ["LossSpec(trust=f)", "Clip"]),
    "totals is a number": (lambda: call(totals=64), ["totals", "Totals", '"local"', "64"]),
    "totals is a word": (lambda: call(totals="global"), ["totals", "'global'"]),
}


@walked("name", BAD)
def test_bad_tensors(name):
    make, words = BAD[name]
    with pytest.raises(pl.InputError) as error:
        make()
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"the message does not say {missing}: {error.value}"


ENGINE = RolloutProduct()
FULL = pl.LossSpec(
    correction=pl.Veto(), kl=pl.KL("k3", 0.1), entropy_coef=0.1, aggregate=pl.PromptMean()
)
SPECS = {
    **PRESETS,
    "everything": FULL,
    "opsm on rollout": pl.LossSpec(correction=pl.OPSM(0.1, source="rollout")),
    "sequence ratio": pl.LossSpec(ratio=pl.SequenceRatio(anchor="rollout")),
    "gspo-token": pl.LossSpec(ratio=pl.SequenceRatio(grad="token")),
    "proximal": pl.LossSpec(trust=pl.Unbounded("logp"), kl=pl.KL("k2", 0.1, anchor="old")),
    "an engine in a ratio that nothing uses": pl.LossSpec(ratio=ENGINE, trust=pl.Unbounded("logp")),
    "an engine in a ratio that the KL does not use": pl.LossSpec(
        ratio=ENGINE, trust=pl.Unbounded("logp"), kl=WrittenKL("k3", 0.1, ratio_level="token")
    ),
    "an engine in a ratio that the KL uses": pl.LossSpec(
        ratio=ENGINE, trust=pl.Unbounded("logp"), kl=pl.KL("k3", 0.1, weight="ratio")
    ),
    "ratio-weighted KL": pl.LossSpec(
        trust=pl.Unbounded("logp"), kl=pl.KL("k2", 0.1, weight="ratio")
    ),
}


@walked("name", SPECS)
def test_a_missing_tensor_is_named(name):
    spec = SPECS[name]
    for dropped in spec.reads:
        with pytest.raises(pl.InputError, match=dropped) as error:
            call(spec=spec, **{dropped: None})
        assert f"{dropped}=" in str(error.value), "the message must show the argument to pass"


@walked("name", SPECS)
def test_what_is_not_read_may_be_missing(name):
    """`reads` is complete: with only those tensors the loss is the same as with all of them."""
    spec = SPECS[name]
    optional = ("old_logp", "rollout_logp", "ref_logp", "teacher_logp", "entropy", "group_ids")
    with_all = call(spec=spec).loss
    with_least = call(spec=spec, **{n: None for n in optional if n not in spec.reads}).loss
    assert torch.equal(with_all, with_least)


def test_unused_tensors_are_still_checked():
    with pytest.raises(pl.InputError, match="ref_logp"):
        call(spec=pl.preset("reinforce"), ref_logp=torch.zeros(2, 2))


@walked("name", ["clip_cov", "kl_cov"])
def test_batch_wide_losses_refuse_plain_counts(name):
    """A loss that needs batch-wide numbers raises an error that explains how to measure them, and
    accepts "local".
    """
    spec = pl.preset(name)
    counted = pl.Totals.count(BATCH.mask)
    with pytest.raises(pl.InputError, match=r"measure\(spec"):
        call(spec=spec, totals=counted)
    local = call(spec=spec, totals="local").loss
    assert torch.equal(local, call(spec=spec).loss)
    torch.testing.assert_close(
        call(spec=spec, totals=step_totals(spec, BATCH)).loss, local, rtol=1e-12, atol=1e-12
    )


def test_rejection_that_moves_the_denominator_refuses_plain_counts():
    spec = pl.LossSpec(correction=pl.Band(0.9, 1.1), rejected="renormalise")
    with pytest.raises(pl.InputError, match="measure"):
        call(spec=spec, totals=pl.Totals.count(BATCH.mask))
    kept = spec.replace(rejected="keep")
    assert torch.equal(
        call(spec=kept, totals=pl.Totals.count(BATCH.mask)).loss, call(spec=kept).loss
    )


def test_prompt_mean_refuses_totals_without_groups():
    spec = pl.LossSpec(aggregate=pl.PromptMean())
    with pytest.raises(pl.InputError, match="group_ids="):
        call(spec=spec, totals=pl.Totals.count(BATCH.mask))


def test_masks_of_ones_and_zeros_are_masks():
    expected = run(pl.preset("grpo"), BATCH)
    for dtype in (torch.int64, torch.uint8, torch.float32, torch.bfloat16):
        result = run(pl.preset("grpo"), replace(BATCH, mask=BATCH.mask.to(dtype)))
        assert torch.equal(result.loss, expected.loss)
        assert torch.equal(result.dlogp, expected.dlogp)


def test_unknown_metric_names_the_close_one():
    metrics = call().metrics
    with pytest.raises(KeyError, match="did you mean 'clip_fraction'"):
        metrics["clip_fracton"]


def test_transforms_of_torch_func_are_refused_in_one_sentence():
    """Every transform, of every function that keeps a slope: of rows, packs and heads."""
    hidden, weight = torch.randn(*BATCH.mask.shape, 4), torch.randn(11, 4)
    ids = torch.zeros(BATCH.mask.shape, dtype=torch.int64)
    logits = hidden @ weight.T
    rest = (BATCH.old_logp.float(), BATCH.advantages.float(), BATCH.mask)
    functions = {
        "policy_loss": (lambda x: call(logp=x).loss, BATCH.logp),
        "reinforce": (lambda x: call(spec=pl.preset("reinforce"), logp=x).loss, BATCH.logp),
        "packed": (lambda x: call(PACKED, logp=x).loss, PACKED.logp),
        "compiled_loss": (
            lambda x: pl.compiled_loss("ppo")(**{**BATCH.kwargs, "logp": x}).loss,
            BATCH.logp,
        ),
        "linear_policy_loss": (
            lambda x: pl.linear_policy_loss("ppo", x, weight, ids, *rest).loss,
            hidden,
        ),
        "logprobs": (lambda x: pl.logprobs(x, ids).logp.sum(), logits),
        "linear_logprobs": (lambda x: pl.linear_logprobs(x, weight, ids).logp.sum(), hidden),
    }
    for name, (function, x) in functions.items():
        assert function(x).isfinite(), name
        for transformed in (
            torch.func.grad(function),
            torch.func.vmap(lambda _: function(x)),  # noqa: B023
            torch.func.vmap(function),
            torch.func.jacrev(function),
            lambda x: torch.func.jvp(function, (x,), (x,)),  # noqa: B023
        ):
            with pytest.raises(pl.InputError, match=r"torch\.func.*loss\.backward\(\)"):
                transformed(x)
