"""verl's fused heads (`use_fused_kernels`), computed by the head of this library: the torch backend
`FusedLinearForPPO` of `verl.utils.experimental.torch_functional`, and the Triton backend
`verl.utils.kernel.linear_cross_entropy`, also for a vocabulary that is split over ranks.

Both return log-probabilities and entropies, and verl computes the loss elsewhere, from tensors that
the head does not get. So the backward computes the gradient, with a fourth matmul or stored
probabilities; one pass for head and loss is not possible here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from policyloss.compat.hooks import Patch
from policyloss.compat.verl.parts import share_of_gradient
from policyloss.errors import SpecError, unknown_name
from policyloss.head.linear import linear_logprobs

TORCH, TRITON = "verl.utils.experimental.torch_functional", "verl.utils.kernel.linear_cross_entropy"
BACKENDS = ("torch", "liger")
_patch = Patch("verl")


class FusedLinearForPPO(torch.nn.Module):
    """verl's module of this name. chunk_size and impl_backend change no number here: the plan of
    the head decides how rows are split.
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

    With a process group, weight holds the vocabulary entries of this rank, and the gradient of
    hidden is the sum over the ranks, as in verl.
    """
    if reduction != "none":
        raise SpecError(f"reduction={reduction!r} is not supported; verl's models use 'none'.")
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
    """Replace both fused heads of an installed verl, which it uses if `use_fused_kernels` is set;
    returns the names that were replaced.

    verl's workers are separate processes, so call it in each
    (`external_lib=policyloss.compat.verl.head_hook`). A second call changes nothing.
    """
    if not _patch.pairs:
        ours = ((TORCH, FusedLinearForPPO), (TRITON, linear_cross_entropy))
        _patch.pairs.extend((getattr(import_module(m), new.__name__), new) for m, new in ours)
    return _patch.apply()


def uninstall_head() -> None:
    """Restore verl's heads."""
    _patch.undo()
