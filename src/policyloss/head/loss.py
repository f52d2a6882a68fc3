"""`linear_policy_loss`: head and loss together.

If a window determines the gradient of its tokens, forward and gradient are one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.errors import InputError, InputTypeError
from policyloss.functional.exact import exact, stays_eager
from policyloss.functional.precomputed import with_known_gradients
from policyloss.head import linear, windows
from policyloss.head.backward import GradientTypes
from policyloss.head.head import Head
from policyloss.head.plans import Plan, Work, logprob_plan, loss_plan
from policyloss.head.support import SupportArgument
from policyloss.head.teacher.comparison import Comparison, comparison_of, comparison_of_spec
from policyloss.head.validate import check_mask
from policyloss.inputs import (
    DIFFERENTIATED,
    Inputs,
    SharedTensors,
    StandIn,
    stand_in_logp,
    takes_tensors,
)
from policyloss.loss import LossOutput, loss_of, ready_loss
from policyloss.metrics import Metrics, refuse_invalid
from policyloss.mixture import REACHES, Mixture, StreamCall, stream_calls
from policyloss.parts.correction import GivenWeight
from policyloss.parts.kl import Divergence
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.records import Record
from policyloss.spec import LossSpec
from policyloss.teacher import Teacher, TopK
from policyloss.tokens import Tokens
from policyloss.totals import Totals, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack  # part of typing since Python 3.11


@dataclass(frozen=True)
class HeadOutput(LossOutput):
    """The result of `linear_policy_loss`: `loss` and `metrics` as in `policy_loss`, and more.

    logp, entropy and, with a teacher, divergence: of each token, detached, and 0 at tokens that are
    masked or skipped (`skip_zero_advantage`).
    """

    logp: Tensor
    entropy: Tensor
    divergence: Tensor | None = None


@stays_eager
@takes_tensors
def linear_policy_loss(
    spec: AnyLoss | Mixture,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    old_logp: Tensor | StandIn | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    totals: Totals | Literal["local"] | None = None,
    vocab_group: Any = None,
    plan: str | Plan = "auto",
    skip_zero_advantage: bool = False,
    support: SupportArgument | None = None,
    teacher: Teacher | TopK | Tensor | None = None,
    index: Tensor | None = None,
    metrics: MetricsLevel = "all",
    **tensors: Unpack[SharedTensors],
) -> HeadOutput:
    """The loss that `spec` describes, from hidden states: `policy_loss` on `linear_logprobs`, with
    the logits computed in chunks, never all at once.

    It equals `policy_loss(spec, logp, old_logp, advantages, mask, entropy=entropy, …)`, where
    `logp, entropy = linear_logprobs(hidden, weight, ids, mask=mask, entropy=True, …)`.

    hidden: `[B, T, D]`, or packed `[N, D]` with `cu_seqlens`. weight: `[V, D]`. ids: `[B, T]` or
    `[N]`, the tokens to score; the hidden state at the same index predicts the token. Other
    arguments as in `policy_loss` and `linear_logprobs`.
    plan: "auto" takes the gradient in the same pass as the value where the loss allows it
    ("one_pass"), else "recompute" or "stash" (see `Plan`); `explain_plan` returns the choice.
    Masked tokens are not computed. If every term of the loss is a multiple of the advantage
    (`spec.follows_advantage`), tokens with advantage 0 and tokens that a correction rejects have no
    gradient: only their forward is computed, for the metrics. skip_zero_advantage (only with
    "one_pass") skips the forward of both kinds too; the metrics then cover the others only.
    teacher: the model that the spec's `Divergence` compares with, in the same chunks: a `Teacher`
    (hidden states and a head), a `TopK`, or computed logits `[..., V]`. It gets no gradient.
    index: selects the hidden state of each scored token, as in `linear_logprobs`; every other
    per-token tensor then has the shape of index, `[B, M]` or packed `[M]` with `cu_seqlens` over
    scored tokens. With index, a loss with sequence-level ratios (GSPO) uses "recompute" or "stash",
    and a teacher raises an error.
    """
    check_level(metrics)
    spec = ready_loss(spec)
    options = (bias, temperature, softcap, vocab_group, support, index)
    head, sources, rows = linear.head_and_sources(hidden, weight, ids, mask, *options)
    call = _HeadLoss(
        spec,
        sources,
        head,
        rows,
        _inputs(head, ids, old_logp, advantages, mask, tensors),
        resolve(totals),
        comparison_of_spec(spec, teacher, head, tuple(ids.shape)),
        old_logp if isinstance(old_logp, str) else None,
        skip_zero_advantage,
    )
    batch, work, chosen = call.decide(plan)
    if batch is None or not chosen.kind.sums:
        return call.compose(chosen, metrics)
    return call.run_windows(batch, work, chosen, metrics)


def explain_plan(
    spec: AnyLoss | Mixture | None,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    old_logp: Tensor | StandIn | None = None,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    plan: str | Plan = "auto",
    totals: Totals | Literal["local"] | None = None,
    skip_zero_advantage: bool = False,
    teacher: Teacher | TopK | Tensor | None = None,
    **arguments: Any,
) -> Plan:
    """The `Plan` (method, windows, memory, reason) of `linear_policy_loss` with these arguments.

    No logits are computed. With spec None, the result is the plan of `linear_logprobs`, or of
    `linear_divergence` if there is a `teacher`; old_logp and advantages are then not needed. The
    number of rows is read from the device (a sync). With `vocab_group`, call it on every rank.
    """
    of_head = {name: arguments.pop(name) for name in linear.HEAD_OPTIONS if name in arguments}
    head, sources, rows = linear.head_and_sources(hidden, weight, ids, mask, **of_head)
    tokens = tuple(ids.shape)
    if spec is None:
        outputs = linear.Outputs()
        if teacher is not None:
            part = Divergence(arguments.pop("kind", "reverse"), 1.0, **arguments)
            outputs = linear.Outputs(
                False, False, comparison_of(teacher, part.measure, head, tokens)
            )
        live = linear.live_rows(check_mask(rows, head.ids.view(sources[0].shape[:-1])))
        return logprob_plan(head, linear.work_of(sources, head, live, outputs), plan)
    if advantages is None or mask is None:
        raise InputError("explain_plan of a loss needs advantages and mask: they select the rows.")
    check_level(arguments.pop("metrics", "all"))
    spec = ready_loss(spec)
    inputs = _inputs(head, ids, old_logp, advantages, mask, arguments)
    step, comparison = resolve(totals), comparison_of_spec(spec, teacher, head, tokens)
    stand_in = old_logp if isinstance(old_logp, str) else None
    options = (step, comparison, stand_in, skip_zero_advantage)
    return _HeadLoss(spec, sources, head, rows, inputs, *options).decide(plan)[2]


def _inputs(
    head: Head, ids: Tensor, old_logp: Any, advantages: Any, mask: Any, tensors: Any
) -> Inputs:
    """The inputs of `policy_loss`, with zeros for the logp that the head will compute."""
    for name in DIFFERENTIATED:
        if name in tensors:
            raise InputTypeError(
                f"{name} is not an argument of linear_policy_loss: the head computes it."
            )
    logp = torch.zeros(ids.shape, dtype=head.dtype, device=ids.device)
    return Inputs.of(logp, old_logp, advantages, mask, tensors)


@dataclass(frozen=True)
class _HeadLoss:
    """A loss on the log-probabilities of a head.

    sources: hidden, weight and bias with their gradients. rows: the mask of the head's rows.
    inputs: of `policy_loss`, with zeros for logp. step: the totals, None if this call is the whole
    step. stand_in: the word that old_logp was given as, None for a tensor. skip: whether to compute
    only the tokens that may have a gradient.
    """

    spec: LossSpec | Mixture
    sources: linear.Sources
    head: Head
    rows: Tensor | None
    inputs: Inputs
    step: Totals | None
    comparison: Comparison | None
    stand_in: str | None
    skip: bool

    def decide(self, plan: str | Plan) -> tuple[windows.AnyBatch | None, Work, Plan]:
        """Find the rows that matter, and choose the plan.

        The batch is None if a window does not determine the gradient of its tokens.
        """
        if self.skip and isinstance(self.spec, Mixture):
            raise InputError(
                "skip_zero_advantage does not serve a Mixture: a token without an advantage in one "
                "stream may have a gradient in another; leave it out."
            )
        t = self._tokens(self.inputs)
        if not t.mask.is_meta:
            refuse_invalid(t.invalid)  # the host waits for the counts of rows below, in any case
        valid = t.mask.reshape(-1)
        calls = stream_calls(self.spec, self.inputs, self.step)
        reach, why = max(map(self._reach, calls), key=lambda reason: REACHES.index(reason[0]))
        batch: windows.AnyBatch | None = None
        if reach != "batch" and isinstance(self.spec, LossSpec):
            batch = windows.batch_of(self.spec, t, self.step, self.stand_in)
        elif reach != "batch":
            streams = (
                (c.weight, windows.batch_of(c.spec, self._tokens(c.inputs), c.step, self.stand_in))
                for c in calls
            )
            batch = windows.MixedBatch(t, tuple(streams))
        terms = (valid, valid) if batch is None else (batch.rows, batch.live)
        rows, live = map(self.head.row_flags, terms)
        longest = t.counts.max() if t.counts.numel() else rows.sum()
        computed, with_gradient, most = torch.stack([rows.sum(), live.sum(), longest]).tolist()
        counts = (rows.shape[0], with_gradient if self.skip else computed, with_gradient)
        work = Work(GradientTypes.of(*self.sources), *counts, self.comparison, longest=most)
        return batch, work, loss_plan(self.head, work, plan, reach, why)

    def _tokens(self, inputs: Inputs) -> Tokens:
        t = inputs.tokens()
        # A part that reads a number before it is computed is an error.
        uncomputed = ("logp",) if self.stand_in is None else ("logp", "old_logp")
        return replace(t, raw={**t.raw, **dict.fromkeys(uncomputed)})

    def _reach(self, call: StreamCall) -> tuple[str, str]:
        """The reach of a stream's loss in this call, and the reason if it is "batch"."""
        spec = call.spec
        if spec.reach == "batch":
            return "batch", (
                "a part of it may look at any token (to limit it, set the attribute `reach` of a "
                "callable, or `reads_logp = False` of an aggregation)"
            )
        read = [name for part in spec.correction for name in getattr(part, "reads", ("old_logp",))]
        if self.stand_in is not None and "old_logp" in read:
            return "batch", "its corrections read old_logp, which is not known beforehand"
        # If no correction reads logp, all they need of the batch is known before the first window.
        windowed = (spec.trust, *(spec.correction if spec.corrections_by_logp else ()))
        if call.step is None and any(getattr(part, "statistics_names", ()) for part in windowed):
            return "batch", (
                "it needs numbers of the whole batch first; measure them and pass "
                "totals=policyloss.measure(…)"
            )
        if spec.reach == "sequence" and self.inputs.cp_group is not None:
            return "batch", "a sequence's tokens lie on several ranks"
        if spec.reach == "sequence" and self.head.terms is not None:
            return "batch", "with index, sequences may share hidden states"
        return spec.reach, ""

    def compose(self, plan: Plan, metrics: MetricsLevel) -> HeadOutput:
        """The loss on log-probabilities that carry the gradient themselves."""
        if self.skip and isinstance(self.spec, LossSpec) and self.spec.follows_advantage:
            raise InputError(
                f"skip_zero_advantage needs plan='one_pass', but this call takes {plan.name!r} "
                f"({plan.reason})."
            )
        outputs = linear.Outputs(entropy=True, comparison=self.comparison)
        flat = linear.rows_with_gradient(self.sources, self.head, self.rows, plan, outputs)
        computed = zip(("logp", *DIFFERENTIATED), flat, strict=True)
        tokens = self.inputs.logp.shape
        of_terms = self.head.of_terms
        known = {name: of_terms(x).view(tokens) for name, x in computed if x is not None}
        detached = {name: x.detach() for name, x in known.items()}
        specs = self.spec.specs if isinstance(self.spec, Mixture) else (self.spec,)
        if not any(map(windows.entropy_has_slope, specs)):
            known["entropy"] = detached["entropy"]
        loss = loss_of(self.spec, self._inputs_with(known), self.step, metrics)
        return HeadOutput(loss.loss, loss.metrics, **detached)

    def _inputs_with(self, known: dict[str, Tensor]) -> Inputs:
        """The inputs of `policy_loss`, with the numbers that the head has computed."""
        inputs = self.inputs.replace(**known)
        if self.stand_in is None:
            return inputs
        policies = (inputs.logp, inputs.rollout_logp)
        return inputs.replace(old_logp=stand_in_logp(self.stand_in, *policies, inputs.ages))

    def run_windows(
        self, batch: windows.AnyBatch, work: Work, plan: Plan, metrics: MetricsLevel
    ) -> HeadOutput:
        """The loss window by window; a window's gradient is computed while its logits exist."""
        head, tokens = self.head, self.inputs.logp.shape
        if self.spec.reach == "sequence":
            all_windows = windows.sequence_windows(batch, work, plan.rows)
        else:
            all_windows = windows.token_windows(head, batch, work, plan.rows)
            if head.terms is not None:
                all_windows = [window.with_terms(head.terms) for window in all_windows]
        wanted = GradientTypes.of(*self.sources)
        records: dict[str, Record] = {}

        def run(check: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
            everything = plan.gathered >= work.with_gradient
            sums = plan.start_sums(head, wanted, everything)
            known = windows.run_windows(head, batch, all_windows, sums, self.comparison, check)
            gradients = sums.gradients()  # by now the memory of the logits is free
            records.update(sums.records())
            pairs = zip(self.sources, gradients, strict=True)
            return known, [g.view(x.shape) for x, g in pairs if x is not None and g is not None]

        with torch.no_grad():
            flat, gradients = run(check=True)
            known = {name: x.view(tokens) for name, x in flat.items()}
            spec, inputs = self.spec, self._inputs_with(known)
            if self.skip and isinstance(batch, windows.TokenBatch) and isinstance(spec, LossSpec):
                weight = batch.weight
                spec = spec.replace(
                    correction=batch.corrections if weight is None else GivenWeight(weight),
                    rejected="keep",
                    aggregate=lambda t: batch.average,
                )
                inputs = inputs.replace(mask=batch.live.view(tokens))
            value = loss_of(spec, inputs, self.step, metrics)
        if records and metrics == "all":
            value = replace(value, metrics=Metrics({**value.metrics, **records}))
        if not any(wanted):
            return HeadOutput(value.loss, value.metrics, **known)
        sources = [x for x in self.sources if x is not None and x.requires_grad]

        @torch.no_grad()
        def again() -> list[Tensor]:
            with exact(head.tiles is not None):  # the mode of this forward
                return run(check=False)[1]

        loss = with_known_gradients(value.loss, sources, gradients, again)
        return HeadOutput(loss, value.metrics, **known)
