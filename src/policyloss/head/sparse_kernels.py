"""Triton kernels of the plan "sparse": the choice of columns, and sums of a few rows of a table.

They are the `choose_columns` and the `add_weighted_sums` of `sparse.py`. Nothing is added across
programs, so the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from policyloss.functional.triton_modules import on_device_of
from policyloss.head.kernels import LOG2_E, load_logits, rate_of, scaling_arguments
from policyloss.head.matmul import product
from policyloss.head.softmax_rows import Scaling, Statistics
from policyloss.head.sparse import LONG, MOST, Bags

TILE, TILE_WARPS = 2048, 4
WIDTH, WIDTH_WARPS = 1024, 4


@triton.jit
def _load_tile(
    z_ptr, ids_ptr, lse_ptr, tile, z_stride, V, eps, rates, bias_ptr, softcap,
    PER_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The columns of one tile, whether each is kept for its size, and p/eps of the others."""
    row = tl.program_id(0)
    column = tile * TILE + tl.arange(0, TILE)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    u = load_logits(z_row, bias_ptr, softcap, column, column < V, True)
    lse2 = tl.load(lse_ptr + row) * LOG2_E
    p = tl.exp2(u * (rate_of(rates, row, PER_ROW) * LOG2_E) - lse2)
    large = ((p >= eps) | (column == tl.load(ids_ptr + row))) & (column < V)
    return column, large, tl.where(large, 0.0, p / eps)


@triton.jit
def _sums_kernel(
    z_ptr, ids_ptr, lse_ptr, sums_ptr, larges_ptr, z_stride, V, eps,
    rates, bias_ptr, softcap, PER_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of one tile of a row: the sum of p/eps over its tail, and the number of its large entries."""
    tile = tl.program_id(1)
    _, large, q = _load_tile(
        z_ptr, ids_ptr, lse_ptr, tile, z_stride, V, eps, rates, bias_ptr, softcap, PER_ROW, TILE
    )
    at = tl.program_id(0) * tl.num_programs(1) + tile
    tl.store(sums_ptr + at, tl.sum(q, axis=0))
    tl.store(larges_ptr + at, tl.sum(large.to(tl.int32), axis=0))


@triton.jit
def _columns_kernel(
    z_ptr, ids_ptr, lse_ptr, starts_ptr, places_ptr, numbers_ptr, columns_ptr, tiles,
    z_stride, V, eps, rates, bias_ptr, softcap,
    PER_ROW: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the kept columns of one row; a tile without one is not read again."""
    row = tl.program_id(0)
    for tile in range(tiles):
        at = row * tiles + tile
        number = tl.load(numbers_ptr + at)
        if number > 0:
            column, large, q = _load_tile(
                z_ptr, ids_ptr, lse_ptr, tile, z_stride, V, eps, rates, bias_ptr, softcap,
                PER_ROW, TILE,
            )  # fmt: skip
            after = tl.load(starts_ptr + at) + tl.cumsum(q, axis=0)
            kept = large | (tl.floor(after) > tl.floor(after - q))
            place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
            out = columns_ptr + row * MOST + tl.load(places_ptr + at) + place
            tl.store(out, column, mask=kept & (place < number))


def choose_columns(
    z: Tensor, ids: Tensor, s: Statistics, scaling: Scaling, offsets: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`sparse.choose_columns` in one read of z, and a second one of the tiles with kept entries."""
    rows, vocabulary = z.shape
    grid = (rows, triton.cdiv(vocabulary, TILE))
    columns = torch.full((rows, MOST), -1, dtype=torch.int64, device=z.device)
    sums = torch.empty(grid, dtype=torch.float32, device=z.device)
    larges = torch.empty(grid, dtype=torch.int32, device=z.device)
    row = (z, ids.contiguous(), s.lse.contiguous())
    rest = (z.stride(0), vocabulary, eps, *scaling_arguments(scaling))
    with on_device_of(z):
        if rows:
            _sums_kernel[grid](*row, sums, larges, *rest, TILE=TILE, num_warps=TILE_WARPS)
        ends = sums.double().cumsum(1) + offsets[:, None]
        starts = torch.cat([offsets[:, None].double(), ends[:, :-1]], 1)
        numbers = larges + (ends.floor() - starts.floor()).to(torch.int32)
        counts = numbers.sum(1)
        numbers.masked_fill_((counts > MOST)[:, None], 0)  # a dense row needs no columns
        places = numbers.cumsum(1, dtype=torch.int32) - numbers
        if rows:
            _columns_kernel[(rows,)](
                *row, starts.frac().float(), places, numbers, columns, grid[1], *rest,
                MOST=MOST, TILE=TILE, num_warps=TILE_WARPS,
            )  # fmt: skip
    return columns, counts


@triton.jit
def _bags_kernel(
    table_ptr, index_ptr, weights_ptr, starts_ptr, counts_ptr, at_ptr, out_ptr,
    table_stride, out_stride, D, LONG: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`out[at] += Σ weight·table[index]` over the entries of one bag, for some of the columns;
    nothing for a bag without an entry, and for a long one.
    """
    bag = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    count = tl.load(counts_ptr + bag)
    inside = (column < D) & (count > 0) & (count <= LONG)
    out = out_ptr + tl.load(at_ptr + bag) * out_stride + column
    total = tl.load(out, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(starts_ptr + bag)
    for entry in range(first, first + tl.where(count <= LONG, count, 0)):
        of_row = table_ptr + tl.load(index_ptr + entry) * table_stride + column
        value = tl.load(of_row, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + entry) * value
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_weighted_sums(out: Tensor, table: Tensor, bags: Bags) -> None:
    """`sparse.add_weighted_sums`; long bags are one matrix product. The host waits for nothing."""
    with on_device_of(out):
        _bags_kernel[(bags.at.shape[0], triton.cdiv(out.shape[1], WIDTH))](
            table, bags.members, bags.weights, bags.starts, bags.counts, bags.at, out,
            table.stride(0), out.stride(0), out.shape[1], LONG=LONG, WIDTH=WIDTH,
            num_warps=WIDTH_WARPS,
        )  # fmt: skip
    if bags.long:
        # The last row takes the entries of the other bags.
        matrix = table.new_zeros(bags.long + 1, table.shape[0])
        long = bags.counts > LONG
        row = torch.where(long, long.cumsum(0) - 1, bags.long)
        entries = bags.members.shape[0]
        row = torch.repeat_interleave(row, bags.counts, output_size=entries)
        matrix[row, bags.members] = bags.weights.to(table.dtype)
        sums = torch.empty(bags.long, out.shape[1], dtype=torch.float32, device=out.device)
        product(matrix[:-1], table, sums)
        at = bags.at[long.to(torch.uint8).argsort(descending=True, stable=True)[: bags.long]]
        out[at] += sums.to(out.dtype)
