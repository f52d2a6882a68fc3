"""Calls of `linear_policy_loss`: what comes back, under autograd, autocast and garbage,
and which rows are multiplied.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from head_cases import (
    DEVICE,
    FLOAT,
    LOSS_PLANS,
    HeadBatch,
    LossRun,
    MatmulRows,
    Poison,
    arguments_of,
    assert_near,
    assert_same_bits,
    assert_same_loss,
    contract,
    dtype_name,
    forced_rows,
    leaf,
    loss_tolerance,
    make_head_batch,
    poison_freed_memory,
    rms,
    run_loss,
    run_oracle,
)
from test_head_loss import BASE, BATCH, LAYOUTS, SMALL, ZEROS, check, preset_plans, rows_of_plan
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from walk import walked

import policyloss as pl
from cases import PRESETS


def test_the_output_holds_logp_and_entropy() -> None:
    """Detached, token-shaped, 0 where masked; the entropy metric
    is present although the loss does not need it.
    """
    truth = contract(
        BATCH.hidden.double(), BATCH.weight.double(), BATCH.ids, mask=BATCH.kwargs["mask"]
    )
    for plan in LOSS_PLANS:
        hidden = leaf(BATCH.hidden)
        out = pl.linear_policy_loss(
            PRESETS["ppo"], hidden, BATCH.weight, BATCH.ids, plan=plan, **BATCH.kwargs
        )
        tol = loss_tolerance(BATCH)
        assert_near(out.logp, truth.logp, tol, "logp")
        assert_near(out.entropy, truth.entropy, tol, "entropy")
        assert not out.logp.requires_grad
        assert not out.entropy.requires_grad
        mean = float(truth.entropy.sum() / BATCH.tokens.mask.sum())
        assert out.metrics.compute()["entropy"] == pytest.approx(mean, rel=tol)


@walked("plan", LOSS_PLANS)
@walked("name", ["ppo", "gspo"])
def test_scaled_repeated_and_detached(name: str, plan: str) -> None:
    found = run_loss(PRESETS[name], BATCH, plan=plan)
    call = {**BATCH.kwargs, "plan": plan}
    hidden, weight = leaf(BATCH.hidden), leaf(BATCH.weight)
    (pl.linear_policy_loss(PRESETS[name], hidden, weight, BATCH.ids, **call).loss * 3.7).backward()
    assert_near(hidden.grad, 3.7 * found.dhidden, 1e-6, "scaled gradient of hidden")
    assert_near(weight.grad, 3.7 * found.dweight, 1e-6, "scaled gradient of weight")
    hidden, weight = leaf(BATCH.hidden), leaf(BATCH.weight)
    loss = pl.linear_policy_loss(PRESETS[name], hidden, weight, BATCH.ids, **call).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert_near(hidden.grad, 2 * found.dhidden, 1e-6, "twice the gradient of hidden")
    assert_near(weight.grad, 2 * found.dweight, 1e-6, "twice the gradient of weight")
    weight = leaf(BATCH.weight)
    pl.linear_policy_loss(PRESETS[name], BATCH.hidden, weight, BATCH.ids, **call).loss.backward()
    assert_same_bits(weight.grad, found.dweight)
    hidden = leaf(BATCH.hidden)
    pl.linear_policy_loss(PRESETS[name], hidden, BATCH.weight, BATCH.ids, **call).loss.backward()
    assert_same_bits(hidden.grad, found.dhidden)


@walked("name", PRESETS)
def test_without_gradients(name: str) -> None:
    """Under no_grad, or with nothing that requires it: the value and the metrics, and no graph."""
    expected, arguments = run_oracle(PRESETS[name], BATCH), arguments_of(PRESETS[name], BATCH)
    with torch.no_grad():
        out = pl.linear_policy_loss(
            PRESETS[name], leaf(BATCH.hidden), leaf(BATCH.weight), BATCH.ids, **arguments
        )
    other = pl.linear_policy_loss(PRESETS[name], BATCH.hidden, BATCH.weight, BATCH.ids, **arguments)
    for found in (out, other):
        assert not found.loss.requires_grad
        assert_same_loss(
            LossRun(found.loss, *expected[1:3], found.metrics), expected, loss_tolerance(BATCH)
        )


HEADS: dict[str, dict[str, Any]] = {
    "bias": {
        "bias": 0.3
        * torch.randn(33, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
            DEVICE, FLOAT
        )
    },
    "temperature": {"temperature": 0.7},
    "per_token": {"temperature": torch.linspace(0.5, 1.5, 56).reshape(7, 8).to(DEVICE, FLOAT)},
    "softcap": {"softcap": 5.0},
}


# The slope of a softcap is not known from kept probabilities.
POSSIBLE = [(h, p) for h in HEADS for p in LOSS_PLANS if (h, p) != ("softcap", "stash")]


@walked(("head", "plan"), POSSIBLE)
def test_heads_with_more_to_them(head: str, plan: str) -> None:
    for name in ("ppo", "gspo"):
        spec = PRESETS[name].replace(entropy_coef=0.02)
        check(spec, BATCH, plan=plan, **HEADS[head])
        check(spec, BATCH, plan=rows_of_plan(spec, BATCH, plan, 8, **HEADS[head]), **HEADS[head])


@walked("plan", LOSS_PLANS)
def test_gradient_of_the_bias(plan: str) -> None:
    spec = BASE
    bias, truth = leaf(HEADS["bias"]["bias"]), leaf(HEADS["bias"]["bias"].double())
    out = pl.linear_policy_loss(
        spec, BATCH.hidden, BATCH.weight, BATCH.ids, bias=bias, plan=plan, **BATCH.kwargs
    )
    values = contract(
        BATCH.hidden.double(),
        BATCH.weight.double(),
        BATCH.ids,
        bias=truth,
        mask=BATCH.kwargs["mask"],
    )
    expected = pl.policy_loss(spec, values.logp, entropy=values.entropy, **BATCH.kwargs)
    assert_near(
        torch.autograd.grad(out.loss, bias)[0],
        torch.autograd.grad(expected.loss, truth)[0],
        loss_tolerance(BATCH),
        "bias",
    )


CHECKED = {
    "ppo": PRESETS["ppo"],
    "gspo": PRESETS["gspo"],
    "gspo_turn": PRESETS["gspo_turn"],
    "grpo": PRESETS["grpo"],
    "entropy": PRESETS["ppo"].replace(entropy_coef=0.1),
    "everything": BASE.replace(ratio=pl.SequenceRatio(), aggregate=pl.SeqMeanTokenMean()),
}


@walked("layout", ["padded", "packed"])
@walked("plan", LOSS_PLANS)
@walked("name", CHECKED)
def test_gradcheck(name: str, plan: str, layout: str) -> None:
    batch = SMALL.packed() if layout == "packed" else SMALL
    bias = torch.linspace(-0.5, 0.5, 5, dtype=torch.float64, device=DEVICE)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return pl.linear_policy_loss(
            CHECKED[name], hidden, weight, batch.ids, bias=bias, plan=plan, **batch.kwargs
        ).loss

    leaves = [leaf(x) for x in (batch.hidden, batch.weight, bias)]
    assert any((g != 0).any() for g in torch.autograd.grad(loss(*leaves), leaves))
    # A second backward makes another stash, in another order of sums.
    apart, entry_by_entry = 1e-12 if plan == "stash" else 0.0, (name, plan) == ("ppo", "one_pass")
    assert gradcheck(
        loss, leaves, atol=1e-7, rtol=1e-6, nondet_tol=apart, fast_mode=not entry_by_entry
    )


@walked("plan", LOSS_PLANS)
@walked("name", ["ppo", "gspo", "grpo", "gspo_turn"])
def test_garbage_behind_the_mask(name: str, plan: str) -> None:
    """NaN and infinite hidden states, ids of −100, NaN log-probs
    and advantages where the mask is False change no bit.
    """
    masked = ~BATCH.kwargs["mask"]
    hidden, ids = BATCH.hidden.clone(), BATCH.ids.clone()
    hidden[masked] = torch.nan
    hidden[3] = torch.inf
    ids[masked] = -100
    off = ~BATCH.tokens.mask
    dirty = dataclasses.replace(
        BATCH,
        hidden=hidden,
        ids=ids,
        tokens=BATCH.tokens.map(lambda x: x.masked_fill(off, torch.nan)),
    )
    clean, found = (
        run_loss(PRESETS[name], BATCH, plan=plan),
        run_loss(PRESETS[name], dirty, plan=plan),
    )
    assert_same_bits(found[:3], clean[:3])
    assert (found.dhidden[masked] == 0).all()
    assert found.metrics == clean.metrics


@walked("plan", LOSS_PLANS)
def test_a_nan_at_a_valid_token_shows(plan: str) -> None:
    """In the loss, in the count of such tokens and in its own row;
    the other rows' gradients are untouched.
    """
    clean = run_loss(PRESETS["ppo"], BATCH, plan=plan)
    row, column = BATCH.tokens.mask.nonzero()[4].tolist()
    hidden = BATCH.hidden.clone()
    hidden[row, column, 0] = torch.nan
    found = run_loss(PRESETS["ppo"], dataclasses.replace(BATCH, hidden=hidden), plan=plan)
    assert found.loss.isnan()
    assert found.metrics["nonfinite_tokens"] == 1
    assert found.dhidden[row, column].isnan().all()
    assert found.dweight.isnan().any()
    dirty, expected = found.dhidden.clone(), clean.dhidden.clone()
    dirty[row, column] = expected[row, column] = 0
    assert_near(dirty, expected, loss_tolerance(BATCH), "other rows")


@walked("plan", ["auto", *LOSS_PLANS])
@walked("name", ["ppo", "gspo", "grpo", "tis"])
def test_nothing_to_train_on(name: str, plan: str) -> None:
    """No rows, no tokens, or all of them masked: loss 0,
    and gradients that are 0 rather than missing.
    """
    nothing = BATCH.with_tokens(mask=BATCH.tokens.mask & False)
    masked = dataclasses.replace(nothing, hidden=torch.full_like(BATCH.hidden, torch.nan))
    empty = BATCH.rows([])
    for batch in (masked, masked.packed(), empty, empty.packed()):
        found = run_loss(PRESETS[name], batch, plan=plan)
        assert found.loss == 0
        assert (found.dhidden == 0).all()
        assert (found.dweight == 0).all()
        assert found.dhidden.shape == batch.hidden.shape
        assert found.metrics["tokens"] == 0


@walked("plan", LOSS_PLANS)
@walked("name", ["ppo", "gspo"])
def test_the_same_bits_every_time_and_whatever_memory_held(name: str, plan: str) -> None:
    batch = make_head_batch(seed=3, rows=16, width=32, vocab=333, size=16, dtype=torch.float32)
    call = {"plan": rows_of_plan(PRESETS[name], batch, plan, 64)}
    first = run_loss(PRESETS[name], batch, **call)
    assert_same_bits(run_loss(PRESETS[name], batch, **call)[:3], first[:3])
    with Poison():
        assert_same_bits(run_loss(PRESETS[name], batch, **call)[:3], first[:3])
    poison_freed_memory(
        (64, 333), (64, 384), (512, 333), (512, 16), (333, 16), (64, 16), (512,), (64,)
    )
    assert_same_bits(run_loss(PRESETS[name], batch, **call)[:3], first[:3])


@walked("plan", LOSS_PLANS)
@walked("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_error_in_lower_precision(dtype: torch.dtype, plan: str) -> None:
    """At most twice that of eager PyTorch in the same dtype (and of float32 sums); gradients to
    3e-3 for bf16, as stated.
    """
    batch = make_head_batch(seed=4, rows=8, width=16, vocab=257, size=32, dtype=dtype)
    spec = PRESETS["grpo"].replace(entropy_coef=0.01)
    found = run_loss(spec, batch, plan=plan)
    eager, truth = run_oracle(spec, batch, dtype), run_oracle(spec, batch)
    assert (found.dhidden.dtype, found.dweight.dtype) == (dtype, dtype)
    for name, a, b, c in zip(("loss", "hidden", "weight"), found, eager, truth, strict=False):
        error, allowed = rms(a.double() - c), 2 * rms(b.double() - c) + 1e-5 * rms(c)
        assert error <= allowed, f"{name}: {error:.3g}, allowed {allowed:.3g}"
        assert error <= 3e-3 * rms(c)


@walked("name", ["ppo", "gspo"])
def test_bf16_gradients_do_not_degrade_with_the_number_of_windows(name: str) -> None:
    """The weight's gradient is summed over sixty windows in float32, and rounded once."""
    batch = make_head_batch(seed=4, rows=64, width=8, vocab=33, size=16, dtype=torch.bfloat16)
    found = run_loss(
        PRESETS[name],
        batch,
        plan=rows_of_plan(PRESETS[name], batch, "one_pass", 8 if name == "gspo" else 4),
    )
    truth = run_oracle(PRESETS[name], batch)
    assert rms(found.dweight.double() - truth.dweight) <= 3e-3 * rms(truth.dweight)
    assert rms(found.dhidden.double() - truth.dhidden) <= 3e-3 * rms(truth.dhidden)


@walked("plan", LOSS_PLANS)
def test_autocast(plan: str) -> None:
    """float32 parameters under autocast: the loss of the bf16 inputs,
    and float32 gradients to a rounding of bf16.
    """
    batch = make_head_batch(seed=4, rows=6, width=8, vocab=65, size=16, dtype=torch.float32)
    rounded = dataclasses.replace(
        batch, hidden=batch.hidden.bfloat16(), weight=batch.weight.bfloat16()
    )
    hidden, weight = leaf(batch.hidden), leaf(batch.weight)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = pl.linear_policy_loss(
            PRESETS["grpo"], hidden, weight, batch.ids, plan=plan, **batch.kwargs
        )
    out.loss.backward()
    truth = run_oracle(PRESETS["grpo"], rounded)
    assert_near(out.loss.detach(), truth.loss, 2e-5, "loss")
    for x, expected in ((hidden.grad, truth.dhidden), (weight.grad, truth.dweight)):
        assert x.dtype == torch.float32
        assert rms(x.double() - expected) <= 2**-8 * rms(expected)


def test_checkpoint_around_the_body() -> None:
    batch = make_head_batch(seed=4, dtype=torch.float32)
    body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(DEVICE)

    def gradients(hidden_of: Any) -> tuple[Tensor, ...]:
        weight = leaf(batch.weight)
        loss = pl.linear_policy_loss(
            PRESETS["ppo"], hidden_of(batch.hidden), weight, batch.ids, **batch.kwargs
        ).loss
        return torch.autograd.grad(loss, (weight, *body.parameters()))

    assert_same_bits(gradients(lambda x: checkpoint(body, x, use_reentrant=False)), gradients(body))


def counted_rows(spec: pl.LossSpec, batch: HeadBatch, frozen: bool = False, **kwargs: Any) -> float:
    with MatmulRows(33, 8) as counted:
        hidden, weight = leaf(batch.hidden), batch.weight.detach().requires_grad_(not frozen)
        pl.linear_policy_loss(
            spec, hidden, weight, batch.ids, **{**batch.kwargs, **kwargs}
        ).loss.backward()
    return counted.rows


@walked("layout", LAYOUTS)
@walked("name", ["ppo", "gspo", "gspo_turn", "clip_cov"])
def test_only_rows_that_matter_enter_a_product(name: str, layout: str) -> None:
    """Live rows once forward and twice back (dX, dW), once more if recomputed;
    a frozen head saves dW. Masked rows never.
    """
    batch, spec = LAYOUTS[layout], PRESETS[name]
    live = int(batch.tokens.mask.sum())
    assert 10 < live < batch.ids.numel()
    for plan, passes in (("one_pass", 3), ("recompute", 4), ("stash", 3)):
        if plan in preset_plans(name, layout):
            moved = (
                int((run_oracle(spec, batch).dhidden.abs().amax(-1) > 0).sum())
                if plan == "recompute"
                else live
            )
            # What turns out to have no gradient (a clipped token) is known before the logits are
            # made again, not in one pass.
            assert counted_rows(spec, batch, plan=plan) == live + (passes - 1) * moved
            assert counted_rows(spec, batch, frozen=True, plan=plan) == live + (passes - 2) * moved


@walked("name", ["ppo", "gspo"])
def test_no_window_is_larger_than_the_limit(name: str) -> None:
    plan = rows_of_plan(PRESETS[name], BATCH, "one_pass", 9)
    with MatmulRows(33, 8) as counted:
        run_loss(PRESETS[name], BATCH, plan=plan)
    assert 1 < counted.most <= 9


def test_rows_without_advantage_go_forward_only_or_not_at_all() -> None:
    live = ZEROS.tokens.mask
    moved = int((live & (ZEROS.tokens.advantages != 0)).sum())
    assert counted_rows(PRESETS["ppo"], ZEROS, plan="one_pass") == int(live.sum()) + 2 * moved
    assert (
        counted_rows(PRESETS["ppo"], ZEROS, plan="one_pass", skip_zero_advantage=True) == 3 * moved
    )
    # A KL gives every token a gradient.
    assert counted_rows(PRESETS["grpo"], ZEROS, plan="one_pass") == 3 * int(live.sum())


def test_rows_without_advantage_share_the_last_window_if_they_fit() -> None:
    """One product of all rows is faster than two; a window of `rows` holds both kinds, or one."""
    live = ZEROS.tokens.mask
    computed, moved = int(live.sum()), int((live & (ZEROS.tokens.advantages != 0)).sum())
    assert 1 < computed - moved <= moved
    for rows, most in ((computed, computed), (computed - 1, moved), (moved, moved)):
        plan = rows_of_plan(PRESETS["ppo"], ZEROS, "one_pass", rows)
        with MatmulRows(33, 8) as counted:
            run_loss(PRESETS["ppo"], ZEROS, plan=plan)
        assert counted.most == most, rows


@walked("rows", [1, 2, 3, 5, 8, 13, 23, 24])
def test_windows_of_rows_with_and_without_advantage(rows: int) -> None:
    """Whether the two kinds meet in a window or not, loss, gradients and metrics are the same."""
    some = BATCH.tokens.advantages.clone()
    some[:, 3] = 0
    for batch in (ZEROS, ZEROS.packed(), BATCH.with_tokens(advantages=some)):
        plan = rows_of_plan(PRESETS["ppo"], batch, "one_pass", rows)
        actual = run_loss(PRESETS["ppo"], batch, plan=plan)
        assert_same_loss(actual, run_oracle(PRESETS["ppo"], batch), loss_tolerance(batch))


@walked("name", ["ppo", "gspo", "grpo", "clip_cov"])
def test_the_plan_matches_the_call(name: str) -> None:
    spec, n = PRESETS[name], ZEROS.ids.numel()
    for asked in ("auto", *preset_plans(name, "padded")):
        for windows in (None, 8):
            hidden, weight = leaf(ZEROS.hidden), leaf(ZEROS.weight)
            plan = pl.explain_plan(spec, hidden, weight, ZEROS.ids, plan=asked, **ZEROS.kwargs)
            if windows is not None:
                plan = pl.explain_plan(
                    spec, hidden, weight, ZEROS.ids, plan=forced_rows(plan, windows), **ZEROS.kwargs
                )
                assert plan.rows == windows
            text = str(plan)
            assert plan.name in text
            assert f"{plan.computed} computed" in text
            assert "window" in text
            assert "matmuls" in text
            assert "MiB" in text
            assert (plan.tokens, plan.computed) == (n, int(ZEROS.tokens.mask.sum()))
            if plan.name == "one_pass":
                assert counted_rows(spec, ZEROS, plan=plan) == pytest.approx(plan.matmuls * n)
            else:  # tokens that turn out to have no gradient may be left out of the announced work
                assert (
                    plan.computed < counted_rows(spec, ZEROS, plan=plan) <= plan.matmuls * n + 1e-9
                )


def test_the_plan_depends_on_the_trained_tensors() -> None:
    """Nothing, the hidden states alone (no dW), or only the bias."""
    frozen = {
        "hidden": BATCH.hidden,
        "weight": BATCH.weight,
        "ids": BATCH.ids,
        "mask": BATCH.kwargs["mask"],
    }
    live, bias = int(BATCH.tokens.mask.sum()), leaf(HEADS["bias"]["bias"])
    share = live / BATCH.ids.numel()
    none = pl.explain_plan(None, **frozen)
    assert (none.with_gradient, none.matmuls) == (0, pytest.approx(share))
    for trains in ({"hidden": leaf(BATCH.hidden)}, {"bias": bias}):
        plan = pl.explain_plan(None, **{**frozen, **trains}, plan="recompute")
        assert plan.with_gradient == live, list(trains)
        assert plan.matmuls == pytest.approx(3 * share)


def test_a_plan_names_the_kernels_for_rows_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from policyloss.head import softmax_rows

    plan = pl.explain_plan(None, torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2).long())
    assert plan.kernels == "plain PyTorch, because the tensors are on cpu"
    assert "rows of logits by plain PyTorch" in str(plan)
    gpu = torch.device("cuda")
    words = softmax_rows.explain_kernels(gpu, torch.float64)
    assert words == "plain PyTorch, because the logits are float64"
    monkeypatch.setattr(softmax_rows, "kernels", lambda name: None)
    words = softmax_rows.explain_kernels(gpu, torch.float32)
    assert words == "plain PyTorch, because Triton is not installed"
    monkeypatch.setattr(softmax_rows, "kernels", lambda name: name)
    assert softmax_rows.explain_kernels(gpu, torch.float32) == "Triton kernels"
