"""On a GPU: the CPU's numbers, no host sync, and the same bits every time.
Skipped without a GPU.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conformance import release
from conformance.cases import run_side
from conformance.compare import compare
from conformance.record import decode
from conformance.runner import everything
from recorded_cases import NAMES, entry, recorded
from walk import walked

import policyloss as pl
from cases import PRESETS
from policyloss.check.batch import Batch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")
BATCH = Batch.random(rows=8, width=33, seed=3)


def on_gpu(batch: Batch, dtype: torch.dtype = torch.float64) -> Batch:
    moved = {name: x.cuda() for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    return replace(
        batch, **{name: x.to(dtype) if x.is_floating_point() else x for name, x in moved.items()}
    )


@walked("packed", [False, True], ids=["padded", "packed"])
@walked("name", pl.presets())
def test_the_gpu_gives_the_cpus_numbers(name, packed):
    batch = BATCH.packed() if packed else BATCH
    spec = PRESETS[name]
    loss, gradient = batch.loss(spec)
    gpu_loss, gpu_gradient = on_gpu(batch).loss(spec)
    torch.testing.assert_close(gpu_loss.cpu(), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gpu_gradient.cpu(), gradient, rtol=1e-12, atol=1e-12)


@walked("packed", [False, True], ids=["padded", "packed"])
@walked("name", pl.presets())
def test_nothing_waits_for_the_host(name, packed):
    batch = on_gpu(BATCH.packed() if packed else BATCH, torch.float32)
    logp = batch.logp.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = pl.policy_loss(PRESETS[name], logp, **batch.others(PRESETS[name]))
        out.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logp.grad.isfinite().all()


@walked("name", pl.presets())
def test_the_same_bits_every_time(name):
    """A large packed batch, where atomics would show."""
    batch = on_gpu(Batch.random(rows=300, width=700, seed=5).packed(), torch.float32)
    first = batch.loss(PRESETS[name])
    for _ in range(3):
        again = batch.loss(PRESETS[name])
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@walked("name", ["ppo_dual_clip", "gspo", "grpo", "tis"])
def test_compiled_on_the_gpu(name):
    batch = on_gpu(BATCH, torch.float32)
    spec = PRESETS[name]

    def value(logp):
        return pl.policy_loss(spec, logp, **batch.others()).loss

    logp = batch.logp.clone().requires_grad_()
    loss = torch.compile(value, fullgraph=True)(logp)
    loss.backward()
    expected, gradient = batch.loss(spec)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-5, atol=1e-6)


# The frameworks compute these in float32 whatever they are given;
# elsewhere that leaves another rounding.
IN_FLOAT32 = ("advantage grpo_vectorized", "advantage gdpo", "compute_approx_kl", "distillation.")


def tolerance(function, output):
    """1e-12, except where the computation is float32 inside, and for a deviation √(E[x²] − E[x]²),
    which turns a rounding of 1e-16 into 1e-8. A divergence is a sum of differences of logarithms of
    about 10, whose rounding in float32 is 1e-6.
    """
    if "Divergence" in function.name:
        return 4e-6
    single = function.dtypes == ("float32",) or function.name.startswith(IN_FLOAT32)
    return 1e-6 if single or output.endswith("_std") else 1e-12


def recorded_cases():
    return [(peer, name, i) for peer, name in NAMES for i in range(len(recorded(peer)[name]))]


@walked(("peer", "name", "i"), recorded_cases())
def test_a_drop_in_gives_the_frameworks_numbers_on_the_gpu(peer, name, i):
    case = recorded(peer)[name][i]
    function = entry(peer, name, case["release"])  # which may set another release while it looks
    release.set_current(case["release"])
    inputs = {
        key: x.cuda() if isinstance(x, torch.Tensor) else x
        for key, x in decode(case["inputs"]).items()
    }
    side = run_side(function.ours, function, inputs, case["options"], case["seed"])
    assert (side.error is not None) == ("raises" in case), side.error
    if "raises" in case:
        return
    ours, theirs = everything(side), decode(case["outputs"])
    for output, expected in theirs.items():
        value = ours[output].cpu() if isinstance(ours[output], torch.Tensor) else ours[output]
        assert compare(value, expected).worst <= tolerance(function, output), output


@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
@walked("packed", [False, True], ids=["padded", "packed"])
@walked("name", ["ppo_dual_clip", "gspo", "dr_grpo"])
def test_a_compiled_loss_is_the_eager_loss(name, packed):
    """With and without autograd."""
    batch = Batch.random(rows=8, width=33, seed=3)
    moved, extra = on_gpu(batch, torch.float32), {}
    if packed:
        shape = batch.mask.shape
        moved = moved.map(lambda x: x.reshape(-1), *moved.token_shaped)
        extra = {"cu_seqlens": torch.arange(0, shape[0] + 1, device="cuda") * shape[1]}
    totals, tensors = pl.Totals(tokens=100, sequences=7), (moved.old_logp, moved.advantages)
    compiled, results = pl.compiled_loss(PRESETS[name]), []
    for loss in (partial(pl.policy_loss, PRESETS[name]), compiled):
        logp = moved.logp.clone().requires_grad_()
        out = loss(logp, *tensors, moved.mask, totals=totals, **extra)
        out.loss.backward()
        results.append((out, logp.grad))
    out, gradients = compiled.value_and_gradient(
        moved.logp, *tensors, moved.mask, totals=totals, **extra
    )
    (expected, slope), *others = [*results, (out, gradients.logp)]
    for other, gradient in others:
        torch.testing.assert_close(other.loss, expected.loss, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(gradient, slope, rtol=5e-6, atol=1e-7)
        metrics = other.metrics.compute()
        for metric, value in expected.metrics.compute().items():
            assert metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), metric
