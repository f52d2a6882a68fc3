"""What each metric is called in the logs of different trainers."""

from __future__ import annotations

from collections.abc import Mapping

# The first name that a row holds is taken. Ours, TRL's, verl's, and plain ones.
NAMES: dict[str, tuple[str, ...]] = {
    "reward": ("reward/mean", "reward", "critic/score/mean", "critic/rewards/mean", "rewards/mean"),
    "accuracy": ("accuracy",),
    "held_out": ("eval/accuracy", "eval_reward", "eval/reward"),
    "entropy": ("policy/entropy", "entropy", "actor/entropy", "actor/entropy_loss"),
    "kl": ("policy/kl_ref", "kl", "actor/kl_loss", "actor/reward_kl_penalty", "policy/kl"),
    "step_kl": ("policy/kl_old_k3", "actor/ppo_kl", "approx_kl"),
    "clip_high": ("policy/clip_fraction_upper", "clip_ratio/high_mean"),
    # verl's actor/pg_clipfrac_lower counts what dual clip holds, and is no side of the region.
    "clip_low": ("policy/clip_fraction_lower", "clip_ratio/low_mean"),
    "advantage_std": ("advantage/std", "advantage_std", "critic/advantages/std"),
    "grad_norm": ("grad_norm", "actor/grad_norm"),
    "length": (
        "length/mean",
        "completions/mean_length",
        "completion_length",
        "response_length/mean",
    ),
    "truncated": ("truncated", "completions/clipped_ratio", "response_length/clip_ratio"),
    "dead_groups": ("frac_reward_zero_std", "groups/zero_share"),
    "mismatch": ("policy/kl_rollout_k3", "rollout_corr/k3_kl", "rollout_corr/kl"),
}
STEPS = ("step", "global_step", "training/global_step", "_step", "train/global_step")
PREFIXES = ("", "train/")


def step_of(row: Mapping[str, float]) -> int | None:
    """The step of a row, whatever it is called."""
    value = next((row[name] for name in STEPS if name in row), None)
    return None if value is None or value != value or abs(value) > 2**53 else int(value)


def canonical(row: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a row by their names here; what has none is left out."""
    out: dict[str, float] = {}
    for name, others in NAMES.items():
        keys = [prefix + other for other in others for prefix in PREFIXES]
        key = next((key for key in keys if key in row), None)
        if key is not None:
            out[name] = float(row[key])
    # verl names the data, the score and the number of samples: val-core/<data>/<score>/mean@<n>.
    validation = sorted(key for key in row if key.startswith("val-core/") and "/mean@" in key)
    if validation and "held_out" not in out:
        out["held_out"] = float(row[validation[0]])
    dead, groups = row.get("groups/zero_variance"), row.get("groups/kept")
    if dead is not None and groups:  # ours count groups
        out["dead_groups"] = min(1.0, dead / max(groups, dead))
    updates = row.get("updates")
    if updates is not None and (updates <= 1 or row.get("skipped", 0.0) >= updates):
        out.pop("step_kl", None)  # of no update: a skipped one, or what comes before the only one
    return out
