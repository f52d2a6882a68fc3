"""A loss, its metrics and its gradient as one compiled function: `compiled_loss`.

`loss` is the call, `call` its tensors as data, `trace` turns the eager pipeline into one graph,
`two_stage_sums` cuts its sums for a GPU, and `cuda_graph` records and replays its kernels.
`fused` is the way that `policy_loss` takes by itself on a GPU: `token_graph` and `token_program`
write such a graph as two Triton kernels. `in_graph` is its way inside somebody's `torch.compile`.
"""

from policyloss.compiled.fused import explain_path, fused_loss, unfused
from policyloss.compiled.in_graph import loss_in_graph
from policyloss.compiled.loss import CompiledLoss, compiled_loss
from policyloss.loss import IN_GRAPH, SHORTCUTS

__all__ = ["CompiledLoss", "compiled_loss", "explain_path", "unfused"]

SHORTCUTS.append(fused_loss)
IN_GRAPH.append(loss_in_graph)
