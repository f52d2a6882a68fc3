"""A loss, its metrics and its gradient as one compiled function: `compiled_loss`.

`loss` is the call, `trace` turns the eager pipeline into one graph, `two_stage_sums` rewrites its
sums for a GPU, and `cuda_graph` records and replays its kernels.
"""

from policyloss.compiled.loss import CompiledLoss, compiled_loss

__all__ = ["CompiledLoss", "compiled_loss"]
