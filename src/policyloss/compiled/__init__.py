"""A loss, its metrics and its gradient as one compiled function: `compiled_loss`.

`loss` is the call, `call` its tensors as data, `trace` turns the eager pipeline into one graph,
`two_stage_sums` cuts its sums for a GPU, and `cuda_graph` records and replays its kernels.
`fused` is the way that `policy_loss` takes by itself on a GPU: `token_graph` and `token_program`
write such a graph as two Triton kernels. `in_graph` is its way inside somebody's `torch.compile`.
"""

from typing import Any

from policyloss.compiled.fused import explain_path, fused_loss, unfused
from policyloss.compiled.loss import CompiledLoss, compiled_loss
from policyloss.loss import IN_GRAPH, SHORTCUTS, LossOutput

__all__ = ["CompiledLoss", "compiled_loss", "explain_path", "unfused"]


def _in_graph(*arguments: Any) -> LossOutput | None:
    # Imported when somebody compiles, because it imports the compiler.
    from policyloss.compiled.in_graph import loss_in_graph

    return loss_in_graph(*arguments)


SHORTCUTS.append(fused_loss)
IN_GRAPH.append(_in_graph)
