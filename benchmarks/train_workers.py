"""The two trainers that `benchmarks.train` compares, each a process that takes orders by lines.

    python -m benchmarks.train_workers ours|trl FOLDER

FOLDER holds the model, `size.json` and `batch.json`, which `benchmarks.train` writes. The order
"check" returns the loss and the norm of the gradient of that batch; "step" takes one step of
training (a sampling of all completions, then two updates) and returns its seconds and tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LR, EPS_LOW, EPS_HIGH, UPDATES = 1e-5, 0.2, 0.28, 2


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a step."""

    hidden: int
    layers: int
    new_tokens: int
    prompts: int = 16
    group_size: int = 8
    warmup: int = 0

    @property
    def completions(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group_size


def serve(step: Callable[[], dict[str, float]], check: Callable[[], dict[str, float]]) -> None:
    """Answer each line of the standard input by a line of JSON."""
    answer(ready=1.0)
    for line in sys.stdin:
        answer(**{"step": step, "check": check}[line.strip()]())


def answer(**numbers: float) -> None:
    """Print a line that the other process can distinguish from all other output."""
    print("@" + json.dumps(numbers), flush=True)


def ours(folder: Path, size: Size) -> None:
    """`policyloss train`, without the evaluations and files that TRL does not write."""
    from policyloss.catalogue import preset
    from policyloss_train.batches import Pack
    from policyloss_train.config import TrainConfig
    from policyloss_train.distributed import Ranks
    from policyloss_train.loop import Training
    from policyloss_train.run.directory import RunDir
    from policyloss_train.sampler import Sample

    spec = preset("dapo", eps_low=EPS_LOW, eps_high=EPS_HIGH)
    options: dict[str, Any] = {
        "task": "sort",
        "model": str(folder / "model"),
        "out": folder / "run",
        "prompts": size.prompts,
        "group_size": size.group_size,
        "max_new_tokens": size.new_tokens,
        "minibatches": UPDATES,
        "lr": LR,
        "steps": 10**6,
        "device": "cpu",
        "eval_every": 0,
        "rollouts_every": 0,
        "checkpoint_every": 0,
        "warmup_steps": 0,
    }
    config = TrainConfig(**options)
    training = Training(
        config,
        spec,
        Ranks(0, 1, torch.device("cpu")),
        RunDir.create(config.out, config.to_dict(), spec.to_dict()),
        offline=True,
    )
    training.display._console.quiet = True

    def step() -> dict[str, float]:
        began = time.perf_counter()
        training._step()
        return {"seconds": time.perf_counter() - began, **_last_line(config.out)}

    def check() -> dict[str, float]:
        rows = json.loads((folder / "batch.json").read_text())["rows"]
        samples = [
            Sample(
                0,
                row["group"],
                torch.tensor(row["prompt"]),
                torch.tensor(row["completion"]),
                torch.tensor(row["old_logp"]),
                True,
                "",
                row["reward"],
            )
            for row in rows
        ]
        frozen = TrainConfig(**{**options, "minibatches": 1, "old_logp": "rollout", "lr": 0.0})
        learner = training.learner
        learner.config, rate = frozen, learner.optimizer.param_groups[0]["lr"]
        learner.optimizer.param_groups[0]["lr"] = 0.0
        learned = learner.learn(Pack.of(samples), range(len(rows)), len(rows), 0)
        learner.config, learner.optimizer.param_groups[0]["lr"] = config, rate
        learner.optimizer.state.clear()
        return {"loss": learned.metrics["loss"], "norm": learned.grad_norm}

    serve(step, check)


def _last_line(run: Path) -> dict[str, float]:
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {"tokens": line["tokens"]}


def trl(folder: Path, size: Size) -> None:
    """TRL's GRPOTrainer, with two optimizer steps on each generation."""
    from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    from policyloss_train.tasks.sort import sort_task

    task = sort_task(0, lambda example, completion: 0.0)
    rows = [{"prompt": example.prompt, "answer": example.answer} for example in task.train]
    counted: list[int] = []

    def reward(
        completions: Sequence[str], completion_ids: Sequence[Any], answer: Sequence[str], **_: Any
    ) -> list[float]:
        counted.append(sum(map(len, completion_ids)))
        pairs = zip(completions, answer, strict=True)
        return [float(completion.split() == wanted.split()) for completion, wanted in pairs]

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size.completions // UPDATES,
        steps_per_generation=UPDATES,
        gradient_accumulation_steps=1,
        num_generations=size.group_size,
        max_completion_length=size.new_tokens,
        loss_type="dapo",
        epsilon=EPS_LOW,
        epsilon_high=EPS_HIGH,
        beta=0.0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        temperature=1.0,
        max_steps=10**6,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
    )

    def check() -> dict[str, float]:
        """`_compute_loss` of the batch, padded as TRL pads: prompts on the left."""
        rows = json.loads((folder / "batch.json").read_text())["rows"]
        prompts, prompt_mask = _padded([row["prompt"] for row in rows], left=True)
        completions, mask = _padded([row["completion"] for row in rows])
        old, _ = _padded([row["old_logp"] for row in rows])
        batch = {
            "prompt_ids": prompts.long(),
            "prompt_mask": prompt_mask,
            "completion_ids": completions.long(),
            "completion_mask": mask,
            "old_per_token_logps": old,
            "advantages": torch.tensor([row["advantage"] for row in rows]),
            # TRL counts the tokens of a whole generation, and multiplies by its updates.
            "num_items_in_batch": UPDATES * mask.sum(),
        }
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
        trainer.model.zero_grad()
        return {"loss": loss.item(), "norm": torch.stack(norms).norm().item()}

    class Orders(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Waits for an order before the first update of a generation; answers after its last."""

        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Between two orders."""
            if state.global_step % UPDATES == 0:
                while (line := sys.stdin.readline().strip()) == "check":
                    answer(**check())
                if not line:
                    sys.exit()
                self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """The trainer has counted this step already."""
            if state.global_step % UPDATES == 0:
                seconds = time.perf_counter() - self.began
                answer(seconds=seconds, tokens=float(counted[-1]))

    trainer.add_callback(Orders())
    answer(ready=1.0)
    trainer.train()


def _padded(rows: Sequence[Sequence[float]], left: bool = False) -> tuple[torch.Tensor, Any]:
    """Rows of one width, and an integer mask that is 0 at padding."""
    side = "left" if left else "right"
    pad = torch.nn.utils.rnn.pad_sequence
    values = [torch.tensor(row) for row in rows]
    mask = [torch.ones(len(row), dtype=torch.int64) for row in rows]
    padded = pad(values, batch_first=True, padding_side=side)
    return padded, pad(mask, batch_first=True, padding_side=side)


if __name__ == "__main__":
    where = Path(sys.argv[2])
    torch.manual_seed(0)
    {"ours": ours, "trl": trl}[sys.argv[1]](
        where, Size(**json.loads((where / "size.json").read_text()))
    )
