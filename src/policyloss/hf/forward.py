"""A model's forward with another output head, which receives the hidden states, not logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from policyloss.errors import InputError, PolicyLossError
from policyloss.hf.output_head import (
    OWN_LOGITS,
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
    """result: of the function that replaced the head. output: of the model; its logits are void."""

    result: Any
    output: Any


Scores = Callable[[Tensor, Matrices, Transformation], Any]


def run_model(
    model: Any, inputs: Mapping[str, Any], scores: Scores, *, check: bool = False
) -> Scored:
    """`model(**inputs)`, with `scores(hidden, matrices, transformation)` instead of its head.

    hidden: the input of the head, `[B, T, D]`, with more columns if the head has an adapter
    (`with_matrices`). The module of the head is called, so that FSDP and ZeRO-3 gather its weight.
    The tensors of the result that carry a gradient are attached to the model's output too, because
    wrappers (DDP, FSDP) look for it there.
    check: observe the transformation of the logits again; otherwise only the first call does.
    """
    return run_forward(model, output_head(model), lambda: model(**inputs), scores, check=check)


def run_forward(
    model: Any, head: nn.Module, forward: Callable[[], Any], scores: Scores, *, check: bool = False
) -> Scored:
    """`run_model`, for a forward that calls the model with other arguments."""
    if check or head not in _known:
        _known[head] = _observe(model, head, forward)
    known = _known[head]
    results: list[Any] = []

    def use(hidden: Tensor, parts: Matrices) -> Tensor:
        results.append(scores(hidden, parts, known))
        fields = results[0] if isinstance(results[0], tuple) else vars(results[0]).values()
        moving = [x for x in fields if isinstance(x, Tensor) and x.requires_grad]
        return _hung_on(hidden.new_zeros(1, 1, parts.weight.shape[0]), moving)

    output = _forward(model, head, forward, lambda hidden: with_matrices(head, hidden, use))
    return Scored(_attach(results[0], logits_of(output)), output)


@torch.no_grad()
def _observe(model: Any, head: nn.Module, forward: Callable[[], Any]) -> Transformation:
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
                f"{type(head).__name__}, does not give hidden @ weight.T + bias. {OWN_LOGITS}"
            )
        probes.append(probe_logits(parts.weight.shape[0], row))
        return probes[0]

    devices = [row.device for row in head.parameters() if row.is_cuda][:1]
    with torch.random.fork_rng(devices):
        output = _forward(model, head, forward, probe)
    return Transformation.observed_in(model, probes[0], logits_of(output))


def _forward(
    model: Any, head: nn.Module, forward: Callable[[], Any], instead: Callable[[Tensor], Tensor]
) -> Any:
    """The model's output with `instead` as its head, which must be called exactly once."""
    name = type(language_model(model)).__name__
    calls = 0

    def replacement(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1 or args or kwargs or hidden.dim() != 3:
            raise UnknownHeadError(
                f"{name} gives its output head {tuple(hidden.shape)} in call {calls} of a forward; "
                f"one call with hidden states [B, T, D] was expected. {OWN_LOGITS}"
            )
        return instead(hidden)

    with as_forward_of(head, replacement):
        try:
            output = forward()
        except PolicyLossError:
            raise
        except Exception as error:
            if not calls:
                raise
            raise UnknownHeadError(
                f"{name} does something with its logits that fails where there are none: {error}. "
                f"{OWN_LOGITS}"
            ) from error
    if not calls:
        raise UnknownHeadError(
            f"{name} did not call the module of its get_output_embeddings(), a "
            f"{type(head).__name__}, so its hidden states could not be caught. {OWN_LOGITS}"
        )
    return output


def logits_of(output: Any) -> Any:
    """The logits in a model's output."""
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


def _attach(result: Any, logits: Any) -> Any:
    """The result, with its tensors that carry a gradient attached to the model's output."""
    if not (isinstance(logits, Tensor) and logits.requires_grad):
        return result

    def anchored(x: Any) -> Any:
        return _hung_on(x, [logits]) if isinstance(x, Tensor) and x.requires_grad else x

    if isinstance(result, tuple):
        return type(result)(*map(anchored, result))
    return type(result)(**{name: anchored(x) for name, x in vars(result).items()})


# Layouts: whether a model keeps sequences apart, in padded rows and in packs. A model that mixes
# sequences would be trained on other numbers than it samples with, without an error. So each model
# is tested once, on four tokens, in a few small forwards.

TRIED = 4  # tokens
ADVICE = {
    "left": "pad on the right, or pass the position_ids that it needs",
    "right": "pass sequences of one length without attention_mask",
    "pack": "pass sequences as padded rows",
}
_tried: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


def left_padded_positions(attention_mask: Tensor) -> Tensor | None:
    """The positions of tokens, `[B, T]`, if some row has its padding on the left.

    Counting the row's entries would be wrong there. None leaves the positions to the model.
    """
    live = attention_mask.bool()
    if bool(live[:, 0].all()):
        return None
    return (live.long().cumsum(-1) - 1).clamp(min=0)


def check_layout(model: Any, inputs: dict[str, Any], packed: bool, takes_positions: bool) -> None:
    """Raise if the model mixes sequences that are laid out as in this call. Every rank tries the
    same layouts, whatever its batch holds, because a sharded model's forward is a collective.
    """
    mask = inputs.get("attention_mask")
    if not packed and mask is None:
        return
    known = _tried.setdefault(output_head(model), {})
    kinds = ("pack",) if packed else ("left", "right")
    if kinds[0] not in known:
        tokens = inputs["input_ids"][:1]
        live = tokens[mask[:1].bool()] if isinstance(mask, Tensor) and not packed else tokens[0]
        plain = {"use_cache": False} if "use_cache" in inputs else {}
        known |= _tries(model, live[:TRIED], kinds, takes_positions, plain)
    present = {"pack": packed}
    if not packed and isinstance(mask, Tensor):
        present = {"left": not bool(mask[:, 0].all()), "right": not bool(mask[:, -1].all())}
    for kind in kinds:
        if present[kind] and not known[kind]:
            what = "the sequences of a pack" if kind == "pack" else f"padding on the {kind}"
            raise InputError(
                f"{type(language_model(model)).__name__} does not keep {what} apart from a "
                f"sequence: its hidden states differ from those of the sequence alone; "
                f"{ADVICE[kind]}."
            )


def _tries(
    model: Any, ids: Tensor, kinds: tuple[str, ...], takes_positions: bool, plain: dict[str, bool]
) -> dict[str, bool]:
    n, flipped = ids.shape[0], ids.flip(0)
    with measuring(model):
        alone, other = _hidden(model, torch.stack([ids, flipped]), **plain)
        if "pack" in kinds:
            positions = torch.arange(n, device=ids.device).repeat(2)[None]
            pack = torch.cat([ids, flipped])[None]
            both = _hidden(model, pack, position_ids=positions, **plain)[0]
            return {"pack": _same(both[:n], alone) and _same(both[n:], other)}
        pad = getattr(getattr(language_model(model), "config", None), "pad_token_id", None)
        padding = ids.new_full((2,), pad if isinstance(pad, int) else 0)
        live = torch.ones_like(ids)
        left, right = torch.cat([padding, ids])[None], torch.cat([ids, padding])[None]
        mask = torch.cat([torch.zeros_like(padding), live])[None]
        more = {"position_ids": left_padded_positions(mask)} if takes_positions else {}
        after = _hidden(model, left, attention_mask=mask, **more, **plain)[0]
        before = _hidden(model, right, attention_mask=mask.flip(1), **plain)[0]
        return {"left": _same(after[2:], alone), "right": _same(before[:n], alone)}


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding; parts of many models are float32 whatever their weights are."""
    rounding = max(torch.finfo(x).eps for x in (a.dtype, torch.float32)) ** 0.75
    return bool((a - b).abs().max() <= rounding * b.abs().max())


def _hidden(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
    caught: Tensor = run_model(
        model, {"input_ids": input_ids, **inputs}, lambda hidden, *others: (hidden,)
    ).result[0]
    return caught
