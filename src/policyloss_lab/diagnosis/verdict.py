"""`Diagnosis`: the verdict of `doctor`, and the causes that it can name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from policyloss import notebook
from policyloss.parts.correction import Band, Reject, SequenceMask, Truncate
from policyloss_lab.diagnosis.place import Place


class Alternative(NamedTuple):
    """A tested hypothesis. unexplained: the share of the scale of the differences that it does not
    explain; 1 if it explains nothing.
    """

    cause: str
    sentence: str
    unexplained: float
    score: float


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a mismatch between engine and trainer.

    cause: a name of `CAUSES`, "healthy" or "not_explained". causes: one or two causes, the largest
    first. confidence: from 0 to 1. evidence, remedy: sentences. correction: parts for the slot
    `correction` of a loss that would have bounded the damage, or None. floor: the measured noise,
    in nats of an unlikely token. details: the fitted numbers. alternatives: the other tested
    hypotheses, best first. places, ruled_out: if nothing explains the mismatch, where it is, and
    the families that cannot be its cause.
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
        return " and ".join(CAUSES[cause].title for cause in self.causes)

    def because_of(self, cause: str, evidence: Sequence[str]) -> Diagnosis:
        """The diagnosis with `cause` as its only cause, and with `evidence` first."""
        return replace(
            self,
            cause=cause,
            causes=(cause,),
            confidence=0.99,
            evidence=(*evidence, *(e for e in self.evidence if e not in evidence)),
            remedy=CAUSES[cause].remedy,
            correction=CAUSES[cause].correction,
        )

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data; the correction as the repr of its parts."""
        return {
            "cause": self.cause,
            "causes": list(self.causes),
            "confidence": round(self.confidence, 4),
            "tokens": self.tokens,
            "floor": _json_number(self.floor),
            "evidence": list(self.evidence),
            "remedy": self.remedy,
            "correction": None if self.correction is None else [repr(p) for p in self.correction],
            "places": [place._asdict() for place in self.places],
            "ruled_out": list(self.ruled_out),
            "details": {name: _json_number(value) for name, value in self.details.items()},
            "alternatives": [
                {
                    **a._asdict(),
                    "unexplained": _json_number(a.unexplained),
                    "score": _json_number(a.score),
                }
                for a in self.alternatives
            ],
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [f"{self.title} (confidence {self.confidence:.0%}, {self.tokens} tokens)"]
        lines += [f"  {sentence}" for sentence in self.evidence]
        if self.ruled_out:
            lines.append(f"  ruled out: {'; '.join(FAMILIES.get(f, f) for f in self.ruled_out)}")
        lines += self._advice()
        if rivals := self._rivals()[:5]:
            lines.append("other causes, with the share that each explains:")
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
            lines.append(f"if you must train before that: correction={_parts(self.correction)}")
        return lines

    def _rivals(self) -> list[tuple[str, str, str]]:
        """The share, the title and the sentence of each alternative that explains 5 % or more."""
        return [
            (f"{1 - a.unexplained:.0%}", CAUSES[a.cause].title, a.sentence)
            for a in self.alternatives
            if a.unexplained <= 0.95 and not self.healthy
        ]


def _parts(correction: tuple[Correction, ...]) -> str:
    texts = [repr(part) for part in correction]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _json_number(value: Any) -> Any:
    """A number that strict JSON can hold, with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


Correction = Truncate | Band | SequenceMask | Reject


class Cause(NamedTuple):
    """family: causes of one family are fitted with the same kind of evidence, and only another
    family is a rival. title: a few words. remedy: instructions. correction: parts that bound the
    damage until the remedy is applied; None if a weight would only hide a bug.
    """

    family: str
    title: str
    remedy: str
    correction: tuple[Correction, ...] | None = None


TIS = (Truncate(2.0),)
ICEPOP = (Band(0.5, 5.0),)
STALE = (Truncate(2.0), SequenceMask(0.5, 2.0, weight=None))

ONE_DTYPE = "Use one dtype on both sides: score with the engine's, or serve the trainer's."
EXPECTED = (
    "Expect a mismatch from quantised rollouts, and correct for it, or serve the trainer's dtype."
)
KEPT = (
    "or let the engine report raw log-probabilities, or normalise over the kept tokens on both "
    "sides."
)
CONFIG = (
    "Compare the config.json that the engine loaded with that of the trainer, and the values that "
    "both print at start."
)

FAMILIES = {  # plain names, if a family's id is cryptic
    "column": "another token's log-probability or another base",
    "cut": "top-p, top-k or min-p",
    "mask": "prompt, end tokens or padding in the mask",
    "order": "shifted, shuffled or re-encoded rows",
    "positions": "padding positions",
    "shard": "vocabulary shard",
    "softcap": "soft cap",
    "storage": "rounded log-probabilities",
    "support": "biased or banned tokens",
    "weights": "the earlier weights",
}

CAUSES: dict[str, Cause] = {
    "healthy": Cause("", "healthy", "Nothing needs to be done."),
    "not_explained": Cause(
        "", "not explained: the difference is real, its cause is not proven", "", ICEPOP
    ),
    "temperature": Cause(
        "temperature",
        "a temperature on one side only",
        "Score with the temperature that the engine samples with (pl.logprobs(…, temperature=τ)), "
        "and let the engine report processed log-probabilities (vLLM: "
        'logprobs_mode="processed_logprobs"), or sample at temperature 1.',
        TIS,
    ),
    **{
        f"{name}_{letter}": Cause(
            "cut",
            f"{name}-{letter} renormalised on one side only",
            f"Sample without {name}_{letter}, {KEPT}",
            TIS,
        )
        for name, letter in (("top", "p"), ("top", "k"), ("min", "p"))
    },
    "support": Cause(
        "support",
        "fewer tokens allowed on one side",
        "Print the engine's top_p, top_k, min_p, bad_words, min_tokens and guided decoding; "
        f"turn them off, {KEPT}",
        TIS,
    ),
    "logit_bias": Cause(
        "support",
        "a bias of some tokens on one side only",
        "Remove logit_bias from the generation config, or add the same bias before the trainer's "
        "softmax.",
        TIS,
    ),
    "penalty": Cause(
        "penalty",
        "a repetition, presence or frequency penalty on one side only",
        "Set repetition_penalty=1 and presence_penalty=frequency_penalty=0 in the sampling "
        "parameters; generation_config.json may set them behind your back.",
        TIS,
    ),
    "top1": Cause(
        "column",
        "the number of the likeliest token instead of the sampled one",
        "Look up the sampled token's id in the engine's list of log-probabilities; the first entry "
        "of the list is the likeliest token.",
    ),
    "units": Cause(
        "column", "logarithms of another base", "Convert to natural logarithms on both sides."
    ),
    "unfilled": Cause(
        "mask",
        "numbers that were never filled in",
        "Take these tokens out of the mask, or fill in their numbers: tool outputs, special tokens "
        "and resumed requests often have none.",
    ),
    "shift": Cause(
        "order",
        "numbers one token off",
        "logits[:, t] predict the token at t + 1: slice logits[:, :-1] and ids[:, 1:], once, and "
        "check that the engine's list begins with the first sampled token.",
    ),
    "rows_permuted": Cause(
        "order",
        "rows in another order",
        "Sort both sides by a request id before they are put side by side; an engine returns "
        "requests in the order in which they finish.",
    ),
    "reencoded": Cause(
        "order",
        "the text was encoded again",
        "Keep the token ids that the engine sampled, and train on those; text that is decoded and "
        "encoded again is cut into other tokens.",
        (Reject("k3", "max", high=0.5),),
    ),
    "prompt_in_mask": Cause(
        "mask",
        "prompt tokens in the mask",
        "Let the mask begin at the first sampled token; the engine has no number for the prompt.",
    ),
    "end_token": Cause(
        "mask",
        "only the end token differs",
        "Let both sides count the end token, or neither: the engine samples it, and lists it only "
        "if it is asked to.",
    ),
    "padding_in_mask": Cause(
        "mask", "padding in the mask", "Let the mask end with the end token of each row."
    ),
    "copy": Cause(
        "copy",
        "rollout_logp is a copy of old_logp",
        "Pass the engine's numbers as rollout_logp. If the engine's numbers are meant to serve "
        "as old_logp, no correction can see a mismatch.",
    ),
    "bos": Cause(
        "prompt",
        "the first token (BOS) doubled or missing",
        "Encode prompts once, with add_special_tokens=False after a chat template, and hand ids to "
        "the engine, not text.",
        ICEPOP,
    ),
    "template": Cause(
        "prompt",
        "another prompt or chat template",
        "Render the template once, and hand the same token ids to both sides.",
        ICEPOP,
    ),
    "stale_weights": Cause(
        "weights",
        "weights of another step",
        "Check that the engine receives the weights after every update, that its prefix cache is "
        "emptied then, and that the number of steps it lags behind is the one you chose.",
        STALE,
    ),
    **{
        f"logp_{kind}": Cause(
            "storage",
            f"log-probabilities stored in {kind}",
            "Keep log-probabilities in float32 from the softmax on.",
            TIS,
        )
        for kind in ("bf16", "fp16")
    },
    "logits_bf16": Cause(
        "format",
        "logits rounded to bf16",
        "Compute the head in float32 (vLLM: head_dtype), or upcast logits before the softmax.",
        TIS,
    ),
    "logits_fp16": Cause(
        "format", "logits rounded to fp16", "Upcast logits to float32 before the softmax.", TIS
    ),
    **{
        f"weights_{kind}": Cause("format", f"weights in {kind} on one side only", remedy, parts)
        for kinds, remedy, parts in (
            (("bf16", "fp16"), ONE_DTYPE, TIS),
            (("int8", "fp8", "int4"), EXPECTED, STALE),
        )
        for kind in kinds
    },
    **{
        f"kv_{kind}": Cause("format", f"keys and values cached in {kind}", EXPECTED, STALE)
        for kind in ("fp8", "int8")
    },
    "rope": Cause("config", "another RoPE base or scaling on one side", CONFIG, ICEPOP),
    "attention_scale": Cause("config", "another scale of attention on one side", CONFIG, ICEPOP),
    "window": Cause("config", "another window of attention on one side", CONFIG, ICEPOP),
    "adapter_missing": Cause(
        "adapter",
        "an adapter that one side does not have",
        "Load the adapter into the engine after every update, or merge it into the weights that "
        "are sent.",
        ICEPOP,
    ),
    "adapter_merged": Cause(
        "adapter",
        "an adapter merged into rounded weights",
        "Merge in float32 and round once, or serve base and adapter apart, as the trainer does.",
        TIS,
    ),
    "softcap": Cause(
        "softcap",
        "a soft cap missing or doubled",
        "Apply final_logit_softcapping exactly once on both sides; fused heads take it as an "
        "argument.",
        TIS,
    ),
    "positions": Cause(
        "positions",
        "padding that counts",
        "Pass attention_mask, and position_ids = attention_mask.cumsum(-1) - 1, when rows are "
        "padded on the left.",
        ICEPOP,
    ),
    "vocab_shard": Cause(
        "shard",
        "a shard of the vocabulary",
        "Reduce maximum and sum over all ranks of the vocabulary-parallel group, and check the "
        "offset of each rank's ids.",
    ),
}
