"""Checks of the head's arguments before anything is computed from them.

The values of ids are checked once the device has work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_tensor, description, is_number, refuse_transforms
from policyloss.errors import InputError
from policyloss.functional.masking import compute_dtype
from policyloss.head.head import Head, operand_dtype
from policyloss.metrics import refuse_invalid
from policyloss.tokens import checked_mask


def check_ids(ids: Any, of: str, x: Tensor) -> None:
    """Raise unless `ids` are integers on the device of x `[..., D]`, one per token.

    of: the name of x in errors.
    """
    refuse_transforms()
    check_tensor("ids", ids, "integer", (of, x))
    if ids.shape != x.shape[:-1]:
        raise InputError(
            f"ids has shape {tuple(ids.shape)} but {of} holds tokens of shape "
            f"{tuple(x.shape[:-1])}; give one id per token."
        )


def unusable_temperatures(rate: Tensor, valid: Tensor | None) -> Tensor:
    """Where an inverse temperature is not a positive number, at valid positions."""
    unusable = ~((rate > 0) & rate.isfinite())
    return unusable if valid is None else unusable & valid


def value_summary(head: Head, valid: Tensor | None) -> Tensor:
    """The lowest and the highest id at valid positions, as integers on the device.

    With a support, its faults follow. If each token has a temperature, also the number of
    temperatures at valid positions that are not positive.
    """
    if head.ids.numel() == 0:
        return head.ids.new_zeros(5)
    numbers = [*torch.aminmax(head.ids if valid is None else torch.where(valid, head.ids, 0))]
    if head.support is not None:
        numbers += head.support.faults(head.ids, valid, head.vocabulary.size).unbind()
    if isinstance(head.inverse_temperature, Tensor):
        numbers.append(unusable_temperatures(head.inverse_temperature, valid).sum())
    return torch.stack(numbers)


def refuse_values(numbers: list[int], head: Head, valid: Tensor | None) -> None:
    """Raise if `numbers`, from `value_summary`, show an id or temperature that cannot be used."""
    lowest, highest, *rest = numbers
    (outside, unknown), unusable = ((0, 0), rest) if head.support is None else (rest[:2], rest[2:])
    size, rate = head.vocabulary.size, head.inverse_temperature
    if lowest < 0 or highest >= size:
        worst = lowest if lowest < 0 else highest
        there = head.ids == worst if valid is None else (head.ids == worst) & valid
        place = _first_place(there, head)
        raise InputError(
            f"ids holds {worst} at position {place} (counted over all tokens), but the vocabulary "
            f"has {size} entries, 0 to {size - 1}. Positions that are no tokens (padding, −100) "
            "must be False in mask."
        )
    if unknown:
        raise InputError(
            f"support ids holds {unknown} entries that the vocabulary of {size} does not have."
        )
    if outside:
        raise InputError(
            f"{outside} sampled token(s) are not in their own support, from which they were drawn: "
            "do ids, support and mask belong to the same positions? Positions that are no tokens "
            "must be False in mask."
        )
    if any(unusable) and isinstance(rate, Tensor):
        place = _first_place(unusable_temperatures(rate, valid), head)
        raise InputError(
            f"temperature holds {float(1 / head.of_terms(rate)[place])} at position {place} "
            "(counted over all tokens); it must be a positive number wherever mask is True."
        )


def _first_place(rows: Tensor, head: Head) -> int:
    """The first token, or term, whose row is flagged."""
    return int(head.of_terms(rows).to(torch.uint8).argmax())


def read_later(x: Tensor) -> Callable[[], Any]:
    """A function that returns the numbers in `x`, as `x.tolist()` does.

    They are sent to the host now; only the function waits for them, so the device can get work
    first.
    """
    if x.device.type != "cuda":
        return x.tolist
    copy = x.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def read() -> Any:
        arrived.synchronize()
        return copy.tolist()

    return read


_streams: dict[torch.device, Any] = {}


@contextmanager
def side_stream(moment: Any, device: torch.device) -> Iterator[None]:
    """Run on a side stream that waits only for work queued before `moment`.

    moment: an event of the current stream; None off CUDA, where nothing is queued.
    """
    if moment is None:
        yield
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = _streams[device]
    with torch.cuda.stream(stream):
        stream.wait_event(moment)
        yield


def check_mask(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """`mask` as bool, flat, or None; waits for the device unless the mask is bool."""
    if mask is None:
        return None
    valid, invalid = checked_mask(mask, tokens)
    if invalid is not None and not mask.is_meta:
        refuse_invalid({"invalid_mask_values": invalid})
    return valid.reshape(-1)


def inverse_temperature(
    temperature: float | Tensor, tokens: tuple[int, ...], x: Tensor
) -> float | Tensor:
    """`1 / temperature`: a number, or one per token in the dtype of logits from x, flat.

    The values of a tensor are checked by `value_summary`.
    """
    if isinstance(temperature, Tensor):
        elsewhere = temperature.dim() > 0 or temperature.is_meta
        check_tensor("temperature", temperature, like=("the logits", x) if elsewhere else None)
        if temperature.requires_grad:
            raise InputError(
                "temperature requires grad, but no gradient goes through it; pass "
                "temperature.detach()."
            )
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        if tuple(temperature.shape) != tokens:
            raise InputError(
                f"temperature has shape {tuple(temperature.shape)}; give a number, or one per "
                f"token, shape {tokens}."
            )
        return 1 / temperature.reshape(-1).to(compute_dtype(x))
    value = temperature.item() if isinstance(temperature, Tensor) else temperature
    if not is_number(value) or not (value > 0 and math.isfinite(value)):
        raise InputError(f"temperature must be a positive number, got {description(value)}.")
    return 1 / value


def check_softcap(softcap: float | None) -> None:
    """Raise unless `softcap` is None or a bound."""
    if softcap is not None and not (is_number(softcap) and softcap > 0):
        raise InputError(
            "softcap must be None or a positive number (logits are held within ±softcap), got "
            f"{description(softcap)}."
        )


def check_matrices(hidden: Any, weight: Any, bias: Any, of: str = "") -> None:
    """Raise unless `hidden [..., D]`, `weight [V, D]` and `bias [V]` fit together.

    of: the prefix of their names in errors.
    """
    of_hidden, of_weight, of_bias = f"{of}hidden", f"{of}weight", f"{of}bias"
    for name, x in ((of_hidden, hidden), (of_weight, weight), (of_bias, bias)):
        if hasattr(x, "full_tensor"):
            raise InputError(
                f"{name} is a DTensor; pass {name}.full_tensor(grad_placements=[Partial('avg')]), "
                "one torch.distributed.tensor.Partial per mesh dimension, so that the gradients "
                "of all ranks reach its shards ('avg' with totals as Totals.count makes them, "
                "'sum' with dp_size=1); full_tensor() alone would keep only this rank's."
            )
    check_tensor(of_hidden, hidden, "float")
    check_tensor(of_weight, weight, "float", (of_hidden, hidden))
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"{of_hidden} has shape {tuple(hidden.shape)} and {of_weight} {tuple(weight.shape)}; "
            "give hidden [..., D] and weight [V, D] with the same D (the layout of "
            "torch.nn.Linear(D, V).weight)."
        )
    if bias is not None and (
        not isinstance(bias, Tensor) or tuple(bias.shape) != (weight.shape[0],) or bias.is_complex()
    ):
        raise InputError(
            f"{of_bias} must be a tensor of one number per vocabulary entry, ({weight.shape[0]},), "
            f"got {description(bias)}."
        )
    if bias is not None:
        check_tensor(of_bias, bias, like=(of_weight, weight))
    if hidden.dtype != weight.dtype and operand_dtype(hidden) is None:
        raise InputError(
            f"{of_hidden} is {hidden.dtype} and {of_weight} {weight.dtype}; cast one to the "
            "other's type, or call under torch.autocast."
        )


def check_logits(logits: Any) -> None:
    """Raise unless `logits` are numbers `[..., V]` of a vocabulary."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() < 2:
        raise InputError(
            f"logits must be a floating-point tensor [..., V], got {description(logits)}."
        )
    check_tensor("logits", logits, "float")
    check_vocabulary("logits", logits, logits.shape[-1])


def check_vocabulary(name: str, x: Tensor, size: int) -> None:
    """Raise if the vocabulary of `x` has no entry: no token has a probability then."""
    if size == 0:
        raise InputError(f"{name} has shape {tuple(x.shape)}: the vocabulary is empty.")
