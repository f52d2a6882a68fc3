"""`Diagnosis`: the verdict of `doctor`, and the causes that it can name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from policyloss import notebook
from policyloss.parts.correction import Band, Reject, SequenceMask, Truncate
from policyloss_lab.diagnosis.place import Place


class Alternative(NamedTuple):
    """A tested hypothesis. unexplained: the share of the scale of differences that it leaves."""

    cause: str
    sentence: str
    unexplained: float
    score: float


@dataclass(frozen=True)
class Diagnosis:
    """Why the log-probabilities of engine and trainer differ.

    cause: the largest, a name from `CAUSES`, or "healthy" or "not_explained". causes: one or
    two, the largest first. confidence: from 0 to 1. evidence, remedy: sentences. correction: a
    value for the `correction` slot of a loss, which would have limited the damage, or None. floor:
    the measured numerical noise in the log-probability of an unlikely token, in nats. tokens: how
    many were compared. details: the fitted numbers. alternatives: the other tested hypotheses, best
    first.
    If nothing explains the differences: places, where they are; ruled_out, the excluded families
    of causes.
    """

    cause: str
    causes: tuple[str, ...]
    confidence: float
    evidence: tuple[str, ...]
    remedy: str
    correction: tuple[Correction, ...] | None
    floor: float
    tokens: int
    details: Mapping[str, Any] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    places: tuple[Place, ...] = ()
    ruled_out: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return self.cause == "healthy"

    @property
    def title(self) -> str:
        """The causes in a few words."""
        names = " and ".join(CAUSES[cause].title for cause in self.causes)
        return f"{names}: harmless" if self.remedy.startswith(HARMLESS) else names

    def because_of(self, cause: str, evidence: str) -> Diagnosis:
        """A copy with this cause, at confidence 0.99, and with `evidence` first."""
        return replace(
            self,
            cause=cause,
            causes=(cause,),
            confidence=0.99,
            evidence=(evidence, self.evidence[0]),
            remedy=CAUSES[cause].remedy,
            correction=FAMILIES[CAUSES[cause].family].correction,
            places=(),
            ruled_out=(),
        )

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data; the correction as the repr of its parts."""
        return {name: plain(value) for name, value in vars(self).items()}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        claim = " that the place is right and the cause is not a known one"
        claim = claim if self.cause == "not_explained" else ""
        lines = [f"{self.title} (confidence {self.confidence:.0%}{claim}, {self.tokens} tokens)"]
        lines += [f"  {sentence}" for sentence in self.evidence]
        if self.ruled_out:
            families = "; ".join(FAMILIES[f].title for f in self.ruled_out)
            lines.append(f"  ruled out, as each leaves at least half of the difference: {families}")
        lines += self._advice()
        if self.places and (rivals := self._rivals(0.5)[:5]):
            lines.append("closest causes, with the share of the difference that each explains:")
            lines += [f"  {share:>5}  {title}: {sentence}" for share, title, sentence in rivals]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return (
            notebook.heading(f"{self.title} (confidence {self.confidence:.0%})")
            + notebook.html_list(self.evidence)
            + notebook.paragraphs(*self._advice())
            + notebook.table(("explains", "other cause", "hypothesis"), self._rivals())
        )

    def _advice(self) -> list[str]:
        lines = [f"{'next' if self.cause == 'not_explained' else 'remedy'}: {self.remedy}"]
        if self.correction:
            parts = self.correction if self.correction[1:] else self.correction[0]
            lines.append(f"if you must train before that, give the loss correction={parts!r}")
        return lines

    def _rivals(self, most: float = 0.95) -> list[tuple[str, str, str]]:
        """(share explained, title, sentence) of each alternative that leaves less than `most`."""
        return [
            (f"{1 - a.unexplained:.0%}", CAUSES[a.cause].title, a.sentence)
            for a in self.alternatives
            if a.unexplained < most and not self.healthy
        ]


def plain(value: Any) -> Any:
    """A value that strict JSON can hold, with six digits of a number."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    value = value._asdict() if isinstance(value, (Alternative, Place)) else value
    if isinstance(value, Mapping):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    return value if value is None or isinstance(value, (str, int)) else repr(value)


Correction = Truncate | Band | SequenceMask | Reject


class Cause(NamedTuple):
    """title: a few words. remedy: instructions. Only causes of other families are rivals."""

    family: str
    title: str
    remedy: str


class Family(NamedTuple):
    """Causes that are fitted with the same kind of evidence. correction: parts that bound the
    damage until the remedy is applied; None if a weight would only hide a bug.
    """

    title: str
    correction: tuple[Correction, ...] | None


HARMLESS = "No action needed: the difference is within the healthy range"
TIS = (Truncate(2.0),)
ICEPOP = (Band(0.5, 5.0),)
STALE = (Truncate(2.0), SequenceMask(0.5, 2.0, weight=None))
FAMILIES = {
    "healthy": Family("healthy", None),
    "not_explained": Family("not explained", ICEPOP),
    "temperature": Family("temperature", TIS),
    "cut": Family("top-p, top-k or min-p", TIS),
    "support": Family("biased or banned tokens", TIS),
    "penalty": Family("penalties of repeated tokens", TIS),
    "column": Family("another token's log-probability or another base", None),
    "mask": Family("prompt, end tokens or padding in the mask", None),
    "order": Family("shifted, shuffled or re-encoded rows", None),
    "copy": Family("a copy of old_logp", None),
    "prompt": Family("another prompt", ICEPOP),
    "weights": Family("the earlier weights", STALE),
    "storage": Family("rounded log-probabilities", TIS),
    "format": Family("numeric formats", STALE),
    "config": Family("configuration of the model", ICEPOP),
    "adapter": Family("adapters", ICEPOP),
    "softcap": Family("logit soft cap", TIS),
    "positions": Family("padding that is attended to or counted", ICEPOP),
    "shard": Family("vocabulary shard", None),
}

_CUTS = {"top_p": "top-p", "top_k": "top-k", "min_p": "min-p"}
_WEIGHTS = ("bf16", "fp16", "int8", "fp8", "int4")
_TITLES: dict[str, dict[str, str]] = {  # by family and cause
    "healthy": {"healthy": "healthy"},
    "not_explained": {"not_explained": "not explained: the difference is real, its cause unknown"},
    "temperature": {"temperature": "a temperature on one side only"},
    "cut": {cut: f"{name} renormalised on one side only" for cut, name in _CUTS.items()},
    "support": {
        "support": "fewer tokens allowed on one side",
        "logit_bias": "a logit bias on one side only",
    },
    "penalty": {"penalty": "a repetition, presence or frequency penalty on one side only"},
    "column": {
        "top1": "the likeliest token's log-probability instead of the sampled token's",
        "units": "logarithms of another base",
    },
    "mask": {
        "unfilled": "log-probabilities that were never filled in",
        "prompt_in_mask": "prompt tokens in the mask",
        "end_token": "only the end token differs",
        "padding_in_mask": "padding in the mask",
    },
    "order": {
        "shift": "log-probabilities one token off",
        "rows_permuted": "rows in another order",
        "reencoded": "the text was tokenised again",
    },
    "copy": {"copy": "rollout_logp is a copy of old_logp"},
    "prompt": {
        "bos": "the first token (BOS) doubled or missing",
        "template": "another prompt or chat template",
    },
    "weights": {"stale_weights": "weights of another step"},
    "storage": {f"logp_{x}": f"log-probabilities stored in {x}" for x in ("bf16", "fp16")},
    "format": {
        **{f"logits_{x}": f"logits rounded to {x}" for x in ("bf16", "fp16")},
        **{f"weights_{x}": f"weights in {x} on one side only" for x in _WEIGHTS},
        **{f"kv_{x}": f"keys and values cached in {x}" for x in ("fp8", "int8")},
    },
    "config": {
        "rope": "another RoPE base or scaling on one side",
        "attention_scale": "another scale of attention on one side",
        "window": "another window of attention on one side",
    },
    "adapter": {
        "adapter_missing": "an adapter that one side does not have",
        "adapter_merged": "an adapter merged into rounded weights",
    },
    "softcap": {"softcap": "a logit soft cap on one side only, or twice"},
    "positions": {"positions": "padding that is attended to or counted as positions"},
    "shard": {"vocab_shard": "a vocabulary shard missing on one side"},
}
_REMEDIES = {  # by cause, or by family if its causes share one
    "healthy": "Nothing needs to be done.",
    "not_explained": "",
    "temperature": "Score with the temperature of sampling, pl.logprobs(…, temperature=τ), or "
    "sample at 1. If only old_logp has it, let the engine report it, too (vLLM: "
    'logprobs_mode="processed_logprobs").',
    "cut": "Turn the cut off when sampling (top_p=1, top_k=-1, min_p=0); if you need it, normalise "
    "over the kept tokens on both sides.",
    "support": "Print the engine's top_p, top_k, min_p, bad_words, min_tokens and grammar; turn "
    "off the one that is set. If you need it, apply the same in the trainer; of a grammar, store "
    "each step's mask of allowed tokens.",
    "logit_bias": "Remove logit_bias when sampling, or add the same bias in the trainer.",
    "penalty": "Set repetition_penalty=1 and presence_penalty=frequency_penalty=0 when sampling; "
    "look into generation_config.json, too, which engines read.",
    "top1": "Look up the sampled token's id in the engine's list of log-probabilities; the list "
    "begins with the likeliest token.",
    "units": "Convert to natural logarithms on both sides.",
    "unfilled": "Take these tokens out of the mask, or fill in their log-probabilities: tool "
    "outputs, special tokens and resumed requests often have none.",
    "shift": "Slice logits[:, :-1] and ids[:, 1:] exactly once, and check that the engine's list "
    "begins with the first sampled token.",
    "rows_permuted": "Sort both sides by a request id: an engine returns requests in the order in "
    "which they finish.",
    "reencoded": "Train on the token ids that the engine sampled, not on text tokenised again.",
    "prompt_in_mask": "Let the mask begin at the first sampled token; the engine scores no prompt.",
    "end_token": "Take the end token's log-probability from the engine, or mask the end token.",
    "padding_in_mask": "Let the mask end with the end token of each row.",
    "copy": "Pass the engine's own log-probabilities as rollout_logp: a copy hides every mismatch.",
    "bos": "Encode prompts once, with add_special_tokens=False after a chat template, and send ids "
    "to the engine, not text.",
    "template": "Render the template once, and send the same token ids to both sides.",
    "weights": "Check that the engine receives the weights after every update, that its prefix "
    "cache is emptied then, and that it lags by the number of steps you chose.",
    "storage": "Keep log-probabilities in float32 from the softmax on.",
    "format": "Use one dtype on both sides, with a head in float32 (vLLM: head_dtype). If the "
    "quantisation is intended, keep it, with the verdict's correction if it has one.",
    "config": "Compare the config.json that the engine loaded with the trainer's: rope_theta, "
    "rope_scaling, sliding_window, and the scale of attention.",
    "adapter": "Load the adapter into the engine after every update, or merge it in float32 and "
    "round once.",
    "softcap": "Apply final_logit_softcapping exactly once on both sides; fused heads take it as "
    "an argument.",
    "positions": "Always pass attention_mask; for rows padded on the left, also position_ids = "
    "(attention_mask.cumsum(-1) - 1).clamp(min=0).",
    "shard": "If logits count as 0, check that those of that shard's rank reach the log-softmax: "
    "its gather or all-reduce, its slice of the head's weights, and the offset of its ids. If the "
    "normaliser lacks a shard, reduce maximum and sum over all ranks.",
}
CAUSES = {
    cause: Cause(family, title, _REMEDIES.get(cause) or _REMEDIES[family])
    for family, titles in _TITLES.items()
    for cause, title in titles.items()
}
