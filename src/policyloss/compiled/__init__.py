"""The ways to run a loss other than operation by operation.

fused           on a GPU, two Triton kernels for loss, metrics and gradient
token_graph     the operations of a traced loss, and each as a line of Triton
token_program   those lines as the two kernels
in_graph        one node inside a user's `torch.compile`, its sums split for a GPU
loss            `compiled_loss`: `torch.compile` over that node
call            the tensors of a call by name, and the results that graphs are traced from
"""

from policyloss.compiled.fused import explain_path, unfused
from policyloss.compiled.loss import CompiledLoss, compiled_loss

__all__ = ["CompiledLoss", "compiled_loss", "explain_path", "unfused"]
