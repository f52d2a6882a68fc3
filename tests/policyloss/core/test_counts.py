"""Counts are exact: none is added up in float32, where 2²⁴ + 1 is 2²⁴."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from walk import walked

import policyloss as pl
from cases import SPECS, make_batch, run, step_totals
from policyloss.accumulation import StepPack, _share
from policyloss.compat.verl.advantage_numbers import PlainGroups
from policyloss.inputs import Inputs
from policyloss.tokens import Tokens

MANY = 2**25


@cache
def long_pack() -> tuple[Tensor, Tensor]:
    """A mask of 2²⁵ + 3 valid tokens, and 2 that are masked, in sequences of 3 and 2²⁵ + 2."""
    mask = torch.ones(MANY + 5, dtype=torch.bool)
    mask[[3, 4]] = False
    return mask, torch.tensor([0, 3, MANY + 5])


def long_tokens() -> Tokens:
    mask, cu_seqlens = long_pack()
    ones = torch.ones(()).expand(mask.shape)
    return Inputs(
        logp=ones,
        advantages=torch.ones(2),
        mask=mask,
        cu_seqlens=cu_seqlens,
        group_ids=torch.tensor([7, 7]),
    ).tokens()


def test_totals_of_a_long_pack() -> None:
    """3 + 2²⁵ tokens in two sequences of one prompt."""
    mask, cu_seqlens = long_pack()
    totals = pl.Totals.count(mask, cu_seqlens=cu_seqlens, group_ids=torch.tensor([7, 7]))
    assert (int(totals.tokens), int(totals.sequences)) == (MANY + 3, 2)
    assert isinstance(totals.groups, pl.GroupTokens)
    assert totals.groups.tokens.tolist() == [MANY + 3]
    assert int((totals + totals).groups.tokens[0]) == 2 * MANY + 6


def test_sequences_of_a_long_pack() -> None:
    """Their lengths, and the mean of a constant, which is that constant."""
    t = long_tokens()
    assert t.counts.tolist() == [3, MANY]
    assert t.lengths.dtype == torch.float32
    assert t.lengths.tolist() == [3, MANY]
    assert t.sequence_mean(t.logp).tolist() == [1, 1]


def test_averages_of_a_long_pack() -> None:
    """Of 1 at every token: the mean over sequences and the mean over prompts are 1."""
    mask, cu_seqlens = long_pack()
    ones = torch.ones(()).expand(mask.shape)
    for aggregate in (pl.SeqMeanTokenMean(), pl.PromptMean()):
        mean = pl.aggregate_tokens(
            ones, mask, aggregate, cu_seqlens=cu_seqlens, group_ids=torch.tensor([7, 7])
        )
        assert float(mean) == pytest.approx(1, rel=1e-6)


def test_the_share_of_a_rank() -> None:
    mask, cu_seqlens = long_pack()
    data = {"mask": mask, "cu_seqlens": cu_seqlens, "group_ids": torch.tensor([7, 9])}
    counts, members = _share(StepPack.of([data]), 1, None)
    assert counts.tolist() == [MANY + 3, 2, 1, 2, 0]
    assert members.tolist() == [[7, 9], [3, MANY]]


class NoNarrowCounts(TorchDispatchMode):
    """Refuses to make float32 (or less) of flags: summed up,
    they would be counts that stop at 2²⁴.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if (
            name in ("_to_copy", "copy_")
            and isinstance(out, Tensor)
            and out.is_floating_point()
            and out.dtype != torch.float64
        ):
            source = args[-1] if name == "copy_" else args[0]
            assert (
                not isinstance(source, Tensor) or source.dtype != torch.bool or source.dim() == 0
            ), "flags as float32"
        return out


def values_of(batch: Any) -> Any:
    others = {"cu_seqlens": batch.cu_seqlens, "group_ids": batch.group_ids}
    return pl.value_loss(batch.logp, batch.ref_logp, batch.old_logp, batch.mask, **others)


def estimators_of(batch: Any) -> Any:
    rewards, lengths = batch.advantages[:7].reshape(-1)[:7].contiguous(), batch.lengths
    pl.whiten(batch.advantages, batch.mask)
    pl.advantage.opo(rewards, batch.group_ids, lengths)
    pl.advantage.gpg(rewards, batch.group_ids)
    pl.advantage.reinforce_pp(rewards, batch.mask, cu_seqlens=batch.cu_seqlens)
    return pl.advantage.reinforce_pp_baseline(rewards, batch.group_ids, lengths)


@walked("layout", ["padded", "packed"])
def test_no_flag_becomes_a_float32_number(layout: str) -> None:
    """Every spec's loss, gradient, metrics and totals; values and advantages;
    and the step's count.
    """
    batch = make_batch(seed=4, dtype=torch.float32)
    batch = batch if layout == "padded" else batch.packed()
    with NoNarrowCounts():
        for spec in SPECS.values():
            run(spec, batch, step_totals(spec, batch) if spec.needs_statistics else None)
        step_totals(pl.preset("ppo"), batch)
        values_of(batch)
        estimators_of(batch)
        pl.accumulate(pl.preset("grpo"), [batch.kwargs, batch.kwargs])


def test_the_refusal_can_fail() -> None:
    with pytest.raises(AssertionError, match="flags as float32"), NoNarrowCounts():
        torch.ones(3, dtype=torch.bool).to(torch.float32).sum()


def test_the_number_of_groups_is_a_whole_number() -> None:
    """Three prompts of seven sequences each: a sum of sevenths is not 3 in float32."""
    spec = pl.LossSpec(aggregate=lambda t: seen.append(t.totals) or torch.ones(()))
    seen: list[pl.Totals] = []
    ids = torch.arange(21) % 3
    x = torch.zeros(21, 2)
    pl.policy_loss(spec, x, x, x, torch.ones(21, 2, dtype=torch.bool), group_ids=ids)
    assert not seen[0].groups.is_floating_point()
    assert int(seen[0].groups) == 3


def test_sums_over_packs_are_rounded_once() -> None:
    """2²⁴ and a thousand ones: added one by one in float32 the ones are lost,
    and padded rows know better.
    """
    x = torch.ones(1001)
    x[0] = 2**24
    sequences = pl.functional.Sequences.of(x, torch.tensor([0, 1001]))
    assert sequences.sum(x).tolist() == [2**24 + 1000]
    assert sequences.sum(x).dtype == torch.float32


def test_flags_add_up_to_integers() -> None:
    flags = torch.tensor([True, False, True, True])
    rows, pack = (
        pl.functional.Sequences.of(flags.view(2, 2)),
        pl.functional.Sequences.of(flags, torch.tensor([0, 3, 4])),
    )
    for actual, expected in ((rows.sum(flags.view(2, 2)), [1, 2]), (pack.sum(flags), [2, 1])):
        assert actual.dtype == torch.int64
        assert actual.tolist() == expected


def test_sizes_of_plain_groups_in_half_precision() -> None:
    """300 rewards of one prompt: bfloat16 counts to 256."""
    actual = PlainGroups.indexed(
        torch.ones(300, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.int64)
    )
    assert float(actual.size[0]) == 300
