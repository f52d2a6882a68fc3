"""`doctor`: finds out why the log-probabilities of the rollout engine and the trainer differ."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss_lab.diagnosis.diagnose import Thresholds, diagnose
from policyloss_lab.diagnosis.forward import LOGIT_BYTES, Scorer
from policyloss_lab.diagnosis.hypothesis import Case
from policyloss_lab.diagnosis.pairs import Pairs, read_pairs
from policyloss_lab.diagnosis.read import columns_of
from policyloss_lab.diagnosis.verdict import Diagnosis

PAIR_TOKENS = 65536  # tokens used without a model: complete rows, spread over the batch
MODEL_TOKENS = 2048  # tokens used with a model


def doctor(
    *,
    rollout_logp: Tensor,
    old_logp: Tensor | None = None,
    logp: Tensor | None = None,
    mask: Tensor | None = None,
    ids: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    positions: Tensor | None = None,
    earlier_logp: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    model: Any = None,
    prompts: Sequence[Sequence[int]] | None = None,
    other_prompts: Sequence[Sequence[int]] | None = None,
    thresholds: Thresholds | None = None,
    max_tokens: int = MODEL_TOKENS,
) -> Diagnosis:
    """Find out why `rollout_logp` and `old_logp` differ; returns a `Diagnosis`.

    Tensors are padded `[B, T]`, or packed `[N]` with `cu_seqlens`; each number belongs to the token
    of `ids` at the same position. More arguments distinguish more causes:

    - `rollout_logp` with `old_logp` (or else `logp`), and `mask`: shuffled rows, copied
      tensors, wrong masks, rounding, a temperature, top-k and top-p. `earlier_logp` (from older
      weights) detects stale weights.
    - `ids` (the trainer's) with `rollout_ids` (the engine's): whether text was tokenized again.
    - `model` (the trainer's, with the weights that computed `old_logp`) with `ids` and `prompts`
      (the tokens before each row): each cause is simulated on at most `max_tokens` tokens (a number
      below 64 counts as 64). `other_prompts` are the same prompts in another template. Without
      `prompts`, the tokens of `ids` before the first valid one are the prompt; `positions` (0 at
      the first real token) mark the end of padding on the left.

    thresholds: the limits that decide the verdict, a
    `policyloss_lab.diagnosis.diagnose.Thresholds`. The model runs in float32 under `no_grad`. If
    `model` is in float32, simulations change its weights during a forward and restore them;
    otherwise the doctor works on a float32 copy.
    """
    name, trainer = ("logp", logp) if old_logp is None else ("old_logp", old_logp)
    if trainer is None:
        raise InputError("the trainer's log-probabilities are missing; pass old_logp= or logp=.")
    pairs = read_pairs(
        rollout_logp,
        trainer,
        mask,
        trainer_name=name,
        ids=ids,
        earlier=earlier_logp,
        cu_seqlens=cu_seqlens,
    )
    note = _other_ids(ids, rollout_ids, mask)
    if model is None:
        case = Case(_some_rows(pairs, PAIR_TOKENS))
    else:
        case = case_with_model(pairs, model, ids, prompts, positions, cu_seqlens, max_tokens)
    rows = torch.unique_consecutive(case.pairs.row).tolist()
    others = None if other_prompts is None else [other_prompts[row] for row in rows]
    verdict = diagnose(case, thresholds or Thresholds(), others)
    return verdict.because_of("reencoded", note) if note else verdict


def doctor_batch(batch: Any, **options: Any) -> Diagnosis:
    """Check a framework's batch with `doctor`: verl's `DataProto` or its `batch`, the inputs of
    TRL's trainer, OpenRLHF's `Experience`, or a mapping with the keys of one of these, or
    of `doctor`'s arguments.

    options: further arguments of `doctor`, such as `model`. Prompts of
    the batch are not read: to use them, pass `prompts`.
    """
    batch = getattr(batch, "batch", batch)
    batch = batch if hasattr(batch, "keys") else vars(batch)
    known = {name: batch[name] for name in batch.keys() if batch[name] is not None}  # noqa: SIM118
    arguments = {argument: known[name] for argument, name in columns_of(known).items()}
    arguments.pop("prompts", None)
    rows = arguments["rollout_logp"].shape[-1]
    if "ids" in arguments and arguments["ids"].shape[-1] != rows:
        del arguments["ids"]  # some frameworks store prompt and completion together in it
    return doctor(**{**arguments, **options})


def _other_ids(ids: Any, rollout_ids: Any, mask: Any) -> str:
    """A sentence if the tokens of engine and trainer differ."""
    if rollout_ids is None:
        return ""
    if ids is None or ids.shape != rollout_ids.shape:
        shape = None if ids is None else tuple(ids.shape)
        raise InputError(
            f"rollout_ids has shape {tuple(rollout_ids.shape)} and ids {shape}; pass both, of one "
            "shape."
        )
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    wrong = (ids != rollout_ids) & valid
    if not wrong.any():
        return ""
    return (
        f"{int(wrong.sum())} of {int(valid.sum())} valid tokens have another id on the engine's "
        f"side, in {int(wrong.any(-1).sum())} rows: both sides scored different tokens"
    )


def _some_rows(pairs: Pairs, most: int) -> Pairs:
    """Complete rows, evenly spread over the batch, with at most `most` tokens in total."""
    if pairs.size <= most:
        return pairs
    lengths = pairs.starts.diff()
    keep = torch.arange(lengths.numel()) % -(-pairs.size // most) == 0
    chosen = torch.repeat_interleave(keep, lengths)
    return pairs.select(chosen & (chosen.cumsum(0) <= most))


def case_with_model(
    pairs: Pairs,
    model: Any,
    ids: Tensor | None,
    prompts: Sequence[Sequence[int]] | None,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int = MODEL_TOKENS,
) -> Case:
    """The case of some rows of `pairs`, with a `Scorer` of the model on the same rows."""
    if ids is None or ids.dim() != 2 or cu_seqlens is not None:
        raise InputError("model= needs ids= of shape [B, T] to be run on; pass padded rows.")
    if prompts is not None and len(prompts) != ids.shape[0]:
        raise InputError(f"prompts has {len(prompts)} rows and ids {ids.shape[0]}; pass one each.")
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        kind = type(model).__name__
        raise InputError(f"model must be a causal model with config.vocab_size, got {kind}.")
    pairs = _some_rows(pairs, max(min(max_tokens, LOGIT_BYTES // (4 * vocabulary)), 64))
    assert pairs.ids is not None
    if int(pairs.ids.max()) >= vocabulary or int(pairs.ids.min()) < 0:
        raise InputError(
            f"ids holds {int(pairs.ids.max())}, but the model has {vocabulary} tokens; pass the "
            "ids of its own tokenizer."
        )
    rows, index = torch.unique_consecutive(pairs.row, return_inverse=True)
    before, after, offsets = [], [], []
    for row in rows.tolist():
        columns = pairs.column[pairs.row == row]
        start = 0 if prompts is not None else int(columns.min())
        if prompts is not None:
            before.append(_token_ids(prompts[row], row, vocabulary))
        else:
            real = [0]
            if positions is not None:
                real += (positions[row, : start + 1] == 0).nonzero().flatten().tolist()
            before.append(ids[row, real[-1] : start].tolist())
        after.append(ids[row, start : int(columns.max()) + 1].tolist())
        offsets.append(start)
    if not all(before):
        raise InputError(
            "the model needs at least one token before the first valid one of every row; pass "
            "prompts=, a list of token ids for each row."
        )
    scored = torch.stack([index, pairs.column - torch.tensor(offsets)[index]], 1)
    if {w.dtype for w in model.parameters() if w.is_floating_point()} != {torch.float32}:
        model = copy.deepcopy(model).float()
    return Case(pairs, Scorer(model, before, after, scored, pairs.ids.long()))


def _token_ids(prompt: Any, row: int, vocabulary: int) -> list[int]:
    try:
        tokens = [int(t) for t in prompt]
    except (TypeError, ValueError):
        tokens = [-1]
    if any(not 0 <= t < vocabulary for t in tokens):
        raise InputError(
            f"prompts, row {row}, is not a list of token ids from 0 to {vocabulary - 1}; pass the "
            "ids of the model's own tokenizer."
        )
    return tokens
