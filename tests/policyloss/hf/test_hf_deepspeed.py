"""`pl.hf` in DeepSpeed's engine on two ranks: ZeRO-2 cuts the gradients, ZeRO-3 the weights too,
and the gradients are those of one process.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import deepspeed_ranks
import pytest
import torch
from ranks_work import told

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.system() != "Linux", reason="the recipes extra installs DeepSpeed on Linux only"
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = told(tmp_path_factory, deepspeed_ranks.work, 2, "deepspeed_ranks")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.filterwarnings("ignore:.*tie")
@pytest.mark.parametrize("case", deepspeed_ranks.CASES)
def test_gradients_equal_the_gradients_of_one_process(
    results: list[dict[str, Any]], case: str
) -> None:
    stage, head, way = case.split(", ")
    expected = deepspeed_ranks.whole(head, way)
    for rank in range(2):
        gathered = dict(results[rank][case])
        # Weights are cut between two forwards with ZeRO-3 only; a tied one is the embedding's.
        kept = int(gathered.pop("numbers of the head"))
        assert (kept > 0) == (stage == "ZeRO-2" and head != "tied head")
        assert gathered.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            assert scale > 0
            torch.testing.assert_close(
                gathered[name], gradient, rtol=0, atol=2e-6 * max(scale, 1e-2)
            )
