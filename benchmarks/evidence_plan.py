"""The runs of `benchmarks.evidence`: losses, options and reasons."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from policyloss.catalogue import PRESETS
from policyloss.errors import InputError, unknown_name
from policyloss.spec import LossSpec
from policyloss_train.arguments import read_spec
from policyloss_train.config import TrainConfig

GOAL = 0.9  # of held-out prompts
PRESET_STUDY, CLIP_STUDY = "presets", "dual_clip"  # the latter once for each of `CLIP_RATES`

# One setting for all: the trainer's defaults, with an evaluation every 5 steps. AdamW divides by
# the size of the gradient, so that losses whose values differ a thousandfold (a sum and a mean over
# tokens) need no learning rates of their own.
COMMON: Mapping[str, Any] = {
    "steps": 40,
    "eval_every": 5,
    "checkpoint_every": 0,
    "rollouts_every": 0,
    "device": "cpu",
}


@dataclass(frozen=True)
class Plan:
    """How a preset is run. options: of `TrainConfig`, in addition to `COMMON`. changes: of the
    loss, as after `--loss.`. why: in words.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


_CRITIC = Plan({"advantage": "gae"}, why="PPO is an actor and a critic")
_GROUPS = Plan({"advantage": "grpo"}, why="advantages of GRPO, as its authors use it")
_CENTRED = Plan({"advantage": "dr_grpo"}, why="reward minus the group's mean")
_STALE = Plan(
    {"advantage": "grpo", "staleness": 1},
    why="corrects a mismatch, so completions are one step old",
)

# The teacher is trained here by reinforcement: the last weights of this run, which starts from
# other weights than any student. Students see no reward, unless their plan sets one.
TEACHER = "out/evidence-teacher"
TEACHER_OPTIONS: Mapping[str, Any] = {"loss": "dapo", "seed": 100, "steps": 60}
_OF_TEACHER: Mapping[str, Any] = {"advantage": "grpo", "teacher": TEACHER, "steps": 20}
_TAUGHT = Plan(_OF_TEACHER, why="learns from the teacher alone, on its own completions")
_SELF_TAUGHT = Plan(
    _OF_TEACHER, why="learns from the teacher alone; the teacher is another model here"
)

# Every preset can train by itself, so none is left out;
# a new preset without a line here fails a test.
PLANS: Mapping[str, Plan] = {
    "ppo": _CRITIC,
    "ppo_dual_clip": _CRITIC,
    "grpo": _GROUPS,
    "dr_grpo": Plan(
        {"advantage": "dr_grpo"},
        {"aggregate.horizon": TrainConfig().max_new_tokens},
        why=(
            "its own advantages; the horizon is the longest completion here, as the preset's note "
            "asks"
        ),
    ),
    "dapo": Plan(
        {"advantage": "grpo", "dynamic_sampling": True}, why="with the paper's dynamic sampling"
    ),
    "bnpo": _GROUPS,
    "gspo": _GROUPS,
    "gspo_token": _GROUPS,
    "gspo_turn": _GROUPS,
    "cispo": _GROUPS,
    "cispo_unified": _GROUPS,
    "rollout_is": Plan({"advantage": "grpo"}, why="measures against the sampler itself"),
    "rec_one_side": _CENTRED,
    "sppo_token": _GROUPS,
    "sapo": _GROUPS,
    "fipo": _GROUPS,
    "gmpo": _GROUPS,
    "gpg": Plan({"advantage": "gpg"}, why="its own advantages"),
    "reinforce": Plan(
        {"advantage": "reinforce_pp"}, why="no groups: returns normalised over the batch"
    ),
    "importance_sampling": _CENTRED,
    "tis": _STALE,
    "seq_tis": _STALE,
    "icepop": _STALE,
    "seq_mask_tis": Plan(
        {"advantage": "grpo"},
        why=(
            "its band of 0.1 % is that of two engines with the same weights, so completions are "
            "fresh"
        ),
    ),
    "opsm": _STALE,
    "decoupled_ppo": Plan(
        {"advantage": "gae", "staleness": 1},
        why="an actor, a critic, and completions that are one step old",
    ),
    "m2po": _STALE,
    "clip_cov": _GROUPS,
    "kl_cov": _GROUPS,
    "dppo_tv": _GROUPS,
    "dppo_kl": _GROUPS,
    "prime_rl": Plan(
        {"advantage": "dr_grpo"},
        why="measures against the sampler itself; reward minus the group's mean",
    ),
    "ipo": Plan(
        {"advantage": "dr_grpo"},
        why="measures against the sampler itself; reward minus the group's mean",
    ),
    "dro": _CENTRED,
    "a2po": Plan({"advantage": "dr_grpo"}, why="the group's mean reward stands for V*"),
    "sppo": Plan({"advantage": "dr_grpo"}, why="reward minus the group's mean stands for P - 1/2"),
    "topr": _CENTRED,
    "up_grpo": _GROUPS,
    "luspo": _GROUPS,
    "vespo": _GROUPS,
    "rloo_loss": Plan({"advantage": "rloo"}, why="its own advantages"),
    "two_sided": _GROUPS,
    "aipo": Plan({"advantage": "grpo"}, why="measures against the sampler itself"),
    "opd": Plan(
        {**_OF_TEACHER, "advantage": "opd"}, why="the teacher's preference is the advantage"
    ),
    "opd_kl": _TAUGHT,
    "iw_opd": Plan(
        {**_OF_TEACHER, "advantage": "iw_opd"}, why="the teacher's preference is the advantage"
    ),
    "kdrl": Plan({**_OF_TEACHER, "reward_coef": 1.0}, why="a reward and a teacher together"),
    "sdpo": _SELF_TAUGHT,
    "opd_exact": _TAUGHT,
    "gkd": _TAUGHT,
    "gkd_forward": _TAUGHT,
    "gkd_reverse": _TAUGHT,
    "mopd_topk": Plan(
        _OF_TEACHER,
        {"kl.top": "teacher", "kl.k": 4},
        why="learns from the teacher's four most probable entries",
    ),
    "opsd": _SELF_TAUGHT,
    "sdft": _SELF_TAUGHT,
}

# Is the dual clip needed? Completions are 8 steps old, and the ratio compares with the policy that
# sampled them; two epochs of two minibatches; the norm of the gradient is not limited, which would
# hide it.
# The three losses differ only in the clip. With the second learning rate ratios grow faster.
CLIP_LOSSES = ("ppo", "ppo_dual_clip", "two_sided")
CLIP_RATES = (1e-3, 3e-3)


def clip_study(lr: float) -> str:
    """The name of the study of dual clip with this learning rate."""
    return f"{CLIP_STUDY} lr {lr:g}"


def clip_plan(lr: float) -> Plan:
    """Its settings."""
    return Plan(
        {
            "advantage": "grpo",
            "staleness": 8,
            "old_logp": "rollout",
            "epochs": 2,
            "grad_clip": 0.0,
            "lr": lr,
        },
        why="completions 8 steps old, ratios to the sampler, two epochs, gradients not clipped",
    )


@dataclass(frozen=True)
class Job:
    """One run: of a study, a preset, a seed."""

    study: str
    preset: str
    seed: int
    plan: Plan
    common: Mapping[str, Any] = field(default_factory=lambda: COMMON)

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of its result."""
        return self.study, self.preset, self.seed

    def config(self, out: Path) -> TrainConfig:
        """The options, with the run directory `out`."""
        options = {**self.common, **self.plan.options}
        if "teacher" in options:
            options["teacher"] = Path(options["teacher"])
        return TrainConfig(loss=self.preset, seed=self.seed, out=out, **options)

    @cached_property
    def spec(self) -> LossSpec:
        """The loss."""
        return read_spec(
            self.preset, [(path, json.dumps(value)) for path, value in self.plan.changes.items()]
        )

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The changed options, for a reader: of all runs, and of this one."""
        changes = {f"loss.{path}": value for path, value in self.plan.changes.items()}
        return {"common": dict(self.common), "own": {**self.plan.options, **changes}}

    @cached_property
    def fingerprint(self) -> str:
        """A digest of every option and number; a different digest means another experiment."""
        config = self.config(Path("-")).with_loss(self.spec)
        ways = ("extend", "config", "like")  # they start a run, and change none of its numbers
        options = {name: x for name, x in config.to_dict().items() if name not in ways}
        everything = json.dumps([self.study, options, self.spec.to_dict()], sort_keys=True)
        return hashlib.sha256(everything.encode()).hexdigest()[:16]


def jobs(seeds: int, only: Iterable[str] = (), common: Mapping[str, Any] = COMMON) -> list[Job]:
    """All runs, seed by seed so that every loss has a number early. only: presets, `dual_clip`,
    or nothing: all.
    """
    wanted = set(only)
    for name in wanted:
        if name not in PLANS and name != CLIP_STUDY:
            raise InputError(unknown_name("preset", name, (*PLANS, CLIP_STUDY)))
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {seeds}.")
    found = []
    for seed in range(seeds):
        chosen = [name for name in PRESETS if name in PLANS and (not wanted or name in wanted)]
        found += [Job(PRESET_STUDY, name, seed, PLANS[name], common) for name in chosen]
        if not wanted or CLIP_STUDY in wanted:
            found += [
                Job(clip_study(lr), name, seed, clip_plan(lr), common)
                for lr in CLIP_RATES
                for name in CLIP_LOSSES
            ]
    return found
