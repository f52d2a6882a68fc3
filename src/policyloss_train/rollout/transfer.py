"""Weights sent to vLLM servers over NCCL by vLLM's own weight-transfer engine, without a disk.

A server takes part if it was started with `--weight-transfer-config '{"backend": "nccl"}'`. The
first rank of the trainer and the workers of all servers are one NCCL group.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from policyloss_train.distributed import Ranks
from policyloss_train.rollout.protocol import RolloutError, TensorInfo, Weights
from policyloss_train.time_limit import TimeIsUp, call_within, start_thread

if TYPE_CHECKING:
    from policyloss_train.rollout.servers import Server


class Transfer:
    """One update after another, to all servers at once. vLLM's engine reads the weights from this
    object (`metadata`, `__iter__`) and sends its requests by it (the four methods after them).

    threads: call the servers at once. patience: seconds to form the group, and for each update.
    """

    def __init__(
        self, servers: Sequence[Server], ranks: Ranks, threads: Executor, patience: float
    ) -> None:
        self._servers, self._ranks, self._threads = servers, ranks, threads
        self._patience = patience
        self._engine: Any = None
        self._metadata: list[TensorInfo] = []
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())
        self._before, self._name, self._started = "", "", False
        self._refused: Future[Any] = Future()  # the error of a server that does not join

    def send(self, weights: Weights, name: str) -> str | None:
        """Send the weights, and call them `name`. Returns on all ranks why nothing was sent; then
        this object cannot be used again. Raises if the servers fail while they receive.
        """
        self._before, self._name, self._started = self._name, name, False
        self._metadata, self._tensors = weights.metadata(), weights.tensors()
        problem: str | None = None
        if self._ranks.is_first:
            try:
                self._engine = self._engine or self._meet()
                call_within(self._patience, self._engine.send_weights)
            except (Exception, TimeIsUp) as error:  # another package may raise anything
                problem = f"{type(error).__name__}: {error!s:.500}"
                if self._started:  # NCCL may wait without end, and with it the GPU
                    raise RolloutError(
                        f"the servers did not take the weights over NCCL: {problem}. Servers that "
                        "are started without --weight-transfer-config read a folder instead."
                    ) from error
        for _ in self._tensors:  # the other ranks take part in gathering each tensor
            pass
        of_the_first: str | None = self._ranks.gather(problem)[0]
        return of_the_first

    def _meet(self) -> Any:
        """The sender, after servers and trainer have met at a free port of this machine."""
        if self._ranks.device.type != "cuda":
            raise RolloutError("NCCL needs the policy on a GPU")
        from vllm.distributed.weight_transfer import nccl_engine

        sizes = self._each("/get_world_size", None)
        self._offsets = list(accumulate((int(x["world_size"]) for x in sizes), initial=1))
        host = _own_address([server.address for server in self._servers])
        with closing(socket.create_server((host, 0))) as free:
            port = free.getsockname()[1]
        info = nccl_engine.NCCLTrainerInitInfo(host, port, self._offsets[-1], packed=False, rank=0)

        def join() -> Any:
            torch.cuda.set_device(self._ranks.device)  # the current device is per thread
            engine = nccl_engine.NCCLTrainerWeightTransferEngine
            return engine.trainer_init(info, client=self, source=self)

        # NCCL waits without end for a server that does not join.
        futures = [start_thread(join), self._refused]
        done, _ = wait(futures, self._patience, FIRST_COMPLETED)
        if not done:
            raise RolloutError(f"no NCCL group after {self._patience:g} s")
        return done.pop().result()

    def metadata(self) -> list[TensorInfo]:
        """The tensors that `__iter__` yields."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have each server join the group, its workers after those of the servers before it."""
        infos = [{"init_info": {**init_info, "rank_offset": x}} for x in self._offsets[:-1]]
        try:
            self._each("/init_weight_transfer_engine", *infos)
        except Exception as error:
            self._refused.set_exception(error)
            raise

    def start_weight_update(self) -> None:
        """Stop sampling. A server that was restarted is not in the group, so nothing is sent."""
        for server in self._servers:
            if self._before and server.version() != self._before:
                raise RolloutError(f"the server {server.address} was restarted")
        self._each("/pause?mode=wait", {})
        self._each("/start_weight_update", {})
        self._started = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the servers receive the tensors."""
        self._each("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Name the weights and go on sampling."""
        self._each("/finish_weight_update", {"weight_version": self._name})
        self._each("/resume", {})

    def _each(self, path: str, *bodies: Any) -> list[Any]:
        """The answers of all servers, called at once. bodies: one for all, or one for each."""
        each = bodies if len(bodies) > 1 else bodies * len(self._servers)
        calls = self._threads.map(lambda server, x: server.call(path, x), self._servers, each)
        return list(calls)


def _own_address(servers: Sequence[str]) -> str:
    """The address of this machine in the network of the servers."""
    addresses: list[str] = []
    for server in servers:
        url = urlsplit(server)
        port = url.port or (443 if url.scheme == "https" else 80)
        with closing(socket.create_connection((url.hostname, port), timeout=10)) as connection:
            addresses.append(connection.getsockname()[0])
    return max(addresses, key=lambda address: not address.startswith("127."))
