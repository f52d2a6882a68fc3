"""Hugging Face Accelerate: torchrun --nproc-per-node 2 examples/recipes/accelerate_loop.py"""

from contextlib import nullcontext

from accelerate import Accelerator
from task import STEPS, logp_of, make_model, make_optimizer, micro_batches, report

import policyloss as pl

# backward() would divide the loss by gradient_accumulation_steps;
# the step's totals are the only denominator.
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
rank, world = accelerator.process_index, accelerator.num_processes
spec = pl.preset("dapo")
model = make_model()
model, optimizer = accelerator.prepare(model, make_optimizer(model))

for _ in range(STEPS):
    step = pl.accumulate(spec, micro_batches(rank, world))
    for micro in step:
        with nullcontext() if micro.is_last else accelerator.no_sync(model):
            accelerator.backward(micro.loss(logp_of(model, micro)))
    optimizer.step()
    optimizer.zero_grad()
report(step, accelerator.unwrap_model(model).named_parameters())
accelerator.end_training()
