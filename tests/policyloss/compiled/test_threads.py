"""A compiled loss may be called for the first time from several threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import policyloss as pl
from cases import make_batch
from policyloss.arguments import is_compiling, tracing

THREADS = 4


def in_threads(calls):
    """The results of all calls, which start at the same moment."""
    start = threading.Barrier(len(calls))

    def run(call):
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_the_first_call_from_several_threads():
    """Each thread gets the eager loss, and all get the same gradient."""
    batch = make_batch(seed=2, rows=5, width=5)
    spec = pl.LossSpec(trust=pl.Clip(0.1, 0.2))
    fused = pl.compiled_loss(spec)
    expected = pl.policy_loss(spec, batch.logp, batch.old_logp, batch.advantages, batch.mask).loss

    def call():
        logp = batch.logp.clone().requires_grad_()
        loss = fused(logp, batch.old_logp, batch.advantages, batch.mask).loss
        loss.backward()
        return loss.detach(), logp.grad

    results = in_threads([call] * THREADS)
    for loss, gradient in results:
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(gradient, results[0][1])


def test_a_trace_does_not_reach_other_threads():
    """A loss that another thread computes meanwhile still checks its arguments."""
    mask = torch.full((2, 3), -100)
    x = torch.zeros(2, 3)

    def bad_mask():
        with pytest.raises(pl.InputError, match="mask"):
            pl.policy_loss(pl.preset("ppo"), x, x, x, mask)

    with tracing():
        assert is_compiling()
        in_threads([bad_mask])
