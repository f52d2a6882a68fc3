"""The windows of one pass, one after another: each one's gradient while its logits exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from policyloss.head.backward import Gradients, Sums
from policyloss.head.comparison import Comparison, asked, examined
from policyloss.head.head import Head
from policyloss.head.windows import Batch, Window


def run_windows(
    head: Head,
    batch: Batch,
    all_windows: list[Window],
    sums: Sums,
    *,
    check: bool,
    comparison: Comparison | None = None,
) -> tuple[dict[str, Tensor], Gradients]:
    """logp, entropy and, with a teacher, divergence of every row (0 of the others), flat, and the
    gradients that are wanted. check: the ids too.
    """
    # The logits are gone when the gathered gradients are multiplied.
    known = _walk(head, batch, all_windows, sums, check, comparison)
    return known, sums.finished()


def _walk(
    head: Head,
    batch: Batch,
    all_windows: list[Window],
    sums: Sums,
    check: bool,
    comparison: Comparison | None,
) -> dict[str, Tensor]:
    answer: Callable[[], None] | None = None
    names = ("logp", "entropy") if comparison is None else ("logp", "entropy", "divergence")
    known = {
        name: torch.zeros(head.ids.shape[0], dtype=head.dtype, device=head.hidden.device)
        for name in names
    }
    most = max((w.size for w in all_windows), default=0)
    room, beside = head.room(most), None if comparison is None else comparison.room(most)
    for window in all_windows:
        rows, z, s = examined(head, comparison, window.rows, room, beside, entropy=True)
        assert s.entropy is not None
        here = {"logp": s.logp, "entropy": s.entropy}
        if rows.compared is not None:
            here["divergence"] = rows.compared.numbers.divergence
        for name, x in here.items():
            known[name][window.rows] = x
        if window.moved and sums.wanted.any:
            derivatives = batch.gradients(window, here)
            at = window.rows
            if window.moved < window.size:
                first = slice(window.moved)
                assert isinstance(at, Tensor)
                at, rows, z, s = at[first], rows.of_rows(first), z[first], s.of_rows(first)
                derivatives = [None if d is None else d[first] for d in derivatives]
            sums.add(at, rows, z, room, s, derivatives)
        if check and answer is None:
            answer = asked(head, comparison, batch.rows)
    if answer is not None:
        answer()
    return known
