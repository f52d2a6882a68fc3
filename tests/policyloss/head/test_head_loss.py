"""`linear_policy_loss`: every loss from hidden states, under every plan,
is `policy_loss` on the contract's log-probs.

Without a GPU all is float64 and must agree to 1e-10; on one it is float32, through the kernels.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from head_cases import (
    CUDA,
    DEVICE,
    LOSS_PLANS,
    HeadBatch,
    LossRun,
    admitted,
    arguments_of,
    assert_near,
    assert_same_bits,
    assert_same_loss,
    contract,
    forced_rows,
    leaf,
    loss_tolerance,
    make_head_batch,
    rms,
    run_loss,
    run_oracle,
)
from torch import Tensor
from walk import in_shares, walked

import policyloss as pl
from cases import CORRECTIONS, KLS, NAMED, PRESETS, TRUSTS, label, step_totals
from policyloss.functional.ratio import loglinear_logp

BATCH = make_head_batch(seed=2)
LAYOUTS = {"padded": BATCH, "packed": BATCH.packed()}
SMALL = make_head_batch(seed=5, rows=3, width=4, vocab=5, size=3, dtype=torch.float64)
BASE = pl.LossSpec(trust=pl.Clip(0.2, 0.28, dual=1.4), kl=pl.KL("k3", 0.1), entropy_coef=0.01)
NEEDS_WHOLE_BATCH = ("clip_cov", "kl_cov")
SEQUENCE_LEVEL = (
    *("gspo", "gspo_token", "gspo_turn", "gmpo", "fipo", "vespo", "rloo_loss", "luspo", "opsm"),
    *("a2po", "sppo", "sequences"),
)


def totals_of(spec: pl.LossSpec, batch: HeadBatch) -> pl.Totals:
    """The totals of the whole step, from the contract's log-probs."""
    logp, entropy = contract(batch.hidden, batch.weight, batch.ids)
    wide = batch.tokens.old_logp.dtype
    tokens = dataclasses.replace(
        batch.tokens, **{k: v for k, v in batch.kwargs.items() if isinstance(v, Tensor)}
    )
    known = {"logp": logp.to(wide), "entropy": entropy.to(wide)}
    known["divergence"] = tokens.divergence.to(logp.device)
    return step_totals(spec, dataclasses.replace(tokens, **known))


def check(spec: pl.LossSpec, batch: HeadBatch, **kwargs: Any) -> LossRun:
    """One call against the oracle with the same arguments."""
    head_only = {k: kwargs[k] for k in kwargs.keys() - {"plan", "skip_zero_advantage"}}
    found = run_loss(spec, batch, **kwargs)
    assert_same_loss(found, run_oracle(spec, batch, **head_only), loss_tolerance(batch))
    return found


def rows_of_plan(
    spec: pl.LossSpec, batch: HeadBatch, plan: str, rows: int, **kwargs: Any
) -> pl.Plan:
    """A plan by name with windows of `rows` rows."""
    hidden, weight = leaf(batch.hidden), leaf(batch.weight)
    return forced_rows(
        pl.explain_plan(
            spec, hidden, weight, batch.ids, **arguments_of(spec, batch, plan=plan, **kwargs)
        ),
        rows,
    )


@cache
def preset_plans(name: str, layout: str) -> tuple[str, ...]:
    return tuple(admitted(lambda plan: run_loss(NAMED[name], LAYOUTS[layout], plan=plan)))


def in_turn(name: str, layout: str, share: int) -> bool:
    """Whether a share takes this preset in this layout: one layout each."""
    return (list(NAMED).index(name) + list(LAYOUTS).index(layout)) % 2 == share


@in_shares(2)
@walked("layout", LAYOUTS)
@walked("name", NAMED)
def test_every_preset_under_every_plan(name: str, layout: str, share: int) -> None:
    if not in_turn(name, layout, share):
        return
    batch, spec = LAYOUTS[layout], NAMED[name]
    for plan in ("auto", *preset_plans(name, layout)):
        check(spec, batch, plan=plan)


@in_shares(2)
@walked("layout", LAYOUTS)
@walked("name", NAMED)
def test_every_preset_in_small_windows(name: str, layout: str, share: int) -> None:
    """Windows of five rows for losses of single tokens;
    of eight, the longest sequence, for those of sequences.
    """
    if not in_turn(name, layout, share):
        return
    batch, spec = LAYOUTS[layout], NAMED[name]
    rows = 8 if name in SEQUENCE_LEVEL else 5
    for plan in preset_plans(name, layout):
        check(spec, batch, plan=rows_of_plan(spec, batch, plan, rows))


# Clip-Cov draws by the bits of old_logp, which differ in float32.
@in_shares(2)
@walked("layout", LAYOUTS)
@walked("name", [n for n in NAMED if not (CUDA and n == "clip_cov")])
def test_the_current_policy_as_the_old_one(name: str, layout: str, share: int) -> None:
    """`old_logp="current"` is the head's own log-probabilities, which do not exist beforehand."""
    if not in_turn(name, layout, share):
        return
    batch, spec = LAYOUTS[layout], NAMED[name]
    expected = run_oracle(spec, batch, old_logp="current")
    if not CUDA:  # in float64: its rounding moves no token over a limit
        logp = contract(batch.hidden, batch.weight, batch.ids, mask=batch.kwargs["mask"])[0]
        named = run_oracle(spec, batch, old_logp=logp.detach())
        assert_same_loss(expected, named, loss_tolerance(batch))
    plans = admitted(lambda plan: run_loss(spec, batch, plan=plan, old_logp="current"))
    for plan in ("auto", *plans):  # a plan that fails is not admitted, and "auto" takes the best
        actual = run_loss(spec, batch, plan=plan, old_logp="current")
        assert_same_loss(actual, expected, loss_tolerance(batch))


def test_the_current_policy_in_one_pass() -> None:
    """Unless a correction reads the old log-probabilities before the first window."""
    arguments = {**BATCH.kwargs, "old_logp": "current"}
    of_head = (leaf(BATCH.hidden), leaf(BATCH.weight), BATCH.ids)
    plans = {name: pl.explain_plan(name, *of_head, **arguments).name for name in ("dapo", "tis")}
    assert plans["dapo"] == "one_pass"
    young = pl.preset("dapo").replace(correction=pl.Stale(2))
    assert pl.explain_plan(young, *of_head, **arguments).name == "one_pass"
    check(young, BATCH, old_logp="current")
    assert plans["tis"] in ("recompute", "stash")
    with pytest.raises(pl.InputError, match=r"unknown old_logp 'now'\. Valid: current, loglinear"):
        pl.linear_policy_loss("dapo", *of_head, **{**arguments, "old_logp": "now"})


@walked("layout", LAYOUTS)
@walked("name", ["ppo", "gspo", "tis", "tokens"])
def test_an_old_policy_between_rollout_and_current_policy(name: str, layout: str) -> None:
    """`old_logp="loglinear"` of the head's own log-probabilities."""
    batch, spec = LAYOUTS[layout], NAMED[name]
    logp = contract(batch.hidden, batch.weight, batch.ids, mask=batch.kwargs["mask"])[0]
    old = loglinear_logp(logp, batch.kwargs["rollout_logp"], batch.kwargs["ages"])
    expected = run_oracle(spec, batch, old_logp=old)
    plans = admitted(lambda plan: run_loss(spec, batch, plan=plan, old_logp="loglinear"))
    for plan in ("auto", *plans):
        actual = run_loss(spec, batch, plan=plan, old_logp="loglinear")
        assert_same_loss(actual, expected, loss_tolerance(batch))


@walked("layout", LAYOUTS)
@walked("name", ["ppo", "gspo", "tis"])
def test_gathered_gradients_of_logits(name: str, layout: str) -> None:
    """Multiplied when room for so many rows is full:
    window by window, several at a time, the last ones alone, all at once.
    """
    batch, spec = LAYOUTS[layout], NAMED[name]
    plan = rows_of_plan(spec, batch, "one_pass", 8)
    for gathered in (8, 11, 17, int(batch.tokens.mask.sum()), 1000):
        found = check(spec, batch, plan=dataclasses.replace(plan, gathered=gathered))
        assert_same_loss(found, run_loss(spec, batch, plan=plan), loss_tolerance(batch))


@pytest.mark.skipif(not CUDA, reason="a CPU multiplies in float32")
@walked("name", ["ppo", "gspo"])
def test_half_precision_is_gathered(name: str) -> None:
    """By default, if it fits: the same gradients as with float32 sums over windows,
    but for the one rounding of each.
    """
    batch = make_head_batch(seed=2, dtype=torch.bfloat16)
    told = pl.explain_plan(
        NAMED[name], leaf(batch.hidden), leaf(batch.weight), batch.ids, **batch.kwargs
    )
    assert told.gathered == told.with_gradient > 0
    assert f"{told.gathered} rows of logits are kept" in str(told)
    one, other = (
        run_loss(NAMED[name], batch, plan=p) for p in (told, dataclasses.replace(told, gathered=0))
    )
    for name_of in ("dhidden", "dweight"):
        a, b = getattr(one, name_of).double(), getattr(other, name_of).double()
        assert rms(a - b) <= 2**-8 * rms(b), name_of


@walked("layout", LAYOUTS)
@walked("plan", LOSS_PLANS)
def test_windows_around_the_number_of_rows(plan: str, layout: str) -> None:
    """One more, as many, one less than there are live rows;
    as many as the longest sequence has; and single rows.
    """
    batch = LAYOUTS[layout]
    live, longest = int(batch.tokens.mask.sum()), int(BATCH.tokens.mask.sum(-1).max())
    for rows in (live + 1, live, live - 1, longest, 1):
        check(PRESETS["ppo"], batch, plan=rows_of_plan(PRESETS["ppo"], batch, plan, rows))
        if rows >= longest or plan != "one_pass":
            check(PRESETS["gspo"], batch, plan=rows_of_plan(PRESETS["gspo"], batch, plan, rows))


@walked("plan", LOSS_PLANS)
def test_one_row(plan: str) -> None:
    """A batch of one token, and one with a single token that counts."""
    mask = torch.zeros_like(BATCH.tokens.mask)
    mask[0, 1] = True
    short = dataclasses.replace(
        SMALL.rows([0]), hidden=SMALL.hidden[:1, 1:2], ids=SMALL.ids[:1, 1:2]
    )
    tokens = short.tokens.map(
        lambda x: x[:, 1:2],
        "logp",
        "old_logp",
        "rollout_logp",
        "ref_logp",
        "teacher_logp",
        "entropy",
        "advantages",
        "divergence",
        "weights",
        "mask",
        "ages",
    )
    one = dataclasses.replace(
        short, tokens=dataclasses.replace(tokens, lengths=torch.tensor([1]), width=1)
    )
    for name in ("ppo", "gspo", "grpo"):
        for batch in (BATCH.with_tokens(mask=mask), one, one.packed()):
            found = check(NAMED[name], batch, plan=plan)
            assert found.metrics["tokens"] == 1


@walked("plan", LOSS_PLANS)
def test_arguments_of_other_shapes_and_types(plan: str) -> None:
    """One advantage per sequence, masks of numbers, int32 ids, a shifted slice of hidden,
    log-probs of another precision.
    """
    per_sequence = BATCH.kwargs["advantages"][:, 0].contiguous()
    for name in ("ppo", "gspo"):
        check(NAMED[name], BATCH, plan=plan, advantages=per_sequence)
        check(NAMED[name], BATCH, plan=plan, advantages=per_sequence.unsqueeze(1))
        check(NAMED[name], LAYOUTS["packed"], plan=plan, advantages=per_sequence)
        clean = check(NAMED[name], BATCH, plan=plan)
        for mask in (BATCH.kwargs["mask"].long(), BATCH.kwargs["mask"].float()):
            assert_same_bits(run_loss(NAMED[name], BATCH, plan=plan, mask=mask)[:3], clean[:3])
        assert_same_bits(
            run_loss(NAMED[name], dataclasses.replace(BATCH, ids=BATCH.ids.int()), plan=plan)[:3],
            clean[:3],
        )
        long, weight = (
            torch.nn.functional.pad(BATCH.hidden, (0, 0, 0, 1)).requires_grad_(),
            leaf(BATCH.weight),
        )
        pl.linear_policy_loss(
            NAMED[name], long[:, :-1], weight, BATCH.ids, plan=plan, **BATCH.kwargs
        ).loss.backward()
        assert_same_bits((long.grad[:, :-1], weight.grad), clean[1:3])
        assert (long.grad[:, -1] == 0).all()
        check(NAMED[name], BATCH, plan=plan, old_logp=BATCH.kwargs["old_logp"].double())


@walked("plan", LOSS_PLANS)
def test_unread_tensors_may_be_left_out(plan: str) -> None:
    nothing = dict.fromkeys(("old_logp", "rollout_logp", "ref_logp", "group_ids"))
    check(PRESETS["reinforce"], BATCH, plan=plan, **nothing)
    check(PRESETS["gpg"], LAYOUTS["packed"], plan=plan, **nothing)
    check(PRESETS["ppo"], BATCH, plan=plan, **{**nothing, "old_logp": BATCH.kwargs["old_logp"]})


@pytest.mark.skipif(not CUDA, reason="needs the memory of a GPU")
@walked(
    ("rows", "width", "vocab", "size"),
    [(331, 199, 1000, 64), (16, 256, 151936, 256), (16, 256, 128256, 256)],
)
@walked("name", ["ppo", "gspo", "grpo"])
def test_full_size(name: str, rows: int, width: int, vocab: int, size: int) -> None:
    """65 869 tokens, and real vocabularies, in bf16: log-probs to 2e-5, gradients to 3e-3."""
    batch = make_head_batch(
        seed=6, rows=rows, width=width, vocab=vocab, size=size, dtype=torch.bfloat16
    ).packed()
    spec = NAMED[name].replace(entropy_coef=0.01)
    truth = run_oracle(spec, batch)
    values = contract(
        batch.hidden.double(), batch.weight.double(), batch.ids, mask=batch.kwargs["mask"]
    )
    for plan in LOSS_PLANS:
        hidden, weight = leaf(batch.hidden), leaf(batch.weight)
        out = pl.linear_policy_loss(spec, hidden, weight, batch.ids, plan=plan, **batch.kwargs)
        out.loss.backward()
        assert rms(out.logp.double() - values.logp) <= 2e-5
        assert rms(hidden.grad.double() - truth.dhidden) <= 3e-3 * rms(truth.dhidden)
        assert rms(weight.grad.double() - truth.dweight) <= 3e-3 * rms(truth.dweight)


@walked("name", NAMED)
def test_every_preset_that_can_takes_one_pass(name: str) -> None:
    """All presets except those that need the whole batch; and those too after a measurement."""
    expected = LOSS_PLANS[1:] if name in NEEDS_WHOLE_BATCH else LOSS_PLANS
    for layout in LAYOUTS:
        assert preset_plans(name, layout) == expected
    totals = totals_of(NAMED[name], BATCH)
    plan = pl.explain_plan(
        NAMED[name],
        leaf(BATCH.hidden),
        leaf(BATCH.weight),
        BATCH.ids,
        totals=totals,
        **arguments_of(NAMED[name], BATCH),
    )
    assert plan.name == "one_pass"


@in_shares(2)
@walked("name", NAMED)
def test_every_preset_with_the_totals_of_the_step(name: str, share: int) -> None:
    spec = NAMED[name]
    for batch in [x for layout, x in LAYOUTS.items() if in_turn(name, layout, share)]:
        totals = totals_of(spec, batch)
        for plan in LOSS_PLANS:
            check(spec, batch, plan=plan, totals=totals)
    check(spec, BATCH, totals="local")
    doubled = dataclasses.replace(totals_of(spec, BATCH), dp_size=2)
    check(spec, BATCH, totals=doubled)


@walked("rejected", ["keep", "renormalise", "drop_sequence"])
@walked("correction", CORRECTIONS, ids=label)
def test_every_correction_under_every_rejection(correction: Any, rejected: Any) -> None:
    spec = BASE.replace(correction=correction, rejected=rejected, aggregate=pl.SeqMeanTokenMean())
    for batch in LAYOUTS.values():
        check(spec, batch)
        check(spec, batch, totals=totals_of(spec, batch))


@walked("trust", TRUSTS, ids=label)
def test_every_trust_region_with_everything_else(trust: Any) -> None:
    correction = (pl.Truncate(1.1), pl.Reject("k1", low=-0.25, high=0.25), pl.SelfNormalise())
    spec = BASE.replace(
        trust=trust, correction=correction, rejected="renormalise", aggregate=pl.PromptMean()
    )
    for batch in LAYOUTS.values():
        for plan in admitted(lambda plan, batch=batch: run_loss(spec, batch, plan=plan)):
            check(spec, batch, plan=plan)


@walked("kl", KLS, ids=label)
def test_every_kl(kl: Any) -> None:
    for ratio in (pl.TokenRatio(), pl.SequenceRatio()):
        spec = pl.LossSpec(ratio=ratio, kl=kl, aggregate=pl.SeqMeanTokenMean())
        for plan in LOSS_PLANS:
            check(spec, BATCH, plan=plan)


@walked(
    "aggregate",
    [pl.PromptMean(), pl.LengthWeighted(), pl.LocalTokenMean(), pl.LocalSeqMeanTokenMean()],
    ids=label,
)
def test_averages_that_look_beyond_a_window(aggregate: Any) -> None:
    for ratio in (pl.TokenRatio(), pl.SequenceRatio()):
        spec = BASE.replace(ratio=ratio, aggregate=aggregate)
        for batch in LAYOUTS.values():
            for plan in admitted(
                lambda plan, spec=spec, batch=batch: run_loss(spec, batch, plan=plan)
            ):
                check(spec, batch, plan=rows_of_plan(spec, batch, plan, 8))


def own_ratio(t: pl.Tokens) -> Tensor:
    return -t.advantages * t.ratio.sqrt()


def against_the_batch(t: pl.Tokens) -> Tensor:
    return -(t.advantages - t.advantages.mean()) * (t.logp - t.logp.sum() / t.mask.sum())


CALLABLES = {
    "a token's own": pl.LossSpec(trust=own_ratio),
    "anyone's": pl.LossSpec(trust=against_the_batch),
    "correction": pl.LossSpec(
        correction=lambda t: pl.Corrected(weight=(t.logp.detach() * 0.1).exp())
    ),
    "kl": pl.LossSpec(kl=lambda t: 0.1 * (t.logp - t.logp.detach().mean()) ** 2),
    "ratio": pl.LossSpec(
        ratio=lambda t: t.log_ratio_to("old") - t.log_ratio_to("old").detach().mean()
    ),
    "aggregate": pl.LossSpec(aggregate=lambda t: t.mask / (1 + t.lengths.max())),
}


@walked("name", CALLABLES)
def test_a_callable_in_a_slot(name: str) -> None:
    """A user's function may read anything, so every chosen plan must be right for one that reads
    everything.
    """
    batch = BATCH.with_tokens(group_ids=None) if name == "aggregate" else BATCH
    check(CALLABLES[name], batch)
    for plan in ("recompute", "stash"):
        check(CALLABLES[name], batch, plan=plan)


def test_a_callable_that_looks_beyond_its_token_takes_no_single_pass() -> None:
    with pytest.raises(pl.InputError, match="one_pass"):
        run_loss(CALLABLES["anyone's"], BATCH, plan="one_pass")


SPLITS = {
    "uneven": [[6], [5, 0, 2, 4, 1], [3]],
    "with an empty micro-batch": [[0, 1], [2, 3], [4, 5, 6], []],
}


@walked("packed", [False, True], ids=["padded", "packed"])
@walked("split", SPLITS)
@walked(
    "name", ["ppo", "grpo", "gspo", "gspo_turn", "clip_cov", "tis", "seq_mask_tis", "luspo", "opsm"]
)
def test_micro_batches_add_up(name: str, split: str, packed: bool) -> None:
    """Cut unevenly, with one `Totals`: loss, gradients (accumulated into `.grad`) and merged
    metrics are those of the whole.
    """
    spec = NAMED[name]
    totals, whole = totals_of(spec, BATCH), run_oracle(spec, BATCH)
    weight, dhidden, records = leaf(BATCH.weight), torch.zeros_like(BATCH.hidden), pl.Metrics({})
    losses = []
    for rows in SPLITS[split]:
        part = BATCH.rows(rows)
        hidden = leaf(part.hidden)
        inside = part.tokens.inside.to(DEVICE)
        shown = part.packed() if packed else part
        x = hidden[inside] if packed else hidden
        out = pl.linear_policy_loss(spec, x, weight, shown.ids, totals=totals, **shown.kwargs)
        out.loss.backward()
        losses.append(out.loss.detach())
        records = records + out.metrics
        dhidden[rows] = hidden.grad
    found = LossRun(torch.stack(losses).sum(), dhidden, weight.grad, records)
    assert_same_loss(found, whole, loss_tolerance(BATCH))


def test_accumulation_into_an_existing_gradient() -> None:
    found = run_loss(PRESETS["ppo"], BATCH)
    hidden, weight = leaf(BATCH.hidden), leaf(BATCH.weight)
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.full_like(weight, 2.0)
    pl.linear_policy_loss(PRESETS["ppo"], hidden, weight, BATCH.ids, **BATCH.kwargs).loss.backward()
    assert_same_bits((hidden.grad, weight.grad), (1 + found.dhidden, 2 + found.dweight))


def with_zero_advantages(batch: HeadBatch) -> HeadBatch:
    """Sequences 1 and 4 without advantage, and some tokens of others."""
    advantages = batch.tokens.advantages.clone()
    advantages[[1, 4]] = 0
    advantages[:, 3] = 0
    return batch.with_tokens(advantages=advantages)


ZEROS = with_zero_advantages(BATCH)
WITHOUT_ADVANTAGE = (
    "ppo",
    "grpo",
    "gspo",
    "gspo_turn",
    "dro",
    "tis",
    "seq_mask_tis",
    "opsm",
    "luspo",
    "cispo",
    "gmpo",
)


@walked(
    "name",
    [
        "ppo",
        "grpo",
        "gspo",
        "gspo_turn",
        "dro",
        "tis",
        "seq_mask_tis",
        "opsm",
        "luspo",
        "cispo",
        "gmpo",
    ],
)
def test_tokens_without_advantage(name: str) -> None:
    """By default nothing shows: same loss, gradient and metrics."""
    for batch in (ZEROS, ZEROS.packed()):
        for plan in LOSS_PLANS:
            check(NAMED[name], batch, plan=plan)


@walked(
    "name",
    [
        "ppo",
        "grpo",
        "gspo",
        "gspo_turn",
        "dro",
        "tis",
        "seq_mask_tis",
        "opsm",
        "luspo",
        "cispo",
        "gmpo",
    ],
)
def test_skipping_tokens_without_advantage(name: str) -> None:
    """Same loss and gradient; the metrics count the tokens that were computed:
    fewer, where the loss does not need them.
    """
    for batch in (ZEROS, ZEROS.packed()):
        expected = run_oracle(NAMED[name], batch)
        found = run_loss(NAMED[name], batch, skip_zero_advantage=True)
        tol = loss_tolerance(batch)
        assert_near(found.loss, expected.loss, tol, "loss")
        assert_near(found.dhidden, expected.dhidden, tol, "gradient of hidden")
        assert_near(found.dweight, expected.dweight, tol, "gradient of weight")
        assert abs(found.metrics["loss"] - expected.metrics["loss"]) <= tol
        everything = expected.metrics["tokens"]
        if name in ("grpo", "dro"):  # a KL, a pull: tokens without advantage have a loss
            assert found.metrics["tokens"] == everything
        else:
            assert 0 < found.metrics["tokens"] < everything


def test_skipped_tiles_are_counted() -> None:
    """ppo trains on single tokens: those computed are the valid ones with an advantage,
    and only they have a logp.
    """
    hidden, weight = leaf(ZEROS.hidden), leaf(ZEROS.weight)
    out = pl.linear_policy_loss(
        PRESETS["ppo"], hidden, weight, ZEROS.ids, skip_zero_advantage=True, **ZEROS.kwargs
    )
    computed = ZEROS.kwargs["mask"] & (ZEROS.kwargs["advantages"] != 0)
    assert out.metrics.compute()["tokens"] == computed.sum()
    assert torch.equal(out.logp != 0, computed)
