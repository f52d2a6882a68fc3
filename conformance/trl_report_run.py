"""TRL's own GRPOTrainer trains a tiny model for 20 steps with `log_completions`, and one command
draws the report of its files.

    python -m conformance.trl_report_run FOLDER                  # with TRL's Python
    policyloss report FOLDER --out trl.html                      # with ours

Nothing is downloaded. tests/recorded/report/trl holds its files, without the weights.
"""

from __future__ import annotations

import argparse
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from conformance.trl_run import _quiet, reward, tiny_model

STEPS = 20


def train(folder: Path, steps: int, **options: Any) -> Path:
    """Train on prompts of three words, four of them held out; returns the `trainer_state.json` of
    the last step. options: of GRPOConfig, in addition to the common ones.
    """
    package, transformers = import_module("trl"), import_module("transformers")
    rows = {"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(12)]}
    prompts = import_module("datasets").Dataset.from_dict(rows)
    with tiny_model() as model, _quiet():
        config = package.GRPOConfig(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            num_generations=4,
            beta=0.01,
            max_completion_length=8,
            logging_steps=1,
            eval_strategy="steps",
            save_steps=steps,
            save_only_model=True,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **options,
        )
        trainer = package.GRPOTrainer(
            model=str(model),
            reward_funcs=reward,
            args=config,
            train_dataset=prompts,
            eval_dataset=prompts.select(range(4)),
            processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(model),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return folder / f"checkpoint-{steps}" / "trainer_state.json"


def main() -> int:
    """Train, and leave `trainer_state.json` and `completions/` in the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    completions = {"log_completions": True, "num_completions_to_print": 0}
    state = train(folder, STEPS, learning_rate=3e-3, eval_steps=5, **completions)
    shutil.move(state, folder / state.name)
    shutil.rmtree(state.parent)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
