"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/recipes/ddp.py"""

from contextlib import nullcontext

import torch.distributed as dist
from task import STEPS, logp_of, make_model, make_optimizer, micro_batches, report
from torch.nn.parallel import DistributedDataParallel

import policyloss as pl

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
spec = pl.preset("dapo")
model = DistributedDataParallel(make_model())
optimizer = make_optimizer(model)

for _ in range(STEPS):
    step = pl.accumulate(spec, micro_batches(rank, world))
    for micro in step:
        # Gradients travel once, with the last micro-batch.
        with nullcontext() if micro.is_last else model.no_sync():
            micro.loss(logp_of(model, micro)).backward()
    optimizer.step()
    optimizer.zero_grad()
report(step, model.module.named_parameters())
dist.destroy_process_group()
