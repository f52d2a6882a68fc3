"""DeepSpeed ZeRO-2: torchrun --nproc-per-node 2 examples/recipes/deepspeed_zero2.py"""

import deepspeed
import torch.distributed as dist
from task import STEPS, logp_of, make_model, make_optimizer, micro_batches, report

import policyloss as pl

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
    False  # on a CPU: plain gloo, without compiling a collective first
)
deepspeed.init_distributed("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
spec = pl.preset("dapo")
model = make_model()
config = {
    "train_micro_batch_size_per_gpu": 1,  # required, and read by DeepSpeed's own data loader alone
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,  # SGD
}
engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)

for _ in range(STEPS):
    step = pl.accumulate(spec, micro_batches(rank, world))
    for micro in step:
        engine.set_gradient_accumulation_boundary(micro.is_last)
        # No division by gradient_accumulation_steps.
        engine.backward(micro.loss(logp_of(engine, micro)), scale_wrt_gas=False)
        engine.step()  # steps and zeroes the gradients at the boundary only
report(step, model.named_parameters())
dist.destroy_process_group()
