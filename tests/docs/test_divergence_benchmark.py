"""The benchmark of divergences on a tiny shape: its gate, its targets, and its section of the page.

Its gate is also a comparison with plain PyTorch, and with TRL's and Liger's heads where they are
unpacked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import divergence
from benchmarks.head_data import Shape
from docs.performance_page import performance_page

PAIR = divergence.make_pair(Shape(2, 12, 61, 16), "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "run.json"
    options = ["--shape", "2,12,61,16", "--rounds", "1", "--no-peers", "--out", str(out)]
    assert divergence.main(options) == 0
    data: dict[str, Any] = json.loads(out.read_text())
    return data


@pytest.mark.slow
def test_every_provider_of_ours_is_right(run: dict[str, Any]) -> None:
    assert run["failures"] == []
    for kind, group in run["groups"].items():
        for name in (divergence.ALONE, divergence.ONE_PASS, divergence.WITH_POLICY):
            errors = group[name]["errors"]
            assert errors["loss"] < 1e-6, (kind, name)
            assert max(errors["d_hidden"], errors["d_weight"]) < 3e-5, (kind, name)


@pytest.mark.slow
def test_a_wrong_provider_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = divergence.alone

    def wrong(pair: divergence.Pair, kind: str, beta: float) -> divergence.Run:
        found = right(pair, kind, beta)()
        return lambda: found._replace(d_weight=2 * found.d_weight)

    monkeypatch.setattr(divergence, "alone", wrong)
    bench = divergence.Bench(PAIR, None, 1)
    bench.run("jsd")
    assert [f["provider"] for f in bench.failures] == [divergence.ALONE]
    assert "d_weight" in bench.failures[0]["reason"]
    assert divergence.ALONE not in bench.groups["jsd"]


def test_the_float64_answer_by_hand() -> None:
    """Two entries, one token: p_s = (½, ½), p_t = (¼, ¾)."""
    z = torch.zeros(1, 2, dtype=torch.float64)
    u = torch.tensor([[0.25, 0.75]], dtype=torch.float64).log()
    forward = 0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()
    assert divergence.per_token(z, u, 0.0).item() == pytest.approx(forward.item(), rel=1e-6)
    reverse = 0.5 * (torch.tensor(2.0).log() + torch.tensor(2 / 3).log())
    assert divergence.per_token(z, u, 1.0).item() == pytest.approx(reverse.item(), rel=1e-6)


@pytest.mark.slow
def test_targets_and_page(run: dict[str, Any]) -> None:
    def group(ours: float, both: float, trl: float) -> dict[str, Any]:
        times = {
            divergence.FOUR: 100.0,
            divergence.ONE_PASS: ours,
            divergence.WITH_POLICY: both,
            divergence.TRL: trl,
        }
        return {name: {"median_ms": ms} for name, ms in times.items()}

    met = divergence.targets({"forward": group(117, 122, 170), "jsd": group(126, 130, 200)})
    assert [t["met"] for t in met] == [True, True, True, False, False, True]
    assert [t["id"] for t in met] == ["T11", "T11", "T12"] * 2
    page = performance_page({"divergence_cpu": run})
    assert "## A teacher's distributions on a CPU" in page
    assert "### KL(teacher, student)" in page
    assert "| **policyloss, one pass** |" in page
    assert "with PPO's loss / without" in page


@pytest.mark.parametrize("kind", divergence.KINDS)
def test_peers_agree_where_they_lie(kind: str) -> None:
    folder = Path("peers")
    if not folder.is_dir():
        pytest.skip("no folder of peers (make peers)")
    answer = divergence.exact(PAIR, divergence.KINDS[kind])
    for make in (divergence.trl, divergence.liger):
        errors = divergence.errors(make(PAIR, divergence.KINDS[kind], folder)(), answer)
        assert max(errors.values()) < 1e-4, make
