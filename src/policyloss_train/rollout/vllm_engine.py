"""vLLM in this process. The policy's weights are passed in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Say
from policyloss_train.drawing import Pair
from policyloss_train.rollout import protocol
from policyloss_train.rollout.protocol import Completion, Prompt, Sampling, Weights

CPU_CACHE = 1 << 30  # bytes of KV cache on a CPU, where vLLM would take half of the memory


class VLLM:
    """An engine of one process and one device. longest: tokens of the longest prompt. report: the
    log-probabilities to request for each token.
    """

    concurrent = True

    def __init__(
        self, config: TrainConfig, weights: Weights, longest: int, report: TopLogprobs, warn: Say
    ) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # weights stay in memory
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the learner needs cores too
        try:
            import vllm
        except ImportError as error:
            raise InputError(
                f"--rollout vllm needs the package vllm, which cannot be imported ({error}): pip "
                "install vllm, or use the built-in sampler."
            ) from error
        self._vllm: Any = vllm
        self._report, self._warn = report, warn
        self._folder = tempfile.TemporaryDirectory(prefix="policyloss-vllm-")
        self._asleep = False
        self._sleeps = config.staleness == 0 and torch.cuda.is_available()
        model = Path(self._folder.name) / "model"
        weights.save(model)
        memory: dict[str, Any] = {"kv_cache_memory_bytes": CPU_CACHE}
        if torch.cuda.is_available():
            memory = {"gpu_memory_utilization": config.rollout_memory}
        try:
            self._llm: Any = vllm.LLM(
                model=str(model),
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=config.dtype,
                max_model_len=longest + config.max_new_tokens,
                logprobs_mode="processed_logprobs",
                max_logprobs=report.count,
                enable_sleep_mode=self._sleeps,
                enforce_eager=not torch.cuda.is_available(),
                seed=config.seed,
                **memory,
            )
        except Exception as error:  # another package may raise anything
            self.close()
            raise protocol.RolloutError(
                f"vLLM cannot serve the model {config.model!r}: {error} On a CPU it takes heads of "
                "32, 64, 80, 96, 112 or 128 numbers and more, which --model tiny32 has."
            ) from error

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """Complete the prompts; log-probabilities include temperature and cuts."""
        if not prompts:
            return []
        count = self._report.count if sampling.support else 0
        flat = {"detokenize": False, "flat_logprobs": True}
        answers = self._llm.generate(
            [{"prompt_token_ids": prompt.ids} for prompt in prompts],
            [
                self._vllm.SamplingParams(**parameters(prompt, sampling, count), **flat)
                for prompt in prompts
            ],
            use_tqdm=False,
        )
        return [[self._completion(one, count) for one in answer.outputs] for answer in answers]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Pass the weights in memory, or in a folder if vLLM refuses this model's tensor names."""
        try:
            self._reload(weights_iterator=weights.tensors())
        except Exception as error:  # another package may raise anything; the update is repeated
            self._warn(f"vLLM did not take the weights in memory, so a folder is used: {error}")
            folder = Path(self._folder.name) / "weights"
            weights.save(folder)
            self._reload(weights_path=str(folder))
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._llm.reset_prefix_cache()
        self._llm.update_weight_version(str(version))

    def sleep(self) -> None:
        """Free weights and KV cache on the GPU; the next update of the weights reloads them."""
        if self._sleeps:
            self._llm.sleep(level=2)
            self._asleep = True

    def wake(self) -> None:
        """Allocate memory for the weights; `update_weights` allocates the cache."""
        if self._asleep:
            self._llm.wake_up(tags=["weights"])

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()

    def _reload(self, **source: Any) -> None:
        self._llm.collective_rpc("reload_weights", kwargs=source)

    def _completion(self, one: Any, count: int) -> Completion:
        """At each position, vLLM reports the token that was drawn, then the `count` likeliest. A
        completion by unknown weights, or by several versions, gets the invalid version −1.
        """
        ids, logp = (
            torch.tensor(numbers).view(len(one.token_ids), 1 + count)
            for numbers in (one.logprobs.token_ids, one.logprobs.logprobs)
        )
        support = self._report.support(ids[:, 1:], logp[:, 1:]) if count else None
        versions = [span.version for span in one.weight_versions or ()]
        version = int(versions[0]) if len(versions) == 1 and versions[0].isdecimal() else -1
        finished = one.finish_reason == "stop"
        return Completion(list(one.token_ids), logp[:, 0], finished, version, support)


def parameters(prompt: Prompt, sampling: Sampling, count: int) -> dict[str, Any]:
    """The sampling parameters of vLLM for a prompt: only our end tokens end a completion. count:
    the number of log-probabilities per position, in addition to that of the drawn token.
    """
    return {
        "n": prompt.number,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "seed": prompt.seed(sampling),
        "stop_token_ids": list(sampling.end_ids),
        "ignore_eos": True,
        "logprobs": count,
    }


TIES = 64  # tokens that vLLM may keep beyond --top-k, because they tie with the last
MOST = 4096  # log-probabilities of a token; each passes through a Python object


@dataclass(frozen=True)
class TopLogprobs:
    """The number of log-probabilities that vLLM must return per token; 0 without a support."""

    count: int
    vocabulary: int

    @classmethod
    def of(cls, config: TrainConfig, vocabulary: int) -> TopLogprobs:
        """As many as top-k may keep; without top-k, the whole vocabulary."""
        if not config.replays_support:
            return cls(0, vocabulary)
        count = min(vocabulary, config.top_k + TIES if config.top_k else vocabulary)
        if count > MOST:
            raise InputError(
                f"--rollout {config.rollout} would have to report {count} log-probabilities of "
                "every token, for the learner to use the tokens that --top-p and --top-k keep; add "
                f"--top-k {MOST - TIES} or less, or --no-sampling-mask."
            )
        return cls(count, vocabulary)

    def support(self, ids: Tensor, logp: Tensor) -> Pair:
        """The support of each token. ids, logp: the likeliest tokens, `[L, count]` each."""
        kept = logp > protocol.LEFT_OUT
        sizes = kept.sum(1)
        if self.count < self.vocabulary and bool((sizes == self.count).any()):
            raise protocol.RolloutError(
                f"vLLM kept {self.count} tokens or more, and reports no more of them: more than "
                f"{TIES} are as likely as the last that --top-k allows. Use another --top-k, or "
                "--no-sampling-mask."
            )
        return ids[kept].to(torch.int32), torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
