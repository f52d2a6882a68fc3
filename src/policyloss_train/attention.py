"""Ways to run the sequences of a micro-batch through a model's body, so that attention covers only
pairs of tokens within one sequence.

- "varlen": all sequences in one row, and a kernel for sequences of any length,
  `torch.nn.attention.varlen`. It needs CUDA and half precision.
- "flash": the same with the kernel of the package flash-attn, which also supports soft caps.
- "rows": one sequence per row, sorted by length and padded on the right. It needs no kernel, and no
  mask: the padding comes last, so no token of a causal model attends to it.
- "alone": one sequence per call, which is slow but correct for any model.

Each way is a class with the name of the way. `cut` returns the indices of the sequences of each
forward, at most about `budget` tokens or one sequence. `hidden` returns the last hidden states
`[N, H]` of a micro-batch with `ids` `[N]`, `lengths`, ….

Legend: N concatenated tokens of a micro-batch, S sequences, hidden states of width H.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from policyloss.errors import InputError

try:
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:
    _VARLEN_ARGUMENTS = frozenset()

PADDING = 0.25  # the largest share of a padded micro-batch that may be padding
SLACK = 1 / 16  # the share by which a packed micro-batch may exceed its budget
_VARLEN = "policyloss_varlen"  # our name in the registry of transformers
_FLASH = "flash_attention_2"  # the name that transformers uses
# Arguments that change the result of attention and that `varlen_attn` does not support.
_UNKNOWN_TO_VARLEN = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Rows:
    """One sequence per row, padded on the right."""

    name: str = "rows"

    def cut(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        """Longest sequences first, so that the sequences of a micro-batch have similar lengths."""
        parts: list[list[int]] = []
        used = 0
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            width = lengths[parts[-1][0]] if parts else 0
            places, used = width * (len(parts[-1]) + 1 if parts else 0), used + lengths[i]
            if not parts or places > budget or places - used > PADDING * places:
                parts.append([])
                used = lengths[i]
            parts[-1].append(i)
        return parts

    def hidden(self, body: Callable[..., Any], micro: Mapping[str, Any]) -> Tensor:
        """Call the body with ids `[S, longest]`."""
        ids, lengths = micro["ids"], micro["lengths"]
        rows, width = len(lengths), max(lengths)
        if ids.shape[0] == rows * width:
            out = body(input_ids=ids.view(rows, width), use_cache=False)
            return cast("Tensor", out.last_hidden_state.flatten(0, 1))
        places = torch.cat([torch.arange(n) + row * width for row, n in enumerate(lengths)])
        places = places.to(ids.device)
        padded = ids.new_zeros(rows * width).index_copy(0, places, ids)  # pad with any valid id
        out = body(input_ids=padded.view(rows, width), use_cache=False)
        return cast("Tensor", out.last_hidden_state.flatten(0, 1).index_select(0, places))


@dataclass(frozen=True)
class Alone:
    """One sequence per call of the body."""

    name: str = "alone"

    def cut(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        """Each sequence by itself."""
        return [[i] for i in range(len(lengths))]

    def hidden(self, body: Callable[..., Any], micro: Mapping[str, Any]) -> Tensor:
        """Call the body once for each sequence."""
        rows = torch.split(micro["ids"], micro["lengths"])
        outs = [body(input_ids=x[None], use_cache=False) for x in rows]
        return torch.cat([out.last_hidden_state[0] for out in outs])


@dataclass(frozen=True)
class Packed:
    """All sequences in one row; the attention function takes their offsets and separates them."""

    name: str

    def cut(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        """Split the sequences, in their order, into parts of similar size.

        Parts may exceed the budget by `SLACK` if that saves a part, because a short part takes
        the host nearly as long as a full one.
        """
        limit = int(budget * (1 + SLACK))
        even = sum(lengths) / max(math.ceil(sum(lengths) / limit), 1)
        parts: list[list[int]] = []
        used = done = 0
        for i, n in enumerate(lengths):
            full = used + n > limit or done + n / 2 > even * len(parts)
            if not parts or full:
                parts.append([])
                used = 0
            parts[-1].append(i)
            used, done = used + n, done + n
        return parts

    def hidden(self, body: Callable[..., Any], micro: Mapping[str, Any]) -> Tensor:
        """Call the body with ids `[1, N]` and the keyword arguments of transformers for offsets."""
        ids, longest = micro["ids"], max(micro["lengths"])
        ends = micro["cu_seqlens"].to(torch.int32)
        where = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        where |= {"max_length_q": longest, "max_length_k": longest}
        if self.name == "varlen":
            # A four-dimensional mask stops transformers from building its own, of N² entries.
            where["attention_mask"] = ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
        positions = micro["position_ids"][None]
        out = body(input_ids=ids[None], position_ids=positions, use_cache=False, **where)
        return cast("Tensor", out.last_hidden_state[0])


Attention = Rows | Alone | Packed


@torch.no_grad()
def choose(model: Any, wanted: str = "auto") -> tuple[Attention, str]:
    """The first way that reproduces the model's numbers, and a sentence about it.

    wanted: "auto", "varlen", "flash", "rows" or "alone". Each way runs two short sequences together
    and is compared with running them one at a time. Sets the model's attention function; after a
    way that fails, the previous function is restored.
    """
    before, micro = model.config._attn_implementation, _trial(model.device)
    alone = Alone().hidden(model.base_model, micro).float()
    reasons: list[str] = []
    for attention in _candidates(wanted, model.device):
        reason = ""
        if isinstance(attention, Packed):
            reason = _unavailable(attention.name, model) or _set(model, attention.name)
        reason = reason or _difference(model, attention, micro, alone)
        if not reason:
            why = f" ({'; '.join(reasons)})" if reasons else ""
            return attention, f"attention: {attention.name}{why}"
        model.set_attn_implementation(before)
        reasons.append(f"{attention.name}: {reason}")
    raise InputError(
        f"{type(model).__name__} cannot be trained with --attention {wanted}: {'; '.join(reasons)}."
        " --attention alone takes one sequence at a time, which is slower and right for any model."
    )


def _candidates(wanted: str, device: torch.device) -> list[Attention]:
    """The ways to try, the fastest first. On a CPU, "auto" tries only "rows"."""
    ways: list[Attention] = [Packed("varlen"), Packed("flash"), Rows(), Alone()]
    if wanted == "auto":
        return ways[:3] if device.type == "cuda" else [Rows()]
    return [way for way in ways if way.name == wanted]


def _unavailable(name: str, model: Any) -> str:
    """Why a way with a kernel cannot be tried here; "" if it can."""
    if model.device.type != "cuda":
        return "needs CUDA"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"needs half precision, not {str(model.dtype).removeprefix('torch.')}"
    if name == "varlen":
        return "" if _VARLEN_ARGUMENTS else "needs torch 2.10 or later"
    from transformers.utils import is_flash_attn_2_available

    return "" if is_flash_attn_2_available() else "needs the package flash-attn"


def _set(model: Any, name: str) -> str:
    """Set the model's attention function for a way; returns the reason if that fails, else ""."""
    if name == "varlen":
        register()
    implementation = _VARLEN if name == "varlen" else _FLASH
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError, KeyError, RuntimeError) as error:
        return f"{type(model).__name__} does not take it ({error})"
    if model.config._attn_implementation != implementation:
        return f"{type(model).__name__} does not take it"
    return ""


def _trial(device: torch.device) -> dict[str, Any]:
    """A micro-batch of two short sequences."""
    lengths = [5, 3]
    ids = torch.arange(sum(lengths), device=device) % 4
    starts = torch.tensor([0, *lengths], device=device).cumsum(0)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    return {"ids": ids, "lengths": lengths, "cu_seqlens": starts, "position_ids": positions}


def _difference(model: Any, attention: Attention, micro: Mapping[str, Any], alone: Tensor) -> str:
    """How attention differs from the hidden states `alone`, or its error; "" if neither."""
    try:
        together = attention.hidden(model.base_model, micro).float()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, InputError) as error:
        return str(error).partition("\n")[0]
    gap, size = (together - alone).abs().max(), alone.abs().max()
    if gap <= _rounding(model, width=together.shape[-1]) * size:
        return ""
    return f"its hidden states differ by {gap:.3g} from one sequence alone (up to {size:.3g})"


def _rounding(model: Any, width: int) -> float:
    """The largest error of the last hidden states by rounding, relative to the largest state.

    The errors of the layers add up like a random walk, and so do the errors of the `width` terms of
    a sum, which half precision adds up in float32. Correct models of 2 to 64 layers, 64 to 1024
    wide, with random weights, stay below this limit by factors of 4 in float32 and 1.4 in bfloat16.
    If sequences attend to each other, the error is half of the largest state or more.
    """
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 1)
    terms = width if model.dtype in (torch.float32, torch.float64) else 1
    return 4 * math.sqrt(layers * terms) * torch.finfo(model.dtype).eps


def register() -> None:
    """Register "varlen" with transformers. Calls without sequence offsets (sampling) use "sdpa"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_VARLEN, varlen_attention)
    AttentionMaskInterface.register(_VARLEN, sdpa_mask)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row, as transformers calls it.

    query: `[1, heads, N, D]`. key, value: `[1, key heads, N, D]`. cu_seq_lens_q: `[S+1]`.
    → `[1, N, heads, D]`
    """
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        inputs = (module, query, key, value, attention_mask)
        out, _ = sdpa_attention_forward(*inputs, scaling=scaling, **others)
        return out, None
    unknown = [name for name in _UNKNOWN_TO_VARLEN if others.get(name) is not None]
    if unknown or not others.get("is_causal", getattr(module, "is_causal", True)):
        raise InputError(f"it has no {' and no '.join(unknown) or 'attention to later tokens'}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = -1 if sliding_window is None else sliding_window - 1
    return _varlen(q, k, v, cu_seq_lens_q, max_length_q, scaling, window)[None], None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None, window: int
) -> Tensor:
    """Causal attention of tokens `[N, heads, D]` by torch, whose arguments differ by release."""
    options: dict[str, Any] = {}
    groups = q.shape[1] // k.shape[1]
    if "enable_gqa" in _VARLEN_ARGUMENTS:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    if "scale" in _VARLEN_ARGUMENTS:
        options["scale"] = scale
    elif scale not in (None, q.shape[-1] ** -0.5):
        q = q * (scale * q.shape[-1] ** 0.5)
    if "window_size" in _VARLEN_ARGUMENTS:
        options["window_size"] = (window, 0)
    elif window >= 0:
        raise InputError("its sliding window needs a later torch")
    else:
        options["is_causal"] = True
    out = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out
