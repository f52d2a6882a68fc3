"""One case of a comparison: drawn from its seed, and run on both sides."""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from conformance.compare import flatten
from conformance.inputs import KINDS, draw
from conformance.suite import Function, Inputs, Options, Outputs

MANY = 50  # draws of a function; a function with no more is always run completely
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Everything needed to run one case again."""

    seed: int
    kind: str
    dtype: str
    options: Options

    def inputs(self, function: Function) -> Inputs:
        """The inputs of this case, the same each time."""
        return function.inputs(draw(self.seed, self.kind, DTYPES[self.dtype]), self.options)

    def describe(self) -> dict[str, Any]:
        """The case in JSON, as results and failures show it."""
        return {"seed": self.seed, "kind": self.kind, "dtype": self.dtype, "options": self.options}


@dataclass
class Side:
    """The result of one side: named outputs and the gradients of "loss", or the error it raised."""

    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    differentiable: bool = False

    @property
    def refusal(self) -> str:
        """The error in one line; "" if there was none."""
        return (
            ""
            if self.error is None
            else f"{type(self.error).__name__}: {self.error}".splitlines()[0][:200]
        )


def cases(
    function: Function, shift: int = 0, dtypes: tuple[str, ...] = tuple(DTYPES), every: int = 1
) -> Iterator[Case]:
    """The cases of a function: options × kinds of batch × seeds × dtypes, which see the same
    numbers. `shift` draws others.

    every: of a function with many cases, one in so many, in turn of every option and kind.
    """
    drawn = product(function.options, function.kinds or KINDS, range(function.seeds))
    for options, kind, i in islice(drawn, 0, None, _step(function, every)):
        words = json.dumps(options, sort_keys=True, default=str)
        seed = zlib.crc32(f"{shift}/{function.name}/{words}/{kind}/{i}".encode()) >> 1
        for dtype in (d for d in dtypes if function.dtypes is None or d in function.dtypes):
            yield Case(seed, kind, dtype, options)


def count(function: Function, every: int = 1) -> int:
    """How many cases `cases` gives."""
    dtypes = len(DTYPES if function.dtypes is None else function.dtypes)
    return math.ceil(_draws(function) / _step(function, every)) * dtypes


def _draws(function: Function) -> int:
    return len(function.options) * len(function.kinds or KINDS) * function.seeds


def _step(function: Function, every: int) -> int:
    return every if _draws(function) > MANY else 1


def run_side(
    call: Callable[[Inputs, Options], Outputs],
    function: Function,
    inputs: Inputs,
    options: Options,
    seed: int,
) -> Side:
    """One side's call on its own copy of the inputs, torch's random generator at the case's seed;
    then the gradient of "loss".
    """
    own = {name: _copy(x, name in function.differentiate) for name, x in inputs.items()}
    # Not torch.manual_seed: it queues calls for every absent accelerator, which is slow.
    torch.default_generator.manual_seed(seed)
    try:
        outputs = flatten(call(own, copy.deepcopy(options)))
        side = Side(outputs)
        if function.differentiate and "loss" in outputs:
            leaves = {
                name: own[name]
                for name in function.differentiate
                if isinstance(own.get(name), Tensor)
            }
            side.differentiable = bool(outputs["loss"].requires_grad)
            side.gradients = _gradients(outputs["loss"], leaves, seed)
    except Exception as error:  # an error is the result of that side
        return Side(error=error)
    return side


def _copy(value: Any, differentiate: bool) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(differentiate and value.is_floating_point())
    return copy.deepcopy(value)


def _gradients(loss: Tensor, leaves: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """d Σ w·loss / d leaf, with w = 1 for a single number and fixed random weights otherwise;
    zeros where there is no path.
    """
    if not loss.requires_grad:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    w = torch.randn(
        loss.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(loss)
    found = torch.autograd.grad(
        (loss * w).sum() if loss.ndim else loss, list(leaves.values()), allow_unused=True
    )
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), found, strict=True)
    }
