"""The speed of `policyloss train`: against a dense mask on a GPU, against TRL on a CPU.

    python -m benchmarks.train --device cuda           # tokens per second of the learning phase
    python -m benchmarks.train --device cpu            # steps per second, with TRL's GRPOTrainer
    python -m benchmarks.train --device cpu --trl .conformance/trl --rounds 9

On a GPU, a model of 107 million weights learns from completions of 128 tokens, about 16384 tokens
at a time, by the attention that a run chooses, and by one row with a dense block mask; both take
the same completions in turns, without and with `--compile`.

On a CPU, TRL and policyloss train the same model on the same prompts,
with the same batch and updates, in processes that take steps in turns. Loss and gradient of a batch
must agree before the timing. `make conformance` builds the environment of TRL.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import evidence_large
from benchmarks.harness import environment, table, time_interleaved, write_json
from benchmarks.train_workers import Size
from policyloss.errors import PolicyLossError
from policyloss_train.arguments import read_spec
from policyloss_train.attention import Packed
from policyloss_train.distributed import Ranks
from policyloss_train.loop import Training

ROOT = Path(__file__).resolve().parent.parent
# The earlier measurement of the learning phase with a dense mask: completion tokens per second on
# an H200 (benchmarks/results/evidence_large.json). The target is five times as many.
BEFORE, TARGET, TRL_TARGET = 47_639.0, 5.0, 1.3
SIZES = {
    "2 layers of 64, 16 new tokens": Size(64, 2, 16, warmup=200),
    "4 layers of 256, 64 new tokens": Size(256, 4, 64),
}
QUICK_SIZES = {"1 layer of 16, 4 new tokens": Size(16, 1, 4, prompts=2, group_size=4)}
GAP = 1e-4  # of loss and gradient norm, relative: two implementations in float32


class Dense(Packed):
    """All sequences in one row, kept apart by a mask with an entry for each pair of tokens."""

    def __init__(self) -> None:
        super().__init__("dense")

    def hidden(self, body: Callable[..., Any], micro: Mapping[str, Any]) -> Tensor:
        """Transformers makes the mask from positions that begin at 0 again."""
        positions = micro["position_ids"][None]
        out = body(input_ids=micro["ids"][None], position_ids=positions, use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden


def learning(
    device: str, size: evidence_large.Size, rounds: int, *, compiled: bool = False
) -> dict[str, Any]:
    """The learning phase by the chosen attention and by a dense mask, on the same completions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = evidence_large.save_model(size, folder / "model")
        evidence_large.make_task(size, folder / "task.jsonl")
        config = evidence_large.options(size, "fused", device, folder)
        # Without a rate the weights stay, so that every round has the same numbers.
        config = dataclasses.replace(
            config, reward="benchmarks.evidence_large:reward", lr=0.0, compile=compiled
        )
        spec = read_spec(config.loss)
        training = Training(config, spec, Ranks(0, 1, torch.device(device)), None, offline=True)
        training.collector.rollout.ready(0)
        completions = training.collector.collect()
        policy: Any = training.learner.policy
        chosen, implementation = policy.attention, training.model.config._attn_implementation
        ways = {chosen.name: (chosen, implementation), "dense": (Dense(), "sdpa")}

        def learn(way: str) -> Any:
            # Switches the attention of the model without the usual checks, which take longer than
            # an update.
            policy.attention, training.model.config._attn_implementation = ways[way]
            return training._learn(completions)

        first = {way: learn(way) for way in ways}
        losses = [learned.metrics["loss"] for learned in first.values()]
        norms = [learned.grad_norm for learned in first.values()]
        gaps = {"loss": abs(losses[0] - losses[1]), "grad_norm": abs(norms[0] / norms[1] - 1)}
        agree = (
            gaps["loss"] <= evidence_large.LOSS_GAP and gaps["grad_norm"] <= evidence_large.NORM_GAP
        )
        if not agree:
            raise PolicyLossError(f"the two ways give other numbers, so nothing is timed: {gaps}")
        providers = {way: (lambda way=way: learn(way)) for way in ways}
        times = time_interleaved(providers, rounds, device)
    tokens = completions.statistics["tokens"]
    rates = {way: 1e3 * tokens / times[way]["median_ms"] for way in ways}
    return {
        "size": dataclasses.asdict(size),
        "weights": weights,
        "attention": chosen.name,
        "compiled": compiled,
        "tokens": tokens,
        "gaps": gaps,
        "times": times,
        "tokens_per_s": rates,
        "of_dense": rates[chosen.name] / rates["dense"],
        "of_before": rates[chosen.name] / BEFORE,
    }


def prepare(folder: Path, size: Size) -> None:
    """Write the model, its size, and a batch that both trainers are checked with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from policyloss_train.models import tiny_tokenizer
    from policyloss_train.setup import warm_up
    from policyloss_train.tasks import make_task

    task = make_task("sort", reward=None, seed=0)
    tokenizer = tiny_tokenizer(task)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if size.warmup:
        warm_up(model, tokenizer, task, steps=size.warmup, seed=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "size.json").write_text(json.dumps(dataclasses.asdict(size)))
    (folder / "batch.json").write_text(json.dumps({"rows": batch(len(tokenizer), size)}))


def batch(vocabulary: int, size: Size) -> list[dict[str, Any]]:
    """Random completions of uneven lengths, whose old log-probabilities make the clip bind."""
    g = torch.Generator().manual_seed(1)

    def ids(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=g).tolist()

    lengths = torch.randint(1, size.new_tokens + 1, (16,), generator=g).tolist()
    rewards = torch.rand(16, generator=g)
    groups = torch.arange(16) // 4
    advantages = pl.advantage.grpo(rewards, groups)
    rows = []
    for i, n in enumerate(lengths):
        noise = torch.rand(n, generator=g) * 2 - 1
        rows.append(
            {
                "prompt": ids(5 + i % 7),
                "completion": ids(n),
                "old_logp": (noise - torch.log(torch.tensor(float(vocabulary)))).tolist(),
                "reward": rewards[i].item(),
                "advantage": advantages[i].item(),
                "group": int(groups[i]),
            }
        )
    return rows


class Worker:
    """A trainer in a process of its own, which takes orders. A context manager."""

    def __init__(self, name: str, python: Path, folder: Path) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        command = [str(python), "-W", "ignore", "-m", "benchmarks.train_workers", name, str(folder)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._name = name
        self._answer()

    def order(self, what: str) -> dict[str, float]:
        """Send an order. → its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                numbers: dict[str, float] = json.loads(line[1:])
                return numbers
        raise PolicyLossError(f"the trainer {self._name!r} ended with {self._process.wait()}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def compare_with_trl(size: Size, python: Path, rounds: int) -> dict[str, Any]:
    """Steps of both trainers in turns, and how far their losses are apart."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        prepare(folder, size)
        pythons = {"ours": Path(sys.executable), "trl": python}
        workers = {
            who: stack.enter_context(Worker(who, where, folder)) for who, where in pythons.items()
        }
        checks = {who: worker.order("check") for who, worker in workers.items()}
        gaps = {key: abs(checks["ours"][key] / checks["trl"][key] - 1) for key in ("loss", "norm")}
        if not max(gaps.values()) <= GAP:
            raise PolicyLossError(f"the trainers give other numbers, so nothing is timed: {checks}")
        steps: dict[str, list[dict[str, float]]] = {who: [] for who in workers}
        for i in range(rounds + 1):
            for who in list(workers)[:: 1 if i % 2 else -1]:
                steps[who].append(workers[who].order("step"))
    seconds = {who: [step["seconds"] for step in all_[1:]] for who, all_ in steps.items()}
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["trl"], strict=True)]
    return {
        "size": dataclasses.asdict(size),
        "checks": checks,
        "seconds": seconds,
        "tokens": {who: [step["tokens"] for step in all_[1:]] for who, all_ in steps.items()},
        "median_s": {who: statistics.median(x) for who, x in seconds.items()},
        "faster": statistics.median(ratios),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command. → 0 if the target is reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trl", type=Path, default=ROOT / ".conformance" / "trl", metavar="VENV")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    out = args.out or ROOT / "benchmarks" / "results" / f"train_{args.device}.json"
    if args.device == "cuda" or not (args.trl / "bin" / "python").exists():
        size = evidence_large.QUICK if args.quick else evidence_large.FULL
        phases = {
            name: learning(args.device, size, args.rounds, compiled=name == "compiled")
            for name in ("learning", "compiled")
        }
        for name, phase in phases.items():
            rates, way = phase["tokens_per_s"], phase["attention"]
            print(
                f"{name}: attention {way}, {rates[way]:,.0f} completion tokens/s in the learning "
                f"phase, {phase['of_dense']:.2f} × the dense mask ({rates['dense']:,.0f}), "
                f"{phase['of_before']:.2f} × the earlier measurement (target {TARGET:g})"
            )
        write_json(out, {"environment": environment(), **phases})
        return 0 if max(phase["of_before"] for phase in phases.values()) >= TARGET else 1
    rows = [["model", "policyloss, s", "TRL, s", "times faster"]]
    results = {}
    for name, size_ in (QUICK_SIZES if args.quick else SIZES).items():
        results[name] = result = compare_with_trl(size_, args.trl / "bin" / "python", args.rounds)
        medians = result["median_s"]
        rows.append(
            [name, f"{medians['ours']:.3f}", f"{medians['trl']:.3f}", f"{result['faster']:.2f}"]
        )
    print(table(rows))
    write_json(out, {"environment": environment(), "trl": results})
    return 0 if all(result["faster"] >= TRL_TARGET for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
