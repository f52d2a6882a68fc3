"""Shared material of the head's tests: batches of hidden states, the contract line as oracle,
and the comparisons.

The oracle is the contract of the head, one line of PyTorch, in float64; the same line in the
inputs' own dtype is the eager version whose error is the measure of ours. Everything runs on a GPU
where there is one. Legend: N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from divergences import of_distributions
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import policyloss as pl
from cases import Batch, make_batch, with_streams
from policyloss.functional.divergence import on_support, support_of

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The kernels do not take float64; without them it is the sharpest test.
FLOAT = torch.float32 if CUDA else torch.float64
LOGPROB_PLANS = ("recompute", "stash")
LOSS_PLANS = ("one_pass", "recompute", "stash")


def dtype_name(x: Any) -> str:
    """`bfloat16` for torch.bfloat16, for the names of test cases."""
    return str(x).removeprefix("torch.")


class Values(NamedTuple):
    """Log-probability of the token and entropy of the distribution it was drawn from,
    token-shaped.
    """

    logp: Tensor
    entropy: Tensor


def contract_of_logits(
    logits: Tensor,
    ids: Tensor,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Values:
    """`log_softmax(logits.float() / temperature).gather(ids)` and its entropy;
    0 where masked, whatever the logits there.
    """
    live = torch.ones(ids.shape, dtype=torch.bool, device=ids.device) if mask is None else mask
    z = torch.where(live[..., None], logits.to(torch.promote_types(logits.dtype, torch.float32)), 0)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor):
        temperature = torch.where(live, temperature, 1).to(z.dtype)[..., None]
    log_p = (z / temperature).log_softmax(-1)
    logp = log_p.gather(-1, torch.where(live, ids, 0).long()[..., None]).squeeze(-1)
    # P·log p is 0 at p = 0.
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
    return Values(torch.where(live, logp, 0), torch.where(live, entropy, 0))


def contract(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Values:
    """`log_softmax((hidden @ weight.T + bias).float() / temperature).gather(ids)` and its entropy,
    in the dtype of the inputs.
    """
    x = hidden if mask is None else torch.where(mask[..., None], hidden, 0)
    logits = x @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return contract_of_logits(logits, ids, temperature, mask, softcap)


def leaf(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A fresh leaf with the values (and strides, where they can be kept) of `x`."""
    return x.detach().to(dtype or x.dtype).clone().requires_grad_()


class Run(NamedTuple):
    """The result of a head: its values, and the gradient of each leaf."""

    logp: Tensor
    entropy: Tensor
    grads: tuple[Tensor, ...]


def backward(values: Any, upstream: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Run:
    """Push `upstream` (for logp and for entropy; None: not through that one) back to the leaves."""
    pairs = [(v, g.to(v.dtype)) for v, g in zip(values, upstream, strict=True) if g is not None]
    grads = torch.autograd.grad([v for v, _ in pairs], leaves, [g for _, g in pairs])
    return Run(values.logp.detach(), values.entropy.detach(), grads)


def rms(x: Tensor) -> float:
    """Root mean square; 0 of nothing."""
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def largest_logit(
    logits: Tensor, temperature: float | Tensor = 1.0, mask: Tensor | None = None
) -> float:
    """The largest finite |logits / temperature| of the rows that count."""
    live = logits.detach() if mask is None else logits.detach()[mask]
    t = temperature if mask is None or not isinstance(temperature, Tensor) else temperature[mask]
    size = (live / (t.unsqueeze(-1) if isinstance(t, Tensor) else t)).abs()
    return float(size[size.isfinite()].max()) if size.numel() else 0.0


def assert_no_worse(
    ours: Tensor, eager: Tensor, truth: Tensor, what: str, logit: float = 1.0, factor: float = 1.0
) -> None:
    """Our error against float64 is at most twice that of eager PyTorch in the same dtype,
    plus one rounding.

    Both the root mean square and the largest error. The rounding is that of the result; and that of
    the largest scaled `logit` in the dtype of the statistics, which is a relative error of every
    probability, times what probabilities are multiplied by (`factor`). Where all is float64 the
    truth is rounded as well, so everything must agree to 1e-12.
    """
    assert ours.shape == truth.shape, (
        f"{what}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    )
    assert bool(ours.isfinite().all()), f"{what}: not finite"
    if truth.numel() == 0:
        return
    error, eager_error = (ours.double() - truth).abs(), (eager.double() - truth).abs()
    size = float(truth.abs().max())
    inside = (
        torch.finfo(torch.promote_types(ours.dtype, torch.float32)).eps
        * max(1.0, logit)
        * max(size, factor)
    )
    one = torch.finfo(ours.dtype).eps * size + inside
    if ours.dtype == torch.float64:
        one = 1e-12 * max(size, factor)
    assert rms(error) <= 2 * rms(eager_error) + one, (
        f"{what}: rms error {rms(error):.3g}, eager {rms(eager_error):.3g}"
    )
    worst, eager_worst = float(error.max()), float(eager_error.max())
    assert worst <= 2 * eager_worst + one, (
        f"{what}: largest error {worst:.3g}, eager {eager_worst:.3g}"
    )


def assert_run_no_worse(
    ours: Run, eager: Run, truth: Run, factors: dict[str, float], logit: float
) -> None:
    """`assert_no_worse` for both values and every gradient;
    `factors` names the gradients (upstream ones are of order 1).
    """
    for name, a, b, c in zip(("logp", "entropy"), ours, eager, truth, strict=False):
        assert_no_worse(a, b, c, name, logit)
    assert len(ours.grads) == len(eager.grads) == len(truth.grads) <= len(factors)
    for (name, factor), a, b, c in zip(
        factors.items(), ours.grads, eager.grads, truth.grads, strict=False
    ):
        assert_no_worse(a, b, c, f"gradient of {name}", logit, factor)


def assert_near(actual: Tensor, expected: Tensor, tol: float, what: str) -> None:
    """Equal to `tol` times the largest expected value (or times 1, if that is less);
    NaN and inf are never equal.
    """
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if expected.numel() == 0:
        return
    scale = min(1.0, float(expected.abs().max())) or 1.0
    worst = float((actual.double() - expected.double()).abs().max())
    assert worst <= tol * scale, f"{what}: off by {worst:.3g}, at most {tol * scale:.3g} allowed"


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Every tensor bit for bit the same (NaN equals NaN)."""
    a, b = tree_leaves(actual), tree_leaves(expected)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Case(NamedTuple):
    """Inputs of `linear_logprobs` and an upstream gradient for each of its results."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    bias: Tensor
    dlogp: Tensor
    dentropy: Tensor


def peaked_case(
    n: int,
    vocab: int,
    width: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    *,
    peak: float = 6.0,
    spread: float = 1.0,
) -> Case:
    """Hidden states that point at their token: its logit is about `peak`,
    the others are spread around 0 by `spread`.

    A language model's distributions are peaked, and every seventh token is another than the one it
    points at, as sampling gives.
    """
    g = generator(seed)
    weight = torch.randn(vocab, width, generator=g, dtype=torch.float32)
    likely = torch.randint(vocab, (n,), generator=g)
    noise = spread * torch.randn(n, width, generator=g)
    hidden = (peak * torch.nn.functional.normalize(weight[likely], dim=-1) + noise) / width**0.5
    ids = torch.where(torch.arange(n) % 7 == 3, torch.randint(vocab, (n,), generator=g), likely)
    bias = 0.5 * torch.randn(vocab, generator=g)
    dlogp, dentropy = torch.randn(n, generator=g), torch.randn(n, generator=g)
    floats = [x.to(DEVICE, dtype) for x in (hidden, weight, bias)]
    wide = torch.promote_types(dtype, torch.float32)
    return Case(
        floats[0],
        floats[1],
        ids.to(DEVICE),
        floats[2],
        dlogp.to(DEVICE, wide),
        dentropy.to(DEVICE, wide),
    )


@dataclass(frozen=True)
class HeadBatch:
    """The tensors of one `linear_policy_loss` call. Padded: `[B, T, D]`, `[B, T]`. Packed:
    `[N, D]`, `[N]` and `cu_seqlens`.
    """

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    tokens: Batch

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of `policy_loss` other than logp and entropy, on the device of the
        tests.
        """
        computed = ("logp", "entropy", "divergence")
        given = {k: v for k, v in self.tokens.kwargs.items() if k not in computed}
        return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in given.items()}

    def teacher(self, dtype: torch.dtype | None = None) -> pl.Teacher:
        """A teacher of width 5; its hidden states follow from the student's in any layout."""
        g, (vocab, size) = generator(99), self.weight.shape
        mixed = torch.randn(size, 5, generator=g).to(self.hidden)
        hidden = torch.tanh(self.hidden.detach() @ mixed)
        weight = torch.randn(vocab, 5, generator=g).to(hidden)
        return pl.Teacher(hidden.to(dtype), weight.to(dtype), temperature=0.8)

    def packed(self) -> HeadBatch:
        """The same sequences end to end."""
        inside = self.tokens.inside.to(self.hidden.device)
        return dataclasses.replace(
            self, hidden=self.hidden[inside], ids=self.ids[inside], tokens=self.tokens.packed()
        )

    def rows(self, index: list[int]) -> HeadBatch:
        """Some of the sequences, in the given order. Padded only."""
        return dataclasses.replace(
            self, hidden=self.hidden[index], ids=self.ids[index], tokens=self.tokens.rows(index)
        )

    def with_tokens(self, **tensors: Tensor) -> HeadBatch:
        """The batch with some of its token tensors replaced."""
        return dataclasses.replace(self, tokens=dataclasses.replace(self.tokens, **tensors))


def make_head_batch(
    seed: int = 0,
    rows: int = 7,
    width: int = 8,
    vocab: int = 33,
    size: int = 8,
    dtype: torch.dtype | None = None,
) -> HeadBatch:
    """`cases.make_batch` (holes in the mask, an empty row, a masked one), with hidden states whose
    log-probs are its `logp`.

    The frozen policies' log-probs keep their distance from the current one, so clips,
    corrections and rejections all fire.
    """
    dtype = dtype or FLOAT
    tokens = make_batch(seed, rows, width)
    case = peaked_case(rows * width, vocab, size, torch.float64, seed, peak=9.0)
    hidden, ids = case.hidden.reshape(rows, width, size).to(dtype), case.ids.reshape(rows, width)
    weight = case.weight.to(dtype)
    logp = contract(hidden.double(), weight.double(), ids).logp.cpu()
    shift = logp - tokens.logp
    wide = torch.promote_types(dtype, torch.float32)
    tokens = tokens.map(
        lambda x: (x + shift).clamp(max=-1e-3),
        *("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp"),
    )
    return HeadBatch(hidden, weight, ids, tokens.map(lambda x: x.to(wide)))


class LossRun(NamedTuple):
    """The result of a loss from hidden states: its value, the gradients of hidden and weight, the
    metrics.
    """

    loss: Tensor
    dhidden: Tensor
    dweight: Tensor
    records: pl.Metrics

    @property
    def metrics(self) -> dict[str, float]:
        return self.records.compute()


def arguments_of(spec: pl.LossSpec, batch: HeadBatch, **kwargs: Any) -> dict[str, Any]:
    """What `linear_policy_loss` takes after the ids, with a teacher for a divergence."""
    teacher = {} if spec.divergence is None else {"teacher": batch.teacher()}
    return with_streams(spec, {**batch.kwargs, **teacher, **kwargs})


def run_loss(spec: pl.LossSpec, batch: HeadBatch, **kwargs: Any) -> LossRun:
    """`linear_policy_loss` and its gradients."""
    hidden, weight = leaf(batch.hidden), leaf(batch.weight)
    arguments = arguments_of(spec, batch, **kwargs)
    out = pl.linear_policy_loss(spec, hidden, weight, batch.ids, **arguments)
    return LossRun(out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight)), out.metrics)


def run_oracle(
    spec: pl.LossSpec, batch: HeadBatch, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> LossRun:
    """`policy_loss` on the contract's log-probs and entropy computed in `dtype`,
    its gradients by autograd.

    The loss itself is computed in the dtype of the batch's frozen log-probs, as ours is, so that
    draws that depend on their bits agree.
    """
    hidden, weight = leaf(batch.hidden, dtype), leaf(batch.weight, dtype)
    call = arguments_of(spec, batch, **kwargs)
    teacher = call.pop("teacher", None)
    head = {name: call.pop(name, None) for name in ("bias", "softcap")}
    values = contract(
        hidden,
        weight,
        batch.ids,
        temperature=call.pop("temperature", 1.0),
        mask=call["mask"].bool(),
        **head,
    )
    wide = batch.tokens.old_logp.dtype
    logp, entropy = (x.to(wide) for x in values)
    if teacher is not None:
        call["divergence"] = oracle_divergence(spec, hidden, weight, teacher, call["mask"]).to(wide)
    out = pl.policy_loss(spec, logp, entropy=entropy, **call)
    return LossRun(out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight)), out.metrics)


def oracle_divergence(
    spec: pl.LossSpec, hidden: Tensor, weight: Tensor, teacher: pl.Teacher, mask: Tensor
) -> Tensor:
    """The divergence at temperature 1 of the student, by autograd through all logits."""
    x = torch.where(mask.bool()[..., None], hidden, 0)
    u = torch.where(mask.bool()[..., None], teacher.hidden.to(x.dtype), 0)
    student = (x @ weight.T).log_softmax(-1)
    of_teacher = ((u @ teacher.weight.to(x.dtype).T) / teacher.temperature).log_softmax(-1)
    measure = spec.divergence.measure
    if measure.top is None:
        return of_distributions(student, of_teacher, measure)
    ids, keep = support_of(student.detach(), of_teacher, measure.top, measure.k)
    return on_support(student.gather(-1, ids), of_teacher.gather(-1, ids), measure, keep)


def loss_tolerance(batch: HeadBatch) -> float:
    """float64: 1e-10. float32: 2e-5, a hundred roundings, over sums of some hundred terms."""
    return 1e-10 if batch.hidden.dtype == torch.float64 else 2e-5


def assert_same_loss(actual: LossRun, expected: LossRun, tol: float) -> None:
    """Loss, both gradients and every metric of `expected`; `actual` may have more of them."""
    assert_near(actual.loss, expected.loss, tol, "loss")
    assert_near(actual.dhidden, expected.dhidden, tol, "gradient of hidden")
    assert_near(actual.dweight, expected.dweight, tol, "gradient of weight")
    ours, theirs = actual.metrics, expected.metrics
    assert not theirs.keys() - ours.keys(), (
        f"metrics missing: {sorted(theirs.keys() - ours.keys())}"
    )
    for name, value in theirs.items():
        both_nan = math.isnan(ours[name]) and math.isnan(value)
        same = (
            ours[name] == value or both_nan or abs(ours[name] - value) <= tol * max(1.0, abs(value))
        )
        assert same, f"metric {name}: {ours[name]!r} is not {value!r}"


def forced_rows(plan: pl.Plan, rows: int) -> pl.Plan:
    """The same plan with windows of `rows` rows (and, where it makes logits again, of ten
    vocabulary entries).
    """
    return dataclasses.replace(
        plan, rows=rows, columns=10 if plan.name == "recompute" else plan.columns
    )


def admitted(call: Callable[[str], Any]) -> list[str]:
    """The plans that `call` runs under; others raise an InputError.

    "recompute" and "stash" serve every loss, so that no test passes because all were refused.
    """
    plans = []
    for plan in LOSS_PLANS:
        with contextlib.suppress(pl.InputError):
            call(plan)
            plans.append(plan)
    assert {"recompute", "stash"} <= set(plans), f"only {plans} are admitted"
    return plans


class MatmulRows(TorchDispatchMode):
    """Counts the work of matrix products: `rows` is Σ m·n·k over them, divided by V·D; `most` the
    rows of the largest window.
    """

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.unit, self.work = vocab * width, 0
        self.vocab, self.most = vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            batch = a.shape[0] if a.dim() == 3 else 1
            self.most = max(self.most, a.shape[-1] if a.shape[-2] == self.vocab else a.shape[-2])
            self.work += batch * a.shape[-2] * a.shape[-1] * b.shape[-1]
        return out

    @property
    def rows(self) -> float:
        return self.work / self.unit


class Poison(TorchDispatchMode):
    """Every tensor made without values (`torch.empty` and its kin) holds NaN,
    or an absurd integer.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in (
            "empty",
            "empty_like",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ):
            if out.is_floating_point():
                out.fill_(torch.nan)
            elif out.dtype in (torch.int32, torch.int64):
                out.fill_(torch.iinfo(out.dtype).max)
        return out


def poison_freed_memory(*shapes: tuple[int, ...]) -> None:
    """Fill memory of these sizes with NaN and free it, so that the next allocations contain it."""
    held = [
        torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
        for shape in shapes
        for dtype in (torch.float32, torch.float64)
    ]
    held.clear()
