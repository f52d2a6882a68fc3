"""A process around a real vLLM: its likeliest answers to conversations, as token ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def small_engine(model: str, **options: Any) -> Any:
    """The `LLM` of vLLM around a folder, in float32 on a CPU. options: of `LLM`, beside these."""
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


def answer(model: str, conversations: Path, out: Path, adapter: str = "") -> None:
    """Write `[[ids of the prompt, ids of the answer], …]`. adapter: a folder of peft, or none."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    llm = small_engine(model, enable_lora=bool(adapter))
    answers = llm.chat(
        json.loads(conversations.read_text()),
        SamplingParams(temperature=0.0, max_tokens=16),
        lora_request=LoRARequest("trained", 1, adapter) if adapter else None,
        use_tqdm=False,
    )
    out.write_text(
        json.dumps([[list(a.prompt_token_ids), list(a.outputs[0].token_ids)] for a in answers])
    )


if __name__ == "__main__":
    answer(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
