"""The interface of a rollout engine: it completes prompts of token ids, and reports the version of
the weights.

Your own engine implements `Engine`; `--rollout module:factory` calls `factory(config, weights)` to
make it (see docs/rollout.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from policyloss.errors import PolicyLossError, safe_repr
from policyloss_lab.runs.files import damage_named
from policyloss_train.distributed import Ranks
from policyloss_train.drawing import Pair, problem_of
from policyloss_train.models import merged_weights, save_all_weights, without_bars
from policyloss_train.run.shards import local_part
from policyloss_train.sampler import Completed

LEFT_OUT = -9999.0  # the number that a server reports for −inf; such tokens are never drawn
TIED = "tied.safetensors"
NOISE = 1e-4  # rounding may lift a log-probability this far above 0


class RolloutError(PolicyLossError):
    """An engine returned no completions, or wrong ones."""


@dataclass(frozen=True)
class Sampling:
    """The options of drawing completions.

    temperature: 0 takes the likeliest token. top_p, top_k: 1 and 0 are off. end_ids: the tokens
    that end a completion. seed: of the run. draw: the number of earlier draws of the run. logp:
    "processed" normalises log-probabilities over the tokens that top_p and top_k keep, "raw" over
    all tokens. support: whether to return the kept tokens, too.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    end_ids: tuple[int, ...]
    seed: int
    draw: int
    logp: Literal["processed", "raw"] = "processed"
    support: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the number of completions to draw.

    place: the index of its first completion among all completions of the draw, on all ranks.
    written: the number of tokens of the completion that the end of `ids` holds already, in a task
    in turns; only the built-in engine samples one.
    """

    ids: list[int]
    number: int
    place: int
    written: int = 0

    def seed(self, sampling: Sampling) -> int:
        """A number below 2⁴⁸ that follows from the run's seed, the draw and the place alone."""
        key = f"{sampling.seed} {sampling.draw} {self.place}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:6], "big")


@dataclass(frozen=True)
class Completion:
    """One completion.

    ids: with the end token, if there was one. logp: of each token, at the sampling temperature.
    finished: whether the completion ended with an end token and was not cut. version: of the
    weights. support: the tokens that top-p and top-k kept, as integers (ids `[K]`, offsets
    `[L+1]`); for token t, `ids[offsets[t]:offsets[t+1]]`. An engine that does not record the kept
    tokens leaves `support` None in all completions of a call.
    """

    ids: list[int]
    logp: Sequence[float] | Tensor
    finished: bool
    version: int
    support: Pair | None = None


class TensorInfo(NamedTuple):
    """A tensor that is not gathered yet."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights:
    """The current weights of the policy, a Hugging Face model that may be sharded over ranks, with
    its adapters merged. Either all ranks call these methods, or none.
    """

    def __init__(self, model: Any, tokenizer: Any, ranks: Ranks) -> None:
        self.model, self._tokenizer, self._ranks = model, tokenizer, ranks

    def metadata(self) -> list[TensorInfo]:
        """The tensors that `tensors` yields, in its order."""
        merged = merged_weights(self.model)
        return [TensorInfo(name, x.dtype, tuple(x.shape)) for name, x in merged.items()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Complete tensors by name, one at a time: no rank holds all of a sharded model."""
        for name, x in merged_weights(self.model).items():
            yield name, (x.full_tensor() if isinstance(x, DTensor) else x).detach()

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder, under a temporary name first. The first rank writes."""
        first = self._ranks.is_first
        tensors = {name: x.cpu() for name, x in self.tensors() if first}
        if first:
            temporary = folder.with_name(f".{folder.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            with without_bars(), save_all_weights(self.model):
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


class Engine(Protocol):
    """Completes prompts. A subclass that has nothing to free may leave out the last three methods.

    concurrent: whether `generate` may run in a thread while the policy learns in another.
    """

    concurrent: bool

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """The completions of each prompt, in the order of the prompts."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Use these weights, which are called `version`, for the next completions."""

    def sleep(self) -> None:
        """Free memory for the learner: `wake` and `update_weights` precede the next `generate`."""
        return

    def wake(self) -> None:
        """Undo `sleep`; called before every update of the weights."""
        return

    def close(self) -> None:
        """Free all resources."""
        return


def check_completions(
    engine: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    completions: Sequence[Sequence[Completion]],
    vocabulary: int,
    version: int,
) -> list[Completed]:
    """All completions in order, with the tensors that the learner reads, on the CPU. Raises if they
    do not match the prompts.
    """
    with damage_named(f"{engine} returned no lists of completions", raises=RolloutError):
        numbers = [len(group) for group in completions]
        if numbers != [prompt.number for prompt in prompts]:
            wanted = [prompt.number for prompt in prompts]
            raise RolloutError(f"{engine} returned {numbers} completions, not {wanted}.")
        completed = []
        for one in (one for group in completions for one in group):
            wrong = problem(one, sampling, vocabulary, version)
            if wrong:
                raise RolloutError(f"{engine} returned a completion {wrong}.")
            logp, support = torch.as_tensor(one.logp, dtype=torch.float32, device="cpu"), None
            if one.support is not None and sampling.support:
                ids, offsets = one.support
                support = ids.to("cpu", torch.int32), offsets.to("cpu", torch.int64)
            completed.append(Completed(list(one.ids), logp, support))
        if len({one.support is None for group in completions for one in group}) > 1:
            raise RolloutError(f"{engine} returned a support for some completions only.")
    return completed


def problem(one: Completion, sampling: Sampling, vocabulary: int, version: int) -> str | None:
    """The problem of a completion, in words; None if it is valid."""
    if one.version != version:
        return f"of the weights {one.version!r} where version {version} is wanted"
    if not 1 <= len(one.ids) <= sampling.max_new_tokens:
        return f"of {len(one.ids)} tokens where 1 to {sampling.max_new_tokens} are wanted"
    ids: Any = one.ids  # an engine may return another type
    if not all(isinstance(token, Integral) and int(token) in range(vocabulary) for token in ids):
        return f"with a token that is not below {vocabulary}: {safe_repr(one.ids)}"
    logp = torch.as_tensor(one.logp, dtype=torch.float32, device="cpu")
    if logp.shape != (len(one.ids),):
        return f"of {len(one.ids)} tokens with log-probabilities {list(logp.shape)}"
    numbers = one.logp.tolist() if isinstance(one.logp, Tensor) else one.logp
    if any(isinstance(x, bool) for x in (*one.ids, *numbers)):
        return "with true or false where a number belongs"
    if not ((logp > LEFT_OUT) & (logp <= NOISE)).all():
        return f"with log-probabilities that are not finite and at most 0: {logp.tolist()!r:.80}"
    if one.finished != (one.ids[-1] in sampling.end_ids):
        ends = list(sampling.end_ids)
        return f"with finished={one.finished} and the last token {one.ids[-1]}; {ends} are the ends"
    wrong = problem_of(one.support, torch.tensor(one.ids), vocabulary)
    return None if wrong is None else f"with an invalid support: {wrong}"
