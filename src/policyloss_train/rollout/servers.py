"""An engine of running vLLM servers. Prompts are dealt among those that answer and have the weights
of now.

A prompt whose server fails goes to another one. A server that was restarted is given the weights
again before it gets prompts. New weights lie in a folder of the run, which the servers read.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from uuid import uuid4

from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.rollout.kept import Report
from policyloss_train.rollout.protocol import Completion, Prompt, RolloutError, Sampling, Weights
from policyloss_train.rollout.server import Server, ServerError

AT_ONCE = 64  # requests to a server at one time; it batches those that it has
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0  # between two attempts
TRIES = 3  # at least, however long they take

Job = TypeVar("Job")
T = TypeVar("T")


class Servers:
    """Every rank asks the servers; the first rank gives them weights."""

    concurrent = True

    def __init__(
        self, config: TrainConfig, ranks: Ranks, report: Report, warn: Callable[[str], None]
    ) -> None:
        self._patience, self._ranks, self._warn = config.rollout_timeout, ranks, warn
        addresses = [address.strip().rstrip("/") for address in config.rollout.split(",")]
        self._servers = [Server(address, config.rollout_timeout, report) for address in addresses]
        # No other run, and no other start of this one, calls its weights the same.
        self._run = ranks.gather(uuid4().hex[:12])[0]
        self._folder = config.out.resolve() / "rollout_weights"
        self._version: int | None = None
        self._failing: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE * len(addresses), "policyloss-servers")
        self._persist(lambda: len(self._good(Server.check)), len(addresses))
        if ranks.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """The completions of each prompt; in every round, those that are missing are asked of the
        next server.
        """
        answers: dict[int, list[Completion]] = {}
        turns = iter(range(1 << 62))

        def ask() -> int:
            servers, turn = self._good(self._prepare), next(turns)
            missing = [i for i in range(len(prompts)) if i not in answers]
            jobs = [(i, servers[(i + turn) % len(servers)]) for i in missing if servers]
            answers.update(self._each(jobs, lambda job: self._completions(job, prompts, sampling)))
            return len(answers)

        self._persist(ask, len(prompts))
        return [answers[i] for i in range(len(prompts))]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Write a folder, and have the servers read it. One that does not answer gets it later."""
        if self._ranks.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
        before, self._version = self._version, version
        weights.save(self._folder / str(version))
        if self._ranks.is_first:
            self._persist(lambda: len(self._good(self._prepare)), 1)
            if before not in (None, version):
                shutil.rmtree(self._folder / str(before), ignore_errors=True)
        self._ranks.barrier()

    def sleep(self) -> None:
        """Nothing to do: the servers have memory of their own."""

    def wake(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Remove the weights; the servers keep those that they have read."""
        self._threads.shutdown(cancel_futures=True)
        if self._ranks.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _name(self) -> str:
        """What the servers call the weights of now."""
        return f"{self._run}-{self._version}"

    def _prepare(self, server: Server) -> None:
        if server.version() != self._name:
            server.load(self._folder / str(self._version), self._name)

    def _completions(
        self, job: tuple[int, Server], prompts: Sequence[Prompt], sampling: Sampling
    ) -> tuple[int, list[Completion]]:
        i, server = job
        assert self._version is not None
        completions = server.generate(prompts[i], sampling, self._name, self._version)
        if self._failing.pop(server.address, None):
            self._warn(f"the server {server.address} answers again")
        return i, completions

    def _good(self, prepare: Callable[[Server], None]) -> list[Server]:
        """The servers that `prepare` works for."""

        def prepared(server: Server) -> Server:
            prepare(server)
            return server

        return self._each(self._servers, prepared)

    def _each(self, jobs: Sequence[Job], work: Callable[[Job], T]) -> list[T]:
        """`work(job)` of all jobs at one time, without those whose server failed; that is noted."""

        def safely(job: Job) -> T | ServerError:
            try:
                return work(job)
            except ServerError as error:
                return error

        results: list[T] = []
        for result in self._threads.map(safely, jobs):
            if not isinstance(result, ServerError):
                results.append(result)
                continue
            if result.address not in self._failing:
                self._warn(f"{result} It is asked again, and so are others.")
            self._failing[result.address] = str(result)
        return results

    def _persist(self, attempt: Callable[[], int], wanted: int) -> None:
        """Repeat `attempt`, which returns how much is done, until that is `wanted`.

        Waits grow while nothing moves; after `--rollout-timeout` seconds of that, it is an error.
        """
        done, tries, since, wait = -1, 0, time.monotonic(), FIRST_WAIT_S
        while (now_done := attempt()) < wanted:
            if now_done > max(done, 0):
                tries, since, wait = 0, time.monotonic(), FIRST_WAIT_S
            done, tries = now_done, tries + 1
            if tries >= TRIES and time.monotonic() - since >= self._patience:
                failing = " ".join(self._failing.values())
                raise RolloutError(
                    f"no completions have come for {self._patience:g} s (--rollout-timeout): "
                    f"{failing}"
                )
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
