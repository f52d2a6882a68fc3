"""Presets for data of another policy, or of another engine: corrections, bands and tapers."""

from __future__ import annotations

import math

from policyloss.catalogue.named_loss import CLIP, PPO_EPSILON, Preset, preset_from_text
from policyloss.parts.aggregate import LengthWeighted, SeqMeanTokenMean, TokenMean
from policyloss.parts.correction import OPSM, Band, MomentBudget, SequenceMask, Truncate
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
    Regression,
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
    preset_from_text(
        LossSpec(trust=CLIP, correction=Truncate(2.0), aggregate=TokenMean()),
        f"""tis: PPO with truncated importance sampling for the rollout mismatch
        paper: Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL
            training'
        trust: {PPO_EPSILON}
        correction: min(exp(old_logp - rollout_logp), C) on the policy term
        correction.high: C = 2, the default of verl, SkyRL and slime
        aggregate: token mean""",
    ),
    preset_from_text(
        LossSpec(trust=CLIP, correction=Truncate(2.0, level="product"), aggregate=TokenMean()),
        f"""seq_tis: PPO with truncated sequence-level importance sampling (product)
        paper: verl rollout_is='sequence'
        trust: {PPO_EPSILON}
        correction: verl rollout_correction, rollout_is='sequence': the product over the sequence
        correction.high: verl's rollout_is_threshold default, 2
        aggregate: token mean""",
    ),
    preset_from_text(
        LossSpec(trust=CLIP, correction=Band(0.5, 5.0), aggregate=TokenMean()),
        f"""icepop: PPO with IcePop: tokens whose engines disagree get no gradient
        paper: arXiv 2510.18855
        trust: {PPO_EPSILON}
        correction: IcePop (Ring-1T, arXiv 2510.18855): zero outside [alpha, beta]
        correction.low: alpha = 0.5, section 2.4.1; also verl's IcePop preset
        correction.high: beta = 5, section 2.4.1; also verl's IcePop preset
        aggregate: token mean""",
    ),
    preset_from_text(
        LossSpec(trust=CLIP, correction=SequenceMask(0.999, 1.002), aggregate=TokenMean()),
        f"""seq_mask_tis: PPO with seq-mask-TIS: sequences whose engines drifted apart get no
            gradient
        paper: NeMo-RL truncated_importance_sampling_type='seq-mask-tis'
        trust: {PPO_EPSILON}
        correction: NeMo-RL: mask by the geometric mean, keep the raw token weight
        correction.low: 0.999, the band NeMo-RL gives for it
        correction.high: 1.002, the band NeMo-RL gives for it
        aggregate: token mean""",
    ),
    preset_from_text(
        LossSpec(trust=CLIP, correction=OPSM(1e-4), aggregate=SeqMeanTokenMean()),
        f"""opsm: GRPO with off-policy sequence masking
        paper: arXiv 2512.02556
        trust: {PPO_EPSILON}
        correction: DeepSeek-V3.2, arXiv 2512.02556, equation 9: drop negative-advantage sequences
            that drifted
        correction.delta: slime's default for --opsm-delta, 1e-4 (TRL's documentation suggests 0.5)
        aggregate: as GRPO""",
    ),
    preset_from_text(
        LossSpec(trust=CLIP, correction=Truncate(math.inf), aggregate=TokenMean()),
        f"""decoupled_ppo: Decoupled PPO: clip against the proximal policy, weight by the behaviour
            policy
        paper: arXiv 2505.24298
        trust: {PPO_EPSILON}
        correction: AReaL, arXiv 2505.24298: exp(old_logp - rollout_logp), not truncated
        correction.high: no truncation in the paper; AReaL's code can cap it
        aggregate: token mean
        advantage (gae): the decoupled objective changes PPO's ratio alone (Hilton et al. 2021,
            arXiv 2110.00641): GAE""",
    ),
    preset_from_text(
        LossSpec(
            ratio=TokenRatio(anchor="rollout"),
            trust=Unbounded("ratio"),
            correction=MomentBudget(0.04),
            aggregate=TokenMean(),
        ),
        """m2po: M2PO: importance sampling without the tokens of the largest squared log-ratio
        paper: arXiv 2510.01161
        ratio: arXiv 2510.01161: against the policy that sampled
        trust: arXiv 2510.01161: the mask replaces the clip
        correction: arXiv 2510.01161; AReaL m2_threshold: a mask by (old_logp - rollout_logp)²
        correction.budget: 0.04, as in AReaL's example gsm8k_m2po
        aggregate: the sum over all tokens of the step, divided by their number
        advantage (grpo): as GRPO
        note: AReaL keeps PPO's clip, removes masked tokens from the denominator, measures each
            micro-batch and keeps one token if none fits the budget: trust=Clip(…) and
            rejected='renormalise' here; the budget is always that of the whole step.""",
    ),
    preset_from_text(
        LossSpec(trust=CovClip(), aggregate=TokenMean()),
        f"""clip_cov: Clip-Cov: PPO, and a few high-covariance tokens get no gradient
        paper: arXiv 2505.22617
        trust: arXiv 2505.22617, section 4.2, equations 10 to 12
        trust.eps_low: {PPO_EPSILON}
        trust.eps_high: {PPO_EPSILON}
        trust.fraction: arXiv 2505.22617, section 4.3: r = 2e-4
        trust.cov_low: arXiv 2505.22617, section 4.3: 1
        trust.cov_high: arXiv 2505.22617, section 4.3: 5
        trust.seed: any; the draw is a function of the seed and the token's own numbers
        aggregate: token mean, as verl""",
    ),
    preset_from_text(
        LossSpec(trust=CovKL(), aggregate=TokenMean()),
        """kl_cov: KL-Cov: importance sampling, and the highest-covariance tokens are held back
        paper: arXiv 2505.22617
        trust: arXiv 2505.22617, section 4.2, equations 13 and 14
        trust.fraction: arXiv 2505.22617, section 4.3: k = 2e-4 for the 32B model (2e-3 for the 7B)
        trust.coef: arXiv 2505.22617, section 4.3: beta = 1 (verl's configuration file ships 0.1)
        aggregate: token mean, as verl""",
    ),
    preset_from_text(
        LossSpec(trust=ProbabilityBand("tv", 0.2, 0.2), aggregate=TokenMean()),
        f"""dppo_tv: DPPO with the total-variation band
        paper: arXiv 2602.04879
        trust: verl loss_mode='dppo_tv'; 0.2 on both sides is SkyRL's and prime-rl's default (verl's
            example runs 0.15)
        trust.cap: 20, verl's fallback for clip_ratio_c in this loss
        aggregate: token mean, as verl
        note: {_DPPO_NOTE}""",
    ),
    preset_from_text(
        LossSpec(trust=ProbabilityBand("kl", 0.05, 0.05), aggregate=TokenMean()),
        f"""dppo_kl: DPPO with the binary-KL band
        paper: arXiv 2602.04879
        trust: verl loss_mode='dppo_kl'; 0.05 on both sides is verl's example run and SkyRL's
            recommendation
        trust.cap: 20, verl's fallback for clip_ratio_c in this loss
        aggregate: token mean, as verl
        note: {_DPPO_NOTE}""",
    ),
    preset_from_text(
        LossSpec(
            ratio=TokenRatio(anchor="rollout", log_clamp=None),
            trust=ProbabilityBand("tv", 0.2, 0.2, form="ratio"),
            kl=KL("k2", 2e-3, anchor="rollout", clamp=None),
            aggregate=TokenMean(),
        ),
        """prime_rl: prime-rl's default: a probability band and a quadratic pull, both against the
            rollout policy
        paper: prime-rl trainer.loss.type='default'
        ratio: prime-rl: exp(logp - inference logp), not clamped
        trust: prime-rl: mask 0.2 / 0.2
        kl: Kimi-K2.5's (logp - rollout_logp)² without the one half
        kl.coef: kl_tau 1e-3; doubled because k2 holds the one half
        aggregate: global token mean
        advantage (dr_grpo): prime-rl's default: reward minus the group's mean""",
    ),
    preset_from_text(
        LossSpec(
            ratio=TokenRatio(anchor="rollout", log_clamp=None),
            trust=ProbabilityBand("tv", 0.1, 0.1, sides="both", form="ratio"),
            kl=KL("k2", 2e-3, anchor="rollout", clamp=None),
            aggregate=TokenMean(),
        ),
        """ipo: prime-rl's IPO: a symmetric probability band and a quadratic pull, both against the
            rollout policy
        paper: prime-rl trainer.loss.type='ipo'
        ratio: prime-rl: exp(logp - inference logp), not clamped
        trust: prime-rl ipo_threshold 0.1, whatever the sign of the advantage
        kl: Kimi-K2.5's (logp - rollout_logp)² without the one half
        kl.coef: kl_tau 1e-3; doubled because k2 holds the one half
        aggregate: global token mean
        advantage (dr_grpo): prime-rl's default: reward minus the group's mean
        note: The preference loss IPO (arXiv 2310.12036) has the same name and is another loss.""",
    ),
    preset_from_text(
        LossSpec(trust=Quadratic(0.1), aggregate=TokenMean()),
        """dro: DRO: advantage regression with a quadratic pull
        paper: arXiv 2405.19107
        trust: DRO, arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599: a quadratic penalty on the
            log-ratio
        trust.beta: ROLL's kimi15 default, tau = 0.1 (verl has no default)
        aggregate: token mean, as verl
        advantage (dr_grpo): Kimi k1.5, arXiv 2501.12599, section 2.3.2: reward minus the mean of
            the sampled rewards""",
    ),
    preset_from_text(
        LossSpec(
            ratio=SequenceProduct(anchor="ref", log_clamp=None),
            trust=Regression(1e-3),
            aggregate=SeqMeanTokenMean(),
        ),
        """a2po: A*-PO: the sequence's log-ratio to the reference is regressed on the advantage
        paper: arXiv 2505.20686
        ratio: A*-PO, arXiv 2505.20686: log π(y|x) - log π_ref(y|x), summed over the sequence
        trust: TRL experimental A2POTrainer: beta2 = 1e-3
        aggregate: mean over sequences
        note: The advantage is r - V*, with V* = beta1·log(mean(exp(r / beta1))) over samples of the
            reference model; compute it before the call.""",
    ),
    preset_from_text(
        LossSpec(
            ratio=SequenceProduct(log_clamp=None),
            trust=Regression(1.0),
            aggregate=SeqMeanTokenMean(),
        ),
        """sppo: SPPO: the sequence's log-ratio is regressed on its scaled preference
        paper: arXiv 2405.00675
        ratio: SPPO, arXiv 2405.00675: log π(y|x) - log π_t(y|x), over the sequence
        trust: verl-recipe sppo: (log-ratio - eta·reward)²; eta scales the advantage
        aggregate: mean over sequences
        note: Trinity-RFT calls another loss 'sppo': sppo_token.""",
    ),
    preset_from_text(
        LossSpec(trust=TaperedNegative(1.0), aggregate=TokenMean()),
        """topr: TOPR: tapered off-policy REINFORCE
        paper: arXiv 2503.14286
        trust: TOPR, arXiv 2503.14286, section 3: the ratio of negative examples is truncated to [0,
            1]
        aggregate: token mean, as ROLL's default
        note: The paper's ratio is the whole sequence's: use ratio=SequenceProduct() for that; ROLL
            and Trinity use the token's.""",
    ),
    preset_from_text(
        LossSpec(
            trust=BySign(Unbounded("current"), Clip(0.2, 0.2, dual=3.0)),
            aggregate=SeqMeanTokenMean(),
        ),
        """up_grpo: UP-GRPO: the plain policy gradient for good tokens, dual clip for the others
        paper: arXiv 2607.06987
        trust: UP-GRPO, arXiv 2607.06987, equation 15: split by the sign of the advantage
        trust.positive: equation 15: -A times the ratio of the policy to itself, unbounded
        trust.negative: equation 15: GRPO's symmetric clip with dual clip, unchanged
        trust.negative.eps_low: 0.2, verl's default of clip_ratio
        trust.negative.eps_high: 0.2, verl's default of clip_ratio; it cannot bind where A <= 0
        trust.negative.dual: 3, verl's default of clip_ratio_c
        aggregate: as GRPO: mean over outputs of token means
        note: The paper's KL penalty is a slot of its own: kl=KL('k3', coef).""",
    ),
    preset_from_text(
        LossSpec(ratio=SequenceRatio(), trust=Clip(2e-3, 2.5e-3), aggregate=LengthWeighted()),
        """luspo: LUSPO: GSPO weighted by length
        paper: arXiv 2602.05261
        ratio: GSPO, arXiv 2507.18071, equation 7
        trust: LUSPO, arXiv 2602.05261, section 5.1: epsilon 2e-3 and 2.5e-3
        aggregate: LUSPO, as in TRL's loss_type='luspo': sequence loss times length, mean over
            sequences
        advantage (grpo): LUSPO, arXiv 2602.05261: as GSPO and GRPO""",
    ),
    preset_from_text(
        LossSpec(
            ratio=SequenceProduct(log_clamp=(math.log(1e-8), 20.0)),
            trust=GammaWeight(2.0, 3.0, 3.0, 2.0),
            aggregate=TokenMean(),
        ),
        """vespo: VESPO: a smooth weight of the sequence's likelihood ratio
        paper: arXiv 2602.10693
        ratio: TRL loss_type='vespo': the product over the sequence, its log within [log 1e-8, 20]
        trust: TRL's defaults: k+ 2, lambda+ 3, k- 3, lambda- 2
        aggregate: TRL loss_type='vespo': global token mean""",
    ),
    preset_from_text(
        LossSpec(ratio=SequenceProduct(), trust=CLIP, aggregate=SeqMeanTokenMean()),
        """rloo_loss: RLOO's loss: PPO on the likelihood ratio of the whole sequence
        paper: TRL RLOOTrainer; arXiv 2402.14740
        ratio: TRL RLOOTrainer: exp of the difference of summed log-probs
        trust: TRL RLOOConfig: epsilon 0.2
        aggregate: mean over sequences
        advantage (rloo): RLOO, arXiv 2402.14740: reward minus the mean of the other samples
        note: Elsewhere RLOO is only an advantage estimator: advantage.rloo.""",
    ),
    preset_from_text(
        LossSpec(trust=TwoSidedClip(4.0, 0.2, 0.2), aggregate=TokenMean()),
        """two_sided: Two-sided clipping: PPO with a bound on every ratio
        paper: arXiv 2505.07291
        trust: INTELLECT-2, arXiv 2505.07291, section 4.1: delta 4, epsilon 0.2
        aggregate: token mean""",
    ),
    preset_from_text(
        LossSpec(
            ratio=TokenRatio(anchor="rollout"),
            trust=Clip(math.inf, 1.0, dual=2.0),
            aggregate=TokenMean(),
        ),
        """aipo: AIPO: importance sampling against the rollout policy, truncated from above
        paper: arXiv 2505.24034
        ratio: LlamaRL, arXiv 2505.24034: against the policy that sampled
        trust: -min(ratio, rho)·A for either sign: eps_high = rho - 1, dual = rho, no lower bound
        trust.dual: rho = 2, the low end of the range 2 to 10 that cosmos-rl suggests for aipo_rho,
            citing the paper
        aggregate: token mean""",
    ),
)
