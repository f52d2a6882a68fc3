"""A step of TRL's GRPOTrainer on a CPU with its own head and with `head="fused"`: time and memory.

    python -m benchmarks.trl_step --trl .conformance/trl --rounds 9

Both arms are real trainers on the same random model and the same completions, in processes of
TRL's environment (`make conformance` builds it) that take steps in turns. A step is forward and
backward of the trainer's loss, without generation and optimizer. Loss and gradient of the arms are
compared first. Time is processor time; memory is the growth of the process since its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment, table, write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
ARMS = ("TRL's head", "fused head")
# Entries of the vocabulary, width, completions, and tokens of each.
SIZES = {"32,000 entries": (32_000, 64, 16, 64), "151,936 entries": (151_936, 64, 8, 64)}
QUICK_SIZES = {"500 entries": (500, 32, 4, 8)}
PROMPT = 8
GAP = 1e-4  # of loss and gradient norm, relative: two implementations in float32


def make_trainer(arm: str, model: Path, size: tuple[int, int, int, int], scratch: str) -> Any:
    """TRL's trainer with the loss of this library, and one of the two heads."""
    trl, compat = import_module("trl"), import_module("policyloss.compat.trl")
    args = trl.GRPOConfig(
        output_dir=scratch,
        per_device_train_batch_size=size[2],
        num_generations=2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    transformers = import_module("transformers")
    trainer = compat.GRPOTrainer(
        model=str(model),
        reward_funcs=import_module("conformance.trl_run").reward,
        args=args,
        train_dataset=import_module("datasets").Dataset.from_dict({"prompt": ["w1 w2"] * size[2]}),
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(model),
        head="fused" if arm == "fused head" else None,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def make_batch(size: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    """Completions of several lengths, as the trainer makes them."""
    vocabulary, _, rows, length = size
    torch.manual_seed(1)
    lengths = torch.linspace(length // 2, length, rows).long()[:, None]
    return {
        "prompt_ids": torch.randint(4, vocabulary, (rows, PROMPT)),
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(4, vocabulary, (rows, length)),
        "completion_mask": (torch.arange(length) < lengths).long(),
        "advantages": torch.randn(rows),
        "num_items_in_batch": lengths.sum(),
    }


def work(arm: str, folder: Path, size: tuple[int, int, int, int]) -> None:
    """One arm: a step for each line that comes in; a line of JSON for each."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps TRL's output apart from the answers
    with tempfile.TemporaryDirectory() as scratch:
        trainer, batch = make_trainer(arm, folder, size, scratch), make_batch(size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in sys.stdin:
            start = time.process_time()
            loss = trainer._compute_loss(trainer.model, batch)
            loss.backward()
            seconds = time.process_time() - start
            grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            norm = float(torch.stack([grad.norm() for grad in grads]).norm())
            trainer.model.zero_grad(set_to_none=True)
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            answer = {"loss": float(loss), "norm": norm, "seconds": seconds, "peak_bytes": peak}
            print(json.dumps(answer), file=answers, flush=True)


def compare(python: Path, size: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Both arms in turns: seconds of each step, and the peak of each."""
    vocabulary, hidden, *_, length = size
    tiny_model = import_module("conformance.trl_run").tiny_model
    quiet = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    quiet |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    with ExitStack() as stack:
        model = stack.enter_context(tiny_model(vocabulary, hidden, positions=PROMPT + length))
        arms = {}
        for arm in ARMS:
            words = ["-m", "benchmarks.trl_step", "--work", arm, str(model), *map(str, size)]
            arms[arm] = stack.enter_context(
                subprocess.Popen(
                    [str(python), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    cwd=ROOT,
                    env=os.environ | quiet,
                )
            )

        def step(arm: str) -> dict[str, float]:
            process = arms[arm]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("step\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{arm}: the process ended with {process.wait()}.")
            answer: dict[str, float] = json.loads(line)
            return answer

        first = {arm: step(arm) for arm in ARMS}
        check(first)
        turns = [{arm: step(arm) for arm in ARMS[:: 1 - 2 * (i % 2)]} for i in range(rounds)]
        for process in arms.values():
            assert process.stdin is not None
            process.stdin.close()
    return summary(turns)


def check(first: dict[str, dict[str, float]]) -> None:
    """Raise if loss or gradient of the arms differ by more than rounding."""
    theirs, ours = (first[arm] for arm in ARMS)
    for name in ("loss", "norm"):
        gap = abs(ours[name] - theirs[name]) / max(abs(theirs[name]), first[ARMS[0]]["norm"])
        if not gap <= GAP:
            raise RuntimeError(f"{name}: {ours[name]} instead of {theirs[name]}; nothing is timed.")


def summary(turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of each arm, and the median of the ratios within a turn."""
    theirs, ours = ARMS
    peaks = {arm: max(turn[arm]["peak_bytes"] for turn in turns) for arm in ARMS}
    return {
        "median_s": {arm: statistics.median(t[arm]["seconds"] for t in turns) for arm in ARMS},
        "peak_bytes": peaks,
        "faster": statistics.median(t[theirs]["seconds"] / t[ours]["seconds"] for t in turns),
        "of_memory": peaks[ours] / peaks[theirs],
        "rounds": len(turns),
    }


def main(words: list[str] | None = None) -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_step", description=__doc__)
    parser.add_argument("--trl", type=Path, default=ROOT / ".conformance" / "trl", metavar="VENV")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.work:
        arm, folder, *numbers = options.work
        vocabulary, hidden, rows, length = map(int, numbers)
        work(arm, Path(folder), (vocabulary, hidden, rows, length))
        return 0
    python = options.trl / "bin" / "python"
    if not python.exists():
        print(f"{python} is not there; `make conformance` builds TRL's environment.")
        return 1
    results = {}
    for name, size in (QUICK_SIZES if options.small else SIZES).items():
        row = compare(python, size, options.rounds)
        results[name] = {"size": size, **row}
        seconds, peaks = row["median_s"], row["peak_bytes"]
        lines = [[arm, f"{seconds[arm]:.3f}", f"{peaks[arm] / 2**20:,.0f}"] for arm in ARMS]
        print(table([[name, "s of a processor", "MiB"], *lines]))
        print(f"{row['faster']:.2f} times faster, {row['of_memory']:.2f} of the memory", flush=True)
    if not options.small or options.out:
        out = options.out or RESULTS / "trl_step_cpu.json"
        write_json(out, {"environment": environment(), "sizes": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
