"""Credit by turn: an agent acts in turns, and all tokens of a turn share one advantage.

Legend: S sequences (trajectories), K turns of all of them; token-shaped is `[B, T]`, or packed
`[N]` with `cu_seqlens`. turn_ids: token-shaped integers, −1 at tokens that the policy did not write
(prompts, tool output, padding). Neighbouring policy tokens of a sequence with the same id are a
turn; turns are counted 0, 1, 2, … in each sequence, whatever their ids. rewards: token-shaped, and
the rewards of a turn are summed; or one per sequence `[S]`, which belongs to its last turn. A
reward at a token of the environment is ignored.
Results are token-shaped, 0 where turn_ids is −1, and carry no gradient. `group` is a process group
with shared statistics, as in `group_advantages`. cp_group, positions: as in `gae`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policyloss.advantage.groups import Scale, check_rewards, group_advantages
from policyloss.advantage.returns import (
    GAE,
    discounted_returns,
    gae,
    token_rewards,
    whole_sequences,
)
from policyloss.arguments import check_like, check_number, check_tensor
from policyloss.functional.collectives import gather_rows, statistics_group
from policyloss.functional.context_parallel import WholeSequences
from policyloss.functional.exact import stays_eager
from policyloss.functional.masking import compute_dtype
from policyloss.functional.segments import Sequences, group_sum
from policyloss.tokens import check_group_ids


@dataclass(frozen=True)
class _Turns:
    """The turns of all sequences in order, as a pack of K elements.

    tokens: the policy's tokens of all context-parallel ranks, `[M]`. by_turn: their bounds by turn.
    sequence, index: the sequence of each turn and its place in the sequence, `[K]`. cu_seqlens:
    `[S+1]` over turns. rewards: of each turn, `[K]`. first: tensors at the first token of each
    turn, `[K]` each.
    """

    tokens: WholeSequences
    by_turn: Sequences
    sequence: Tensor
    index: Tensor
    cu_seqlens: Tensor
    rewards: Tensor
    first: list[Tensor]

    @classmethod
    def of(
        cls,
        turn_ids: Tensor,
        rewards: Tensor,
        cu_seqlens: Tensor | None,
        cp_group: Any,
        positions: Tensor | None,
        **others: Tensor,
    ) -> _Turns:
        """Find the turns. others: tensors to be read at the first token of each turn."""
        check_tensor("turn_ids", turn_ids, "integer")
        check_tensor("rewards", rewards)
        layout = Sequences.of(turn_ids, cu_seqlens, cp_group, "turn_ids")
        for name, x in others.items():
            check_like(name, x, ("turn_ids", turn_ids))
        if cp_group is None:
            positions = torch.arange(turn_ids.numel(), device=turn_ids.device).view(layout.shape)
        mask, dtype = turn_ids >= 0, compute_dtype(rewards, *others.values())
        columns = (turn_ids, *(x.detach() for x in others.values()))
        tokens, reward = whole_sequences(rewards, mask, layout, positions, dtype, *columns)
        ids, count = tokens.columns[0], tokens.mask.shape[0]
        sequences = Sequences.of(ids, tokens.cu_seqlens)
        assert sequences.ids is not None
        begins = torch.ones_like(tokens.mask)
        begins[1:] = (ids.diff() != 0) | (sequences.ids.diff() != 0)
        first = begins.nonzero().squeeze(1)
        ends = torch.nn.functional.pad(first, (0, 1), value=count)
        by_turn = Sequences.of(ids, ends)
        sequence = sequences.ids[first]
        turns_before = torch.searchsorted(first, tokens.cu_seqlens)
        per_token = token_rewards(reward, tokens.mask, sequences, dtype)
        index = torch.arange(len(first), device=ids.device) - turns_before[sequence]
        at_first = [x[first] for x in tokens.columns[1 : 1 + len(others)]]
        summed = by_turn.sum(per_token)
        return cls(tokens, by_turn, sequence, index, turns_before, summed, at_first)

    def returns(self, gamma: float) -> Tensor:
        """The discounted rewards from each turn on, `[K]`."""
        every = torch.ones_like(self.index, dtype=torch.bool)
        return discounted_returns(
            self.rewards.unsqueeze(0), every, gamma, cu_seqlens=self.cu_seqlens
        )

    def per_token(self, x: Tensor) -> Tensor:
        """`x` `[K]` at the tokens of this rank, token-shaped."""
        return self.tokens.on_this_rank(self.by_turn.expand(x))

    def group_ids(self, group_ids: Tensor) -> Tensor:
        """The group of each turn, from the group of each sequence `[S]`."""
        check_group_ids(group_ids, Sequences.of(self.index, self.cu_seqlens))
        check_tensor("group_ids", group_ids, like=("turn_ids", self.index))
        return group_ids[self.sequence]


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """An id for each different pair of integers, `[K]`."""
    pairs = torch.stack([a.to(torch.int64), b.to(torch.int64)])
    ids: Tensor = torch.unique(pairs, dim=1, return_inverse=True)[1]
    return ids


@stays_eager
@torch.no_grad()
def turn_gae(
    rewards: Tensor,
    values: Tensor,
    turn_ids: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    *,
    cu_seqlens: Tensor | None = None,
    last_values: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> GAE:
    """GAE with one timestep per turn: `gae` over turns, with the value at a turn's first token.

    Every token of a turn gets the turn's advantage, and its return as the critic's target. The
    rewards within a turn are summed, so add a per-token penalty, such as a KL, to the advantages
    instead. Shapes: see `policyloss.advantage.turns`. lam, last_values: as in `gae`.
    Source: AReaL, gae_timestep_unit="turn".
    """
    turns = _Turns.of(turn_ids, rewards, cu_seqlens, cp_group, positions, values=values)
    every = torch.ones_like(turns.index, dtype=torch.bool)
    where = {"cu_seqlens": turns.cu_seqlens, "last_values": last_values}
    result = gae(turns.rewards.unsqueeze(0), turns.first[0], every, gamma, lam, **where)
    return GAE(*map(turns.per_token, result))


@stays_eager
@torch.no_grad()
def turn_returns(
    rewards: Tensor,
    turn_ids: Tensor,
    gamma: float = 1.0,
    *,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """`G_k = r_k + γ·G_{k+1}` over the turns of a sequence, with r_k the sum of turn k's rewards.

    Every token of turn k gets G_k. Shapes: see `policyloss.advantage.turns`.
    """
    turns = _Turns.of(turn_ids, rewards, cu_seqlens, cp_group, positions)
    return turns.per_token(turns.returns(gamma))


@stays_eager
@torch.no_grad()
def turn_loo(
    rewards: Tensor,
    turn_ids: Tensor,
    group_ids: Tensor,
    gamma: float = 1.0,
    *,
    group: Any = None,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """`A_{i,k} = G_{i,k} − mean of G_{j,k} over the group's other trajectories j with a turn k`.

    G_{j,k} is the return of trajectory j from its turn k on (see `turn_returns`). If no other
    trajectory of the group has a turn k, the baseline is 0.
    The baseline depends on nothing that trajectory i did, so the policy gradient
    `Σ_k ∇log π(turn k)·A_{i,k}` is unbiased, even if the policy decides when to stop; docs/turns.md
    has the proof. Use it with an average that does not divide by lengths or numbers of turns
    (`SeqMeanTokenSum`, `SeqMeanTokenSumNorm`), because these depend on the actions, too.
    group_ids: `[S]`, the prompt of each trajectory. Shapes and group: see
    `policyloss.advantage.turns`.
    """
    turns = _Turns.of(turn_ids, rewards, cu_seqlens, cp_group, positions)
    returns = turns.returns(gamma)
    columns = [returns, turns.group_ids(group_ids), turns.index]
    (g, ids, index), this_rank = gather_rows(columns, statistics_group(group))
    pairs = _pairs(ids, index)
    relative = group_advantages(g, pairs, center="loo", scale=None, single="raw", group="local")
    return turns.per_token(relative[this_rank])


@stays_eager
@torch.no_grad()
def mt_grpo(
    rewards: Tensor,
    outcomes: Tensor,
    turn_ids: Tensor,
    group_ids: Tensor,
    coef: float = 1.0,
    *,
    scale: Scale = "std",
    eps: float = 1e-6,
    group: Any = None,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """MT-GRPO: `A_{i,k} = Â(outcome_i) + coef·Σ_{k≤l<K_i} Â(r_{i,l})`, K_i the last turn.

    Â is `group_advantages`: outcomes are compared within a group, r_l among those of its
    trajectories that go on after turn l. outcomes: `[S]`. rewards: those of the turns; a
    last turn's reward is ignored. scale, eps: as in `group_advantages`.
    **The gradient is biased if the policy decides when to stop**: each further turn subtracts one
    more group mean, so the baseline depends on the action to stop. docs/turns.md has the size of
    the bias in an example; `turn_loo` has no bias.
    Shapes and group: see `policyloss.advantage.turns`.
    Source: arXiv 2505.11821; the bias is verl#7244.
    """
    check_number("coef", coef)
    turns = _Turns.of(turn_ids, rewards, cu_seqlens, cp_group, positions)
    last = turns.index == turns.cu_seqlens.diff()[turns.sequence] - 1
    columns = [turns.rewards, turns.group_ids(group_ids), turns.index, last.to(torch.int64)]
    check_like("outcomes", outcomes, ("group_ids", group_ids), fix="give one per sequence")
    (r, ids, index, is_last), this_rank = gather_rows(columns, statistics_group(group))
    # Each last turn is compared with nothing: its id is that of no other turn.
    alone = torch.where(is_last > 0, -1 - torch.arange(len(r), device=r.device), index)
    relative = _relative(torch.where(is_last > 0, 0, r), _pairs(ids, alone), scale, eps)[this_rank]
    every = torch.ones_like(last)
    to_go = discounted_returns(relative.unsqueeze(0), every, cu_seqlens=turns.cu_seqlens)
    outcome = group_advantages(outcomes, group_ids, scale=scale, eps=eps, group=group)
    return turns.per_token(outcome.to(to_go.dtype)[turns.sequence] + coef * to_go)


@stays_eager
@torch.no_grad()
def gigpo(
    rewards: Tensor,
    turn_ids: Tensor,
    state_ids: Tensor,
    group_ids: Tensor,
    gamma: float = 1.0,
    omega: float = 1.0,
    *,
    scale: Scale = None,
    eps: float = 1e-6,
    group: Any = None,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """GiGPO: `A_{i,k} = Â(R_i) + omega·Â(G_{i,k})`.

    Â is `group_advantages`. R_i, the sum of the rewards of trajectory i, is compared within its
    prompt group. G_{i,k}, the discounted sum of its rewards from turn k on, is compared with all
    turns of the group that began in the same state; Â is 0 for a state that occurs once.
    state_ids: `[B, T]` or `[N]` integers, read at the first token of each turn: equal ids mean
    equal states of the environment. scale, eps: as in `group_advantages`. Shapes and group: see
    `policyloss.advantage.turns`.
    Source: arXiv 2505.10978; defaults as in Trinity-RFT.
    """
    check_number("omega", omega)
    turns = _Turns.of(turn_ids, rewards, cu_seqlens, cp_group, positions, state_ids=state_ids)
    total = Sequences.of(turns.index, turns.cu_seqlens).sum(turns.rewards)
    check_rewards(total, group_ids)
    episode = group_advantages(total, group_ids, scale=scale, eps=eps, group=group)
    columns = [turns.returns(gamma), turns.group_ids(group_ids), turns.first[0].to(torch.int64)]
    (g, ids, states), this_rank = gather_rows(columns, statistics_group(group))
    step = _relative(g, _pairs(ids, states), scale, eps)[this_rank]
    return turns.per_token(episode[turns.sequence] + omega * step)


def _relative(x: Tensor, ids: Tensor, scale: Scale, eps: float) -> Tensor:
    """`group_advantages` of turns that were gathered already; 0 for an id that is alone."""
    relative = group_advantages(x, ids, scale=scale, eps=eps, single="raw", group="local")
    return torch.where(group_sum(torch.ones_like(ids), ids) > 1, relative, 0 * relative)


@torch.no_grad()
def adaptive_lam(lengths: Tensor, alpha: float = 0.05) -> Tensor:
    """`λ = 1 − 1/(α·L)` of each sequence, at least 0, for `gae(…, lam=…)`.

    lengths: `[S]`, the number of valid tokens in each sequence, or of turns for `turn_gae`. The
    weights `λ^l` in GAE then sum to about αL, so a longer sequence relies less on the critic.
    Source: VAPO, arXiv 2504.05118, with α = 0.05.
    """
    check_tensor("lengths", lengths)
    check_number("alpha", alpha, above=0)
    steps = alpha * lengths.to(compute_dtype(lengths))
    return (1 - 1 / steps).clamp(min=0)
