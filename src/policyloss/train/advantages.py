"""From the rewards of a step to the advantages of its tokens, by any estimator that rewards, groups
and values are enough for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from policyloss.advantage import estimator, gae, iw_opd, opd, reinforce_pp, whiten
from policyloss.train.batches import Pack
from policyloss.train.config import TrainConfig

WITH_LENGTHS = ("opo", "reinforce_pp_baseline")


class Judged(NamedTuple):
    """advantages: `[N]`. returns: `[N]`, what a critic learns; None without one."""

    advantages: Tensor
    returns: Tensor | None = None


def judge(
    config: TrainConfig,
    pack: Pack,
    *,
    values: Tensor | None,
    greedy: Tensor | None,
    group: Any,
    by_teacher: bool = False,
) -> Judged:
    """The advantages of a pack: those of its rewards, and a teacher's if `by_teacher`.

    Other arguments as in `of_rewards`.
    """
    judged = of_rewards(config, pack, values=values, greedy=greedy, group=group)
    share, tokens = config.reward_share, pack.tokens
    if share != 1:
        judged = judged._replace(advantages=share * judged.advantages)
    if not by_teacher:
        return judged
    of_teacher = iw_opd if config.estimator == "iw_opd" else opd
    advantages = of_teacher(
        tokens["teacher_logp"],
        tokens["old_logp"],
        mask=tokens["mask"],
        coef=config.teacher_coef,
        base=judged.advantages.unsqueeze(0),
        cu_seqlens=pack.cu_seqlens,
    )
    return judged._replace(advantages=advantages)


def of_rewards(
    config: TrainConfig, pack: Pack, *, values: Tensor | None, greedy: Tensor | None, group: Any
) -> Judged:
    """The advantages of the rewards of a pack.

    values: `[N]` of the critic, for "gae". greedy: `[S]`, the reward of the greedy answer to each
    prompt, for "remax". group: the data-parallel ranks (or "local"), which share what is taken over
    the batch; the samples of a prompt lie on one of them.
    """
    name = config.reward_estimator
    rewards = pack.sequences["rewards"]
    mask = pack.tokens["mask"]
    cu_seqlens = pack.cu_seqlens
    if name == "gae":
        assert values is not None
        estimate = gae(rewards, values, mask, config.gamma, config.lam, cu_seqlens=cu_seqlens)
        return Judged(whiten(estimate.advantages, mask, group=group), estimate.returns)
    if name == "reinforce_pp":
        return Judged(reinforce_pp(rewards, mask, config.gamma, cu_seqlens=cu_seqlens, group=group))
    if name == "remax":
        assert greedy is not None
        return Judged(_over_tokens(estimator(name)(rewards, greedy), pack))
    more: dict[str, Any] = {"lengths": pack.completion_lengths} if name in WITH_LENGTHS else {}
    if name == "passk_combinatorial":
        more["k"] = config.passk
    return Judged(
        _over_tokens(
            estimator(name)(rewards, pack.sequences["group_ids"], **more, group=group), pack
        )
    )


def _over_tokens(x: Tensor, pack: Pack) -> Tensor:
    """`[S]` → `[N]`."""
    lengths = pack.cu_seqlens.diff()
    return x.repeat_interleave(lengths)
