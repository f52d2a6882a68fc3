"""What each framework calls a policy loss, as data.

An entry applies to a spec if its traits fit (see `traits`).

Read from the frameworks' own sources: verl 0.9.1, TRL 1.16.0, OpenRLHF 0.11.2 and SkyRL 0.3.0 as
released, the others as of mid-2026. Names move; the settings beside them say how to find them
again. "TRL, Liger, …": all of these.
"""

from __future__ import annotations

from typing import NamedTuple


class Elsewhere(NamedTuple):
    """A part of a loss, what it is, and what frameworks call it.

    needs: traits that must hold; one with a leading "-" must not.
    """

    part: str
    what: str
    needs: str
    names: dict[str, str]


_FOUR = "TRL, Liger, Unsloth, Axolotl"

LOSSES = (
    Elsewhere(
        "surrogate",
        "PPO's clip on the token's ratio",
        "Clip token_ratio -aipo",
        {
            "verl": 'policy_loss.loss_mode="vanilla" (clip_ratio_low, clip_ratio_high)',
            "TRL": (
                'loss_type="grpo", "bnpo", "dr_grpo" or "dapo": one surrogate (epsilon, '
                "epsilon_high), four averages"
            ),
            "OpenRLHF": 'PolicyLoss(policy_loss_type="ppo", clip_eps_low, clip_eps_high)',
            "ColossalChat": "coati.distributed.loss.PolicyLoss(clip_eps_low, clip_eps_high)",
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
        "a largest ratio where the advantage is negative",
        "Clip dual -aipo",
        {
            "verl": "clip_ratio_c, 3.0 and always on in loss_mode='vanilla'",
            "SkyRL": 'policy_loss_type="dual_clip" (clip_ratio_c, 3.0)',
            "OpenRLHF": "PolicyLoss(dual_clip), off by default",
            "NeMo-RL": "ratio_clip_c, off by default",
            "AReaL": "c_clip, off by default",
            "ROLL": "c is 1 + 2·pg_clip, so 1.4 at 0.2",
            "TRL": "none; delta gives the same numbers when delta > 1 + epsilon_high",
        },
    ),
    Elsewhere(
        "surrogate",
        "PPO's clip with a largest ratio for either sign",
        "TwoSidedClip",
        {_FOUR: "delta, with any clipped loss_type", "ms-swift": "delta"},
    ),
    Elsewhere(
        "surrogate",
        "GSPO: PPO's clip on the sequence's ratio, gradient through the mean",
        "Clip sequence_ratio_sequence -LengthWeighted",
        {
            "TRL": 'importance_sampling_level="sequence" with loss_type="grpo"',
            "OpenRLHF": 'PolicyLoss(policy_loss_type="gspo"), always averaged over sequences',
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
        "GSPO-token: the sequence's ratio, each token's own gradient",
        "Clip sequence_ratio_token",
        {
            "verl": (
                'policy_loss.loss_mode="gspo"; from 0.9.1 with any loss_agg_mode, before always '
                '"seq-mean-token-mean"'
            ),
            "SkyRL": 'policy_loss_type="gspo"',
            "TRL": "experimental GSPO-token trainer",
            "EasyR1": 'loss_type="gspo_token"',
            "ms-swift": 'importance_sampling_level="sequence_token"',
            "Trinity-RFT": '"gspo"',
            "tunix": 'loss_algo="gspo-token"',
        },
    ),
    Elsewhere("ratio", "the turn's ratio", "turn_ratio", {"ROLL": 'agentic ratio_type="segment"'}),
    Elsewhere(
        "surrogate",
        "PPO's clip on the sequence's likelihood ratio",
        "Clip product_ratio",
        {"TRL": "RLOOTrainer", "torchtune": "GRPOCompletionLoss"},
    ),
    Elsewhere(
        "surrogate",
        "LUSPO",
        "LengthWeighted sequence_ratio",
        {_FOUR: 'loss_type="luspo" with importance_sampling_level="sequence"'},
    ),
    Elsewhere("surrogate", "AIPO", "aipo", {"cosmos-rl": "aipo_rho"}),
    Elsewhere(
        "surrogate",
        "CISPO: a bounded, stopped ratio times logp",
        "DetachedClip outside_clip anchor_old",
        {
            "verl": (
                'policy_loss.loss_mode="cispo": the band 1 - clip_ratio_low … 1 + clip_ratio_high'
            ),
            _FOUR: (
                'loss_type="cispo": epsilon_high is the largest ratio itself, and there is no '
                "lower bound"
            ),
            "SkyRL": (
                'policy_loss_type="cispo": the band 1 - cispo_eps_clip_low … 1 + '
                "cispo_eps_clip_high, so 1 … 6"
            ),
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
        "a bounded, stopped ratio to the engine times logp",
        "DetachedClip outside_clip anchor_rollout",
        {
            "verl": (
                'rollout_correction.bypass_mode=True with loss_type="reinforce" and '
                'rollout_is="token"'
            ),
            "PipelineRL": '"reinforce"',
            "torchforge": "ReinforceLoss",
        },
    ),
    Elsewhere(
        "surrogate",
        "CISPO without the tokens PPO clips",
        "DetachedClip outside_zero_by_sign",
        {
            "ROLL": 'pg_variant="cispo" with cispo_use_unified_mask',
            "Trinity-RFT": '"cispo" with enable_mask_clip',
        },
    ),
    Elsewhere(
        "surrogate",
        "the ratio to the engine, nothing outside a band",
        "DetachedClip outside_zero anchor_rollout",
        {"SkyRL": 'policy_loss_type="rollout_is"'},
    ),
    Elsewhere(
        "surrogate",
        "SAPO",
        "SoftGate",
        {
            "verl": (
                'policy_loss.loss_mode="sapo" (tau_pos, tau_neg), always averaged '
                '"seq-mean-token-mean"'
            ),
            _FOUR: 'loss_type="sapo" (sapo_temperature_pos, sapo_temperature_neg)',
            "SkyRL": 'policy_loss_type="sapo"',
            "AReaL": "use_sapo_loss",
            "EasyR1": 'loss_type="sapo"',
            "Trinity-RFT": '"sapo"',
        },
    ),
    Elsewhere(
        "surrogate",
        "GMPO",
        "GeometricClip",
        {
            "verl": (
                'policy_loss.loss_mode="geo_mean", a mean over the rows of each micro-batch '
                "whatever loss_agg_mode says"
            ),
            "TRL": "experimental GMPOTrainer",
        },
    ),
    Elsewhere(
        "surrogate",
        "no ratio: -A·logp",
        "Unbounded form_logp",
        {"verl": 'policy_loss.loss_mode="gpg"'},
    ),
    Elsewhere(
        "surrogate",
        "the plain ratio to the engine",
        "Unbounded form_ratio anchor_rollout",
        {
            "Tinker": '"importance_sampling"',
            "SkyRL": 'policy_loss_type="importance_sampling"',
            "Trinity-RFT": '"importance_sampling"',
        },
    ),
    Elsewhere(
        "surrogate",
        "Clip-Cov",
        "CovClip",
        {
            "verl": 'policy_loss.loss_mode="clip_cov", over each micro-batch',
            "SkyRL": 'policy_loss_type="clip_cov"',
        },
    ),
    Elsewhere(
        "surrogate",
        "KL-Cov",
        "CovKL",
        {
            "verl": 'policy_loss.loss_mode="kl_cov", over each micro-batch',
            "SkyRL": 'policy_loss_type="kl_cov"',
        },
    ),
    Elsewhere(
        "surrogate",
        "DPPO, total variation",
        "ProbabilityBand divergence_tv",
        {
            "verl": (
                'policy_loss.loss_mode="dppo_tv" (clip_ratio_low, clip_ratio_high; cap '
                "clip_ratio_c)"
            ),
            "SkyRL": (
                'policy_loss_type="dppo", dppo_type="binary_tv"; the ratio with its gradient, '
                "no cap"
            ),
            "Stable-RL": '"dppo_binary_tv"',
            "prime-rl": 'loss type "default" (both sides: "ipo")',
        },
    ),
    Elsewhere(
        "surrogate",
        "DPPO, binary KL",
        "ProbabilityBand divergence_kl",
        {
            "verl": (
                'policy_loss.loss_mode="dppo_kl" (clip_ratio_low, clip_ratio_high; cap '
                "clip_ratio_c)"
            ),
            "SkyRL": (
                'policy_loss_type="dppo", dppo_type="binary_kl"; the ratio with its gradient, '
                "no cap"
            ),
            "Stable-RL": '"dppo_binary_kl"',
        },
    ),
    Elsewhere(
        "surrogate",
        "DRO",
        "Quadratic",
        {"verl": 'policy_loss.loss_mode="dro" (dro_beta)', "ROLL": 'pg_variant="kimi15"'},
    ),
    Elsewhere(
        "surrogate",
        "TOPR",
        "TaperedNegative",
        {"ROLL": 'pg_variant="topr"', "Trinity-RFT": '"topr"'},
    ),
    Elsewhere(
        "surrogate",
        "VESPO",
        "GammaWeight",
        {
            "TRL": (
                'loss_type="vespo" (vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)'
            ),
            "Liger": '"vespo"',
            "Unsloth": '"vespo"',
        },
    ),
)
