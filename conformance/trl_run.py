"""TRL's own GRPOTrainer and ours train the same tiny model with the same seeds;
losses and final weights are compared.

`python -m conformance.trl_run` in TRL's environment, or `compare_runs()`. Nothing is downloaded:
the model is random and its tokenizer a list of words. Two optimizer steps are taken on each batch
of completions, so ratios leave 1. The optimizer is SGD: TRL's log-probabilities and losses are
float32, and AdamW, which divides a gradient by its own size, makes steps of 1e-6 out of the
rounding of gradients that are nearly 0.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# The loss is handed to our trainer, which must then take TRL's own out of the total.
GIVEN = "as policy_loss="
STEPS = 20
SEEDS = (11, 1, 2)
TOLERANCE = 1e-6
WORDS = 60
_BESIDE = {
    "loss_type": "dapo",
    "beta": 0.04,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "entropy_target": 5.0,
    "top_entropy_quantile": 0.5,
}
# The runs: a name, and the options of GRPOConfig.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.03,
        "epsilon_high": 0.04,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.02},
    "sapo": {"loss_type": "sapo"},
    "dapo, entropy bonus and filter": _BESIDE,
    f"dapo, entropy bonus and filter, {GIVEN}": _BESIDE,
}


@dataclass(frozen=True)
class Run:
    """One training run: the logged metrics of each step, and the weights before and after."""

    logged: list[dict[str, float]]
    start: dict[str, Tensor]
    end: dict[str, Tensor]

    @property
    def losses(self) -> list[float]:
        """The loss of each optimizer step."""
        return [entry["loss"] for entry in self.logged]


def compare_runs() -> dict[str, dict[str, float]]:
    """Every algorithm and seed with both trainers: the largest difference of a logged loss, of a
    weight, and of any other logged metric.
    """
    ours, theirs = (
        import_module("policyloss.compat.trl").GRPOTrainer,
        import_module("trl").GRPOTrainer,
    )
    found = {}
    with tiny_model() as model:
        for (name, options), seed in product(ALGORITHMS.items(), SEEDS):
            given = {"policy_loss": _spec(options)} if name.endswith(GIVEN) else {}
            seeded = {**options, "seed": seed}
            mine, other = train(ours, model, seeded, **given), train(theirs, model, seeded)
            found[f"{name}, seed {seed}"] = {
                "loss_difference": max(
                    abs(a - b) for a, b in zip(mine.losses, other.losses, strict=True)
                ),
                "weight_difference": furthest(mine.end, other.end),
                "weight_change": furthest(other.start, other.end),
                "metric_difference": metric_difference(mine, other),
                "ratio_spread": max(_ratio_spread(entry) for entry in mine.logged),
                "steps": len(mine.losses),
            }
    return found


def custom_run(steps: int = 4) -> dict[str, float]:
    """Our trainer with a preset in place of the config's loss, and an evaluation:
    the last step's metrics of this library.
    """
    ours = import_module("policyloss.compat.trl").GRPOTrainer
    with tiny_model() as model:
        run = train(
            ours, model, {"eval_strategy": "steps", "eval_steps": 2}, steps, policy_loss="gspo"
        )
    return {
        name: value
        for entry in run.logged
        for name, value in entry.items()
        if "policyloss/" in name
    }


def train(
    trainer_class: Any,
    model: Path,
    options: dict[str, Any],
    steps: int = STEPS,
    config: str = "GRPOConfig",
    **extra: Any,
) -> Run:
    """Train the model at this path from scratch; extra: more arguments of the trainer."""
    config_class = getattr(import_module("trl"), config)
    Dataset = import_module("datasets").Dataset  # noqa: N806
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        settings: dict[str, Any] = {
            "output_dir": scratch,
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "num_iterations": 2,
            "max_completion_length": 8,
            "optim": "sgd",
            "learning_rate": 0.1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "model_init_kwargs": {"dtype": "auto"},
        }
        known = {field.name for field in fields(config_class)}
        settings = {name: x for name, x in settings.items() if name in known}
        args = config_class(**{**settings, **options})
        roles = extra if "teacher_model" in extra else {"reward_funcs": reward, **extra}
        prompts = Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(12)]})
        trainer = trainer_class(
            model=str(model),
            args=args,
            train_dataset=prompts,
            eval_dataset=prompts.select(range(2)),
            processing_class=import_module("transformers").PreTrainedTokenizerFast.from_pretrained(
                model
            ),
            **roles,
        )
        trainer.remove_callback(import_module("transformers").PrinterCallback)
        start = _weights(trainer.model)
        trainer.train()
        return Run(
            [entry for entry in trainer.state.log_history if "train_runtime" not in entry],
            start,
            _weights(trainer.model),
        )


def _spec(options: dict[str, Any]) -> Any:
    trl = import_module("policyloss.compat.trl.config")
    config = SimpleNamespace(**{**trl.DEFAULTS, **options})
    return trl.spec_from_config(config, handled=trl.EXTRA_OPTIONS)


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Even words are good; longer answers a little better, so that completions differ."""
    numbers = [
        [int(word[1:]) for word in text.split() if word.startswith("w")] for text in completions
    ]
    return [
        sum(1.0 - n % 2 for n in found) / max(len(found), 1) + 0.05 * len(found)
        for found in numbers
    ]


@contextmanager
def tiny_model(
    vocabulary: int | None = None, hidden: int = 32, positions: int = 64, seed: int = 5
) -> Iterator[Path]:
    """A random two-layer Qwen2 with 64 words, and its tokenizer, in a directory. vocabulary: more
    entries than there are words.
    """
    transformers, tokenizers = import_module("transformers"), import_module("tokenizers")
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=vocabulary or len(words),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        path = Path(scratch) / "tiny"
        transformers.Qwen2ForCausalLM(config).double().save_pretrained(path)
        tokenizer.save_pretrained(path)
        yield path


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output of a training run."""
    import_module("transformers.utils.logging").disable_progress_bar()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _weights(model: Any) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of a weight."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def metric_difference(mine: Run, other: Run, relative: bool = False) -> float:
    """The largest difference in anything else that both log, but for times and speeds. relative:
    to the metric, where it is larger than 1.
    """
    pairs = [
        (name, a[name], b[name])
        for a, b in zip(mine.logged, other.logged, strict=True)
        for name in a.keys() & b.keys()
    ]
    timed = ("time", "per_second")
    return max(
        abs(x - y) / (max(abs(y), 1.0) if relative else 1.0)
        for name, x, y in pairs
        if isinstance(y, (int, float)) and not any(word in name for word in timed)
    )


def _ratio_spread(entry: dict[str, float]) -> float:
    """How far the ratios of this step left 1."""
    return max(
        abs(entry.get("policyloss/ratio_max", 1.0) - 1),
        abs(entry.get("policyloss/ratio_min", 1.0) - 1),
    )


def agrees(row: dict[str, float]) -> bool:
    """Whether both trainers did the same, and did something: weights moved and ratios left 1."""
    same = (
        max(row["loss_difference"], row["weight_difference"], row["metric_difference"]) <= TOLERANCE
    )
    return same and row["weight_change"] > 1e-3 and row["ratio_spread"] > 1e-2


def main() -> int:
    """Print a table; the exit status is 1 if a difference exceeds the tolerance
    or nothing was learnt.
    """
    torch.set_num_threads(1)
    start = time.monotonic()
    found = compare_runs()
    columns = (
        "loss_difference",
        "weight_difference",
        "metric_difference",
        "weight_change",
        "ratio_spread",
    )
    print(f"{'algorithm':<56} steps " + " ".join(f"{name:>17}" for name in columns))
    for name, row in found.items():
        print(
            f"{name:<56} {row['steps']:>5.0f} "
            + " ".join(f"{row[column]:>17.1e}" for column in columns)
        )
    wrong = [name for name, row in found.items() if not agrees(row)]
    custom = custom_run()
    print(
        f"policy_loss='gspo' logs {len(custom)} metrics, such as {dict(list(custom.items())[:3])}"
    )
    verdict = (
        f"FAILED: {', '.join(wrong)}" if wrong else f"every difference is within {TOLERANCE:g}"
    )
    print(f"{time.monotonic() - start:.0f} s; {verdict}")
    return 1 if wrong or not custom else 0


if __name__ == "__main__":
    raise SystemExit(main())
