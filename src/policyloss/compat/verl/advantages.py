"""verl's advantage estimators (verl/trainer/ppo/core_algos.py) under verl's names, with its
arguments, defaults, results `(advantages, returns)` and numbers.

Tensors are `[B, T]`; `index` holds one label per row (a numpy array, a list or a tensor), and rows
with equal labels form a group. `release` selects the numbers of an older release where verl changed
them (None: the current release). No argument is modified. As in verl, the score of a row is the sum
of all its token rewards, masked tokens included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.advantage.estimators import opo, rloo
from policyloss.advantage.optimal_baseline import optimal_token_baseline
from policyloss.advantage.pass_at_k import passk_max_gap
from policyloss.advantage.returns import reward_to_go
from policyloss.arguments import check_number
from policyloss.compat.arguments import drop_in, drop_in_of
from policyloss.compat.verl.advantage_numbers import (
    PlainGroups,
    combine_rewards,
    less_baseline,
    over_tokens,
    plain_gae,
    plain_returns,
    plain_whiten,
    sequence_lengths,
    sequence_scores,
)
from policyloss.compat.verl.settings import read_field, read_number, since
from policyloss.errors import InputError
from policyloss.functional.masking import fill
from policyloss.tokens import as_mask

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
]

AdvantageResult = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Grouped:
    """The arguments of an estimator by groups, and the steps that these estimators share."""

    token_level_rewards: Tensor
    response_mask: Tensor
    index: Any
    epsilon: float = 1e-6

    @property
    def scores(self) -> Tensor:
        """The reward of each row, `[B]`."""
        return sequence_scores(self.token_level_rewards)

    @property
    def ids(self) -> Tensor:
        """The group of each row as a number, `[B]`."""
        return group_numbers(self.index, self.token_level_rewards)

    @property
    def groups(self) -> PlainGroups:
        """The scores and the statistics of their groups."""
        return PlainGroups.stacked(self.scores, self.ids)

    def outcome(self, advantage: Tensor) -> AdvantageResult:
        """One advantage per row as verl's pair: the same tensor twice."""
        tokens = over_tokens(advantage, self.response_mask)
        return tokens, tokens


@dataclass(frozen=True)
class Configured(Grouped):
    """The arguments of most estimators by groups."""

    config: Any = None


@dataclass(frozen=True)
class Normalised(Grouped):
    """The arguments of GRPO's estimators."""

    norm_adv_by_std_in_grpo: bool = True
    config: Any = None

    def normalise(self, groups: PlainGroups) -> Tensor:
        """The rewards minus their group's mean, divided by the group's deviation if that is on."""
        centered = groups.centered
        return groups.scale(centered, self.epsilon) if self.norm_adv_by_std_in_grpo else centered


@dataclass(frozen=True)
class GdpoCall(Normalised):
    """The arguments of GDPO."""

    non_tensor_batch: Any = None
    batch: Any = None


@dataclass(frozen=True)
class GpgCall(Grouped):
    """The arguments of GPG."""

    f_norm: float = 1.0
    alpha: float = 1.0
    config: Any = None


@dataclass(frozen=True)
class TokenBaselineCall:
    """The arguments of the two estimators by `optimal_token_baseline`."""

    token_level_rewards: Tensor
    response_mask: Tensor
    index: Any
    old_log_probs: Tensor
    sum_pi_squared: Tensor
    rollout_is_weights: Tensor | None = None
    handle_zero_tail: bool = True
    epsilon: float = 1e-8

    def estimate(self, bridge: bool) -> AdvantageResult:
        """The advantages, and the reward-to-go as returns."""
        check_number("epsilon", self.epsilon, least=0)
        advantages = optimal_token_baseline(
            self.token_level_rewards,
            group_numbers(self.index, self.token_level_rewards),
            self.response_mask,
            self.old_log_probs,
            self.sum_pi_squared,
            weights=self.rollout_is_weights,
            zero_tail=self.handle_zero_tail,
            bridge=bridge,
            eps=self.epsilon,
            group="local",
        )
        return advantages, reward_to_go(self.token_level_rewards, self.response_mask)


@drop_in
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> AdvantageResult:
    """GAE, whitened over the valid tokens; masked tokens are not set to 0."""
    estimated = plain_gae(token_level_rewards, values, response_mask, gamma, lam)
    return plain_whiten(estimated.advantages, response_mask), estimated.returns


@drop_in_of(Normalised)
def compute_grpo_outcome_advantage(call: Normalised) -> AdvantageResult:
    """GRPO: the reward minus its group's mean, divided by the group's deviation unless
    `norm_adv_by_std_in_grpo` is False.
    """
    return call.outcome(call.normalise(call.groups))


@drop_in_of(Normalised)
def compute_grpo_vectorized_outcome_advantage(call: Normalised) -> AdvantageResult:
    """GRPO with statistics in float32."""
    return call.outcome(call.normalise(PlainGroups.indexed(call.scores, call.ids)))


@drop_in_of(GdpoCall, ignores_others=True)
def compute_gdpo_outcome_advantage(call: GdpoCall) -> AdvantageResult:
    """GDPO: each reward of `config.gdpo_reward_keys` normalised in its group, summed with
    `gdpo_reward_weights`, then whitened.

    The rewards are read from `non_tensor_batch`, in float32. Without config, non_tensor_batch or
    batch, `token_level_rewards` are the only reward. (verl looks up the position of a reward in
    `batch` and sums over positions again; neither is needed here.)
    """
    rewards, weights = [call.scores], None
    if all(x is not None for x in (call.config, call.non_tensor_batch, call.batch)):
        device = call.token_level_rewards.device
        rewards, weights = _reward_components(call.config, call.non_tensor_batch, device)
    groups = (PlainGroups.stacked(reward, call.ids) for reward in rewards)
    parts = [over_tokens(call.normalise(group), call.response_mask) for group in groups]
    return _whiten(combine_rewards(parts, weights), call.response_mask)


@drop_in_of(Normalised, ignores_others=True)
def compute_grpo_passk_outcome_advantage(call: Normalised) -> AdvantageResult:
    """Pass@k: the best row of a group gets its margin over the second. As in verl,
    `config.norm_adv_by_std_in_grpo` has an effect, the argument has none.
    """
    by_std = read_field(call.config, "norm_adv_by_std_in_grpo", True)
    groups, ids = call.groups, call.ids
    if 1 in Counter(ids.tolist()).values():
        raise InputError(
            "index has a group with one row; pass@k compares the best two, so a group needs at "
            "least 2 samples."
        )
    margin = passk_max_gap(groups.rewards, ids, scale=None, group="local")
    return call.outcome(groups.scale(margin, call.epsilon) if by_std else margin)


@drop_in_of(Configured, ignores_others=True)
def compute_reinforce_plus_plus_baseline_outcome_advantage(call: Configured) -> AdvantageResult:
    """REINFORCE++-baseline: the reward minus its group's mean, whitened over the valid tokens."""
    centered = over_tokens(call.groups.centered, call.response_mask)
    return _whiten(centered, call.response_mask)


@drop_in_of(Configured, ignores_others=True)
def compute_rloo_outcome_advantage(call: Configured) -> AdvantageResult:
    """RLOO: the reward minus the mean of the group's other rows; a single row keeps its reward."""
    return call.outcome(rloo(call.scores, call.ids, single="raw", group="local"))


@drop_in_of(Configured, ignores_others=True)
def compute_opo_outcome_advantage(call: Configured) -> AdvantageResult:
    """OPO: the reward minus its group's mean weighted by length."""
    lengths = sequence_lengths(call.response_mask)
    return call.outcome(opo(call.scores, call.ids, lengths, single="raw", group="local"))


@drop_in
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    *,
    release: str | None = None,
    **kwargs: Any,
) -> AdvantageResult:
    """REINFORCE++: returns discounted by `config.gamma`, whitened over the valid tokens.

    Before 0.9.0 a masked token interrupted the sum, so a turn got nothing from later turns.
    """
    gamma = read_number(config, "gamma")
    holes: Literal["bridge", "cut"] = "bridge" if since(release, "0.9.0") else "cut"
    returns = plain_returns(token_level_rewards, response_mask, gamma, holes=holes)
    return _whiten(returns, response_mask)[0], returns


@drop_in
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> AdvantageResult:
    """ReMax: the reward-to-go minus the reward of the greedy answer; masked tokens keep theirs."""
    if reward_baselines.shape != response_mask.shape[:1]:
        raise InputError(
            f"reward_baselines has shape {tuple(reward_baselines.shape)}; pass one per row, "
            f"{response_mask.shape[:1]}."
        )
    returns = reward_to_go(token_level_rewards, response_mask)
    return less_baseline(returns, reward_baselines, response_mask), returns


@drop_in_of(GpgCall, ignores_others=True)
def compute_gpg_outcome_advantage(call: GpgCall) -> AdvantageResult:
    """GPG: the reward minus its group's mean, divided by `f_norm`, times the number of rows per
    nonzero reward. As in verl, `alpha` has no effect.
    """
    return call.outcome(call.groups.per_nonzero(call.f_norm))


@drop_in_of(Configured, ignores_others=True)
def compute_rloo_vectorized_outcome_advantage(call: Configured) -> AdvantageResult:
    """RLOO; a single row gets 0."""
    left_out = rloo(call.scores, call.ids, single="raw", group="local")
    return call.outcome(call.groups.zero_alone(left_out))


@drop_in_of(TokenBaselineCall, ignores_others=True)
def compute_optimal_token_baseline_advantage(call: TokenBaselineCall) -> AdvantageResult:
    """The optimal token baseline at each column; returns are the reward-to-go."""
    return call.estimate(bridge=False)


@drop_in_of(TokenBaselineCall, ignores_others=True)
def compute_multi_turn_optimal_token_baseline_advantage(call: TokenBaselineCall) -> AdvantageResult:
    """The optimal token baseline at each valid token, for rows of several turns."""
    return call.estimate(bridge=True)


def group_numbers(index: Any, rows: Tensor) -> Tensor:
    """`index` (strings, numbers or a tensor) as an integer per row, the same for equal labels."""
    try:
        labels = index.tolist() if hasattr(index, "tolist") else list(index)
        number_of: dict[Any, int] = {}
        numbers = [number_of.setdefault(label, len(number_of)) for label in labels]
    except TypeError:
        raise InputError(
            "index must hold one label per row (an array, a list or a tensor), got "
            f"{type(index).__name__}."
        ) from None
    if len(numbers) != rows.shape[0]:
        raise InputError(
            f"index has {len(numbers)} labels for {rows.shape[0]} rows; pass one per row."
        )
    return torch.tensor(numbers, dtype=torch.int64, device=rows.device)


def _whiten(x: Tensor, mask: Tensor) -> AdvantageResult:
    tokens = fill(plain_whiten(x, mask), as_mask(mask, x))
    return tokens, tokens


def _reward_components(
    config: Any, non_tensor_batch: Any, device: torch.device
) -> tuple[list[Tensor], list[float] | None]:
    """The rewards named by `config.gdpo_reward_keys`, `[B]` each in float32, and their weights."""
    keys = read_field(config, "gdpo_reward_keys")
    if not keys:
        raise InputError(
            "config.gdpo_reward_keys is missing; GDPO needs the names of its rewards in "
            "non_tensor_batch."
        )
    missing = [key for key in keys if key not in non_tensor_batch]
    if missing:
        raise InputError(
            f"gdpo_reward_keys {missing} are not in non_tensor_batch, which has "
            f"{sorted(non_tensor_batch)}."
        )
    weights = read_field(config, "gdpo_reward_weights")
    columns = (non_tensor_batch[key] for key in keys)
    numbers = [column.tolist() if hasattr(column, "tolist") else list(column) for column in columns]
    rewards = [torch.tensor(n, dtype=torch.float32, device=device) for n in numbers]
    return rewards, None if weights is None else list(weights)


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., AdvantageResult]] = {
    "gae": compute_gae_advantage_return,
    "grpo": compute_grpo_outcome_advantage,
    "grpo_vectorized": compute_grpo_vectorized_outcome_advantage,
    "gdpo": compute_gdpo_outcome_advantage,
    "grpo_passk": compute_grpo_passk_outcome_advantage,
    "reinforce_plus_plus_baseline": compute_reinforce_plus_plus_baseline_outcome_advantage,
    "rloo": compute_rloo_outcome_advantage,
    "opo": compute_opo_outcome_advantage,
    "reinforce_plus_plus": compute_reinforce_plus_plus_outcome_advantage,
    "remax": compute_remax_outcome_advantage,
    "gpg": compute_gpg_outcome_advantage,
    "rloo_vectorized": compute_rloo_vectorized_outcome_advantage,
    "optimal_token_baseline": compute_optimal_token_baseline_advantage,
    "tir_optimal_token_baseline": compute_multi_turn_optimal_token_baseline_advantage,
}
