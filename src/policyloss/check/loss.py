"""`check_loss`: runs the library's own tests on a user's loss.

def my_surrogate(t: pl.Tokens) -> torch.Tensor:
    return -t.advantages * t.ratio.clamp(max=2.0)

print(pl.check_loss(my_surrogate))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from policyloss import notebook
from policyloss.arguments import check_integer
from policyloss.catalogue import AnyLoss, as_spec
from policyloss.check.batch import Batch
from policyloss.errors import InputError, PolicyLossError
from policyloss.functional.collectives import several_ranks
from policyloss.inputs import Inputs
from policyloss.loss import corrected_tokens, measure, policy_loss, token_losses, with_ratio
from policyloss.parts.aggregate import weight_factors
from policyloss.parts.correction import TruncateRatio
from policyloss.spec import LossSpec
from policyloss.tokens import Tokens
from policyloss.totals import Totals


@dataclass(frozen=True)
class PropertyResult:
    """One property: whether it holds, and the evidence if it does not."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class CheckReport:
    """The result of `check_loss`: true if every property holds; `str()` is a table."""

    results: tuple[PropertyResult, ...]

    def __bool__(self) -> bool:
        return all(r.passed for r in self.results)

    def __str__(self) -> str:
        width = max(len(r.name) for r in self.results)
        lines = [
            f"{'ok  ' if r.passed else 'FAIL'}  {r.name.ljust(width)}  {r.detail}".rstrip()
            for r in self.results
        ]
        return "\n".join([*lines, self._summary])

    def _repr_html_(self) -> str:
        """The report as HTML, for a notebook."""
        rows = [("ok" if r.passed else "FAIL", r.name, r.detail) for r in self.results]
        return notebook.table(("", "property", "seen"), rows) + notebook.paragraphs(self._summary)

    @property
    def _summary(self) -> str:
        passed = sum(r.passed for r in self.results)
        return f"{passed} of {len(self.results)} properties hold."


class FrozenStopGradients(TorchFunctionMode):
    """Hold every stop-gradient at its value at a base point, so that finite differences agree with
    autograd.

    `detach()` marks a constant. A numerical derivative changes that constant too, and disagrees by
    design. Under this mode the first run records the result of every `detach()`, and later runs
    reuse these results in the same order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Tensor] = []
        self.replay: Iterator[Tensor] | None = None
        self.base: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.detach:
            return func(*args, **(kwargs or {}))
        if self.replay is not None:
            return next(self.replay)
        self.recorded.append(func(*args).clone())
        return self.recorded[-1]

    def function(self, f: Callable[..., Tensor], *base: Tensor) -> Callable[..., Tensor]:
        """`f` with its stop-gradients fixed at `base`; stores its value there in `self.base`."""
        with self:
            self.base = f(*base)

        def frozen(*inputs: Tensor) -> Tensor:
            self.replay = iter(self.recorded)
            with self:
                return f(*inputs)

        return frozen


def check_loss(loss: AnyLoss, *, base: LossSpec | str | None = None, seed: int = 0) -> CheckReport:
    """Test your own loss for the properties that every loss of the library has.

    loss: a per-token function of `Tokens` (it becomes the `trust` part of `base`, PPO by default),
    a whole `LossSpec` with callables in any field, or a preset's name. The properties, in float64
    on small ragged batches: the loss runs and returns one finite number per token; autograd agrees
    with finite differences (stop-gradients held constant); at ratio 1 the loss without KL and
    entropy makes tokens with A > 0 more likely and tokens with A < 0 less likely; clipping never
    stops the gradient of a token whose probability moved against its advantage; a
    correction's weight of a kept token carries no gradient, and never falls as `old_logp -
    rollout_logp` rises; a KL pulls toward its reference policy; garbage at masked positions, row
    order, packing and any split into micro-batches change nothing; an empty batch gives 0; half
    precision is upcast first; the same inputs give the same bits.
    The check runs in one process and returns a report: print it, or assert it.
    """
    if several_ranks():
        raise InputError("check_loss runs in one process; call it without torch.distributed.")
    check_integer("seed", seed, 0)
    spec = as_spec(loss, "loss")
    if base is not None:
        spec = as_spec(base, "base").replace(trust=spec.trust)
    batch = Batch.random(seed=seed)
    spec = spec.for_run(batch.mask.shape[-1])  # a constant factor, which affects no check
    results = [_run(_runs, spec, batch)]
    if results[0].passed:
        of_slopes = (_gradient, _direction, _pessimism, _detach, _importance, _anchor)
        of_batches = (_mask, _row_order, _packing, _partition, _dtype, _empty_batch, _rerun)
        results += [_run(check, spec, batch) for check in (*of_slopes, *of_batches)]
    return CheckReport(tuple(results))


def _run(check: Callable[..., str], spec: LossSpec, batch: Batch) -> PropertyResult:
    """The result of `check`, under the name of its function: `_row_order` tests "row order"."""
    name = check.__name__[1:].replace("_", " ")
    try:
        problem = check(spec, batch)
    except PolicyLossError as error:
        problem = str(error)
    except Exception as error:  # a user's function may raise anything; the report shows it
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return PropertyResult(name, not problem, problem)


def _compare(
    what: str, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], tolerance: float = 1e-12
) -> str:
    for part, x, y in zip(("loss", "gradient"), a, b, strict=True):
        gap = ((x - y).abs() / y.abs().clamp(min=1)).max() if x.numel() else torch.zeros(())
        if not gap <= tolerance:
            return f"{what} changes the {part} by {gap:.2e}"
    return ""


def _runs(spec: LossSpec, batch: Batch) -> str:
    shapes: list[str] = []

    def watched(t: Tokens) -> Any:
        out = spec.trust(t)
        x = out[0] if isinstance(out, tuple) else out
        if not isinstance(x, Tensor) or x.shape != t.mask.shape:
            actual = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            shapes.append(
                f"must return one number per token, shape {tuple(t.mask.shape)}; got {actual}"
            )
        return out

    value, gradient = batch.loss(spec.replace(trust=watched) if not spec.needs_statistics else spec)
    if shapes:
        return shapes[0]
    if not value.isfinite():
        return f"the loss of an ordinary batch is {value.item()}"
    if not gradient.isfinite().all():
        return "the gradient of an ordinary batch is not finite"
    if not gradient.any():
        return "nothing depends on logp: no token gets a gradient; is the result detached?"
    return ""


def _gradient(spec: LossSpec, batch: Batch) -> str:
    _, analytic = batch.loss(spec)
    value = FrozenStopGradients().function(
        lambda logp: policy_loss(spec, logp, **batch.others()).loss, batch.logp
    )
    step = 1e-6
    for i, j in batch.mask.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = batch.logp.clone()
            moved[i, j] += sign * step
            ends.append(value(moved))
        numeric = (ends[0] - ends[1]) / (2 * step)
        if not (numeric - analytic[i, j]).abs() <= 1e-6 * max(1.0, float(analytic[i, j].abs())):
            return (
                f"autograd gives {analytic[i, j].item():.6g}, finite differences "
                f"{numeric.item():.6g} (row {i}, token {j})"
            )
    return ""


def _mask(spec: LossSpec, batch: Batch) -> str:
    expected = batch.loss(spec)
    for garbage in (float("nan"), float("inf"), -1e30):
        spoiled = batch.map(lambda x, g=garbage: torch.where(batch.mask, x, g))  # type: ignore[misc]
        problem = _compare(f"{garbage} at masked positions", spoiled.loss(spec), expected)
        if problem:
            return problem
    return ""


def _row_order(spec: LossSpec, batch: Batch) -> str:
    value, gradient = batch.loss(spec)
    order = torch.arange(batch.mask.shape[0]).flip(0)
    return _compare("another order of rows", batch.rows(order).loss(spec), (value, gradient[order]))


def _packing(spec: LossSpec, batch: Batch) -> str:
    value, gradient = batch.loss(spec)
    flat = batch.packed()
    there = flat.loss(spec)
    return _compare("packing", (there[0], there[1][flat.mask]), (value, gradient[batch.mask]))


def _partition(spec: LossSpec, batch: Batch) -> str:
    expected = batch.loss(spec)
    if spec.needs_statistics:
        totals = measure(spec, batch.logp, **batch.others())
    else:
        totals = Totals.count(batch.mask, group_ids=batch.group_ids, weights=batch.weights)
    for size in (1, 4):
        rows = torch.arange(batch.mask.shape[0])
        starts = range(0, len(rows), size)
        parts = [batch.rows(rows[i : i + size]).loss(spec, totals=totals) for i in starts]
        joined = torch.stack([v for v, _ in parts]).sum(), torch.cat([g for _, g in parts])
        problem = _compare(f"a split into micro-batches of {size}", joined, expected)
        if problem:
            return problem
    return ""


def _dtype(spec: LossSpec, batch: Batch) -> str:
    half = batch.map(lambda x: x.to(torch.bfloat16))
    value, gradient = half.loss(spec)
    wide_value, wide_gradient = half.map(lambda x: x.to(torch.float32)).loss(spec)
    if value.dtype != torch.float32:
        return f"bfloat16 inputs give a {value.dtype} loss; compute in float32"
    rounded = wide_gradient.to(torch.bfloat16).float()
    half_precision = (value, gradient.float())
    problem = _compare("computing in bfloat16", half_precision, (wide_value, rounded), 1e-6)
    single = batch.map(lambda x: x.to(torch.float32)).loss(spec)
    return problem or _compare(
        "float32 instead of float64",
        (single[0].double(), single[1].double()),
        batch.loss(spec),
        1e-5,
    )


def _empty_batch(spec: LossSpec, batch: Batch) -> str:
    value, gradient = replace(batch, mask=torch.zeros_like(batch.mask)).loss(spec)
    if value != 0:
        return f"a batch with no valid token gives {value.item()}, not 0"
    return "a batch with no valid token gets a gradient" if gradient.any() else ""


def _rerun(spec: LossSpec, batch: Batch) -> str:
    first, second = batch.loss(spec), batch.loss(spec)
    same = torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    return "" if same else "the same inputs give other bits the second time"


# Wrong signs, sides and stop-gradients: the loss of single-token sequences at chosen log-ratios.

# Log-ratios at which a limit may bind. They go further along the advantage, to find a limit that
# is wide on that side.
Numbers = Tensor | float
AGAINST = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5)
ALONG = (*AGAINST, 3.0)
# Equally many good and bad tokens, of three sizes, at three log-probabilities.
ADVANTAGES = torch.tensor([0.3, 1.0, 2.5, -0.3, -1.0, -2.5]).double().repeat_interleave(3)
ANCHOR = torch.tensor([-4.0, -4.5, -5.0]).double().repeat(6)


def _tokens(advantages: Tensor, log_ratio: Numbers, log_weight: Numbers = 0) -> Tokens:
    """Tokens that are each a sequence, `[n, 1]`.

    log_ratio: of the current policy to every other. log_weight: of the trainer to the engine.
    """
    anchor = ANCHOR[: len(advantages)].unsqueeze(1)
    old, ones, rows = anchor + log_weight, torch.ones_like(anchor), torch.arange(len(anchor))
    logp = (old + log_ratio).requires_grad_()
    policies, numbers = (logp, old, anchor, old, old), (ones, ones, advantages.unsqueeze(1), ones)
    where = (ones.bool(), rows // 2, torch.ones_like(rows))
    batch = Batch(*policies, *numbers, *where, width=1, ages=ones.long())
    return Inputs(**batch.kwargs).tokens()


def _losses(spec: LossSpec, advantages: Tensor, log_ratio: Numbers) -> tuple[Tensor, Tensor]:
    """The loss of each token, and its derivative by logp, `[n]`, before weights and averages."""
    t = _tokens(advantages, log_ratio)
    loss = token_losses(spec.replace(entropy_coef=0.0), with_ratio(spec, t), None).loss
    logp = t.read("logp")
    (gradient,) = torch.autograd.grad(loss.sum() + 0 * logp.sum(), logp)
    return loss.detach()[:, 0], gradient[:, 0]


def _pulls(spec: LossSpec, shift: float) -> tuple[Tensor, Tensor]:
    """How hard the surrogate alone pulls each token: `−A·∂loss/∂logp`, positive towards its
    advantage; and its loss. Both `[2, n]`, row 0 with A > 0.

    shift: the log-ratio in the direction of the advantage.
    """
    shifts = shift * ADVANTAGES.sign().unsqueeze(1)
    loss, gradient = _losses(spec.replace(kl=None), ADVANTAGES, shifts)
    return (-ADVANTAGES * gradient).view(2, -1), loss.view(2, -1)


def _direction(spec: LossSpec, batch: Batch) -> str:
    """At ratio 1 a good token must become more likely and a bad one less; no limit binds yet."""
    at_one, away = _pulls(spec, 0.0)[0], [_pulls(spec, -distance)[0] for distance in AGAINST]
    for row, sign in enumerate(("positive", "negative")):
        pull = at_one[row]
        if (pull < 0).any():
            more = "less" if sign == "positive" else "more"
            return (
                f"at ratio 1, a step makes a token with a {sign} advantage {more} likely: is a "
                "sign wrong, or |advantages| used?"
            )
        if not pull.any() and any(x[row].any() for x in away):
            return (
                f"at ratio 1, a token with a {sign} advantage gets no gradient, and elsewhere it "
                "does: a limit binds there already; are its bounds swapped?"
            )
    return ""


def _pessimism(spec: LossSpec, batch: Batch) -> str:
    """A limit must not trap a token that moved *against* its advantage.

    (A dual clip traps bad tokens there. A loss may also drop far-off tokens: their loss is 0.)
    """
    at_one, against = _pulls(spec, 0.0)[0], [_pulls(spec, -distance) for distance in AGAINST]
    stuck = [((pull == 0) & (loss != 0))[0].any() for pull, loss in against]
    is_held = at_one[0].any() and any(stuck)
    is_stopped = torch.stack([(pull == 0).all(1) for pull, _ in against]).any(0).all()
    if is_held or (is_stopped and all(_pulls(spec, x)[0].any(1).all() for x in ALONG)):
        return (
            "tokens that moved against their advantage get no gradient: a clip must take the worse "
            "of the two losses, torch.maximum(-A * ratio, -A * ratio.clamp(low, high))"
        )
    return ""


def _detach(spec: LossSpec, batch: Batch) -> str:
    """The weights of corrections and of the average are numbers, not functions of logp."""
    t, corrected = corrected_tokens(spec, _tokens(ADVANTAGES, 0.0), None)
    t = with_ratio(spec, t).with_totals(None)
    weights = {"correction": corrected.weight, "aggregate": weight_factors(spec.aggregate, t)[0]}
    for slot, weight in weights.items():
        if weight is not None and weight.requires_grad:
            return (
                f"the {slot} part returns a weight that carries a gradient (no detach), which adds "
                "to that of the loss: return weight.detach()"
            )
    return ""


def _importance(spec: LossSpec, batch: Batch) -> str:
    """A weight must not fall where a token is more likely under the policy than its sampler."""
    log_weight = torch.tensor([-0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25]).double().unsqueeze(1)
    # The weight of TruncateRatio falls where the ratio, which it multiplies, rises beyond a bound.
    others = tuple(part for part in spec.correction if not isinstance(part, TruncateRatio))
    rejected = spec.rejected if others else "keep"
    weighted = spec.replace(correction=others, rejected=rejected)
    tokens = _tokens(torch.ones(7).double(), 0.0, log_weight)
    t, corrected = corrected_tokens(weighted, tokens, None)
    falls = False
    if corrected.weight is not None:
        kept = t.mask if corrected.keep is None else t.mask & corrected.keep
        falls = bool((corrected.weight.detach()[kept].diff() < -1e-9).any())
    at_one = _pulls(spec, 0.0)[0]
    ratio = torch.tensor([[0.1], [-0.1]]).double().exp()
    inverse = torch.allclose(_pulls(spec, 0.1)[0] * ratio, at_one, rtol=1e-9)
    if falls or (inverse and at_one.any()):
        return (
            "the importance weight is upside down: it falls where the token became more likely; it "
            "is exp(old_logp - rollout_logp), or exp(logp - old_logp) for the ratio"
        )
    return ""


def _anchor(spec: LossSpec, batch: Batch) -> str:
    """Without an advantage, a token more likely than its anchor must not become more so.

    (k1 has the same gradient on both sides, and other estimators change sign near the anchor.)
    """
    pulls = torch.stack([_losses(spec, 0 * ADVANTAGES, x)[1] for x in ALONG])
    if ((pulls <= 0).all(0) & (pulls < 0).any(0)).any():
        return (
            "the KL pushes the policy away from its anchor: a token more likely than there becomes "
            "more likely still; is its sign wrong (k1 is logp - ref_logp)?"
        )
    return ""
