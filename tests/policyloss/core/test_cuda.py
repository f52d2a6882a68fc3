"""On a GPU: the CPU's numbers, no host sync, and the same bits every time.
Skipped where there is none.
"""

from dataclasses import replace

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
from policyloss.check.batch import TOKEN_TENSORS, Batch

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
IN_FLOAT32 = (
    "advantage grpo_vectorized",
    "advantage gdpo",
    "compute_approx_kl",
    "distillation.",
    "ChunkedDivergenceFunction",
    "DistillationTrainer's loss",
)


def tolerance(name, output):
    """1e-12, but for what is float32 inside, and for a deviation √(E[x²] − E[x]²),
    which makes 1e-8 of a rounding of 1e-16. A divergence is a sum of differences of logarithms of
    about 10, whose rounding in float32 is 1e-6.
    """
    if "Divergence" in name:
        return 4e-6
    return 1e-6 if name.startswith(IN_FLOAT32) or output.endswith("_std") else 1e-12


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
        assert compare(value, expected).worst <= tolerance(name, output), output


@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
@walked("packed", [False, True], ids=["padded", "packed"])
@walked("name", ["ppo_dual_clip", "gspo", "dr_grpo"])
def test_a_recorded_loss_is_the_compiled_loss(name, packed):
    """The same bits; and what a call returned is not changed by the next, though both write to the
    same memory of the graph.
    """
    plain, recorded_once = (
        pl.compiled_loss(PRESETS[name], cuda_graph=graph) for graph in (False, True)
    )
    found, wanted = [], []
    for seed in (3, 4, 5):
        batch = Batch.random(rows=8, width=33, seed=seed)
        moved, extra = on_gpu(batch, torch.float32), {}
        if packed:
            shape = batch.mask.shape
            moved = moved.map(lambda x: x.reshape(-1), *TOKEN_TENSORS, "mask")
            extra = {"cu_seqlens": torch.arange(0, shape[0] + 1, device="cuda") * shape[1]}
        torch.cuda.synchronize()  # another stream does not wait for the copies to the GPU
        arguments = {
            "totals": pl.Totals(tokens=100 + seed, sequences=7),
            "rollout_logp": moved.rollout_logp,
            **extra,
        }
        tensors = (moved.logp, moved.old_logp, moved.advantages, moved.mask)
        for loss, seen in ((plain, wanted), (recorded_once, found)):
            with torch.cuda.stream(
                torch.cuda.Stream() if seed == 5 else torch.cuda.current_stream()
            ):
                out, gradients = loss.value_and_gradient(*tensors, **arguments)
                seen.append((out.loss, gradients.logp, out.metrics))
            torch.cuda.synchronize()
    for (loss, gradient, metrics), (other, slope, others) in zip(found, wanted, strict=True):
        assert torch.equal(loss, other)
        assert torch.equal(gradient, slope)
        assert metrics.compute() == others.compute()
    assert len({loss.item() for loss, _, _ in found}) == 3


@pytest.mark.filterwarnings("ignore")
def test_an_expanded_tensor_is_not_recorded():
    """It has no place of its own to be copied to; the loss is the same."""
    batch = on_gpu(BATCH, torch.float32)
    advantages = batch.advantages[:, :1].expand_as(batch.logp)
    found, wanted = (
        pl.compiled_loss(pl.preset("ppo"), cuda_graph=graph)(
            batch.logp, batch.old_logp, advantages, batch.mask
        ).loss
        for graph in (True, False)
    )
    assert torch.equal(found, wanted)
