"""The core works in a torch that was built without its optional parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import policyloss as pl

# A build without `torch.distributed` lacks the names that its C++ part would add to `torch._C`.
SCRIPT = """
import sys
from importlib.machinery import PathFinder

class WithoutDistributed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name == "torch._C" else None
        if spec is not None:
            load = spec.loader.exec_module
            def exec_module(module):
                load(module)
                for name in [name for name in dir(module) if "c10d" in name or "rpc" in name]:
                    delattr(module, name)
            spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, WithoutDistributed)
for name in ("numpy", "triton"):
    sys.modules[name] = None  # importing it now raises ImportError
import torch
assert not torch.distributed.is_available() and not hasattr(torch.distributed, "all_reduce")
import policyloss as pl

mask = torch.ones(1, 2, dtype=torch.bool)
batch = {"mask": mask, "old_logp": torch.zeros(1, 2), "advantages": torch.ones(1)}
logp = torch.zeros(1, 2, requires_grad=True)
step = pl.accumulate("dapo", [batch])
for micro in step:
    micro.loss(logp).backward()
print(step.reduce_metrics().compute()["loss"], logp.grad.tolist())
hidden, weight = torch.zeros(1, 2, 3, requires_grad=True), torch.eye(3)
ids = torch.tensor([[0, 1]])
old_logp = torch.full((1, 2), 1 / 3).log()
pl.linear_policy_loss("dapo", hidden, weight, ids, old_logp, torch.ones(1), mask).loss.backward()
print([[round(6 * x, 4) for x in row] for row in hidden.grad[0].tolist()])
print(pl.advantage.grpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).sum().item())
"""


def test_neither_distributed_nor_numpy_nor_triton_is_needed() -> None:
    """Ratio 1 and A = 1 over two tokens: loss −1, gradient −1/2 each. Through a head with equal
    logits of three words: −1/2·(onehot − 1/3), which is (−2, 1, 1)/6 for the first word.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={"PYTHONPATH": str(Path(pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "-1.0 [[-0.5, -0.5]]",
        "[[-2.0, 1.0, 1.0], [1.0, -2.0, 1.0]]",
        "0.0",
    ]
