"""TRL's trainer with the head of this library on two processes: as DDP, FSDP2, ZeRO-2 and ZeRO-3,
compared with one process with the whole batch, and with TRL's head.

`python -m conformance.trl_ranks_run` in TRL's environment. The batch is fixed, so that all runs see
the same completions; each process has half of them. The comparison is of the change of every weight
in three steps of SGD.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.trl_run import furthest, reward, tiny_model

TOLERANCE = 1e-6
STEPS = 3
ROWS = 4
# Otherwise ZeRO-3 keeps small weights, and gathers others before their module is called.
GATHER_NOTHING_AHEAD = dict.fromkeys(
    (
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
    ),
    0,
)
ZERO = {
    f"ZeRO-{stage}": {
        "zero_optimization": {"stage": stage, **GATHER_NOTHING_AHEAD},
        "zero_allow_untested_optimizer": True,  # SGD
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # accelerate's default is 1
        "train_micro_batch_size_per_gpu": ROWS // 2,
        "gradient_accumulation_steps": 1,
    }
    for stage in (2, 3)
}
# The runs of the processes of one start, one after another.
STARTS: dict[str, tuple[str, ...]] = {
    "one": ("one",),
    "gloo": ("DDP", "FSDP2"),
    "DeepSpeed": tuple(ZERO),
}
# TRL refuses an adapter on the head itself, because its own head would not train it.
LORA = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
BONUS = "entropy bonus"  # TRL averages it over the tokens of a rank
CASES: dict[str, dict[str, Any]] = {
    "config's loss": {},
    "gspo": {"policy_loss": "gspo"},
    BONUS: {"options": {"entropy_coef": 0.01}},
    "adapter and a copy of the head": {"adapter": LORA},
}
THEIRS = "with TRL's head"


def fixed_batch() -> dict[str, Tensor]:
    """Four prompts with their completions, as TRL's trainer makes them."""
    generator = torch.Generator().manual_seed(3)
    shape = (ROWS, 8)
    lengths = torch.tensor([[8], [5], [7], [2]])
    prompts = torch.randint(4, 64, (ROWS, 3), generator=generator)
    padding = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]])
    return {
        "prompt_ids": prompts * padding,
        "prompt_mask": padding,
        "completion_ids": torch.randint(4, 64, shape, generator=generator),
        "completion_mask": (torch.arange(8) < lengths).long(),
        "advantages": torch.tensor([1.0, -0.5, 0.25, -1.0]),
        "old_per_token_logps": -4.2 + 0.3 * torch.rand(shape, generator=generator),
        "num_items_in_batch": lengths.sum(),
    }


def on_fixed_rows(parent: Any, rank: int, world: int) -> type[Any]:
    """A trainer whose every step is on this rank's rows of the fixed batch."""

    class Fixed(parent):  # type: ignore[misc]
        def _prepare_inputs(self, inputs: Any) -> dict[str, Tensor]:
            mine = slice(ROWS // world * rank, ROWS // world * (rank + 1))
            return {name: x[mine] if x.dim() else x for name, x in fixed_batch().items()}

    return Fixed


def trained(way: str, case: dict[str, Any], ours: bool, model: Path) -> dict[str, Tensor]:
    """How far the weights moved in a few steps, complete on every rank."""
    trl, compat = import_module("trl"), import_module("policyloss.compat.trl")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    parent = on_fixed_rows(compat.GRPOTrainer if ours else trl.GRPOTrainer, rank, world)
    extra: dict[str, Any] = {"head": "fused", "policy_loss": case.get("policy_loss")}
    place: dict[str, Any] = {"use_cpu": True}
    if way in ZERO:  # without a GPU, accelerate does not choose a backend by itself
        import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
        import_module("accelerate").PartialState(backend="gloo")
        place = {"deepspeed": ZERO[way], "accelerator_config": {"use_configured_state": True}}
    with tempfile.TemporaryDirectory() as scratch:
        args = trl.GRPOConfig(
            output_dir=scratch,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS // world,
            num_generations=2,
            steps_per_generation=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            loss_type="dapo",
            **place,
            **case.get("options", {}),
        )
        prompts = import_module("datasets").Dataset.from_dict({"prompt": ["w1 w2 w3"] * 8})
        tokenizer = import_module("transformers").PreTrainedTokenizerFast.from_pretrained(model)
        torch.manual_seed(0)
        adapter = None
        if "adapter" in case:
            adapter = import_module("peft").LoraConfig(task_type="CAUSAL_LM", **case["adapter"])
        trainer = parent(
            model=str(model),
            reward_funcs=reward,
            args=args,
            train_dataset=prompts,
            processing_class=tokenizer,
            peft_config=adapter,
            **(extra if ours else {}),
        )
        start = _complete(trainer.model)
        if way == "FSDP2":
            _shard(trainer)
        trainer.train()
        return {name: x - start[name] for name, x in _complete(trainer.model).items()}


def _shard(trainer: Any) -> None:
    """As accelerate does on a GPU; on CPUs it has DDP alone, which must not wrap this."""
    fully_shard = import_module("torch.distributed.fsdp").fully_shard
    for module in list(trainer.model.modules()):
        if type(module).__name__ == "Qwen2DecoderLayer":
            fully_shard(module)
    fully_shard(trainer.model)
    trainer.accelerator.prepare_model = lambda model, **options: model


def _complete(model: Any) -> dict[str, Tensor]:
    """All weights, gathered from the ranks."""
    gathered = {}
    for name, x in model.named_parameters():
        if hasattr(x, "ds_id"):
            with import_module("deepspeed").zero.GatheredParameters([x]):
                gathered[name] = x.detach().clone()
        else:
            whole = x.full_tensor() if hasattr(x, "full_tensor") else x
            gathered[name] = whole.detach().clone()
    return gathered


def run(start: str, folder: Path) -> None:
    """The work of one process of a start; the first process writes the results."""
    torch.set_num_threads(1)
    if start == "DeepSpeed":  # on a CPU: plain gloo, without compiling a collective first
        import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False
    moved = {}
    for way in STARTS[start]:
        for name, case in CASES.items():
            moved[f"{name}, {way}"] = trained(way, case, True, folder / "model")
            if name == BONUS or (start == "one" and "policy_loss" not in case):
                moved[f"{name}, {way} {THEIRS}"] = trained(way, case, False, folder / "model")
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(moved, folder / f"{start}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def started(start: str, folder: Path) -> str:
    """Run the processes of a start; "", or the output of the last one that failed."""
    count = 1 if start == "one" else 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    processes = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        if start == "DeepSpeed":
            place |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
        log = (folder / f"{start}.{rank}.log").open("w")
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, start, str(folder)]
        environment = {**os.environ, **({} if count == 1 else {**address, **place})}
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    codes = [process.wait(timeout=600) for process in processes]
    logs = [(folder / f"{start}.{rank}.log").read_text() for rank in range(count)]
    return "" if not any(codes) else "\n".join(log[-3000:] for log in logs)


def main() -> int:
    """Print how far each run is from one process; the exit status is 1 if one is further away than
    rounding, or if nothing was learnt.
    """
    if sys.argv[1:]:
        run(sys.argv[1], Path(sys.argv[2]))
        return 0
    moved: dict[str, dict[str, Tensor]] = {}
    with tempfile.TemporaryDirectory() as scratch, tiny_model() as model:
        folder = Path(scratch)
        (folder / "model").symlink_to(model)
        for start in STARTS:
            problem = started(start, folder)
            if problem:
                print(f"FAILED: {start}\n{problem}")
                return 1
            moved |= torch.load(folder / f"{start}.pt", weights_only=True)
    wrong = []
    for name, weights in moved.items():
        case, way = name.split(", ")
        if way == "one" or (case == BONUS and THEIRS in way and way != f"one {THEIRS}"):
            continue
        other = f"{name} {THEIRS}" if case == BONUS and THEIRS not in way else f"{case}, one"
        off = furthest(weights, moved[other])
        far = max(float(x.abs().max()) for x in weights.values())
        print(f"{name:<50} moved by {far:.1e}, {off:.1e} from: {other}")
        wrong += [name] if not (off <= TOLERANCE and far > 1e-3) else []
    print(f"FAILED: {', '.join(wrong)}" if wrong else f"every difference is within {TOLERANCE:g}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
