"""A small Llama trained over ranks is the one trained by a single process:
parameters after five optimizer steps.

The ranks hold unequal shares: other numbers of micro-batches, of rows and of tokens,
one of them nothing to train on.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from ranks_models_work import CASES, ENGINES, SHARES, work
from ranks_work import told

from cases import assert_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="the model is a Llama of transformers"
    ),
]

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = told(tmp_path_factory, work, 4, "transformers.models.llama.modeling_llama")
    names = ["one", *(f"several{size}_{rank}" for size in SHARES for rank in range(size))]
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in names}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", SHARES)
def test_five_steps_over_ranks_are_five_steps_of_one_process(
    size: int, engine: str, case: tuple[str, str, str], trained: dict[str, Any]
) -> None:
    expected, tolerance = trained["one"][case], TOLERANCE[case[2]]
    for rank in range(size):
        actual = trained[f"several{size}_{rank}"][(engine, *case)]
        assert actual["parameters"].keys() == expected["parameters"].keys()
        for name, parameter in expected["parameters"].items():
            assert_same(actual["parameters"][name], parameter, tolerance, f"rank {rank}, {name}")
        assert_same(actual["metrics"], expected["metrics"], tolerance, f"rank {rank}, metric")


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_parameter_moved(case: tuple[str, str, str], trained: dict[str, Any]) -> None:
    """Far more than the tolerance: or the comparison would hold for a step that does nothing."""
    one = trained["one"][case]
    moved = {
        name: float((p - one["start"][name]).abs().max()) for name, p in one["parameters"].items()
    }
    assert min(moved.values()) > 1e-4, moved
