"""TRL's trainers with the head of this library and with TRL's: 20 steps each.

`python -m conformance.trl_head_run` in TRL's environment. Losses, metrics and final weights are
compared, and the widest tensor is recorded: with the head of this library no tensor has a row of
the vocabulary for more tokens than a window holds. `benchmarks.trl_step` measures the cost of a
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.trl_run import STEPS, TOLERANCE, furthest, metric_difference, tiny_model, train

WINDOW, VOCABULARY = 16, 320  # rows of logits that the head may hold, and their width
ONCE = {"num_iterations": 1, "gradient_accumulation_steps": 2}  # exactly on-policy
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dapo, on-policy": {"loss_type": "dapo", "beta": 0.04, **ONCE},
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.02},
    "dapo, entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.01},
    "dapo, float32 head": {"loss_type": "dapo", "cast_lm_head_to_fp32": True},
}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most rows of a tensor whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and record the sizes of its results."""
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.dim() and x.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, x.numel() // VOCABULARY)
        return out


@contextmanager
def small_windows() -> Iterator[None]:
    """Limit the head to `WINDOW` rows of logits at a time, the smallest window."""
    plans: Any = import_module("policyloss.head.plans")
    before, plans.CPU_BYTES = plans.CPU_BYTES, 4 * VOCABULARY * WINDOW
    try:
        yield
    finally:
        plans.CPU_BYTES = before


def watched(trainer_class: Any) -> tuple[type[Any], dict[str, int]]:
    """A trainer that watches its steps, forwards and backwards; generation is not watched."""
    most = {"rows": 0}

    class Watched(trainer_class):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with Watch() as self.watch:
                out = super().training_step(*args, **kwargs)
            most["rows"] = max(most["rows"], self.watch.rows)
            return out

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            before = self.watch.rows
            out = super()._generate_single_turn(*args, **kwargs)
            self.watch.rows = before
            return out

    return Watched, most


def compare_runs() -> dict[str, dict[str, float]]:
    """Every algorithm with both heads, and TRL's RLOO and distillation trainers."""
    trl, compat = import_module("trl"), import_module("policyloss.compat.trl")
    compared = {}
    # No other layer is as wide as the vocabulary, and the transposed weight has 8 rows.
    size = {"vocabulary": VOCABULARY, "hidden": 8}
    with tiny_model(**size) as model, tiny_model(**size, seed=6) as teacher, small_windows():
        for name, options in ALGORITHMS.items():
            ours, most = watched(compat.GRPOTrainer)
            mine = train(ours, model, options, head="fused")
            theirs, their_most = watched(trl.GRPOTrainer)
            other = train(theirs, model, options)
            compared[name] = _row(mine, other, most["rows"], their_most["rows"])
        of_teacher = {"teacher_model_init_kwargs": {"dtype": "auto"}, "learning_rate": 1.0}
        others: dict[str, dict[str, Any]] = {
            # Its ratio is that of a sequence: short ones, so that their sums are below 32.
            "RLOO": {"options": {"beta": 0.04, "max_completion_length": 5}},
            "Distillation": {"options": of_teacher, "teacher_model": str(teacher)},
        }
        for name, arguments in others.items():
            arguments["config"] = f"{name}Config"
            theirs, their_most = watched(getattr(trl, f"{name}Trainer"))
            other = train(theirs, model, **arguments)
            compat.install_head()
            ours, most = watched(getattr(trl, f"{name}Trainer"))
            mine = train(ours, model, **arguments)
            compat.uninstall_head()
            compared[f"{name}Trainer"] = _row(mine, other, most["rows"], their_most["rows"])
    return compared


def _row(mine: Any, other: Any, rows: int, their_rows: int) -> dict[str, float]:
    pairs = zip(mine.losses, other.losses, strict=True)
    return {
        "loss_difference": max(abs(a - b) for a, b in pairs),
        "weight_difference": furthest(mine.end, other.end),
        "metric_difference": metric_difference(mine, other, relative=True),
        "weight_change": furthest(other.start, other.end),
        "rows": rows,
        "their_rows": their_rows,
    }


def agrees(row: dict[str, float]) -> bool:
    """Whether both heads trained the same, and ours within its window."""
    same = max(row["loss_difference"], row["weight_difference"]) <= TOLERANCE
    # RLOO logs differences of float32 sums of size 30, whose last digit is 4e-6.
    same = same and row["metric_difference"] <= 4 * TOLERANCE
    return same and row["weight_change"] > 1e-3 and row["rows"] <= WINDOW < row["their_rows"]


def main() -> int:
    """Print a table; the exit status is 1 if the heads differ or ours makes more than a window."""
    torch.set_num_threads(1)
    compared = compare_runs()
    columns = ("loss_difference", "weight_difference", "metric_difference", "weight_change")
    print(f"{'algorithm, ' + str(STEPS) + ' steps':<24}", *(f"{name:>18}" for name in columns))
    for name, row in compared.items():
        numbers = " ".join(f"{row[column]:>18.1e}" for column in columns)
        print(f"{name:<24} {numbers}   rows of logits: {row['rows']} (TRL's {row['their_rows']})")
    wrong = [name for name, row in compared.items() if not agrees(row)]
    print(f"FAILED: {', '.join(wrong)}" if wrong else f"within {TOLERANCE:g}, without logits")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
