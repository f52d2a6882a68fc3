"""Matrix products: the same numbers however a device wants them cut, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from policyloss.head import products

SIZES = [(64, 128, 192), (81, 130, 67), (63, 65, 66), (1, 257, 3), (129, 1, 71)]


def matrices(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(m)
    a, b, c = (torch.randn(*size, generator=g, dtype=torch.float64) for size in ((m, k), (k, n), (m, n)))
    return a, b, c


@pytest.mark.parametrize("size", SIZES)
def test_cut_products_are_whole_products(size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device wants multiples of 8, every element is still written once, in a strided output too."""
    monkeypatch.setattr(products, "_aligned", lambda a: True)
    a, b, total = matrices(*size)
    room = torch.full((size[0], size[2] + 5), torch.nan, dtype=torch.float64)
    out = room[:, : size[2]]
    products.product(a, b, out)
    torch.testing.assert_close(out, a @ b, rtol=0, atol=1e-12)
    assert room[:, size[2] :].isnan().all()
    expected = total + 0.5 * (a @ b)
    products.add_product(total, a, b, 0.5)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)


def test_the_shapes_that_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 50257 is cut into 50240 and 17, on whichever side it stands; 50304 is not cut."""
    assert products._cut(50257) == (slice(0, 50240), slice(50240, 50257))
    assert products._cut(50304) is None
    assert products._cut(17) is None
    monkeypatch.setattr(products, "_aligned", lambda a: True)
    seen: list[tuple[int, ...]] = []
    whole = torch.mm

    def spy(a: Tensor, b: Tensor, **rest: Tensor) -> Tensor:
        seen.append((*a.shape, b.shape[1]))
        return whole(a, b, **rest)

    monkeypatch.setattr(torch, "mm", spy)
    a, b, out = matrices(130, 128, 71)
    products.product(a, b, out)
    assert seen == [(128, 128, 64), (128, 128, 7), (2, 128, 64), (2, 128, 7)]


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_rounded_once(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 ones plus 4096 times 2⁻⁹ is 4104, rounded once; added up in bfloat16 it would stay at 256 or so."""
    monkeypatch.setattr(products, "WIDE_BYTES", 16)  # a row or two at a time
    a = torch.cat([torch.ones(3, 4096), torch.full((3, 4096), 2.0**-9)], 1).bfloat16()
    out = torch.full((3, 2), torch.nan, dtype=torch.bfloat16)
    products.rounded_product(a, torch.ones(8192, 2, dtype=torch.bfloat16), out, scale)
    assert torch.equal(out, torch.full((3, 2), 4104.0 * scale).bfloat16())
