"""Faults made by a real engine, and by real code around it, on a recorded part of the matrix.

The rollouts are those of vLLM; `python -m benchmarks.doctor --record` wrote them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.doctor import FROM_PAIRS
from benchmarks.doctor_cases import FAULTS, SMALL, Batch, Rollout, Source, batch_of, score
from benchmarks.doctor_heldout import rows_of
from benchmarks.doctor_strangers import HEALTHY, TorchSource
from torch import nn
from walk import walked

import policyloss as pl
import policyloss_lab as lab
from policyloss_lab.diagnosis import diagnose as diagnosing
from policyloss_lab.diagnosis.forward import alter_weights
from policyloss_lab.diagnosis.logits import fit_temperature
from policyloss_lab.diagnosis.verdict import CAUSES, FAMILIES

RECORDED = Path(__file__).parents[2] / "recorded" / "doctor"
# Nothing that was passed shows these; the verdict has no name, and its place leads to them.
UNNAMED = {"stale_weights": "earlier_logp", "template": "prompt", "dropout": "model.eval()"}
# The others need peft, or a mixture of experts.
NAMES = [
    name for name in FAULTS if name not in ("router", "adapter_missing", "adapter_merged", *UNNAMED)
]


@cache
def source() -> Source:
    return Source(RECORDED / "rollouts", RECORDED / "models")


@cache
def batch(name: str, seed: int = 0) -> Batch:
    return FAULTS[name](source(), seed, SMALL)


@cache
def verdict(name: str, seed: int = 0) -> lab.Diagnosis:
    made = batch(name, seed)
    return lab.doctor(**made.arguments, model=made.model, prompts=made.prompts)


@pytest.mark.parametrize(
    "names",
    [NAMES[::2], pytest.param(NAMES[1::2], marks=pytest.mark.slow)],
    ids=["every second", "the others"],
)
def test_the_causes_are_named(names: list[str]) -> None:
    unnamed = [name for name in names if sorted(verdict(name).causes) != sorted(batch(name).causes)]
    assert not unnamed, "\n".join(str(verdict(name)) for name in unnamed)


@walked("name", sorted(UNNAMED))
def test_a_cause_that_nothing_proves_is_not_named(name: str) -> None:
    found = verdict(name)
    assert found.cause == "not_explained", str(found)
    assert UNNAMED[name] in found.remedy
    assert found.details["side"] == batch_side(name)


def batch_side(name: str) -> str:
    return "old_logp" if name == "dropout" else "rollout_logp"


def test_older_weights_that_are_passed_are_named() -> None:
    """The recorded part has no older weights, so the trainer's are changed."""
    model = source().model()
    plain = source().rollout("plain", 0, SMALL)
    draw = torch.Generator().manual_seed(0)
    with alter_weights(
        model, lambda n, w: w + 0.01 * w.std() * torch.randn(w.shape, generator=draw)
    ):
        older = score(plain, model)
    engine = older + 1e-4 * torch.randn(older.shape, generator=draw)
    made = batch_of(Rollout(plain.ids, plain.mask, engine, plain.prompts), model, ())
    for options in ({}, {"model": model, "prompts": made.prompts}):
        found = lab.doctor(**made.arguments, earlier_logp=older, **options)
        assert found.causes == ("stale_weights",), str(found)
    assert lab.doctor(**made.arguments).cause != "stale_weights"


def right(labels: Sequence[str]) -> float:
    """The share of faults whose verdict is that of the label beside it."""
    hits = [
        sorted(verdict(name).causes) == sorted(batch(label).causes)
        for name, label in zip(NAMES, labels, strict=True)
    ]
    return sum(hits) / len(hits)


@pytest.mark.slow
def test_shuffled_labels_make_the_matrix_wrong() -> None:
    assert right(NAMES) >= 0.95
    assert right(NAMES[5:] + NAMES[:5]) <= 0.1


def test_a_blinded_hypothesis_makes_its_row_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(h for h in diagnosing.NUMBERS if h is not fit_temperature)
    monkeypatch.setattr(diagnosing, "NUMBERS", others)
    monkeypatch.setattr(diagnosing, "fit_temperature_and_cut", lambda case, scorer: iter(()))
    made = batch("temperature")
    blind = lab.doctor(**made.arguments, model=made.model, prompts=made.prompts)
    assert "temperature" not in blind.causes


@walked("name", sorted(FROM_PAIRS))
def test_pairs_alone_name_their_causes(name: str) -> None:
    assert lab.doctor(**batch(name).arguments).causes == (FROM_PAIRS[name],)


def test_the_numbers_of_a_fault_are_found() -> None:
    """Seed 0: temperature 0.6, top-p 0.7, top-k 3, min-p 0.05, a soft cap of 5."""
    for name, value in (
        ("temperature", 0.6),
        ("top_p", 0.7),
        ("top_k", 3),
        ("min_p", 0.05),
        ("softcap", 5.0),
    ):
        assert verdict(name).details[name] == pytest.approx(value, rel=0.06), name
    assert verdict("temperature_raw").details["side"] == "old_logp"
    assert verdict("temperature").details["side"] == "rollout_logp"


def test_a_healthy_verdict_states_the_noise() -> None:
    float32, bf16 = verdict("healthy_f32"), verdict("healthy_bf16")
    assert float32.details["scale"] < 1e-5 < bf16.details["scale"] < bf16.floor
    assert float32.healthy
    assert float32.correction is None


def test_both_sides_in_bf16_are_healthy() -> None:
    """Of two sides that run in bf16 a simulated one explains half, and neither is the odd one."""
    assert verdict("healthy_bf16").causes == ("healthy",)
    assert verdict("healthy_autocast", 1).causes == ("healthy",)


def test_the_correction_fits_a_loss() -> None:
    correction = verdict("weights_fp8").correction
    assert correction is not None
    spec = pl.preset("dapo").replace(correction=correction)
    assert spec.correction == correction


def test_a_cause_below_the_floor_needs_no_remedy_and_no_correction() -> None:
    found = verdict("logp_bf16")
    assert found.details["scale"] < found.floor
    assert found.remedy.startswith("No action needed")
    assert found.title == "log-probabilities stored in bf16: harmless"
    assert found.correction is None
    assert "if you must train" not in str(found)


def test_nothing_is_explained_where_noise_has_no_shape() -> None:
    found = verdict("noise")
    assert found.cause == "not_explained"
    assert [place.tag for place in found.places] == ["uniform"]
    assert "temperature" in found.ruled_out
    assert "after the softmax" in found.remedy


def test_weights_are_as_before() -> None:
    model = source().model()
    before = {name: w.clone() for name, w in model.named_parameters()}
    verdict("weights_fp8", 1)
    assert all(torch.equal(w, before[name]) for name, w in model.named_parameters())
    assert not model.training


class Adapted(nn.Module):
    """A model with a low-rank change of its matrices that can be left out, as peft's can."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.config = model, model.config
        draw = torch.Generator().manual_seed(0)
        self.change = {
            name: 0.01 * torch.randn(w.shape, generator=draw)
            for name, w in model.named_parameters()
            if "proj" in name
        }
        self.on = True

    def changed(self) -> Any:
        return alter_weights(
            self.inner, lambda n, w: w + self.change[n] if self.on and n in self.change else None
        )

    def forward(self, **arguments: Any) -> Any:
        with self.changed():
            return self.inner(**arguments)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.on = False
        yield
        self.on = True

    def merge_and_unload(self) -> Any:
        for name, w in self.inner.named_parameters():
            w.data += self.change.get(name, 0.0)
        return self.inner


@pytest.mark.parametrize("cause", ["adapter_missing", "adapter_merged"])
def test_an_adapter_is_missed(cause: str) -> None:
    base = copy.deepcopy(source().model()).bfloat16().float()
    adapted = Adapted(base).eval()
    plain = source().rollout("plain", 0, SMALL)
    if cause == "adapter_missing":
        with adapted.disable_adapter():
            engine = score(plain, adapted)
    else:
        engine = score(plain, copy.deepcopy(adapted).merge_and_unload().bfloat16().float())
    roll = Rollout(plain.ids, plain.mask, engine, plain.prompts)
    made = batch_of(roll, adapted, (cause,))
    found = lab.doctor(**made.arguments, model=adapted, prompts=made.prompts)
    assert found.causes == (cause,), str(found)


def test_another_template_that_is_passed_is_simulated() -> None:
    made = batch("template")
    others = [[p[0], 17, 90, *p[1:]] for p in made.prompts]
    found = lab.doctor(
        **made.arguments, model=made.model, prompts=made.prompts, other_prompts=others
    )
    assert found.cause == "template"
    assert found.details["scale_left"] < 1e-4


def test_packed_tokens_and_ids_with_their_prompt_give_the_same_verdict() -> None:
    made = batch("temperature")
    a = made.arguments
    lengths = a["mask"].sum(1)
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packed = lab.doctor(
        rollout_logp=a["rollout_logp"][a["mask"]],
        old_logp=a["old_logp"][a["mask"]],
        cu_seqlens=bounds,
    )
    padded = lab.doctor(**a)
    assert packed.details["temperature"] == padded.details["temperature"]
    width = max(map(len, made.prompts))
    left = torch.zeros(len(made.prompts), width, dtype=torch.long)
    for i, p in enumerate(made.prompts):
        left[i, width - len(p) :] = torch.tensor(p)
    none = torch.zeros(left.shape)
    positions = torch.arange(width + a["ids"].shape[1]).expand(len(left), -1)
    positions = positions - (width - torch.tensor([len(p) for p in made.prompts]))[:, None]
    whole = lab.doctor(
        ids=torch.cat([left, a["ids"]], 1),
        mask=torch.cat([none.bool(), a["mask"]], 1),
        rollout_logp=torch.cat([none, a["rollout_logp"]], 1),
        old_logp=torch.cat([none, a["old_logp"]], 1),
        positions=positions,
        model=made.model,
    )
    assert whole.details["temperature"] == pytest.approx(
        verdict("temperature").details["temperature"], rel=1e-9
    )


@pytest.mark.parametrize("wrong", [["a"], [128], [-1], 7, None])
def test_prompts_that_are_no_token_ids_are_refused(wrong: Any) -> None:
    made = batch("temperature")
    prompts = [*made.prompts[:3], wrong, *made.prompts[4:]]
    with pytest.raises(pl.InputError, match="prompts, row 3, is not a list of token ids from 0 to"):
        lab.doctor(**made.arguments, model=made.model, prompts=prompts)


def test_an_engine_has_no_dropout() -> None:
    """old_logp is that of the model here, so that dropout in the trainer cannot be the cause, even
    though the engine's noise is that of dropout.
    """
    made = batch("dropout")
    a = made.arguments
    swapped = {**a, "rollout_logp": a["old_logp"], "old_logp": a["rollout_logp"]}
    found = lab.doctor(**swapped, model=made.model, prompts=made.prompts)
    assert "dropout" not in found.causes


def test_numbers_missing_at_the_end_of_rows_differ_from_float32_noise() -> None:
    """The end token is missing, and the token before it has ten times the noise of the others."""
    made = batch("end_token")
    a = {name: x.clone() for name, x in made.arguments.items()}
    last = a["mask"].sum(1) - 1
    a["rollout_logp"][torch.arange(SMALL), last - 1] += 1e-5
    assert lab.doctor(**a).causes == ("end_token",)


def test_ids_that_differ_are_certain() -> None:
    a = batch("healthy_f32").arguments
    other = a["ids"].clone()
    other[2, 3:6] += 1
    found = lab.doctor(**a, rollout_ids=other)
    assert found.cause == "reencoded"
    assert "3 of" in found.evidence[0]
    assert lab.doctor(**a, rollout_ids=a["ids"]).healthy


@pytest.mark.parametrize("name", ["temperature", "top_p", "healthy_bf16", "template"])
def test_the_transcripts_of_the_page_are_real(name: str) -> None:
    page = (RECORDED.parents[2] / "docs" / "doctor.md").read_text()
    title, _, *others = str(verdict(name)).split("\nif you must train")[0].splitlines()
    assert all(line in page for line in (title, *others))


def test_a_diagnosis_reads_as_text_json_and_html() -> None:
    found = verdict("temperature")
    assert str(found).startswith("a temperature on one side only (confidence")
    assert "if you must train before that, give the loss correction=Truncate(high=2.0" in str(found)
    data = found.to_dict()
    assert data["cause"] == "temperature"
    assert data["alternatives"][0]["unexplained"] > 0.05
    shares = [float(cell) for cell in re.findall(r"<td>(-?\d+)%</td>", found._repr_html_())]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(share >= 5 for share in shares) == len(shares) < len(found.alternatives)


def test_a_lost_shard_is_told_by_its_ids() -> None:
    """The batch has 0 for the logits of the first quarter of 128 ids."""
    sentence = verdict("vocab_shard").evidence[-1]
    assert "old_logp treats as 0 the logits of ids 0 to 31, vocabulary shard 1 of 4;" in sentence


def test_each_cause_has_a_family_and_a_remedy() -> None:
    assert {cause.family for cause in CAUSES.values()} == set(FAMILIES)
    assert all(cause.remedy for name, cause in CAUSES.items() if name != "not_explained")


def test_a_family_that_is_named_is_not_ruled_out() -> None:
    """Noise rules out another order, until the ids of the engine show one."""
    a = batch("noise").arguments
    other = a["ids"].clone()
    other[2, 3:6] += 1
    assert "order" in lab.doctor(**a).ruled_out
    found = lab.doctor(**a, rollout_ids=other)
    assert (found.cause, found.ruled_out, found.places) == ("reencoded", (), ())
    assert "ruled out" not in str(found)


def test_the_benchmark_leaves_out_a_batch_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = Batch({"mask": torch.ones(3, 5, dtype=torch.bool)}, ())
    monkeypatch.setitem(HEALTHY, "healthy_f32", lambda source, seed, rows: tiny)
    job = {"fault": "healthy_f32", "seed": 0, "rows": 3, "bf16": True}
    assert not list(rows_of(job, TorchSource("opt_random")))


def test_the_confidence_is_the_measured_one() -> None:
    results = RECORDED.parents[2] / "benchmarks" / "results" / "doctor_heldout.json"
    assert json.loads(results.read_text())["confidence"] == diagnosing.CONFIDENCE
