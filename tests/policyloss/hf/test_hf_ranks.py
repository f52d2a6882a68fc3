"""`pl.hf` on two ranks: the gradients of DDP, of FSDP2, of frozen and adapted heads and of a
vocabulary cut over ranks are those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_ranks
import pytest
import torch
from ranks_work import told

import policyloss as pl

pytestmark = pytest.mark.slow
KINDS = (*hf_ranks.KINDS, *hf_ranks.ADAPTERS, "vocabulary")
CASES = [f"{kind}, {name}" for name in hf_ranks.SPECS for kind in KINDS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = told(tmp_path_factory, hf_ranks.work, 2, "hf_ranks")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_gradients_of_one_process(
    results: list[dict[str, Any]], case: str
) -> None:
    kind, name = case.split(", ")
    expected = hf_ranks.whole(kind, hf_ranks.SPECS[name])
    assert any("lm_head" in parameter for parameter in expected) == (kind != "frozen")
    for rank in range(2):
        found = results[rank][case]
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            scale = float(gradient.abs().max())
            assert scale > 0
            torch.testing.assert_close(
                found[parameter], gradient, rtol=0, atol=2e-6 * max(scale, 1e-2)
            )


def test_verl_s_cross_entropy_over_a_cut_vocabulary(results: list[dict[str, Any]]) -> None:
    """As verl's kernels do: every rank has all log-probabilities, and the gradients of the hidden
    states add up over the ranks.
    """
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 5, 8, generator=generator).requires_grad_()
    weight = torch.randn(20, 8, generator=generator)
    labels = torch.randint(0, 20, (2, 5), generator=generator)
    out = pl.linear_logprobs(hidden, weight, labels, temperature=0.8, entropy=True)
    (out.logp.flatten() * torch.arange(10) + out.entropy.flatten()).sum().backward()
    for found in (results[0]["verl"], results[1]["verl"]):
        torch.testing.assert_close(found["logp"], out.logp.flatten().detach())
        torch.testing.assert_close(found["entropy"], out.entropy.flatten().detach())
        torch.testing.assert_close(found["hidden"], hidden.grad, rtol=1e-5, atol=1e-6)
