"""A stand-in for the package vllm: it records its calls, and refuses calls that vLLM on a GPU could
not serve, such as sampling without weights.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from policyloss_train.drawing import Rule
from policyloss_train.rollout import vllm_engine
from policyloss_train.sampler import Completed, complete, uniforms

Call = tuple[str, dict[str, Any]]
WIRE: dict[str, Any] = {}  # the tensors that a trainer has sent over "NCCL"


def installed(patch: pytest.MonkeyPatch, *, gpu: bool) -> list[Call]:
    """Make `import vllm` find the stand-in. Returns the list of calls, which grows.

    gpu: whether the engine sees a GPU.
    """
    calls: list[Call] = []

    class LLM(_LLM):
        def __init__(self, **options: Any) -> None:
            calls.append(("LLM", options))
            super().__init__(calls, options["model"])

    def sampling(**options: Any) -> SimpleNamespace:
        calls.append(("SamplingParams", options))
        return SimpleNamespace(**options)

    module = ModuleType("vllm")
    module.__dict__.update(LLM=LLM, SamplingParams=sampling)
    patch.setitem(sys.modules, "vllm", module)
    cuda = SimpleNamespace(is_available=lambda: gpu)
    patch.setattr(vllm_engine, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    return calls


def likeliest(one: Completed, count: int, vocabulary: int) -> list[list[tuple[int, float]]]:
    """At each token, `count` ids with log-probabilities as vLLM reports them: those that were kept,
    then others, which are −inf. (Of the kept, only that of the token itself is right.)
    """
    rows = []
    for t, token in enumerate(one.tokens):
        kept = list(range(vocabulary))
        if one.support is not None:
            ids, offsets = one.support
            kept = ids[offsets[t] : offsets[t + 1]].tolist()
        others = [v for v in range(vocabulary) if v not in kept]
        row = [(v, float(one.logp[t]) if v == token else -1.0) for v in kept]
        rows.append([*row, *((v, -float("inf")) for v in others)][:count])
    return rows


class _LLM:
    """awake: the memory that it has. good: the parts of that with usable contents."""

    def __init__(self, calls: list[Call], folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.calls, self.version = calls, "default"
        self.awake, self.good = {"weights", "kv_cache"}, {"weights", "kv_cache"}

    def generate(self, prompts: Any, params: Any, **options: Any) -> list[Any]:
        self.calls.append(("generate", options))
        assert self.good == {"weights", "kv_cache"}, f"only {self.good} can be used"
        return [
            self._answer(x["prompt_token_ids"], p) for x, p in zip(prompts, params, strict=True)
        ]

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        self.calls.append(("collective_rpc", {"method": method, "kwargs": kwargs}))
        assert method == "reload_weights"
        assert "weights" in self.awake, "there is no memory for weights"
        self.model.load_state_dict(dict(kwargs["weights_iterator"]))
        self.good.add("weights")

    def reset_prefix_cache(self) -> None:
        self.calls.append(("reset_prefix_cache", {}))
        self.good.add("kv_cache")

    def update_weight_version(self, new_version: str) -> None:
        self.calls.append(("update_weight_version", {"new_version": new_version}))
        self.version = new_version

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", {"level": level}))
        for x in self.model.parameters():
            x.data.fill_(float("nan"))
        self.awake, self.good = set(), set()

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", {"tags": tags}))
        assert self.awake.isdisjoint(tags)
        self.awake |= set(tags)

    def _answer(self, prompt: list[int], p: Any) -> SimpleNamespace:
        rule = Rule(p.temperature, p.top_p, p.top_k, processed=True)
        drawn, ends, count = uniforms(p.seed, 0, p.n, p.max_tokens), p.stop_token_ids, p.logprobs
        completed = complete(
            self.model, [prompt] * p.n, drawn, ends, rule, batch_tokens=4096, supports=count > 0
        )
        assert p.flat_logprobs
        return SimpleNamespace(outputs=[self._output(one, ends, count) for one in completed])

    def _output(self, one: Completed, ends: list[int], count: int) -> SimpleNamespace:
        rows = likeliest(one, count, self.model.config.vocab_size)
        chosen = zip(one.tokens, one.logp.tolist(), strict=True)
        pairs = [pair for first, row in zip(chosen, rows, strict=True) for pair in (first, *row)]
        return SimpleNamespace(
            token_ids=one.tokens,
            logprobs=SimpleNamespace(
                token_ids=[v for v, _ in pairs], logprobs=[x for _, x in pairs]
            ),
            finish_reason="stop" if one.tokens[-1] in ends else "length",
            weight_versions=[SimpleNamespace(version=self.version)],
        )


class NCCLTrainerInitInfo:
    """How a trainer joins the transfer."""

    def __init__(self, address: str, port: int, world: int, *, packed: bool, rank: int) -> None:
        self.sent = {"master_address": address, "master_port": port, "world_size": world}
        assert (packed, rank) == (False, 0)


class NCCLTrainerWeightTransferEngine:
    """vLLM's sender, which puts the tensors where `FakeServer` takes them."""

    def __init__(self, client: Any, source: Any) -> None:
        self.client, self.source = client, source

    @classmethod
    def trainer_init(cls, info: NCCLTrainerInitInfo, *, client: Any, source: Any) -> Any:
        client.init_weight_transfer_engine({**info.sent, "rank_offset": 1, "packed": False})
        return cls(client, source)

    def send_weights(self) -> None:
        described = {one.name: (one.dtype, one.shape) for one in self.source.metadata()}
        self.client.start_weight_update()
        tensors = dict(self.source)
        assert described == {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        WIRE.update({name: x.clone() for name, x in tensors.items()})
        self.client.update_weights({"names": list(described)})
        self.client.finish_weight_update()


def with_transfer(patch: pytest.MonkeyPatch) -> None:
    """Have `vllm.distributed.weight_transfer.nccl_engine` be these two classes."""
    engine = ModuleType("nccl_engine")
    engine.__dict__.update(
        NCCLTrainerInitInfo=NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine=NCCLTrainerWeightTransferEngine,
    )
    package = ModuleType("vllm.distributed.weight_transfer")
    package.__dict__.update(nccl_engine=engine)
    for name in ("vllm", "vllm.distributed"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, package.__name__, package)
    patch.setattr(torch.cuda, "set_device", lambda device: None)
