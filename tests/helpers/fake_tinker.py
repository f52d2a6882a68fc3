"""A package `tinker` whose server is this process: a small torch model that trains all its weights.

The real one is in tests/engines/test_skyrl.py. `reduction` is how the server adds up a loss: "sum",
as in the API, or "mean", as SkyRL's JAX backend does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from policyloss_train.drawing import Rule
from policyloss_train.sampler import complete, uniforms


def done(value: Any) -> Any:
    """A future that has its result."""
    return SimpleNamespace(result=lambda timeout=None: value)


class Tensors:
    def __init__(self, values: torch.Tensor) -> None:
        self.data = values.tolist()


class Server:
    """reduction, clips: how it learns. down: raise ConnectionError. slow: seconds for each call."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name
        self.reduction, self.clips, self.down, self.slow = "sum", True, False, 0.0
        self.checkpoints: dict[str, Any] = {}
        self.sessions, self.alive = 0, 0  # policies of an earlier start are lost
        self.requests: list[str] = []

    def kill(self) -> None:
        self.alive += 1

    def ask(self, what: str, life: int | None = None) -> None:
        self.requests.append(what)
        time.sleep(self.slow)
        if self.down:
            raise ConnectionError("nobody listens")
        if life not in (None, self.alive):
            raise RuntimeError("model not found")

    def module(self) -> SimpleNamespace:
        """What `import tinker` gives."""
        from_ints = staticmethod(lambda ids: SimpleNamespace(ids=list(ids)))
        return SimpleNamespace(
            ServiceClient=lambda **options: Service(self),
            ModelInput=SimpleNamespace(from_ints=from_ints),
            Datum=SimpleNamespace,
            AdamParams=SimpleNamespace,
            SamplingParams=SimpleNamespace,
        )


class Service:
    def __init__(self, server: Server) -> None:
        server.ask("session")
        server.sessions += 1
        self.server = server

    def get_server_capabilities(self) -> Any:
        served = [SimpleNamespace(model_name=self.server.name)]
        return SimpleNamespace(supported_models=served)

    def create_lora_training_client(self, model: str, **options: Any) -> Policy:
        self.server.ask("create")
        return Policy(self.server, copy.deepcopy(self.server.model))

    def create_training_client_from_state_with_optimizer(self, path: str) -> Policy:
        self.server.ask("load")
        weights, moments = self.server.checkpoints[path]
        policy = Policy(self.server, copy.deepcopy(self.server.model))
        policy.model.load_state_dict(weights)
        policy.optimizer.load_state_dict(copy.deepcopy(moments))
        return policy

    def create_rest_client(self) -> Any:
        def delete(path: str) -> Any:
            del self.server.checkpoints[path]
            return done(None)

        return SimpleNamespace(delete_checkpoint_from_tinker_path=delete)


class Policy:
    def __init__(self, server: Server, model: Any) -> None:
        self.server, self.model, self.life = server, model, server.alive
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        self.counted = 0

    def _logp(self, datum: Any) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor([datum.model_input.ids])).logits[0]
        targets = datum.loss_fn_inputs["target_tokens"]
        logp: torch.Tensor = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return logp

    @torch.no_grad()
    def forward(self, data: list[Any], loss: str) -> Any:
        self.server.ask("forward", self.life)
        rows = [{"logprobs": Tensors(self._logp(datum))} for datum in data]
        return done(SimpleNamespace(loss_fn_outputs=rows))

    def forward_backward(self, data: list[Any], loss: str) -> Any:
        self.server.ask("backward", self.life)
        for datum in data:
            inputs, logp = datum.loss_fn_inputs, self._logp(datum)
            if loss == "cross_entropy":
                weights = inputs["weights"]
                values = -logp * weights
            else:
                weights = torch.ones_like(logp)
                values = -(logp - inputs["logprobs"]).exp() * inputs["advantages"]
            by = weights.sum().clamp(min=1e-9) if self.server.reduction == "mean" else 1.0
            (values.sum() / by).backward()
        self.counted += len(data)
        return done(SimpleNamespace(metrics={}))

    def optim_step(self, adam: Any) -> Any:
        self.server.ask("step", self.life)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.server.reduction == "mean":
            for p in parameters:
                p.grad /= self.counted
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if self.server.clips and adam.grad_clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, adam.grad_clip_norm, norm)
        names = {"lr": "learning_rate", "eps": "eps", "weight_decay": "weight_decay"}
        for group in self.optimizer.param_groups:
            group |= {ours: getattr(adam, theirs) for ours, theirs in names.items()}
            group["betas"] = (adam.beta1, adam.beta2)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.counted = 0
        return done(SimpleNamespace(metrics={"grad_norm": float(norm)}))

    def save_state(self, name: str) -> Any:
        self.server.ask("save", self.life)
        path = f"tinker://run{id(self)}/weights/{name}"
        assert path not in self.server.checkpoints
        state = (self.model.state_dict(), self.optimizer.state_dict())
        self.server.checkpoints[path] = copy.deepcopy(state)
        return done(SimpleNamespace(path=path))

    def save_weights_and_get_sampling_client(self) -> Sampler:
        self.server.ask("sampler", self.life)
        return Sampler(self)


class Sampler:
    def __init__(self, policy: Policy) -> None:
        self.server, self.life, self.model = policy.server, policy.life, copy.deepcopy(policy.model)

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        def answer(timeout: float | None = None) -> Any:
            self.server.ask("sample", self.life)
            drawn = uniforms(sampling_params.seed, 0, num_samples, sampling_params.max_tokens)
            rule = Rule(sampling_params.temperature, 1.0, 0)
            prompts = [prompt.ids] * num_samples
            rows = complete(self.model, prompts, drawn, sampling_params.stop, rule, 1 << 16)
            sequences = [SimpleNamespace(tokens=x.tokens, logprobs=x.logp.tolist()) for x in rows]
            return SimpleNamespace(sequences=sequences)

        result: Callable[..., Any] = answer
        return SimpleNamespace(result=result)
