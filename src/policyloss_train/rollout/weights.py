"""The weights of the policy for an engine: complete tensors, or a folder that any engine loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from policyloss_train.adapter import merged_weights, saving_all_weights
from policyloss_train.distributed import Ranks
from policyloss_train.models import without_bars
from policyloss_train.run.shards import local_part

TIED = "tied.safetensors"


class PolicyWeights:
    """The weights of a Hugging Face model, sharded over ranks or not, with adapters merged."""

    def __init__(self, model: Any, tokenizer: Any, ranks: Ranks) -> None:
        self.model, self._tokenizer, self._ranks = model, tokenizer, ranks

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Complete tensors by name, one at a time: no rank holds all of a sharded model."""
        for name, x in merged_weights(self.model).items():
            yield name, (x.full_tensor() if isinstance(x, DTensor) else x).detach()

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as a Hugging Face folder; the first rank writes."""
        first = self._ranks.is_first
        tensors = {name: x.cpu() for name, x in self.tensors() if first}
        if first:
            temporary = folder.with_name(f".{folder.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            with without_bars(), saving_all_weights(self.model):
                # A copy, because `save_pretrained` removes tied tensors from it.
                self.model.save_pretrained(temporary, state_dict=dict(tensors))
            self._add_tied(temporary, tensors)
            self._tokenizer.save_pretrained(temporary)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
        self._ranks.barrier()

    def _add_tied(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the second name of tied weights, which Hugging Face leaves out. Without it, vLLM
        would keep its old head if it stores the head apart from the embedding, as on a CPU.
        """
        owners: dict[int, str] = {}
        for name, x in merged_weights(self.model).items():
            owners.setdefault(local_part(x).data_ptr(), name)
        names = sorted(tensors.keys() - owners.values())
        if not names:
            return
        save_file({name: tensors[name].clone() for name in names}, folder / TIED)
        index = folder / "model.safetensors.index.json"
        if index.exists():
            contents = json.loads(index.read_text())
            contents["weight_map"] |= dict.fromkeys(names, TIED)
            index.write_text(json.dumps(contents))
