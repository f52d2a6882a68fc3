"""A batch split into windows: numbers that do not depend on logp are computed once for the batch.

Corrections compare old and rollout log-probabilities, and the weights of an average depend on masks
and counts only; so corrections and weights are known before the first matmul, and a window need not
hold the tokens that they read. A window must hold the tokens that the *gradient* reads: single
tokens, or complete sequences (`LossSpec.reach`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.aggregate import weighted_sum
from policyloss.functional.segments import Sequences
from policyloss.head.backward import GradientSums
from policyloss.head.head import Head, Index, windows
from policyloss.head.plans import Work
from policyloss.head.teacher.comparison import Comparison, compute_rows, start_checks
from policyloss.head.terms import Terms
from policyloss.inputs import stand_in_logp
from policyloss.loss import corrected_tokens, token_losses, with_ratio
from policyloss.parts.correction import Corrected, SelfNormalise, correction_name
from policyloss.spec import LossSpec
from policyloss.tokens import Tokens
from policyloss.totals import Totals


class Window(NamedTuple):
    """Some tokens of a batch.

    rows: the `size` tokens with logits. moved: the number of rows that may have a gradient; they
    come first. tokens: all positions that the loss reads, masked positions included. place: the
    indices of the rows in `tokens`. cu_seqlens: the bounds of the sequences in `tokens`. These
    three are None if every token is a row and needs no other token. terms: with shared rows, their
    terms, which are the `tokens`.
    """

    rows: Index
    size: int
    moved: int
    tokens: Tensor | None = None
    place: Tensor | None = None
    cu_seqlens: Tensor | None = None
    terms: Terms | None = None

    def with_terms(self, terms: Terms) -> Window:
        """The same rows, and those of all `terms` that read them."""
        of_rows = terms.of_rows(self.rows)
        return self._replace(tokens=of_rows.order, terms=of_rows)


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one call, with the corrections' weight and the average's weight.

    These weights are known before the logits; they are 0-dim or token-shaped. step: the caller's
    totals, None if this call is the whole step. weight: None without a correction, or if a
    correction reads logp. corrections: of the spec, in its order; if one reads logp, the others
    hold their result for the batch. live: the tokens that may have a gradient, flat bool. stand_in:
    the word that old_logp was given as, None for a tensor.
    """

    spec: LossSpec
    tokens: Tokens
    step: Totals | None
    weight: Tensor | None
    corrections: tuple[Any, ...]
    live: Tensor
    stand_in: str | None = None

    @cached_property
    def average(self) -> Tensor:
        """The weight of each token in the average.

        Computed at the first use: by then the device has a matmul to work on.
        """
        t = self.tokens
        weight: Tensor = self.spec.aggregate(t.with_totals(self.step))
        return weight if weight.dim() == 0 else weight.broadcast_to(t.mask.shape)

    @property
    def rows(self) -> Tensor:
        """The tokens that count, flat bool."""
        return self.tokens.mask.reshape(-1)

    def gradients(self, window: Window, known: dict[str, Tensor]) -> list[Tensor | None]:
        """The derivatives of the loss by the numbers `known` of a window's rows, `[R]` each, by
        autograd over the pipeline of `policy_loss`.

        known: logp, entropy and, with a teacher, divergence. Only the derivative by the entropy
        may be None.
        """
        with torch.enable_grad():
            t, at = self._of(window, known)
            leaves = ((name, t.read(name)) for name in known)
            moving = {name: x for name, x in leaves if x.requires_grad}
            weight = None if self.weight is None else self.weight.reshape(-1)[at].view(t.mask.shape)
            if self.spec.corrections_by_logp:
                here = tuple(
                    c.at(at, t.mask.shape) if isinstance(c, _BatchCorrection) else c
                    for c in self.corrections
                )
                t, corrected = corrected_tokens(self.spec.replace(correction=here), t, self.step)
                weight = corrected.weight
            t = with_ratio(self.spec, t).replace(flags=False)
            losses = token_losses(self.spec, t, weight).loss
            average = self.average
            if average.dim():
                average = average.reshape(-1)[at].view(t.mask.shape)
            total = weighted_sum(losses, average)
            slopes = torch.autograd.grad(total, list(moving.values()), allow_unused=True)
        of_rows: dict[str, Tensor | None] = {
            name: None if name == "entropy" else torch.zeros_like(x) for name, x in known.items()
        }
        for name, slope in zip(moving, slopes, strict=True):
            if slope is not None:
                each = slope.reshape(-1) if window.place is None else slope[window.place]
                of_rows[name] = each.to(known[name].dtype)
        return list(of_rows.values())

    def _of(self, window: Window, known: dict[str, Tensor]) -> tuple[Tokens, Index]:
        """The tokens of the window: single tokens `[1, R]`, or a pack of complete sequences."""
        at = window.rows if window.tokens is None else window.tokens
        shape = (1, -1) if window.cu_seqlens is None else (-1,)

        def cut(x: Any) -> Any:
            return None if x is None else x.reshape(-1)[at].view(shape)

        if window.place is not None:
            room = known["logp"].new_zeros(self.rows[at].shape[0])
            known = {name: room.index_copy(0, window.place, x) for name, x in known.items()}
        raw = {name: cut(x) for name, x in self.tokens.raw.items() if name not in known}
        for name, x in known.items():
            leaf = x.detach().view(shape)
            raw[name] = leaf.requires_grad_(name != "entropy" or entropy_has_slope(self.spec))
        if self.stand_in is not None:
            policies = (raw["logp"], raw["rollout_logp"])
            raw["old_logp"] = stand_in_logp(self.stand_in, *policies, raw["ages"])
        t, mask = self.tokens, cut(self.rows)
        sequences: Sequences = _SingleTokens(tuple(mask.shape))
        if window.cu_seqlens is not None:
            sequences = Sequences.of(mask, window.cu_seqlens)
        return replace(
            t,
            mask=mask,
            sequences=sequences,
            memo={},
            advantages=cut(t.advantages),
            weights=cut(t.weights),
            turn_ids=cut(t.turn_ids),
            positions=cut(t.positions),
            raw=raw,
            group_ids=None,
            # A window's numbers are not the batch's, so a number that was not measured is an error.
            measured={} if t.measured is None else t.measured,
        ), at


@dataclass(frozen=True)
class MixedBatch:
    """The tokens of one call of a mixture, and the batch of each stream with its weight."""

    tokens: Tokens
    streams: tuple[tuple[float, TokenBatch], ...]

    @property
    def rows(self) -> Tensor:
        """The tokens that count in the call, flat bool; not every one is in a stream."""
        return self.tokens.mask.reshape(-1)

    @property
    def live(self) -> Tensor:
        """The tokens that may have a gradient in some stream, flat bool."""
        return torch.stack([batch.live for _, batch in self.streams]).any(0)

    def gradients(self, window: Window, known: dict[str, Tensor]) -> list[Tensor | None]:
        """`TokenBatch.gradients` of all streams, weighted and summed."""
        of_streams = [(w, batch.gradients(window, known)) for w, batch in self.streams]
        sums: list[Tensor | None] = []
        for i in range(len(known)):
            terms = [w * d for w, slopes in of_streams if (d := slopes[i]) is not None]
            sums.append(reduce(torch.add, terms) if terms else None)
        return sums


@dataclass(frozen=True, eq=False)
class _BatchCorrection:
    """A correction with its result for the batch: a window need not hold the sequences it read."""

    result: Corrected
    name: str
    shape: torch.Size

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, t: Tokens) -> Corrected:
        return self.result

    def at(self, at: Index, shape: torch.Size) -> _BatchCorrection:
        """The result for some tokens."""
        cut = (
            None if x is None else x.broadcast_to(self.shape).reshape(-1)[at].view(shape)
            for x in self.result
        )
        return _BatchCorrection(Corrected(*cut), self.name, shape)


def entropy_has_slope(spec: LossSpec) -> bool:
    """Whether the loss may change with the entropy: by its bonus, or by a user's callable."""
    return bool(spec.entropy_coef) or not spec.is_data


@dataclass(frozen=True)
class _SingleTokens(Sequences):
    """The layout of tokens from anywhere in the batch.

    A part that reads sequences needs a larger reach.
    """

    def _refuse(self, x: Tensor) -> NoReturn:
        raise InputError(
            "a part with reach = 'token' read a token's sequence: set reach = 'sequence', so that "
            "the head keeps sequences together, or leave the attribute out."
        )

    sum_here = max = expand = runs = _refuse  # type: ignore[assignment]


def batch_of(
    spec: LossSpec, t: Tokens, step: Totals | None, stand_in: str | None = None
) -> TokenBatch:
    """Fill in all of `t` that does not depend on logp."""
    weight, corrections = None, spec.correction
    t = replace(t, measured=None if step is None else step.statistics)
    if spec.corrections_by_logp:
        corrections = tuple(
            part  # it reads logp, or comes after all others
            if getattr(part, "reads_logp", True) or isinstance(part, SelfNormalise)
            else _BatchCorrection(part(t), correction_name(part), t.mask.shape)
            for part in spec.correction
        )
    else:
        t, corrected = corrected_tokens(spec, t, step)
        weight = None if corrected.weight is None else corrected.weight.broadcast_to(t.mask.shape)
    live = t.mask.reshape(-1)
    if spec.follows_advantage:
        silent = t.advantages == 0
        if weight is not None:
            silent = silent | (weight == 0)
        if spec.reach == "sequence":
            silent = t.sequences.expand(t.sequences.sum(t.mask & ~silent) == 0)
        live = live & ~silent.reshape(-1)
    return TokenBatch(spec, t, step, weight, corrections, live, stand_in)


AnyBatch: TypeAlias = TokenBatch | MixedBatch


def token_windows(head: Head, batch: AnyBatch, work: Work, rows: int) -> list[Window]:
    """Rows in any order: first the rows with a gradient, then the rows for the metrics alone (if
    `work` counts them), which share the last window of the others if they fit into it.
    """
    n = work.with_gradient
    order = None
    if n != work.tokens:
        # Sorted, not searched for: their numbers are known, so nothing has to be read back.
        counted, live = head.row_flags(batch.rows), head.row_flags(batch.live)
        idle = (~counted).to(torch.uint8) + (~live).to(torch.uint8)
        order = torch.argsort(idle, stable=True)
    moved, others = windows(n, rows, head.tiles), work.computed - n
    all_windows = [
        Window(w if order is None else order[w], w.stop - w.start, w.stop - w.start) for w in moved
    ]
    if order is not None and moved and moved[-1].stop - moved[-1].start + others <= rows:
        # One product of more rows is faster than two of fewer.
        last = order[moved[-1].start : work.computed]
        all_windows[-1] = all_windows[-1]._replace(rows=last, size=last.shape[0])
        return all_windows
    for w in windows(others, rows, head.tiles):
        assert order is not None
        all_windows.append(Window(order[n + w.start : n + w.stop], w.stop - w.start, 0))
    return all_windows


def sequence_windows(batch: AnyBatch, work: Work, rows: int) -> list[Window]:
    """Complete sequences, first the ones with a gradient; a window holds as many as fit `rows`.

    This reads the lengths back to the host.
    """
    t = batch.tokens
    per_sequence = t.sequences.sum(batch.live.view(t.mask.shape))
    offsets = t.sequences.offsets
    first = torch.arange(t.sequences.count, device=t.mask.device) * t.sequences.shape[-1]
    first = first if offsets is None else offsets[:-1].long()
    starts, lengths, live = torch.stack([first, t.counts, per_sequence]).tolist()
    stops = [*starts[1:], t.mask.numel()]
    all_windows = []
    for backward in (True, False):
        chosen = [i for i, n in enumerate(lengths) if n > 0 and (live[i] > 0) == backward]
        if not backward and work.computed == work.with_gradient:
            continue
        for members in _fill_windows(chosen, lengths, rows):
            spans = [(starts[i], stops[i]) for i in members]
            count = sum(lengths[i] for i in members)
            all_windows.append(_window_of(batch, spans, count, backward))
    return all_windows


def _fill_windows(members: list[int], lengths: list[int], rows: int) -> list[list[int]]:
    """Members in order, split where the next one would not fit."""
    bins: list[list[int]] = []
    filled = 0
    for i in members:
        if not bins or filled + lengths[i] > rows:
            bins.append([])
            filled = 0
        bins[-1].append(i)
        filled += lengths[i]
    return bins


def _window_of(batch: AnyBatch, spans: list[tuple[int, int]], count: int, backward: bool) -> Window:
    mask = batch.rows
    tokens = torch.cat([torch.arange(a, b) for a, b in spans]).to(mask.device, non_blocking=True)
    ends = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0)
    cu_seqlens = ends.to(mask.device, non_blocking=True)
    # Where the rows are among the tokens: a stable sort, since their number is known and need not
    # be read back.
    place = torch.argsort(~mask[tokens], stable=True)[:count]
    return Window(tokens[place], count, count if backward else 0, tokens, place, cu_seqlens)


def run_windows(
    head: Head,
    batch: AnyBatch,
    all_windows: list[Window],
    sums: GradientSums,
    comparison: Comparison | None,
    check: bool,
) -> dict[str, Tensor]:
    """logp, entropy and, with a teacher, divergence of every token, flat; 0 in no window.

    The gradients are added to `sums`, each window's while its logits exist. check: raise if a value
    of the ids, temperatures or the teacher cannot be used.
    """
    finish_checks: Callable[[], None] | None = None
    names = ("logp", "entropy") if comparison is None else ("logp", "entropy", "divergence")
    known = {
        name: torch.zeros(batch.rows.shape[0], dtype=head.dtype, device=head.hidden.device)
        for name in names
    }
    most = max((w.size for w in all_windows), default=0)
    room, teacher_room = head.room(most), None if comparison is None else comparison.room(most)
    for window in all_windows:
        rows, z, s = compute_rows(head, comparison, window.rows, room, teacher_room, entropy=True)
        assert s.entropy is not None
        here = {"logp": s.logp, "entropy": s.entropy}
        if rows.compared is not None:
            here["divergence"] = rows.compared.numbers.divergence
        at, shared = window.rows, window.terms
        if shared is not None:
            at, valid = shared.order, batch.rows[shared.order]
            here = {name: torch.where(valid, shared.rows.expand(x), 0) for name, x in here.items()}
        for name, x in here.items():
            known[name][at] = x
        if window.moved and any(sums.wanted):
            derivatives = batch.gradients(window, here)
            if shared is not None:
                derivatives = [None if d is None else shared.rows.sum(d) for d in derivatives]
            at = window.rows
            if window.moved < window.size:
                first = slice(window.moved)
                assert isinstance(at, Tensor)
                at, rows, z, s = at[first], rows.of_rows(first), z[first], s.of_rows(first)
                derivatives = [None if d is None else d[first] for d in derivatives]
            sums.add(at, rows, z, room, s, derivatives)
        if check and finish_checks is None:
            finish_checks = start_checks(head, comparison, head.row_flags(batch.rows))
    if finish_checks is not None:
        finish_checks()
    return known
