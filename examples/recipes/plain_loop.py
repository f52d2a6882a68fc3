"""One process and several micro-batches: python examples/recipes/plain_loop.py"""

from task import STEPS, logp_of, make_model, make_optimizer, micro_batches, report

import policyloss as pl

spec = pl.preset("dapo")
model = make_model()
optimizer = make_optimizer(model)

for _ in range(STEPS):
    step = pl.accumulate(spec, micro_batches())
    for micro in step:
        micro.loss(logp_of(model, micro)).backward()
    optimizer.step()
    optimizer.zero_grad()
report(step, model.named_parameters())
