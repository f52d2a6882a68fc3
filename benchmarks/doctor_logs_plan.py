"""The runs of `benchmarks.doctor_logs`: 25 that learn, and 61 with a known fault."""

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
    """The fault of the runs of a kind. symptoms: a doctor that names one of these has found it.
    effects: others that follow from the same fault, so that naming them is no false alarm.
    """

    fault: str
    symptoms: tuple[str, ...]
    effects: tuple[str, ...] = ()


# The symptoms of a policy that was destroyed.
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
    "collapse",
    "entropy_growth",
    "gradient_growth",
    "no_gradient",
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
    "clip": Kind(
        "16 large updates per batch in a trust region too narrow on one side",
        ("clip_saturation",),
        ("no_learning", "learning_rate_high", "entropy_collapse"),
    ),
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
    "kl": Kind(
        "no KL term, a reward that leads away, and no held-out score",
        ("kl_drift",),
        ("entropy_collapse", "dead_groups", "length_growth", "truncation"),
    ),
    "growth": Kind(
        "advantages that grow by 15 % a step",
        ("gradient_growth",),
        ("gradient_spike",),
    ),
    "silent": Kind("advantages of 0 from step 6 on", ("no_gradient",), ("no_learning",)),
    "uniform": Kind("an entropy bonus that outweighs the reward", ("entropy_growth",), _ANY),
    "narrow": Kind(
        "16 large updates per batch in a trust region of 0.0001",
        ("clip_saturation",),
        ("no_learning", "learning_rate_high", "entropy_collapse"),
    ),
    "flip": Kind("advantages with the wrong sign from step 30 on", ("collapse",), _ANY),
    "critic": Kind("a critic that cannot fit the returns", ("value_error",), _ANY),
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
    _job(HEALTHY, "ppo", 20, advantage="gae", epochs=2),
    _job(HEALTHY, "ppo_dual_clip", 21, advantage="gae"),
    _job(HEALTHY, "grpo", 22, {"kl.coef": 0.0}),
    _job(HEALTHY, "grpo", 23, reward=":hundredth"),
    _job(HEALTHY, "dapo", 24, eval_every=60),
)
NARROW = {"trust.eps_high": 1e-4, "trust.eps_low": 1e-4}
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
    _job("kl", "grpo", 140, {"kl.coef": 0.0}, reward=":nines", eval_every=60),
    _job("kl", "grpo", 141, {"kl.coef": 0.0}, reward=":nines", eval_every=60, lr=1e-3),
    _job("kl", "grpo", 142, {"kl.coef": 0.0}, reward=":length", eval_every=60, lr=1e-3),
    _job("growth", "dapo", 143, advantage=":growing"),
    _job("growth", "grpo", 144, advantage=":growing"),
    _job("growth", "gspo", 145, advantage=":growing"),
    _job("silent", "dapo", 146, advantage=":silent"),
    _job("silent", "gspo", 147, advantage=":silent"),
    _job("silent", "cispo", 148, advantage=":silent"),
    _job("uniform", "dapo", 149, {"entropy_coef": 1.0}),
    _job("uniform", "grpo", 150, {"entropy_coef": 1.0}),
    _job("uniform", "cispo", 151, {"entropy_coef": 3.0}),
    _job("narrow", "dapo", 152, NARROW, **_LARGE_STEPS),
    _job("narrow", "grpo", 153, NARROW, **_LARGE_STEPS),
    _job("narrow", "bnpo", 154, NARROW, **_LARGE_STEPS),
    _job("flip", "dapo", 155, advantage=":flipped"),
    _job("flip", "grpo", 156, advantage=":flipped"),
    _job("flip", "cispo", 157, advantage=":flipped"),
    _job("critic", "ppo", 158, advantage="gae", reward=":hundredfold"),
    _job("critic", "ppo_dual_clip", 159, advantage="gae", reward=":hundredfold"),
    _job("critic", "ppo", 160, advantage="gae", critic_lr=1.0),
)
JOBS = _HEALTHY + _SICK


def name_of(job: Job) -> str:
    """The folder of a run: seeds are different, so that names are."""
    return f"{job.study}-{job.preset}-{job.seed}"
