"""A small decision process in which the policy decides when to stop, enumerated completely.

A trajectory has one to three turns. In each, the policy takes one of three actions: one stops and
has an outcome, the other two go on and have a reward of their own. The state is the number of turns
so far and the last action. Every group of trajectories is enumerated with its probability, so an
expectation is a sum, without sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

import policyloss as pl

STOP, TURNS = 0, 3
# The reward of going on by action 1 or 2, and the outcome of stopping in turn k.
STEP = {1: 0.7, 2: 0.1}
OUTCOME = (0.2, 1.0, 0.5)
GAMMA = 1.0
N = 3  # trajectories in a group


class Trajectory(NamedTuple):
    """The actions, the rewards of the turns before the last, and the outcome of the last turn."""

    actions: tuple[int, ...]
    steps: tuple[float, ...]
    outcome: float

    @property
    def reward(self) -> float:
        return sum(self.steps) + self.outcome


def trajectories() -> Iterator[Trajectory]:
    for turns in range(1, TURNS + 1):
        for actions in product((1, 2), repeat=turns - 1):
            steps = tuple(STEP[a] for a in actions)
            # In the last possible turn every action ends the episode.
            last = (STOP,) if turns < TURNS else (0, 1, 2)
            for end in last:
                yield Trajectory((*actions, end), steps, OUTCOME[turns - 1] * (1 + 0.3 * end))


def logits() -> Tensor:
    """The parameters: `[turn, last action, action]`."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(TURNS, 3, 3, generator=generator, dtype=torch.float64)


def scores(theta: Tensor) -> tuple[list[Trajectory], Tensor, list[list[Tensor]]]:
    """Every trajectory, its probability, and `∇ log π` of each of its actions."""
    logp = theta.log_softmax(-1)
    every, chances, gradients = list(trajectories()), [], []
    for trajectory in every:
        before, terms = 0, []
        for turn, action in enumerate(trajectory.actions):
            terms.append(logp[turn, before, action])
            before = action
        chances.append(torch.stack(terms).sum().exp().detach())
        gradients.append([torch.autograd.grad(x, theta, retain_graph=True)[0] for x in terms])
    return every, torch.stack(chances), gradients


Estimator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Groups(NamedTuple):
    """All groups of N trajectories: their probabilities `[groups]`, and the estimate of the
    gradient from each, `[groups, parameters]`. true: the gradient of the expected reward.
    """

    chances: Tensor
    estimates: Tensor
    true: Tensor


def groups_of(estimator: Estimator) -> Groups:
    """The estimate `Σ_i Σ_k ∇log π(a_ik)·A_ik / N` from every group.

    estimator: a function of `rewards` and `turn_ids` `[B, TURNS]`, `outcomes` and `group_ids`
    `[B]` that returns advantages `[B, TURNS]`. rewards: of the turns before the last.
    """
    every, chances, gradients = scores(logits().requires_grad_())
    assert abs(float(chances.sum()) - 1) < 1e-12
    rewards = torch.zeros(len(every), TURNS, dtype=torch.float64)
    turn_ids = torch.full((len(every), TURNS), -1)
    slopes = torch.zeros(len(every), TURNS, gradients[0][0].numel(), dtype=torch.float64)
    for row, (actions, steps, _) in enumerate(every):
        rewards[row, : len(steps)] = torch.tensor(steps, dtype=torch.float64)
        turn_ids[row, : len(actions)] = torch.arange(len(actions))
        slopes[row, : len(actions)] = torch.stack(gradients[row]).flatten(1)
    outcomes = torch.tensor([t.outcome for t in every], dtype=torch.float64)
    totals = torch.tensor([t.reward for t in every], dtype=torch.float64)
    members = torch.tensor(list(product(range(len(every)), repeat=N)))  # [groups, N]
    rows, group_ids = members.reshape(-1), torch.arange(len(members)).repeat_interleave(N)
    advantages = estimator(rewards[rows], turn_ids[rows], outcomes[rows], group_ids)
    terms = advantages.view(*members.shape, TURNS, 1) * slopes[members]
    true = ((chances * totals)[:, None] * slopes.sum(1)).sum(0)
    return Groups(chances[members].prod(1), terms.sum((1, 2)) / N, true)


def expected_gradient(estimator: Estimator) -> tuple[Tensor, Tensor]:
    """The expected estimate, and the gradient of the expected reward."""
    chances, estimates, true = groups_of(estimator)
    return (chances[:, None] * estimates).sum(0), true


def variance(estimator: Estimator) -> float:
    """`E‖estimate − its expectation‖²`."""
    chances, estimates, _ = groups_of(estimator)
    mean = (chances[:, None] * estimates).sum(0)
    return float((chances * (estimates - mean).square().sum(1)).sum())


def with_outcomes(rewards: Tensor, turn_ids: Tensor, outcomes: Tensor) -> Tensor:
    """Rewards of all turns: the outcome is that of the last one."""
    last = (turn_ids >= 0).sum(-1, keepdim=True) - 1
    return rewards.scatter_add(1, last, outcomes[:, None])


def turn_loo(rewards: Tensor, turn_ids: Tensor, outcomes: Tensor, group_ids: Tensor) -> Tensor:
    rewards = with_outcomes(rewards, turn_ids, outcomes)
    return pl.advantage.turn_loo(rewards, turn_ids, group_ids, GAMMA)


def rloo(rewards: Tensor, turn_ids: Tensor, outcomes: Tensor, group_ids: Tensor) -> Tensor:
    """One advantage for a whole trajectory."""
    total = rewards.sum(-1) + outcomes
    return pl.advantage.rloo(total, group_ids)[:, None].expand(turn_ids.shape)


def mt_grpo(rewards: Tensor, turn_ids: Tensor, outcomes: Tensor, group_ids: Tensor) -> Tensor:
    """Without the division by a spread, which has a bias of its own."""
    return pl.advantage.mt_grpo(rewards, outcomes, turn_ids, group_ids, scale=None)


def relative_bias(estimator: Estimator) -> float:
    """`‖E[estimate] − c·gradient‖ / ‖c·gradient‖`, with c = (N−1)/N for a mean that includes the
    trajectory itself, which only scales the gradient.
    """
    estimate, true = expected_gradient(estimator)
    scale = (N - 1) / N if estimator is mt_grpo else 1.0
    return float((estimate - scale * true).norm() / (scale * true).norm())
