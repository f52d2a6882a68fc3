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

import inspect

from policyloss.advantage.distillation import centered_kl as centered_kl
from policyloss.advantage.distillation import iw_opd as iw_opd
from policyloss.advantage.distillation import kl_in_reward as kl_in_reward
from policyloss.advantage.distillation import opd as opd
from policyloss.advantage.distillation import prefix_weights as prefix_weights
from policyloss.advantage.distillation import rlsd as rlsd
from policyloss.advantage.estimators import ESTIMATORS as ESTIMATORS
from policyloss.advantage.estimators import asymre as asymre
from policyloss.advantage.estimators import dr_grpo as dr_grpo
from policyloss.advantage.estimators import estimator as estimator
from policyloss.advantage.estimators import flash_reinforce as flash_reinforce
from policyloss.advantage.estimators import gdpo as gdpo
from policyloss.advantage.estimators import gpg as gpg
from policyloss.advantage.estimators import grpo as grpo
from policyloss.advantage.estimators import grpo_loo as grpo_loo
from policyloss.advantage.estimators import hierarchical_grpo as hierarchical_grpo
from policyloss.advantage.estimators import maxrl as maxrl
from policyloss.advantage.estimators import opo as opo
from policyloss.advantage.estimators import prpo as prpo
from policyloss.advantage.estimators import reinforce_pp as reinforce_pp
from policyloss.advantage.estimators import reinforce_pp_baseline as reinforce_pp_baseline
from policyloss.advantage.estimators import remax as remax
from policyloss.advantage.estimators import rloo as rloo
from policyloss.advantage.groups import group_advantages as group_advantages
from policyloss.advantage.groups import whiten as whiten
from policyloss.advantage.optimal_baseline import optimal_token_baseline as optimal_token_baseline
from policyloss.advantage.pass_at_k import passk_combinatorial as passk_combinatorial
from policyloss.advantage.pass_at_k import passk_max_gap as passk_max_gap
from policyloss.advantage.returns import GAE as GAE
from policyloss.advantage.returns import discounted_returns as discounted_returns
from policyloss.advantage.returns import gae as gae
from policyloss.advantage.truncation import mask_truncated as mask_truncated
from policyloss.advantage.truncation import soft_overlong as soft_overlong
from policyloss.advantage.truncation import top_entropy_mask as top_entropy_mask
from policyloss.advantage.turns import adaptive_lam as adaptive_lam
from policyloss.advantage.turns import gigpo as gigpo
from policyloss.advantage.turns import mt_grpo as mt_grpo
from policyloss.advantage.turns import turn_gae as turn_gae
from policyloss.advantage.turns import turn_loo as turn_loo
from policyloss.advantage.turns import turn_returns as turn_returns

__all__ = sorted(name for name, x in vars().items() if name[0] != "_" and not inspect.ismodule(x))
