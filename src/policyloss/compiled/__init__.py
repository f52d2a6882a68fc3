"""A loss, its metrics and its gradient as one compiled function: `compiled_loss`.

`loss` is the call, `call` its tensors as data, `trace` turns the eager pipeline into one graph,
`two_stage_sums` cuts its sums for a GPU, and `cuda_graph` records and replays its kernels.
`in_graph` is the way that `policy_loss` takes inside somebody's own `torch.compile`. `fused` is the way that `policy_loss` takes by itself on a GPU: `token_graph` and `token_program`
write such a graph as two Triton kernels.
"""

from policyloss.compiled import in_graph as _in_graph  # it puts itself into `policy_loss`
from policyloss.compiled.fused import explain_path, unfused
from policyloss.compiled.loss import CompiledLoss, compiled_loss

__all__ = ["CompiledLoss", "compiled_loss", "explain_path", "unfused"]
