"""A process around a real vLLM: its likeliest answers to conversations, as token ids with their
log-probabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def small_engine(model: str, **options: Any) -> Any:
    """The `LLM` of vLLM around a folder, in float32 on a CPU. options: of `LLM`, in addition."""
    from vllm import LLM

    return LLM(
        model=model,
        dtype="float32",
        generation_config="vllm",
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        **options,
    )


def write_answers(model: str, conversations: Path, out: Path, adapter: str = "") -> None:
    """Write `[[ids of the prompt, ids of the answer, their log-probabilities], …]`. adapter: a
    folder of peft, or none.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    llm = small_engine(model, enable_lora=bool(adapter))
    answers = llm.chat(
        json.loads(conversations.read_text()),
        SamplingParams(temperature=0.0, max_tokens=16, logprobs=0),
        lora_request=LoRARequest("trained", 1, adapter) if adapter else None,
        use_tqdm=False,
    )
    rows = []
    for answer in answers:
        ids, found = list(answer.outputs[0].token_ids), answer.outputs[0].logprobs
        logp = [entry[token].logprob for entry, token in zip(found, ids, strict=True)]
        rows.append([list(answer.prompt_token_ids), ids, logp])
    out.write_text(json.dumps(rows))


if __name__ == "__main__":
    write_answers(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
