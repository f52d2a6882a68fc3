"""The catalogue's own words: our name for each compared function, and losses that were only read.

`COMPARED` maps the functions of `make conformance` to (their loss, our spec or function); `HELPERS`
are functions that are no loss. `REASONS` says why no code of a trainer was run; its losses are
those of `framework_names`. `READ` lists losses that no entry of `framework_names` has.
"""

from __future__ import annotations

_VERL = {
    "vanilla": "ppo_dual_clip",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gspo": "gspo_token",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "dro": "dro",
    "cispo": "cispo",
}
_VERL_ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gdpo": "gdpo",
    "grpo_passk": "passk_max_gap",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "opo": "opo",
    "reinforce_plus_plus": "reinforce_pp",
    "remax": "remax",
    "gpg": "gpg",
    "rloo_vectorized": "rloo",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
_TRL = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
# A name in backticks alone is a preset.
COMPARED: dict[str, dict[str, tuple[str, str]]] = {
    "verl": {
        "compute_policy_loss": ("compute_policy_loss", "`ppo_dual_clip`"),
        **{f"compute_policy_loss_{n}": (n, f"`{p}`") for n, p in _VERL.items()},
        "compute_policy_loss_bypass_mode": ("bypass_mode", '`TokenRatio(anchor="rollout")`'),
        "compute_policy_loss_reinforce": ("reinforce", "`DetachedClip`, anchor rollout"),
        "compute_value_loss": ("value loss", "`value_loss`"),
        "kl_penalty": ("kl_penalty", "`KL`"),
        "compute_rollout_correction_weights": ("rollout_is", "`Truncate`, `Band`"),
        "compute_rollout_rejection_mask": ("rollout_rs", "`Reject`"),
        **{
            f"advantage {n}": (f"adv_estimator {n}", f"`advantage.{ours}`")
            for n, ours in _VERL_ADVANTAGES.items()
        },
        "distillation.compute_forward_kl_topk": ("forward_kl_topk", '`Divergence("forward")`'),
        "distillation.kl_divergence": ("distillation kl, k1 … k3", '`KL(anchor="teacher")`'),
        "distillation_ppo_loss after register_distillation()": (
            "distillation loss",
            "`Divergence`, `opd`",
        ),
    },
    "openrlhf": {
        "PolicyLoss": ("ppo, gspo; is_correction_*", "`ppo`, `gspo`, with corrections"),
        "ValueLoss": ("ValueLoss", "`value_loss`"),
        "compute_approx_kl": ("k1, k2, k3", "`KL`"),
        "compute_approx_kl(unbiased_gradient=True)": (
            "unbiased_gradient",
            '`KL(grad="k2", weight="detached_ratio")`',
        ),
    },
    "trl": {
        **{f"GRPOTrainer {n}": (n, f"`{n}`") for n in _TRL},
        **{
            f"GRPOTrainer {n}, all options": (f"{n} with every option", f"`{n}`, `OPSM`, …")
            for n in _TRL
        },
        "GRPOTrainer bnpo, entropy bonus": ("bnpo, entropy bonus", "`entropy_coef`"),
        "GRPOTrainer cispo, log-ratio 80": ("cispo, large ratios", "`cispo`"),
        "GKDTrainer.generalized_jsd_loss": ("GKD", "`gkd`"),
        "ChunkedDivergenceFunction": ("chunked divergence", "`linear_divergence`"),
        "DistillationTrainer's loss": ("DistillationTrainer", "`Divergence`"),
        "DPOTrainer._compute_loss": ("DPO, all loss types", "`preference_loss`"),
        "DPOTrainer._compute_loss, in float32": ("DPO in float32", "`preference_loss`"),
        "KTOTrainer._compute_loss": ("KTO", "`preference_loss`"),
        "ORPOTrainer.get_batch_loss_metrics": ("ORPO", "`preference_loss`"),
        "CPOTrainer.get_batch_loss_metrics": ("CPO, SimPO", "`preference_loss`"),
        "CPOTrainer.get_batch_loss_metrics, alpha": ("AlphaPO", "`preference_loss`"),
    },
    "tinker": {
        "forward_backward_custom": ("forward_backward_custom", "every preset"),
        "create_custom_loss": ("create_custom_loss", "presets of one sequence"),
    },
    "colossalai": {
        "coati.distributed.loss.PolicyLoss": ("distributed.loss.PolicyLoss", "`ppo`, `grpo`"),
        "coati.models.loss.PolicyLoss": ("models.loss.PolicyLoss", "`ppo`"),
        "coati.models.loss.ValueLoss": ("models.loss.ValueLoss", "`value_loss`"),
    },
}
HELPERS = {
    "verl": {
        "agg_loss",
        "kl_penalty_forward",
        "compute_rollout_correction_and_rejection_mask",
        "compute_rollout_correction_and_add_to_batch",
        "compute_offpolicy_metrics",
        "compute_rollout_corr_metrics_from_logprobs",
        "compute_is_metrics",
        "compute_rs_metrics",
        "apply_bypass_mode",
        "rollout_is_threshold, malformed",
        "rollout_rs_threshold, malformed",
        "ppo_loss after install()",
        "ppo_loss after register()",
        "FusedLinearForPPO",
        "install_head(): FusedLinearForPPO",
        "linear_cross_entropy",
    },
    "openrlhf": {
        "install(): openrlhf.models.PolicyLoss",
        "aggregate_loss",
        "install_head(): Actor.forward",
    },
}
_NOT_INSTALLED = "no environment here installs it"
_TRLS = "the formulas of TRL's trainer, which was run"
REASONS = {
    "SkyRL": "only regular, dual_clip, sapo, gspo, cispo and dppo with binary_tv were run",
    "ROLL": "no package; only its segment ratio and skewed KLs were run",
    "ms-swift": "only FIPO and RLSD were run",
    "Trinity-RFT": "its means add 1e-8 to counts",
    "Tinker": "the service computes it; `compat.tinker.built_in` returns its spec",
    "Liger": _TRLS,
    "Unsloth": _TRLS,
    "Axolotl": _TRLS,
    "open-instruct": _NOT_INSTALLED,
    "EasyR1": _NOT_INSTALLED,
    "xtuner": _NOT_INSTALLED,
    "cosmos-rl": _NOT_INSTALLED,
    "PipelineRL": _NOT_INSTALLED,
    "RLinf": _NOT_INSTALLED,
    "tunix": "it is written in JAX",
    "torchtune": _NOT_INSTALLED,
    "torchforge": _NOT_INSTALLED,
    "Stable-RL": "a fork of verl, which was run",
}
# Frameworks whose entry of `framework_names` the second table of the page has.
_RUN = {
    "PPO's clip on the token's ratio": "AReaL, NeMo-RL, SkyRL, slime, Trinity-RFT",
    "GSPO: PPO's clip on the sequence's ratio, gradient through the mean": "AReaL, NeMo-RL, slime",
    "GSPO-token: the sequence's ratio, each token's own gradient": "SkyRL",
    "SAPO": "AReaL, SkyRL",
    "FIPO": "ms-swift",
    "DPPO, total variation": "prime-rl, SkyRL",
    "CISPO: a bounded, stopped ratio times logp": "NeMo-RL, SkyRL, slime, Trinity-RFT",
    "CISPO without the tokens PPO clips": "Trinity-RFT",
    "REC: no ratio, nothing outside a band": "Trinity-RFT",
    "the plain ratio to the engine": "Trinity-RFT",
    "TOPR": "Trinity-RFT",
    "DFT: logp times the stopped probability": "Trinity-RFT",
    "CHORD's φ: logp times the stopped p(1 - p)": "Trinity-RFT",
    "LUSPO": "Liger",  # in `READ`, as it differs from TRL's
}
RUN = {(framework, entry) for entry, names in _RUN.items() for framework in names.split(", ")}
_MIXTURE = "[`Mixture`](mixtures.md) of "
_CROSS_ENTROPY = '`Unbounded("logp")` with the advantage 1 on '
_GROUP = "a partition of the batch would change it (decision 51)"
# Framework, loss, spec, reason.
READ = [
    ("torchtitan", "GRPOLoss", "`ppo`", "DAPOLoss with two equal bounds, which was run"),
    ("miles", "grpo, gspo, ppo", "`grpo`, `gspo`, `ppo`", "it bundles Megatron and SGLang"),
    ("TRL", "RLOOTrainer", "`rloo_loss`", "not among the drop-ins"),
    ("TRL", "experimental GMPOTrainer", "`gmpo`", "not among the drop-ins; verl's was run"),
    ("TRL", "experimental GSPO-token", "`gspo_token`", "not among the drop-ins; verl's was run"),
    ("TRL", "use_adaptive_entropy", "`AdaptiveEntropy`", "lines inside the loss of its trainer"),
    (
        "TRL",
        "async GRPO, clamp(ρ)/ρ",
        "`TruncateRatio`, anchor rollout",
        "in no release: an open pull request; async GRPO without it was run",
    ),
    ("TRL", "SFTTrainer dft", '`Unbounded("probability")`', "only read; Trinity-RFT's was run"),
    ("OpenRLHF", "flash_reinforce", "`advantage.flash_reinforce`", "a line inside a method"),
    ("OpenRLHF", "stop_properly_penalty_coef", "a `torch.where` on rewards", "decision 55"),
    ("Liger", "luspo", "none: its mean counts padding, TRL's does not", "only read"),
    ("Liger", "TVD, JSD, DPO, KTO, ORPO, SimPO, CPO", "`Divergence`, `preference_loss`", _TRLS),
    ("MathForge", "DGPO", '`group_advantages(scale="mad")`', "the paper was read, not the code"),
    ("AReaL", "linear proximal policy", "none: only a metric there", "only read"),
    ("ART", "mask_prob_ratio", '`DetachedClip(outside="zero")`', "only read"),
    ("ART", "advantage_balance", "a `torch.where` on advantages", "decision 55"),
    ("prime-rl", "rae", "none: a running baseline, state of the trainer", "decision 55"),
    ("prime-rl", "ref_kl", "`KL` with a teacher", "only read"),
    ("prime-rl", "echo", f"{_MIXTURE}`prime_rl` and {_CROSS_ENTROPY}tool output", "only read"),
    ("Trinity-RFT", "rec, ring", "none: a union of two ranges", "decision 51"),
    ("Trinity-RFT", "sapo", "none: its gate is detached and multiplies logp", "another gradient"),
    ("Trinity-RFT", "opmd", "`reinforce`, advantages / (1 + τ)", "only read"),
    (
        "Trinity-RFT",
        "mix",
        f"{_MIXTURE}`ppo_dual_clip` and {_CROSS_ENTROPY}an expert's tokens",
        "only read; chord was run",
    ),
    ("Trinity-RFT", "Clip_B, Clip_V", "none: filters by entropy change", "only read"),
    ("ms-swift", "real", "none", _GROUP),
    (
        "ms-swift",
        "CHORD",
        f'{_MIXTURE}a policy loss and `Unbounded("uncertainty")`',
        "only read; Trinity-RFT's was run",
    ),
    ("ms-swift", "SDAR", "a second call: `reinforce`, the gate as advantages", "only read"),
    ("ms-swift", "gkd, renormalised top-k", '`Divergence(rest="renormalise")`', "only read"),
    ("verl-recipe", "gvpo", "none", _GROUP),
    ("verl-recipe", "flowrl", "none: it learns a partition function", "only read"),
    ("xtuner", "oreal", "factors N / N_pos, N / N_neg on advantages", "decision 51"),
    (
        "NeMo-RL",
        "positive_example_nll_weight (VAPO)",
        f"{_MIXTURE}a policy loss and {_CROSS_ENTROPY}correct answers",
        "only read; it divides by the tokens of each micro-batch",
    ),
    ("NeMo-RL", "DraftCrossEntropyLossFn", "a second call: `linear_divergence`", "only read"),
    (
        "LLaMA-Factory",
        "asft_loss_func",
        '`Unbounded("probability")` with `Divergence("forward")`',
        "only read",
    ),
    ("NeMo-RL", "seq_logprob_error_threshold", "none: `Reject` has no e^|d|", "only read"),
    ("ROLL", 'pg_variant="tis"', "`DetachedClip(0, 1)`", "only read"),
    (
        "ROLL",
        "adaptive KL divergence",
        "none: a mixture by likely tokens",
        "only read",
    ),
    ("Stable-RL", "dppo_topk_tv, dppo_topk_kl", "none: top-k distributions in a mask", "only read"),
    ("Tinker", "cross_entropy", "`reinforce`, the weights as advantages", REASONS["Tinker"]),
]
