"""Lightning Fabric: torchrun --nproc-per-node 2 examples/recipes/fabric.py"""

import torch.distributed as dist
from lightning_fabric import Fabric
from task import STEPS, logp_of, make_model, make_optimizer, micro_batches, report

import policyloss as pl

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
spec = pl.preset("dapo")
model = make_model()
model, optimizer = fabric.setup(model, make_optimizer(model))

for _ in range(STEPS):
    step = pl.accumulate(spec, micro_batches(fabric.global_rank, fabric.world_size))
    for micro in step:
        with fabric.no_backward_sync(model, enabled=not micro.is_last):
            fabric.backward(micro.loss(logp_of(model, micro)))
    optimizer.step()
    optimizer.zero_grad()
report(step, model.module.named_parameters())
dist.destroy_process_group()
