"""The types of a comparison: a function of a framework, the options to try, and the calls of theirs
and ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

GRADIENT = "gradient"  # a Defect's name of the gradients in all differentiated inputs

Options = dict[str, Any]
Inputs = dict[str, Any]  # tensors, and whatever else a call needs (JSON values)
# Named results: tensors, numbers or None; a 0-dim "loss" is differentiated.
Outputs = dict[str, Any]


@dataclass(frozen=True)
class Defect:
    """A case in which the framework is wrong or undefined: the reason, and our result instead.
    It is listed, not compared.

    outputs: the names of the outputs it concerns (the others are still compared), "gradient" for
    the gradients; None for all of them and the gradients. A defect that never shows in the numbers
    fails the run, as does a number of ours that is not finite.
    """

    reason: str
    instead: str
    outputs: tuple[str, ...] | None = None


def no_defect(options: Options, inputs: Inputs) -> Defect | None:
    """No known defects."""
    return None


@dataclass(frozen=True)
class Function:
    """One function (or class) of a framework, under test.

    name: as the table shows it. options: every combination of options to try (JSON values). inputs:
    draws a case from an `inputs.Batch` (already in the dtype under test). theirs, ours: the same
    call made on each side, with named outputs of the same names; `theirs` imports the framework
    inside, so that this module loads without it. differentiate: the inputs in which the gradient of
    output "loss" is compared (for a tensor "loss" that is not 0-dim, the gradient of its sum
    weighted by a fixed random tensor). seeds: how many batches to draw for each kind of batch,
    dtype and combination of options. dtypes: the compared ones, None for all; a function that
    computes in float32 whatever it gets is compared in float32. releases: the versions of the
    framework this entry applies to,
    None for all that are tried. defect: derives known defects of the framework from the case
    itself, before anything runs; several may concern one case.
    """

    name: str
    options: list[Options]
    inputs: Callable[[Any, Options], Inputs]
    ours: Callable[[Inputs, Options], Outputs]
    theirs: Callable[[Inputs, Options], Outputs]
    differentiate: tuple[str, ...] = ()
    seeds: int = 1
    kinds: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    releases: tuple[str, ...] | None = None
    defect: Callable[[Options, Inputs], Defect | Sequence[Defect] | None] = no_defect


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors among a case's inputs."""
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
