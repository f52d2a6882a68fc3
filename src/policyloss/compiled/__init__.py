"""The ways to run a loss other than operation by operation.

fused           on a GPU, two Triton kernels for loss, metrics and gradient
token_graph     the operations of a traced loss, and each as a line of Triton
token_program   those lines as the two kernels
in_graph        one node inside a user's `torch.compile`
two_stage_sums  the sums of that node, cut for a GPU
loss            `compiled_loss`: `torch.compile` over that node
call            the tensors of a call by name, and the results that graphs are traced from
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
