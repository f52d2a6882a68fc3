"""OpenRLHF's actor, and the same actor with the head of this library: padded rows and packs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from conformance.inputs import Batch
from conformance.suite import Defect, Function, Inputs, Options, Outputs
from policyloss.compat import openrlhf as ours

VOCABULARY, HIDDEN, PROMPT = 19, 12, 3
OPTIONS: list[Options] = [
    {"temperature": t, "packing": packing, "scale": scale}
    for t, packing, scale in (
        (1.0, False, 1.0),
        (0.7, False, 0.5),
        (1.0, True, 1.0),
        (0.7, True, 2.0),
    )
]


class Output(dict[str, Any]):
    """An output as in transformers: items that are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Model(nn.Module):
    """A model that sees only its token and position, so that packs need no attention."""

    def __init__(self, body: Tensor, head: Tensor, scale: float) -> None:
        super().__init__()
        self.body, self.scale = body, scale
        self.config = SimpleNamespace(logit_scale=scale)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        del self.lm_head.weight
        self.lm_head.weight = head  # the very tensor that is differentiated

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def forward(self, ids: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Output:
        """Logits of every token."""
        hidden = self.body[ids] + 0.01 * position_ids[..., None]
        return Output(logits=self.lm_head(hidden) * self.scale)


def inputs(batch: Batch, options: Options) -> Inputs:
    """Sequences with padding on the right, their masks, and the parameters of a model."""
    g = batch.generator(6)
    width = batch.logp.shape[1]

    def normal() -> Tensor:
        return torch.randn(VOCABULARY, HIDDEN, generator=g, dtype=torch.float64)

    actions = batch.mask.clone()
    actions[:, 0] = 1
    lengths = PROMPT + (actions * torch.arange(1, width + 1)).amax(1, keepdim=True)
    live = torch.arange(PROMPT + width) < lengths
    ids = torch.randint(1, VOCABULARY, live.shape, generator=g)
    return {
        "body": (normal() / 8).to(batch.dtype),
        "head": (normal() / 4).to(batch.dtype),
        "sequences": torch.where(live, ids, 0),
        "attention_mask": live.long(),
        "action_mask": actions,
    }


@contextmanager
def _without_flash_attention() -> Iterator[None]:
    """OpenRLHF uses its torch formula if flash-attention's cross entropy cannot be imported. The
    functions of flash-attention that pack rows are small, and written out here.
    """
    cross_entropy = "flash_attn.ops.triton.cross_entropy"
    ring: Any = import_module("openrlhf.models.ring_attn_utils")
    ours_instead = {
        "index_first_axis": lambda x, indices: x[indices],
        "pad_input": lambda x, indices, rows, width: (
            x.new_zeros(rows * width, *x.shape[1:])
            .index_copy(0, indices, x)
            .view(rows, width, *x.shape[1:])
        ),
        "rearrange": lambda x, pattern: x.flatten(0, 1),
        "unpad_input": _unpadded,
    }
    before = {name: getattr(ring, name) for name in ours_instead}
    module = sys.modules.get(cross_entropy)
    sys.modules[cross_entropy] = None  # type: ignore[assignment]  # importing it is an error
    vars(ring).update(ours_instead)
    try:
        yield
    finally:
        vars(ring).update(before)
        del sys.modules[cross_entropy]
        if module is not None:
            sys.modules[cross_entropy] = module


def _unpadded(x: Tensor, mask: Tensor) -> tuple[Any, ...]:
    indices = mask.flatten().nonzero().flatten()
    return x.flatten(0, 1)[indices], indices, mask.sum(1).cumsum(0), None, None


def call(i: Inputs, o: Options) -> Outputs:
    """`Actor.forward` as OpenRLHF's trainer calls it."""
    with _without_flash_attention():
        return _call(i, o)


def _call(i: Inputs, o: Options) -> Outputs:
    model = Model(i["body"], i["head"], o["scale"])
    actor = import_module("openrlhf.models.actor").Actor(model, temperature=o["temperature"])
    actor.packing_samples = o["packing"]
    logp, output = actor(
        i["sequences"],
        i["action_mask"],
        attention_mask=i["attention_mask"],
        return_output=True,
        return_entropy=True,
    )
    entropy = output.entropy[:, -logp.shape[1] :] * i["action_mask"]
    return {"log_probs": logp, "entropy": entropy, "loss": logp + 0.3 * entropy}


def _with_our_head(i: Inputs, o: Options) -> Outputs:
    ours.install_head()
    try:
        return call(i, o)
    finally:
        ours.uninstall_head()


def _in_float32(options: Options, i: Inputs) -> Defect | None:
    if i["head"].dtype != torch.float64:
        return None
    return Defect("logits are rounded to float32, whatever the model's are", "float64 logits")


FUNCTIONS = [
    Function(
        "install_head(): Actor.forward",
        OPTIONS,
        inputs,
        _with_our_head,
        call,
        differentiate=("body", "head"),
        seeds=3,
        kinds=("ragged", "full", "holes", "single_token"),
        # 0.11.0 overwrites its logits before their entropy has a gradient, and raises.
        releases=("0.11.2", "0.11.1"),
        defect=_in_float32,
    )
]
