"""`lab.attach` on verl's own actor worker (FSDP2) and on its driver, healthy and sick.

    python -m conformance.verl_attach_run [FOLDER]        # with verl's Python

The worker is verl's `TrainingWorker` with verl's `ppo_loss`, on a CPU, which verl's platform
plugins allow; the driver is the method of `RayPPOTrainer` that sends a batch to it. A sampler
reports its log-probabilities, and the worker computes the old ones; in a sick run they are late by
one token. FOLDER keeps the run directories with their pages.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import policyloss_lab as lab
from conformance import standins
from conformance.trl_attach_run import END, peaked_model, sample

STEPS, ROWS, PROMPT, WIDTH = 12, 8, 3, 24
MISSING = (
    "accelerate",
    "peft",
    "uvicorn",
    "fastapi",
    "hydra",
    "aiohttp",
    "zmq",
    "cachetools",
    "torchdata",
)


def enter_cpu() -> None:
    """Make verl's engine run on a CPU: one process, one rank."""
    os.environ |= {"WG_BACKEND": "ray", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    standins.install_packages(MISSING)
    platforms: Any = import_module("verl.plugin.platform.platform_cuda")

    class Cpu(platforms.PlatformCUDA):  # type: ignore[misc]
        device_name, vendor_name = "cpu", "cpu"
        device_module = SimpleNamespace(
            **{name: lambda *_: 0 for name in ("max_memory_allocated", "max_memory_reserved")},
            **{name: lambda *_: None for name in ("synchronize", "empty_cache", "set_device")},
            current_device=lambda: "cpu",
            is_available=lambda: False,
            memory_allocated=lambda *_: 0,
            memory_reserved=lambda *_: 0,
            mem_get_info=lambda *_: (0, 0),
        )

        def current_device(self) -> Any:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

    import_module("verl.plugin.platform").set_platform(Cpu())
    engines = import_module("verl.workers.engine")
    fsdp = import_module("verl.workers.engine.fsdp.transformer_impl").FSDPEngineWithLMHead
    engines.EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(
        fsdp
    )
    store = import_module("torch.distributed").HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def worker_of(model: Path) -> Any:
    """verl's actor worker with the model at this path."""
    config = import_module("verl.workers.config")
    precision = {f"{name}_dtype": "fp32" for name in ("param", "reduce", "buffer")}
    worker = import_module("verl.workers.engine_workers").TrainingWorker(
        config.TrainingWorkerConfig(
            model_type="language_model",
            model_config=config.HFModelConfig(
                path=str(model),
                use_remove_padding=False,
                override_config={"attn_implementation": "eager"},
            ),
            engine_config=config.FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=4,
                infer_micro_batch_size_per_gpu=4,
                mixed_precision=precision,
                model_dtype="fp32",
                dtype="float32",
            ),
            optimizer_config=config.FSDPOptimizerConfig(lr=1e-3, total_training_steps=STEPS),
            checkpoint_config=import_module("verl.trainer.config").CheckpointConfig(),
        )
    )
    worker.reset()
    worker.flops_counter.estimate_flops = lambda *_, **__: (0.0, 1.0)  # it knows GPUs alone
    actor = config.ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=4, clip_ratio_high=0.28
    )
    worker.set_loss_fn(partial(import_module("verl.workers.utils.losses").ppo_loss, actor))
    return worker


def tensors_of(worker: Any, shift: int) -> dict[str, Tensor]:
    """A sampled and scored batch. shift: of the old log-probabilities."""
    padding = import_module("verl.workers.utils.padding")
    tools = import_module("verl.utils.tensordict_utils")
    prompts = torch.randint(4, 60, (ROWS, PROMPT))
    responses, rollout = sample(worker.engine.module, prompts, WIDTH, 1.0)
    ended = (responses == END).long().cumsum(1) - (responses == END).long()
    mask = (ended == 0).long()
    attention = torch.cat([torch.ones_like(prompts), mask], 1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }
    info: dict[str, Any] = {"temperature": 1.0, "calculate_entropy": True, "compute_loss": False}
    info["global_token_num"] = None
    scored = padding.left_right_2_no_padding(tools.get_tensordict(dict(tensors), info))
    old = padding.no_padding_2_padding(worker.infer_batch(scored)["log_probs"], scored)
    scores = mask * torch.rand(ROWS, 1) / mask.sum(1, keepdim=True)
    return tensors | {
        "old_log_probs": old.roll(shift, 1),
        "rollout_log_probs": rollout * mask,
        "token_level_scores": scores,
        "advantages": (scores.sum(1, keepdim=True) - 0.5) * mask,
    }


def driver_of(worker: Any) -> Any:
    """verl's driver, whose group of workers is this one."""
    config = import_module("omegaconf").OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {"temperature": 1.0, "n": 1, "multi_turn": {"enable": False}},
                "actor": {
                    "calculate_entropy": True,
                    "entropy_coeff": 0.0,
                    "ppo_mini_batch_size": ROWS // 2,
                    "ppo_epochs": 1,
                    "data_loader_seed": 1,
                    "shuffle": True,
                },
            }
        }
    )
    driver = object.__new__(import_module("verl.trainer.ppo.ray_trainer").RayPPOTrainer)
    driver.config = config
    driver.actor_rollout_wg = SimpleNamespace(update_actor=worker.train_mini_batch)
    return driver


Result = tuple[list[Any], list[Tensor], lab.Attachment | None]  # metrics, weights, attachment


def run(
    model: Path, out: Path | None = None, shift: int = 0, driven: bool = False, **options: Any
) -> Result:
    """Train, attached if `out` is a folder, to the worker or, if `driven`, to the driver; ends
    early if the attachment halts the run.
    """
    torch.manual_seed(3)
    worker = worker_of(model)
    attachment = None
    if out is not None and not driven:
        attachment = lab.attach(worker, out, **options)
    driver = driver_of(worker)
    if out is not None and driven:
        attachment = lab.attach(driver, out, **options)
    batch_class = import_module("verl.protocol").DataProto
    metrics = []
    try:
        for _ in range(STEPS):
            data = batch_class.from_single_dict(tensors_of(worker, shift))
            metrics.append(driver._update_actor(data).meta_info["metrics"])
    except lab.RunHaltedError as halt:
        metrics.append(halt.cause)
    if attachment is not None:
        attachment.detach()
    weights = [x.detach().full_tensor().clone() for x in worker.engine.module.parameters()]
    return metrics, weights, attachment


def same_numbers(a: Result, b: Result) -> bool:
    """Whether weights and metrics are equal, bit for bit; memory may differ."""
    logs = [[{k: v for k, v in row.items() if "perf/" not in k} for row in x[0]] for x in (a, b)]
    return logs[0] == logs[1] and all(map(torch.equal, a[1], b[1]))


def main() -> int:
    """Print the verdicts; the exit status is 1 if one is not as expected."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("policyloss_lab").setLevel(logging.ERROR)
    results: dict[str, bool] = {}
    # verl prints while it starts.
    with (
        tempfile.TemporaryDirectory() as scratch,
        peaked_model() as model,
        redirect_stdout(StringIO()),
    ):
        enter_cpu()
        out = Path(sys.argv[1] if sys.argv[1:] else scratch)
        bare = run(model)
        attached = run(model, out / "healthy", every=1, halt_on="shift")
        healthy = attached[2]
        assert healthy is not None
        results[f"healthy run: {[*healthy.findings] or 'no finding'}"] = not healthy.findings
        results["weights and metrics have the same bits as without attach"] = same_numbers(
            bare, attached
        )
        stopped, _, sick = run(model, out / "sick", shift=1, every=5, halt_on="shift")
        assert sick is not None
        results[f"old log-probs one token late: {[*sick.findings]}, halted at step 1"] = (
            stopped == ["shift"]
        )
        driven = run(model, out / "driver", driven=True, every=1)
        results["the driver gives the same bits, and no finding"] = (
            same_numbers(bare, driven) and driven[2] is not None and not driven[2].findings
        )
        stopped, _, _ = run(model, out / "driver_sick", 1, driven=True, halt_on="shift")
        results["the driver is halted at step 1"] = stopped == ["shift"]
    for name, passed in results.items():
        print(f"{'passed' if passed else 'FAILED'}  {name}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
