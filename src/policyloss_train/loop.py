"""`policyloss train`: sample, score, compute advantages, update, and repeat.

Everything random follows from the seed and the step, and a checkpoint holds all state that changes.
So, on the same CPU, a run that was killed and resumed has the same bits as an uninterrupted run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from policyloss.errors import PolicyLossError
from policyloss.spec import LossSpec
from policyloss_train.batches import Pack
from policyloss_train.chat import read_template
from policyloss_train.collect import Collector, Completions, mean_outcomes, score_answers
from policyloss_train.config import TrainConfig, defaults_of
from policyloss_train.distributed import Ranks
from policyloss_train.learner import Learned
from policyloss_train.optimizers import rate
from policyloss_train.preflight import preflight, refuse_missing
from policyloss_train.rollout.protocol import RolloutError
from policyloss_train.rollout.session import make_rollout
from policyloss_train.run import resume
from policyloss_train.run.directory import RunDir, free_directory
from policyloss_train.sampler import Sample, end_ids
from policyloss_train.setup import build, distribute, teach
from policyloss_train.tasks.rewards import tolerant_reward
from policyloss_train.tinker.service import LostServerError
from policyloss_train.view.display import Display
from policyloss_train.view.token_log import ANSWERS, TokenLog, ratio_histogram
from policyloss_train.watch import Hints, NotFiniteError, Watch, mismatch_of

INTERRUPTED = 130
RECONNECTS = 3  # to a lost server, in the same step


def train(
    config: TrainConfig, spec: LossSpec, *, offline: bool = False, named_out: bool = True
) -> int:
    """Train with the options `config`; returns the exit code: 0, or 130 if the run was interrupted,
    after writing a checkpoint and printing how to resume. A resumed run must have the options that
    it was started with, except for `extend` and the options in `resume.CHANGEABLE`.

    offline: do not download the model, because a run directory, not the user, named it.
    named_out: False if the user chose no directory, so that a new run may use path-2, path-3, ….
    """
    config = config.with_loss(spec)
    if config.resume:
        config = resume.continue_options(config, spec)
    refuse_missing(config)  # before a run directory is created
    ranks = Ranks.start(config.device, config.rank_timeout)
    if not named_out:
        config = replace(config, out=ranks.gather(free_directory(config.out))[0])
    with _run_directory(config, spec) if ranks.is_first else nullcontext() as run:
        if run is not None and config.track:
            run.track(config.track)
        code = Training(config, spec, ranks, run, offline).run()
    ranks.stop()
    return code


def _run_directory(config: TrainConfig, spec: LossSpec) -> RunDir:
    """Create or reopen the run directory, with the current options."""
    options = replace(config, **resume.UNSTARTED).to_dict()
    if config.resume:
        run = RunDir.open(config.out)
    else:
        loss, template = resume.loss_data(spec, config.loss), config.chat_template
        defaults = {**TrainConfig().to_dict(), **defaults_of(config, spec)}
        text = read_template(template) if template else None
        run = RunDir.create(config.out, options, loss, defaults, text)
    if options != run.config:
        run.rewrite(options)
    return run


class Training:
    """A run in progress. step: the number of finished steps."""

    def __init__(
        self, config: TrainConfig, spec: LossSpec, ranks: Ranks, run: RunDir | None, offline: bool
    ) -> None:
        self.config, self.spec, self.ranks, self.run_dir = config, spec, ranks, run
        self.display = Display(config.steps, quiet=not ranks.is_first)
        self.display.say(config.headline(spec))
        self.watch = Watch(ranks, self.display.say, config.heartbeat)
        say, warn = self.display.say, self.display.warn
        self.setup = build(config, spec, ranks, say=say, warn=warn, offline=offline)
        self.task, self.tokenizer, self.model, self.learner = self.setup
        if run is not None:
            run.note(attention=self.learner.attention.name)
        ends = end_ids(self.model, self.tokenizer)
        self.token_log = TokenLog(config, spec, self.task, self.tokenizer, ends, warn)
        rollout = make_rollout(config, self.setup, warn)
        self.collector = Collector(config, self.task, rollout, ranks, warn=warn, at=self.at)
        # The objects with state, by their names in a checkpoint.
        self.stateful = {"learner": self.learner, "collector": self.collector}
        self.checkpoints = config.out / "checkpoints"
        # A failing reward must not end an evaluation.
        self.score = tolerant_reward(self.task, config.reward_timeout, warn)
        self.hints = Hints(config, self.task.success, warn)
        self.held_out = list(self.task.held_out[: config.eval_prompts])
        self.step = 0
        self.losses_of_server: Counter[int] = Counter()  # by step

    def at(self, where: str) -> None:
        """Record the phase that begins now."""
        self.watch.at(f"step {self.step + 1}, {where}")

    def run(self) -> int:
        """Run the remaining steps. An error that ends the run names its last good checkpoint."""
        try:
            with self.watch:
                return self._run()
        except (NotFiniteError, RolloutError) as error:
            text = f"stopped in step {self.step + 1}: {error} {self._last_good()}"
            raise type(error)(text) from error
        except RuntimeError as error:
            if not self.watch.lost_a_rank(error):
                raise
            raise PolicyLossError(
                f"rank {self.ranks.rank} lost another rank while {self.watch.where}: "
                f"{self.watch.places()}. {self._last_good()} ({error})"
            ) from error
        finally:
            self.collector.close()

    def _run(self) -> int:
        config = self.config
        self._start()
        with self.display, self._interruptible() as interrupted:
            while self.step < config.steps and not interrupted():
                try:
                    self._step()
                    if self._due(config.checkpoint_every, last=True):
                        self._store()
                except LostServerError as error:
                    self._reconnect(error)
            if self.step < config.steps:
                self._store()
                command = resume.resume_command(config)
                self.display.say(f"stopped after step {self.step}; go on with: {command}")
                return INTERRUPTED
        look = f"policyloss report {config.out}"
        self.display.say(f"done; everything is in {config.out}. To look at it: {look}")
        return 0

    def _start(self) -> None:
        """Step 0: warm up, evaluate and store; a resumed run loads its last checkpoint."""
        self.watch.at("looking at prompts, reward and disk")
        preflight(self)
        self.watch.at("the start")
        if self.config.resume:
            distribute(self.learner)
            self._restore()
            return
        teach(self.setup, self.config, self.display.warmup)
        distribute(self.learner)
        began = time.perf_counter()
        self._log(self._evaluation(), {"step_s": time.perf_counter() - began})
        self._store()

    def _store(self) -> None:
        """Sync the logged lines to the disk, then write a checkpoint."""
        self.watch.at(f"step {self.step}, writing a checkpoint")
        if self.run_dir is not None:
            self.run_dir.sync()
        resume.store(self.checkpoints, self.step, self.stateful, self.ranks, keep=self.config.keep)

    def _restore(self) -> None:
        """Continue from the last good checkpoint, and drop lines that were logged after it."""
        layout = self.learner.layout()
        self.step = resume.restore(self.checkpoints, self.stateful, self.ranks, layout)
        if self.run_dir is not None:
            self.run_dir.truncate(self.step)
        self.ranks.barrier()
        self.display.say(f"resumed {self.config.out} after step {self.step}")

    def _reconnect(self, error: LostServerError) -> None:
        """Continue from the last checkpoint with a server that lost the policy, or raise."""
        self.losses_of_server[self.step] += 1
        if self.losses_of_server[self.step] > RECONNECTS:
            raise error
        self.display.warn(f"{error} Going on from the last checkpoint.")
        self._restore()
        self.collector.rollout.rest()

    def _step(self) -> None:
        """Sample, score, learn."""
        config, began = self.config, time.perf_counter()
        completions = self.collector.next_step(self.step)
        sampled = time.perf_counter()
        learned = self._learn(completions)
        done = time.perf_counter()
        self.collector.finish()
        end = time.perf_counter()
        timing = {"sample_s": end - done + sampled - began, "learn_s": done - sampled}
        timing["step_s"] = end - began
        if end > began:  # a coarse clock may not advance
            timing["tokens_per_s"] = completions.statistics["tokens"] / (end - began)
        self.step += 1
        known = self.collector.rollout.mismatched  # already reported
        first = self.step == 1 and config.old_logp == "recompute" and not known
        if first and (problem := mismatch_of(learned.pack)) is not None:
            self.display.warn(problem)
        metrics = {**completions.statistics, **self._metrics_of(learned)}
        if self._due(config.eval_every, last=True):
            metrics |= self._evaluation()
        self._log(metrics, timing)
        self.hints.look(metrics)
        if self.run_dir is not None and config.rollouts_every:
            due, size = self._due(config.rollouts_every, first=True), self.run_dir.size("rollouts")
            samples = completions.samples
            rows = self.token_log.rollouts(self.step, samples, learned, due=due, size=size)
            self.run_dir.append("rollouts", rows)

    def _due(self, every: int, *, first: bool = False, last: bool = False) -> bool:
        """Whether an action is due now. every: steps between two actions; 0 is never. first: also
        due after the first step, unless `every` is 0. last: always due after the last step.
        """
        if last and self.step == self.config.steps:
            return True
        return bool(every) and (self.step % every == 0 or (first and self.step == 1))

    def _learn(self, completions: Completions) -> Learned:
        """One step of learning, with the learning rate of this step."""
        self.at("learning")
        learner, config = self.learner, self.config
        share, rates = rate(config, self.step), (config.lr, config.critic_lr)
        for optimizer, lr in zip((learner.optimizer, learner.critic_optimizer), rates, strict=True):
            for group in [] if optimizer is None else optimizer.param_groups:
                group["lr"] = lr * share
        keys = sorted(key for keys in self.ranks.gather(completions.keys) for key in keys)
        index = {key: i for i, key in enumerate(keys)}
        places = [index[key] for key in completions.keys]
        pack = Pack.of(completions.samples, train_on_cut=config.overlong != "mask")
        if config.staleness or "ages" in learner.spec.reads:
            pack = pack.with_ages(completions.samples, self.step)
        if completions.greedy is not None:
            # `Pack.nothing` has one sequence.
            greedy = completions.greedy if places else torch.zeros(1)
            pack = replace(pack, sequences={**pack.sequences, "greedy": greedy})
        return learner.learn(pack, places, len(keys), self.step)

    def _metrics_of(self, learned: Learned) -> dict[str, Any]:
        """The metrics of a step of learning, by name."""
        mask = learned.pack.tokens["mask"]
        chosen = learned.pack.tokens["advantages"][mask].double()
        n, total, squares = self.ranks.sum(
            torch.stack([mask.sum().double(), chosen.sum(), (chosen**2).sum()])
        ).tolist()
        mean = total / max(n, 1)
        with_critic = self.learner.critic is not None
        return {
            **{f"policy/{name}": x for name, x in learned.metrics.items()},
            **{f"value/{name}": x for name, x in learned.values.items()},
            "advantage/mean": mean,
            "advantage/std": max(squares / max(n, 1) - mean**2, 0.0) ** 0.5,
            "grad_norm": learned.grad_norm,
            "updates": float(learned.updates),
            "skipped": float(learned.skipped),
            "lr": self.config.lr * rate(self.config, self.step - 1),
            **({"critic_grad_norm": learned.critic_grad_norm} if with_critic else {}),
            "ratio_histogram": ratio_histogram(learned, self.ranks),
        }

    def _evaluation(self) -> dict[str, float]:
        """Accuracy on held-out prompts, each rank on its share."""
        self.watch.at(f"step {self.step}, evaluating")
        examples = self.held_out[self.ranks.rank :: self.ranks.world]
        self.collector.rollout.ready(self.step)
        answers = score_answers(examples, self.collector.answers(examples), self.score)
        self.watch.at(f"step {self.step}, gathering the evaluation of all ranks")
        shares = self.ranks.gather([(s.reward, len(s.completion_ids)) for s in answers])
        means = mean_outcomes([one for share in shares for one in share], self.task.success)
        self._store_answers(answers)
        return {
            **{f"eval/{name}": mean for name, mean in means.items()},
            # Equal prompts have equal answers, so they count as one observation.
            "eval/prompts": float(len({example.prompt for example in self.held_out})),
        }

    def _store_answers(self, samples: list[Sample]) -> None:
        """Write the scored answers to the first held-out prompts, of all ranks."""
        if not self.config.rollouts_every:
            return
        first = {example.id for example in self.held_out[:ANSWERS]}
        shares = self.ranks.gather([s for s in samples if s.example in first])
        if self.run_dir is not None:
            answers = sorted((s for share in shares for s in share), key=lambda s: s.example)
            rows = self.token_log.answers(self.step, answers, self.run_dir.size("answers"))
            self.run_dir.append("answers", rows)

    def _last_good(self) -> str:
        """A sentence with the last good checkpoint and the command that resumes it."""
        path = resume.last_good(self.checkpoints)
        kept = f"The last good checkpoint is {path}" if path else "There is no good checkpoint"
        return f"{kept}; go on with: {resume.resume_command(self.config)}"

    def _log(self, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        """Write the numbers of a step to the run directory and the display."""
        if self.run_dir is not None:
            self.run_dir.log(self.step, metrics, timing)
        self.display.update(self.step, metrics, timing)

    @contextmanager
    def _interruptible(self) -> Iterator[Any]:
        """A function that returns whether Ctrl-C was pressed; a second Ctrl-C stops at once."""
        pressed: list[int] = []

        def press(number: int, frame: Any) -> None:
            if pressed:
                raise KeyboardInterrupt
            pressed.append(number)
            self.display.say("finishing this step and a checkpoint; Ctrl-C again stops at once")

        in_main_thread = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
        before = {number: signal.signal(number, press) for number in signals}
        try:
            yield lambda: any(self.ranks.gather(bool(pressed)))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
