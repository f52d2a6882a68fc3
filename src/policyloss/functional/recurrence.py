"""Linear recurrences over the tokens of sequences, from the last token to the first."""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.functional.context_parallel import WholeSequences, checked_positions
from policyloss.functional.exact import is_exact
from policyloss.functional.masking import fill
from policyloss.functional.segments import Sequences


@torch.no_grad()
def future_sum(
    x: Tensor, gamma: float, mask: Tensor, sequences: Sequences, positions: Tensor | None
) -> Tensor:
    """`y_t = x_t + γ·y_{t+1}`, where t+1 is the next valid token of the sequence. No gradient.

    x: token-shaped, 0 at masked tokens; so is the result. positions: each token's index in its
    whole sequence; read if the sequences have a context-parallel group. A NaN or inf makes the
    result of its whole sequence NaN.
    """
    if sequences.cp_group is not None or is_exact():
        at = torch.arange(x.numel(), device=x.device).view(x.shape)
        if sequences.cp_group is not None:
            at = checked_positions(positions, x, "a sum over later tokens")
        pack = WholeSequences.of(sequences, mask, at, x)
        inside, rows = pack.inside, pack.padded(pack.columns[0])
        y = linear_recurrence_reverse(rows, torch.full_like(rows, gamma))
        return pack.on_this_rank(y[inside])
    decay = torch.full_like(x, gamma).masked_fill(~mask, 1)
    if sequences.offsets is not None and x.shape[0]:
        # The last token of each sequence; for an empty one, the end of another.
        decay = decay.index_fill(0, sequences.offsets[1:].long() - 1, 0)
    # 0·nan would leak a NaN into the sequence before, so NaN is put back by sequence.
    poison = sequences.expand(sequences.sum(x) * 0)
    y = linear_recurrence_reverse(x.nan_to_num(0, 0, 0), decay)
    return fill(y + poison, mask)


# Tokens solved one after the other inside a chunk; all chunks at once. Measured on a CPU: 8 beats
# 4, 16, 32 and doubling.
CHUNK = 8


@torch.no_grad()
def linear_recurrence_reverse(x: Tensor, decay: Tensor) -> Tensor:
    """Solve `y_t = x_t + c_t·y_{t+1}` from the end, with `y_T = 0`. Carries no gradient.

    Reward-to-go, discounted returns and GAE are such recurrences.
    x, decay (c): `[..., T]`, same shape and dtype, not modified → y: `[..., T]`.
    In a chunk of `CHUNK` tokens, `y_t = a_t + p_t·(y at the first token of the next chunk)`, where
    a solves the chunk alone and p is the product of its decays from t on. The first tokens of the
    chunks obey the same recurrence, one chunk per step, and are solved the same way: log T levels,
    and work linear in T. A decay of 0 separates independent pieces, as long as x is finite: `0·nan`
    is `nan`.
    """
    length = x.shape[-1]
    if x.numel() == 0:
        return x.clone()
    solved, product = _by_place(x), _by_place(decay)
    y, p = solved.unbind(), product.unbind()
    for place in reversed(range(CHUNK - 1)):
        y[place].addcmul_(p[place], y[place + 1])
        p[place].mul_(p[place + 1])
    if length > CHUNK:
        heads = linear_recurrence_reverse(y[0], p[0])
        solved.addcmul_(product, torch.nn.functional.pad(heads[..., 1:], (0, 1)))
    return solved.movedim(0, -1).flatten(-2)[..., :length]


def _by_place(x: Tensor) -> Tensor:
    """A copy of `x` `[..., T]` as `[CHUNK, ..., ⌈T/CHUNK⌉]`, filled up with zeros.

    There is a row for each index within a chunk.
    """
    missing = -x.shape[-1] % CHUNK
    filled = torch.nn.functional.pad(x, (0, missing)) if missing else x
    by_place = filled.reshape(*x.shape[:-1], -1, CHUNK).movedim(-1, 0)
    return by_place.clone(memory_format=torch.contiguous_format)
