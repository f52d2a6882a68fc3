"""What each framework calls the parts of a loss, as data. `traits` says what a spec is made of; an entry applies if its traits fit.

Read from the frameworks' own sources: verl 0.9.1, TRL 1.16.0, OpenRLHF 0.11.2 and SkyRL 0.3.0 as released, the others as of
mid-2026. Names move; the settings beside them say how to find them again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from policyloss.explaining.formulas import rejects
from policyloss.slots import correction, kl, ratio, trust
from policyloss.spec import LossSpec


class Elsewhere(NamedTuple):
    """A part of a loss and what frameworks call it. needs: traits that must hold; one with a leading "-" must not."""

    part: str
    needs: str
    names: dict[str, str]


def traits(spec: LossSpec) -> frozenset[str]:
    """Short words for what a spec is made of, to hang names and traps on."""
    found = {*_ratio_traits(spec.ratio), *_trust_traits(spec.trust), *_kl_traits(spec), type(spec.aggregate).__name__}
    for part in spec.correction:
        found |= _correction_traits(part)
    if spec.correction:
        found |= {"correction", spec.rejected}
    if rejects(spec):
        found.add("rejects")
    if spec.entropy_coef:
        found.add("entropy")
    if spec.reads_ratio:
        found.add("reads_ratio")
    return frozenset(found)


def fits(needs: str, found: frozenset[str]) -> bool:
    """Whether every trait in `needs` holds (those with a leading "-": does not hold)."""
    return all((word[1:] not in found) if word.startswith("-") else (word in found) for word in needs.split())


def elsewhere(spec: LossSpec) -> tuple[Elsewhere, ...]:
    """The entries of `ELSEWHERE` that apply to `spec`."""
    found = traits(spec)
    return tuple(entry for entry in ELSEWHERE if fits(entry.needs, found))


def _ratio_traits(part: Any) -> set[str]:
    kinds = {ratio.TokenRatio: "token_ratio", ratio.SequenceProduct: "product_ratio", ratio.SegmentRatio: "turn_ratio"}
    found = {f"anchor_{getattr(part, 'anchor', 'old')}", kinds.get(type(part), "other_ratio")}
    if isinstance(part, ratio.SequenceRatio):
        found |= {"sequence_ratio", f"sequence_ratio_{part.grad}"}
    return found


def _trust_traits(part: Any) -> set[str]:
    found = {type(part).__name__} if isinstance(part, trust.VARIANTS) else {"own_trust"}
    for field in ("outside", "divergence", "form", "sides"):
        if hasattr(part, field):
            found.add(f"{field}_{getattr(part, field)}")
    if isinstance(part, trust.Clip):
        found |= set() if part.dual is None else {"dual"}
        if math.isinf(part.eps_low) and part.dual == 1 + part.eps_high:
            found.add("aipo")
        if part.eps_low != part.eps_high:
            found.add("asymmetric")
    return found


def _correction_traits(part: Any) -> set[str]:
    found = {type(part).__name__}
    if hasattr(part, "level"):
        found.add(f"{type(part).__name__}_{part.level}")
    if isinstance(part, correction.Truncate) and math.isinf(part.high):
        found.add("untruncated")
    return found


def _kl_traits(spec: LossSpec) -> set[str]:
    if not isinstance(spec.kl, kl.KL):
        return set()
    return {
        "KL",
        f"kl_{spec.kl.estimator}",
        f"kl_grad_{spec.kl.grad}",
        f"kl_weight_{spec.kl.weight}",
        f"kl_anchor_{spec.kl.anchor}",
    }


_FOUR = "TRL, Liger, Unsloth, Axolotl"

ELSEWHERE = (
    Elsewhere(
        "surrogate",
        "Clip token_ratio -aipo",
        {
            "verl": 'policy_loss.loss_mode="vanilla" (clip_ratio_low, clip_ratio_high)',
            "TRL": 'loss_type="grpo", "bnpo", "dr_grpo" or "dapo": one surrogate (epsilon, epsilon_high), four averages',
            "OpenRLHF": 'PolicyLoss(policy_loss_type="ppo", clip_eps_low, clip_eps_high)',
            "ColossalChat": "PolicyLoss",
            "SkyRL": 'policy_loss_type="regular" (eps_clip_low, eps_clip_high)',
            "NeMo-RL": "ClippedPGLossFn (ratio_clip_min, ratio_clip_max)",
            "slime": "--advantage-estimator grpo or ppo",
            "AReaL": 'importance_sampling_level="token"',
            "ROLL": 'the default PPO worker, or pg_variant="ppo"',
            "Tinker": '"ppo"',
            "open-instruct": 'loss_fn="dapo"',
            "EasyR1": 'loss_type="default"',
            "Trinity-RFT": '"ppo"',
            "xtuner": '"vanilla"',
        },
    ),
    Elsewhere(
        "dual clip",
        "Clip dual -aipo",
        {
            "verl": "clip_ratio_c, 3.0 and always on in loss_mode='vanilla'",
            "SkyRL": 'policy_loss_type="dual_clip" (clip_ratio_c, 3.0)',
            "OpenRLHF": "dual_clip, off by default",
            "NeMo-RL": "ratio_clip_c, off by default",
            "AReaL": "c_clip, off by default",
            "ROLL": "c is 1 + 2·pg_clip, so 1.4 at 0.2",
            "TRL": "none; delta gives the same numbers when delta > 1 + epsilon_high",
        },
    ),
    Elsewhere("surrogate", "TwoSidedClip", {_FOUR: "delta, with any clipped loss_type", "ms-swift": "delta"}),
    Elsewhere(
        "surrogate",
        "Clip sequence_ratio_sequence -LengthWeighted",
        {
            "TRL": 'importance_sampling_level="sequence" with loss_type="grpo"',
            "OpenRLHF": 'policy_loss_type="gspo"',
            "NeMo-RL": "sequence_level_importance_ratios=True",
            "slime": "--advantage-estimator gspo",
            "AReaL": 'importance_sampling_level="sequence"',
            "ROLL": 'importance_sampling="seq"',
            "EasyR1": 'loss_type="gspo"',
            "cosmos-rl": 'variant="gspo"',
            "PipelineRL": '"gspo"',
        },
    ),
    Elsewhere(
        "surrogate",
        "Clip sequence_ratio_token",
        {
            "verl": 'policy_loss.loss_mode="gspo"',
            "SkyRL": 'policy_loss_type="gspo"',
            "TRL": "experimental GSPO-token trainer",
            "EasyR1": 'loss_type="gspo_token"',
            "ms-swift": 'importance_sampling_level="sequence_token"',
            "Trinity-RFT": '"gspo"',
            "tunix": 'loss_algo="gspo-token"',
        },
    ),
    Elsewhere("ratio", "turn_ratio", {"ROLL": 'agentic ratio_type="segment"'}),
    Elsewhere(
        "surrogate",
        "Clip product_ratio",
        {"TRL": "RLOOTrainer", "torchtune": "GRPOCompletionLoss"},
    ),
    Elsewhere("surrogate", "LengthWeighted sequence_ratio", {_FOUR: 'loss_type="luspo"'}),
    Elsewhere("surrogate", "aipo", {"cosmos-rl": "aipo_rho"}),
    Elsewhere(
        "surrogate",
        "DetachedClip outside_clip anchor_old",
        {
            "verl": 'policy_loss.loss_mode="cispo"',
            _FOUR: 'loss_type="cispo"',
            "SkyRL": 'policy_loss_type="cispo"',
            "NeMo-RL": "use_cispo=True",
            "slime": "--advantage-estimator cispo",
            "ROLL": 'pg_variant="cispo"',
            "Tinker": '"cispo"',
            "open-instruct": 'loss_fn="cispo"',
            "EasyR1": 'loss_type="cispo"',
            "Trinity-RFT": '"cispo"',
        },
    ),
    Elsewhere(
        "surrogate",
        "DetachedClip outside_clip anchor_rollout",
        {"verl": 'bypass_mode with loss_type="reinforce"', "PipelineRL": '"reinforce"', "torchforge": "ReinforceLoss"},
    ),
    Elsewhere(
        "surrogate",
        "DetachedClip outside_zero_by_sign",
        {"ROLL": 'pg_variant="cispo" with cispo_use_unified_mask', "Trinity-RFT": '"cispo" with enable_mask_clip'},
    ),
    Elsewhere("surrogate", "DetachedClip outside_zero anchor_rollout", {"SkyRL": 'policy_loss_type="rollout_is"'}),
    Elsewhere(
        "surrogate",
        "SoftGate",
        {
            "verl": 'policy_loss.loss_mode="sapo" (tau_pos, tau_neg)',
            _FOUR: 'loss_type="sapo"',
            "SkyRL": 'policy_loss_type="sapo"',
            "AReaL": "use_sapo_loss",
            "EasyR1": 'loss_type="sapo"',
            "Trinity-RFT": '"sapo"',
        },
    ),
    Elsewhere("surrogate", "GeometricClip", {"verl": 'policy_loss.loss_mode="geo_mean"', "TRL": "experimental GMPOTrainer"}),
    Elsewhere("surrogate", "Unbounded form_logp", {"verl": 'policy_loss.loss_mode="gpg"'}),
    Elsewhere(
        "surrogate",
        "Unbounded form_ratio anchor_rollout",
        {
            "Tinker": '"importance_sampling"',
            "SkyRL": 'policy_loss_type="importance_sampling"',
            "Trinity-RFT": '"importance_sampling"',
        },
    ),
    Elsewhere("surrogate", "CovClip", {"verl": 'policy_loss.loss_mode="clip_cov"', "SkyRL": 'policy_loss_type="clip_cov"'}),
    Elsewhere("surrogate", "CovKL", {"verl": 'policy_loss.loss_mode="kl_cov"', "SkyRL": 'policy_loss_type="kl_cov"'}),
    Elsewhere(
        "surrogate",
        "ProbabilityBand divergence_tv",
        {
            "verl": 'policy_loss.loss_mode="dppo_tv"',
            "SkyRL": 'policy_loss_type="dppo", dppo_type="binary_tv"',
            "Stable-RL": '"dppo_binary_tv"',
            "prime-rl": 'loss type "default" (both sides: "ipo")',
        },
    ),
    Elsewhere(
        "surrogate",
        "ProbabilityBand divergence_kl",
        {
            "verl": 'policy_loss.loss_mode="dppo_kl"',
            "SkyRL": 'policy_loss_type="dppo", dppo_type="binary_kl"',
            "Stable-RL": '"dppo_binary_kl"',
        },
    ),
    Elsewhere("surrogate", "Quadratic", {"verl": 'policy_loss.loss_mode="dro" (dro_beta)', "ROLL": 'pg_variant="kimi15"'}),
    Elsewhere("surrogate", "TaperedNegative", {"ROLL": 'pg_variant="topr"', "Trinity-RFT": '"topr"'}),
    Elsewhere("surrogate", "GammaWeight", {"TRL": 'loss_type="vespo"', "Liger": '"vespo"', "Unsloth": '"vespo"'}),
    Elsewhere(
        "correction",
        "Truncate_token -untruncated",
        {
            "verl": 'rollout_is="token" with one rollout_is_threshold',
            "TRL": 'vllm_importance_sampling_mode="token_truncate"',
            "OpenRLHF": 'is_correction_level="token", is_correction_mode="clip"; "tis" in earlier releases',
            "SkyRL": 'tis_ratio_type="token"',
            "NeMo-RL": 'truncated_importance_sampling_type="tis"',
            "slime": "--use-tis (--tis-clip, --tis-clip-low)",
            "tunix": 'sampler_is="token"',
        },
    ),
    Elsewhere("correction", "untruncated", {"AReaL": "use_decoupled_loss", "RLinf": "decoupled_actor_critic"}),
    Elsewhere(
        "correction",
        "Truncate_product",
        {
            "verl": 'rollout_is="sequence"',
            "TRL": 'vllm_importance_sampling_mode="sequence_truncate"',
            "SkyRL": 'tis_ratio_type="sequence"',
        },
    ),
    Elsewhere("correction", "Truncate_geomean", {"ms-swift": '"sequence_truncate" (in TRL the same name is the product)'}),
    Elsewhere(
        "correction",
        "Band_token",
        {
            "verl": 'rollout_is="token" with a "low_high" rollout_is_threshold',
            "TRL": 'vllm_importance_sampling_mode="token_mask"',
            "OpenRLHF": 'is_correction_level="token", is_correction_mode="mask"; "icepop" in earlier releases',
            "NeMo-RL": 'truncated_importance_sampling_type="icepop"',
            "slime": "icepop_function as the custom TIS function",
        },
    ),
    Elsewhere(
        "correction",
        "SequenceMask_geomean",
        {
            "NeMo-RL": 'truncated_importance_sampling_type="seq-mask-tis"',
            "OpenRLHF": 'is_correction_level="seq"; "seq-mask-tis" in earlier releases',
            "SkyRL": 'sequence_mask_metric="geometric"',
        },
    ),
    Elsewhere(
        "correction",
        "SequenceMask_product",
        {"TRL": 'vllm_importance_sampling_mode="sequence_mask" (its default)', "SkyRL": 'sequence_mask_metric="product"'},
    ),
    Elsewhere("correction", "Reject", {"verl": "rollout_rs (token_k1 … seq_max_k3)", "AReaL": "RejectionSamplingConfig"}),
    Elsewhere("correction", "Veto", {"SkyRL": "outlier_token_is_threshold_low and _high", "slime": "rs_veto_threshold in mis.py"}),
    Elsewhere(
        "correction",
        "OPSM",
        {"TRL": "off_policy_mask_threshold", "slime": "--use-opsm, --opsm-delta", "cosmos-rl": "off_policy_masking_delta"},
    ),
    Elsewhere("correction", "SelfNormalise", {"verl": "rollout_is_batch_normalize", "slime": "batch normalisation in mis.py"}),
    Elsewhere(
        "KL",
        "kl_k3 kl_anchor_ref",
        {
            "verl": 'kl_loss_type="low_var_kl" or "k3"',
            "TRL": "beta",
            "SkyRL": 'kl_estimator_type="k3"',
            "slime": '--kl-loss-type "k3", or "low_var_kl" (that one clamped)',
        },
    ),
    Elsewhere("KL", "kl_grad_k2", {"verl": 'a "+" behind the estimator, such as "k3+"'}),
    Elsewhere("KL", "kl_weight_ratio", {"TRL": "use_bias_correction_kl (on by default)", "slime": "--use-unbiased-kl"}),
    Elsewhere("KL", "kl_grad_score", {"NeMo-RL": "its on-policy KL term, weight exp(logp - sg(logp))"}),
    Elsewhere(
        "aggregate",
        "TokenMean",
        {
            "verl": 'loss_agg_mode="token-mean"',
            "TRL": 'loss_type="dapo", "cispo" or "vespo"',
            "OpenRLHF": "PolicyLoss(token_level_loss=True)",
            "ColossalChat": 'loss_variation="token_level"',
            "SkyRL": 'loss_reduction="token_mean"',
            "NeMo-RL": "token_level_loss=True",
            "slime": "--calculate-per-token-loss",
        },
    ),
    Elsewhere(
        "aggregate",
        "SeqMeanTokenMean",
        {
            "verl": 'loss_agg_mode="seq-mean-token-mean"',
            "TRL": 'loss_type="grpo" or "sapo", over each micro-batch',
            "OpenRLHF": "PolicyLoss(token_level_loss=False)",
            "ColossalChat": 'loss_variation="sample_level"',
            "SkyRL": 'loss_reduction="sequence_mean"',
            "NeMo-RL": "token_level_loss=False",
            "slime": "the default",
        },
    ),
    Elsewhere("aggregate", "SeqMeanTokenSum", {"verl": 'loss_agg_mode="seq-mean-token-sum"', "tunix": '"seq-mean-token-sum"'}),
    Elsewhere(
        "aggregate",
        "SeqMeanTokenSumNorm",
        {
            "verl": 'loss_agg_mode="seq-mean-token-sum-norm" with loss_scale_factor',
            "TRL": 'loss_type="dr_grpo" (max_completion_length)',
            "SkyRL": 'loss_reduction="seq_mean_token_sum_norm" (max_seq_len)',
            "tunix": '"sequence-mean-token-scale"',
        },
    ),
    Elsewhere("aggregate", "TokenSum", {"verl": 'loss_agg_mode="token-sum"', "Tinker": "always"}),
    Elsewhere("aggregate", "TokenSumNorm", {"ROLL": '"seq-mean-token-sum-norm"', "Trinity-RFT": '"seq-mean-token-sum-norm"'}),
    Elsewhere("aggregate", "PromptMean", {"SkyRL": 'loss_reduction="prompt_mean"'}),
    Elsewhere("aggregate", "LengthWeighted", {"TRL": 'loss_type="luspo"'}),
    Elsewhere("aggregate", "LocalTokenMean", {"TRL": 'loss_type="bnpo"', "SkyRL": 'loss_reduction="token_mean_legacy"'}),
    Elsewhere("aggregate", "LocalSeqMeanTokenMean", {"TRL": 'loss_type="grpo"'}),
)
