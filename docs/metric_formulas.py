"""The formulas of the metrics, for docs/metrics.md.

Legend: Σ over the valid tokens, n their number, lr = logp − old_logp (before any clamp), r = the
ratio slot's ratio before its clamp, w = the corrections' weight.
"""

# The metrics of `policy_loss`.
FORMULAS = {
    "loss": (
        "the loss of the whole step: Σ weight·loss, without the dp_size factor; adds over "
        "micro-batches and ranks"
    ),
    "tokens": "valid tokens",
    "advantage_mean": "Σ advantages / n",
    "clip_fraction": "share of valid tokens where the trust region binds: any of the next four",
    "clip_fraction_upper": "share held from above: for Clip, A > 0 and r > 1 + eps_high",
    "clip_fraction_lower": "share held from below: for Clip, A < 0 and r < 1 − eps_low",
    "clip_fraction_dual": (
        "share held at the largest weight: A < 0 and r > dual; for ProbabilityBand, inside the "
        "band and r > cap"
    ),
    "clip_fraction_dropped": "share that Clip-Cov's draw leaves out",
    "ratio_mean": "Σ r / n, before clamping",
    "ratio_max": "max r, before clamping",
    "ratio_min": "min r, before clamping",
    "clamped_tokens": "valid tokens whose log-ratio lay beyond log_clamp; see `lab.doctor`",
    "nonfinite_tokens": ("valid tokens whose loss or any given log-probability is NaN or infinite"),
    "positive_logp_tokens": (
        "valid tokens with a given log-probability above 0.1, which no token "
        "can have: `compute` warns if they are more than half"
    ),
    "zero_logp_tokens": (
        "valid tokens whose largest given log-probability is exactly 0, as in a tensor that was "
        "never filled: `compute` warns if all are"
    ),
    "beyond_totals": (
        "tokens (sequences, if the average divides by them) that a call has beyond "
        "the given totals of the whole step; `compute` warns"
    ),
    "invalid_mask_values": (
        "entries of mask that are neither 0 nor 1, only where that could not be checked at once (a "
        "mask that is not bool, on a GPU or under torch.compile); `compute` raises unless it is 0"
    ),
    "invalid_cu_seqlens": (
        "calls whose cu_seqlens do not rise from 0 to N, only where that could "
        "not be checked at once; `compute` raises unless it is 0"
    ),
    "tokens_without_turn": (
        "valid tokens with a negative turn id, only where that could not be checked at once; "
        "`compute` raises unless it is 0"
    ),
    "negative_ages": (
        "valid tokens with a negative age, only where that could not be checked at once; `compute` "
        "raises unless it is 0"
    ),
    "negative_weights": (
        "negative weights of valid tokens, only where that could not be checked at once; `compute` "
        "raises unless it is 0"
    ),
    "kl_old_k1": "Σ −lr / n: estimate of KL(old‖current)",
    "kl_old_k3": "Σ (e^lr − 1 − lr) / n: estimate of KL(old‖current)",
    "kl_rollout_k1": "Σ (rollout_logp − old_logp) / n: KL(rollout‖old), engine against trainer",
    "kl_rollout_k3": "Σ (e^d − 1 − d) / n with d = old_logp − rollout_logp",
    "rollout_logp_difference_max": "max |old_logp − rollout_logp|",
    "age_mean": "Σ ages / n, rejected tokens too; `Mismatch.by_age` has the mismatch of each age",
    "age_max": "the largest age of a valid token",
    "correction_weight_mean": "Σ w / n over the valid tokens, rejected ones with w = 0",
    "correction_weight_max": "max w over the kept tokens",
    "effective_sample_size": "(Σ w)² / (n·Σ w²), rejected tokens with w = 0",
    "rejected_fraction": "share of valid tokens that some correction rejects",
    "rejected_fraction/<part>": "share of valid tokens that this correction rejects",
    "kl_ref": "Σ kl / n, to the KL part's anchor: the estimate before coef (weight included)",
    "entropy": "Σ entropy / n",
    "divergence": "Σ divergence / n: of the teacher's distribution and the current policy's, "
    "before clamp, weight and coef",
}

# The metrics of `value_loss`.
VALUE_FORMULAS = {
    "loss": (
        "the loss of the whole step: Σ weight·loss, without the dp_size factor; adds over "
        "micro-batches and ranks"
    ),
    "tokens": "valid tokens",
    "value_mean": "Σ values / n",
    "return_mean": "Σ returns / n",
    "value_error": "Σ |values − returns| / n",
    "clip_fraction": (
        "share of valid tokens whose clipped error is the larger of the two; only with clip"
    ),
    "explained_variance": "1 − Var(returns − values) / Var(returns) over the valid tokens",
    "nonfinite_tokens": "valid tokens whose loss is NaN or infinite",
    "invalid_mask_values": FORMULAS["invalid_mask_values"],
    "invalid_cu_seqlens": FORMULAS["invalid_cu_seqlens"],
}

# The metrics of a trained model with experts.
ROUTER_FORMULAS = {
    "router_busiest": (
        "of a model with experts: the load of a layer's busiest expert over an even load, mean "
        "over its layers, of all tokens that went through the model to learn; 1 is even, and "
        "experts over chosen ones is all on the same"
    )
}
