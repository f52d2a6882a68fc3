"""`torch.compile(fullgraph=True)` traces every loss into one graph,
and the compiled loss is the eager one.

Dynamo alone (backend "eager") proves that nothing breaks the graph, for all presets; Inductor
checks that what comes out of the whole compiler still has the same loss, gradient and metrics, for
a token-level and a sequence-level loss.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import policyloss as pl
from cases import (
    MIXTURES,
    PRESETS,
    Batch,
    Result,
    assert_same,
    assert_same_result,
    make_batch,
    run,
    with_streams,
)
from policyloss.compat.parts import GuardedSeqMeanTokenMean
from policyloss.compat.trl.parts import RolloutProduct, WrittenKL

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
BATCH = make_batch(seed=9)
LAYOUTS = {"padded": BATCH, "packed": BATCH.packed()}
# Presets that differ in numbers only (ppo, dapo, bnpo) are one graph with other constants; the
# first of each kind is traced.
KINDS = {
    re.sub(r"\binf\b|-?\d[\d.e-]*", "#", repr(spec)): name
    for name, spec in reversed(PRESETS.items())
}
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="Inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """One cache per test: dynamo gives up on a function it had to recompile eight times,
    and every spec is a recompile.
    """
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_run(spec: Any, batch: Batch, backend: str, totals: Any = None) -> Result:
    """As `cases.run`, with the whole of `policy_loss` in one compiled graph."""
    carried = ("logp", "entropy", "divergence")
    given = with_streams(spec, batch.kwargs)
    arguments = {name: x for name, x in given.items() if name not in carried}
    compared = batch.divergence

    def loss(logp: Tensor, entropy: Tensor) -> tuple[Tensor, pl.Metrics]:
        moved = {"entropy": entropy, "divergence": compared + 4 * (entropy - entropy.detach())}
        out = pl.policy_loss(spec, logp, totals=totals, **moved, **arguments)
        return out.loss, out.metrics

    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=False)
    logp, entropy = (
        batch.logp.clone().requires_grad_(),
        batch.entropy.clone().requires_grad_(
            "entropy" in spec.reads or spec.divergence is not None
        ),
    )
    value, metrics = compiled(logp, entropy)
    (2 * value).backward()  # a loss is often scaled before its backward
    dentropy = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad / 2
    assert logp.grad is not None
    return Result(value.detach(), batch.as_rows(logp.grad / 2), batch.as_rows(dentropy), metrics)


FULL = pl.LossSpec(
    ratio=pl.SequenceRatio(grad="token"),
    trust=pl.CovClip(fraction=0.2, cov_low=-1.0, seed=3),
    correction=(
        pl.Band(0.8, 1.25),
        pl.Reject("k3", "max", high=0.05),
        pl.SelfNormalise("sequences"),
    ),
    rejected="renormalise",
    kl=pl.KL("k3", 0.1, weight="ratio"),
    entropy_coef=0.01,
    aggregate=pl.PromptMean(),
)

OF_FRAMEWORKS = pl.LossSpec(
    ratio=RolloutProduct(outside="mask", low=0.5, high=2.0),
    kl=WrittenKL("k3", 0.1, clamp=None, ratio_level="sequence"),
    aggregate=GuardedSeqMeanTokenMean(0.5),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_every_preset_is_one_graph(name: str) -> None:
    assert_same_result(
        compiled_run(PRESETS[name], LAYOUTS["packed"], "eager"),
        run(PRESETS[name], LAYOUTS["packed"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        PRESETS["grpo"],
        PRESETS["gspo_token"],
        PRESETS["clip_cov"],
        PRESETS["gmpo"],
        FULL,
        OF_FRAMEWORKS,
        *MIXTURES.values(),
    ],
    ids=["grpo", "gspo_token", "clip_cov", "gmpo", "all slots", "parts of frameworks", *MIXTURES],
)
def test_padded_rows_are_one_graph(spec: Any) -> None:
    """One loss of each kind, because padded rows take longer to trace:
    the gradient is part of the graph.
    """
    assert_same_result(compiled_run(spec, LAYOUTS["padded"], "eager"), run(spec, LAYOUTS["padded"]))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "layout"),
    [("ppo_dual_clip", "padded"), pytest.param("gspo", "packed", marks=pytest.mark.slow)],
)
def test_inductor_gives_the_same_numbers(name: str, layout: str) -> None:
    batch = LAYOUTS[layout]
    totals = pl.Totals(tokens=int(batch.mask.sum()) + 40, sequences=9)
    assert_same_result(
        compiled_run(PRESETS[name], batch, "inductor", totals), run(PRESETS[name], batch, totals)
    )


def test_a_step_of_another_size_does_not_recompile() -> None:
    """Totals given as tensors are data, not constants:
    their values change every step and the graph stays.
    """
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def loss(logp: Tensor, totals: pl.Totals) -> Tensor:
        return pl.policy_loss(PRESETS["grpo"], **{**BATCH.kwargs, "logp": logp}, totals=totals).loss

    compiled = torch.compile(loss, fullgraph=True, backend=counting)
    for tokens, sequences in ((100, 7), (250, 12), (31, 5)):
        totals = pl.Totals(torch.tensor(tokens), torch.tensor(sequences))
        assert_same(compiled(BATCH.logp, totals), loss(BATCH.logp, totals), what="loss")
    assert graphs == 1


def test_a_graph_break_would_be_seen() -> None:
    def trust(t: pl.Tokens) -> Tensor:
        return -t.advantages * (t.ratio if t.mask.any() else t.logp)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"[Dd]ata-dependent|Dynamic control"):
        compiled_run(pl.LossSpec(trust=trust), BATCH, "eager")
