"""Presets for data of another policy, or of another engine: corrections, bands and tapers."""

from __future__ import annotations

import math

from policyloss.catalogue.named_loss import CLIP, PPO_EPSILON, Preset, described
from policyloss.parts.aggregate import LengthWeighted, SeqMeanTokenMean, TokenMean
from policyloss.parts.correction import OPSM, Band, SequenceMask, Truncate
from policyloss.parts.kl import KL
from policyloss.parts.ratio import SequenceProduct, SequenceRatio, TokenRatio
from policyloss.parts.trust import (
    BySign,
    Clip,
    CovClip,
    CovKL,
    GammaWeight,
    ProbabilityBand,
    Quadratic,
    TaperedNegative,
    TwoSidedClip,
    Unbounded,
)
from policyloss.spec import LossSpec

_DPPO_NOTE = (
    "verl's example and SkyRL measure against the rollout policy: "
    "ratio=TokenRatio(anchor='rollout')."
)

OFF_POLICY: tuple[Preset, ...] = (
    described(
        "tis",
        "PPO with truncated importance sampling for the rollout mismatch",
        "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'",
        LossSpec(trust=CLIP, correction=Truncate(2.0), aggregate=TokenMean()),
        f"""
        trust: {PPO_EPSILON}
        correction: min(exp(old_logp - rollout_logp), C) on the policy term
        correction.high: C = 2, the default of verl, SkyRL and slime
        aggregate: token mean
        """,
    ),
    described(
        "seq_tis",
        "PPO with truncated sequence-level importance sampling (product)",
        "verl rollout_is='sequence'",
        LossSpec(trust=CLIP, correction=Truncate(2.0, level="product"), aggregate=TokenMean()),
        f"""
        trust: {PPO_EPSILON}
        correction: verl rollout_correction, rollout_is='sequence': the product over the sequence
        correction.high: verl's rollout_is_threshold default, 2
        aggregate: token mean
        """,
    ),
    described(
        "icepop",
        "PPO with IcePop: tokens whose engines disagree get no gradient",
        "arXiv 2510.18855",
        LossSpec(trust=CLIP, correction=Band(0.5, 5.0), aggregate=TokenMean()),
        f"""
        trust: {PPO_EPSILON}
        correction: IcePop (Ring-1T, arXiv 2510.18855): zero outside [alpha, beta]
        correction.low: alpha = 0.5, section 2.4.1; also verl's IcePop preset
        correction.high: beta = 5, section 2.4.1; also verl's IcePop preset
        aggregate: token mean
        """,
    ),
    described(
        "seq_mask_tis",
        "PPO with seq-mask-TIS: sequences whose engines drifted apart get no gradient",
        "NeMo-RL truncated_importance_sampling_type='seq-mask-tis'",
        LossSpec(trust=CLIP, correction=SequenceMask(0.999, 1.002), aggregate=TokenMean()),
        f"""
        trust: {PPO_EPSILON}
        correction: NeMo-RL: mask by the geometric mean, keep the raw token weight
        correction.low: 0.999, the band NeMo-RL gives for it
        correction.high: 1.002, the band NeMo-RL gives for it
        aggregate: token mean
        """,
    ),
    described(
        "opsm",
        "GRPO with off-policy sequence masking",
        "arXiv 2512.02556",
        LossSpec(trust=CLIP, correction=OPSM(1e-4), aggregate=SeqMeanTokenMean()),
        f"""
        trust: {PPO_EPSILON}
        correction: DeepSeek-V3.2, arXiv 2512.02556, equation 9: drop negative-advantage sequences
            that drifted
        correction.delta: slime's default for --opsm-delta, 1e-4 (TRL's documentation suggests 0.5)
        aggregate: as GRPO
        """,
    ),
    described(
        "decoupled_ppo",
        "Decoupled PPO: clip against the proximal policy, weight by the behaviour policy",
        "arXiv 2505.24298",
        LossSpec(trust=CLIP, correction=Truncate(math.inf), aggregate=TokenMean()),
        f"""
        trust: {PPO_EPSILON}
        correction: AReaL, arXiv 2505.24298: exp(old_logp - rollout_logp), not truncated
        correction.high: no truncation in the paper; AReaL's code can cap it
        aggregate: token mean
        advantage (gae): the decoupled objective changes PPO's ratio alone (Hilton et al. 2021,
            arXiv 2110.00641): GAE
        """,
    ),
    described(
        "clip_cov",
        "Clip-Cov: PPO, and a few high-covariance tokens get no gradient",
        "arXiv 2505.22617",
        LossSpec(trust=CovClip(), aggregate=TokenMean()),
        f"""
        trust: arXiv 2505.22617, section 4.2, equations 10 to 12
        trust.eps_low: {PPO_EPSILON}
        trust.eps_high: {PPO_EPSILON}
        trust.fraction: arXiv 2505.22617, section 4.3: r = 2e-4
        trust.cov_low: arXiv 2505.22617, section 4.3: 1
        trust.cov_high: arXiv 2505.22617, section 4.3: 5
        trust.seed: any; the draw is a function of the seed and the token's own numbers
        aggregate: token mean, as verl
        """,
    ),
    described(
        "kl_cov",
        "KL-Cov: importance sampling, and the highest-covariance tokens are held back",
        "arXiv 2505.22617",
        LossSpec(trust=CovKL(), aggregate=TokenMean()),
        """
        trust: arXiv 2505.22617, section 4.2, equations 13 and 14
        trust.fraction: arXiv 2505.22617, section 4.3: k = 2e-4 for the 32B model (2e-3 for the 7B)
        trust.coef: arXiv 2505.22617, section 4.3: beta = 1 (verl's configuration file ships 0.1)
        aggregate: token mean, as verl
        """,
    ),
    described(
        "dppo_tv",
        "DPPO with the total-variation band",
        "arXiv 2602.04879",
        LossSpec(trust=ProbabilityBand("tv", 0.2, 0.2), aggregate=TokenMean()),
        """
        trust: verl loss_mode='dppo_tv'; 0.2 on both sides is SkyRL's and prime-rl's default (verl's
            example runs 0.15)
        trust.cap: 20, verl's fallback for clip_ratio_c in this loss
        aggregate: token mean, as verl
        """,
        note=_DPPO_NOTE,
    ),
    described(
        "dppo_kl",
        "DPPO with the binary-KL band",
        "arXiv 2602.04879",
        LossSpec(trust=ProbabilityBand("kl", 0.05, 0.05), aggregate=TokenMean()),
        """
        trust: verl loss_mode='dppo_kl'; 0.05 on both sides is verl's example run and SkyRL's
            recommendation
        trust.cap: 20, verl's fallback for clip_ratio_c in this loss
        aggregate: token mean, as verl
        """,
        note=_DPPO_NOTE,
    ),
    described(
        "prime_rl",
        "prime-rl's default: a probability band and a quadratic pull, both against the rollout "
        "policy",
        "prime-rl trainer.loss.type='default'",
        LossSpec(
            ratio=TokenRatio(anchor="rollout", log_clamp=None),
            trust=ProbabilityBand("tv", 0.2, 0.2, form="ratio"),
            kl=KL("k2", 2e-3, anchor="rollout", clamp=None),
            aggregate=TokenMean(),
        ),
        """
        ratio: prime-rl: exp(logp - inference logp), not clamped
        trust: prime-rl: mask 0.2 / 0.2
        kl: Kimi-K2.5's (logp - rollout_logp)² without the one half
        kl.coef: kl_tau 1e-3; doubled because k2 holds the one half
        aggregate: global token mean
        advantage (dr_grpo): prime-rl's default: reward minus the group's mean
        """,
    ),
    described(
        "dro",
        "DRO: advantage regression with a quadratic pull",
        "arXiv 2405.19107",
        LossSpec(trust=Quadratic(0.1), aggregate=TokenMean()),
        """
        trust: DRO, arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599: a quadratic penalty on the
            log-ratio
        trust.beta: ROLL's kimi15 default, tau = 0.1 (verl has no default)
        aggregate: token mean, as verl
        advantage (dr_grpo): Kimi k1.5, arXiv 2501.12599, section 2.3.2: reward minus the mean of
            the sampled rewards
        """,
    ),
    described(
        "topr",
        "TOPR: tapered off-policy REINFORCE",
        "arXiv 2503.14286",
        LossSpec(trust=TaperedNegative(1.0), aggregate=TokenMean()),
        """
        trust: TOPR, arXiv 2503.14286, section 3: the ratio of negative examples is truncated to [0,
            1]
        aggregate: token mean, as ROLL's default
        """,
        note=(
            "The paper's ratio is the whole sequence's: use ratio=SequenceProduct() for that; ROLL "
            "and Trinity use the token's."
        ),
    ),
    described(
        "up_grpo",
        "UP-GRPO: the plain policy gradient for good tokens, dual clip for the others",
        "arXiv 2607.06987",
        LossSpec(
            trust=BySign(Unbounded("current"), Clip(0.2, 0.2, dual=3.0)),
            aggregate=SeqMeanTokenMean(),
        ),
        """
        trust: UP-GRPO, arXiv 2607.06987, equation 15: split by the sign of the advantage
        trust.positive: equation 15: -A times the ratio of the policy to itself, unbounded
        trust.negative: equation 15: GRPO's symmetric clip with dual clip, unchanged
        trust.negative.eps_low: 0.2, verl's default of clip_ratio
        trust.negative.eps_high: 0.2, verl's default of clip_ratio; it cannot bind where A <= 0
        trust.negative.dual: 3, verl's default of clip_ratio_c
        aggregate: as GRPO: mean over outputs of token means
        """,
        note="The paper's KL penalty is a slot of its own: kl=KL('k3', coef).",
    ),
    described(
        "luspo",
        "LUSPO: GSPO weighted by length",
        "arXiv 2602.05261",
        LossSpec(ratio=SequenceRatio(), trust=Clip(2e-3, 2.5e-3), aggregate=LengthWeighted()),
        """
        ratio: GSPO, arXiv 2507.18071, equation 7
        trust: LUSPO, arXiv 2602.05261, section 5.1: epsilon 2e-3 and 2.5e-3
        aggregate: LUSPO, as in TRL's loss_type='luspo': sequence loss times length, mean over
            sequences
        advantage (grpo): LUSPO, arXiv 2602.05261: as GSPO and GRPO
        """,
    ),
    described(
        "vespo",
        "VESPO: a smooth weight of the sequence's likelihood ratio",
        "arXiv 2602.10693",
        LossSpec(
            ratio=SequenceProduct(log_clamp=(math.log(1e-8), 20.0)),
            trust=GammaWeight(2.0, 3.0, 3.0, 2.0),
            aggregate=TokenMean(),
        ),
        """
        ratio: TRL loss_type='vespo': the product over the sequence, its log within [log 1e-8, 20]
        trust: TRL's defaults: k+ 2, lambda+ 3, k- 3, lambda- 2
        aggregate: TRL loss_type='vespo': global token mean
        """,
    ),
    described(
        "rloo_loss",
        "RLOO's loss: PPO on the likelihood ratio of the whole sequence",
        "TRL RLOOTrainer; arXiv 2402.14740",
        LossSpec(ratio=SequenceProduct(), trust=CLIP, aggregate=SeqMeanTokenMean()),
        """
        ratio: TRL RLOOTrainer: exp of the difference of summed log-probs
        trust: TRL RLOOConfig: epsilon 0.2
        aggregate: mean over sequences
        advantage (rloo): RLOO, arXiv 2402.14740: reward minus the mean of the other samples
        """,
        note="Elsewhere RLOO is only an advantage estimator: advantage.rloo.",
    ),
    described(
        "two_sided",
        "Two-sided clipping: PPO with a bound on every ratio",
        "arXiv 2505.07291",
        LossSpec(trust=TwoSidedClip(4.0, 0.2, 0.2), aggregate=TokenMean()),
        """
        trust: INTELLECT-2, arXiv 2505.07291, section 4.1: delta 4, epsilon 0.2
        aggregate: token mean
        """,
    ),
    described(
        "aipo",
        "AIPO: importance sampling against the rollout policy, truncated from above",
        "arXiv 2505.24034",
        LossSpec(
            ratio=TokenRatio(anchor="rollout"),
            trust=Clip(math.inf, 1.0, dual=2.0),
            aggregate=TokenMean(),
        ),
        """
        ratio: LlamaRL, arXiv 2505.24034: against the policy that sampled
        trust: -min(ratio, rho)·A for either sign: eps_high = rho - 1, dual = rho, no lower bound
        trust.dual: rho = 2, the low end of the range 2 to 10 that cosmos-rl suggests for aipo_rho,
            citing the paper
        aggregate: token mean
        """,
    ),
)
