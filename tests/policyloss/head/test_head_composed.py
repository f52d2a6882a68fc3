"""Any composition of parts, under every plan of the head, is `policy_loss` over the logits:
loss, metrics and gradients.

The compositions are drawn by a seeded generator, so that every run tests the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from head_cases import (
    CUDA,
    LOSS_PLANS,
    HeadBatch,
    LossRun,
    arguments_of,
    forced_rows,
    leaf,
    loss_tolerance,
    make_head_batch,
    run_loss,
    run_oracle,
)
from test_head_loss import totals_of
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import AGGREGATES, CORRECTIONS, KLS, RATIOS, REJECTED, TRUSTS, swapped

WEIGHTS = tuple(c[0] for c in CORRECTIONS if getattr(c[0], "weighs", False))
TESTS = (*(c[0] for c in CORRECTIONS if not getattr(c[0], "weighs", False)), pl.OPSM(0.0))


def reaching(reach: str | None, **attributes: Any) -> Any:
    """A decorator that sets the reach of a function, as users of a slot do."""

    def mark(function: Any) -> Any:
        for name, value in {**attributes, **({} if reach is None else {"reach": reach})}.items():
            setattr(function, name, value)
        return function

    return mark


@reaching("token")
def root_of_the_ratio(t: pl.Tokens) -> Tensor:
    return -t.advantages * t.ratio.sqrt()


@reaching("sequence")
def by_the_length(t: pl.Tokens) -> Tensor:
    return -t.advantages * t.ratio * t.sequences.expand(t.lengths.sqrt())


def against_the_batch(t: pl.Tokens) -> Tensor:
    return -(t.advantages - t.advantages.mean()) * (t.logp - t.logp.sum() / t.mask.sum())


@reaching("token", reads_logp=True)
def weight_of_the_token(t: pl.Tokens) -> pl.Corrected:
    return pl.Corrected(weight=(0.3 * t.logp.detach()).exp())


@reaching("sequence", reads_logp=True)
def weight_of_the_sequence(t: pl.Tokens) -> pl.Corrected:
    drift = t.sequence_mean(t.log_ratio_to("old").detach())
    return pl.Corrected(
        weight=t.sequences.expand(drift.exp()), keep=t.sequences.expand(drift > -0.2)
    )


@reaching(None, reads_logp=False)
def weight_of_the_advantage(t: pl.Tokens) -> pl.Corrected:
    return pl.Corrected(weight=t.advantages.abs().clamp(max=1))


def weight_of_anyone(t: pl.Tokens) -> pl.Corrected:
    return pl.Corrected(weight=(t.logp.detach() - t.logp.detach().mean()).exp())


@reaching("token")
def pull_to_reference(t: pl.Tokens) -> Tensor:
    return 0.05 * t.log_ratio_to("ref") ** 2


@reaching("token")
def entropy_floor(t: pl.Tokens) -> Tensor:
    """A bonus by entropy, written as a penalty: its gradient goes through the entropy alone."""
    return 0.1 * (1.5 - t.entropy).clamp(min=0) ** 2


def half_of_the_mean(t: pl.Tokens) -> Tensor:
    return t.mask / (1 + t.lengths.max())


def by_probability(t: pl.Tokens) -> Tensor:
    """No average of the library reads logp; a user's may."""
    return t.logp.detach().exp() / 10


@reaching(None, reads_logp=False)
def by_column(t: pl.Tokens) -> Tensor:
    """One weight per sequence, left to broadcasting where sequences are rows."""
    weight = 1 / (1 + t.lengths)
    return weight.unsqueeze(-1) if t.sequences.offsets is None else t.sequences.expand(weight)


@reaching("sequence")
def half_sequence_ratio(t: pl.Tokens) -> Tensor:
    d = t.log_ratio_to("old")
    return 0.5 * (d + t.sequences.expand(t.sequence_mean(d)))


CUSTOM: dict[str, tuple[Any, ...]] = {
    "ratio": (half_sequence_ratio,),
    "trust": (root_of_the_ratio, by_the_length, against_the_batch),
    "kl": (pull_to_reference, entropy_floor),
    "aggregate": (half_of_the_mean, by_probability, by_column),
}
CUSTOM_CORRECTIONS = (
    weight_of_the_token,
    weight_of_the_sequence,
    weight_of_the_advantage,
    weight_of_anyone,
)
POOLS = {"ratio": RATIOS, "trust": TRUSTS, "kl": (None, None, *KLS), "aggregate": AGGREGATES}


def drawn_spec(rng: random.Random) -> pl.LossSpec:
    """A weight or none, up to two tests, perhaps self-normalised;
    any part or a callable in every other slot.
    """
    while True:
        correction = rng.sample(TESTS, rng.randint(0, 2))
        if rng.random() < 0.7:
            correction.append(rng.choice(CUSTOM_CORRECTIONS if rng.random() < 0.3 else WEIGHTS))
            if rng.random() < 0.6:
                correction.append(pl.SelfNormalise(rng.choice(["tokens", "sequences"])))
        rng.shuffle(correction)
        slots = {
            slot: rng.choice(CUSTOM[slot] if rng.random() < 0.12 else pool)
            for slot, pool in POOLS.items()
        }
        spec = swapped(
            pl.LossSpec(),
            **slots,
            correction=tuple(correction),
            rejected=rng.choice(REJECTED) if correction and rng.random() < 0.4 else "keep",
            entropy_coef=rng.choice([0.0, 0.0, 0.01]),
        )
        if spec is not None:
            return spec


def error_of(actual: LossRun, expected: LossRun, metrics: bool) -> float:
    """The largest difference in loss, gradients and metrics,
    relative to the larger of 1 and the largest expected entry.
    """
    worst = 0.0
    for a, b in zip(actual[:3], expected[:3], strict=True):
        worst = max(worst, float((a - b).abs().max()) / max(1.0, float(b.abs().max())))
    theirs = expected.metrics if metrics else {"loss": expected.metrics["loss"]}
    for name, value in theirs.items():
        ours = actual.metrics[name]
        if ours != value and not (ours != ours and value != value):
            worst = max(worst, abs(ours - value) / max(1.0, abs(value)))
    return worst if worst == worst else float("inf")


def run_with(spec: pl.LossSpec, batch: HeadBatch, frozen: bool, **kwargs: Any) -> LossRun:
    """`run_loss`; with the weight frozen, its gradient is given as 0."""
    if not frozen:
        return run_loss(spec, batch, **kwargs)
    hidden = leaf(batch.hidden)
    arguments = arguments_of(spec, batch, **kwargs)
    out = pl.linear_policy_loss(spec, hidden, batch.weight, batch.ids, **arguments)
    (dhidden,) = torch.autograd.grad(out.loss, hidden)
    return LossRun(out.loss.detach(), dhidden, torch.zeros_like(batch.weight), out.metrics)


def without_some_advantages(batch: HeadBatch) -> HeadBatch:
    """Two sequences and one column without advantage."""
    advantages = batch.tokens.advantages.clone()
    advantages[[1, 4]] = 0
    advantages[:, 3] = 0
    return batch.with_tokens(advantages=advantages)


WINDOW = 6  # rows of a small window: the longest sequence
CALLS: dict[str, dict[str, Any]] = {
    "auto": {},
    **{plan: {"plan": plan} for plan in LOSS_PLANS},
    "small windows": {"plan": "one_pass"},
    "skip": {"skip_zero_advantage": True},
}


def outcome(
    spec: pl.LossSpec, batch: HeadBatch, frozen: bool, call: str, **kwargs: Any
) -> LossRun | None:
    """The result of a call; None where the head reports that this loss cannot go window by window,
    which is correct.
    """
    chosen = dict(CALLS[call])
    try:
        if call == "small windows":
            weight = batch.weight if frozen else leaf(batch.weight)
            arguments = arguments_of(spec, batch, **kwargs, **chosen)
            chosen["plan"] = forced_rows(
                pl.explain_plan(spec, leaf(batch.hidden), weight, batch.ids, **arguments), WINDOW
            )
        return run_with(spec, batch, frozen, **kwargs, **chosen)
    except pl.InputError as error:
        if call in ("one_pass", "small windows", "skip") and "one_pass" in str(error):
            return None
        raise


class Compared(NamedTuple):
    """How many calls were compared, how many of them window by window, and the largest error."""

    calls: int
    in_windows: int
    worst: float


def compare(seed: int, losses: int) -> Compared:
    """`losses` drawn losses on drawn batches, each under all plans,
    against `policy_loss` over the logits.
    """
    rng = random.Random(seed)
    calls, in_windows, worst = 0, 0, 0.0
    for _ in range(losses):
        spec = drawn_spec(rng)
        batch = make_head_batch(seed=rng.randrange(50), rows=6, width=WINDOW, vocab=17, size=5)
        batch = without_some_advantages(batch) if rng.random() < 0.5 else batch
        batch = batch.packed() if rng.random() < 0.5 else batch
        frozen = rng.random() < 0.2
        totals = totals_of(spec, batch) if rng.random() < 0.5 else None
        expected = run_oracle(spec, batch, totals=totals)
        if frozen:
            expected = expected._replace(dweight=torch.zeros_like(expected.dweight))
        for call in CALLS:
            actual = outcome(spec, batch, frozen, call, totals=totals)
            if actual is None:
                continue
            error = error_of(actual, expected, metrics=call != "skip")
            assert error <= 1e-10, (
                f"off by {error:.3g} under {call}, totals={totals}, frozen={frozen}: {spec}"
            )
            calls, in_windows, worst = (
                calls + 1,
                in_windows + (call == "small windows"),
                max(worst, error),
            )
    return Compared(calls, in_windows, worst)


@pytest.mark.skipif(CUDA, reason="the kernels do not take float64")
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_composed_losses_under_every_plan(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Loss, gradients and metrics of 40 drawn losses agree with eager `policy_loss` to 1e-10 in
    float64 (measured: 1e-14).
    """
    compared = compare(seed, losses=40)
    record_property("compared", str(compared))
    assert compared.calls >= 190, compared
    # Or nothing was tested but the plans that are eager themselves.
    assert compared.in_windows >= 20, compared


NORMALISED = {
    "OPSM": (pl.Truncate(2.0), pl.SelfNormalise(), pl.OPSM(0.0)),
    "a callable": (weight_of_the_sequence, pl.SelfNormalise("sequences")),
}


@walked("measured", [False, True], ids=["local", "measured"])
@walked("name", NORMALISED)
def test_normalised_weights_with_a_correction_that_reads_logp(name: str, measured: bool) -> None:
    """The mean weight depends on logp: a window must be given it, and cannot know it alone."""
    spec = pl.LossSpec(correction=NORMALISED[name])
    batch = make_head_batch(seed=2)
    totals = totals_of(spec, batch) if measured else None
    expected = run_oracle(spec, batch, totals=totals)
    plain = run_oracle(
        spec.replace(
            correction=tuple(c for c in spec.correction if not isinstance(c, pl.SelfNormalise))
        ),
        batch,
    )
    # Normalisation shows in this batch.
    assert not torch.allclose(expected.dweight, plain.dweight, rtol=1e-2)
    for plan in ("auto", "recompute", "stash", *(["one_pass"] if measured else [])):
        assert error_of(
            run_loss(spec, batch, plan=plan, totals=totals), expected, True
        ) <= loss_tolerance(batch)
    if not measured:
        with pytest.raises(pl.InputError, match="measure"):
            run_loss(spec, batch, plan="one_pass")


def check_every_call(spec: pl.LossSpec, *calls: str) -> None:
    """The named calls, in both layouts, against `policy_loss` over the logits;
    none may be refused.
    """
    whole = make_head_batch(seed=2, rows=6, width=WINDOW)
    for batch in (whole, whole.packed()):
        expected = run_oracle(spec, batch)
        for call in calls:
            actual = outcome(spec, batch, False, call)
            assert actual is not None, call
            assert error_of(actual, expected, metrics=call != "skip") <= loss_tolerance(batch), call


def test_a_sequence_mask_with_a_token_weight() -> None:
    """A correction that does not read logp gets the whole batch: a window of single tokens is not a
    sequence to judge.
    """
    for test in (
        pl.Reject("k1", "max", high=0.25),
        pl.SequenceMask(0.9, 1.1, weight=None),
        pl.Veto(0.75, 1.5),
    ):
        spec = pl.LossSpec(correction=(weight_of_the_token, test))
        assert spec.reach == "token"
        check_every_call(spec, *CALLS)


def test_a_callable_that_reads_the_entropy() -> None:
    """Its slope goes through the entropy too, whatever the entropy's own coefficient is."""
    for coefficient in (0.0, 0.01):
        spec = pl.LossSpec(kl=entropy_floor, entropy_coef=coefficient)
        check_every_call(spec, "auto", *LOSS_PLANS, "small windows")


def test_an_average_with_one_weight_per_row() -> None:
    """Left to broadcasting, as `policy_loss` leaves it."""
    spec = pl.LossSpec(aggregate=by_column)
    assert spec.reach == "token"
    check_every_call(spec, *CALLS)


@reaching("token")
def token_that_asks_its_sequence(t: pl.Tokens) -> Tensor:
    return -t.advantages * t.ratio * t.sequences.expand(t.lengths.sqrt())


@reaching(None, reads_logp=False)
def average_that_reads_logp(t: pl.Tokens) -> Tensor:
    return t.logp.detach().exp()


@reaching(None, reads_logp=False)
def correction_that_reads_logp(t: pl.Tokens) -> pl.Corrected:
    return pl.Corrected(weight=t.logp.detach().exp())


BROKEN_PROMISES = {
    "its sequence": (pl.LossSpec(trust=token_that_asks_its_sequence), "reach = 'sequence'"),
    "an average": (pl.LossSpec(aggregate=average_that_reads_logp), "reads_logp = False"),
    "a correction": (pl.LossSpec(correction=correction_that_reads_logp), "reads_logp = False"),
}


@walked("name", BROKEN_PROMISES)
def test_a_broken_promise_is_refused(name: str) -> None:
    """A part that reads more than its `reach` would get a wrong gradient; detectable cases raise an
    error.
    """
    spec, words = BROKEN_PROMISES[name]
    batch = make_head_batch(seed=2)
    with pytest.raises(pl.InputError, match=words):
        run_loss(spec, batch, plan="auto")
