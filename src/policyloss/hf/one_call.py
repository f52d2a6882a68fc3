"""One call of a model: its arguments, checked, and aligned with the predicted tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_choice, check_tensor, description, fits_kind
from policyloss.errors import InputError
from policyloss.head.validate import read_later
from policyloss.hf.forward import Scores, check_layout, left_padded_positions, logits_of, run_model
from policyloss.hf.output_head import Matrices, Transformation, UnknownHeadError, language_model

HEADS = ("fused", "auto", "logits")


@dataclass(frozen=True)
class ModelCall:
    """One call of a model. inputs: the arguments of the model. ids: the predicted tokens, `[B, n]`,
    or `[N-1]` of a pack, whose sequences begin at `cu_seqlens`. counts_positions: whether the model
    takes positions; None if the caller passes the layout, which is then not checked. index: the
    caller's, the input token that predicts each of `ids`; None if each token predicts the next.
    """

    model: Any
    inputs: dict[str, Any]
    ids: Tensor
    row: tuple[int, ...]
    cu_seqlens: Tensor | None
    counts_positions: bool | None
    index: Tensor | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        logits_to_keep: int | None,
        position_ids: Tensor | None,
        model_inputs: Mapping[str, Any] | None,
        cu_seqlens: Tensor | None,
        index: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> ModelCall:
        """The arguments, checked, as the model takes them."""
        if index is not None:
            if not isinstance(ids, Tensor) or logits_to_keep is not None:
                raise InputError(
                    "index needs ids, the token that each term predicts, and no logits_to_keep; "
                    f"got ids={description(ids)}, logits_to_keep={logits_to_keep!r}."
                )
            cu_seqlens = None  # of the terms, not of the model's input
        elif ids is not None:
            raise InputError("ids needs index, the input token that predicts each of them.")
        tokens, count = _check_input_ids(input_ids, logits_to_keep, cu_seqlens)
        live: Any = attention_mask
        if live is not None and (not isinstance(live, Tensor) or live.shape != tokens.shape):
            shapes = f"{tuple(tokens.shape)}, got {description(live)}"
            raise InputError(f"attention_mask must have the shape of input_ids, {shapes}.")
        packed = cu_seqlens is not None
        taken = inspect.signature(language_model(model).forward).parameters
        inputs = {"input_ids": tokens, "attention_mask": attention_mask, **(model_inputs or {})}
        open_ended = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in taken.values())
        if "use_cache" in taken or open_ended:
            inputs["use_cache"] = False
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        elif cu_seqlens is not None:
            inputs["position_ids"] = _positions_in(cu_seqlens, tokens)
        elif attention_mask is not None and "position_ids" in taken and not model_inputs:
            counted = left_padded_positions(attention_mask)
            inputs |= {} if counted is None else {"position_ids": counted}
        inputs = {name: x for name, x in inputs.items() if x is not None}
        own_layout = position_ids is not None or bool(model_inputs)
        tried = None if own_layout else "position_ids" in taken
        if ids is not None:
            return cls(model, inputs, ids, tuple(ids.shape), None, tried, index)
        ids = tokens[:, tokens.shape[1] - count :]
        row = (ids.shape[0], ids.shape[1])
        return cls(model, inputs, ids.reshape(-1) if packed else ids, row, cu_seqlens, tried)

    def predicting(self, x: Tensor) -> Tensor:
        """The rows of x that predict `ids`: `[B, T, X]` → `[B, n, X]`; with an index, all rows.

        x: one row per input token.
        """
        if x.shape[:2] != self.inputs["input_ids"].shape:
            raise InputError(
                f"{type(language_model(self.model)).__name__} has {tuple(x.shape)} before its head "
                f"or as logits; [B, T, …] with [B, T] = {tuple(self.inputs['input_ids'].shape)}, "
                "the shape of input_ids, was expected."
            )
        if self.index is not None:
            return x
        count = self.row[1]
        kept = x[:, x.shape[1] - count - 1 : -1]
        return kept if self.cu_seqlens is None else kept.reshape(-1, x.shape[-1])

    def check_tensors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a call, checked to belong to the predicted tokens.

        Those of a pack are flat, with the `cu_seqlens` that belong to them.
        """
        if self.index is not None:  # the head checks the shapes of terms
            return dict(tensors)
        for name, x in tensors.items():
            if name in ("mask", "turn_ids", "ages") or name.endswith("_logp"):
                self._check_token_shaped(name, x)
        extras = tensors.get("extras") or {}
        for name, x in extras.items():
            self._check_token_shaped(f"extras[{name!r}]", x)
        if self.cu_seqlens is None:
            return dict(tensors)
        flat = {name: self.flat(x) for name, x in tensors.items()}
        if extras:
            flat["extras"] = {name: self.flat(x) for name, x in extras.items()}
        if "cu_seqlens" in tensors:
            flat["cu_seqlens"] = self.cu_seqlens.clamp(max=self.row[1])
        return flat

    def operands(
        self,
        temperature: float | Tensor,
        vocab_group: Any,
        hidden: Tensor,
        parts: Matrices,
        known: Transformation,
    ) -> dict[str, Any]:
        """The arguments of a fused head that come from the model.

        If the vocabulary is split over ranks into a DTensor, the weight holds the rank's own
        entries.
        """
        weight: Any = parts.weight
        if vocab_group is not None and hasattr(weight, "to_local"):
            weight = weight.to_local()
        return {
            "hidden": self.predicting(hidden),
            "weight": weight,
            "ids": self.ids,
            "index": self.index,
            "bias": parts.bias,
            "vocab_group": vocab_group,
            **known.options(self.flat(temperature)),
        }

    def flat(self, x: Any) -> Any:
        """`x`, flat if it is one number per token of a pack."""
        token_shaped = isinstance(x, Tensor) and tuple(x.shape) == self.row
        return x.reshape(-1) if self.cu_seqlens is not None and token_shaped else x

    def _check_token_shaped(self, name: str, x: Any) -> None:
        if isinstance(x, Tensor) and tuple(x.shape) != self.row:
            raise InputError(
                f"{name} has shape {tuple(x.shape)}, but {self.row} tokens are predicted: "
                "everything is aligned with input_ids[:, 1:] (with logits_to_keep=n, with the last "
                f"n tokens), so {name}[:, t] is about the token input_ids[:, t+1]."
            )

    def default_mask(self) -> Tensor:
        """The tokens that a token of their own sequence predicts, `[B, n]`."""
        predicted = torch.ones(self.row, dtype=torch.bool, device=self.ids.device)
        for places in self._unpredicted_places().values():
            predicted = predicted & ~places
        return predicted

    def _unpredicted_places(self) -> dict[str, Tensor]:
        """Where no token of the same sequence predicts a token, `[B, n]`, by the words for it."""
        live, places = self.inputs.get("attention_mask"), {}
        if self.index is not None:  # the caller names the token that predicts each term
            return {}
        if live is not None:
            live = live.bool()
            places["where attention_mask is 0 (padding)"] = ~live[:, 1:]
            places["that follow padding, which would predict them"] = live[:, 1:] & ~live[:, :-1]
        if self.cu_seqlens is not None:
            positions = _positions_in(self.cu_seqlens, self.inputs["input_ids"])
            places["that begin a packed sequence, which nothing predicts"] = positions[:, 1:] == 0
        return {words: x[:, x.shape[1] - self.row[1] :] for words, x in places.items()}

    def _new_beginnings(self) -> Tensor:
        """How often `position_ids` begin again within a row without cu_seqlens."""
        positions, live = self.inputs.get("position_ids"), self.inputs.get("attention_mask")
        one_each = self.cu_seqlens is None and self.index is None
        if not one_each or not isinstance(positions, Tensor) or positions.dim() != 2:
            return self.ids.new_zeros(())  # more dimensions are those of images
        falls = positions.diff() < 0
        if live is not None:
            falls = falls & live[:, 1:].bool() & live[:, :-1].bool()
        return falls.sum()

    def _refusal(self, mask: Tensor) -> Callable[[], None]:
        """A function that raises if `mask` holds a token that no token of its sequence predicts.

        The counts are sent to the host now and read later, while the device works.
        """
        check_tensor("mask", mask)
        trained, places = mask.reshape(self.row).bool(), self._unpredicted_places()
        counts = [(trained & x).sum() for x in places.values()]
        numbers = read_later(torch.stack([self._new_beginnings(), *counts]))

        def refuse() -> None:
            beginnings, *wrong = numbers()
            if beginnings:
                raise InputError(
                    f"position_ids begin again at {beginnings} places, so that a row holds several "
                    "sequences, and cu_seqlens is missing: pass them as one row [1, N] with "
                    "cu_seqlens [S+1], the index at which each begins."
                )
            for words, number in zip(places, wrong, strict=True):
                if number:
                    raise InputError(
                        f"mask is True at {number} tokens {words}; make it False there. mask is "
                        "aligned with input_ids[:, 1:]: mask & attention_mask[:, 1:].bool() & "
                        "attention_mask[:, :-1].bool() leaves padding out on either side."
                    )

        return refuse

    def per_token(self, x: Tensor) -> Tensor:
        """One number per predicted token, in their shape."""
        return x.view(self.row)

    def run_without_head(self, scores: Scores, check: bool = False) -> Any:
        """Run the model with `scores` instead of its head."""
        if self.counts_positions is not None:
            packed = self.cu_seqlens is not None
            check_layout(self.model, self.inputs, packed, self.counts_positions)
        return run_model(self.model, self.inputs, scores, check=check).result

    def result(self, head: str, mask: Tensor, scores: Scores, from_logits: Any) -> Any:
        """The result of the chosen head for the tokens in `mask`."""
        check_choice("head", head, HEADS)
        if self.index is not None and head != "fused":
            raise InputError(f"index needs head='fused', got head={head!r}.")
        refuse, out = self._refusal(mask), None
        if head != "logits":
            try:
                out = self.run_without_head(scores)
            except UnknownHeadError:
                if head == "fused":
                    raise
        out = from_logits(logits_of(self.model(**self.inputs))) if out is None else out
        refuse()
        return out


def _check_input_ids(
    input_ids: Any, logits_to_keep: int | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, int]:
    """The tokens `[B, T]`, and how many of each row count as predicted."""
    if not isinstance(input_ids, Tensor) or not fits_kind(input_ids, "integer"):
        raise InputError(f"input_ids must be integers [B, T], got {description(input_ids)}.")
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise InputError(
            f"input_ids has shape {tuple(input_ids.shape)}; give [B, T] with at least two tokens, "
            "of which the first predicts the second (a pack is [1, N] with cu_seqlens)."
        )
    most = input_ids.shape[1] - 1
    if cu_seqlens is not None and (input_ids.shape[0] != 1 or logits_to_keep is not None):
        raise InputError(
            f"cu_seqlens cuts one row of tokens, and input_ids has shape {tuple(input_ids.shape)}"
            f", logits_to_keep={logits_to_keep!r}; give [1, N] and no logits_to_keep."
        )
    if logits_to_keep is None:
        return input_ids, most
    if not isinstance(logits_to_keep, int) or not 1 <= logits_to_keep <= most:
        raise InputError(
            f"logits_to_keep must be a whole number from 1 to {most}, the predicted tokens of a "
            f"row (its first is not predicted), got {description(logits_to_keep)}."
        )
    return input_ids, logits_to_keep


def _positions_in(cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
    """The position of each token in its own sequence, `[1, N]`."""
    every = torch.arange(tokens.shape[1], device=tokens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long().contiguous(), every, right=True)
    return (every - cu_seqlens.long()[sequence])[None]
