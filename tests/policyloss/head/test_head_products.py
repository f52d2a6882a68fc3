"""Matrix products: the same numbers however a device wants them cut, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.head import backward
from policyloss.head import matmul as products
from policyloss.head.head import half_scale

SIZES = [(64, 128, 192), (81, 130, 67), (63, 65, 66), (1, 257, 3), (129, 1, 71)]


def matrices(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(m)
    a, b, c = (
        torch.randn(*size, generator=g, dtype=torch.float64) for size in ((m, k), (k, n), (m, n))
    )
    return a, b, c


@walked("size", SIZES)
def test_cut_products_are_whole_products(
    size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a device wants multiples of 8, every element is still written once,
    in a strided output too.
    """
    monkeypatch.setattr(products, "_needs_alignment", lambda a: True)
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
    """A vocabulary of 50257 is cut into 50240 and 17, on either side;
    50304 is not cut.
    """
    assert products._cut(50257) == (slice(0, 50240), slice(50240, 50257))
    assert products._cut(50304) is None
    assert products._cut(17) is None
    monkeypatch.setattr(products, "_needs_alignment", lambda a: True)
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
    """4096 ones plus 4096 times 2⁻⁹ is 4104, rounded once;
    added up in bfloat16 it would stay at 256 or so.
    """
    monkeypatch.setattr(products, "WIDE_BYTES", 16)  # a row or two at a time
    a = torch.cat([torch.ones(3, 4096), torch.full((3, 4096), 2.0**-9)], 1).bfloat16()
    out = torch.full((3, 2), torch.nan, dtype=torch.bfloat16)
    products.rounded_product(a, torch.ones(8192, 2, dtype=torch.bfloat16), out, scale)
    assert torch.equal(out, torch.full((3, 2), 4104.0 * scale).bfloat16())


def test_the_scale_of_float16() -> None:
    """3e-5 is 0.98·2⁻¹⁵: times 2¹⁵ it is just below 1. The largest of all derivatives decides;
    other types need no scale.
    """
    small, large = torch.tensor([1e-6, -3e-5]), torch.tensor([2.5])
    assert half_scale(torch.float16, small, None) == 2.0**15
    assert half_scale(torch.float16, small, large) == 0.25
    assert (
        half_scale(torch.float16, torch.zeros(2), None)
        == half_scale(torch.float16, torch.tensor([torch.inf]))
        == 1
    )
    assert half_scale(torch.bfloat16, small, None) == 1


@pytest.mark.parametrize("last", [3, 5], ids=["some rows", "all rows"])
@pytest.mark.parametrize("plan", ["one_pass", "recompute", "stash"])
def test_a_scale_is_taken_back(plan: str, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the derivatives are multiplied with before the products, the gradients do not show
    it: hidden, weight and bias.
    """
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias, old = (
        torch.randn(*n, generator=g, dtype=torch.float64) for n in ((2, 5, 4), (7, 4), (7,), (2, 5))
    )
    ids, mask = (
        torch.randint(0, 7, (2, 5), generator=g),
        torch.arange(5) < torch.tensor([[5], [last]]),
    )
    spec = pl.preset("ppo").replace(entropy_coef=0.1)

    def gradients() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        out = pl.linear_policy_loss(
            spec,
            leaves[0],
            leaves[1],
            ids,
            old,
            torch.tensor([1.0, -2.0]),
            mask,
            bias=leaves[2],
            plan=plan,
        )
        return list(torch.autograd.grad(out.loss, leaves))

    plain = gradients()
    monkeypatch.setattr(backward, "half_scale", lambda *_: 8.0)
    for ours, expected in zip(gradients(), plain, strict=True):
        assert ours.abs().max() > 0
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)
