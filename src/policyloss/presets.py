"""The named losses: data only. Each number says where it comes from.

A preset is a `LossSpec` with a title, a paper, and a source for every number that is not a library
default. There is no function per algorithm; `explain` says what each one is.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from policyloss.arguments import description
from policyloss.errors import InputError, PolicyLossError, SpecError, match_name, unknown_name
from policyloss.parts.aggregate import (
    LengthWeighted,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenMean,
    TokenSum,
)
from policyloss.parts.correction import OPSM, Band, SequenceMask, Truncate
from policyloss.parts.divergence import Divergence
from policyloss.parts.kl import KL
from policyloss.parts.ratio import SegmentRatio, SequenceProduct, SequenceRatio, TokenRatio
from policyloss.parts.trust import (
    BySign,
    Clip,
    CovClip,
    CovKL,
    DetachedClip,
    GammaWeight,
    GeometricClip,
    ProbabilityBand,
    Quadratic,
    SoftGate,
    TaperedNegative,
    TwoSidedClip,
    Unbounded,
)
from policyloss.spec import LossSpec


@dataclass(frozen=True)
class Preset:
    """A named loss.

    sources: slot or slot.field → where the choice or number comes from; "advantage" → that of
    `advantage`.
    advantage: the estimator of `policyloss.advantage` that the loss is defined with; None if it
    goes with any.
    """

    name: str
    title: str
    paper: str
    spec: LossSpec
    sources: dict[str, str]
    note: str = ""
    advantage: str | None = None


def _preset(
    name: str, title: str, paper: str, spec: LossSpec, sources: str, note: str = ""
) -> Preset:
    """A preset whose sources are a text: "slot.field: source", "advantage (its estimator): source".

    A line that is indented further continues the one above.
    """
    by_key, advantage = {}, None
    for entry in re.split(r"\n(?! )", textwrap.dedent(sources).strip()):
        key, _, source = " ".join(entry.split()).partition(": ")
        if key.startswith("advantage"):
            key, _, advantage = key.rstrip(")").partition(" (")
        by_key[key] = source
    return Preset(name, title, paper, spec, by_key, note, advantage)


_PPO = "Schulman et al. 2017, arXiv 1707.06347, table 1: epsilon 0.2 scored best"
_GSPO_EPS = "GSPO, arXiv 2507.18071, section 5.1: 3e-4 and 4e-4"
_GSPO_RATIO = "GSPO, arXiv 2507.18071, equation 7"
_DPPO_NOTE = (
    "verl's example and SkyRL measure against the rollout policy: "
    "ratio=TokenRatio(anchor='rollout')."
)
_CLIP = Clip(0.2, 0.2)
_NO_REWARD = Unbounded("logp")
_TAUGHT = "no policy term of its own: 0 advantages leave the teacher alone, others add a reward"
_GKD_MEAN = "GKD, arXiv 2306.13649, equation 2: mean over outputs of token means"

_ALL = (
    _preset(
        "ppo",
        "PPO, clipped surrogate",
        "arXiv 1707.06347",
        LossSpec(trust=_CLIP, aggregate=TokenMean()),
        f"""
        trust: {_PPO}
        aggregate: the expectation over timesteps of equation 7
        advantage (gae): arXiv 1707.06347, equations 11 and 12: generalised advantage estimation
            with a critic
        """,
    ),
    _preset(
        "ppo_dual_clip",
        "PPO with dual clip",
        "arXiv 1912.09729",
        LossSpec(trust=Clip(0.2, 0.2, dual=3.0), aggregate=TokenMean()),
        f"""
        trust: {_PPO}
        trust.dual: dual clip: Ye et al. 2019, arXiv 1912.09729; c = 3 is the default of verl and
            SkyRL (clip_ratio_c)
        aggregate: the expectation over timesteps
        advantage (gae): Ye et al. 2019, arXiv 1912.09729: PPO's actor and critic, advantages by GAE
        """,
    ),
    _preset(
        "grpo",
        "GRPO, clipped surrogate with a KL penalty in the loss",
        "arXiv 2402.03300",
        LossSpec(trust=_CLIP, kl=KL("k3", 0.04), aggregate=SeqMeanTokenMean()),
        f"""
        trust: {_PPO}; DeepSeekMath does not print its own epsilon
        kl: DeepSeekMath, arXiv 2402.03300, equation 4: the unbiased estimator k3
        kl.coef: DeepSeekMath, section 4.2: 0.04
        aggregate: DeepSeekMath, equation 3: mean over outputs of token means
        advantage (grpo): DeepSeekMath, section 4.1.2: reward minus the group's mean, over its
            standard deviation
        """,
    ),
    _preset(
        "dr_grpo",
        "Dr. GRPO: GRPO without length and std normalisation",
        "arXiv 2503.20783",
        LossSpec(trust=_CLIP, aggregate=SeqMeanTokenSumNorm()),
        f"""
        trust: {_PPO}
        aggregate: arXiv 2503.20783, section 3.2: divide by a constant, not by the length
        aggregate.horizon: your run's generation budget: spec.with_horizon(tokens); 3000 tokens in
            the authors' runs
        advantage (dr_grpo): arXiv 2503.20783, section 3.2: reward minus the group's mean, not
            divided by its deviation
        """,
    ),
    _preset(
        "dapo",
        "DAPO: clip-higher and token mean",
        "arXiv 2503.14476",
        LossSpec(trust=Clip(0.2, 0.28), aggregate=TokenMean()),
        """
        trust: DAPO, arXiv 2503.14476, section 4.1: epsilon_low 0.2, epsilon_high 0.28
        aggregate: DAPO: token-level policy gradient loss
        advantage (grpo): DAPO, arXiv 2503.14476, equation 9: as GRPO
        """,
    ),
    _preset(
        "bnpo",
        "Batch-normalised clipped loss: every token of the batch counts the same",
        "TRL GRPOConfig.loss_type",
        LossSpec(trust=_CLIP, aggregate=TokenMean()),
        f"""
        trust: {_PPO}
        aggregate: TRL loss_type='bnpo': divide by the valid tokens of the batch
        """,
        note="TRL divides by the tokens of each micro-batch; use LocalTokenMean to reproduce that. "
        "Here the whole step counts.",
    ),
    _preset(
        "gspo",
        "GSPO: sequence-level ratio and clip",
        "arXiv 2507.18071",
        LossSpec(ratio=SequenceRatio(), trust=Clip(3e-4, 4e-4), aggregate=SeqMeanTokenMean()),
        f"""
        ratio: {_GSPO_RATIO}
        trust: {_GSPO_EPS}
        aggregate: GSPO, equation 5: mean over sequences
        advantage (grpo): GSPO, arXiv 2507.18071, equation 6: as GRPO
        """,
    ),
    _preset(
        "gspo_token",
        "GSPO-token: the sequence's ratio, each token's own gradient",
        "arXiv 2507.18071",
        LossSpec(
            ratio=SequenceRatio(grad="token"), trust=Clip(3e-4, 4e-4), aggregate=SeqMeanTokenMean()
        ),
        f"""
        ratio: GSPO, arXiv 2507.18071, section 4.3, equation 14
        trust: {_GSPO_EPS}
        aggregate: GSPO, equation 13: mean over sequences of token means
        """,
    ),
    _preset(
        "gspo_turn",
        "GSPO over the turns of a dialogue",
        "ROLL, agentic ratio_type=segment",
        LossSpec(ratio=SegmentRatio(), trust=Clip(3e-4, 4e-4), aggregate=SeqMeanTokenMean()),
        f"""
        ratio: ROLL's segment ratio: the geometric mean over each contiguous run of the mask
        trust: {_GSPO_EPS}
        aggregate: as GSPO
        """,
    ),
    _preset(
        "cispo",
        "CISPO: clipped importance weight, no token loses its gradient",
        "arXiv 2506.13585",
        LossSpec(trust=DetachedClip(0.0, 5.0), aggregate=TokenMean()),
        """
        trust: MiniMax-M1, arXiv 2506.13585, equations 4 and 5: no lower bound, a tuned upper bound
        trust.ratio_max: 5, ScaleRL's epsilon_max (arXiv 2510.13786), which TRL recommends;
            MiniMax-M1 prints none
        aggregate: MiniMax-M1, equation 4: sum over all tokens over their number
        advantage (grpo): MiniMax-M1, arXiv 2506.13585, section 3.1: the group-relative advantage of
            GRPO
        """,
    ),
    _preset(
        "cispo_unified",
        "CISPO with PPO's token mask",
        "arXiv 2506.13585",
        LossSpec(trust=DetachedClip(0.9, 1.1, outside="zero_by_sign"), aggregate=TokenMean()),
        """
        trust: MiniMax-M1, arXiv 2506.13585, equations 6 and 7: the unified form with a mask
        trust.ratio_min: ROLL's CISPO default, 1 - 0.1
        trust.ratio_max: ROLL's CISPO default, 1 + 0.1
        aggregate: MiniMax-M1, equation 6
        advantage (grpo): MiniMax-M1, arXiv 2506.13585, section 3.1: the group-relative advantage of
            GRPO
        """,
    ),
    _preset(
        "rollout_is",
        "Hard-masked importance sampling against the rollout policy",
        "arXiv 2602.15763",
        LossSpec(
            ratio=TokenRatio(anchor="rollout"),
            trust=DetachedClip(0.8, 1.2, outside="zero"),
            aggregate=TokenMean(),
        ),
        """
        ratio: GLM-5, arXiv 2602.15763, equation 4: exp(logp - rollout_logp)
        trust: GLM-5, section 4.1.2, equations 3 and 5: zero outside (1 - eps_low, 1 + eps_high)
        trust.ratio_min: 1 - 0.2, SkyRL's default for policy_loss_type='rollout_is'; GLM-5 does not
            print its own
        trust.ratio_max: 1 + 0.2, SkyRL's default for policy_loss_type='rollout_is'; GLM-5 does not
            print its own
        aggregate: token mean, as SkyRL's default
        """,
    ),
    _preset(
        "sapo",
        "SAPO: a soft gate instead of a clip",
        "arXiv 2511.20347",
        LossSpec(trust=SoftGate(1.0, 1.05), aggregate=SeqMeanTokenMean()),
        """
        trust: SAPO, arXiv 2511.20347: temperatures 1.0 (positive) and 1.05 (negative); TRL's,
            verl's and SkyRL's defaults
        aggregate: SAPO: mean over sequences of token means
        advantage (grpo): SAPO, arXiv 2511.20347: group-normalised, as GRPO
        """,
    ),
    _preset(
        "gmpo",
        "GMPO: geometric mean over the sequence, clipped per token in log space",
        "arXiv 2507.20673",
        LossSpec(trust=GeometricClip(0.4, 0.4), aggregate=SeqMeanTokenMean()),
        """
        trust: GMPO, arXiv 2507.20673: clip range (e^-0.4, e^0.4), also TRL's default
        aggregate: GMPO: mean over sequences
        advantage (grpo): GMPO, arXiv 2507.20673: as GRPO
        """,
    ),
    _preset(
        "gpg",
        "GPG: the plain policy gradient",
        "arXiv 2504.02546",
        LossSpec(trust=Unbounded("logp"), aggregate=TokenMean()),
        """
        trust: GPG, arXiv 2504.02546: -A·logp, no ratio
        aggregate: token mean, the default of verl's loss_mode='gpg'
        advantage (gpg): GPG, arXiv 2504.02546: group-centred, rescaled by the share of informative
            samples
        """,
    ),
    _preset(
        "reinforce",
        "REINFORCE",
        "Williams 1992, doi 10.1007/BF00992696",
        LossSpec(trust=Unbounded("logp"), aggregate=SeqMeanTokenSum()),
        """
        trust: Williams 1992: -A·logp
        aggregate: the gradient of the log-likelihood of a whole sequence: token sum, sequence mean
        """,
    ),
    _preset(
        "importance_sampling",
        "Importance-sampled policy gradient against the rollout policy",
        "Tinker loss 'importance_sampling'",
        LossSpec(
            ratio=TokenRatio(anchor="rollout"), trust=Unbounded("ratio"), aggregate=TokenSum()
        ),
        """
        ratio: Tinker: exp(logp - sampler's logp)
        trust: Tinker: -ratio·A, no bound
        aggregate: Tinker: the sum over tokens
        """,
    ),
    _preset(
        "tis",
        "PPO with truncated importance sampling for the rollout mismatch",
        "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'",
        LossSpec(trust=_CLIP, correction=Truncate(2.0), aggregate=TokenMean()),
        f"""
        trust: {_PPO}
        correction: min(exp(old_logp - rollout_logp), C) on the policy term
        correction.high: C = 2, the default of verl, SkyRL and slime
        aggregate: token mean
        """,
    ),
    _preset(
        "seq_tis",
        "PPO with truncated sequence-level importance sampling (product)",
        "verl rollout_is='sequence'",
        LossSpec(trust=_CLIP, correction=Truncate(2.0, level="product"), aggregate=TokenMean()),
        f"""
        trust: {_PPO}
        correction: verl rollout_correction, rollout_is='sequence': the product over the sequence
        correction.high: verl's rollout_is_threshold default, 2
        aggregate: token mean
        """,
    ),
    _preset(
        "icepop",
        "PPO with IcePop: tokens whose engines disagree get no gradient",
        "arXiv 2510.18855",
        LossSpec(trust=_CLIP, correction=Band(0.5, 5.0), aggregate=TokenMean()),
        f"""
        trust: {_PPO}
        correction: IcePop (Ring-1T, arXiv 2510.18855): zero outside [alpha, beta]
        correction.low: alpha = 0.5, section 2.4.1; also verl's IcePop preset
        correction.high: beta = 5, section 2.4.1; also verl's IcePop preset
        aggregate: token mean
        """,
    ),
    _preset(
        "seq_mask_tis",
        "PPO with seq-mask-TIS: sequences whose engines drifted apart get no gradient",
        "NeMo-RL truncated_importance_sampling_type='seq-mask-tis'",
        LossSpec(trust=_CLIP, correction=SequenceMask(0.999, 1.002), aggregate=TokenMean()),
        f"""
        trust: {_PPO}
        correction: NeMo-RL: mask by the geometric mean, keep the raw token weight
        correction.low: 0.999, the band NeMo-RL gives for it
        correction.high: 1.002, the band NeMo-RL gives for it
        aggregate: token mean
        """,
    ),
    _preset(
        "opsm",
        "GRPO with off-policy sequence masking",
        "arXiv 2512.02556",
        LossSpec(trust=_CLIP, correction=OPSM(1e-4), aggregate=SeqMeanTokenMean()),
        f"""
        trust: {_PPO}
        correction: DeepSeek-V3.2, arXiv 2512.02556, equation 9: drop negative-advantage sequences
            that drifted
        correction.delta: slime's default for --opsm-delta, 1e-4 (TRL's documentation suggests 0.5)
        aggregate: as GRPO
        """,
    ),
    _preset(
        "decoupled_ppo",
        "Decoupled PPO: clip against the proximal policy, weight by the behaviour policy",
        "arXiv 2505.24298",
        LossSpec(trust=_CLIP, correction=Truncate(math.inf), aggregate=TokenMean()),
        f"""
        trust: {_PPO}
        correction: AReaL, arXiv 2505.24298: exp(old_logp - rollout_logp), not truncated
        correction.high: no truncation in the paper; AReaL's code can cap it
        aggregate: token mean
        advantage (gae): the decoupled objective changes PPO's ratio alone (Hilton et al. 2021,
            arXiv 2110.00641): GAE
        """,
    ),
    _preset(
        "clip_cov",
        "Clip-Cov: PPO, and a few high-covariance tokens get no gradient",
        "arXiv 2505.22617",
        LossSpec(trust=CovClip(), aggregate=TokenMean()),
        f"""
        trust: arXiv 2505.22617, section 4.2, equations 10 to 12
        trust.eps_low: {_PPO}
        trust.eps_high: {_PPO}
        trust.fraction: arXiv 2505.22617, section 4.3: r = 2e-4
        trust.cov_low: arXiv 2505.22617, section 4.3: 1
        trust.cov_high: arXiv 2505.22617, section 4.3: 5
        trust.seed: any; the draw is a function of the seed and the token's own numbers
        aggregate: token mean, as verl
        """,
    ),
    _preset(
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
    _preset(
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
    _preset(
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
    _preset(
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
    _preset(
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
    _preset(
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
    _preset(
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
    _preset(
        "luspo",
        "LUSPO: GSPO weighted by length",
        "arXiv 2602.05261",
        LossSpec(ratio=SequenceRatio(), trust=Clip(2e-3, 2.5e-3), aggregate=LengthWeighted()),
        f"""
        ratio: {_GSPO_RATIO}
        trust: LUSPO, arXiv 2602.05261, section 5.1: epsilon 2e-3 and 2.5e-3
        aggregate: LUSPO, as in TRL's loss_type='luspo': sequence loss times length, mean over
            sequences
        advantage (grpo): LUSPO, arXiv 2602.05261: as GSPO and GRPO
        """,
    ),
    _preset(
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
    _preset(
        "rloo_loss",
        "RLOO's loss: PPO on the likelihood ratio of the whole sequence",
        "TRL RLOOTrainer; arXiv 2402.14740",
        LossSpec(ratio=SequenceProduct(), trust=_CLIP, aggregate=SeqMeanTokenMean()),
        """
        ratio: TRL RLOOTrainer: exp of the difference of summed log-probs
        trust: TRL RLOOConfig: epsilon 0.2
        aggregate: mean over sequences
        advantage (rloo): RLOO, arXiv 2402.14740: reward minus the mean of the other samples
        """,
        note="Elsewhere RLOO is only an advantage estimator: advantage.rloo.",
    ),
    _preset(
        "two_sided",
        "Two-sided clipping: PPO with a bound on every ratio",
        "arXiv 2505.07291",
        LossSpec(trust=TwoSidedClip(4.0, 0.2, 0.2), aggregate=TokenMean()),
        """
        trust: INTELLECT-2, arXiv 2505.07291, section 4.1: delta 4, epsilon 0.2
        aggregate: token mean
        """,
    ),
    _preset(
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
    Preset(
        "opd",
        "On-policy distillation on the sampled tokens: the teacher's preference as advantage",
        "arXiv 2601.02780",
        LossSpec(trust=Unbounded("ratio"), aggregate=TokenMean()),
        {
            "trust": (
                "arXiv 2601.02780, section on multi-teacher distillation: the policy gradient with "
                "importance weights"
            ),
            "aggregate": "token mean, as NeMo-RL averages its on-policy distillation",
            "advantage": (
                "arXiv 2601.02780, equation 8: log of the teacher's over the student's probability "
                "of the sampled token"
            ),
        },
        note="The paper adds IcePop's band: correction=Band(0.5, 5.0).",
        advantage="opd",
    ),
    Preset(
        "opd_kl",
        "On-policy distillation on the sampled tokens: the reverse KL of the live student",
        "TRL SDPO and SDFT, sampled_token; prime-rl ref_kl",
        LossSpec(
            trust=_NO_REWARD,
            kl=KL("k1", 1.0, grad="k2", anchor="teacher", clamp=None),
            aggregate=TokenMean(),
        ),
        {
            "trust": _TAUGHT,
            "kl": (
                "-sg(teacher_logp - logp)·logp has this gradient, and the KL itself is reported "
                "instead of that product"
            ),
            "aggregate": "token mean",
        },
    ),
    Preset(
        "iw_opd",
        "IW-OPD: on-policy distillation with less weight behind a prefix that went apart",
        "arXiv 2606.22600",
        LossSpec(trust=Unbounded("logp"), aggregate=TokenMean()),
        {
            "trust": "TRL's iw_opd: -A·logp, no ratio",
            "aggregate": "TRL's iw_opd: divided by the tokens of the step",
            "advantage": (
                "IW-OPD, arXiv 2606.22600: the teacher's preference times 1 + gamma·(1 - share of "
                "the disagreement before the token); gamma 0.5 is TRL's default"
            ),
        },
        note="The same loss as gpg; the advantages make the difference.",
        advantage="iw_opd",
    ),
    Preset(
        "kdrl",
        "KDRL: a reward and a teacher, the policy gradient plus a reverse KL on sampled tokens",
        "arXiv 2506.02208",
        LossSpec(
            trust=Unbounded("ratio"),
            kl=KL("k2", 5e-3, anchor="teacher"),
            aggregate=TokenMean(),
        ),
        {
            "trust": "KDRL, arXiv 2506.02208: GRPO's importance-weighted policy gradient",
            "kl": "KDRL: the reverse KL to the teacher by k2, whose gradient is unbiased",
            "kl.coef": "KDRL: the KL coefficient begins at 5e-3 (and is lowered to 1e-3)",
            "aggregate": "KDRL: divided by the tokens of all outputs",
            "advantage": "KDRL: GRPO's advantages of a rule-based reward",
        },
        note="The teacher's share is kl.coef; scale the advantages to weigh the reward.",
        advantage="grpo",
    ),
    Preset(
        "sdpo",
        "SDPO: the model with feedback in its context teaches the model without, token by token",
        "arXiv 2601.20802",
        LossSpec(
            trust=_NO_REWARD,
            kl=KL(
                "k1",
                1.0,
                grad="k2",
                weight="detached_ratio",
                weight_max=2.0,
                anchor="teacher",
                clamp=None,
            ),
            aggregate=SeqMeanTokenMean(),
        ),
        {
            "trust": _TAUGHT,
            "kl": "TRL's SDPO: distillation_mode 'sampled_token', alpha 1 (the reverse KL)",
            "kl.weight": "SDPO, arXiv 2601.20802: times the truncated ratio, without its gradient",
            "kl.weight_max": "TRL's SDPO: distillation_is_clip 2",
            "aggregate": "TRL's SDPO: mean over sequences of token means",
        },
        note=(
            "teacher_logp is the same model's, read with the feedback in its prompt; without "
            "gradient."
        ),
    ),
    Preset(
        "opd_exact",
        "On-policy distillation by the exact reverse KL over the whole vocabulary",
        "NeMo-RL distillation; TRL DistillationTrainer",
        LossSpec(trust=_NO_REWARD, kl=Divergence("reverse", 1.0), aggregate=TokenMean()),
        {
            "trust": _TAUGHT,
            "kl": "KL(student‖teacher) of the next token; TRL's DistillationTrainer: beta 1",
            "aggregate": "TRL's DistillationTrainer: divided by the tokens of the step",
        },
    ),
    Preset(
        "gkd",
        "GKD: the generalised Jensen-Shannon divergence on the student's own completions",
        "arXiv 2306.13649",
        LossSpec(trust=_NO_REWARD, kl=Divergence("jsd", 1.0), aggregate=SeqMeanTokenMean()),
        {
            "trust": _TAUGHT,
            "kl": "GKD, arXiv 2306.13649, equation 1: the mixture of student and teacher",
            "kl.beta": "TRL GKDConfig: beta 0.5",
            "aggregate": _GKD_MEAN,
        },
    ),
    Preset(
        "gkd_forward",
        "GKD with the forward KL: the student covers what the teacher would say",
        "arXiv 2306.13649",
        LossSpec(trust=_NO_REWARD, kl=Divergence("forward", 1.0), aggregate=SeqMeanTokenMean()),
        {
            "trust": _TAUGHT,
            "kl": "GKD, arXiv 2306.13649, section 3: KL(teacher‖student), its JSD at beta 0",
            "aggregate": _GKD_MEAN,
        },
    ),
    Preset(
        "gkd_reverse",
        "GKD with the reverse KL: the student avoids what the teacher would not say",
        "arXiv 2306.13649",
        LossSpec(trust=_NO_REWARD, kl=Divergence("reverse", 1.0), aggregate=SeqMeanTokenMean()),
        {
            "trust": _TAUGHT,
            "kl": "GKD, arXiv 2306.13649, section 3: KL(student‖teacher), its JSD at beta 1",
            "aggregate": _GKD_MEAN,
        },
        note="opd_exact is the same divergence averaged over tokens.",
    ),
    Preset(
        "mopd_topk",
        "Generalised KL on the entries that the teacher sent",
        "arXiv 2606.30406",
        LossSpec(trust=_NO_REWARD, kl=Divergence("generalised", 1.0), aggregate=TokenMean()),
        {
            "trust": _TAUGHT,
            "kl": (
                "arXiv 2606.30406, equation 5: a sum that is smallest where student and teacher "
                "are equal, although the entries hold less than the whole mass"
            ),
            "aggregate": "token mean",
        },
        note="The teacher is a TopK; with a teacher of all entries this is the reverse KL.",
    ),
    Preset(
        "opsd",
        "OPSD: the model that sees the solution teaches the model that does not",
        "arXiv 2601.18734",
        LossSpec(trust=_NO_REWARD, kl=Divergence("jsd", 1.0), aggregate=TokenMean()),
        {
            "trust": _TAUGHT,
            "kl": "OPSD, arXiv 2601.18734: a divergence over the whole vocabulary, on rollouts",
            "kl.beta": "as GKD",
            "aggregate": "token mean",
        },
        note="The teacher is the same model with the solution in its prompt.",
    ),
    Preset(
        "sdft",
        "SDFT: the model with a demonstration in its context teaches the model without",
        "arXiv 2601.19897",
        LossSpec(
            ratio=TokenRatio(log_clamp=(-20.0, math.log(2.0))),
            trust=_NO_REWARD,
            kl=Divergence("jsd", 1.0, weight="ratio"),
            aggregate=SeqMeanTokenMean(),
        ),
        {
            "ratio": "TRL's SDFT: distillation_is_clip 2, the log-ratio no lower than -20",
            "trust": _TAUGHT,
            "kl": "SDFT, arXiv 2601.19897; TRL's distillation_mode 'full_logits', alpha 0.5",
            "kl.weight": "TRL's SDFT: times the truncated ratio, without its gradient",
            "aggregate": "TRL's SDFT: mean over sequences of token means",
        },
        note=(
            "TRL's default compares the student's 100 most probable entries, normalised over "
            "themselves."
        ),
    ),
)

# The names, for type checkers and editors.
PresetName = Literal[
    "ppo",
    "ppo_dual_clip",
    "grpo",
    "dr_grpo",
    "dapo",
    "bnpo",
    "gspo",
    "gspo_token",
    "gspo_turn",
    "cispo",
    "cispo_unified",
    "rollout_is",
    "sapo",
    "gmpo",
    "gpg",
    "reinforce",
    "importance_sampling",
    "tis",
    "seq_tis",
    "icepop",
    "seq_mask_tis",
    "opsm",
    "decoupled_ppo",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "prime_rl",
    "dro",
    "topr",
    "up_grpo",
    "luspo",
    "vespo",
    "rloo_loss",
    "two_sided",
    "aipo",
    "opd",
    "opd_kl",
    "iw_opd",
    "kdrl",
    "sdpo",
    "opd_exact",
    "gkd",
    "gkd_forward",
    "gkd_reverse",
    "mopd_topk",
    "opsd",
    "sdft",
]

PRESETS: dict[str, Preset] = {p.name: p for p in _ALL}


def presets() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(PRESETS)


def find_preset(name: str) -> Preset:
    """The preset called `name` (in any letter case), or an error that suggests the nearest name."""
    if not isinstance(name, str):
        raise SpecError(f"name must be the name of a preset, a string, got {description(name)}.")
    known = match_name(name, PRESETS)
    if known is None:
        raise SpecError(unknown_name("preset", name, PRESETS))
    return PRESETS[known]


def preset(name: PresetName | str, **numbers: Any) -> LossSpec:
    """The loss called `name`, as a frozen `LossSpec`; `numbers` change fields of its parts by name.

        pl.preset("dapo", eps_high=0.3, entropy_coef=0.01)

    A field name that several parts of the loss have is an error: use `spec.replace(slot=…)`.
    """
    return find_preset(name).spec.with_fields(**numbers)


def as_spec(spec: LossSpec | PresetName | str, called: str = "spec") -> LossSpec:
    """`spec` itself, or the preset of that name. called: what the caller calls this argument."""
    if isinstance(spec, LossSpec):
        return spec
    if isinstance(spec, str):
        return find_preset(spec).spec
    raise InputError(
        f"{called} must be a LossSpec or the name of a preset, got {description(spec)}; "
        "policyloss.presets() lists the names."
    )


def defined_with(loss: LossSpec | str) -> str | None:
    """The advantage estimator that a preset, or a spec equal to one, is defined with.

    None if it goes with any, or is no preset.
    A spec has no name: where several presets are this loss and are defined with different
    advantages, the answer is None.
    """
    if isinstance(loss, str):
        return find_preset(loss).advantage
    estimators = {p.advantage for p in presets_equal_to(loss)}
    return estimators.pop() if len(estimators) == 1 else None


def presets_equal_to(spec: LossSpec) -> tuple[Preset, ...]:
    """The presets that are exactly `spec`, but for a horizon, which belongs to the run."""
    horizon = getattr(spec.aggregate, "horizon", None)
    return tuple(
        p for p in _ALL if spec == (p.spec if horizon is None else p.spec.with_horizon(horizon))
    )


def read_loss(name: str) -> LossSpec | str:
    """A preset's name as it is, or the `LossSpec` in the JSON file of that path."""
    path = Path(name)
    if match_name(name, PRESETS) or not (path.suffix == ".json" or path.is_file()):
        return name
    data = read_json(name)
    try:
        return LossSpec.from_dict(data)
    except PolicyLossError as error:
        raise PolicyLossError(f"{name}: {error}") from None


def read_json(name: str) -> Any:
    """What the JSON file of that path holds; an error names the file."""
    try:
        return json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyLossError(f"cannot read {name}: {error.strerror or error}.") from None
    except ValueError as error:
        raise PolicyLossError(f"{name} is not JSON: {error}.") from None
