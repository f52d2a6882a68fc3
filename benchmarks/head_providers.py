"""The providers of the head benchmark: our plans, plain PyTorch, other projects' heads, and the
bare matmuls.

Every provider computes the same loss on the same inputs, and returns loss, d hidden and d weight
(forward only: logp, entropy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import peers
from benchmarks.head_data import EPS, Case
from benchmarks.head_reference import ENTROPY_COEF, GSPO_EPS, LOSSES, Result

Run = Callable[[], Result]
Make = Callable[[Case, Path], Run]

PPO = pl.preset("ppo_dual_clip")
SPECS = {
    "dual clip": PPO,
    "entropy": PPO.replace(entropy_coef=ENTROPY_COEF),
    "gspo": pl.preset("gspo").replace(trust=pl.Clip(GSPO_EPS, GSPO_EPS)),
}
DENSE, FORWARD, MASKED, TREE = "dense", "forward only", "masked", "tree"
# The same without peers: a product runs at a higher clock after one that left the device cool.
IN_TURNS = "forward only, in turns with its floor"
THREE, ONE = "three bare matmuls", "one bare matmul"
LIVE = "bare matmuls of the live rows"
LIVE_NEW = f"{LIVE}, d weight in new memory"
WIDE, WIDE_ROWS = "one bare matmul, logits in float32", 2048
OURS = "policyloss, one pass"


@dataclass(frozen=True)
class Entry:
    """One row of the benchmark: a provider, its case, and the loss it is checked against (None: no
    check).
    """

    name: str
    make: Make
    targets: tuple[str, ...]
    group: str = DENSE
    case: str = "dense"
    loss: str | None = "dual clip"
    kind: str = "peer"  # "ours", "peer" or "floor"
    devices: tuple[str, ...] = ("cpu", "cuda")
    slow: bool = False
    chunked: bool = False  # a peer's path that never holds all logits
    gathered: bool = False  # runs on the live rows, gathered before the clock starts
    skips_zero_advantage: bool = False
    plan: str | None = None


def entries() -> list[Entry]:
    """All of them, in the order of the tables."""
    return [*_floors(), *_ours(), *_eager(), *_peer_heads(), *_masked(), *_tree(), *_forward()]


# Ours ---------------------------------------------------------------------------------------------


def ours(loss: str, plan: str, skip_zero_advantage: bool = False) -> Make:
    """`linear_policy_loss`, forward and backward."""
    spec = SPECS[loss]

    def make(case: Case, _: Path) -> Run:
        def run() -> Result:
            tensors = (
                case.hidden,
                case.weight,
                case.ids,
                case.old_logp,
                case.advantages,
                case.mask,
            )
            out = pl.linear_policy_loss(
                spec, *tensors, plan=plan, skip_zero_advantage=skip_zero_advantage
            )
            d_hidden, d_weight = torch.autograd.grad(out.loss, (case.hidden, case.weight))
            return Result(out.loss.detach(), out.logp, out.entropy, d_hidden, d_weight)

        return run

    return make


def ours_tree(case: Case, _: Path) -> Run:
    """`linear_policy_loss` on the distinct hidden states, with an index."""
    assert case.index is not None
    order = case.index.flatten().argsort(stable=True)
    place = order[torch.searchsorted(case.index.flatten()[order], torch.unique(case.index))]
    states = case.hidden.detach().flatten(0, 1)[place].requires_grad_()

    def run() -> Result:
        tensors = (case.ids, case.old_logp, case.advantages, case.mask)
        out = pl.linear_policy_loss(PPO, states, case.weight, *tensors, index=case.index)
        d_states, d_weight = torch.autograd.grad(out.loss, (states, case.weight))
        return Result(out.loss.detach(), out.logp, out.entropy, d_states, d_weight)

    return run


def ours_forward(case: Case, _: Path) -> Run:
    """`linear_logprobs` without gradient: old or reference log-probabilities and the entropy."""

    @torch.no_grad()
    def run() -> Result:
        out = pl.linear_logprobs(case.hidden, case.weight, case.ids, entropy=True)
        return Result(logp=out.logp, entropy=out.entropy)

    return run


def _ours() -> list[Entry]:
    def entry(name: str, targets: tuple[str, ...], loss: str, plan: str, **others: Any) -> Entry:
        return Entry(name, ours(loss, plan), targets, loss=loss, kind="ours", plan=plan, **others)

    every = ("T1", "T2", "T3", "T4", "T5", "T10", "C1")
    return [
        entry(OURS, every, "dual clip", "auto"),
        entry("policyloss, recompute", ("T5",), "dual clip", "recompute"),
        entry("policyloss, stash", ("T5",), "dual clip", "stash"),
        entry("policyloss, entropy bonus", ("T4",), "entropy", "auto"),
        entry("policyloss, GSPO", ("T3",), "gspo", "auto"),
        entry(
            "policyloss, GSPO, two long sequences", ("T3",), "gspo", "auto", case="two sequences"
        ),
    ]


# Plain PyTorch ------------------------------------------------------------------------------------


def contract_line(case: Case) -> Tensor:
    """The contract of the head in one line: logp of the ids from float32 log-softmax."""
    return (
        (case.hidden @ case.weight.T)
        .float()
        .log_softmax(-1)
        .gather(-1, case.ids.unsqueeze(-1))
        .squeeze(-1)
    )


def with_gradients(case: Case, logp: Tensor, loss: Tensor) -> Result:
    """The backward of a loss made from logp."""
    d_hidden, d_weight = torch.autograd.grad(loss, (case.hidden, case.weight))
    return Result(loss.detach(), logp.detach(), None, d_hidden, d_weight)


def plain_loss(logp: Tensor, case: Case) -> Tensor:
    """PPO with dual clip in a few elementwise operations, for heads that come without a loss."""
    return LOSSES["dual clip"](logp, logp, case)


def eager(case: Case, _: Path) -> Run:
    """The contract line, then `policy_loss`."""

    def run() -> Result:
        logp = contract_line(case)
        out = pl.policy_loss(PPO, logp, case.old_logp, case.advantages, case.mask)
        return with_gradients(case, logp, out.loss)

    return run


def eager_forward(case: Case, _: Path) -> Run:
    """The contract line and its entropy."""

    @torch.no_grad()
    def run() -> Result:
        logprob = (case.hidden @ case.weight.T).float().log_softmax(-1)
        logp = logprob.gather(-1, case.ids.unsqueeze(-1)).squeeze(-1)
        return Result(logp=logp, entropy=-(logprob.exp() * logprob).sum(-1))

    return run


def row_loop(case: Case, _: Path) -> Run:
    """TRL's method without its kernels: all logits in the dtype of the inputs, log-softmax one
    sequence after the other.
    """

    def run() -> Result:
        logits = case.hidden @ case.weight.T
        rows = [
            row.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
            for row, ids in zip(logits, case.ids, strict=True)
        ]
        logp = torch.stack(rows).float()
        return with_gradients(case, logp, plain_loss(logp, case))

    return run


def _eager() -> list[Entry]:
    return [
        Entry("eager PyTorch", eager, ("T1", "C1")),
        Entry("TRL-style row loop", row_loop, ("T1", "C1")),
    ]


# Other projects' heads ----------------------------------------------------------------------------


def _verl_loss(folder: Path) -> Callable[[Tensor, Case], Tensor]:
    theirs = peers.verl_policy_loss(folder)
    if theirs is None:
        raise peers.MissingPeerError(f"verl is neither installed nor under {folder} (`make peers`)")

    def loss(logp: Tensor, case: Case) -> Tensor:
        value: Tensor = theirs(
            case.old_logp,
            logp,
            case.token_advantages,
            case.mask.float(),
            cliprange=EPS,
            clip_ratio_c=3.0,
        )[0]
        return value

    return loss


def verl_triton(case: Case, folder: Path) -> Run:
    """verl's Triton kernels and verl's loss."""
    loss, head = _verl_loss(folder), peers.verl_linear_cross_entropy(folder)

    def run() -> Result:
        logp, _ = head(case.hidden.flatten(0, 1), case.weight, case.ids.flatten(), 1.0, "none")
        logp = logp.view(case.ids.shape)
        return with_gradients(case, logp, loss(logp, case))

    return run


def verl_chunked(case: Case, folder: Path) -> Run:
    """verl's chunked torch head (512 rows at a time, its default) and verl's loss."""
    loss, head = _verl_loss(folder), peers.verl_chunked_head(folder)()

    def run() -> Result:
        logp, _ = head(case.hidden.flatten(0, 1), case.weight, case.ids.flatten())
        logp = logp.view(case.ids.shape)
        return with_gradients(case, logp, loss(logp, case))

    return run


def trl_chunked(case: Case, folder: Path) -> Run:
    """TRL's chunked head (its Triton kernels on a GPU) and a plain loss;
    it makes the entropy too, as TRL's trainer has it.
    """
    head = peers.trl_chunked_head(folder)

    def run() -> Result:
        flat = (case.hidden.flatten(0, 1), case.weight, None, case.ids.flatten())
        logp = head.apply(*flat, 1.0, peers.TRL_CHUNK, None, 1.0, ("entropy",))[0].view(
            case.ids.shape
        )
        return with_gradients(case, logp, plain_loss(logp, case))

    return run


def torch_head(case: Case, _: Path) -> Run:
    """PyTorch's `linear_cross_entropy` and a plain loss."""
    head = peers.torch_linear_cross_entropy()

    def run() -> Result:
        nll = head(case.hidden.flatten(0, 1), case.weight, case.ids.flatten(), reduction="none")
        logp = -nll.float().view(case.ids.shape)
        return with_gradients(case, logp, plain_loss(logp, case))

    return run


def cut_cross_entropy(filter_eps: str | None, impl: str = "cce") -> Make:
    """Apple's kernels and a plain loss; the filter leaves out gradients of small probabilities."""

    def make(case: Case, folder: Path) -> Run:
        head = peers.cut_cross_entropy(folder)

        def run() -> Result:
            nll = head(
                case.hidden,
                case.weight,
                case.ids,
                reduction="none",
                filter_eps=filter_eps,
                impl=impl,
            )
            logp = -nll.float()
            return with_gradients(case, logp, plain_loss(logp, case))

        return run

    return make


def liger(case: Case, folder: Path) -> Run:
    """Liger's fused linear GRPO loss at its defaults, without KL. It has no dual bound: it is
    checked against a loss without.
    """
    loss = peers.liger_grpo_loss(folder)(
        beta=0.0, use_ref_model=False, compiled=case.device == "cuda"
    )
    mask = case.mask.float()

    def run() -> Result:
        value = loss(
            case.hidden,
            case.weight,
            case.ids,
            mask,
            case.advantages,
            old_per_token_logps=case.old_logp,
        )[0]
        d_hidden, d_weight = torch.autograd.grad(value, (case.hidden, case.weight))
        return Result(value.detach(), None, None, d_hidden, d_weight)

    return run


def openrlhf(case: Case, folder: Path) -> Run:
    """OpenRLHF's log-probabilities from all (float32) logits, and its loss."""
    head, loss = peers.openrlhf_log_probs(folder), peers.openrlhf_policy_loss(folder)
    assert loss is not None
    module = loss(clip_eps_low=EPS, clip_eps_high=EPS, dual_clip=3.0)
    mask = case.mask.float()

    def run() -> Result:
        logp = head((case.hidden @ case.weight.T).float(), case.ids)
        return with_gradients(
            case, logp, module(logp, case.old_logp, case.token_advantages, action_mask=mask)[0]
        )

    return run


def _peer_heads() -> list[Entry]:
    every, gpu, cpu = ("T1", "C1"), ("cuda",), ("cpu",)
    return [
        Entry("verl, Triton", verl_triton, every, devices=gpu, chunked=True),
        Entry("verl, chunked torch", verl_chunked, every, chunked=True),
        Entry("TRL, chunked", trl_chunked, every, chunked=True),
        Entry("torch linear_cross_entropy", torch_head, every, chunked=True),
        Entry("cut-cross-entropy", cut_cross_entropy("high"), every, devices=gpu, chunked=True),
        Entry(
            "cut-cross-entropy, no filter",
            cut_cross_entropy(None),
            every,
            devices=gpu,
            chunked=True,
        ),
        Entry(
            "cut-cross-entropy, torch.compile",
            cut_cross_entropy("high", "torch_compile"),
            every,
            devices=cpu,
        ),
        Entry("OpenRLHF", openrlhf, every, devices=cpu),
        Entry("Liger GRPO", liger, every, loss="clip", slow=True, chunked=True),
    ]


# Masked -------------------------------------------------------------------------------------------

HALF, QUARTER = "half masked", "half masked, quarter at zero advantage"


def _masked() -> list[Entry]:
    def entry(name: str, case: str, **others: Any) -> Entry:
        make = others.pop("make", ours("dual clip", "auto"))
        return Entry(
            name,
            make,
            ("T2", "C1"),
            group=MASKED,
            case=case,
            **{"kind": "ours", "plan": "auto", **others},
        )

    skipping = {
        "make": ours("dual clip", "auto", skip_zero_advantage=True),
        "skips_zero_advantage": True,
    }
    rows = {"kind": "peer", "plan": None, "gathered": True}
    return [
        Entry(THREE, three_matmuls, ("T2", "C1"), group=MASKED, loss=None, kind="floor"),
        *(
            Entry(
                name,
                live_matmuls(new_memory),
                ("C1",),
                group=MASKED,
                case=QUARTER,
                loss=None,
                kind="floor",
                devices=("cpu",),
            )
            for name, new_memory in ((LIVE, False), (LIVE_NEW, True))
        ),
        entry(OURS, "dense"),
        entry(f"policyloss, {HALF}", HALF),
        entry(f"policyloss, {QUARTER}", QUARTER),
        entry(f"policyloss, {QUARTER}, skipped", QUARTER, **skipping),
        entry("policyloss, agentic (a fifth of the tokens)", "agentic"),
        entry(f"eager PyTorch, {QUARTER}, rows gathered", QUARTER, make=eager, **rows),
        entry(
            f"verl, Triton, {QUARTER}, rows gathered",
            QUARTER,
            make=verl_triton,
            devices=("cuda",),
            **rows,
        ),
        entry(
            f"verl, chunked torch, {QUARTER}, rows gathered",
            QUARTER,
            make=verl_chunked,
            devices=("cpu",),
            **rows,
        ),
        entry(
            f"cut-cross-entropy, {QUARTER}, rows gathered",
            QUARTER,
            make=cut_cross_entropy("high"),
            devices=("cuda",),
            **rows,
        ),
        entry(f"TRL, chunked, {QUARTER}, rows gathered", QUARTER, make=trl_chunked, **rows),
    ]


# A tree -------------------------------------------------------------------------------------------

UNROLLED, SHARED = "policyloss, unrolled", "policyloss, index="


def _tree() -> list[Entry]:
    of_tree: dict[str, Any] = {"group": TREE, "case": "tree", "kind": "ours"}
    return [
        Entry(UNROLLED, ours("dual clip", "auto"), ("T18",), plan="auto", **of_tree),
        Entry(SHARED, ours_tree, ("T18",), **of_tree),
    ]


# Forward only -------------------------------------------------------------------------------------


def verl_triton_forward(case: Case, folder: Path) -> Run:
    """verl's Triton kernels without gradient."""
    head = peers.verl_linear_cross_entropy(folder)

    @torch.no_grad()
    def run() -> Result:
        logp, entropy = head(
            case.hidden.flatten(0, 1), case.weight, case.ids.flatten(), 1.0, "none"
        )
        return Result(logp=logp, entropy=entropy)

    return run


def trl_chunked_forward(case: Case, folder: Path) -> Run:
    """TRL's chunked head without gradient."""
    head = peers.trl_chunked_head(folder)

    @torch.no_grad()
    def run() -> Result:
        flat = (case.hidden.flatten(0, 1), case.weight, None, case.ids.flatten())
        logp, entropy = head.apply(*flat, 1.0, peers.TRL_CHUNK, None, 1.0, ("entropy",))[:2]
        return Result(logp=logp, entropy=entropy)

    return run


def _forward() -> list[Entry]:
    def entry(name: str, make: Make, **others: Any) -> Entry:
        return Entry(name, make, ("T6",), **{"group": FORWARD, "loss": "forward", **others})

    return [
        entry(ONE, one_matmul, loss=None, kind="floor"),
        entry("policyloss", ours_forward, kind="ours"),
        entry("eager PyTorch", eager_forward),
        entry("verl, Triton", verl_triton_forward, devices=("cuda",)),
        entry("TRL, chunked", trl_chunked_forward),
        entry(ONE, one_matmul, loss=None, kind="floor", group=IN_TURNS),
        entry(WIDE, wide_matmul, loss=None, kind="floor", group=IN_TURNS, devices=("cuda",)),
        entry("policyloss", ours_forward, kind="ours", group=IN_TURNS),
    ]


# The floor ----------------------------------------------------------------------------------------


def _flat(case: Case) -> tuple[Tensor, Tensor]:
    return case.hidden.detach().flatten(0, 1), case.weight.detach()


def one_matmul(case: Case, _: Path) -> Run:
    """Only the logits: the least cost of a forward."""
    x, w = _flat(case)
    z = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)

    def run() -> Result:
        torch.mm(x, w.T, out=z)
        return Result()

    return run


def wide_matmul(case: Case, _: Path) -> Run:
    """The logits in float32, a window of rows after the other, in the same memory."""
    x, w = _flat(case)
    z = torch.empty(WIDE_ROWS, w.shape[0], device=x.device)

    def run() -> Result:
        for start in range(0, x.shape[0], WIDE_ROWS):
            rows = x[start : start + WIDE_ROWS]
            torch.mm(rows, w.T, out_dtype=torch.float32, out=z[: rows.shape[0]])
        return Result()

    return run


def three_matmuls(case: Case, _: Path) -> Run:
    """Only logits, d hidden and d weight: the least cost of a forward and backward."""
    x, w = _flat(case)
    z = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def run() -> Result:
        torch.mm(x, w.T, out=z)
        torch.mm(z, w, out=dx)
        torch.mm(z.T, x, out=dw)
        return Result()

    return run


def live_matmuls(new_memory: bool) -> Make:
    """The logits of the rows that count, d hidden and d weight of those with an advantage.

    new_memory: d weight is written to memory that no call has used yet, as a gradient must be.
    """

    def make(case: Case, _: Path) -> Run:
        every, w = _flat(case)
        moved = (case.mask & (case.token_advantages != 0)).flatten()
        x, y = every[case.rows], every[moved]
        z = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
        dx, dw = torch.empty_like(y), torch.empty_like(w)

        def run() -> Result:
            torch.mm(x, w.T, out=z)
            dz = z[: y.shape[0]]
            torch.mm(dz, w, out=dx)
            torch.mm(dz.T, y, out=torch.empty_like(w) if new_memory else dw)
            return Result()

        return run

    return make


def _floors() -> list[Entry]:
    every = ("T1", "T3", "T4", "T5", "T10", "C1")
    return [
        Entry(THREE, three_matmuls, every, loss=None, kind="floor"),
        Entry(ONE, one_matmul, every, loss=None, kind="floor"),
    ]
