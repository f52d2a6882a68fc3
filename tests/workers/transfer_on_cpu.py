"""vLLM's weight transfer with a TCP store in the place of NCCL, so that a CPU can run it.

Imported by the test and, as `--worker-extension-cls transfer_on_cpu.Extension`, by the workers of a
server. All else is vLLM's own code: rendezvous, requests, order of the tensors, loading.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators import pynccl


class Communicator:
    """The calls of `PyNcclCommunicator` that vLLM's engine makes, over its group's store."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group = group

    def broadcast(self, x: Tensor, src: int, stream: Any) -> None:
        received = self.group.broadcast(x, src)
        if received is not x:
            x.copy_(received)

    def destroy(self) -> None:
        pass


class Extension:
    """Adds nothing to the worker."""


pynccl.PyNcclCommunicator = Communicator
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.synchronize = lambda: None
torch.cuda.current_stream = lambda: None
torch.cuda.set_device = lambda device: None


def main(words: list[str]) -> int:
    """`policyloss train`, whose policy on a CPU counts as one on a GPU in the transfer."""
    from policyloss.cli import main as command
    from policyloss_train.rollout.transfer import Transfer

    create = Transfer.__init__

    def on_gpu(self: Transfer, servers: Any, ranks: Any, *rest: Any) -> None:
        create(self, servers, replace(ranks, device=torch.device("cuda")), *rest)

    Transfer.__init__ = on_gpu
    return command(["train", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
