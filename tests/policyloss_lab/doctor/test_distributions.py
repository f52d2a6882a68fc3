"""Whole distributions of engine and trainer: by hand, as bounds, and with known faults."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import policyloss as pl
import policyloss_lab as lab
from policyloss.cli import main
from policyloss.errors import InputError
from policyloss_lab.diagnosis.distributions import DistributionThresholds

OLD = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()


def random_logp(rows: int = 40, size: int = 50, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    return z.log_softmax(-1)


def top(logp: Tensor, k: int) -> pl.TopK:
    values, ids = logp.topk(k, -1)
    return pl.TopK.sorted(ids, values)


def test_numbers_by_hand() -> None:
    rollout = torch.tensor([[0.4, 0.4, 0.2]], dtype=torch.float64).log()
    gap = lab.compare_distributions(rollout, OLD)
    # 0.4·ln(0.4/0.5) + 0.4·ln(0.4/0.3), and 0.5·ln(0.5/0.4) + 0.3·ln(0.3/0.4)
    assert gap.kl_rollout_old == pytest.approx((0.0258154,) * 2, abs=1e-7)
    assert gap.kl_old_rollout == pytest.approx((0.0252672,) * 2, abs=1e-7)
    assert gap.by_rank == pytest.approx((math.log(5 / 4), math.log(4 / 3), 0.0), abs=1e-12)
    assert (gap.swapped, gap.first_differs, gap.top) == (0.0, 0.0, None)  # a tie is no swap
    assert isinstance(gap, lab.DistributionGap)
    assert not gap.healthy


def test_ranks_by_hand() -> None:
    """The engine has the first two tokens in the other order: one of two neighbouring ranks."""
    rollout = torch.tensor([[0.3, 0.5, 0.2]], dtype=torch.float64).log()
    gap = lab.compare_distributions(torch.cat([rollout, OLD]), torch.cat([OLD, OLD]))
    assert (gap.swapped, gap.first_differs) == (0.25, 0.5)
    assert gap.by_rank[:2] == pytest.approx((math.log(5 / 3),) * 2)
    # One position of two differs, by 0.3·ln(0.3/0.5) + 0.5·ln(0.5/0.3) = 0.2·ln(5/3).
    assert gap.kl_rollout_old == pytest.approx((0.1 * math.log(5 / 3), 0.2 * math.log(5 / 3)))


def test_top_k_by_hand() -> None:
    """Both know token 0; all others are one class: 0.4·ln(0.4/0.5) + 0.6·ln(0.6/0.5)."""
    rollout = pl.TopK.sorted(torch.tensor([[0, 2]]), torch.tensor([[0.4, 0.35]]).double().log())
    gap = lab.compare_distributions(rollout, top(OLD, 2))
    assert gap.top == 2
    assert gap.kl_rollout_old[0] == pytest.approx(0.4 * math.log(0.8) + 0.6 * math.log(1.2))
    assert gap.kl_old_rollout[0] == pytest.approx(0.5 * math.log(1.25) + 0.5 * math.log(5 / 6))
    assert gap.by_rank == pytest.approx((math.log(1.25), 0.0))
    assert gap.first_differs == 0.0
    other = pl.TopK(torch.tensor([[1, 2]]), torch.tensor([[0.4, 0.5]]).double().log())
    assert lab.compare_distributions(other, top(OLD, 2)).first_differs == 1.0  # token 2
    assert "lower bounds" in str(gap)


@pytest.mark.parametrize("k", [1, 2, 5, 20, 50])
def test_top_k_is_a_lower_bound_and_exact_with_all_entries(k: int) -> None:
    rollout, old = random_logp(seed=1), random_logp(seed=2)
    exact = lab.compare_distributions(rollout, old)
    for sides in ((top(rollout, k), top(old, k)), (rollout, top(old, k)), (top(rollout, k), old)):
        part = lab.compare_distributions(*sides)
        for ours, theirs in zip(
            (part.kl_rollout_old, part.kl_old_rollout),
            (exact.kl_rollout_old, exact.kl_old_rollout),
            strict=True,
        ):
            assert ours[0] <= theirs[0] + 1e-6
            assert k < 50 or ours == pytest.approx(theirs, abs=1e-5)


def test_shapes_and_noise_of_bf16_are_healthy() -> None:
    old = random_logp(24, 300)
    rollout = (old + 20).bfloat16().float().log_softmax(-1)
    gap = lab.compare_distributions(rollout.reshape(4, 6, 300), old.reshape(4, 6, 300))
    assert gap.healthy
    assert gap.temperature is None
    assert gap.positions == 24
    assert lab.compare_distributions(old, old).kl_rollout_old == (0.0, 0.0)


@pytest.mark.parametrize("k", [None, 20])
def test_a_temperature_is_found(k: int | None) -> None:
    old = random_logp()
    rollout = (old / 0.7).log_softmax(-1)
    gap = lab.compare_distributions(*((top(x, k) if k else x) for x in (rollout, old)))
    assert gap.temperature == pytest.approx(0.7)
    assert gap.swapped == 0.0
    assert "rollout is old at a temperature of 0.7" in str(gap)


def test_a_cut_of_the_engine_is_found() -> None:
    """KL(old‖rollout) is infinite, and KL(rollout‖old) is -log of the mass that the cut keeps."""
    old = random_logp()
    kept = old >= old.topk(4, -1).values[:, -1:]
    rollout = old.masked_fill(~kept, -math.inf).log_softmax(-1)
    gap = lab.compare_distributions(rollout, old)
    mass = old.exp().mul(kept).sum(-1)
    assert gap.kl_rollout_old[0] == pytest.approx(float(-mass.log().mean()))
    assert gap.kl_old_rollout == (math.inf, math.inf)
    assert gap.by_rank[4] == math.inf
    assert gap.temperature is None
    assert "one side excludes tokens" in str(gap)
    assert json.loads(gap.to_json())["kl_old_rollout"] == ["inf", "inf"]


def forward(faulty: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The hidden states of a small residual network; one layer may have lost its scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 64, generator=generator).to(dtype)
    states = {}
    for i in range(12):
        weight = torch.randn(64, 64, generator=generator) / 8
        out = x @ weight.to(dtype)
        x = x + (out if i == faulty else 0.5 * torch.tanh(out))
        states[f"layers.{i}"] = x
    return states


def test_the_first_layer_that_differs_is_named() -> None:
    old, noisy, faulty = (
        forward(*x) for x in [(None, torch.float64), (None, torch.bfloat16), (7, torch.bfloat16)]
    )
    same = random_logp()
    healthy = lab.compare_distributions(same, same, rollout_hidden=noisy, old_hidden=old)
    assert healthy.parted is None
    assert healthy.healthy
    sick = lab.compare_distributions(same, same, rollout_hidden=faulty, old_hidden=old)
    assert sick.parted == "layers.7"
    assert sick.hidden["layers.6"] < 0.05 < sick.hidden["layers.7"]
    assert not sick.healthy
    assert "hidden states part at layers.7" in str(sick)
    d = (faulty["layers.7"].double() - old["layers.7"]).norm() / old["layers.7"].norm()
    assert sick.hidden["layers.7"] == pytest.approx(float(d))
    strict = DistributionThresholds(hidden=1e-6)
    found = lab.compare_distributions(
        same, same, rollout_hidden=noisy, old_hidden=old, thresholds=strict
    )
    assert found.parted == "layers.0"


@pytest.mark.parametrize(
    ("rollout", "old", "hidden", "words"),
    [
        (3 * OLD, OLD, {}, "rollout must hold log-probabilities"),
        (OLD, OLD * math.nan, {}, "old must hold log-probabilities"),
        (OLD.expand(2, 3), OLD, {}, "rollout has the shape [2, 3] and old [1, 3]"),
        (OLD[:, :2].log_softmax(-1), OLD, {}, "rollout has the shape [1, 2] and old [1, 3]"),
        (top(OLD.expand(2, 3), 2), OLD, {}, "rollout has 2 positions and old 1"),
        (pl.TopK(torch.tensor([[0, 1]]), torch.zeros(1, 2)), OLD, {}, "rollout must hold"),
        (OLD[:0], OLD[:0], {}, "have no positions"),
        (OLD, OLD, {"b": torch.ones(1)}, "rollout_hidden (a) and old_hidden (b) have no name"),
        (OLD, OLD, {"a": torch.ones(2)}, "rollout_hidden['a'] is (1,) and old_hidden (2,)"),
        (OLD.long(), OLD, {}, "rollout must be a floating-point tensor"),
    ],
)
def test_bad_input_is_named(rollout: Any, old: Any, hidden: Any, words: str) -> None:
    with pytest.raises(InputError) as error:
        lab.compare_distributions(
            rollout, old, rollout_hidden={"a": torch.ones(1)}, old_hidden=hidden
        )
    assert words in str(error.value)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header, body = {}, b""
    for name, x in tensors.items():
        data = x.contiguous().numpy().tobytes()
        kind = {torch.int64: "I64", torch.float32: "F32"}[x.dtype]
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_the_command_reads_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers are compared in the order of their numbers, not of their letters."""
    old = random_logp().float()
    hot = (old / 1.5).log_softmax(-1)
    values, ids = hot.topk(8, -1)
    path = tmp_path / "a.safetensors"
    states = {f"rollout_hidden.{name}": x.float() for name, x in forward(2, torch.float32).items()}
    states |= {f"old_hidden.{name}": x.float() for name, x in forward(None, torch.float32).items()}
    states = dict(sorted(states.items()))
    assert list(states)[2] == "old_hidden.layers.10"
    write_safetensors(
        path, {"old_all_logp": old, "rollout_top_ids": ids, "rollout_top_logp": values, **states}
    )
    assert main(["doctor", str(path)]) == 1
    text = capsys.readouterr().out
    assert "temperature of 1.5" in text
    assert "the top 8 of each side" in text
    assert "hidden states part at layers.2;" in text
    assert main(["doctor", str(path), "--threshold", "kl=9", "--threshold", "hidden=9"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(path), "--model", "x"]) == 2
    assert "--model needs a file of tokens" in capsys.readouterr().err


def test_the_command_reads_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"rollout_all_logp": x, "old_all_logp": x} for x in random_logp(4, 6).tolist()]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["doctor", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["positions"] == 4
    path.write_text(path.read_text() + '\n{"rollout_all_logp": [0.0]}')
    assert main(["doctor", str(path)]) == 2
    assert "each line needs the same lists" in capsys.readouterr().err
    path.write_text('{"rollout_all_logp": [0.0]}')
    assert main(["doctor", str(path)]) == 2
    assert "has no old_all_logp" in capsys.readouterr().err
