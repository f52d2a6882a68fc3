"""verl's fused heads (`use_fused_kernels`) computed by the head of this library: its torch backend,
`FusedLinearForPPO`, and its Triton backend, `linear_cross_entropy`, also over a vocabulary that is
cut over ranks.

They return log-probabilities and entropies to verl, which computes the loss elsewhere, from
tensors that the head does not see. So the gradient is computed in the backward, with a fourth
matmul or kept probabilities; head and loss in one pass is not possible in this seat.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from policyloss.compat.patching import swap
from policyloss.compat.verl.counts import share_of_gradient
from policyloss.errors import SpecError, unknown_name
from policyloss.head.linear import linear_logprobs

TORCH, TRITON = "verl.utils.experimental.torch_functional", "verl.utils.kernel.linear_cross_entropy"
BACKENDS = ("torch", "liger")
_replaced: list[tuple[Any, Any]] = []


class FusedLinearForPPO(torch.nn.Module):
    """verl's module of this name. chunk_size and impl_backend change no number here: rows are cut
    by the plan of the head.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend not in BACKENDS:
            raise SpecError(unknown_name("impl_backend", impl_backend, BACKENDS))
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states: `[..., D]`, input_ids: `[...]`. → log-probabilities in float32, entropies
        in the dtype of hidden_states, `[...]` each.
        """
        out = linear_logprobs(
            hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True
        )
        assert out.entropy is not None
        return out.logp.float(), out.entropy.to(hidden_states.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """verl's function of this name. → log-probabilities and entropies, float32, flat `[N]`.

    With a process group, weight holds this rank's entries, and the gradients of hidden add up over
    the ranks to the complete one, as verl's do.
    """
    if reduction != "none":
        raise SpecError(f"reduction={reduction!r}: verl's models use 'none', and so does this.")
    if dist_process_group is not None:
        hidden = share_of_gradient(hidden, torch.distributed.get_world_size(dist_process_group))
    out = linear_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        temperature=1.0 if temperature is None else temperature,
        entropy=True,
        vocab_group=dist_process_group,
    )
    assert out.entropy is not None
    return out.logp.float(), out.entropy.float()


def install_head() -> list[str]:
    """Let an installed verl compute with these where `use_fused_kernels` is set; returns what was
    replaced. verl's workers are separate processes, so call it in each
    (`external_lib=policyloss.compat.verl.head_hook`). A second call changes nothing.
    """
    if not _replaced:
        seats = ((TORCH, FusedLinearForPPO), (TRITON, linear_cross_entropy))
        _replaced.extend((getattr(import_module(m), new.__name__), new) for m, new in seats)
    return swap("verl", _replaced)


def uninstall_head() -> None:
    """Restore verl's heads."""
    swap("verl", [(new, old) for old, new in _replaced])
    _replaced.clear()
