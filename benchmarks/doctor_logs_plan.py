"""The runs of `benchmarks.doctor_logs`: 20 that learn, and 40 with a fault that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.evidence_plan import Job, Plan

FAULTS = "benchmarks.doctor_log_faults"
HEALTHY = "healthy"
COMMON: Mapping[str, Any] = {
    "steps": 60,
    "eval_every": 10,
    "eval_prompts": 128,
    "checkpoint_every": 0,
    "rollouts_every": 0,
    "device": "cpu",
}


@dataclass(frozen=True)
class Kind:
    """What is done to the runs of a kind. symptoms: a doctor that names one of these has found it.
    effects: others that follow from the same fault, so that naming them is no false alarm.
    """

    fault: str
    symptoms: tuple[str, ...]
    effects: tuple[str, ...] = ()


# What a policy that was destroyed may show.
_ANY = (
    "entropy_collapse",
    "dead_groups",
    "kl_drift",
    "gradient_spike",
    "truncation",
    "length_growth",
    "no_learning",
    "clip_saturation",
    "reward_hacking",
    "learning_rate_high",
    "nonfinite",
)
KINDS: Mapping[str, Kind] = {
    HEALTHY: Kind("nothing", ()),
    "lr_high": Kind(
        "a learning rate 40 to 100 times as large as one that learns",
        ("learning_rate_high",),
        _ANY,
    ),
    "lr_low": Kind(
        "a learning rate a thousandth of one that learns", ("learning_rate_low",), ("no_learning",)
    ),
    "entropy": Kind(
        "a negative entropy bonus, or none and a high learning rate",
        ("entropy_collapse",),
        _ANY,
    ),
    "dead_groups": Kind(
        "rewards that are equal in every group",
        ("dead_groups",),
        ("no_learning", "truncation", "learning_rate_low"),
    ),
    "clip": Kind("a trust region too narrow on one side", ("clip_saturation",), ("no_learning",)),
    "drift": Kind(
        "no KL term, and a reward that leads away from the task",
        ("kl_drift",),
        _ANY,
    ),
    "spike": Kind("one batch with outlier advantages", ("gradient_spike",)),
    "truncation": Kind("room for fewer tokens than an answer needs", ("truncation",)),
    "length": Kind(
        "a reward that pays for length",
        ("length_growth", "truncation", "reward_hacking"),
        ("kl_drift", "entropy_collapse", "dead_groups"),
    ),
    "random": Kind(
        "a reward by chance",
        ("no_learning",),
        ("kl_drift", "entropy_collapse", "learning_rate_high"),
    ),
    "nan": Kind("NaN in the advantages", ("nonfinite",), ("gradient_spike", "no_learning")),
}


def _job(
    kind: str, loss: str, seed: int, /, changes: Mapping[str, Any] | None = None, **options: Any
) -> Job:
    if "advantage" not in options:
        options["advantage"] = "grpo"
    for name in ("reward", "advantage"):
        if str(options.get(name, "")).startswith(":"):
            options[name] = FAULTS + options[name]
    return Job(kind, loss, seed, Plan(options, changes or {}, KINDS[kind].fault), COMMON)


HORIZON = {"aggregate.horizon": 16}
# Different losses, estimators, rates, batches and tricks, each of which people train with.
_HEALTHY = (
    _job(HEALTHY, "dapo", 0),
    _job(HEALTHY, "grpo", 1),
    _job(HEALTHY, "gspo", 2),
    _job(HEALTHY, "cispo", 3),
    _job(HEALTHY, "dr_grpo", 4, HORIZON, advantage="dr_grpo"),
    _job(HEALTHY, "rloo_loss", 5, advantage="rloo"),
    _job(HEALTHY, "ppo", 6, advantage="gae"),
    _job(HEALTHY, "reinforce", 7, advantage="reinforce_pp"),
    _job(HEALTHY, "sapo", 8),
    _job(HEALTHY, "gmpo", 9),
    _job(HEALTHY, "clip_cov", 10),
    _job(HEALTHY, "gpg", 11, advantage="gpg"),
    _job(HEALTHY, "dapo", 12, dynamic_sampling=True),
    _job(HEALTHY, "dapo", 13, {"entropy_coef": 0.003}, lr=1e-3),
    _job(HEALTHY, "dapo", 14, lr=2.5e-4, epochs=2),
    _job(HEALTHY, "grpo", 15, schedule="cosine", lr_warmup=5, lr=1e-3),
    _job(HEALTHY, "tis", 16, staleness=1),
    _job(HEALTHY, "bnpo", 17, group_size=16, prompts=8),
    _job(HEALTHY, "two_sided", 18, minibatches=4),
    _job(HEALTHY, "grpo", 19, {"kl.coef": 0.1}, temperature=1.2),
)
_LARGE_STEPS: Mapping[str, Any] = {"epochs": 4, "minibatches": 4, "lr": 1e-3}
_SICK = (
    _job("lr_high", "dapo", 100, lr=5e-2),
    _job("lr_high", "grpo", 101, lr=5e-2),
    _job("lr_high", "gspo", 102, lr=2e-2),
    _job("lr_high", "reinforce", 103, lr=2e-2, advantage="reinforce_pp"),
    _job("lr_low", "dapo", 104, lr=5e-7),
    _job("lr_low", "grpo", 105, lr=5e-7),
    _job("lr_low", "cispo", 106, lr=5e-7),
    _job("lr_low", "ppo", 107, lr=5e-7, advantage="gae"),
    _job("entropy", "dapo", 108, {"entropy_coef": -10.0}),
    _job("entropy", "grpo", 109, {"entropy_coef": -10.0}, lr=1e-3),
    _job("entropy", "cispo", 110, {"entropy_coef": -30.0}),
    _job("entropy", "reinforce", 111, lr=1e-2, advantage="reinforce_pp"),
    _job("dead_groups", "dapo", 112, warmup_steps=0),
    _job("dead_groups", "gspo", 113, reward=":never"),
    _job("dead_groups", "grpo", 114, reward=":never"),
    _job("dead_groups", "cispo", 115, reward=":always"),
    _job("clip", "dapo", 116, {"trust.eps_high": 1e-4}, **_LARGE_STEPS),
    _job("clip", "dapo", 117, {"trust.eps_low": 1e-4}, **_LARGE_STEPS),
    _job("clip", "grpo", 118, {"trust.eps_high": 1e-4}, **_LARGE_STEPS),
    _job("clip", "bnpo", 119, {"trust.eps_low": 1e-4}, **_LARGE_STEPS),
    _job("drift", "grpo", 120, {"kl.coef": 0.0}, reward=":nines"),
    _job("drift", "grpo", 121, {"kl.coef": 0.0}, reward=":nines", lr=1e-3),
    _job("drift", "grpo", 122, {"kl.coef": 0.0}, reward=":coin", lr=3e-3),
    _job("drift", "grpo", 123, {"kl.coef": 0.0}, reward=":coin", lr=2e-3, epochs=2),
    _job("spike", "dapo", 124, advantage=":outlier_group"),
    _job("spike", "grpo", 125, advantage=":outlier_group"),
    _job("spike", "dr_grpo", 126, HORIZON, reward=":one_outlier", advantage=":counted"),
    _job("spike", "cispo", 127, reward=":one_outlier", advantage=":counted"),
    _job("truncation", "dapo", 128, max_new_tokens=4),
    _job("truncation", "grpo", 129, max_new_tokens=5),
    _job("truncation", "gspo", 130, max_new_tokens=4, overlong="penalise"),
    _job("length", "dapo", 131, reward=":length", max_new_tokens=48),
    _job("length", "grpo", 132, reward=":length", max_new_tokens=32),
    _job("length", "gpg", 133, reward=":length", advantage="gpg", max_new_tokens=48),
    _job("random", "dapo", 134, reward=":coin"),
    _job("random", "grpo", 135, reward=":coin"),
    _job("random", "gspo", 136, reward=":coin"),
    _job("nan", "dapo", 137, advantage=":nan_once"),
    _job("nan", "grpo", 138, advantage=":nan_from_then_on"),
    _job("nan", "dapo", 139, advantage=":without_epsilon", nonfinite_limit=10_000),
)
JOBS = _HEALTHY + _SICK


def name_of(job: Job) -> str:
    """The folder of a run: seeds are different, so that names are."""
    return f"{job.study}-{job.preset}-{job.seed}"
