"""A model's forward with another output head, which receives the hidden states; there are no
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from policyloss.errors import PolicyLossError
from policyloss.hf.output_head import (
    Matrices,
    Transformation,
    UnknownHeadError,
    as_forward_of,
    language_model,
    measuring,
    output_head,
    probe_logits,
    with_matrices,
)

# The transformation of the logits by the model of each head, observed in its first forward.
_known: WeakKeyDictionary[nn.Module, Transformation] = WeakKeyDictionary()


class Scored(NamedTuple):
    """result: the return value of the function that replaced the head. output: the model's output;
    its logits have no meaning.
    """

    result: Any
    output: Any


Scores = Callable[[Tensor, Matrices, Transformation], Any]


def run(model: Any, inputs: Mapping[str, Any], scores: Scores, *, check: bool = False) -> Scored:
    """`model(**inputs)`, with `scores(hidden, matrices, transformation)` instead of its head.

    hidden: the input of the head, `[B, T, D]`, with more columns if the head has an adapter
    (`with_matrices`). The module of the head is called, so that FSDP and ZeRO-3 gather its weight.
    The tensors of the result that carry a gradient are attached to the model's output too, because
    wrappers (DDP, FSDP) look for it there.
    check: observe the transformation of the logits again; otherwise only the first call does.
    """
    return run_with(model, output_head(model), lambda: model(**inputs), scores, check=check)


def run_with(
    model: Any,
    head: nn.Module,
    forward: Callable[[], Any],
    scores: Scores,
    *,
    check: bool = False,
) -> Scored:
    """`run`, for a forward that calls the model with other arguments."""
    if check or head not in _known:
        _known[head] = _observed(model, head, forward)
    known = _known[head]
    results: list[Any] = []

    def use(hidden: Tensor, parts: Matrices) -> Tensor:
        results.append(scores(hidden, parts, known))
        empty = hidden.new_zeros(1, 1, parts.weight.shape[0])
        return _hung_on(empty, _differentiable(results[0]))

    def in_its_place(hidden: Tensor) -> Tensor:
        return with_matrices(head, hidden, use)

    output = _forward(model, head, forward, in_its_place)
    return Scored(_anchored(results[0], _logits(output)), output)


@torch.no_grad()
def _observed(model: Any, head: nn.Module, forward: Callable[[], Any]) -> Transformation:
    """The transformation of the logits, by running the model with a head that returns known logits.

    The random state is restored. A row of hidden states also checks that the head computes
    `hidden @ weight.T + bias`.
    """
    probes: list[Tensor] = []
    own_head = head.forward

    def probe(hidden: Tensor) -> Tensor:
        row = hidden.reshape(-1, hidden.shape[-1])[-1:]
        with measuring(head):
            theirs = own_head(row).double()
            return with_matrices(head, row, lambda x, parts: compare(x, parts, theirs))

    def compare(row: Tensor, parts: Matrices, theirs: Tensor) -> Tensor:
        ours = parts.logits(row).double()
        rounding = 16 * torch.finfo(parts.weight.dtype).eps * theirs.abs().max()
        if theirs.shape != ours.shape or not ((theirs - ours).abs().nan_to_num() <= rounding).all():
            raise UnknownHeadError(
                f"the output head of {type(language_model(model)).__name__}, a "
                f"{type(head).__name__}, does not give hidden @ weight.T + bias; head='logits' "
                "uses the logits that the model makes itself."
            )
        probes.append(probe_logits(parts.weight.shape[0], row))
        return probes[0]

    devices = [row.device for row in head.parameters() if row.is_cuda][:1]
    with torch.random.fork_rng(devices):
        output = _forward(model, head, forward, probe)
    return Transformation.seen_in(model, probes[0], _logits(output))


def _forward(
    model: Any,
    head: nn.Module,
    forward: Callable[[], Any],
    in_its_place: Callable[[Tensor], Tensor],
) -> Any:
    """The model's output with `in_its_place` as its head, which must be called exactly once."""
    name = type(language_model(model)).__name__
    calls = 0

    def called(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1 or args or kwargs or hidden.dim() != 3:
            raise UnknownHeadError(
                f"{name} gives its output head {tuple(hidden.shape)} in call {calls} of a forward; "
                "one call with hidden states [B, T, D] was expected. head='logits' uses the "
                "logits that the model makes itself."
            )
        return in_its_place(hidden)

    with as_forward_of(head, called):
        try:
            output = forward()
        except PolicyLossError:
            raise
        except Exception as error:
            if not calls:
                raise
            raise UnknownHeadError(
                f"{name} does something with its logits that fails where there are none: {error}. "
                "head='logits' uses the logits that the model makes itself."
            ) from error
    if not calls:
        raise UnknownHeadError(
            f"{name} did not call what its get_output_embeddings() returns, a "
            f"{type(head).__name__}, so its hidden states could not be caught. head='logits' uses "
            "the logits that the model makes itself."
        )
    return output


def _logits(output: Any) -> Any:
    return output.logits if hasattr(output, "logits") else output[0]


class _HungOn(torch.autograd.Function):
    """Attaches a value to other tensors in the graph, whose gradients from it are 0."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = (torch.zeros_like(x) for x in ctx.saved_tensors)
        return grads[0], *zeros


def _hung_on(value: Tensor, others: list[Tensor]) -> Tensor:
    hung: Tensor = _HungOn.apply(value, *others) if others else value  # type: ignore[no-untyped-call]
    return hung


def _differentiable(result: Any) -> list[Tensor]:
    fields = result if isinstance(result, tuple) else vars(result).values()
    return [x for x in fields if isinstance(x, Tensor) and x.requires_grad]


def _anchored(result: Any, logits: Any) -> Any:
    """The result, with its tensors that carry a gradient attached to the model's output."""
    if not (isinstance(logits, Tensor) and logits.requires_grad):
        return result

    def anchored(x: Any) -> Any:
        return _hung_on(x, [logits]) if isinstance(x, Tensor) and x.requires_grad else x

    if isinstance(result, tuple):
        return type(result)(*map(anchored, result))
    return type(result)(**{name: anchored(x) for name, x in vars(result).items()})
