"""Preference losses over data-parallel and context-parallel ranks: equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from preference_ranks import NAMES, batch, results, work
from started import run_ranks, started_once
from walk import walked

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    def start(place: Path) -> None:
        run_ranks(work, str(place), count=2)

    folder = started_once(tmp_path_factory, "preference_ranks", start)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


# kind: the tensors that are split. axis: along which gradients are joined. size: the number of
# ranks over which the engine averages gradients (1: it sums them).
@pytest.mark.slow
@walked(("kind", "axis", "size"), [("data", 0, 2), ("context", 1, 1), ("counted", 1, 2)])
@walked("name", NAMES)
def test_ranks_equal_one_process(name: str, kind: str, axis: int, size: int, said: Said) -> None:
    whole = results(name, batch())
    ranks = [answers[name][kind] for answers in said]
    assert sum(rank["loss"] for rank in ranks) / size == pytest.approx(whole["loss"], rel=1e-12)
    grad = torch.cat([rank["grad"] for rank in ranks], axis) / size
    torch.testing.assert_close(grad, whole["grad"])
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(whole["metrics"], rel=1e-12)
