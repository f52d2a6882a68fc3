"""How the diagnosis from logs is counted, and what other tools are shown."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import doctor_logs_table as counts
from benchmarks.doctor_logs_plan import HEALTHY, KINDS
from docs.doctor_logs_page import doctor_logs_pages

SICK = {"kind": "nan", "symptoms": ["nonfinite"], "effects": ["no_learning"]}
WELL = {"kind": HEALTHY, "symptoms": [], "effects": []}


def names(**meanings: str) -> counts.Names:
    return {name: frozenset(words.split()) for name, words in meanings.items()}


def test_a_name_is_found_an_effect_or_a_stray() -> None:
    verdict = counts.judged(SICK, names(a="nonfinite", b="no_learning", c="kl_drift truncation"))
    assert verdict == {"names": ["a", "b", "c"], "found": True, "noticed": True, "strays": ["c"]}
    only_effect = counts.judged(SICK, names(b="no_learning"))
    assert (only_effect["found"], only_effect["noticed"], only_effect["strays"]) == (0, 1, [])
    # An ambiguous verdict counts as the right one of its meanings.
    assert counts.judged(SICK, names(c="kl_drift nonfinite"))["strays"] == []
    assert counts.judged(WELL, names(b="no_learning"))["strays"] == ["b"]
    assert not counts.judged(WELL, {})["noticed"]


def test_counts_are_of_runs() -> None:
    runs = [
        (SICK, counts.judged(SICK, names(a="nonfinite", b="kl_drift", c="truncation"))),
        (SICK, counts.judged(SICK, {})),
        (WELL, counts.judged(WELL, names(a="nonfinite", b="kl_drift"))),
        (WELL, counts.judged(WELL, {})),
    ]
    kinds = counts.counted(runs)
    assert kinds["nan"] == {"runs": 2, "found": 1, "noticed": 1, "strays": 1}
    assert kinds[HEALTHY] == {"runs": 2, "found": 0, "noticed": 1, "strays": 1}
    assert counts.line_of("us", kinds) == (
        "us: 1 of 2 faults named, 1 noticed; false alarms in 1 of 2 healthy runs"
    )


def test_every_meaning_is_a_symptom_of_the_plan() -> None:
    valid = {name for kind in KINDS.values() for name in (*kind.symptoms, *kind.effects)}
    for meanings in (counts.RLDOCTOR_MEANING, counts.RLWATCH_MEANING):
        assert {word for words in meanings.values() for word in words} <= valid


def test_others_are_shown_the_numbers_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Suite:
        def __init__(self, config: str) -> None:
            assert config == "defaults"

        def check_step(self, step: int, **numbers: float) -> list[Any]:
            shown.append((step, numbers))
            return [SimpleNamespace(detector="loss_nan")] if step == 2 else []

    modules = {
        "rlwatch.config": SimpleNamespace(RLWatchConfig=lambda: "defaults"),
        "rlwatch.detectors": SimpleNamespace(DetectorSuite=Suite),
    }
    monkeypatch.setattr(counts, "import_module", modules.__getitem__)
    rows = [{"step": 0.0, "eval/accuracy": 0.1}]
    rows += [{"step": s, "policy/kl_ref": 0.5, "grad_norm": 2.0, "other": 1.0} for s in (1.0, 2.0)]
    assert counts.rlwatch(rows, {}) == {"loss_nan": frozenset(["nonfinite"])}
    # Step 0 holds no known metric.
    assert shown == [(s, {"kl_divergence": 0.5, "grad_norm": 2.0}) for s in (1, 2)]


def test_the_page_shows_the_counts(tmp_path: Path) -> None:
    kinds = {
        "nan": {"runs": 3, "found": 2, "noticed": 3, "strays": 1},
        HEALTHY: {"runs": 7, "found": 0, "noticed": 1, "strays": 1},
    }
    verdicts = {"healthy-a-1": {"strays": ["kl_drift"]}, "nan-b-2": {"strays": ["truncation"]}}
    tools = {"us": {"kinds": kinds, "verdicts": verdicts}}
    data = {"versions": {"rldoctor": "8.7", "rlwatch": "6.5"}, "sets": {"first": tools}}
    file = tmp_path / "doctor_logs.json"
    assert doctor_logs_pages(file) == {}
    file.write_text(json.dumps(data))
    (page,) = doctor_logs_pages(file).values()
    assert "| us | 2 of 3 | 3 of 3 | 1 of 3 | 1 of 7 |" in page
    assert "| `nan` | NaN in the advantages | 3 | 2 |" in page
    assert "- us: `kl_drift` 1×" in page
    assert "truncation" not in page.split("## What")[0]
    assert "rldoctor 8.7" in page
