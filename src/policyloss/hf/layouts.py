"""Whether a model keeps sequences apart: from padding on either side, and from others in a pack.

A model that mixes sequences would be trained on other numbers than it samples with, without an
error. So each model is tested once, on four tokens, in a few small forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from policyloss.errors import InputError
from policyloss.hf.forward import run
from policyloss.hf.output_head import language_model, measuring, output_head

TRIED = 4  # tokens
ADVICE = {
    "left": "pad on the right, or pass the position_ids that it needs",
    "right": "pass sequences of one length without attention_mask",
    "pack": "pass sequences as padded rows",
}
_tried: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
Positions = Callable[[Tensor], Tensor | None]


def counted_positions(attention_mask: Tensor) -> Tensor | None:
    """The positions of tokens if some row has its padding on the left, where counting the row's
    entries would be wrong; None leaves them to the model. `[B, T]`
    """
    live = attention_mask.bool()
    if bool(live[:, 0].all()):
        return None
    return (live.long().cumsum(-1) - 1).clamp(min=0)


def check_layout(model: Any, inputs: dict[str, Any], packed: bool, takes_positions: bool) -> None:
    """Raise if the model mixes sequences that are laid out as in this call.

    Every rank tries the same layouts, whatever its batch holds, because a sharded model's forward
    is a collective.
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
    model: Any,
    tokens: Tensor,
    kinds: tuple[str, ...],
    takes_positions: bool,
    plain: dict[str, bool],
) -> dict[str, bool]:
    n, flipped = tokens.shape[0], tokens.flip(0)
    with measuring(model):
        alone, other = _hidden(model, torch.stack([tokens, flipped]), **plain)
        if "pack" in kinds:
            positions = torch.arange(n, device=tokens.device).repeat(2)[None]
            pack = torch.cat([tokens, flipped])[None]
            both = _hidden(model, pack, position_ids=positions, **plain)[0]
            return {"pack": _same(both[:n], alone) and _same(both[n:], other)}
        padding = tokens.new_full((2,), _padding_id(model))
        live = torch.ones_like(tokens)
        left, right = torch.cat([padding, tokens])[None], torch.cat([tokens, padding])[None]
        mask = torch.cat([torch.zeros_like(padding), live])[None]
        more = {"position_ids": counted_positions(mask)} if takes_positions else {}
        after = _hidden(model, left, attention_mask=mask, **more, **plain)[0]
        before = _hidden(model, right, attention_mask=mask.flip(1), **plain)[0]
        return {"left": _same(after[2:], alone), "right": _same(before[:n], alone)}


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding; parts of many models are float32 whatever their weights are."""
    rounding = max(torch.finfo(x).eps for x in (a.dtype, torch.float32)) ** 0.75
    return bool((a - b).abs().max() <= rounding * b.abs().max())


def _hidden(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
    caught: Tensor = run(
        model, {"input_ids": input_ids, **inputs}, lambda hidden, *others: (hidden,)
    ).result[0]
    return caught


def _padding_id(model: Any) -> int:
    pad = getattr(getattr(language_model(model), "config", None), "pad_token_id", None)
    return pad if isinstance(pad, int) else 0
