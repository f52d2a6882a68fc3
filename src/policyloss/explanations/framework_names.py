"""The names of the parts of a loss in each framework, as data.

An entry applies to a spec if its traits fit (see `traits`).

Read from the frameworks' own sources: verl 0.9.1, TRL 1.16.0, OpenRLHF 0.11.2 and SkyRL 0.3.0 as
released, the others as of mid-2026. Names change; the settings next to them help to find them
again. "TRL, Liger, …": all of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class FrameworkNames(NamedTuple):
    """The names of a part of a loss in frameworks.

    what: a description of the part. needs: traits that must hold; one with a leading "-" must not.
    """

    part: str
    what: str
    needs: str
    names: dict[str, str]


# A line that is not indented holds the part of the loss, its description, and the traits that it
# needs. Below it stands the name in each framework; a line that is indented further continues the
# one above.
_TEXT = """
surrogate: PPO's clip on the token's ratio | Clip token_ratio -aipo
    verl: policy_loss.loss_mode="vanilla" (clip_ratio_low, clip_ratio_high)
    TRL: loss_type="grpo", "bnpo", "dr_grpo" or "dapo": one surrogate (epsilon, epsilon_high), four
        averages
    OpenRLHF: PolicyLoss(policy_loss_type="ppo", clip_eps_low, clip_eps_high)
    ColossalChat: coati.distributed.loss.PolicyLoss(clip_eps_low, clip_eps_high)
    SkyRL: policy_loss_type="regular" (eps_clip_low, eps_clip_high)
    NeMo-RL: ClippedPGLossFn (ratio_clip_min, ratio_clip_max)
    slime: --advantage-estimator grpo or ppo
    AReaL: importance_sampling_level="token"
    ROLL: the default PPO worker, or pg_variant="ppo"
    Tinker: "ppo"
    open-instruct: loss_fn="dapo"
    EasyR1: loss_type="default"
    Trinity-RFT: "ppo"
    xtuner: "vanilla"
surrogate: PPO's clip with a largest ratio for either sign | TwoSidedClip
    TRL, Liger, Unsloth, Axolotl: delta, with any clipped loss_type
    ms-swift: delta
surrogate: GSPO: PPO's clip on the sequence's ratio, gradient through the mean | \
Clip sequence_ratio_sequence -LengthWeighted
    TRL: importance_sampling_level="sequence" with loss_type="grpo"
    OpenRLHF: PolicyLoss(policy_loss_type="gspo"), always averaged over sequences
    NeMo-RL: sequence_level_importance_ratios=True
    slime: --advantage-estimator gspo
    AReaL: importance_sampling_level="sequence"
    ROLL: importance_sampling="seq"
    EasyR1: loss_type="gspo"
    cosmos-rl: variant="gspo"
    PipelineRL: "gspo"
surrogate: GSPO-token: the sequence's ratio, each token's own gradient | Clip sequence_ratio_token
    verl: policy_loss.loss_mode="gspo"; from 0.9.1 with any loss_agg_mode, before always
        "seq-mean-token-mean"
    SkyRL: policy_loss_type="gspo"
    TRL: experimental GSPO-token trainer
    EasyR1: loss_type="gspo_token"
    ms-swift: importance_sampling_level="sequence_token"
    Trinity-RFT: "gspo"
    tunix: loss_algo="gspo-token"
surrogate: PPO's clip on the sequence's likelihood ratio | Clip product_ratio
    TRL: RLOOTrainer
    torchtune: GRPOCompletionLoss
surrogate: LUSPO | LengthWeighted sequence_ratio
    TRL, Liger, Unsloth, Axolotl: loss_type="luspo" with importance_sampling_level="sequence"
surrogate: AIPO | aipo
    cosmos-rl: aipo_rho
surrogate: CISPO: a bounded, stopped ratio times logp | DetachedClip outside_clip anchor_old
    verl: policy_loss.loss_mode="cispo": the band 1 - clip_ratio_low … 1 + clip_ratio_high
    TRL, Liger, Unsloth, Axolotl: loss_type="cispo": epsilon_high is the largest ratio itself, and
        there is no lower bound
    SkyRL: policy_loss_type="cispo": the band 1 - cispo_eps_clip_low … 1 + cispo_eps_clip_high, so 1
        … 6
    NeMo-RL: use_cispo=True
    slime: --advantage-estimator cispo
    ROLL: pg_variant="cispo"
    Tinker: "cispo"
    open-instruct: loss_fn="cispo"
    EasyR1: loss_type="cispo"
    Trinity-RFT: "cispo"
surrogate: a bounded, stopped ratio to the engine times logp | \
DetachedClip outside_clip anchor_rollout
    verl: rollout_correction.bypass_mode=True with loss_type="reinforce" and rollout_is="token"
    PipelineRL: "reinforce"
    torchforge: ReinforceLoss
surrogate: CISPO without the tokens PPO clips | \
DetachedClip outside_zero_by_sign weight_ratio
    ROLL: pg_variant="cispo" with cispo_use_unified_mask
    Trinity-RFT: "cispo" with enable_mask_clip
surrogate: the ratio to the engine, nothing outside a band | \
DetachedClip outside_zero weight_ratio anchor_rollout
    SkyRL: policy_loss_type="rollout_is"
surrogate: REC: no ratio, nothing outside a band | DetachedClip weight_one
    Trinity-RFT: policy_loss_fn="rec" with weight="none", or "sppo" (the band 1 / (1 + epsilon) … 1
        + epsilon)
surrogate: SAPO | SoftGate
    verl: policy_loss.loss_mode="sapo" (tau_pos, tau_neg), always averaged "seq-mean-token-mean"
    TRL, Liger, Unsloth, Axolotl: loss_type="sapo" (sapo_temperature_pos, sapo_temperature_neg)
    SkyRL: policy_loss_type="sapo"
    AReaL: use_sapo_loss
    EasyR1: loss_type="sapo"
surrogate: GMPO | GeometricClip
    verl: policy_loss.loss_mode="geo_mean", a mean over the rows of each micro-batch whatever
        loss_agg_mode says
    TRL: experimental GMPOTrainer
surrogate: FIPO | FutureKL
    ms-swift: loss_type="fipo"
surrogate: no ratio: -A·logp | Unbounded form_logp
    verl: policy_loss.loss_mode="gpg"
surrogate: DFT: logp times the stopped probability | Unbounded form_probability
    TRL: SFTConfig(loss_type="dft")
    Trinity-RFT: "sft_is"
surrogate: CHORD's φ: logp times the stopped p(1 - p) | Unbounded form_uncertainty
    Trinity-RFT: "sft_phi", in "mix_chord" on an expert's tokens
surrogate: the plain ratio to the engine | Unbounded form_ratio anchor_rollout
    Tinker: "importance_sampling"
    SkyRL: policy_loss_type="importance_sampling"
    Trinity-RFT: "importance_sampling"
surrogate: the log-ratio of the sequence, regressed on the advantage | Regression product_ratio
    TRL: experimental A2POTrainer (anchor "ref")
    verl: recipe sppo
surrogate: Clip-Cov | CovClip
    verl: policy_loss.loss_mode="clip_cov", over each micro-batch
    SkyRL: policy_loss_type="clip_cov"
surrogate: KL-Cov | CovKL
    verl: policy_loss.loss_mode="kl_cov", over each micro-batch
    SkyRL: policy_loss_type="kl_cov"
surrogate: DPPO, total variation | ProbabilityBand divergence_tv
    verl: policy_loss.loss_mode="dppo_tv" (clip_ratio_low, clip_ratio_high; cap clip_ratio_c)
    SkyRL: policy_loss_type="dppo", dppo_type="binary_tv"; the ratio with its gradient, no cap
    Stable-RL: "dppo_binary_tv"
    prime-rl: loss type "default" (both sides: "ipo")
surrogate: DPPO, binary KL | ProbabilityBand divergence_kl
    verl: policy_loss.loss_mode="dppo_kl" (clip_ratio_low, clip_ratio_high; cap clip_ratio_c)
    SkyRL: policy_loss_type="dppo", dppo_type="binary_kl"; the ratio with its gradient, no cap
    Stable-RL: "dppo_binary_kl"
surrogate: DRO | Quadratic
    verl: policy_loss.loss_mode="dro" (dro_beta)
    ROLL: pg_variant="kimi15"
surrogate: TOPR | TaperedNegative
    ROLL: pg_variant="topr"
    Trinity-RFT: "topr"
surrogate: VESPO | GammaWeight
    TRL: loss_type="vespo" (vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    Liger: "vespo"
    Unsloth: "vespo"
dual clip: a largest ratio where the advantage is negative | Clip dual -aipo
    verl: clip_ratio_c, 3.0 and always on in loss_mode='vanilla'
    SkyRL: policy_loss_type="dual_clip" (clip_ratio_c, 3.0)
    OpenRLHF: PolicyLoss(dual_clip), off by default
    NeMo-RL: ratio_clip_c, off by default
    AReaL: c_clip, off by default
    ROLL: c is 1 + 2·pg_clip, so 1.4 at 0.2
    TRL: none; delta gives the same numbers when delta > 1 + epsilon_high
ratio: the turn's ratio | turn_ratio
    ROLL: agentic ratio_type="segment"
correction: TIS: the token's weight, truncated | Truncate_token -untruncated
    verl: rollout_is="token" with one rollout_is_threshold
    TRL: vllm_importance_sampling_mode="token_truncate"
    OpenRLHF: is_correction_level="token", is_correction_mode="clip"; up to 0.11.1
        vllm_is_correction_type="tis"
    SkyRL: tis_ratio_type="token"
    NeMo-RL: truncated_importance_sampling_type="tis"
    slime: --use-tis (--tis-clip, --tis-clip-low)
    tunix: sampler_is="token"
correction: the token's weight, not truncated | untruncated
    AReaL: use_decoupled_loss
    RLinf: decoupled_actor_critic
correction: the sequence's likelihood ratio, truncated | Truncate_product
    verl: rollout_is="sequence" with one rollout_is_threshold
    TRL: vllm_importance_sampling_mode="sequence_truncate"
    SkyRL: tis_ratio_type="sequence"
correction: the sequence's mean ratio, truncated | Truncate_geomean
    ms-swift: "sequence_truncate" (in TRL the same name is the product)
correction: IcePop: the token's weight inside a band | Band_token
    verl: rollout_is="token" with a "low_high" rollout_is_threshold
    TRL: vllm_importance_sampling_mode="token_mask"
    OpenRLHF: is_correction_level="token", is_correction_mode="mask"; up to 0.11.1
        vllm_is_correction_type="icepop"
    NeMo-RL: truncated_importance_sampling_type="icepop"
    slime: icepop_function as the custom TIS function
correction: the sequence's likelihood ratio inside a band | Band_product
    verl: rollout_is="sequence" with a "low_high" rollout_is_threshold
correction: seq-mask-TIS: sequences by their mean ratio | SequenceMask_geomean
    NeMo-RL: truncated_importance_sampling_type="seq-mask-tis"
    OpenRLHF: is_correction_level="seq"; up to 0.11.1 vllm_is_correction_type="seq-mask-tis"
    SkyRL: sequence_mask_metric="geometric"
correction: sequences by their likelihood ratio | SequenceMask_product
    TRL: vllm_importance_sampling_mode="sequence_mask" (its default)
    SkyRL: sequence_mask_metric="product"
correction: tokens or sequences by a divergence | DivergenceMask
    OpenRLHF: is_correction_gating="binary_kl" or "tv", is_correction_level="token" or "seq", from
        0.11.2
correction: rejection by an estimate of the KL | Reject
    verl: rollout_rs (token_k1 … seq_max_k3)
    AReaL: RejectionSamplingConfig
correction: rejection by one impossible token | Veto
    SkyRL: outlier_token_is_threshold_low and _high
    slime: rs_veto_threshold in mis.py
correction: off-policy sequence masking | OPSM
    TRL: off_policy_mask_threshold
    slime: --use-opsm, --opsm-delta
    cosmos-rl: off_policy_masking_delta
correction: M2PO | MomentBudget
    AReaL: m2_threshold, over each micro-batch
correction: old tokens masked or faded | Stale
    xtuner: max_token_staleness
    Flux: staleness_decay
correction: weights divided by their mean | SelfNormalise
    verl: rollout_is_batch_normalize
    slime: batch normalisation in mis.py
KL: k1 | kl_k1 kl_anchor_ref
    verl: use_kl_loss=True, kl_loss_type="kl" or "k1"
    OpenRLHF: --algo.kl.use_loss --algo.kl.estimator k1
KL: k2 | kl_k2 kl_anchor_ref
    verl: use_kl_loss=True, kl_loss_type="mse" or "k2"
    OpenRLHF: --algo.kl.use_loss --algo.kl.estimator k2
KL: k3 | kl_k3 kl_anchor_ref
    verl: use_kl_loss=True, kl_loss_type="low_var_kl" or "k3" (kl_loss_coef)
    OpenRLHF: --algo.kl.use_loss --algo.kl.estimator k3 (--algo.kl.init_coef)
    TRL: beta
    ColossalChat: PolicyLoss(beta), the penalty given as per_token_kl
    SkyRL: kl_estimator_type="k3"
    slime: --kl-loss-type "k3", or "low_var_kl" (that one clamped)
KL: the estimator's value, the gradient of k2 | kl_grad_k2
    verl: a "+" behind the estimator, such as "k3+"
KL: weighted by the ratio | kl_weight_ratio
    TRL: use_bias_correction_kl (on by default)
    slime: --use-unbiased-kl
KL: with its score term | kl_grad_score
    NeMo-RL: its KL by default, weight exp(logp - sg(logp)); beyond its clamp of ref_logp - logp it
        has no score term
aggregate: every token of the step counts the same | TokenMean
    verl: loss_agg_mode="token-mean"
    TRL: loss_type="dapo", "cispo" or "vespo"
    OpenRLHF: PolicyLoss(token_level_loss=True)
    ColossalChat: loss_variation="token_level"
    SkyRL: loss_reduction="token_mean"
    NeMo-RL: token_level_loss=True
    slime: --calculate-per-token-loss
aggregate: every sequence counts the same, by its token mean | SeqMeanTokenMean
    verl: loss_agg_mode="seq-mean-token-mean"
    TRL: loss_type="grpo" or "sapo", over each micro-batch; empty rows count
    OpenRLHF: PolicyLoss(token_level_loss=False)
    ColossalChat: loss_variation="sample_level"; empty rows count
    SkyRL: loss_reduction="sequence_mean"; empty rows count
    NeMo-RL: token_level_loss=False
    slime: the default
aggregate: token sum, mean over sequences | SeqMeanTokenSum
    verl: loss_agg_mode="seq-mean-token-sum"
    tunix: "seq-mean-token-sum"
aggregate: token sum over a constant, mean over sequences (Dr. GRPO) | SeqMeanTokenSumNorm
    verl: loss_agg_mode="seq-mean-token-sum-norm" with loss_scale_factor
    TRL: loss_type="dr_grpo" (max_completion_length)
    SkyRL: loss_reduction="seq_mean_token_sum_norm" (max_seq_len)
    tunix: "sequence-mean-token-scale"
aggregate: token sum | TokenSum
    verl: loss_agg_mode="token-sum", from 0.9.0
    Tinker: always
aggregate: token sum over a constant | TokenSumNorm
    ROLL: "seq-mean-token-sum-norm"
    Trinity-RFT: "seq-mean-token-sum-norm"
aggregate: every prompt counts the same | PromptMean
    SkyRL: loss_reduction="prompt_mean"
aggregate: every turn of a sequence counts the same | TurnMean
    RLinf: loss_scales "turn_level"
aggregate: LUSPO's: a sequence counts by its length | LengthWeighted
    TRL: loss_type="luspo"
aggregate: the token mean of each micro-batch | LocalTokenMean
    TRL: loss_type="bnpo"
    SkyRL: loss_reduction="token_mean_legacy"
aggregate: the sequence mean of each micro-batch | LocalSeqMeanTokenMean
    TRL: loss_type="grpo" or "sapo"
entropy: a bonus | entropy
    verl: actor.entropy_coeff
    OpenRLHF: --actor.entropy_coef
    TRL: entropy_coef, a mean over the tokens of each micro-batch whatever loss_type averages
"""


def _read_names(text: str) -> Iterator[FrameworkNames]:
    for entry in re.split(r"\n(?! )", text.strip()):
        head, *names = (" ".join(line.split()) for line in re.split(r"\n {4}(?! )", entry))
        part, _, described = head.partition(": ")
        what, _, needs = described.partition(" | ")
        yield FrameworkNames(part, what, needs, dict(name.split(": ", 1) for name in names))


ELSEWHERE = tuple(_read_names(_TEXT))
