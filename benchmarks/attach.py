"""The time that `lab.attach` takes of a step of TRL's GRPOTrainer on a CPU.

    python -m benchmarks.attach                            # with TRL's Python

A random model of 5.4 M parameters and 16 completions of up to 128 tokens per step, sampled by
transformers, whose log-probabilities are reported as an engine reports them. All that the
attachment does at its default settings is timed inside one run, the last page included; the ratio
is the time of the run by the time of the run without it. Time is processor time, of one thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from conformance.trl_run import reward, tiny_model, train

import policyloss_lab as lab

STEPS, WIDTH = 20, 128
OPTIONS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "num_iterations": 1,
    "max_completion_length": WIDTH,
    "learning_rate": 0.01,
}
METHODS = ("observe", "log", "examine", "detach")


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Sample with transformers, and report the log-probabilities of the sampled tokens."""
    rows = trainer.processing_class(prompts)["input_ids"]
    ids = torch.tensor(rows)
    with torch.no_grad():
        out = trainer.model.generate(
            ids,
            do_sample=True,
            top_k=0,
            max_new_tokens=WIDTH,
            output_logits=True,
            return_dict_in_generate=True,
        )
    sampled = out.sequences[:, ids.shape[1] :]
    logp = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
    return {"prompt_ids": rows, "completion_ids": sampled.tolist(), "logprobs": logp.tolist()}


def timed(method: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """The method, which adds its time to `spent`."""

    def call(*args: Any) -> Any:
        began = time.process_time()
        try:
            return method(*args)
        finally:
            spent[name] += time.process_time() - began

    return call


def measure(folder: Path) -> dict[str, Any]:
    """Train attached; returns seconds per step, the parts of the attachment, and the ratio."""
    spent = dict.fromkeys(METHODS, 0.0)
    seconds, parameters, attached = [0.0], [0], list[lab.Attachment]()

    class Trainer(import_module("trl").GRPOTrainer):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            parameters[0] = sum(x.numel() for x in self.model.parameters())
            attached.append(lab.attach(self, folder / "run"))
            for name in METHODS:
                setattr(attached[0], name, timed(getattr(attached[0], name), name, spent))
            began = time.process_time()
            result = super().train(*args, **kwargs)
            seconds[0] = time.process_time() - began
            return result

    with tiny_model(vocabulary=8192, hidden=256, positions=256) as model:
        auto = import_module("transformers").AutoModelForCausalLM
        auto.from_pretrained(model, dtype=torch.float32).save_pretrained(model)
        train(Trainer, model, OPTIONS, STEPS, rollout_func=rollout, reward_funcs=reward)
    inside = sum(spent.values())
    return {
        "parameters": parameters[0],
        "steps": STEPS,
        "seconds_per_step": seconds[0] / STEPS,
        "attached_by_bare": seconds[0] / (seconds[0] - inside),
        "seconds_inside": spent,
        "findings": [*attached[0].findings],
        "stored_pairs": (folder / "run/rollouts.jsonl").read_text().count('"rollout_logp"'),
    }


def main() -> int:
    """Print the measurement; the exit status is 1 above 1 %."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    json.dump(found, sys.stdout, indent=1)
    return 0 if found["attached_by_bare"] <= 1.01 else 1


if __name__ == "__main__":
    raise SystemExit(main())
