"""A teacher in the advantages, and a KL in the advantages or in the rewards.

A teacher scores the tokens that the student sampled: `teacher_logp − old_logp` measures how much
more probable a token is for the teacher. That number is an advantage for any policy loss.
Legend: token-shaped is `[B, T]`, or packed `[N]` with `cu_seqlens`; S sequences. No result carries
a gradient, and the values at masked positions are ignored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.advantage.groups import moments, shared_groups
from policyloss.advantage.returns import discounted_returns, token_rewards, whole_sequences
from policyloss.arguments import check_choice, check_like, check_number, check_tensor
from policyloss.functional.kl import ESTIMATORS, estimate
from policyloss.functional.masking import compute_dtype, difference, fill
from policyloss.functional.segments import Sequences
from policyloss.tokens import as_mask, expand_advantages


@torch.no_grad()
def opd(
    teacher_logp: Tensor,
    old_logp: Tensor,
    coef: float = 1.0,
    base: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
) -> Tensor:
    """On-policy distillation: `A = base + coef·(teacher_logp − old_logp)`, for each token.

    The mean of `old_logp − teacher_logp` over the student's tokens is the KL from student to
    teacher, so a policy gradient with this advantage lowers the reverse KL.
    teacher_logp, old_logp, mask and the result: `[B, T]` or `[N]`. The log-probabilities are those
    of the sampled tokens; old_logp belongs to the policy that sampled them, recomputed by the
    trainer or, failing that, from the rollout engine. base: advantages computed from rewards, one
    per token, or per sequence: `[S]` (packed with a `cp_group`: `[S, 1]`). cu_seqlens, cp_group: as
    in `policy_loss`. Masked tokens get 0.
    Source: arXiv 2601.02780, equation 8; NeMo-RL's, slime's and Tinker's on-policy distillation.
    """
    check_number("coef", coef, finite=True)
    gap = _Gap.of(old_logp, ("teacher_logp", teacher_logp), mask, cu_seqlens, cp_group)
    return gap.added_to(base, coef * gap.d)


@torch.no_grad()
def iw_opd(
    teacher_logp: Tensor,
    old_logp: Tensor,
    mask: Tensor,
    gamma: float = 0.5,
    coef: float = 1.0,
    base: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """IW-OPD: `A = base + w·coef·(teacher_logp − old_logp)`, where w falls along the sequence.

    w is `prefix_weights(teacher_logp − old_logp, mask, gamma)`. Arguments as in `opd` and `gae`.
    Source: arXiv 2606.22600; gamma as in TRL's `iw_opd`.
    """
    check_number("coef", coef, finite=True)
    gap = _Gap.of(old_logp, ("teacher_logp", teacher_logp), mask, cu_seqlens, cp_group)
    where = {"cu_seqlens": cu_seqlens, "cp_group": cp_group, "positions": positions}
    w = prefix_weights(gap.d, mask, gamma, **where)
    return gap.added_to(base, coef * w * gap.d)


@torch.no_grad()
def rlsd(
    teacher_logp: Tensor,
    old_logp: Tensor,
    base: Tensor,
    coef: float = 0.5,
    eps: float = 0.2,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
) -> Tensor:
    """RLSD: `A = base·(1 − coef + coef·clip(e^(sign(base)·d), 1 − eps, 1 + eps))`.

    d = teacher_logp − old_logp. The teacher, often the policy itself with the answer in its prompt,
    shifts the credit among the tokens of a sequence: a good sequence rewards most the tokens that
    the teacher prefers, and a bad one punishes them least. The sign of `base` stays (eps < 1).
    base: the advantages to shift; other arguments as in `opd`. For bad sequences alone, with base
    per token: `torch.where(base < 0, rlsd(…), base)`.
    Source: arXiv 2604.03128; coef and eps as in ms-swift's rlsd_lambda, rlsd_reweight_clip_range.
    """
    check_number("coef", coef, least=0, most=1)
    check_number("eps", eps, least=0, below=1)
    gap = _Gap.of(old_logp, ("teacher_logp", teacher_logp), mask, cu_seqlens, cp_group)
    a = gap.added_to(base, torch.zeros_like(gap.d))
    weight = (a.sign() * gap.d).exp().clamp(1 - eps, 1 + eps)
    return fill(a * (1 - coef + coef * weight), gap.valid)


@torch.no_grad()
def prefix_weights(
    advantages: Tensor,
    mask: Tensor,
    gamma: float = 0.5,
    *,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Factors w for the advantages A of `opd` (`w * A`), falling as student and teacher diverge.

    `w_t = 1 + γ·(1 − Σ_{k<t}|A_k| / Σ_k|A_k|)` over the valid tokens of each sequence.
    |A| measures how far they differ: w falls from 1 + γ at the first valid token to
    1 + γ·|A_T|/Σ|A| at the last. Masked tokens get 0. If every A of a sequence is 0, w is 1 + γ.
    advantages, mask and the result are `[B, T]` or `[N]`. cp_group, positions: as in `gae`.
    """
    check_number("gamma", gamma, least=0, finite=True)
    check_tensor("advantages", advantages, "float")
    valid = as_mask(mask, advantages, like_called="advantages")
    sequences = Sequences.of(advantages, cu_seqlens, cp_group, "advantages")
    size = fill(advantages.detach(), valid, compute_dtype(advantages)).abs()
    # 1 − Σ_{k<t} / Σ is the share of this and all later tokens, without the cancellation. One
    # number per token is [1, N] in a pack, where [N] might mean one per sequence.
    where = {"cu_seqlens": cu_seqlens, "cp_group": cp_group, "positions": positions}
    each = size if cu_seqlens is None else size.unsqueeze(0)
    rest = discounted_returns(each, valid, **where)
    total = sequences.expand(sequences.sum(size))
    share = torch.where(total == 0, 1, rest / torch.where(total == 0, 1, total))
    return fill(1 + gamma * share, valid)


@torch.no_grad()
def centered_kl(
    old_logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    coef: float,
    base: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    group: Any = None,
    cp_group: Any = None,
) -> Tensor:
    """`A = base + coef·(mean of kl − kl_t)` with `kl_t = old_logp − ref_logp`.

    This KL does not change the mean of the advantages: a token with a KL below the average gets a
    larger advantage. The mean is over all valid tokens: pass the whole step at once. `ref_logp` may
    be a teacher's.
    old_logp, ref_logp, mask and the result: `[B, T]` or `[N]`. base: other advantages to add, as in
    `opd`. group, cp_group: ranks that share the mean, as in `whiten`.
    Source: Tinker's cookbook, `incorporate_kl_penalty`.
    """
    check_number("coef", coef, finite=True)
    gap = _Gap.of(old_logp, ("ref_logp", ref_logp), mask, cu_seqlens, cp_group)
    mean, _ = moments(gap.d, gap.valid, 1, *shared_groups(group, cp_group))
    centered = (gap.d.to(mean.dtype) - mean).to(gap.d.dtype)
    return gap.added_to(base, fill(coef * centered, gap.valid))


@torch.no_grad()
def kl_in_reward(
    rewards: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    coef: float,
    *,
    estimator: str = "k1",
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The rewards with a KL penalty on every token: `r_t − coef·kl_t`, for `gae` or `reinforce_pp`.

    kl_t: the estimate "k1", "k2", "k3" or "abs" of KL(old‖ref) from `d = ref_logp − old_logp`, as
    in `KL`. Use these rewards with a loss that has `kl=None`, so that the penalty counts once.
    old_logp, ref_logp, mask and the result: `[B, T]` or `[N]`; masked tokens get 0. rewards: the
    same shape, or one per sequence `[S]`, which is added at the last valid token. cp_group,
    positions: as in `gae`.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_number("coef", coef, least=0, finite=True)
    check_tensor("rewards", rewards)
    gap = _Gap.of(old_logp, ("ref_logp", ref_logp), mask, cu_seqlens, cp_group)
    dtype = compute_dtype(rewards, gap.d)
    if cp_group is None:
        reward = token_rewards(rewards, gap.valid, gap.sequences, dtype)
    else:
        pack, reward = whole_sequences(rewards, gap.valid, gap.sequences, positions, dtype)
        layout = Sequences.of(pack.mask, pack.cu_seqlens)
        reward = pack.on_this_rank(token_rewards(reward, pack.mask, layout, dtype))
    return fill(reward - coef * estimate(gap.d.to(dtype), estimator), gap.valid)


class _Gap(NamedTuple):
    """`d = other_logp − old_logp` of the valid tokens, 0 at masked tokens; and their layout."""

    d: Tensor
    valid: Tensor
    sequences: Sequences

    @classmethod
    def of(
        cls,
        old_logp: Tensor,
        other: tuple[str, Tensor],
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cp_group: Any,
    ) -> _Gap:
        """The gap between two arguments. other: with its name. mask: None if all tokens count."""
        check_tensor("old_logp", old_logp, "float")
        check_like(*other, ("old_logp", old_logp), "float")
        valid = torch.ones_like(old_logp, dtype=torch.bool)
        if mask is not None:
            valid = as_mask(mask, old_logp, like_called="old_logp")
        logp = other[1].detach()
        d = difference(logp, old_logp.detach(), valid, compute_dtype(logp, old_logp))
        return cls(d, valid, Sequences.of(old_logp, cu_seqlens, cp_group, "old_logp"))

    def added_to(self, base: Tensor | None, a: Tensor) -> Tensor:
        """`base + a`, 0 at masked tokens; `a` alone without a base."""
        if base is None:
            return a
        check_tensor("base", base, like=("old_logp", a))
        per_token = expand_advantages(base, self.sequences, "base").to(a.dtype)
        return fill(per_token + a, self.valid)
