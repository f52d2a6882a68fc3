"""From the rewards of a step to the advantages of its tokens."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from policyloss.advantage import estimator, gae, iw_opd, opd, reinforce_pp, turn_loo, whiten
from policyloss.errors import InputError
from policyloss_train.batches import Pack
from policyloss_train.config import TrainConfig
from policyloss_train.user_code import is_reference, load_code

Judged = tuple[Tensor, Tensor | None]  # advantages and returns, `[N]` each
WITH_LENGTHS = ("opo", "reinforce_pp_baseline")


def judge(config: TrainConfig, pack: Pack, group: Any, *, by_teacher: bool = False) -> Judged:
    """The advantages of a pack, from its rewards and, if `by_teacher`, from a teacher; and the
    targets of the critic, None without a critic. group: as in `_of_rewards`.
    """
    (advantages, returns), tokens = _of_rewards(config, pack, group), pack.tokens
    if config.reward_share != 1:
        advantages = config.reward_share * advantages
    if not by_teacher:
        return advantages, returns
    of_teacher = iw_opd if config.estimator == "iw_opd" else opd
    advantages = of_teacher(
        tokens["teacher_logp"],
        tokens["old_logp"],
        mask=tokens["mask"],
        coef=config.teacher_coef,
        base=advantages.unsqueeze(0),
        cu_seqlens=pack.cu_seqlens,
    )
    return advantages, returns


def _of_rewards(config: TrainConfig, pack: Pack, group: Any) -> Judged:
    """The advantages of the rewards of a pack.

    "gae" reads the token tensor `old_values`, the critic's values; "remax" reads the sequence
    tensor `greedy`, the reward of the greedy answer to each prompt. group: the data-parallel ranks
    (or "local"), which share batch statistics; all samples of a prompt are on one rank.
    """
    name, rewards, mask = config.reward_estimator, pack.sequences["rewards"], pack.tokens["mask"]
    bounds = pack.cu_seqlens
    if name == "gae":
        values = pack.tokens["old_values"]
        estimate = gae(rewards, values, mask, config.gamma, config.lam, cu_seqlens=bounds)
        return whiten(estimate.advantages, mask, group=group), estimate.returns
    if name == "reinforce_pp":
        return reinforce_pp(rewards, mask, config.gamma, cu_seqlens=bounds, group=group), None
    if name == "turn_loo":
        # Without a tool, a completion is one turn, which gets the reward.
        ids = pack.tokens.get("turn_ids", pack.tokens["completion"].long() - 1)
        by_turn, groups = pack.tokens.get("turn_rewards", rewards), pack.sequences["group_ids"]
        where = {"cu_seqlens": bounds, "group": group}
        return turn_loo(by_turn, ids, groups, config.gamma, **where), None
    if is_reference(name):
        return _by_user(name, pack, group), None
    if name == "remax":
        advantages = estimator(name)(rewards, pack.sequences["greedy"])
        return _over_tokens(advantages, pack), None
    if name in ("flash_reinforce", "prpo"):  # of the whole batch
        return _over_tokens(estimator(name)(rewards, group=group), pack), None
    more: dict[str, Any] = {"lengths": pack.completion_lengths} if name in WITH_LENGTHS else {}
    if name == "passk_combinatorial":
        more["k"] = config.passk
    advantages = estimator(name)(rewards, pack.sequences["group_ids"], **more, group=group)
    return _over_tokens(advantages, pack), None


def _by_user(reference: str, pack: Pack, group: Any) -> Tensor:
    """The advantages that a user's function returns, `[N]`.

    The function takes rewards and group_ids, `[S]`, and any of `lengths` `[S]`, `mask` `[N]`,
    `cu_seqlens` `[S + 1]` and `group`. It returns one number per sequence or token.
    """
    function = load_code(reference, "the advantage")
    tokens, rewards = pack.tokens["mask"], pack.sequences["rewards"]
    offers = {"lengths": pack.completion_lengths, "mask": tokens}
    offers |= {"cu_seqlens": pack.cu_seqlens, "group": group}
    try:
        names = inspect.signature(function).parameters
        more = {name: x for name, x in offers.items() if name in names}
        result = function(rewards, pack.sequences["group_ids"], **more)
    except Exception as error:  # the user's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"the advantage {reference!r} raised {reason}.") from error
    if not isinstance(result, Tensor) or result.shape not in (rewards.shape, tokens.shape):
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise InputError(
            f"the advantage {reference!r} returned {shape}; give a tensor with one number for each "
            f"sequence, {list(rewards.shape)}, or for each token, {list(tokens.shape)}."
        )
    result = result.detach().to(rewards)
    return result if result.shape == tokens.shape else _over_tokens(result, pack)


def _over_tokens(x: Tensor, pack: Pack) -> Tensor:
    """`[S]` → `[N]`."""
    return x.repeat_interleave(pack.cu_seqlens.diff())
