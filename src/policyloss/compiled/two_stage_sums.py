"""Sums over all tokens, written so that a GPU needs two kernels for all of them together.

The compiler splits each sum over n tokens in two and fuses the first halves, which read the same
tokens. The second halves share no input, so each becomes a separate kernel, which takes longer to
launch than to run. Here all sums are split at the same place while the loss is traced, and the
second halves share an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# What reduces a whole tensor to a number.
_WHOLE = (aten.sum.default, aten.amax.default, aten.amin.default)
# Partial results of a sum: enough to keep every processor busy in the first stage, few enough for
# one block in the second.
FEWEST, MOST = 512, 4096


class InTwoStages(TorchDispatchMode):
    """A context in which every sum, maximum and minimum over all `n` tokens is taken as
    `[G, n/G] → [G] → 0-dim`.

    The numbers are the same but for rounding. Rows whose number is a symbol are one partial result
    each; a pack whose length is a symbol, or has no divisor to cut it by, is left alone.
    """

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n = n
        # By the number of partial results, or its symbol: the first ones.
        self.shared: dict[int | str, Tensor] = {}

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        more = kwargs or {}
        cut = _cut(args[0], self.n) if operation in _WHOLE and len(args) == 1 else None
        if cut is None:
            return operation(*args, **more)
        partial = _first_stage(operation, args[0], cut, more)
        return _second_stage(operation, partial, self.shared.setdefault(cut, partial), more)


def _cut(x: Tensor, n: int) -> int | str | None:
    """G, the number of partial results of a reduction or its symbol; None to leave it alone."""
    if not all(isinstance(size, int) for size in x.shape):
        return str(x.shape[0]) if x.dim() == 2 else None
    return partials(x.shape[0] if x.dim() > 1 else 1, n) or None if x.numel() == n else None


def partials(rows: int, n: int) -> int:
    """A divisor of n between FEWEST and MOST, made of rows cut or joined evenly; 0 if none."""
    if rows > MOST:
        return next(
            (
                rows // k
                for k in range(rows // MOST, rows // FEWEST + 1)
                if k and rows % k == 0 and rows // k <= MOST
            ),
            0,
        )
    width = n // rows
    fewest = -(-FEWEST // rows)
    return next(
        (rows * k for k in range(fewest, min(MOST // rows, width) + 1) if width % k == 0), 0
    )


def _first_stage(operation: Any, x: Tensor, cut: int | str, more: dict[str, Any]) -> Tensor:
    """`[G, n/G] → [G]`."""
    rows = x if isinstance(cut, str) else x.reshape(cut, -1)
    along: Any = aten.sum.dim_IntList if operation is aten.sum.default else operation
    return along(rows, [1], **more)  # type: ignore[no-any-return]


def _second_stage(operation: Any, partial: Tensor, first: Tensor, more: dict[str, Any]) -> Tensor:
    """`[G] → 0-dim`, reading `first` beside `partial` in a condition that always holds: what shares
    a read, the compiler fuses.
    """
    always = (first == first) | (first != first)
    return operation(torch.where(always, partial, torch.zeros_like(partial)), **more)  # type: ignore[no-any-return]
