"""Start SkyRL's Tinker server with its JAX backend on this CPU: `python skyrl_server.py FOLDER
MODEL PORT`. FOLDER keeps its checkpoints and requests over a restart.

SkyRL starts its engine by `uv run`, which would make another environment; here, the engine runs in
this one. SkyRL names Python 3.12; on 3.11 it lacks one thing, a TypedDict that pydantic takes.
"""

from __future__ import annotations

import sys
import typing
from typing import Any

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict

# Fixed sizes of batches, because each size is compiled for several seconds.
BACKEND = {
    "max_lora_adapters": 16,
    "max_lora_rank": 32,
    "sample_max_num_sequences": 128,
    "train_micro_batch_size": 64,
}


def serve(folder: str, model: str, port: str) -> None:
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    def engine(parent: list[str], config: Any) -> list[str]:
        return [sys.executable, __file__, "engine", *config_to_argv(config)]

    api._build_uv_run_cmd_engine = engine
    api.app.state.engine_config = EngineConfig(
        base_model=model,
        backend="jax",
        backend_config=BACKEND,
        checkpoints_base=f"{folder}/checkpoints",
        database_url=f"sqlite:///{folder}/tinker.db",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        import runpy

        del sys.argv[1]
        runpy.run_module("skyrl.tinker.engine", run_name="__main__")
    else:
        serve(*sys.argv[1:])
