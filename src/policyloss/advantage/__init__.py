"""Advantages: how much better an action was than expected.

Advantages are computed once per batch and carry no gradient.

Over time: `gae`, `discounted_returns`. By turn: `turn_gae`, `turn_returns`, `turn_loo`, `mt_grpo`,
`gigpo`. Over a group of samples: `group_advantages`, the named
estimators built on it, and `optimal_token_baseline`, which has a baseline for each token. Over the
batch: `whiten`. From a teacher or a reference: `opd`, `iw_opd`, `rlsd`, `prefix_weights`,
`centered_kl`, `kl_in_reward`. Which completions and tokens count: `soft_overlong`,
`mask_truncated`, `top_entropy_mask`.
`ESTIMATORS` maps names to functions; `estimator(name)` looks one up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policyloss.advantage.distillation import (
    centered_kl,
    iw_opd,
    kl_in_reward,
    opd,
    prefix_weights,
    rlsd,
)
from policyloss.advantage.estimators import (
    ESTIMATORS,
    asymre,
    dr_grpo,
    flash_reinforce,
    gdpo,
    gpg,
    grpo,
    grpo_loo,
    hierarchical_grpo,
    maxrl,
    opo,
    prpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from policyloss.advantage.groups import group_advantages, whiten
from policyloss.advantage.optimal_baseline import optimal_token_baseline
from policyloss.advantage.pass_at_k import passk_combinatorial, passk_max_gap
from policyloss.advantage.returns import GAE, discounted_returns, gae
from policyloss.advantage.truncation import mask_truncated, soft_overlong, top_entropy_mask
from policyloss.advantage.turns import (
    adaptive_lam,
    gigpo,
    mt_grpo,
    turn_gae,
    turn_loo,
    turn_returns,
)
from policyloss.errors import InputError, match_name, unknown_name


def estimator(name: str) -> Callable[..., Any]:
    """Return the estimator called `name`; an unknown name is an error that lists all names."""
    known = match_name(name, ESTIMATORS)
    if known is None:
        raise InputError(unknown_name("estimator name", name, ESTIMATORS))
    return ESTIMATORS[known]


__all__ = [
    "ESTIMATORS",
    "GAE",
    "adaptive_lam",
    "asymre",
    "centered_kl",
    "discounted_returns",
    "dr_grpo",
    "estimator",
    "flash_reinforce",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "group_advantages",
    "grpo",
    "grpo_loo",
    "hierarchical_grpo",
    "iw_opd",
    "kl_in_reward",
    "mask_truncated",
    "maxrl",
    "mt_grpo",
    "opd",
    "opo",
    "optimal_token_baseline",
    "passk_combinatorial",
    "passk_max_gap",
    "prefix_weights",
    "prpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "rlsd",
    "soft_overlong",
    "top_entropy_mask",
    "turn_gae",
    "turn_loo",
    "turn_returns",
    "whiten",
]
