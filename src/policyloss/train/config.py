"""What a training run is: one flat, typed set of options.
What makes no sense is refused before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from policyloss.advantage import ESTIMATORS
from policyloss.errors import InputError, unknown_name
from policyloss.presets import PRESETS
from policyloss.spec import LossSpec
from policyloss.train.help import help_text
from policyloss.train.loss_options import read_spec, split_loss_options
from policyloss.train.option_types import LARGEST, typed
from policyloss.train.user_code import is_reference

# Estimators that take rewards and groups of one step and nothing that a run does not have.
ENGINES = ("built-in", "vllm")
LARGEST_RATE = 1e3  # of a learning rate; far beyond what can learn, and far from what overflows
BY_TEACHER = ("opd", "iw_opd")  # estimators that read a teacher
ADVANTAGES = tuple(name for name in ESTIMATORS if name not in ("gdpo", "optimal_token_baseline"))


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
    """The reward from which on a completion counts as right: accuracy is the share of completions
    that reach it. By default what the task says, which is 1."""
    reward_timeout: float = 60.0
    """Seconds that one call of the reward may take; what takes longer has failed. 0 is no limit."""
    model: str = "tiny"
    """"tiny" makes a small model for the task on the spot, and "tiny32" one that vLLM can run on a
    CPU; else a local folder or a hub name of a causal language model."""
    teacher: Path | None = None
    """A teacher with the same tokenizer: the folder of a model, or a run directory. The loss reads
    it (--loss gkd, opd_kl, …); if it does not, the teacher speaks through the advantages."""
    teacher_coef: float = 1.0
    """How much the teacher counts in the advantages; in a loss that reads it, --loss.kl.coef."""
    reward_coef: float | None = None
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
    out: Path = Path("runs/latest")
    """The run directory. One that holds a run is continued with --resume, and never overwritten;
    without --out, a new run goes into a directory beside it."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, with the options it was started with."""
    extend: int | None = None
    """With --resume: train until this many steps are done,
    if they are more than the run was started for."""
    steps: int = 60
    """Training steps: each samples once and updates epochs × minibatches times."""
    seed: int = 0
    """Everything random follows from it."""

    # Sampling
    prompts: int = 16
    """Prompts per step."""
    group_size: int = 8
    """Completions of each prompt."""
    max_new_tokens: int = 16
    """Longest completion; what has not ended by then is cut."""
    temperature: float = 1.0
    """Of the sampler and of the policy that is trained."""
    top_p: float = 1.0
    """Sample from the most likely tokens that hold this much probability; 1 is off."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 is off."""
    sampling_mask: bool = True
    """With --top-p or --top-k: learn with the tokens that they kept. The log-probabilities of the
    learner are then over the tokens that each was drawn from, and the ratio of an unchanged policy
    is 1."""
    rollout_logp: Literal["processed", "raw"] = "processed"
    """With --top-p or --top-k: what the sampler's log-probabilities are over, the tokens that they
    keep, or all tokens; raw goes with --no-sampling-mask, where the learner's are over all, too."""
    sampling_tokens: int = 16384
    """Tokens of one batch of the sampler, prompts and completions together."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts in their place."""
    dynamic_tries: int = 4
    """How often dynamic sampling draws before it is content with fewer groups."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """Completions that were cut: train on them as they are, take them out of the loss,
    or give them reward −1."""
    staleness: int = 0
    """Train on completions that were sampled this many steps ago; from 1 on, sampling goes on while
    the policy learns."""
    rollout: str = "built-in"
    """What samples: the built-in sampler; vllm, in this process; the addresses of running vLLM
    servers, http://host:port[,…]; or an engine of your own, module:factory (docs/rollout.md)."""
    rollout_timeout: float = 120.0
    """Seconds that a server may take for one prompt; for as long it is asked again if it fails."""
    rollout_memory: float = 0.3
    """Share of the GPU's memory that vllm in this process may take."""

    # Advantages
    advantage: str | None = None
    """How rewards become advantages: gae (with a critic), grpo, dr_grpo, rloo, …, or a function of
    your own, module:function or path/to/file.py:function; by default those that the loss is defined
    with, and grpo if it goes with any."""
    passk: int = 4
    """k of the advantage passk_combinatorial."""
    gamma: float = 1.0
    """Discount of gae and reinforce_pp."""
    lam: float = 1.0
    """λ of gae."""
    old_logp: Literal["recompute", "rollout"] = "recompute"
    """Where old_logp comes from: a forward of the policy before its first update (decoupled),
    or the sampler (bypass)."""

    # Learning
    epochs: int = 1
    """How often a step's completions are gone through."""
    minibatches: int = 2
    """Optimizer steps in each epoch."""
    micro_tokens: int = 4096
    """Tokens of one forward and backward; smaller needs less memory,
    and changes no number but rounding."""
    lr: float = 5e-4
    """Learning rate of the policy."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What becomes of the learning rate over the steps of the run."""
    lr_warmup: int = 0
    """Steps over which it rises from 0."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW of torch, or that of the package torchao with moments of 8 bits, which take a quarter
    of the memory; its steps differ slightly, and it shards nothing (no --parallel fsdp)."""
    weight_decay: float = 0.0
    """Of AdamW."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Of AdamW."""
    grad_clip: float = 1.0
    """Largest norm of a gradient; 0 is off."""
    nonfinite_limit: int = 3
    """An update whose loss or gradient is not finite is skipped; after this many in a row the run
    stops."""
    attention: Literal["auto", "varlen", "flash", "rows"] = "auto"
    """How sequences of different lengths go through the model: in one row by an attention for
    variable lengths (varlen, of torch 2.10 or later; or flash, of the package flash-attn; both on
    CUDA and in half precision), or in padded rows. By default the fastest that gives the model's
    own numbers; the run says which one it is."""
    gradient_checkpointing: bool = False
    """Compute the activations of a layer again in the backward instead of keeping them: less
    memory, more time, the same numbers."""
    compile: bool = False
    """Compile the model's blocks for learning (torch.compile). The first step takes longer, by up
    to a minute; numbers change by rounding."""
    lora_rank: int = 0
    """Train adapters of this rank (LoRA, by the package peft) and nothing else; 0 trains all
    weights. The model without adapters is the reference."""
    lora_alpha: float | None = None
    """Adapters are multiplied by this over their rank; by default twice the rank."""
    lora_target: tuple[str, ...] = ()
    """The names of the layers that get adapters, such as q_proj v_proj; by default every linear
    layer but the head."""
    head: Literal["fused", "logits"] = "fused"
    """How the loss gets from hidden states to log-probabilities: window by window without keeping
    logits, or by all logits."""

    # The critic, of losses with the advantage gae
    critic_lr: float = 1e-3
    """Learning rate of the critic."""
    value_clip: float = 0.2
    """How far a value may move from its old one before its loss is clipped; 0 is off."""
    critic_steps: int = 0
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
    rank_timeout: float = 600.0
    """Under torchrun: seconds after which a rank that waits for another gives up and names it."""
    heartbeat: float = 60.0
    """Seconds in one place after which the run says where it is and what it waits for;
    0 is never."""

    # Evaluations, checkpoints and logs
    eval_every: int = 20
    """Steps between evaluations on held-out prompts; 0 evaluates at the end alone."""
    eval_prompts: int = 256
    """Held-out prompts of an evaluation."""
    checkpoint_every: int = 20
    """Steps between checkpoints; one is written at the end, and when the run is interrupted."""
    keep: int = 2
    """Checkpoints that are kept."""
    rollouts_every: int = 20
    """Steps between samples in rollouts.jsonl, token by token; 0 writes none."""
    rollouts_rows: int = 8
    """Completions of such a sample."""
    track: Literal["wandb", "trackio"] | None = None
    """Log to this tracker too, if it is installed."""

    def __post_init__(self) -> None:
        counts = (
            "steps",
            "prompts",
            "group_size",
            "max_new_tokens",
            "sampling_tokens",
            "dynamic_tries",
            "epochs",
            "minibatches",
        )
        for name in (*counts, "micro_tokens", "keep", "eval_prompts", "passk", "nonfinite_limit"):
            _at_least(self, name, 1)
        every = ("eval_every", "checkpoint_every", "rollouts_every", "rollouts_rows")
        for name in (*every, "top_k", "staleness", "lr_warmup", "critic_steps", "lora_rank"):
            _at_least(self, name, 0)
        for name in (
            "lr",
            "teacher_coef",
            "critic_lr",
            "weight_decay",
            "grad_clip",
            "value_clip",
            "reward_timeout",
            "heartbeat",
        ):
            _at_least(self, name, 0)
        _check_sizes(self)
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(
                    f"{flag(name)} must be between 0 and 1, got {getattr(self, name)}."
                )
        if not self.temperature > 0:
            raise InputError(
                "--temperature must be above 0 to sample different completions, got "
                f"{self.temperature}."
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p must be above 0 and at most 1, got {self.top_p}.")
        if self.advantage not in (None, *ADVANTAGES) and not is_reference(self.advantage):
            raise InputError(unknown_name("advantage", self.advantage, ADVANTAGES))
        _check_rollout(self)
        if self.minibatches > self.prompts * self.group_size:
            raise InputError(
                f"--minibatches {self.minibatches} is more than the "
                f"{self.prompts * self.group_size} completions of a step (--prompts × "
                "--group-size)."
            )
        if self.reward_coef is not None:
            _at_least(self, "reward_coef", 0)
        if (
            self.group_size == 1
            and self.reward_share
            and self.reward_estimator
            in (
                "grpo",
                "dr_grpo",
                "rloo",
                "grpo_loo",
                "opo",
                "maxrl",
                "gpg",
            )
        ):
            raise InputError(
                f"--group-size 1 leaves the advantage {self.estimator!r} nobody to compare a "
                "completion with: all would be 0. Use several completions per prompt, "
                "--advantage gae (with a critic), remax or reinforce_pp."
            )
        if self.estimator == "passk_combinatorial" and self.passk >= self.group_size:
            raise InputError(
                f"--passk {self.passk} must be below --group-size {self.group_size}: where a "
                "subset holds all completions, every advantage is 0."
            )
        if self.dynamic_sampling and self.teacher is not None:
            raise InputError(
                "--dynamic-sampling drops groups whose rewards are equal, but a --teacher has "
                "something to say of them; leave one of the two out."
            )
        if self.dynamic_sampling and self.estimator in ("gae", "reinforce_pp", "remax"):
            raise InputError(
                "--dynamic-sampling drops groups whose rewards are equal, but with the advantage "
                f"{self.estimator!r} they have a gradient; use it with a group advantage such as "
                "grpo."
            )
        if not self.lora_rank and (self.lora_alpha is not None or self.lora_target):
            raise InputError("--lora-alpha and --lora-target need --lora-rank.")
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            raise InputError(f"--lora-alpha must be above 0, got {self.lora_alpha}.")
        if self.optimizer == "adamw8bit" and self.parallel == "fsdp":
            raise InputError(
                "--optimizer adamw8bit keeps its moments in blocks, which --parallel fsdp would "
                "cut; use ddp, or adamw, whose moments fsdp shards."
            )
        if self.optimizer == "adamw8bit" and self.dtype == "float64":
            raise InputError("--optimizer adamw8bit computes in float32, not --dtype float64.")
        if "" in self.stop:
            raise InputError("--stop must be texts that are not empty.")
        if self.task.endswith(".jsonl") and self.reward is None:
            raise InputError(f"--task {self.task} needs --reward exact, math or module:function.")

    @property
    def estimator(self) -> str:
        """The name of the advantage estimator."""
        return self.advantage or self.defined_with or "grpo"

    @property
    def reward_estimator(self) -> str:
        """The estimator of the part of the advantages that comes from rewards."""
        return "grpo" if self.estimator in BY_TEACHER else self.estimator

    @property
    def reward_share(self) -> float:
        """What the advantages of rewards are multiplied by."""
        if self.reward_coef is not None:
            return self.reward_coef
        return 1.0 if self.teacher is None else 0.0

    @property
    def defined_with(self) -> str | None:
        """The advantage estimator that the loss is defined with;
        None if it goes with any, or is no preset.
        """
        return PRESETS[self.loss].advantage if self.loss in PRESETS else None

    @property
    def advantage_notice(self) -> str | None:
        """A line for a run whose advantages are not those that its loss is defined with."""
        if self.advantage in (None, self.defined_with) or self.defined_with is None:
            return None
        source = PRESETS[self.loss].sources["advantage"]
        return (
            f"--advantage {self.advantage}: the loss {self.loss!r} is defined with "
            f"{self.defined_with!r} ({source})"
        )

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


def flag(name: str) -> str:
    """The option of a field as it is typed."""
    return "--" + name.replace("_", "-")


def _at_least(config: TrainConfig, name: str, least: int) -> None:
    if not getattr(config, name) >= least:
        raise InputError(f"{flag(name)} must be at least {least}, got {getattr(config, name)}.")


def _check_rollout(config: TrainConfig) -> None:
    """Raise for an engine that cannot be, or not with these options."""
    name = config.rollout
    if name not in ENGINES and "://" not in name and not is_reference(name):
        valid = f"{', '.join(ENGINES)}, addresses of servers (http://host:port), or module:factory"
        raise InputError(f"--rollout must be one of {valid}; got {name!r}.")
    if config.rollout_logp == "raw" and config.replays_support:
        raise InputError(
            "--rollout-logp raw is over all tokens, and the learner's log-probabilities would be "
            "over those that --top-p and --top-k kept; add --no-sampling-mask, or leave it out."
        )
    if config.rollout_logp == "raw" and (name == "vllm" or "://" in name):
        raise InputError(
            f"--rollout {name} gives processed log-probabilities; --rollout-logp raw is for the "
            "built-in sampler and for engines of your own."
        )
    if config.dtype == "float64" and name != ENGINES[0]:
        raise InputError(f"--rollout {name} samples in float32 or bfloat16, not --dtype float64.")
    if not config.rollout_timeout > 0:
        raise InputError(f"--rollout-timeout must be above 0, got {config.rollout_timeout}.")
    if not 0 < config.rollout_memory < 1:
        raise InputError(f"--rollout-memory must be between 0 and 1, got {config.rollout_memory}.")


def _check_sizes(config: TrainConfig) -> None:
    """Raise for numbers that no run could use, before a tensor or an optimizer meets them."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, int) and abs(x) > LARGEST:
                raise InputError(
                    f"{flag(field.name)} must be below 2**63, got a number of {x.bit_length()} "
                    "bits."
                )
            if isinstance(x, float) and not math.isfinite(x) and x == x:  # nan has its own errors
                raise InputError(f"{flag(field.name)} must be finite, got {x}.")
    if not 0 <= config.seed < 2**32:
        raise InputError(f"--seed must be at least 0 and below 2**32, got {config.seed}.")
    for name in ("lr", "critic_lr"):
        if not getattr(config, name) <= LARGEST_RATE:
            raise InputError(
                f"{flag(name)} must be at most {LARGEST_RATE:g}, got {getattr(config, name)}: "
                "AdamW moves each weight by about that much in every update."
            )
    if not all(0 <= beta < 1 for beta in config.betas):
        raise InputError(
            f"--betas must be at least 0 and below 1, got {config.betas[0]} {config.betas[1]}."
        )
    if not config.rank_timeout > 0:
        raise InputError(f"--rank-timeout must be above 0, got {config.rank_timeout}.")
    if config.success is not None and config.success != config.success:
        raise InputError("--success must be a number, got nan.")
    if config.extend is not None and not config.resume:
        raise InputError(
            f"--extend {config.extend} continues a run, so it needs --resume; a new run takes "
            "--steps."
        )
    tokens = config.prompts * config.group_size * config.max_new_tokens
    if tokens >= 2**31:
        raise InputError(
            f"--prompts × --group-size × --max-new-tokens is {tokens} tokens in a step; it must be "
            "below 2**31."
        )


def read_arguments(arguments: Sequence[str]) -> tuple[TrainConfig, LossSpec]:
    """The command line after `policyloss train`: options by tyro,
    and `--loss.SLOT.OPTION VALUE` as changes of the loss.
    """
    import tyro

    rest, changes = split_loss_options(arguments)
    if {"-h", "--help"} & set(rest):
        print(help_text(TrainConfig, "policyloss train"))
        raise SystemExit(0)
    config = tyro.cli(TrainConfig, args=rest, prog="policyloss train")
    spec = read_spec(config.loss, changes).with_horizon(config.max_new_tokens)
    check_together(config, spec)
    return config, spec


def check_together(config: TrainConfig, spec: LossSpec) -> None:
    """Raise where the loss and the options contradict each other."""
    if spec.needs_horizon:
        raise InputError(
            f"the loss {config.loss!r} divides by a horizon, which is not set; with these options "
            f"it is spec.with_horizon({config.max_new_tokens}), the longest completion."
        )
    if "rollout_logp" in spec.reads and "old_logp" in spec.reads and config.old_logp == "rollout":
        raise InputError(
            f"the loss {config.loss!r} compares old_logp with rollout_logp, and with --old-logp "
            "rollout they are the same numbers; use --old-logp recompute."
        )
    if spec.divergence is not None and config.replays_support:
        raise InputError(
            f"the loss {config.loss!r} compares whole distributions with a teacher, and with "
            "--top-p or --top-k the learner's is over the tokens that they kept; add "
            "--no-sampling-mask --rollout-logp raw, which makes both be over all tokens."
        )
    taught = any(getattr(part, "teaches", False) for part in spec.pulls)
    if config.teacher is None and (taught or config.estimator in BY_TEACHER):
        raise InputError(
            f"the loss {config.loss!r} with the advantage {config.estimator!r} reads a teacher: "
            "give the folder of one, --teacher DIR."
        )
