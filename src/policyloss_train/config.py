"""The options of a training run: one flat, typed set, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

from policyloss.commands import (
    LARGEST,
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
# The default of an option that depends on the model: `TrainConfig` replaces it.
FOLLOWS: Any = None
if TYPE_CHECKING:
    Rate = float
    Longest = int
else:
    # Far beyond rates that can learn, and far below numbers that overflow.
    why = ": AdamW moves each weight by about that much in every update"
    Rate = Annotated[float | None, Within(least=0, most=1e3, why=why)]
    Longest = Annotated[int | None, Within(least=1)]


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model by reinforcement learning with any policy loss."""

    # What is trained, and where it is written
    loss: str = "dapo"
    """A preset's name, the path of a JSON file that holds a LossSpec, or code of your own,
    module:name or path/to/file.py:name: a LossSpec, or a function of Tokens. Change a part with
    --loss.SLOT.OPTION VALUE, for example --loss.trust.eps-high 0.28 or --loss.entropy-coef 0.01."""
    task: str = "sort"
    """The built-in task, reasoning_gym:NAME, or the path of a .jsonl file with "prompt" (or
    "messages") and "answer" in every line."""
    reward: str | None = None
    """How a .jsonl task is scored: exact, math, or a function of your own, module:function or
    path/to/file.py:function."""
    success: float | None = None
    """The smallest reward that counts as right: accuracy is the share of completions that reach
    it. By default that of the task, which is 1."""
    reward_timeout: NotNegative = 60.0
    """Seconds that one call of the reward may take; what takes longer has failed. 0 is no limit."""
    model: str = "tiny"
    """"tiny" makes a small model for the task on the spot, and "tiny32" one that vLLM can run on a
    CPU; else a local folder or a hub name of a causal language model."""
    teacher: Path | None = None
    """A teacher with the same tokenizer: the folder of a model, or a run directory. The loss reads
    it (--loss gkd, opd_kl, …); if it does not, the teacher speaks through the advantages."""
    teacher_coef: NotNegative = 1.0
    """How much the teacher counts in the advantages; in a loss that reads it, --loss.kl.coef."""
    reward_coef: Annotated[float | None, Within(least=0)] = None
    """How much the advantages of the rewards count; by default 1, and 0 with a teacher."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model. Never read from a run directory: name it again
    to resume or evaluate."""
    system_prompt: str | None = None
    """The first message of every prompt that has none of its own. Plain prompts become the messages
    of a user."""
    chat_template: Path | None = None
    """A file with the chat template that prompts are written with, in place of the tokenizer's own.
    Plain prompts become the messages of a user."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, beside the end token; it is cut before them."""
    unusable: Literal["refuse", "skip"] = "refuse"
    """What to do about prompts that the model cannot continue, such as too long ones: refuse to
    start and name them, or leave them out and name them."""
    config: Path | None = None
    """A TOML file with options, such as lr = 1e-6; those on the command line win."""
    like: Path | None = None
    """The directory of a run whose options are the starting point; those in --config and on the
    command line win."""
    out: Path = Path("runs/latest")
    """The run directory. One that holds a run is continued with --resume, and never overwritten;
    without --out, a new run goes into a directory beside it."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, with the options it was started with."""
    extend: int | None = None
    """With --resume: train until this many steps are done,
    if they are more than the run was started for."""
    steps: Count = 60
    """Training steps: each samples once and updates epochs × minibatches times."""
    seed: Annotated[int, Within(least=0, below=2**32)] = 0
    """Everything random follows from it."""

    # Sampling
    prompts: Count = 16
    """Prompts per step."""
    group_size: Count = 8
    """Completions of each prompt."""
    max_new_tokens: Longest = FOLLOWS
    """Longest completion; one that has not ended by then is cut. 16 for the built-in model; any
    other needs it."""
    temperature: Annotated[
        float, Within(above=0, why=": at 0, all completions of a prompt would be equal")
    ] = 1.0
    """Of the sampler and of the policy that is trained."""
    top_p: Annotated[float, Within(above=0, most=1)] = 1.0
    """Sample from the most likely tokens that hold this much probability; 1 is off."""
    top_k: Whole = 0
    """Sample from this many most likely tokens; 0 is off."""
    sampling_mask: bool = True
    """With --top-p or --top-k: learn with the tokens that they kept. The log-probabilities of the
    learner are then over the tokens that each was drawn from, and the ratio of an unchanged policy
    is 1."""
    rollout_logp: Literal["processed", "raw"] = "processed"
    """With --top-p or --top-k: what the sampler's log-probabilities are over, the tokens that they
    keep, or all tokens; raw goes with --no-sampling-mask, where the learner's are over all, too."""
    sampling_tokens: Count = 16384
    """Tokens of one batch of the sampler, prompts and completions together."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts in their place."""
    dynamic_tries: Count = 4
    """How often dynamic sampling draws before it is content with fewer groups."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """Completions that were cut: train on them as they are, take them out of the loss,
    or give them reward −1."""
    staleness: Whole = 0
    """Train on completions that were sampled this many steps ago; from 1 on, sampling goes on while
    the policy learns."""
    rollout: str = "built-in"
    """What samples: the built-in sampler; vllm, in this process; the addresses of running vLLM
    servers, http://host:port[,…]; or an engine of your own, module:factory (docs/rollout.md)."""
    rollout_timeout: Positive = 120.0
    """The time-out of a server for one prompt in seconds, retries included."""
    rollout_memory: Annotated[float, Within(above=0, below=1)] = 0.3
    """Share of the GPU's memory that vllm in this process may take."""

    # Advantages
    advantage: str | None = None
    """How rewards become advantages: gae (with a critic), grpo, dr_grpo, rloo, …, or a function of
    your own, module:function or path/to/file.py:function; by default those that the loss is defined
    with, and grpo if it goes with any."""
    passk: Count = 4
    """k of the advantage passk_combinatorial."""
    gamma: Share = 1.0
    """Discount of gae and reinforce_pp."""
    lam: Share = 1.0
    """λ of gae."""
    old_logp: Literal["recompute", "rollout"] = "recompute"
    """Where old_logp comes from: a forward of the policy before its first update (decoupled),
    or the sampler (bypass)."""

    # Learning
    epochs: Count = 1
    """How often a step's completions are gone through."""
    minibatches: Count = 2
    """Optimizer steps in each epoch."""
    micro_tokens: Count = 4096
    """Tokens of one forward and backward; smaller needs less memory,
    and changes no number but rounding."""
    lr: Rate = FOLLOWS
    """Learning rate of the policy; by default 1e-6, 1e-5 with --lora-rank, and 5e-4 for the
    built-in model."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What becomes of the learning rate over the steps of the run."""
    lr_warmup: Whole = 0
    """Steps over which it rises from 0."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW of torch, or that of the package torchao with moments of 8 bits, which take a quarter
    of the memory; its steps differ slightly, and it shards nothing (no --parallel fsdp)."""
    weight_decay: NotNegative = 0.0
    """The weight decay of AdamW."""
    betas: Annotated[tuple[float, float], Within(least=0, below=1)] = (0.9, 0.99)
    """The betas of AdamW."""
    grad_clip: NotNegative = 1.0
    """Largest norm of a gradient; 0 is off."""
    nonfinite_limit: Count = 3
    """An update whose loss or gradient is not finite is skipped; after this many in a row the run
    stops."""
    attention: Literal["auto", "varlen", "flash", "rows", "alone"] = "auto"
    """How sequences of different lengths go through the model: in one row by an attention for
    variable lengths (varlen, of torch 2.10 or later; or flash, of the package flash-attn; both on
    CUDA and in half precision), in padded rows, or one at a time (alone), which is slow and right
    for any model. By default the fastest of the first three that gives the model's own numbers; the
    first lines of the run name it."""
    gradient_checkpointing: bool = False
    """Compute the activations of a layer again in the backward instead of keeping them: less
    memory, more time, the same numbers."""
    compile: bool = False
    """Compile the model's blocks for learning (torch.compile). The first step takes longer, by up
    to a minute; numbers change by rounding."""
    lora_rank: Whole = 0
    """Train adapters of this rank (LoRA, by the package peft) and nothing else; 0 trains all
    weights. The model without adapters is the reference."""
    lora_alpha: Annotated[float | None, Within(above=0)] = None
    """Adapters are multiplied by this over their rank; by default twice the rank."""
    lora_target: tuple[str, ...] = ()
    """The names of the layers that get adapters, such as q_proj v_proj; by default every linear
    layer but the head."""
    head: Literal["fused", "logits"] = "fused"
    """How the loss gets from hidden states to log-probabilities: window by window without keeping
    logits, or by all logits."""

    # The critic, of losses with the advantage gae
    critic_lr: Rate = FOLLOWS
    """Learning rate of the critic, which is trained whole; by default 1e-5, and 1e-3 for the
    built-in model."""
    value_clip: NotNegative = 0.2
    """How far a value may move from its old one before its loss is clipped; 0 is off."""
    critic_steps: Whole = 0
    """First steps in which only the critic is trained."""

    # The start, the weights and the machine
    warmup_steps: int | None = None
    """Supervised steps on the task's own answers before the first sample; by default some for the
    model "tiny" on the built-in task, and none otherwise."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the weights. In bfloat16 the optimizer keeps each weight in float32 as well, so that small
    steps add up."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: every rank holds the model, or a part of it."""
    rank_timeout: Positive = 600.0
    """Under torchrun: seconds after which a rank that waits for another gives up and names it."""
    heartbeat: NotNegative = 60.0
    """Seconds in one place after which the run says where it is and what it waits for;
    0 is never."""

    # Evaluations, checkpoints and logs
    eval_every: Whole = 20
    """Steps between evaluations on held-out prompts; 0 evaluates at the end alone."""
    eval_prompts: Count = 256
    """Held-out prompts of an evaluation."""
    checkpoint_every: Whole = 20
    """Steps between checkpoints; one is written at the end, and when the run is interrupted."""
    keep: Count = 2
    """Checkpoints that are kept."""
    rollouts_every: Whole = 10
    """Steps between samples in rollouts.jsonl, token by token; 0 writes none. The groups of the
    task's first prompts are stored whenever they are trained on, so that they can be followed."""
    rollouts_rows: Whole = 32
    """Completions of such a sample: whole groups, at least one, chosen for the spread of their
    rewards."""
    rollouts_mib: Positive = 256.0
    """Largest size of rollouts.jsonl, and of answers.jsonl, in MiB. Every sample may take its share
    of what is left, so that they cover the whole run."""
    track: Literal["wandb", "trackio"] | None = None
    """Log to this tracker too, if it is installed."""

    def __post_init__(self) -> None:
        from policyloss_train.preflight import option_problems

        for name, default in by_model(self).items():
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
        """These options with the advantages that the preset nearest to the loss is defined with,
        unless others are named; an error where options and loss contradict each other.
        """
        from policyloss_train.preflight import loss_problems

        config = replace(self, advantage=self.advantage or following(self, spec)["advantage"])
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
        """The name of the advantage estimator; `with_loss` sets that of the loss."""
        return self.advantage or "grpo"

    @property
    def reads_teacher(self) -> bool:
        """Whether the advantages read a teacher."""
        return self.estimator in BY_TEACHER

    @property
    def reward_estimator(self) -> str:
        """The estimator of the part of the advantages that comes from rewards."""
        return "grpo" if self.reads_teacher else self.estimator

    @property
    def reward_share(self) -> float:
        """What the advantages of rewards are multiplied by."""
        if self.reward_coef is not None:
            return self.reward_coef
        return 1.0 if self.teacher is None else 0.0

    @property
    def with_critic(self) -> bool:
        """Whether values are learned."""
        return self.estimator == "gae"

    @property
    def replays_support(self) -> bool:
        """Whether the learner's log-probabilities are over the tokens that the sampler kept."""
        return self.sampling_mask and (self.top_p < 1 or self.top_k > 0)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            name: str(x) if isinstance(x, Path) else x
            for name, x in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainConfig:
        """Back from `to_dict`; an unknown option is an error."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in data:
            if name not in known:
                raise InputError(unknown_name("option", name, known))
        return cls(**typed(cls, data))


def by_model(config: TrainConfig) -> dict[str, Any]:
    """The defaults that follow the model; None is an option that must be named. A pretrained model
    learns in small steps, and the length of its completions depends on the task.
    """
    from policyloss_train.models import TINY

    if config.model in TINY:
        return {"lr": 5e-4, "critic_lr": 1e-3, "max_new_tokens": 16}
    lr = 1e-5 if config.lora_rank else 1e-6
    return {"lr": lr, "critic_lr": 1e-5, "max_new_tokens": None}


def following(config: TrainConfig, spec: LossSpec) -> dict[str, Any]:
    """The defaults that follow the model and the loss."""
    from policyloss.catalogue.nearest import nearest_preset

    preset, _ = nearest_preset(spec)
    defined_with = None if preset is None else preset.advantage
    return {**by_model(config), "advantage": defined_with or "grpo"}


# What a file must hold, by type.
_WORDS = {
    int: "a whole number below 2⁶³",
    float: "a finite number",
    bool: "true or false",
    Path: "a path",
    str: "a string",
}
_hints = cache(get_type_hints)


def typed(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values from a file by name, each as the dataclass `options` declares it: a path from a
    string, a tuple from a list.
    """
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
    else:
        fits, wanted = _fits(kind, value), _WORDS[kind]
    if not fits:
        raise _wrong(name, value, wanted)
    return Path(value) if kind is Path else value


def _fits(kind: type, value: Any) -> bool:
    if kind is int:
        return type(value) is int and abs(value) <= LARGEST
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return isinstance(value, (str, Path) if kind is Path else kind) and "\0" not in str(value)


def _wrong(name: str, value: Any, wanted: str) -> InputError:
    shown = (
        f"{type(value).__name__} of {value.bit_length()} bits"
        if isinstance(value, int) and abs(value) > LARGEST
        else repr(value)
    )
    return InputError(f"the option {name!r} is {shown[:80]}; it must be {wanted}.")
