"""The names of metrics in the logs of different trainers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from policyloss_lab.limits import LARGEST_STEP

# Our name of a metric, and its names in TRL, verl, OpenRLHF, prime-rl and others. If a log holds
# several of them, the first counts.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "reward/mean": ("reward", "critic/score/mean", "critic/rewards/mean", "rewards/mean"),
    "reward/std": ("reward_std",),
    "accuracy": (),
    "eval/accuracy": (),
    "eval/reward": ("eval_reward",),
    "eval/length": ("eval_completions/mean_length", "eval/completions/mean_length"),
    "policy/entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "entropy/all/mean"),
    "policy/kl_ref": ("kl", "actor/kl_loss", "actor/reward_kl_penalty", "policy/kl"),
    "policy/kl_old_k3": ("approx_kl",),
    "policy/kl_old_k1": ("actor/ppo_kl", "ppo_kl"),
    "policy/kl_rollout_k3": ("rollout_corr/k3_kl", "mismatch_kl/all/mean"),
    "policy/kl_rollout_k1": ("rollout_corr/kl",),
    "policy/rollout_logp_difference_max": ("sampling/sampling_logp_difference/max",),
    "policy/clip_fraction": ("clip_ratio/region_mean", "actor/pg_clipfrac", "ppo_clip_ratio"),
    "policy/clip_fraction_upper": ("clip_ratio/high_mean",),
    # verl's actor/pg_clipfrac_lower counts dual clips, and is no side of the trust region.
    "policy/clip_fraction_lower": ("clip_ratio/low_mean",),
    "policy/clip_fraction_dual": ("actor/pg_clipfrac_lower",),
    "policy/loss": ("loss", "actor/pg_loss", "policy_loss"),
    "advantage/mean": ("critic/advantages/mean",),
    "advantage/std": ("advantage_std", "critic/advantages/std"),
    "grad_norm": ("actor/grad_norm", "actor_grad_norm", "optim/grad_norm"),
    "lr": ("learning_rate", "actor/lr", "actor_lr", "optim/lr"),
    "length/mean": (
        *("completions/mean_length", "completion_length", "response_length/mean"),
        "response_length",
    ),
    "length/max": ("completions/max_length", "response_length/max"),
    "truncated": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "groups/zero_share": ("frac_reward_zero_std",),
    "value/loss": ("critic/vf_loss", "critic_loss"),
    "value/explained_variance": ("critic/vf_explained_var",),
    "value/value_mean": ("critic/values/mean",),
    "value/return_mean": ("critic/returns/mean",),
    "critic_grad_norm": ("critic/grad_norm",),
    "timing/step_s": ("step_time", "timing_s/step", "timing/step_total", "time/step"),
}


def _all_names(*ours: str) -> tuple[str, ...]:
    return tuple(name for our in ours for name in (our, *OTHER_NAMES[our]))


# The curves that the doctor judges: each in plain words, and our names of its metrics. The first
# name that a row holds is taken.
_CURVES: dict[str, tuple[str, ...]] = {
    "reward": ("reward", "reward/mean"),
    "reward_std": ("spread of rewards", "reward/std"),
    "accuracy": ("right answers", "accuracy"),
    "held_out": ("held-out score", "eval/accuracy", "eval/reward"),
    "entropy": ("entropy", "policy/entropy"),
    "kl": ("KL to the reference", "policy/kl_ref"),
    "step_kl": ("KL of a step", "policy/kl_old_k3", "policy/kl_old_k1"),
    "clip": ("clipped tokens", "policy/clip_fraction"),
    "clip_high": ("clipped at the upper bound", "policy/clip_fraction_upper"),
    "clip_low": ("clipped at the lower bound", "policy/clip_fraction_lower"),
    "advantage_std": ("spread of advantages", "advantage/std"),
    "grad_norm": ("gradient norm", "grad_norm"),
    "length": ("length", "length/mean"),
    "truncated": ("cut completions", "truncated"),
    "dead_groups": ("groups with equal rewards", "groups/zero_share"),
    "mismatch": ("KL between engine and trainer", "policy/kl_rollout_k3", "policy/kl_rollout_k1"),
    "value_loss": ("value loss", "value/loss"),
    "value_explained": ("explained variance", "value/explained_variance"),
    "value_mean": ("mean value", "value/value_mean"),
    "value_return": ("mean return", "value/return_mean"),
}
TITLES = {curve: title for curve, (title, *_) in _CURVES.items()}
# W&B counts its own calls in `_step`, so the names of trainers come first.
STEPS = ("step", "global_step", "training/global_step", "train/global_step", "_step")
PREFIXES = ("", "train/")
_OURS = {
    prefix + name: (our, rank)
    for our in OTHER_NAMES
    for rank, name in enumerate(_all_names(our))
    for prefix in PREFIXES
}
KNOWN = frozenset(_OURS)  # every name of a metric that has a name of ours
# verl names the data, the score and the number of samples: val-core/<data>/<score>/mean@<n>.
_VALIDATION = re.compile(r"val-core/.*/(\w+)/mean@\d+$")


def step_of(row: Mapping[str, float]) -> int | None:
    """The step of a row under any of its names."""
    value = next((row[name] for name in STEPS if name in row), None)
    return None if value is None or value != value or abs(value) > LARGEST_STEP else int(value)


def our_names(names: Iterable[str]) -> dict[str, str]:
    """{name in a log: our name} for the `names` that differ from ours. If two names of a log mean
    the same metric, only one is renamed.
    """
    best: dict[str, tuple[int, str]] = {}
    for name in names:
        our, rank = _ours(name)
        if our is not None:
            best[our] = min(best.get(our, (rank, name)), (rank, name))
    return {name: our for our, (_, name) in best.items() if name != our}


def _ours(name: str) -> tuple[str | None, int]:
    """Our name for a metric, or None, and the rank of `name` among its names."""
    if (match := _VALIDATION.match(name)) is not None:
        score = {"acc": "eval/accuracy", "reward": "eval/reward"}.get(match[1])
        return score, 1
    if name.startswith("eval_") and name not in _OURS:  # of the Hugging Face trainers
        return f"eval/{name.removeprefix('eval_')}", 1
    return _OURS.get(name, (None, 0))


def canonical(row: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a row under the names of the doctor's curves; others are left out."""
    out: dict[str, float] = {}
    for curve, (_, *ours) in _CURVES.items():
        keys = (prefix + name for name in _all_names(*ours) for prefix in PREFIXES)
        if (key := next((key for key in keys if key in row), None)) is not None:
            out[curve] = float(row[key])
    validation = sorted(key for key in row if _VALIDATION.match(key))
    if validation and "held_out" not in out:
        out["held_out"] = float(row[validation[0]])
    dead, groups = row.get("groups/zero_variance"), row.get("groups/kept")
    if dead is not None and groups:  # ours count groups
        out["dead_groups"] = min(1.0, dead / max(groups, dead))
    if "clip" not in out and (sides := [out[x] for x in ("clip_high", "clip_low") if x in out]):
        out["clip"] = sum(sides)
    updates = row.get("updates")
    if updates is not None and (updates <= 1 or row.get("skipped", 0.0) >= updates):
        # There was no update, or the number is from before the only one.
        out.pop("step_kl", None)
    return out
