"""What each framework calls corrections, KL, averages and the entropy bonus, as data.

See `elsewhere`.
"""

from __future__ import annotations

from policyloss.explain.framework_names import Elsewhere

PARTS = (
    Elsewhere(
        "correction",
        "TIS: the token's weight, truncated",
        "Truncate_token -untruncated",
        {
            "verl": 'rollout_is="token" with one rollout_is_threshold',
            "TRL": 'vllm_importance_sampling_mode="token_truncate"',
            "OpenRLHF": (
                'is_correction_level="token", is_correction_mode="clip"; up to 0.11.1 '
                'vllm_is_correction_type="tis"'
            ),
            "SkyRL": 'tis_ratio_type="token"',
            "NeMo-RL": 'truncated_importance_sampling_type="tis"',
            "slime": "--use-tis (--tis-clip, --tis-clip-low)",
            "tunix": 'sampler_is="token"',
        },
    ),
    Elsewhere(
        "correction",
        "the token's weight, not truncated",
        "untruncated",
        {"AReaL": "use_decoupled_loss", "RLinf": "decoupled_actor_critic"},
    ),
    Elsewhere(
        "correction",
        "the sequence's likelihood ratio, truncated",
        "Truncate_product",
        {
            "verl": 'rollout_is="sequence" with one rollout_is_threshold',
            "TRL": 'vllm_importance_sampling_mode="sequence_truncate"',
            "SkyRL": 'tis_ratio_type="sequence"',
        },
    ),
    Elsewhere(
        "correction",
        "the sequence's mean ratio, truncated",
        "Truncate_geomean",
        {"ms-swift": '"sequence_truncate" (in TRL the same name is the product)'},
    ),
    Elsewhere(
        "correction",
        "IcePop: the token's weight inside a band",
        "Band_token",
        {
            "verl": 'rollout_is="token" with a "low_high" rollout_is_threshold',
            "TRL": 'vllm_importance_sampling_mode="token_mask"',
            "OpenRLHF": (
                'is_correction_level="token", is_correction_mode="mask"; up to 0.11.1 '
                'vllm_is_correction_type="icepop"'
            ),
            "NeMo-RL": 'truncated_importance_sampling_type="icepop"',
            "slime": "icepop_function as the custom TIS function",
        },
    ),
    Elsewhere(
        "correction",
        "the sequence's likelihood ratio inside a band",
        "Band_product",
        {"verl": 'rollout_is="sequence" with a "low_high" rollout_is_threshold'},
    ),
    Elsewhere(
        "correction",
        "seq-mask-TIS: sequences by their mean ratio",
        "SequenceMask_geomean",
        {
            "NeMo-RL": 'truncated_importance_sampling_type="seq-mask-tis"',
            "OpenRLHF": (
                'is_correction_level="seq"; up to 0.11.1 vllm_is_correction_type="seq-mask-tis"'
            ),
            "SkyRL": 'sequence_mask_metric="geometric"',
        },
    ),
    Elsewhere(
        "correction",
        "sequences by their likelihood ratio",
        "SequenceMask_product",
        {
            "TRL": 'vllm_importance_sampling_mode="sequence_mask" (its default)',
            "SkyRL": 'sequence_mask_metric="product"',
        },
    ),
    Elsewhere(
        "correction",
        "tokens or sequences by a divergence",
        "DivergenceMask",
        {
            "OpenRLHF": (
                'is_correction_gating="binary_kl" or "tv", is_correction_level="token" or "seq", '
                "from 0.11.2"
            )
        },
    ),
    Elsewhere(
        "correction",
        "rejection by an estimate of the KL",
        "Reject",
        {"verl": "rollout_rs (token_k1 … seq_max_k3)", "AReaL": "RejectionSamplingConfig"},
    ),
    Elsewhere(
        "correction",
        "rejection by one impossible token",
        "Veto",
        {
            "SkyRL": "outlier_token_is_threshold_low and _high",
            "slime": "rs_veto_threshold in mis.py",
        },
    ),
    Elsewhere(
        "correction",
        "off-policy sequence masking",
        "OPSM",
        {
            "TRL": "off_policy_mask_threshold",
            "slime": "--use-opsm, --opsm-delta",
            "cosmos-rl": "off_policy_masking_delta",
        },
    ),
    Elsewhere(
        "correction",
        "weights divided by their mean",
        "SelfNormalise",
        {"verl": "rollout_is_batch_normalize", "slime": "batch normalisation in mis.py"},
    ),
    Elsewhere(
        "KL",
        "k1",
        "kl_k1 kl_anchor_ref",
        {
            "verl": 'use_kl_loss=True, kl_loss_type="kl" or "k1"',
            "OpenRLHF": "--algo.kl.use_loss --algo.kl.estimator k1",
        },
    ),
    Elsewhere(
        "KL",
        "k2",
        "kl_k2 kl_anchor_ref",
        {
            "verl": 'use_kl_loss=True, kl_loss_type="mse" or "k2"',
            "OpenRLHF": "--algo.kl.use_loss --algo.kl.estimator k2",
        },
    ),
    Elsewhere(
        "KL",
        "k3",
        "kl_k3 kl_anchor_ref",
        {
            "verl": 'use_kl_loss=True, kl_loss_type="low_var_kl" or "k3" (kl_loss_coef)',
            "OpenRLHF": "--algo.kl.use_loss --algo.kl.estimator k3 (--algo.kl.init_coef)",
            "TRL": "beta",
            "ColossalChat": "PolicyLoss(beta), the penalty given as per_token_kl",
            "SkyRL": 'kl_estimator_type="k3"',
            "slime": '--kl-loss-type "k3", or "low_var_kl" (that one clamped)',
        },
    ),
    Elsewhere(
        "KL",
        "the estimator's value, the gradient of k2",
        "kl_grad_k2",
        {"verl": 'a "+" behind the estimator, such as "k3+"'},
    ),
    Elsewhere(
        "KL",
        "weighted by the ratio",
        "kl_weight_ratio",
        {"TRL": "use_bias_correction_kl (on by default)", "slime": "--use-unbiased-kl"},
    ),
    Elsewhere(
        "KL",
        "with its score term",
        "kl_grad_score",
        {
            "NeMo-RL": (
                "its KL by default, weight exp(logp - sg(logp)); beyond its clamp of ref_logp - "
                "logp it has no score term"
            )
        },
    ),
    Elsewhere(
        "aggregate",
        "every token of the step counts the same",
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
        "every sequence counts the same, by its token mean",
        "SeqMeanTokenMean",
        {
            "verl": 'loss_agg_mode="seq-mean-token-mean"',
            "TRL": 'loss_type="grpo" or "sapo", over each micro-batch; empty rows count',
            "OpenRLHF": "PolicyLoss(token_level_loss=False)",
            "ColossalChat": 'loss_variation="sample_level"; empty rows count',
            "SkyRL": 'loss_reduction="sequence_mean"; empty rows count',
            "NeMo-RL": "token_level_loss=False",
            "slime": "the default",
        },
    ),
    Elsewhere(
        "aggregate",
        "token sum, mean over sequences",
        "SeqMeanTokenSum",
        {"verl": 'loss_agg_mode="seq-mean-token-sum"', "tunix": '"seq-mean-token-sum"'},
    ),
    Elsewhere(
        "aggregate",
        "token sum over a constant, mean over sequences (Dr. GRPO)",
        "SeqMeanTokenSumNorm",
        {
            "verl": 'loss_agg_mode="seq-mean-token-sum-norm" with loss_scale_factor, from 0.7.1',
            "TRL": 'loss_type="dr_grpo" (max_completion_length)',
            "SkyRL": 'loss_reduction="seq_mean_token_sum_norm" (max_seq_len)',
            "tunix": '"sequence-mean-token-scale"',
        },
    ),
    Elsewhere(
        "aggregate",
        "token sum",
        "TokenSum",
        {"verl": 'loss_agg_mode="token-sum", from 0.9.0', "Tinker": "always"},
    ),
    Elsewhere(
        "aggregate",
        "token sum over a constant",
        "TokenSumNorm",
        {
            "verl": 'loss_agg_mode="seq-mean-token-sum-norm" up to 0.7.0',
            "ROLL": '"seq-mean-token-sum-norm"',
            "Trinity-RFT": '"seq-mean-token-sum-norm"',
        },
    ),
    Elsewhere(
        "aggregate",
        "every prompt counts the same",
        "PromptMean",
        {"SkyRL": 'loss_reduction="prompt_mean"'},
    ),
    Elsewhere(
        "aggregate",
        "LUSPO's: a sequence counts by its length",
        "LengthWeighted",
        {"TRL": 'loss_type="luspo"'},
    ),
    Elsewhere(
        "aggregate",
        "the token mean of each micro-batch",
        "LocalTokenMean",
        {"TRL": 'loss_type="bnpo"', "SkyRL": 'loss_reduction="token_mean_legacy"'},
    ),
    Elsewhere(
        "aggregate",
        "the sequence mean of each micro-batch",
        "LocalSeqMeanTokenMean",
        {"TRL": 'loss_type="grpo" or "sapo"'},
    ),
    Elsewhere(
        "entropy",
        "a bonus",
        "entropy",
        {
            "verl": "actor.entropy_coeff",
            "OpenRLHF": "--actor.entropy_coef",
            "TRL": (
                "entropy_coef, a mean over the tokens of each micro-batch whatever loss_type "
                "averages"
            ),
        },
    ),
)
