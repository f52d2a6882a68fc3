"""An engine of running vLLM servers. Prompts are distributed over the servers that answer and have
the current weights.

If a server fails, its prompts go to another server. A restarted server loads the weights again
before it gets prompts. The servers receive new weights over NCCL (`transfer`) if they can, and else
read them from a folder of the run.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from policyloss.errors import InputError, PolicyLossError, safe_repr, visible
from policyloss_lab.runs.files import damage_named
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks, Say
from policyloss_train.rollout import protocol
from policyloss_train.rollout.protocol import Completion, Prompt, Sampling, Weights
from policyloss_train.rollout.transfer import Transfer
from policyloss_train.rollout.vllm_engine import TopLogprobs, parameters

AT_ONCE = 64  # concurrent requests to a server, which batches them
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0  # between two attempts
TRIES = 3  # the fewest attempts, however long they take

Job = TypeVar("Job")
T = TypeVar("T")


class Servers(protocol.Engine):
    """Every rank sends prompts to the servers; the first rank updates their weights."""

    concurrent = True

    def __init__(self, config: TrainConfig, ranks: Ranks, report: TopLogprobs, warn: Say) -> None:
        self._patience, self._ranks, self._warn = config.rollout_timeout, ranks, warn
        addresses = [address.strip().rstrip("/") for address in config.rollout.split(",")]
        self._servers = [Server(address, config.rollout_timeout, report) for address in addresses]
        # Unique to this start of this run, so that no other weights have this name.
        self._run = ranks.gather(uuid4().hex[:12])[0]
        self._folder = config.out.resolve() / "rollout_weights"
        self._version = -1
        self._failing: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE * len(addresses), "policyloss-servers")
        self._persist(lambda: len(self._good(Server.check)), len(addresses))
        self._transfer: Transfer | None = None
        if ranks.gather(all(server.offers_nccl for server in self._servers))[0]:
            self._transfer = Transfer(self._servers, ranks, self._threads, self._patience)
        if ranks.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """The completions of each prompt. A failed prompt goes to the next server."""
        answers: dict[int, list[Completion]] = {}
        turns = iter(range(1 << 62))

        def complete(job: tuple[int, Server]) -> tuple[int, list[Completion]]:
            i, server = job
            completions = server.generate(prompts[i], sampling, self._name, self._version)
            if self._failing.pop(server.address, None):
                self._warn(f"the server {server.address} answers again")
            return i, completions

        def request() -> int:
            servers, turn = self._good(self._prepare), next(turns)
            missing = [i for i in range(len(prompts)) if i not in answers]
            jobs = [(i, servers[(i + turn) % len(servers)]) for i in missing if servers]
            answers.update(self._each(jobs, complete))
            return len(answers)

        self._persist(request, len(prompts))
        return [answers[i] for i in range(len(prompts))]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Send the weights over NCCL, or write a folder that the servers read. A server that does
        not answer reads it later.
        """
        before, self._version = self._version, version
        if self._transfer is not None:
            problem = self._transfer.send(weights, self._name)
            if problem is None:
                return
            self._transfer = None
            self._warn(
                f"the servers read weights from {self._folder}, because the transfer over NCCL "
                f"failed: {problem}"
            )
        if self._ranks.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
        weights.save(self._folder / str(version))
        if self._ranks.is_first:
            self._persist(lambda: len(self._good(self._prepare)), 1)
            if before not in (-1, version):
                shutil.rmtree(self._folder / str(before), ignore_errors=True)
        self._ranks.barrier()

    def close(self) -> None:
        """Remove the folder of weights; the servers keep the weights that they have loaded."""
        self._threads.shutdown(cancel_futures=True)
        if self._ranks.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _name(self) -> str:
        """The servers' name for the current weights."""
        return f"{self._run}-{self._version}"

    def _prepare(self, server: Server) -> None:
        if server.version() != self._name:
            if self._transfer is not None:
                raise ServerError(server, "was restarted, and has no weights before the next step.")
            server.load(self._folder / str(self._version), self._name)

    def _good(self, prepare: Callable[[Server], None]) -> list[Server]:
        """The servers on which `prepare` succeeds."""

        def prepared(server: Server) -> Server:
            prepare(server)
            return server

        return self._each(self._servers, prepared)

    def _each(self, jobs: Sequence[Job], work: Callable[[Job], T]) -> list[T]:
        """Run `work(job)` for all jobs at once; record server failures and return other results."""

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
                self._warn(f"{result} It is tried again, and its prompts go to other servers.")
            self._failing[result.address] = str(result)
        return results

    def _persist(self, attempt: Callable[[], int], wanted: int) -> None:
        """Repeat `attempt`, which returns the number of finished jobs, until `wanted` are finished.

        Without progress, waits grow, and after `--rollout-timeout` seconds an error is raised.
        """
        done, tries, since, wait = -1, 0, time.monotonic(), FIRST_WAIT_S
        while (now_done := attempt()) < wanted:
            if now_done > max(done, 0):
                tries, since, wait = 0, time.monotonic(), FIRST_WAIT_S
            done, tries = now_done, tries + 1
            if tries >= TRIES and time.monotonic() - since >= self._patience:
                failing = " ".join(self._failing.values())
                raise protocol.RolloutError(
                    f"no completions have come for {self._patience:g} s (--rollout-timeout): "
                    f"{failing}"
                )
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)


LOOK_S = 10.0  # seconds that a server may take to report its weights
ANSWER_BYTES = 4 << 20  # of an answer, headers included, in addition to its completions
NUMBER_BYTES = 512  # of one log-probability and its token, as JSON


class ServerError(PolicyLossError):
    """A server failed or sent an invalid answer; a later attempt or another server may succeed."""

    def __init__(self, server: Server, problem: str) -> None:
        super().__init__(visible(" ".join(f"the server {server.address} {problem}".split())))
        self.address = server.address


class Server:
    """timeout: in seconds, per answer. report: the log-probabilities to request for each token."""

    def __init__(self, address: str, timeout: float, report: TopLogprobs) -> None:
        if not address.startswith(("http://", "https://")) or address.count("/") > 2:
            raise InputError(f"--rollout names the server {address!r}; give http://host:port.")
        self.address, self._timeout, self._report = address, timeout, report
        self.offers_nccl = False

    def check(self) -> None:
        """Raise unless the server reports enough log-probabilities, after temperature and cuts."""
        info = self.call("/server_info?config_format=json", timeout=LOOK_S)
        transfer = _get(info, "vllm_config", "weight_transfer_config")
        self.offers_nccl = _get(transfer, "backend") == "nccl"
        model = _get(info, "vllm_config", "model_config")
        mode, most = _get(model, "logprobs_mode"), _get(model, "max_logprobs")
        if mode != "processed_logprobs":
            raise InputError(
                f"the server {self.address} reports {safe_repr(mode)}, which are not the "
                "log-probabilities that it samples by; start it with --logprobs-mode "
                "processed_logprobs."
            )
        count = self._report.count
        if isinstance(most, int) and 0 <= most < count:
            raise InputError(
                f"the server {self.address} reports {most} log-probabilities of a token at most, "
                f"and --top-p and --top-k need {count}; start it with --max-logprobs {count}."
            )

    def version(self) -> str:
        """The name of the server's weights."""
        return str(_get(self.call("/weight_info", timeout=LOOK_S), "weight_version"))

    def load(self, folder: Path, version: str) -> None:
        """Make the server load weights from a folder, and name these weights `version`."""
        self.call("/pause?mode=wait", {})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.call("/collective_rpc", reload)
        self.call("/update_weight_version", {"new_version": version})
        self.call("/resume", {})
        if (loaded := self.version()) != version:
            shown = safe_repr(loaded)
            raise ServerError(self, f"has the weights {shown} after it loaded {version}.")

    def generate(
        self, prompt: Prompt, sampling: Sampling, name: str, version: int
    ) -> list[Completion]:
        """The completions of a prompt. Raises unless the weights `name` sampled all of them."""
        count = self._report.count if sampling.support else 0
        body = {"token_ids": prompt.ids, "sampling_params": parameters(prompt, sampling, count)}
        numbers = prompt.number * sampling.max_new_tokens * (1 + count)
        answer = self.call("/inference/v1/generate", body, numbers=numbers)
        with damage_named("gave half an answer", raises=partial(ServerError, self)):
            choices = answer["choices"]
            if len(choices) != prompt.number:
                raise ServerError(self, f"gave {len(choices)} completions, not {prompt.number}.")
            completions = [self._completion(choice, name, version, count) for choice in choices]
            for one in completions:
                wrong = protocol.problem(one, sampling, self._report.vocabulary, version)
                if wrong is not None:
                    raise ServerError(self, f"gave a completion {wrong}.")
        return completions

    def _completion(self, choice: Any, name: str, version: int, count: int) -> Completion:
        spans = [span["version"] for span in choice["weight_versions"]]
        if spans != [name]:
            raise ServerError(self, f"sampled with the weights {safe_repr(spans)}, not {name}.")
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise ServerError(self, f"ended a completion by {safe_repr(reason)}.")
        content = choice["logprobs"]["content"]
        logp = [token["logprob"] for token in content]
        support = None
        if count:
            rows = [token["top_logprobs"] for token in content]
            ids = _table([[top["token_id"] for top in row] for row in rows], count, int)
            likeliest = _table([[top["logprob"] for top in row] for row in rows], count, int, float)
            if not (likeliest <= protocol.NOISE).all():
                raise ServerError(self, "gave log-probabilities above 0.")
            support = self._report.support(ids, likeliest)
        return Completion(choice["token_ids"], logp, reason == "stop", version, support)

    def call(
        self, path: str, body: Any = None, timeout: float | None = None, numbers: int = 0
    ) -> Any:
        """The server's JSON answer. body: of a POST. numbers: of requested log-probabilities."""
        headers = {"Content-Type": "application/json"}
        if "VLLM_API_KEY" in os.environ:
            headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
        data = None if body is None else json.dumps(body).encode()
        timeout = timeout or self._timeout
        try:
            status, answer = self._answer(path, data, headers, timeout, numbers)
            if status // 100 == 2:
                return json.loads(answer or b"null")
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            late = isinstance(error, TimeoutError)
            why = f" in {timeout:g} s." if late else f": {error!s:.500}."
            raise ServerError(self, f"did not answer {path}{why}") from error
        text = f"answered {path} with {status}: {answer[:500].decode(errors='replace')}"
        if status >= 500:
            raise ServerError(self, text)
        if status == 404:
            text += (
                ". Use vLLM 0.32 or later, and start it with VLLM_SERVER_DEV_MODE=1, so that its "
                "weights can be updated."
            )
        raise InputError(visible(f"the server {self.address} {text}"))

    def _answer(
        self, path: str, data: bytes | None, headers: dict[str, str], seconds: float, numbers: int
    ) -> tuple[int, bytes]:
        """Status and body. A proxy or a redirection would send the key to another host."""
        deadline = time.monotonic() + seconds
        address = urlsplit(self.address)
        https = address.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        with closing(kind(address.netloc, timeout=seconds)) as connection:
            connection.request("GET" if data is None else "POST", path, data, headers)
            room = ANSWER_BYTES + NUMBER_BYTES * numbers
            reader: Any = _Reader(connection.sock, deadline, room)
            answer = http.client.HTTPResponse(reader)
            answer.begin()
            # In pieces: a read of the stated length would allocate that much memory first.
            return answer.status, b"".join(iter(partial(answer.read, 1 << 16), b""))


class _Reader(io.RawIOBase):
    """Reads an answer from a socket, until `deadline` and up to `room` bytes."""

    def __init__(self, connected: socket.socket, deadline: float, room: int) -> None:
        self._socket, self._deadline, self._room = connected, deadline, room

    def makefile(self, mode: str) -> io.BufferedReader:
        """The file that `HTTPResponse` reads; it treats this reader as a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read available bytes into `buffer`."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        count = self._socket.recv_into(buffer)
        self._room -= count
        if self._room < 0:
            raise OSError("its answer has more bytes than the completions can need")
        return count


def _table(rows: list[list[Any]], count: int, *kinds: type) -> Tensor:
    """Numbers from JSON, `count` or more for each token."""
    if not all(type(x) in kinds for row in rows for x in row):
        raise TypeError(f"top_logprobs has a value that is no {kinds[-1].__name__}")
    table = torch.tensor(rows)
    if table.dim() != 2 or table.shape[1] < count:
        raise ValueError(f"top_logprobs is {list(table.shape)} where {count} for each are wanted")
    return table


def _get(data: Any, *names: str) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data
