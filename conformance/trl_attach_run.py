"""`lab.attach` on TRL's own GRPOTrainer, healthy and sick; nothing is downloaded.

    python -m conformance.trl_attach_run [FOLDER]        # with TRL's Python

A rollout function samples from the trained model and reports its log-probabilities, as vLLM does:
at TRL's own temperature, or at another. FOLDER keeps the run directories with their pages.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss_lab as lab
from conformance.trl_run import Run, furthest, reward, tiny_model, train

STEPS, WIDTH = 12, 24
END = 2  # the end token of `tiny_model`
SICK, HEALTHY = 0.6, 6  # the temperature of the sampler in a sick run, after so many steps
OPTIONS = {
    "num_generations": 4,
    "num_iterations": 1,
    "gradient_accumulation_steps": 2,
    "max_completion_length": WIDTH,
    "learning_rate": 0.01,
}
TIMES = ("time", "runtime", "per_second")


@contextmanager
def peaked_model(**options: Any) -> Iterator[Path]:
    """`tiny_model` in float32, with logits of about the size that a trained model has, so that a
    temperature matters.
    """
    auto = import_module("transformers").AutoModelForCausalLM
    with tiny_model(**options) as path:
        model = auto.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight.mul_(40)
        model.save_pretrained(path)
        yield path


@torch.no_grad()
def sample(
    model: Callable[..., Any], prompts: Tensor, width: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Completions `[B, T]` of prompts `[B, P]`, and their log-probabilities at `temperature`."""
    ids, found = prompts, []
    for _ in range(width):
        logp = (model(input_ids=ids).logits[:, -1].float() / temperature).log_softmax(-1)
        new = torch.multinomial(logp.exp(), 1)
        new[torch.rand(len(new)) < 0.1] = END  # a random model hardly ever ends a completion
        found.append(logp.gather(1, new))
        ids = torch.cat([ids, new], 1)
    return ids[:, prompts.shape[1] :], torch.cat(found, 1)


def sampler(temperature: float) -> Callable[[list[str], Any], dict[str, Any]]:
    """A `rollout_func` of TRL with this temperature after `HEALTHY` steps. The prompts of a batch
    have one length.
    """

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rows = trainer.processing_class(prompts)["input_ids"]
        actual = temperature if trainer.state.global_step >= HEALTHY else 1.0
        ids, logp = sample(trainer.model, torch.tensor(rows), WIDTH, actual)
        lengths = [[*row.tolist(), END].index(END) + 1 for row in ids]
        cut = [x[:n].tolist() for x, n in zip(ids, lengths, strict=True)]
        scores = [x[:n].tolist() for x, n in zip(logp, lengths, strict=True)]
        return {"prompt_ids": rows, "completion_ids": cut, "logprobs": scores}

    return rollout


def run(
    model: Path, temperature: float, out: Path | None = None, **options: Any
) -> tuple[Run, lab.Attachment | None]:
    """Train, attached if `out` is a folder. options: of `attach`."""
    found: list[lab.Attachment] = []

    class Trainer(import_module("trl").GRPOTrainer):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            if out is not None:
                found.append(lab.attach(self, out, **options))
            return super().train(*args, **kwargs)

    done = train(
        Trainer, model, OPTIONS, STEPS, rollout_func=sampler(temperature), reward_funcs=reward
    )
    return done, found[0] if found else None


def same_numbers(a: Run, b: Run) -> bool:
    """Whether weights and metrics are equal, bit for bit; times may differ."""
    logs = [
        [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in x.logged]
        for x in (a, b)
    ]
    return furthest(a.end, b.end) == 0.0 and logs[0] == logs[1]


def main() -> int:
    """Print the verdicts; the exit status is 1 if one is not as expected."""
    torch.set_num_threads(1)
    logging.getLogger("policyloss_lab").setLevel(logging.ERROR)
    results: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as scratch, peaked_model() as model:
        out = Path(sys.argv[1] if sys.argv[1:] else scratch)
        bare, _ = run(model, 1.0)
        attached, healthy = run(model, 1.0, out / "healthy", every=1, halt_on="temperature")
        assert healthy is not None
        results[f"healthy run: {[*healthy.findings] or 'no finding'}"] = not healthy.findings
        results["weights and metrics have the same bits as without attach"] = same_numbers(
            bare, attached
        )
        stopped, sick = run(model, SICK, out / "sick", every=3, halt_on="temperature")
        assert sick is not None
        steps = max(row["step"] for row in stopped.logged)
        results[f"sampler at {SICK} from step 7: {[*sick.findings]}, halted after step {steps}"] = (
            "temperature" in sick.findings and steps == HEALTHY + 1
        )
        with broken_recorder():
            survived, broken = run(model, 1.0, out / "broken", every=1, halt_on="temperature")
        assert broken is not None
        results["an error in the recorder detaches, and the run goes on with the same bits"] = (
            not broken.active and same_numbers(bare, survived)
        )
        pages = [out / name / "report.html" for name in ("healthy", "sick")]
        results["the pages are written"] = all(page.is_file() for page in pages)
    for name, passed in results.items():
        print(f"{'passed' if passed else 'FAILED'}  {name}")
    return 0 if all(results.values()) else 1


@contextmanager
def broken_recorder() -> Iterator[None]:
    """A recorder whose fourth step raises."""
    recorder = import_module("policyloss_lab.runs.recorder").Recorder
    method = recorder.step

    def step(self: Any, metrics: Any, *, step: int) -> None:
        if step == 4:
            raise RuntimeError("a disk caught fire")
        method(self, metrics, step=step)

    recorder.step = step
    try:
        yield
    finally:
        recorder.step = method


if __name__ == "__main__":
    raise SystemExit(main())
