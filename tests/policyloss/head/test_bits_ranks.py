"""Within `exact()` two and four processes have the bits of one: a vocabulary in shards, and the
sequences of a step spread over ranks.
"""

from __future__ import annotations

from typing import Any

import bits_ranks
import pytest
import torch
import torch.multiprocessing
from bits_ranks import CASES, ROWS, batch_of, one_process
from head_cases import CUDA
from started import run_ranks, started_once

pytestmark = pytest.mark.skipif(CUDA, reason="its ranks are processes on a CPU")
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=RANKS)
def results(request, tmp_path_factory) -> list[dict[str, Any]]:
    """What each of several processes computed, all of them started once."""
    ranks = request.param

    def start(folder: Any) -> None:
        run_ranks(bits_ranks.body, str(folder), ranks, count=ranks)

    folder = started_once(tmp_path_factory, f"bits_ranks_{ranks}", start)
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(ranks)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """The same in this process."""
    return {name: one_process(spec, batch_of(dtype)) for name, (spec, dtype) in CASES.items()}


@pytest.mark.parametrize("plan", ["one_pass", "recompute"])
@pytest.mark.parametrize("name", CASES)
def test_a_vocabulary_in_shards_has_the_bits_of_one(results, alone, name, plan):
    expected = alone[name]
    for of_rank in results:
        actual = of_rank[f"shards: {name}, {plan}"]
        for what in ("loss", "hidden", "logp", "entropy"):
            assert torch.equal(actual[what], expected[what]), what
        assert actual["metrics"] == expected["metrics"]


@pytest.mark.parametrize("name", CASES)
def test_a_step_spread_over_ranks_has_the_bits_of_one(results, alone, name):
    expected = alone[name]
    for rank, of_rank in enumerate(results):
        actual = of_rank[f"spread: {name}"]
        rows = list(range(rank, ROWS, len(results)))
        assert torch.equal(actual["hidden"][rows], expected["hidden"][rows])
        assert actual["metrics"] == expected["metrics"]


@pytest.mark.parametrize("shards", ["uneven", "no multiple"])
def test_shards_that_cut_a_part_are_refused_on_every_rank(results, shards):
    for of_rank in results:
        refusal = of_rank[f"refusal: {shards}"]
        assert "exact() cuts a vocabulary into 8 equal parts" in refusal
        assert ("1000 entries" in refusal) == (shards == "no multiple")
