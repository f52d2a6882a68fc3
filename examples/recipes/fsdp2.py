"""FSDP2: torchrun --nproc-per-node 2 examples/recipes/fsdp2.py"""

import torch.distributed as dist
from task import STEPS, logp_of, make_model, make_optimizer, micro_batches, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import policyloss as pl

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
spec = pl.preset("dapo")
model = make_model()
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = make_optimizer(model)

for _ in range(STEPS):
    step = pl.accumulate(spec, micro_batches(rank, world), group=mesh.get_group())
    for micro in step:
        # Gradients travel once, with the last micro-batch.
        model.set_requires_gradient_sync(micro.is_last)
        micro.loss(logp_of(model, micro)).backward()
    optimizer.step()
    optimizer.zero_grad()
report(step, ((name, x.full_tensor()) for name, x in model.named_parameters()))
dist.destroy_process_group()
