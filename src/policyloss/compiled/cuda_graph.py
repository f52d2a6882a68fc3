"""A function of tensors as a CUDA graph: one launch for all its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., list[Tensor]]


class Graphed:
    """`run(*tensors)` for one shape and dtype of each tensor, recorded once and replayed.

    A graph reads and writes fixed memory. So each call copies its tensors to where they were when
    the graph was recorded, and copies what it found out of the graph's own memory: what a call
    returned stays what it was.
    """

    def __init__(self, run: Function, examples: Sequence[Tensor]) -> None:
        self.inputs = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            for x in examples
        ]
        self.stream = torch.cuda.current_stream(self.inputs[0].device)
        self._fill(examples)
        beside = torch.cuda.Stream(self.inputs[0].device)  # type: ignore[no-untyped-call]
        beside.wait_stream(self.stream)
        with torch.cuda.stream(beside):
            # What is made on first use, such as loaded kernels, cannot be recorded.
            for _ in range(2):
                run(*self.inputs)
        self.stream.wait_stream(beside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = run(*self.inputs)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Run on these tensors: the shapes, strides and dtypes of the examples."""
        stream = torch.cuda.current_stream(self.inputs[0].device)
        if stream != self.stream:  # the memory is shared by all calls, so they follow each other
            stream.wait_stream(self.stream)
            self.stream = stream
        self._fill(tensors)
        self.graph.replay()
        return [x.clone() for x in self.outputs]

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self.inputs, list(tensors))


def can_be_graphed(tensors: Sequence[Tensor]) -> bool:
    """Whether all are on one GPU and own their elements (an expanded tensor has no place)."""
    device = tensors[0].device
    return device.type == "cuda" and all(
        x.device == device
        and all(step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)
        for x in tensors
    )
