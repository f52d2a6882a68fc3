"""`metrics="all" | "basic" | "none"`: the metrics of each level, and its number of operations.

On a GPU an eager loss takes the time of launching its kernels, so their number is bounded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launches import Launches
from walk import walked

import policyloss as pl
from cases import LOCAL, PRESETS, Batch, make_batch, step_totals

BATCH = make_batch(seed=3).map(lambda x: x.to(torch.float32))
LAYOUTS = {"padded": BATCH, "packed": BATCH.packed()}
BASIC = {"loss", "tokens", "clip_fraction", "clip_fraction_dual", "kl_old_k1"}


def call(spec: Any, metrics: Any, batch: Batch = BATCH, totals: Any = None) -> pl.LossOutput:
    logp = batch.logp.clone().requires_grad_()
    entropy, divergence = (getattr(batch, n).clone().requires_grad_() for n in CARRIED)
    arguments = {**batch.kwargs, "logp": logp, "entropy": entropy, "divergence": divergence}
    return pl.policy_loss(spec, metrics=metrics, **arguments, totals=totals)


CARRIED = ("entropy", "divergence")


@walked("layout", LAYOUTS)
@walked("name", PRESETS)
def test_a_level_is_a_choice_of_the_same_numbers(name: str, layout: str) -> None:
    spec, batch = PRESETS[name], LAYOUTS[layout]
    everything, basic, none = (call(spec, m, batch) for m in ("all", "basic", "none"))
    full = everything.metrics.compute()
    shown = basic.metrics.compute()
    assert shown == {name: full[name] for name in full if name in BASIC}
    assert {"loss", "tokens"} <= shown.keys()
    assert none.metrics.compute() == {}
    assert everything.loss.item() == basic.loss.item() == none.loss.item()


def test_a_call_without_a_level_has_all_metrics() -> None:
    logp, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
    out = pl.policy_loss("ppo_dual_clip", logp, old, torch.ones(1, 2), torch.ones(1, 2))
    same = pl.policy_loss(
        "ppo_dual_clip", logp, old, torch.ones(1, 2), torch.ones(1, 2), metrics="all"
    )
    assert out.metrics.compute() == same.metrics.compute()
    assert out.metrics["kl_old_k1"].item() == -0.25  # −((−1 + 1.5) + 0) / 2


@walked("wrong", ["some", None, True, ["all"], "All"])
def test_an_unknown_level_names_the_choices(wrong: Any) -> None:
    with pytest.raises(pl.InputError, match=r"metrics.*all.*basic.*none"):
        call("ppo_dual_clip", wrong)
    with pytest.raises(pl.InputError, match=r"metrics.*all.*basic.*none"):
        pl.compiled_loss("ppo_dual_clip", metrics=wrong)


def plain(metrics: str, mask: torch.Tensor, totals: Any = None) -> tuple[int, int]:
    """Operations of forward and backward of PPO's loss on log-probabilities and advantages."""
    logp = BATCH.logp.clone().requires_grad_()
    with Launches() as forward:
        out = pl.policy_loss(
            "ppo_dual_clip",
            logp,
            BATCH.old_logp,
            BATCH.advantages,
            mask,
            metrics=metrics,
            totals=totals,
        )
    with Launches() as backward:
        out.loss.backward()
    return forward.count, backward.count


# The number of operations that would launch kernels, forward and backward, of `ppo_dual_clip`.
# verl's function has 51 and 22 for the same loss and three metrics.
MOST = {"all": (60, 7), "basic": (38, 7), "none": (26, 7)}


@walked("level", MOST)
def test_an_eager_loss_launches_few_kernels(level: str) -> None:
    forward, backward = plain(level, BATCH.mask)
    assert forward <= MOST[level][0]
    assert backward <= MOST[level][1]
    # The step's counts as tensors cost no more than counting.
    totals = pl.Totals.count(BATCH.mask)
    assert plain(level, BATCH.mask, totals)[0] <= MOST[level][0] + 4


def test_without_metrics_nothing_is_computed_for_them() -> None:
    """What `none` computes is a part of what `all` computes, and no count but the divisor."""
    logp = BATCH.logp.clone().requires_grad_()
    arguments = ("ppo_dual_clip", logp, BATCH.old_logp, BATCH.advantages, BATCH.mask)
    with Launches() as none:
        pl.policy_loss(*arguments, metrics="none")
    assert none.by_name["count_nonzero"] == 1
    assert none.by_name["sum"] == 1
    assert not {"amax", "amin", "expm1", "gt", "lt", "bitwise_and"} & none.by_name.keys()


def test_every_level_serves_every_way_to_the_loss() -> None:
    """The head, the compiled loss and an accumulated step give the same numbers of a level."""
    spec = PRESETS["ppo_dual_clip"]
    assert not isinstance(spec.aggregate, LOCAL)
    hidden = torch.randn(*BATCH.mask.shape, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(11, 8, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(BATCH.mask.numel()).view(BATCH.mask.shape) % 11
    logp = pl.linear_logprobs(hidden, weight, ids).logp
    old = logp + 0.1
    for level, names in (("all", None), ("basic", BASIC), ("none", set())):
        rest = (old, BATCH.advantages, BATCH.mask)
        direct = pl.policy_loss(spec, logp, *rest, metrics=level).metrics.compute()
        head = pl.linear_policy_loss(spec, hidden, weight, ids, *rest, metrics=level)
        compiled = pl.compiled_loss(spec, metrics=level)(logp, *rest)
        share = {"mask": BATCH.mask, "old_logp": old, "advantages": BATCH.advantages}
        step = pl.accumulate(spec, [share], metrics=level)
        for micro in step:
            micro.loss(logp)
        shown = [x.compute() for x in (head.metrics, compiled.metrics, step.metrics)]
        for other in shown:
            extra = {"entropy"} if other is shown[0] and level == "all" else set()
            assert other.keys() - extra == direct.keys()
            assert names is None or set(other) == names
            for name in direct:
                assert other[name] == pytest.approx(direct[name], rel=1e-5, abs=1e-6)


def test_a_wrong_mask_is_refused_at_every_level() -> None:
    """Counts that make `compute` raise are not metrics: no level may hide a mistake."""
    mask = torch.where(BATCH.mask, 1.0, 0.0)
    mask[0, 0] = 0.5
    for level in MOST:
        with pytest.raises(pl.InputError, match="0 and 1"):
            pl.policy_loss(
                "ppo_dual_clip", BATCH.logp, BATCH.old_logp, BATCH.advantages, mask, metrics=level
            )
    assert step_totals(PRESETS["ppo_dual_clip"], BATCH).tokens == BATCH.mask.sum()
