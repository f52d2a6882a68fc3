"""Real training of axolotl's GRPO trainer with our loss, as its page builds it.

    python -m conformance.axolotl_run SRC       # in TRL's environment

SRC: the folder of axolotl's unpacked wheel. Its class is loaded without its mixins, which need
axolotl's other packages and concern samplers, schedulers and optimizers. A run is compared with the
same run of our trainer for TRL. The result is written to conformance/results/engine_steps.json.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from conformance.public_losses import load
from conformance.trl_run import furthest, tiny_model, train
from conformance.twinkle_run import TOLERANCE, write_result

RELEASE, LOSS, STEPS = "0.21.0", "dapo", 4
MIXINS = (
    *("RngLoaderMixin", "SchedulerMixin", "OptimizerMixin", "OptimizerInitMixin"),
    "DistributedParallelMixin",
)


def trainer_class(folder: Path) -> Any:
    """The class that the page shows."""
    ours: Any = import_module("policyloss.compat.trl").GRPOTrainer
    mixins = {name: type(name, (), {}) for name in MIXINS}
    path, name = folder / "axolotl/core/trainers/grpo/trainer.py", "AxolotlGRPOTrainer"
    parent = load(path, name, GRPOTrainer=import_module("trl").GRPOTrainer, **mixins)

    class Trainer(ours, parent.AxolotlGRPOTrainer):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, policy_loss=LOSS, **kwargs)

    return Trainer


def main(folder: str) -> int:
    """Train both; the exit status is 1 if the weights differ."""
    with tiny_model() as model:
        theirs = train(trainer_class(Path(folder)), model, {}, STEPS)
        plain = import_module("policyloss.compat.trl").GRPOTrainer
        ours = train(plain, model, {}, STEPS, policy_loss=LOSS)
    moved, worst = furthest(theirs.start, theirs.end), furthest(theirs.end, ours.end)
    print(f"weights moved by {moved:.1e} in {STEPS} steps, and differ by {worst:.1e}")
    write_result("axolotl", RELEASE, [LOSS], worst)
    return 0 if worst <= TOLERANCE < moved else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
