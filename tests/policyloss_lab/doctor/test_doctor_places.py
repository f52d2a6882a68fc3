"""Causes that need a model or a look at single rows, and the places of verdicts without a name, on
hand-made numbers and on the recorded model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.doctor_cases import SMALL, Rollout, Source, batch_of, score
from torch import Tensor
from walk import walked

import policyloss_lab as lab
from policyloss_lab.diagnosis import diagnose as diagnosing
from policyloss_lab.diagnosis.columns import fit_units
from policyloss_lab.diagnosis.diagnose import Thresholds, diagnose
from policyloss_lab.diagnosis.forward import alter_weights
from policyloss_lab.diagnosis.hypothesis import Case, Fit
from policyloss_lab.diagnosis.logits import counts_before
from policyloss_lab.diagnosis.pairs import read_pairs
from policyloss_lab.diagnosis.simulated import integers, matrices

RECORDED = Path(__file__).parents[2] / "recorded" / "doctor"
SOURCE = Source(RECORDED / "rollouts", RECORDED / "models")


def numbers(rows: int = 16, columns: int = 30) -> dict[str, Tensor]:
    """Log-probabilities of a language model, equal on both sides but for rounding."""
    draw = torch.Generator().manual_seed(0)
    old = torch.rand(rows, columns, generator=draw).pow(0.5).clamp(1e-3, 0.999).log()
    noise = 1e-4 * torch.randn(old.shape, generator=draw)
    ids = torch.randint(1000, old.shape, generator=draw)
    return {"old_logp": old, "rollout_logp": old + noise, "ids": ids}


def noise_of(a: dict[str, Tensor], size: float, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return size * torch.randn(a["old_logp"].shape, generator=draw) * (1 - a["old_logp"].exp())


# Causes that pairs show ---------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "name"), [(2, "base 2"), (10, "base 10")])
def test_logarithms_of_another_base(base: int, name: str) -> None:
    a = numbers()
    a["rollout_logp"] = a["rollout_logp"] / math.log(base)
    found = lab.doctor(**a)
    assert found.causes == ("units",)
    assert any(name in sentence for sentence in found.evidence)


@pytest.mark.parametrize("value", [0.0, -100.0])
def test_numbers_that_were_never_filled_in(value: float) -> None:
    a = numbers()
    a["rollout_logp"][3:9, 5:8] = value
    found = lab.doctor(**a)
    assert found.causes == ("unfilled",)
    assert found.details["tokens"] == 18
    assert found.details["value"] == value


def test_one_missing_number_is_not_healthy() -> None:
    """A token that is 4 nats off stands next to 479 that agree."""
    a = numbers()
    a["old_logp"][2, 29] = -4.0
    a["rollout_logp"][2, 29] = 0.0
    assert lab.doctor(**a).cause == "unfilled"


def test_fewer_tokens_on_one_side() -> None:
    """Every token gains what the forbidden ones lose: 5 to 30 % of the probability."""
    a = numbers()
    mass = 0.05 + 0.25 * torch.rand(16, 30, generator=torch.Generator().manual_seed(2))
    a["rollout_logp"] = torch.minimum(a["old_logp"] - torch.log1p(-mass), torch.tensor(0.0))
    found = lab.doctor(**a)
    assert found.causes == ("support",)
    assert found.details["side"] == "rollout_logp"


def test_one_sign_is_no_temperature() -> None:
    a = numbers()
    a["old_logp"] = a["old_logp"].clamp(max=-1.2)
    a["rollout_logp"] = 0.7 * a["old_logp"]
    assert "temperature" not in lab.doctor(**a).causes


def test_rows_of_another_engine_are_named_with_their_share() -> None:
    a = numbers()
    a["rollout_logp"][::4] = a["rollout_logp"][::4] / math.log(2)
    found = lab.doctor(**a)
    assert found.causes == ("units",)
    assert found.details["share_of_rows"] == 0.25
    assert found.details["rows"] == [0, 4, 8, 12]
    assert any("in 4 of 16 rows" in sentence for sentence in found.evidence)


def test_rows_are_named_only_if_the_others_are_quiet() -> None:
    a = numbers()
    a["rollout_logp"] = a["rollout_logp"] + noise_of(a, 0.08)
    a["rollout_logp"][::4] = a["old_logp"][::4] / math.log(10)
    found = lab.doctor(**a)
    assert found.cause == "not_explained"
    assert found.places[0].tag == "rows"
    every_fourth = "mainly in 4 of 16 rows, namely every fourth one: 0, 4, 8, 12"
    assert found.places[0].sentence == every_fourth
    half = numbers()
    half["rollout_logp"][9::2] += noise_of(half, 0.5)[9::2]
    assert lab.doctor(**half).places[0].sentence == "only in 4 of 16 rows, namely 9, 11, 13, 15"
    b = numbers()
    few_rows(b)
    assert lab.doctor(**b).places[0].sentence == "only in 1 of 16 rows, namely 5"
    loud = numbers()
    loud["rollout_logp"][1:] += noise_of(loud, 0.5)[1:]
    assert lab.doctor(**loud).places[0].sentence == "only in 15 of 16 rows, all but 0"


# Places of verdicts without a name ----------------------------------------------------------------


def few_rows(a: dict[str, Tensor]) -> None:
    a["rollout_logp"][5] += 2 * noise_of(a, 1.0)[5]


def first_tokens(a: dict[str, Tensor]) -> None:
    a["rollout_logp"][:11, 0] += 2 * noise_of(a, 1.0)[:11, 0]


def last_tokens(a: dict[str, Tensor]) -> None:
    a["rollout_logp"][:4, -1] -= torch.tensor([1.0, -2.0, 3.0, -1.5])


def fading(a: dict[str, Tensor]) -> None:
    a["rollout_logp"] += noise_of(a, 0.5) * torch.exp(-torch.arange(30) / 3)


def repeated(a: dict[str, Tensor]) -> None:
    a["ids"] = torch.randint(20, (16, 30), generator=torch.Generator().manual_seed(3))
    again = torch.tensor([[t in row[:k] for k, t in enumerate(row)] for row in a["ids"].tolist()])
    a["rollout_logp"] += noise_of(a, 0.03) + again * noise_of(a, 0.6, 2)


def some_ids(a: dict[str, Tensor]) -> None:
    a["ids"] = torch.randint(40, (16, 30), generator=torch.Generator().manual_seed(3))
    a["rollout_logp"] += noise_of(a, 0.03) + torch.isin(a["ids"], torch.tensor([7, 9])) * noise_of(
        a, 2.0, 2
    )


def one_sided(a: dict[str, Tensor]) -> None:
    unlikely = a["old_logp"] < -1.5
    a["rollout_logp"] += unlikely * noise_of(a, 0.5).abs()


def factor(a: dict[str, Tensor]) -> None:
    a["rollout_logp"] = 1.2 * a["old_logp"] + noise_of(a, 0.01)


def shifted(a: dict[str, Tensor]) -> None:
    a["rollout_logp"] = a["rollout_logp"].roll(5, 1)


def inside(a: dict[str, Tensor]) -> None:
    a["rollout_logp"] += noise_of(a, 0.3)


PLACES: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "rows": (few_rows, "which worker"),
    "first": (first_tokens, "token ids of one row"),
    "last": (last_tokens, "last three tokens"),
    "start": (fading, "token ids of one row"),
    "repeated": (repeated, "penalties"),
    "ids": (some_ids, "logit_bias"),
    "one_sided": (one_sided, "top 20 log-probabilities"),
    "multiplicative": (factor, "term by term"),
    "unrelated": (shifted, "the first that differs"),
    "network": (inside, "Pass model=, ids= and prompts="),
}


@walked("tag", sorted(PLACES))
def test_a_verdict_without_a_name_says_where_and_what_next(tag: str) -> None:
    change, ask = PLACES[tag]
    a = numbers()
    change(a)
    found = lab.doctor(**a)
    assert found.cause == "not_explained", str(found)
    place = next((p for p in found.places if p.tag == tag), None)
    assert place is not None, str(found)
    assert ask in place.next
    assert found.places[0].next in found.remedy
    assert found.to_dict()["places"][0]["tag"] == found.places[0].tag


# The rule -----------------------------------------------------------------------------------------


def test_a_cause_that_leaves_much_is_not_named() -> None:
    """A base of 2 explains a part of each difference, and the rest is ten times the floor."""
    a = numbers()
    a["rollout_logp"] = a["old_logp"] / math.log(2) + noise_of(a, 0.5)
    found = lab.doctor(**a)
    assert found.cause == "not_explained", str(found)
    assert found.alternatives[0].cause == "units"


def test_a_cause_that_leaves_the_far_tokens_is_not_named() -> None:
    """20 of 480 tokens are 3 nats off, and a cause predicts the small noise of the others."""
    a = numbers()
    noise, far = noise_of(a, 0.02), torch.zeros(16, 30)
    far[:, 7], far[:4, 9] = 3.0, -3.0
    case = Case(read_pairs(a["old_logp"] + noise + far, a["old_logp"], None))
    search = diagnosing.Search(case, Thresholds(), None, frozenset())
    for predicted, named in ((noise, False), (noise + far, True)):
        fit = Fit("weights_bf16", "", predicted.flatten().double(), share="fixed")
        (row,) = search.rank([fit], case)
        assert row.left.scale < 1e-4 * case.first.scale
        assert search.explains(row, case) is named


@pytest.mark.parametrize(
    ("columns", "cause"), [([3, 11, 6, 27, 15, 20], "healthy"), ([0] * 6, "not_explained")]
)
def test_far_tokens_are_as_of_routers_only_if_scattered(columns: list[int], cause: str) -> None:
    """6 of 480 tokens differ as a flip of a router makes them, in both directions."""
    a = numbers()
    a["old_logp"][range(2, 14, 2), columns] = -3.0 + 0.1 * torch.arange(6)
    a["rollout_logp"] = a["old_logp"] + noise_of(a, 0.01)
    a["rollout_logp"][range(2, 14, 2), columns] += torch.tensor([0.7, -0.9, 1.1, -0.8, 0.9, -1.2])
    assert lab.doctor(**a).cause == cause


def test_words_encoded_again_change_the_context_of_their_successors() -> None:
    """A word more at column 8 of each row; the tokens after it differ by 0.3 nats as well."""
    a = numbers()
    old, late = a["old_logp"], torch.arange(30) >= 8
    a["rollout_logp"] = torch.where(late, old.roll(-1, 1) + noise_of(a, 0.3), old)
    assert lab.doctor(**a).causes == ("reencoded",)


def test_two_families_that_explain_alike_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def twin(case: Case) -> Any:
        for fit in fit_units(case):
            yield Fit("softcap", "a twin", fit.prediction)

    a = numbers()
    a["rollout_logp"] = a["rollout_logp"] / math.log(2)
    monkeypatch.setattr(diagnosing, "NUMBERS", (fit_units, twin))
    found = lab.doctor(**a)
    assert found.cause == "not_explained"
    assert found.details["candidates"] == ["units", "softcap"]


def test_one_cause_is_preferred_to_two() -> None:
    a = numbers()
    case = Case(read_pairs(a["rollout_logp"], a["old_logp"], None))
    both, one = (Fit(cause, "", case.pairs.difference) for cause in ("temperature+top_p", "top_p"))
    search = diagnosing.Search(case, Thresholds(), None, frozenset())
    assert [row.fit.cause for row in search.rank([both, one], case)] == [one.cause, both.cause]


def test_a_family_that_is_held_out_is_not_named() -> None:
    a = numbers()
    pairs = read_pairs(a["rollout_logp"] / math.log(2), a["old_logp"], None)
    assert diagnose(Case(pairs), Thresholds()).cause == "units"
    held = diagnose(Case(pairs), Thresholds(), held_out=frozenset({"column"}))
    assert held.cause == "not_explained"
    assert "multiplicative" in [place.tag for place in held.places]


# Causes that the model shows ----------------------------------------------------------------------


@cache
def plain() -> Rollout:
    return SOURCE.rollout("plain", 0, SMALL)


def from_logits(change: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """The engine's numbers if it changes its logits."""
    scorer = plain().scorer(SOURCE.model())
    return plain().padded(scorer.of_ids(change(scorer, scorer.logits)))


def repetition(scorer: Any, z: Tensor) -> Tensor:
    again = counts_before(scorer, prompts=True) > 0
    return torch.where(again, torch.where(z > 0, z / 1.3, z * 1.3), z)


def presence(scorer: Any, z: Tensor) -> Tensor:
    return z - 0.7 * (counts_before(scorer) > 0)


def bias(scorer: Any, z: Tensor) -> Tensor:
    """The three tokens that are sampled most."""
    chosen = scorer.ids.bincount().topk(3).indices
    return z.index_add(1, chosen, torch.tensor([2.0, -1.0, 1.0]).expand(len(z), 3))


def min_tokens(scorer: Any, z: Tensor) -> Tensor:
    """The end token is forbidden among the first six."""
    z = z.clone()
    z[scorer.scored[:, 1] < 6, scorer.config.eos_token_id] = -torch.inf
    return z


def by_row(scorer: Any, z: Tensor) -> Tensor:
    taus = torch.linspace(0.6, 1.6, SMALL)
    return z / taus[scorer.scored[:, 0], None]


def through(**options: Any) -> Tensor:
    return score(plain(), SOURCE.model(), **options)


def int8_cache(x: Tensor) -> Tensor:
    return integers(x, -1)


def other_base() -> Tensor:
    model = SOURCE.model()
    before = {name: x.clone() for name, x in model.named_buffers() if name.endswith("inv_freq")}
    for name, x in model.named_buffers():
        if name in before:
            x.copy_(x.pow(1.5))
    try:
        return through()
    finally:
        for name, x in model.named_buffers():
            if name in before:
                x.copy_(before[name])


def int4_weights() -> Tensor:
    model = SOURCE.model()
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linear.discard("lm_head.weight")
    with alter_weights(model, lambda n, w: integers(w, 1, 7.0) if n in linear else None):
        return through()


MODEL: dict[str, tuple[Callable[[], Tensor], str, str, float | str]] = {
    "repetition": (lambda: from_logits(repetition), "penalty", "repetition_penalty", 1.3),
    "presence": (lambda: from_logits(presence), "penalty", "presence_penalty", 0.7),
    "bias": (lambda: from_logits(bias), "logit_bias", "side", "rollout_logp"),
    "min_tokens": (lambda: from_logits(min_tokens), "support", "min_tokens", 6),
    "by_row": (lambda: from_logits(by_row), "temperature", "by", "each row"),
    "top1": (
        lambda: plain().padded(plain().scorer(SOURCE.model()).logits.log_softmax(1).amax(1)),
        "top1",
        "side",
        "rollout_logp",
    ),
    "window": (lambda: through(window=8), "window", "what", "a window of 8 tokens"),
    "kv_int8": (lambda: through(cached=int8_cache), "kv_int8", "side", "rollout_logp"),
    "rope": (other_base, "rope", "what", "a RoPE base of 1e+06"),
    "int4": (int4_weights, "weights_int4", "rounding", "int4 by channel"),
}


@walked("name", sorted(MODEL))
def test_a_cause_that_the_model_shows(name: str) -> None:
    engine, cause, key, value = MODEL[name]
    roll = plain()
    made = batch_of(Rollout(roll.ids, roll.mask, engine(), roll.prompts), SOURCE.model(), (cause,))
    found = lab.doctor(**made.arguments, model=made.model, prompts=made.prompts)
    assert found.causes == (cause,), str(found)
    expected = value if isinstance(value, str) else pytest.approx(value, rel=0.03)
    assert found.details[key] == expected


@walked("tokens", [1, 11])
def test_every_hypothesis_takes_few_tokens(tokens: int) -> None:
    """Realigned rows may leave fewer tokens than a batch must have."""
    roll = plain()
    arguments = batch_of(roll, SOURCE.model(), ()).arguments
    pairs = read_pairs(arguments["rollout_logp"], arguments["old_logp"] - 0.5, roll.mask)
    few = torch.arange(pairs.size) < tokens
    case = Case(pairs, roll.scorer(SOURCE.model())).select(few)
    search = diagnosing.Search(case, Thresholds(), None, frozenset())
    search.effect(case)
    assert {"logits_bf16", "temperature"} <= {row.fit.cause for row in search.tested}


def test_experts_and_routers_are_rounded_by_their_inputs() -> None:
    layer = torch.nn.Module()
    layer.router, layer.proj = torch.nn.Linear(4, 2), torch.nn.Linear(4, 4)
    layer.experts = torch.nn.Parameter(torch.zeros(2, 3, 4))
    layer.norm = torch.nn.Parameter(torch.zeros(4))
    assert matrices(layer) == {"experts": -1, "router.weight": -1, "proj.weight": -1}
    step = integers(torch.tensor([[[1.0, 0.6], [0.3, 0.3]]]), -1, 7.0)
    torch.testing.assert_close(step, torch.tensor([[[1.0, 4 / 7], [0.3, 0.3]]]))


def test_the_configuration_is_as_before() -> None:
    model = SOURCE.model()
    before = {name: x.clone() for name, x in model.named_buffers()}
    scales = [m.scaling for m in model.modules() if hasattr(m, "scaling")]
    made = batch_of(plain(), model, (), rollout_logp=through(window=8))
    lab.doctor(**made.arguments, model=model, prompts=made.prompts)
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())
    assert scales == [m.scaling for m in model.modules() if hasattr(m, "scaling")]
