"""One running vLLM server: what is asked of it, over HTTP, by the standard library alone.

It was started by `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

from policyloss.errors import InputError, PolicyLossError
from policyloss.train.rollout.kept import Report
from policyloss.train.rollout.protocol import Completion, Prompt, Sampling
from policyloss.train.rollout.vllm_engine import parameters

LOOK_S = 10.0  # seconds that a server may take to say which weights it has
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(PolicyLossError):
    """A server that did not answer, or not as it should; it may do so later, or another one may."""

    def __init__(self, server: Server, what: str) -> None:
        super().__init__(f"the server {server.address} {what}")
        self.address = server.address


class Server:
    """timeout: seconds that an answer may take. report: what it must say of the tokens it kept."""

    def __init__(self, address: str, timeout: float, report: Report) -> None:
        if not address.startswith(("http://", "https://")) or address.count("/") > 2:
            raise InputError(
                f"--rollout names the server {address!r}; give addresses as http://host:port."
            )
        self.address, self._timeout, self._report = address, timeout, report

    def check(self) -> None:
        """Raise unless the server reports the log-probabilities that it samples by, and enough."""
        info = self._call("/server_info?config_format=json", timeout=LOOK_S)
        model = _get(info, "vllm_config", "model_config")
        mode, most = _get(model, "logprobs_mode"), _get(model, "max_logprobs")
        if mode != "processed_logprobs":
            raise InputError(
                f"the server {self.address} reports {mode}, which are not the log-probabilities "
                "that it samples by; start it with --logprobs-mode processed_logprobs."
            )
        count = self._report.count
        if isinstance(most, int) and 0 <= most < count:
            raise InputError(
                f"the server {self.address} reports {most} log-probabilities of a token at most, "
                f"and {count} say which tokens --top-p and --top-k kept; start it with "
                f"--max-logprobs {count}."
            )

    def version(self) -> str:
        """What the weights of the server are called."""
        return str(_get(self._call("/weight_info", timeout=LOOK_S), "weight_version"))

    def load(self, folder: Path, version: str) -> None:
        """Have it read its weights from a folder, and call them `version`."""
        self._call("/pause?mode=wait", {})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("/collective_rpc", reload)
        self._call("/update_weight_version", {"new_version": version})
        self._call("/resume", {})

    def generate(self, prompt: Prompt, sampling: Sampling, name: str, version: int) -> list[Any]:
        """The completions of a prompt, all of which must be by the weights `name`."""
        count = self._report.count if sampling.support else 0
        body = {"token_ids": prompt.ids, "sampling_params": parameters(prompt, sampling, count)}
        choices = _get(self._call("/inference/v1/generate", body), "choices")
        try:
            return [self._completion(choice, name, version, count) for choice in choices]
        except PolicyLossError:
            raise
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ServerError(self, f"gave half an answer: {error!r}.") from error

    def _completion(self, choice: Any, name: str, version: int, count: int) -> Completion:
        spans = [span["version"] for span in choice["weight_versions"]]
        if spans != [name]:
            raise ServerError(self, f"sampled with the weights {spans}, not with {name}.")
        if choice["finish_reason"] not in ("stop", "length"):
            raise ServerError(self, f"ended a completion by {choice['finish_reason']!r}.")
        content = choice["logprobs"]["content"]
        logp = [token["logprob"] for token in content]
        support = None
        if count:
            ids, likeliest = (
                torch.tensor([[top[name] for top in token["top_logprobs"]] for token in content])
                for name in ("token_id", "logprob")
            )
            support = self._report.support(ids, likeliest)
        finished = choice["finish_reason"] == "stop"
        return Completion(choice["token_ids"], logp, finished, version, support)

    def _call(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """The JSON that it answers, to a GET, or to a POST of `body`."""
        headers = {"Content-Type": "application/json"}
        if "VLLM_API_KEY" in os.environ:
            headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, headers)
        timeout = timeout or self._timeout
        try:
            with _NO_PROXY.open(request, timeout=timeout) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            text = f"answered {path} with {error.code}: {error.read(500).decode(errors='replace')}"
            if error.code == 404:
                raise InputError(
                    f"the server {self.address} {text}. Use vLLM 0.32 or later, and start it with "
                    "VLLM_SERVER_DEV_MODE=1, so that its weights can be updated."
                ) from error
            if error.code < 500:
                raise InputError(f"the server {self.address} {text}") from error
            raise ServerError(self, text) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = isinstance(getattr(error, "reason", error), TimeoutError)
            why = f" in {timeout:g} s." if late else f": {error}."
            raise ServerError(self, f"did not answer {path}{why}") from error


def _get(data: Any, *names: str) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data
