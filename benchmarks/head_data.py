"""Inputs of the head benchmark as training has them: peaked, tokens drawn from the model, ratios on
both sides of every bound.

With independent random inputs every distribution is flat, and an implementation that skips small
probabilities looks faster than it is. Here hidden ≈ α·W[token] + noise, with α set so that the mean
entropy is near `ENTROPY` nats.

Legend: B sequences of T tokens, N = B·T, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

ENTROPY = 0.6
EPS, DUAL = 0.2, 3.0
# No ratio lies closer than this to a bound (in log),
# so float32 rounding cannot put a token on the other side of it.
MARGIN = 0.02


class Shape(NamedTuple):
    """Sizes of one run."""

    sequences: int
    length: int
    vocabulary: int
    hidden: int

    @property
    def tokens(self) -> int:
        """N."""
        return self.sequences * self.length


class Statistics(NamedTuple):
    """Exact values of every row, float64 [N]."""

    logp: Tensor
    entropy: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Case:
    """One batch: hidden [B, T, D] and weight [V, D] are leaves; ids, old_logp, mask [B, T];
    advantages [B] (gathered: [B, T]). index: in a tree, the distinct hidden state of each token.
    """

    name: str
    hidden: Tensor
    weight: Tensor
    ids: Tensor
    old_logp: Tensor
    advantages: Tensor
    mask: Tensor
    statistics: Statistics
    index: Tensor | None = None

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self.hidden.device.type

    @property
    def rows(self) -> Tensor:
        """Indices into the N rows of the tokens that count."""
        return self.mask.flatten().nonzero().squeeze(-1)

    @property
    def token_advantages(self) -> Tensor:
        """[B, T]."""
        return (
            self.advantages
            if self.advantages.dim() == 2
            else self.advantages[:, None].expand_as(self.mask)
        )

    def gathered(self) -> Case:
        """The tokens that count as one sequence without mask, hidden [1, M, D] a leaf of its own;
        advantages become [1, M].
        """
        if bool(self.mask.all()):
            return self
        rows = self.rows
        hidden = self.hidden.detach().flatten(0, 1)[rows][None].requires_grad_()
        ids, old, advantages = (
            x.flatten()[rows][None] for x in (self.ids, self.old_logp, self.token_advantages)
        )
        return replace(
            self,
            hidden=hidden,
            ids=ids,
            old_logp=old,
            advantages=advantages,
            mask=torch.ones_like(ids, dtype=torch.bool),
        )


def block_rows(vocabulary: int, device: str) -> int:
    """Rows of logits worked on at a time in float64: 2 GiB on a GPU, 32 MiB on a CPU."""
    return max(1, 2 ** (28 if device == "cuda" else 22) // vocabulary)


def logit_blocks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The float64 logits of `hidden` [N, D], some rows at a time;
    `weight` [V, D] is float64 already.
    """
    step = block_rows(weight.shape[0], weight.device.type)
    for start in range(0, hidden.shape[0], step):
        part = slice(start, min(start + step, hidden.shape[0]))
        yield part, hidden[part].double() @ weight.T


def make(shape: Shape, device: str, seed: int = 0) -> dict[str, Case]:
    """The dense case and its masked relatives, all over the same hidden states and weight."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden, weight = _peaked(shape, device, dtype, generator)
    ids, statistics = _sampled(hidden, weight, generator)
    grid = (shape.sequences, shape.length)
    old = (statistics.logp - _log_ratios(shape.tokens, device, generator)).float().view(grid)
    advantages = _advantages(shape.sequences, device, generator)
    leaf = hidden.view(*grid, -1).requires_grad_()
    mask = torch.ones(grid, dtype=torch.bool, device=device)
    dense = Case(
        "dense", leaf, weight.requires_grad_(), ids.view(grid), old, advantages, mask, statistics
    )
    return {case.name: case for case in (dense, *_masked(dense), _long(dense), _tree(dense))}


def _peaked(
    shape: Shape, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    weight = torch.randn(
        shape.vocabulary, shape.hidden, dtype=dtype, device=device, generator=generator
    )
    weight.mul_(1 / math.sqrt(shape.hidden))
    noise = 2 * torch.randn(
        shape.tokens, shape.hidden, dtype=dtype, device=device, generator=generator
    )
    tokens = torch.randint(shape.vocabulary, (shape.tokens,), device=device, generator=generator)
    # Some tokens are surer than others, as in text.
    sureness = 0.8 + 0.4 * torch.rand(shape.tokens, 1, device=device, generator=generator)
    centre = (sureness * weight[tokens].float()).to(dtype)
    strength = _strength(centre[:128], noise[:128], weight)
    return noise.add_(centre, alpha=strength), weight


def _strength(centre: Tensor, noise: Tensor, weight: Tensor) -> float:
    """The α at which the mean entropy of these rows is `ENTROPY`:
    it falls as α grows, so by halving an interval.
    """
    towards, across = (centre @ weight.T).float(), (noise @ weight.T).float()
    low, high = 0.0, 60.0
    for _ in range(9):
        middle = (low + high) / 2
        logp = (across + middle * towards).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean().item()
        low, high = (middle, high) if entropy > ENTROPY else (low, middle)
    return high


def _sampled(
    hidden: Tensor, weight: Tensor, generator: torch.Generator
) -> tuple[Tensor, Statistics]:
    """Tokens drawn from these distributions, and the exact statistics of every row."""
    ids = torch.empty(hidden.shape[0], dtype=torch.long, device=hidden.device)
    logp, entropy, lse = (
        torch.empty(hidden.shape[0], dtype=torch.float64, device=hidden.device) for _ in range(3)
    )
    for part, z in logit_blocks(hidden, weight.double()):
        lse[part] = z.logsumexp(-1)
        z.sub_(lse[part, None])
        p = z.exp()
        ids[part] = torch.multinomial(p.float(), 1, generator=generator).squeeze(-1)
        logp[part] = z.gather(-1, ids[part, None]).squeeze(-1)
        entropy[part] = -p.mul_(z).sum(-1)
    return ids, Statistics(logp, entropy, lse)


def _log_ratios(tokens: int, device: str, generator: torch.Generator) -> Tensor:
    """Mostly within the clip range, some per cent beyond each bound,
    one in a hundred beyond the dual bound.
    """
    x = 0.1 * torch.randn(tokens, dtype=torch.float64, device=device, generator=generator)
    far = torch.rand(tokens, device=device, generator=generator) < 0.01
    x = torch.where(far, x + 1.5, x)
    for bound in (math.log(1 - EPS), math.log(1 + EPS), math.log(DUAL)):
        side = torch.where(x < bound, bound - MARGIN, bound + MARGIN)
        x = torch.where((x - bound).abs() < MARGIN, side, x)
    return x


def _advantages(sequences: int, device: str, generator: torch.Generator) -> Tensor:
    """One per sequence, of alternating sign, none near zero."""
    sign = 1 - 2 * (torch.arange(sequences, device=device) % 2)
    return sign * (0.3 + torch.randn(sequences, device=device, generator=generator).abs())


def _masked(dense: Case) -> tuple[Case, ...]:
    """Half masked (a prompt); the same with every fourth sequence at advantage 0;
    a fifth trained on, in turns.
    """
    position = torch.arange(dense.mask.shape[1], device=dense.mask.device)
    response = (position >= dense.mask.shape[1] // 2).expand_as(dense.mask)
    turn = max(1, dense.mask.shape[1] // 20)
    turns = (position // turn % 5 == 4).expand_as(dense.mask)
    some = dense.advantages.clone()
    some[::4] = 0
    half = replace(dense, name="half masked", mask=response)
    return (
        half,
        replace(half, name="half masked, quarter at zero advantage", advantages=some),
        replace(dense, name="agentic", mask=turns),
    )


def _long(dense: Case) -> Case:
    """The same tokens as two long sequences."""

    def two(x: Tensor) -> Tensor:
        return x.reshape(2, -1)

    hidden = dense.hidden.detach().view(2, -1, dense.hidden.shape[-1]).requires_grad_()
    ids, old, mask = two(dense.ids), two(dense.old_logp), two(dense.mask)
    return replace(
        dense,
        name="two sequences",
        hidden=hidden,
        ids=ids,
        old_logp=old,
        mask=mask,
        advantages=dense.advantages[:2],
    )


def _tree(dense: Case, branches: int = 8) -> Case:
    """The same tokens as `branches` sequences whose first half is the first one's, unrolled."""
    length = dense.ids.numel() // branches
    every = torch.arange(branches * length, device=dense.ids.device).view(branches, length)
    every[:, : length // 2] = every[0, : length // 2]
    return replace(
        dense,
        name="tree",
        hidden=dense.hidden.detach().flatten(0, 1)[every].requires_grad_(),
        ids=dense.ids.flatten()[every],
        old_logp=dense.old_logp.flatten()[every],
        mask=torch.ones_like(every, dtype=torch.bool),
        advantages=dense.advantages.repeat(branches)[:branches],
        statistics=Statistics(*(x[every.flatten()] for x in dense.statistics)),
        index=torch.unique(every, return_inverse=True)[1],
    )
