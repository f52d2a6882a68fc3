"""Presets by how they measure and bound the ratio: the families of PPO, GSPO and CISPO."""

from __future__ import annotations

from policyloss.catalogue.named_loss import CLIP, PPO_EPSILON, Preset, preset_from_text
from policyloss.parts.aggregate import (
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenMean,
    TokenSum,
)
from policyloss.parts.kl import KL
from policyloss.parts.ratio import SegmentRatio, SequenceRatio, TokenRatio
from policyloss.parts.trust import Clip, DetachedClip, FutureKL, GeometricClip, SoftGate, Unbounded
from policyloss.spec import LossSpec

_GSPO_EPS = "GSPO, arXiv 2507.18071, section 5.1: 3e-4 and 4e-4"

BY_RATIO: tuple[Preset, ...] = (
    preset_from_text(
        LossSpec(trust=CLIP, aggregate=TokenMean()),
        f"""ppo: PPO, clipped surrogate
        paper: arXiv 1707.06347
        trust: {PPO_EPSILON}
        aggregate: the expectation over timesteps of equation 7
        advantage (gae): arXiv 1707.06347, equations 11 and 12: generalised advantage estimation
            with a critic""",
    ),
    preset_from_text(
        LossSpec(trust=Clip(0.2, 0.2, dual=3.0), aggregate=TokenMean()),
        f"""ppo_dual_clip: PPO with dual clip
        paper: arXiv 1912.09729
        trust: {PPO_EPSILON}
        trust.dual: dual clip: Ye et al. 2019, arXiv 1912.09729; c = 3 is the default of verl and
            SkyRL (clip_ratio_c)
        aggregate: the expectation over timesteps
        advantage (gae): Ye et al. 2019, arXiv 1912.09729: PPO's actor and critic, advantages by
            GAE""",
    ),
    preset_from_text(
        LossSpec(trust=CLIP, kl=KL("k3", 0.04), aggregate=SeqMeanTokenMean()),
        f"""grpo: GRPO, clipped surrogate with a KL penalty in the loss
        paper: arXiv 2402.03300
        trust: {PPO_EPSILON}; DeepSeekMath does not print its own epsilon
        kl: DeepSeekMath, arXiv 2402.03300, equation 4: the unbiased estimator k3
        kl.coef: DeepSeekMath, section 4.2: 0.04
        aggregate: DeepSeekMath, equation 3: mean over outputs of token means
        advantage (grpo): DeepSeekMath, section 4.1.2: reward minus the group's mean, over its
            standard deviation""",
    ),
    preset_from_text(
        LossSpec(trust=CLIP, aggregate=SeqMeanTokenSumNorm()),
        f"""dr_grpo: Dr. GRPO: GRPO without length and std normalisation
        paper: arXiv 2503.20783
        trust: {PPO_EPSILON}
        aggregate: arXiv 2503.20783, section 3.2: divide by a constant, not by the length
        aggregate.horizon: your run's generation budget: spec.with_horizon(tokens); 3000 tokens in
            the authors' runs
        advantage (dr_grpo): arXiv 2503.20783, section 3.2: reward minus the group's mean, not
            divided by its deviation""",
    ),
    preset_from_text(
        LossSpec(trust=Clip(0.2, 0.28), aggregate=TokenMean()),
        """dapo: DAPO: clip-higher and token mean
        paper: arXiv 2503.14476
        trust: DAPO, arXiv 2503.14476, section 4.1: epsilon_low 0.2, epsilon_high 0.28
        aggregate: DAPO: token-level policy gradient loss
        advantage (grpo): DAPO, arXiv 2503.14476, equation 9: as GRPO""",
    ),
    preset_from_text(
        LossSpec(trust=CLIP, aggregate=TokenMean()),
        f"""bnpo: Batch-normalised clipped loss: every token of the batch counts the same
        paper: TRL GRPOConfig.loss_type
        trust: {PPO_EPSILON}
        aggregate: TRL loss_type='bnpo': divide by the valid tokens of the batch
        note: TRL divides by the tokens of each micro-batch; use LocalTokenMean to reproduce that.
            Here the whole step counts.""",
    ),
    preset_from_text(
        LossSpec(ratio=SequenceRatio(), trust=Clip(3e-4, 4e-4), aggregate=SeqMeanTokenMean()),
        f"""gspo: GSPO: sequence-level ratio and clip
        paper: arXiv 2507.18071
        ratio: GSPO, arXiv 2507.18071, equation 7
        trust: {_GSPO_EPS}
        aggregate: GSPO, equation 5: mean over sequences
        advantage (grpo): GSPO, arXiv 2507.18071, equation 6: as GRPO""",
    ),
    preset_from_text(
        LossSpec(
            ratio=SequenceRatio(grad="token"), trust=Clip(3e-4, 4e-4), aggregate=SeqMeanTokenMean()
        ),
        f"""gspo_token: GSPO-token: the sequence's ratio, each token's own gradient
        paper: arXiv 2507.18071
        ratio: GSPO, arXiv 2507.18071, section 4.3, equation 14
        trust: {_GSPO_EPS}
        aggregate: GSPO, equation 13: mean over sequences of token means""",
    ),
    preset_from_text(
        LossSpec(ratio=SegmentRatio(), trust=Clip(3e-4, 4e-4), aggregate=SeqMeanTokenMean()),
        f"""gspo_turn: GSPO over the turns of a dialogue
        paper: ROLL, agentic ratio_type=segment
        ratio: ROLL's segment ratio: the geometric mean over each contiguous run of the mask
        trust: {_GSPO_EPS}
        aggregate: as GSPO""",
    ),
    preset_from_text(
        LossSpec(trust=DetachedClip(0.0, 5.0), aggregate=TokenMean()),
        """cispo: CISPO: clipped importance weight, no token loses its gradient
        paper: arXiv 2506.13585
        trust: MiniMax-M1, arXiv 2506.13585, equations 4 and 5: no lower bound, a tuned upper bound
        trust.ratio_max: 5, ScaleRL's epsilon_max (arXiv 2510.13786), which TRL recommends;
            MiniMax-M1 prints none
        aggregate: MiniMax-M1, equation 4: sum over all tokens over their number
        advantage (grpo): MiniMax-M1, arXiv 2506.13585, section 3.1: the group-relative advantage of
            GRPO""",
    ),
    preset_from_text(
        LossSpec(trust=DetachedClip(0.9, 1.1, outside="zero_by_sign"), aggregate=TokenMean()),
        """cispo_unified: CISPO with PPO's token mask
        paper: arXiv 2506.13585
        trust: MiniMax-M1, arXiv 2506.13585, equations 6 and 7: the unified form with a mask
        trust.ratio_min: ROLL's CISPO default, 1 - 0.1
        trust.ratio_max: ROLL's CISPO default, 1 + 0.1
        aggregate: MiniMax-M1, equation 6
        advantage (grpo): MiniMax-M1, arXiv 2506.13585, section 3.1: the group-relative advantage of
            GRPO""",
    ),
    preset_from_text(
        LossSpec(
            ratio=TokenRatio(anchor="rollout"),
            trust=DetachedClip(0.8, 1.2, outside="zero"),
            aggregate=TokenMean(),
        ),
        """rollout_is: Hard-masked importance sampling against the rollout policy
        paper: arXiv 2602.15763
        ratio: GLM-5, arXiv 2602.15763, equation 4: exp(logp - rollout_logp)
        trust: GLM-5, section 4.1.2, equations 3 and 5: zero outside (1 - eps_low, 1 + eps_high)
        trust.ratio_min: 1 - 0.2, SkyRL's default for policy_loss_type='rollout_is'; GLM-5 does not
            print its own
        trust.ratio_max: 1 + 0.2, SkyRL's default for policy_loss_type='rollout_is'; GLM-5 does not
            print its own
        aggregate: token mean, as SkyRL's default""",
    ),
    preset_from_text(
        LossSpec(
            trust=DetachedClip(0.8, 1.2, outside="zero_by_sign", weight="one"),
            aggregate=TokenMean(),
        ),
        """rec_one_side: REC-OneSide-NoIS: REINFORCE without the tokens that PPO would clip
        paper: arXiv 2509.24203
        trust: arXiv 2509.24203, REC-OneSide-NoIS; Trinity-RFT clip_mode='one-side', weight='none'
        trust.ratio_min: 1 - epsilon_low, 0.2 by default in Trinity-RFT
        trust.ratio_max: 1 + epsilon_high, 0.2 by default in Trinity-RFT
        aggregate: token mean, as Trinity-RFT
        advantage (dr_grpo): arXiv 2509.24203: reward minus the group's mean
        note: REC-TwoSide is outside='zero'; REC with importance sampling is weight='ratio'.""",
    ),
    preset_from_text(
        LossSpec(
            trust=DetachedClip(1 / 1.3, 1.3, outside="zero", weight="one"), aggregate=TokenMean()
        ),
        """sppo_token: sPPO-token: REINFORCE on the tokens whose ratio is near 1
        paper: arXiv 2108.05828
        trust: Trinity-RFT policy_loss_fn='sppo': -A·(logp - old_logp) within the band
        trust.ratio_min: 1 / (1 + epsilon), epsilon 0.3 by default in Trinity-RFT
        trust.ratio_max: 1 + epsilon, epsilon 0.3 by default in Trinity-RFT
        aggregate: token mean, Trinity-RFT's default
        note: The gradient is Trinity-RFT's; the value lacks the constant A·old_logp.""",
    ),
    preset_from_text(
        LossSpec(trust=SoftGate(1.0, 1.05), aggregate=SeqMeanTokenMean()),
        """sapo: SAPO: a soft gate instead of a clip
        paper: arXiv 2511.20347
        trust: SAPO, arXiv 2511.20347: temperatures 1.0 (positive) and 1.05 (negative); TRL's,
            verl's and SkyRL's defaults
        aggregate: SAPO: mean over sequences of token means
        advantage (grpo): SAPO, arXiv 2511.20347: group-normalised, as GRPO""",
    ),
    preset_from_text(
        LossSpec(trust=FutureKL(0.2, 0.2), aggregate=TokenMean()),
        f"""fipo: FIPO: PPO with tokens weighted by the change of the policy on what follows them
        paper: arXiv 2603.19835
        trust: ms-swift loss_type='fipo': half-life 32, weight within [1, 1.2], safety threshold 4
        trust.eps_low: {PPO_EPSILON}
        trust.eps_high: {PPO_EPSILON}
        aggregate: token mean, as ms-swift
        note: ms-swift's option delta, off by default, is left out. Time runs over the valid
            tokens.""",
    ),
    preset_from_text(
        LossSpec(trust=GeometricClip(0.4, 0.4), aggregate=SeqMeanTokenMean()),
        """gmpo: GMPO: geometric mean over the sequence, clipped per token in log space
        paper: arXiv 2507.20673
        trust: GMPO, arXiv 2507.20673: clip range (e^-0.4, e^0.4), also TRL's default
        aggregate: GMPO: mean over sequences
        advantage (grpo): GMPO, arXiv 2507.20673: as GRPO""",
    ),
    preset_from_text(
        LossSpec(trust=Unbounded("logp"), aggregate=TokenMean()),
        """gpg: GPG: the plain policy gradient
        paper: arXiv 2504.02546
        trust: GPG, arXiv 2504.02546: -A·logp, no ratio
        aggregate: token mean, the default of verl's loss_mode='gpg'
        advantage (gpg): GPG, arXiv 2504.02546: group-centred, rescaled by the share of informative
            samples""",
    ),
    preset_from_text(
        LossSpec(trust=Unbounded("logp"), aggregate=SeqMeanTokenSum()),
        """reinforce: REINFORCE
        paper: Williams 1992, doi 10.1007/BF00992696
        trust: Williams 1992: -A·logp
        aggregate: the gradient of the log-likelihood of a whole sequence: token sum, sequence
            mean""",
    ),
    preset_from_text(
        LossSpec(
            ratio=TokenRatio(anchor="rollout"), trust=Unbounded("ratio"), aggregate=TokenSum()
        ),
        """importance_sampling: Importance-sampled policy gradient against the rollout policy
        paper: Tinker loss 'importance_sampling'
        ratio: Tinker: exp(logp - sampler's logp)
        trust: Tinker: -ratio·A, no bound
        aggregate: Tinker: the sum over tokens""",
    ),
)
