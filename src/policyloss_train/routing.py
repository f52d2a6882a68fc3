"""Where the tokens of a model with experts go while it learns: how uneven the load is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss_train.distributed import Ranks

FORMULAS = {
    "router_busiest": (
        "of a model with experts: the load of a layer's busiest expert over an even load, mean "
        "over its layers, of all tokens that went through the model to learn; 1 is even, and "
        "experts over chosen ones is all on the same"
    )
}


class Routing:
    """Counts, in forwards that record gradients, which experts each layer's router chooses. A model
    without experts has nothing to count.
    """

    def __init__(self, model: Any) -> None:
        body = model.base_model
        recorder = (getattr(body, "_can_record_outputs", None) or {}).get("router_logits")
        kind: Any = getattr(recorder, "target_class", ())
        self._place = getattr(recorder, "index", 0)
        config = model.config.get_text_config()
        self._chosen: int = getattr(config, "num_experts_per_tok", None) or 1
        self._counts: dict[Any, Tensor] = {}
        for router in body.modules():
            if isinstance(router, kind):
                router.register_forward_hook(self._count)

    def _count(self, router: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        logits = (output[self._place] if isinstance(output, tuple) else output).detach()
        logits = logits.flatten(0, -2)
        experts = logits.topk(self._chosen, dim=-1).indices.flatten()
        counts = torch.bincount(experts, minlength=logits.shape[-1])
        self._counts[router] = self._counts.get(router, 0) + counts

    def busiest(self, ranks: Ranks) -> dict[str, float]:
        """The metrics of `FORMULAS`, over all ranks. Then counts anew."""
        if not self._counts:
            return {}
        counts = ranks.sum(torch.stack(list(self._counts.values())).double())
        self._counts.clear()
        load = counts / counts.sum(-1, keepdim=True)
        return {"router_busiest": float((load.amax(-1) * load.shape[-1]).mean())}
