"""Hypotheses about the logits of the whole vocabulary: a soft cap, rounding, a lost shard, and the
options of a generation config (penalties, a bias of some tokens, forbidden tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from policyloss_lab.diagnosis.forward import Scorer
from policyloss_lab.diagnosis.hypothesis import Case, Fit
from policyloss_lab.diagnosis.sampling import geometric, refined

SHARDS = (2, 4, 8)
BIASED = 32  # the most tokens that may have a bias
TOKENS_PER_BIAS = 12  # the least number of tokens for each fitted bias
FORBIDDEN = 0.05  # the largest share of their probability that forbidden tokens keep


def fit_softcap(case: Case) -> Iterator[Fit]:
    """One side caps its logits, `c·tanh(z/c)`, and the other does not, or caps them twice."""
    if case.scorer is None:
        return
    scorer, logits = case.scorer, case.scorer.logits.double()
    cap = getattr(scorer.config, "final_logit_softcapping", None)

    def capped(sign: int, c: Tensor) -> Tensor:
        z = c[:, None] * torch.tanh(logits / c[:, None])
        return sign * (scorer.of_ids(z) - scorer.logp)

    for side, sign in case.sides:
        (value,), prediction = refined(geometric(1.0, 200.0, 25), partial(capped, sign), case)
        twice = cap is not None and abs(float(value) / cap - 1) < 0.02
        word = "a second soft cap" if twice else "a soft cap"
        yield Fit(
            "softcap",
            f"{side} has {word} of {float(value):.3g} on its logits",
            prediction,
            freedom=1,
            details={"softcap": float(value), "side": side},
        )
    if cap is not None:
        bare = cap * torch.atanh((logits / cap).clamp(-1 + 1e-6, 1 - 1e-6))
        yield from case.fit_sides(
            "softcap",
            f"{{side}} lacks the model's soft cap of {cap:g}",
            scorer.of_ids(bare) - scorer.logp,
            {"softcap": cap, "missing": True},
        )


def fit_rounded_logits(case: Case) -> Iterator[Fit]:
    """One side rounds its logits to 16 bits before the softmax."""
    if case.scorer is None:
        return
    scorer = case.scorer
    for cause, dtype in (("logits_bf16", torch.bfloat16), ("logits_fp16", torch.float16)):
        effect = scorer.of_ids(scorer.logits.to(dtype)) - scorer.logp
        name = str(dtype).removeprefix("torch.")
        yield from case.fit_sides(cause, f"the logits of {{side}} are rounded to {name}", effect)


def fit_shard(case: Case) -> Iterator[Fit]:
    """The vocabulary is split over 2, 4 or 8 ranks, and one side handles a shard wrongly: it leaves
    the shard out of the normaliser, has no logits for it, or normalises over the token's shard.
    """
    if case.scorer is None:
        return
    scorer, ids = case.scorer, case.scorer.ids
    logits = scorer.logits.double()
    vocabulary = logits.shape[1]
    chosen = logits.gather(1, ids[:, None])[:, 0]
    for shards in SHARDS:
        size = -(-vocabulary // shards)
        sums = torch.stack([part.logsumexp(1) for part in torch.split(logits, size, 1)], 1)
        count = sums.shape[1]
        if count < 2:
            continue
        mine = ids // size
        alone = chosen - sums.gather(1, mine[:, None])[:, 0]
        effects = {f"normalised over 1 of {count} shards": alone}
        for j in range(count):
            others = torch.cat([sums[:, :j], sums[:, j + 1 :]], 1).logsumexp(1)
            width = min(size, vocabulary - j * size)
            empty = torch.logaddexp(others, others.new_full((), width).log())
            zero = torch.where(mine == j, 0.0, chosen)
            effects[f"without shard {j} of {count} in the normaliser"] = chosen - others
            effects[f"with zero logits in shard {j} of {count}"] = zero - empty
        for what, logp in effects.items():
            yield from case.fit_sides(
                "vocab_shard",
                f"{{side}} is {what} of the vocabulary",
                logp - scorer.logp,
                {"shards": count},
                freedom=2,
            )


def fit_penalties(case: Case) -> Iterator[Fit]:
    """One side penalises tokens that occurred before: repetition divides a positive logit and
    multiplies a negative one, and counts the prompt; presence and frequency subtract from logits,
    and count the completion alone.
    """
    if case.scorer is None:
        return
    scorer = case.scorer
    everywhere, completion = counts_before(scorer, prompts=True), counts_before(scorer)

    def penalised(kind: str, sign: int, size: Tensor) -> Tensor:
        z, s = scorer.logits, size[:, None].float()
        if kind == "repetition_penalty":
            z = torch.where(everywhere > 0, torch.where(z > 0, z / s, z * s), z)
        else:
            z = z - s.log() * (completion if kind == "frequency_penalty" else completion > 0)
        return sign * (scorer.of_ids(z) - scorer.logp)

    for side, sign in case.sides:
        for kind in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            factor = kind == "repetition_penalty"
            values = geometric(0.5, 2.0, 17) if factor else geometric(0.1, 10, 25)
            (size,), prediction = refined(values, partial(penalised, kind, sign), case)
            value = float(size if factor else size.log())
            yield Fit(
                "penalty",
                f"{side} is that of {kind} = {value:.3g}",
                prediction,
                freedom=1,
                details={kind: value, "side": side},
            )


def counts_before(scorer: Scorer, prompts: bool = False) -> Tensor:
    """`[n, V]`: how often each token of the vocabulary occurs before each scored token, in the
    completion or also in the prompt.
    """
    out = torch.zeros(scorer.logits.shape, dtype=torch.int16)
    for k, (row, place) in enumerate(scorer.scored.tolist()):
        before = scorer.completions[row][:place]
        tokens = torch.tensor([*scorer.prompts[row], *before] if prompts else before)
        out[k].index_add_(0, tokens.long(), torch.ones(len(tokens), dtype=torch.int16))
    return out


def fit_bias(case: Case) -> Iterator[Fit]:
    """One side adds a bias to the logits of some tokens, or forbids them.

    With the weight `w = exp(-effect)` of a sampled token i, and `c = exp(bias) - 1` of each biased
    token, `w - 1 = Σ p·c - w·c_i`. That is linear in c, and few c are not 0: the tokens are chosen
    one by one, each the one that explains most of the rest.
    """
    if case.scorer is None:
        return
    scorer, n = case.scorer, case.pairs.size
    p = scorer.logits.double().softmax(1)
    for side, sign in case.sides:
        w = (-sign * case.pairs.difference).clamp(-10, 10).exp()
        design = p.clone()
        design[torch.arange(n), scorer.ids] -= w
        heavy = 1 / torch.maximum(w, torch.ones_like(w))[:, None]  # a rare large w is no more
        design, target = heavy * design, heavy[:, 0] * (w - 1)
        lengths = design.square().sum(0).sqrt().clamp(min=1e-3)
        rest, c = target, torch.zeros(0)
        chosen: list[int] = []
        while len(chosen) < min(BIASED, n // TOKENS_PER_BIAS):
            chosen.append(int(((design.T @ rest).abs() / lengths).argmax()))
            columns = design[:, chosen]
            c = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
            rest = target - columns @ c
            if rest.norm() < 0.02 * target.norm():
                break
        bias = torch.zeros(p.shape[1], dtype=torch.float64)
        bias[chosen] = c.clamp(-1 + 1e-9, 1e6).log1p()
        effect = bias[scorer.ids] - (p @ torch.expm1(bias)).log1p()
        strong = [i for i in chosen if abs(float(bias[i])) > 0.1]
        if not strong:
            continue
        kept = bias[strong].exp()
        forbidden = float(kept.median()) < FORBIDDEN and float(kept.max()) < 1
        listed = ", ".join(f"{i}: {float(bias[i]):+.2g}" for i in strong[:6])
        more = f" and {len(strong) - 6} more" if len(strong) > 6 else ""
        what = "forbids some tokens, or nearly" if forbidden else "has a bias of some tokens"
        yield Fit(
            "support" if forbidden else "logit_bias",
            f"{side} {what} ({listed}{more})",
            sign * effect,
            freedom=len(chosen),
            details={"ids": strong, "side": side},
        )
