"""`policyloss train`: sample, score, judge, update, again — the whole run in the order in which it happens.

Everything random follows from the seed and the number of the step, and a checkpoint holds all that changes. So a run that was
killed and resumed gives, on the same CPU, the bits of one that was not.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import policyloss as pl
from policyloss.errors import PolicyLossError
from policyloss.train.batches import Pack
from policyloss.train.collect import Collector, Completions
from policyloss.train.config import TrainConfig
from policyloss.train.distributed import Ranks, gathered
from policyloss.train.evaluate import Evaluation, evaluate
from policyloss.train.finite import NotFiniteError
from policyloss.train.learner import Learned, rate
from policyloss.train.preflight import preflight
from policyloss.train.run.directory import RunDir
from policyloss.train.run.resume import last_good, restore, store
from policyloss.train.run.resumed_options import continued, resume_command
from policyloss.train.setup import Models, build, distribute
from policyloss.train.view.display import Display
from policyloss.train.view.token_log import ratio_histogram, rollout_rows
from policyloss.train.view.track import service_module
from policyloss.train.watch import Watch

INTERRUPTED = 130


def train(config: TrainConfig, spec: pl.LossSpec, *, offline: bool = False) -> int:
    """Train as `config` says. → the exit code: 0; or 130 if it was interrupted, left a checkpoint, and said how to resume.

    A run that is resumed must have the options it was started with, but for those in `resumed_options.CHANGEABLE`, and `extend`.
    offline: do not download the model, because it is a run directory that names it and no user.
    """
    if config.resume:
        config = continued(config, spec)
    if config.track:
        service_module(config.track)  # an error now, not when there is a run directory already
    ranks = Ranks.start(config.device, config.rank_timeout)
    run = None
    if ranks.is_first:
        options = replace(config, resume=False, extend=None).to_dict()
        run = RunDir.open(config.out) if config.resume else RunDir.create(config.out, options, spec.to_dict())
        if options != run.config:
            run.rewrite(options)
        if config.track:
            run.track(config.track)
    try:
        return Training(config, spec, ranks, run, offline).run()
    finally:
        if run is not None:
            run.close()


class Training:
    """A run in progress. step: how many are done. queue: completions that wait for their step (`staleness`)."""

    def __init__(self, config: TrainConfig, spec: pl.LossSpec, ranks: Ranks, run: RunDir | None, offline: bool) -> None:
        self.config, self.spec, self.ranks, self.run_dir = config, spec, ranks, run
        self.display = Display(config.steps, quiet=not ranks.is_first)
        if config.advantage_notice:
            self.display.say(config.advantage_notice)
        self.watch = Watch(ranks, self.display.say, config.heartbeat)
        self.models: Models = build(config, spec, ranks, say=self.display.say, warn=self.display.warn, offline=offline)
        self.collector = Collector(config, self.models.task, self.models.tokenizer, ranks, warn=self.display.warn, at=self.at)
        self.held_out = list(self.models.task.held_out[: config.eval_prompts])
        self.queue: deque[Completions] = deque()
        self.step = 0

    def at(self, where: str) -> None:
        """Tell the watch what begins now."""
        self.watch.at(f"step {self.step + 1}, {where}")

    def leave_out(self, split: str, places: frozenset[int]) -> None:
        """Pass over some prompts of a split."""
        if split == "train":
            self.collector.unusable = places
        else:
            self.held_out = [example for i, example in enumerate(self.held_out) if i not in places]

    def run(self) -> int:
        """Every step that is left. What ends it early says what is left of it."""
        try:
            with self.watch:
                return self._run()
        except NotFiniteError as error:
            raise NotFiniteError(f"stopped in step {self.step + 1}: {error} {self._last_good()}") from error
        except RuntimeError as error:
            if not self.watch.lost_a_rank(error):
                raise
            text = f"rank {self.ranks.rank} lost another rank while {self.watch.where}: {self.watch.places()}."
            raise PolicyLossError(f"{text} {self._last_good()} ({error})") from error

    def _run(self) -> int:
        config = self.config
        self._start()
        with self.display, self._interruptible() as interrupted:
            while self.step < config.steps and not interrupted():
                self._step()
                last = self.step == config.steps
                if last or (config.checkpoint_every and self.step % config.checkpoint_every == 0):
                    store(self)
            if self.step < config.steps:
                store(self)
                self.display.say(f"stopped after step {self.step}; go on with: {resume_command(config)}")
                return INTERRUPTED
        self.display.say(f"done; everything is in {config.out}. To look at it: policyloss report {config.out}")
        return 0

    def _start(self) -> None:
        """Step 0: the policy as it is before it is trained; or, of a run that is resumed, as it was."""
        self.watch.at("looking at prompts, reward and disk")
        preflight(self)
        self.watch.at("the start")
        if self.config.resume:
            distribute(self.models, self.config, self.ranks)
            restore(self)
            return
        self.models.warm_up(self.config, self.display)
        distribute(self.models, self.config, self.ranks)
        began = time.perf_counter()
        self._log(self._evaluation(), {"step_s": time.perf_counter() - began})
        store(self)

    def _step(self) -> None:
        """Sample, score, learn."""
        config, began = self.config, time.perf_counter()
        while len(self.queue) <= config.staleness:
            with gathered(self.models.policy):
                self.queue.append(self.collector.collect(self.models.model))
        completions = self.queue.popleft()
        sampled = time.perf_counter()
        learned = self._learn(completions)
        timing = {"sample_s": sampled - began, "learn_s": time.perf_counter() - sampled, "step_s": time.perf_counter() - began}
        if timing["step_s"] > 0:  # a clock may stand still
            timing["tokens_per_s"] = completions.statistics["tokens"] / timing["step_s"]
        self.step += 1
        metrics = {**completions.statistics, **self._learned(learned)}
        if self.step == config.steps or (config.eval_every and self.step % config.eval_every == 0):
            metrics |= self._evaluation()
        self._log(metrics, timing)
        every = config.rollouts_every
        if self.run_dir is not None and every and (self.step == 1 or self.step % every == 0):
            rows = rollout_rows(self.step, completions, learned, self.models, self.spec, config.rollouts_rows)
            self.run_dir.rollouts(rows)

    def _learn(self, completions: Completions) -> Learned:
        """One step of learning, with the learning rate of now."""
        self.at("learning")
        learner, config = self.models.learner, self.config
        share = rate(config, self.step)
        for optimizer, lr in ((learner.optimizer, config.lr), (learner.critic_optimizer, config.critic_lr)):
            for group in [] if optimizer is None else optimizer.param_groups:
                group["lr"] = lr * share
        keys = sorted(key for keys in self.ranks.gather(completions.keys) for key in keys)
        index = {key: i for i, key in enumerate(keys)}
        own = [index[key] for key in completions.keys]
        pack = Pack.of(completions.samples, train_on_cut=config.overlong != "mask") if own else Pack.nothing()
        return learner.learn(pack, own, len(keys), self.step, completions.greedy)

    def _learned(self, learned: Learned) -> dict[str, Any]:
        """What a step of learning says of itself, by name."""
        mask = learned.pack.tokens["mask"]
        chosen = learned.pack.tokens["advantages"][mask].double()
        n, total, squares = self.ranks.sum(torch.stack([mask.sum().double(), chosen.sum(), (chosen**2).sum()])).tolist()
        mean = total / max(n, 1)
        found: dict[str, Any] = {f"policy/{name}": x for name, x in learned.metrics.items()}
        found |= {f"value/{name}": x for name, x in learned.values.items()}
        found |= {"advantage/mean": mean, "advantage/std": max(squares / max(n, 1) - mean**2, 0.0) ** 0.5}
        found |= {"grad_norm": learned.grad_norm, "updates": float(learned.updates), "skipped": float(learned.skipped)}
        found["lr"] = self.config.lr * rate(self.config, self.step - 1)
        if self.models.learner.critic is not None:
            found["critic_grad_norm"] = learned.critic_grad_norm
        return found | {"ratio_histogram": ratio_histogram(learned, self.ranks)}

    def _evaluation(self) -> dict[str, float]:
        """Accuracy on held-out prompts, each rank on its share."""
        self.watch.at(f"step {self.step}, evaluating")
        config, models = self.config, self.models
        examples = self.held_out[self.ranks.rank :: self.ranks.world]
        budget: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "batch_tokens": config.sampling_tokens}
        with gathered(models.policy):
            own = evaluate(models.model, models.tokenizer, self.collector.forgiving, examples, **budget).results if examples else ()
        self.watch.at(f"step {self.step}, gathering the evaluation of all ranks")
        found = Evaluation.of([result for share in self.ranks.gather(own) for result in share], models.task.success)
        return {"eval/accuracy": found.accuracy, "eval/reward": found.score, "eval/length": found.mean_length}

    def _last_good(self) -> str:
        """The sentence that says where to go on from."""
        path = last_good(self.config.out / "checkpoints")
        kept = f"The last good checkpoint is {path}" if path else "There is no good checkpoint"
        return f"{kept}; go on with: {resume_command(self.config)}"

    def _log(self, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        """To the run directory and the display."""
        if self.run_dir is not None:
            self.run_dir.log(self.step, metrics, timing)
        self.display.update(self.step, metrics, timing)

    @contextmanager
    def _interruptible(self) -> Iterator[Any]:
        """A function that says whether Ctrl-C was pressed: the step is finished first. A second one stops at once."""
        pressed: list[int] = []

        def press(number: int, frame: Any) -> None:
            if pressed:
                raise KeyboardInterrupt
            pressed.append(number)
            self.display.say("finishing this step, then writing a checkpoint; Ctrl-C again stops at once")

        before = {number: signal.signal(number, press) for number in (signal.SIGINT, signal.SIGTERM)} if _in_main_thread() else {}
        try:
            yield lambda: any(self.ranks.gather(bool(pressed)))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
