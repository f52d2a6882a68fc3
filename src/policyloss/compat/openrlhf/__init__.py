"""OpenRLHF's `PolicyLoss`, `ValueLoss`, `aggregate_loss` and `compute_approx_kl`, with the
arguments, return values and numbers of 0.11.0 to 0.11.2.

`install()` replaces them in the installed OpenRLHF, and `install_head()` lets its actor compute
log-probabilities and entropies without logits. OpenRLHF trains in Ray's worker processes, so a hook
must run there:
`ray.init(runtime_env={"worker_process_setup_hook": "policyloss.compat.openrlhf.install"})`.
"""

from policyloss.compat.openrlhf.hook import install, install_head, uninstall, uninstall_head
from policyloss.compat.openrlhf.losses import (
    PolicyLoss,
    ValueLoss,
    aggregate_loss,
    compute_approx_kl,
)

__all__ = [
    "PolicyLoss",
    "ValueLoss",
    "aggregate_loss",
    "compute_approx_kl",
    "install",
    "install_head",
    "uninstall",
    "uninstall_head",
]
