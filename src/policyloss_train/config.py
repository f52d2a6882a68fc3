"""The options of a training run: one flat, typed set, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from policyloss.commands import (
    Count,
    NotNegative,
    Positive,
    Whole,
    Within,
    check_numbers,
    flag,
    without_none,
)
from policyloss.errors import InputError, unknown_name

if TYPE_CHECKING:  # torch is not needed to print the help
    from policyloss.spec import LossSpec

BY_TEACHER = ("opd", "iw_opd")  # advantages that read a teacher
Share = Annotated[float, Within(least=0, most=1)]
# A placeholder for a default that depends on the model; `TrainConfig` replaces it.
FOLLOWS: Any = None
if TYPE_CHECKING:
    Rate = float
    Longest = int
else:
    # Far above useful rates, and far below numbers that overflow.
    why = ": AdamW moves each weight by about that much in every update"
    Rate = Annotated[float | None, Within(least=0, most=1e3, why=why)]
    Longest = Annotated[int | None, Within(least=1)]


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model by reinforcement learning with any policy loss."""

    # Loss, task, model and run directory
    loss: str = "dapo"
    """Name of a preset, path of a JSON file with a LossSpec, or your own code: a LossSpec or a
    function of Tokens, as module:name or path/to/file.py:name. Change a part with
    --loss.SLOT.OPTION VALUE, for example --loss.trust.eps-high 0.28 or --loss.entropy-coef 0.01."""
    task: str = "sort"
    """A built-in task (sort, or lookup, which calls a tool), reasoning_gym:NAME, or the path of a
    .jsonl file with "prompt" (or "messages") and "answer" in every line."""
    reward: str | None = None
    """Reward of a .jsonl task: exact, math, or your own function, module:function or
    path/to/file.py:function."""
    success: float | None = None
    """Smallest reward that counts as correct. Accuracy is the share of completions that reach it.
    The default is 1."""
    reward_timeout: NotNegative = 60.0
    """Time limit for one call of the reward in seconds; a slower call counts as failed. 0 is no
    limit."""
    model: str = "tiny"
    """Folder or hub name of a causal language model; or "tiny", a small new model for the task, or
    "tiny32", one that vLLM can run on a CPU."""
    teacher: Path | None = None
    """Folder of a teacher model, or a run directory. The teacher must have the same tokenizer. A
    loss with a teacher term (gkd, opd_kl, …) reads it; with any other loss, the advantages do."""
    teacher_coef: NotNegative = 1.0
    """Weight of the teacher in the advantages. For a loss that reads the teacher, set
    --loss.kl.coef instead."""
    reward_coef: Annotated[float | None, Within(least=0)] = None
    """Weight of the rewards in the advantages. The default is 1, and 0 with a teacher."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model. The run directory does not store this: repeat
    it to resume or evaluate."""
    system_prompt: str | None = None
    """System message for every prompt that has none. Plain prompts become user messages."""
    chat_template: Path | None = None
    """File with a chat template that replaces the tokenizer's. Plain prompts become user
    messages."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, in addition to the end token. They are cut off."""
    unusable: Literal["refuse", "skip"] = "refuse"
    """If the model cannot continue some prompts, because they are too long, for example: refuse
    lists them and ends the run; skip lists them and leaves them out."""
    config: Path | None = None
    """TOML file with options, such as lr = 1e-6. Options on the command line take precedence."""
    like: Path | None = None
    """Start from the options of this run directory. Options in --config and on the command line
    take precedence."""
    out: Path = Path("runs/latest")
    """The run directory. A run is never overwritten: continue it with --resume. Without --out, a
    new run uses runs/latest, or runs/latest-2, runs/latest-3, … if that holds a run."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, with its options."""
    extend: int | None = None
    """With --resume: new total number of steps, to train longer."""
    steps: Count = 60
    """Training steps. Each step samples once and updates the weights epochs × minibatches times."""
    seed: Annotated[int, Within(least=0, below=2**32)] = 0
    """Seed of everything random."""

    engine: str = "built-in"
    """Where the policy learns and samples: built-in, in this process; or tinker:URL, on a server
    that speaks the Tinker API and serves --model (docs/scale.md)."""

    # Sampling
    prompts: Count = 16
    """Prompts per step."""
    group_size: Count = 8
    """Completions per prompt."""
    max_new_tokens: Longest = FOLLOWS
    """Longest completion in tokens; longer ones are cut. The default is 16 for the built-in models;
    other models require this option."""
    temperature: Annotated[
        float, Within(above=0, why=": at 0, all completions of a prompt would be equal")
    ] = 1.0
    """Temperature of the sampler and of the trained policy."""
    top_p: Annotated[float, Within(above=0, most=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is off."""
    top_k: Whole = 0
    """Sample from this many of the likeliest tokens; 0 is off."""
    sampling_mask: bool = True
    """With --top-p or --top-k: compute the learner's log-probabilities over the tokens that they
    kept, so that the ratio of an unchanged policy is 1."""
    rollout_logp: Literal["processed", "raw"] = "processed"
    """With --top-p or --top-k: compute the sampler's log-probabilities over the tokens that they
    kept (processed) or over all tokens (raw). raw requires --no-sampling-mask."""
    sampling_tokens: Count = 16384
    """Tokens per batch of the sampler, prompts and completions together."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts instead."""
    dynamic_tries: Count = 4
    """Largest number of draws per step of dynamic sampling; then the step has fewer groups."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """For completions that were cut at --max-new-tokens: keep trains on them, mask leaves them out
    of the loss, penalise sets their reward to −1."""
    staleness: Whole = 0
    """Train on completions that were sampled this many steps ago. If this is 1 or more, sampling
    runs while the policy learns."""
    rollout: str = "built-in"
    """Sampling engine: built-in; vllm, in this process; the addresses of running vLLM servers,
    http://host:port[,…]; or your own engine, module:factory (docs/rollout.md)."""
    rollout_timeout: Positive = 120.0
    """Time limit of the servers for a prompt in seconds, retries included; with --engine
    tinker:URL, of each call of the server."""
    rollout_memory: Annotated[float, Within(above=0, below=1)] = 0.3
    """With --rollout vllm: share of the GPU's memory that vLLM may use."""

    # Advantages
    advantage: str | None = None
    """Advantage estimator: gae (with a critic), grpo, dr_grpo, rloo, turn_loo, …, or your own
    function, module:function or path/to/file.py:function. The default is the one that the loss is
    defined with, or grpo if it has none."""
    passk: Count = 4
    """The number k of the advantage passk_combinatorial."""
    gamma: Share = 1.0
    """Discount of gae and reinforce_pp, and of turn_loo by turn."""
    lam: Share = 1.0
    """λ of gae."""
    old_logp: Literal["recompute", "rollout"] = "recompute"
    """Source of old_logp: recompute runs the policy before its first update (decoupled), rollout
    takes the sampler's numbers (bypass)."""

    # Learning
    epochs: Count = 1
    """Passes over the completions of a step."""
    minibatches: Count = 2
    """Optimizer steps per epoch."""
    micro_tokens: Count = 4096
    """Tokens per forward and backward. Fewer need less memory and change numbers only by
    rounding."""
    lr: Rate = FOLLOWS
    """Learning rate of the policy. The default is 1e-6, 1e-5 with --lora-rank, and 5e-4 for the
    built-in models."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over the steps of the run."""
    lr_warmup: Whole = 0
    """Number of first steps in which the learning rate rises from 0 to --lr."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw is torch's AdamW. adamw8bit comes from torchao: its 8-bit moments take a
    quarter of the memory, its steps differ slightly, and it does not work with --parallel fsdp."""
    weight_decay: NotNegative = 0.0
    """AdamW weight decay."""
    betas: Annotated[tuple[float, float], Within(least=0, below=1)] = (0.9, 0.99)
    """AdamW betas."""
    grad_clip: NotNegative = 1.0
    """Largest norm of the gradient of an update; larger ones are scaled down. 0 is off."""
    nonfinite_limit: Count = 3
    """An update whose loss or gradient is not finite is skipped. The run stops after this many in a
    row."""
    attention: Literal["auto", "varlen", "flash", "rows", "alone"] = "auto"
    """How sequences of different lengths go through the model: in one row with an attention for
    variable lengths (varlen of torch 2.10 or later, flash of the package flash-attn; both need CUDA
    and half precision), in padded rows (rows), or one at a time (alone), which is slow and works
    with any model. auto takes the fastest of the first three that reproduces the model's numbers;
    the run prints its name at the start."""
    gradient_checkpointing: bool = False
    """Recompute the activations of a layer in the backward instead of storing them: less memory,
    more time, the same numbers."""
    compile: bool = False
    """Compile the model's blocks for learning (torch.compile). The first step takes up to a minute
    longer; numbers change by rounding."""
    lora_rank: Whole = 0
    """Train only adapters of this rank (LoRA, with the package peft); 0 trains all weights. The
    reference is the model without adapters."""
    lora_alpha: Annotated[float | None, Within(above=0)] = None
    """Scale of the adapters: they are multiplied by this number over their rank. The default is
    twice the rank."""
    lora_target: tuple[str, ...] = ()
    """Names of the layers that get adapters, such as q_proj v_proj. The default is every linear
    layer except the head."""
    head: Literal["fused", "sparse", "logits"] = "fused"
    """How the loss computes log-probabilities from hidden states: fused works in windows and stores
    no logits, sparse does too and estimates the gradient without bias from a few entries of each
    token, which is faster on a GPU for a policy that is sure of most tokens, logits stores all of
    them."""

    # The critic of the advantage gae
    critic_lr: Rate = FOLLOWS
    """Learning rate of the critic, whose weights are all trained. The default is 1e-5, and 1e-3 for
    the built-in models."""
    value_clip: NotNegative = 0.2
    """Distance from the old value beyond which the value loss is clipped; 0 is off."""
    critic_steps: Whole = 0
    """Number of first steps that train only the critic."""

    # Warm-up, weights and machine
    warmup_steps: int | None = None
    """Supervised steps on the task's answers before training. The default is 200 for a built-in
    model on the task sort, 400 on lookup, and 0 otherwise."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the weights. With bfloat16 the optimizer also keeps each weight in float32, so that
    small steps add up."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: ddp puts the complete model on every rank, fsdp a part of it."""
    rank_timeout: Positive = 600.0
    """Under torchrun: seconds after which a rank stops waiting for another and reports it."""
    heartbeat: NotNegative = 60.0
    """Seconds without progress after which the run prints its current phase and the ranks that are
    behind; 0 is never."""

    # Evaluations, checkpoints and logs
    eval_every: Whole = 20
    """Steps between evaluations on held-out prompts; 0 evaluates only at the end."""
    eval_prompts: Count = 256
    """Held-out prompts per evaluation."""
    checkpoint_every: Whole = 20
    """Steps between checkpoints. The run also writes one at its end and when it is interrupted."""
    keep: Count = 2
    """Number of checkpoints to keep."""
    rollouts_every: Whole = 10
    """Steps between samples of completions in rollouts.jsonl, token by token; 0 writes none. Groups
    of the task's first two prompts are always stored, so that you can follow them."""
    rollouts_rows: Whole = 32
    """Completions per sample in rollouts.jsonl: complete groups, at least one, chosen for the
    spread of their rewards."""
    rollouts_mib: Positive = 256.0
    """Largest size of rollouts.jsonl, and of answers.jsonl, in MiB. Each sample may use its share
    of the remaining space."""
    track: Literal["wandb", "trackio"] | None = None
    """Also send the numbers to this tracker, whose package must be installed."""

    def __post_init__(self) -> None:
        from policyloss_train.preflight import option_problems

        for name, default in model_defaults(self).items():
            if getattr(self, name) is None and default is None:
                raise InputError(
                    f"--model {self.model} needs {flag(name)}, the longest completion: 256 for "
                    "short answers, 1024 or more for a model that reasons first."
                )
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        check_numbers(self)
        for problem in option_problems(self):
            raise InputError(problem)

    def with_loss(self, spec: LossSpec) -> TrainConfig:
        """These options with the loss's own advantage by default; raises if they contradict it."""
        from policyloss_train.preflight import loss_problems

        config = replace(self, advantage=self.advantage or defaults_of(self, spec)["advantage"])
        for problem in loss_problems(config, spec):
            raise InputError(problem)
        return config

    def headline(self, spec: LossSpec) -> str:
        """The first line of a run: its loss, advantages, critic and learning rate."""
        from policyloss.catalogue.nearest import nearest_preset

        preset, exact = nearest_preset(spec)
        loss, advantages = self.loss, self.estimator
        if preset is not None and (not exact or preset.name != loss):
            loss += f" (the preset {preset.name}{'' if exact else ', changed'})"
        if preset is not None and preset.advantage not in (None, self.estimator):
            source = preset.sources["advantage"]
            advantages += f" (the loss is defined with {preset.advantage}: {source})"
        critic = f"a critic (learning rate {self.critic_lr:g})" if self.with_critic else "no critic"
        return f"loss {loss}; advantages {advantages}; {critic}; learning rate {self.lr:g}"

    @property
    def estimator(self) -> str:
        """The name of the advantage estimator; `with_loss` sets the default."""
        return self.advantage or "grpo"

    @property
    def reads_teacher(self) -> bool:
        """Whether the advantages read a teacher."""
        return self.estimator in BY_TEACHER

    @property
    def reward_estimator(self) -> str:
        """The estimator for the advantages of the rewards."""
        return "grpo" if self.reads_teacher else self.estimator

    @property
    def reward_share(self) -> float:
        """The weight of the rewards in the advantages."""
        if self.reward_coef is not None:
            return self.reward_coef
        return 1.0 if self.teacher is None else 0.0

    @property
    def with_critic(self) -> bool:
        """Whether a critic learns values."""
        return self.estimator == "gae"

    @property
    def replays_support(self) -> bool:
        """Whether the learner's log-probabilities are over the tokens that the sampler kept."""
        return self.sampling_mask and (self.top_p < 1 or self.top_k > 0)

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON values."""
        options = dataclasses.asdict(self)
        return {name: str(x) if isinstance(x, Path) else x for name, x in options.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; raises for an unknown option."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in data:
            if name not in known:
                raise InputError(unknown_name("option", name, known))
        return cls(**convert_types(cls, data))


def model_defaults(config: TrainConfig) -> dict[str, Any]:
    """The defaults that depend on the model; None means that the user must set the option. A
    pretrained model learns in small steps, and the length of its completions depends on the task.
    """
    from policyloss_train.models import TINY

    if config.model in TINY:
        return {"lr": 5e-4, "critic_lr": 1e-3, "max_new_tokens": 16}
    lr = 1e-5 if config.lora_rank else 1e-6
    return {"lr": lr, "critic_lr": 1e-5, "max_new_tokens": None}


def defaults_of(config: TrainConfig, spec: LossSpec) -> dict[str, Any]:
    """The defaults that depend on the model and the loss."""
    from policyloss.catalogue.nearest import nearest_preset

    preset, _ = nearest_preset(spec)
    defined_with = None if preset is None else preset.advantage
    return {**model_defaults(config), "advantage": defined_with or "grpo"}


# The name of each type in an error.
_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false"}
_WORDS |= {Path: "a path", str: "a string"}
_hints = cache(get_type_hints)


def convert_types(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from a file to the types of the dataclass `options`, such as str to Path."""
    hints = _hints(options)
    return {name: _as(hints[name], value, name) for name, value in values.items()}


def _as(kind: Any, value: Any, name: str) -> Any:
    if value is None and without_none(kind) is not kind:
        return None
    kind = without_none(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        ragged = inner[-1] is Ellipsis
        if not isinstance(value, (list, tuple)) or not (ragged or len(value) == len(inner)):
            raise _wrong(name, value, "a list" if ragged else f"a list of {len(inner)} numbers")
        kinds = repeat(inner[0], len(value)) if ragged else inner
        return tuple(_as(one, x, name) for one, x in zip(kinds, value, strict=True))
    if origin is Literal:
        fits, wanted = isinstance(value, str) and value in inner, "one of " + ", ".join(inner)
    elif kind in (int, float):  # `check_numbers` checks their size
        fits, wanted = type(value) in (int, kind), _WORDS[kind]
    else:
        accepted = (str, Path) if kind is Path else kind
        fits, wanted = isinstance(value, accepted) and "\0" not in str(value), _WORDS[kind]
    if not fits:
        raise _wrong(name, value, wanted)
    return Path(value) if kind is Path else value


def _wrong(name: str, value: Any, wanted: str) -> InputError:
    return InputError(f"the option {name!r} is {value!r:.80}; it must be {wanted}.")
