"""ColossalChat's drop-ins: 60 recorded cases, numbers done by hand,
and `install()` on a package made for the test.
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import rows
from walk import walked

import policyloss as pl
from policyloss.compat import colossalai
from policyloss.compat.colossalai import models

CASES = json.loads((Path(__file__).parents[2] / "golden" / "coati.json").read_text())["cases"]
CLASSES: dict[str, Any] = {
    "coati.distributed.loss.PolicyLoss": colossalai.PolicyLoss,
    "coati.models.loss.PolicyLoss": models.PolicyLoss,
    "coati.models.loss.ValueLoss": models.ValueLoss,
}


@walked("i", range(len(CASES)))
def test_recorded_case(i: int):
    case = CASES[i]
    leaf = "values" if "values" in case["inputs"] else "log_probs"
    inputs = {
        k: torch.tensor(x, dtype=torch.float64) if isinstance(x, list) else x
        for k, x in case["inputs"].items()
    }
    inputs[leaf].requires_grad_()
    result = CLASSES[case["api"]](**case["init"])(**inputs)
    values = result if isinstance(result, tuple) else (result,)
    names = {1: ("loss",), 2: ("loss", "ratio_max"), 3: ("loss", "skip", "ratio_max")}[len(values)]
    assert {*names, f"grad_{leaf}"} == set(case["outputs"])
    values[0].backward()
    for name, value in zip(names, values, strict=True):
        want = case["outputs"][name]
        if name == "skip":
            assert value is want
        else:
            assert abs(value.item() - want) <= 1e-12 * max(1.0, abs(want)), name
    want = torch.tensor(case["outputs"][f"grad_{leaf}"], dtype=torch.float64)
    assert ((inputs[leaf].grad - want).abs() <= 1e-12 * want.abs().clamp(min=1)).all()


def test_the_recorded_cases_are_all_there():
    counts = {api: sum(case["api"] == api for case in CASES) for api in CLASSES}
    assert list(counts.values()) == [48, 6, 6]


# --- coati.distributed.loss -----------------------------------------------------------------------

# Three rows: two tokens, one, none. Ratios 1.5, 0.5 | 2 | –;
# with eps 0.2 and A = 1, −2 | −1: −1.2, 1.6 | 2.
RATIO = rows([[1.5, 0.5], [2, 9], [9, 9]])
ADVANTAGES = rows([[1, -2], [-1, 5], [5, 5]])
MASK = rows([[1, 1], [1, 0], [0, 0]])
PENALTY = rows([[10, 20], [30, 1e6], [1e6, 1e6]])
E = 1e-8


def run(loss: Any, mask: Any = MASK, **more: Any) -> Any:
    zero = torch.zeros_like(RATIO)
    return loss(RATIO.log(), zero, ADVANTAGES, PENALTY, mask, **more)


def test_sample_level_counts_every_row():
    # beta·kl is added: −1.2 + 1, 1.6 + 2 | 2 + 3 with beta 0.1; lengths have 1e-8 added;
    # three rows, one of them empty.
    loss, largest = run(colossalai.PolicyLoss(beta=0.1))
    assert loss.item() == pytest.approx(((-0.2 + 3.6) / (2 + E) + 5 / (1 + E)) / 3, rel=1e-14)
    assert largest.item() == pytest.approx(2, rel=1e-14)
    # In a mask of any other kind the 1e-8 is rounded away.
    assert run(colossalai.PolicyLoss(beta=0.1), MASK.int())[0].item() == pytest.approx(
        (1.7 + 5) / 3, rel=1e-14
    )


def test_loss_mask_leaves_samples_out_of_the_sum_only():
    keep = torch.tensor([False, True, True])
    loss, largest = run(colossalai.PolicyLoss(beta=0.1), loss_mask=keep)
    assert loss.item() == pytest.approx(5 / (1 + E) / 3, rel=1e-14)
    assert largest.item() == pytest.approx(2, rel=1e-14)
    other, largest = run(colossalai.PolicyLoss(beta=0.1), loss_mask=~keep)
    assert other.item() == pytest.approx((3.4 / (2 + E)) / 3, rel=1e-14)
    assert largest.item() == pytest.approx(2, rel=1e-14)  # also from a sample that is left out


def test_a_masked_token_has_ratio_one():
    mask = rows([[0, 1], [0, 0], [0, 0]])  # the one valid ratio is ½
    assert run(colossalai.PolicyLoss(), mask)[1].item() == 1
    assert run(colossalai.PolicyLoss(), None)[1].item() == pytest.approx(9, rel=1e-14)


def test_token_level_divides_by_the_tokens_of_the_step():
    loss = colossalai.PolicyLoss(beta=0.1, loss_variation="token_level")
    assert run(loss, total_effective_tokens_in_batch=7.0)[0].item() == pytest.approx(
        (3.4 + 5) / (7 + E), rel=1e-15
    )
    # The divisor is an integer tensor: 1e-8 is lost in float32.
    count = torch.tensor(7)
    assert run(loss, total_effective_tokens_in_batch=count)[0].item() == pytest.approx(
        (3.4 + 5) / 7, rel=1e-15
    )
    left_out = torch.tensor([0, 1, 1])
    got = run(loss, loss_mask=left_out, total_effective_tokens_in_batch=7.0)
    assert got[0].item() == pytest.approx(5 / (7 + E), rel=1e-15)
    with pytest.raises(pl.InputError, match="total_effective_tokens_in_batch"):
        run(loss)


def test_the_penalty_keeps_its_gradient():
    logp, penalty = RATIO.log().requires_grad_(), PENALTY.clone().requires_grad_()
    loss, _ = colossalai.PolicyLoss(beta=0.1, loss_variation="token_level")(
        logp, torch.zeros_like(RATIO), ADVANTAGES, penalty, MASK, None, 7.0
    )
    loss.backward()
    torch.testing.assert_close(penalty.grad, 0.1 * MASK / (7 + E), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        logp.grad, rows([[0, 0], [2 / (7 + E), 0], [0, 0]]), rtol=1e-12, atol=0
    )
    without = colossalai.PolicyLoss(beta=0.0, returns="loss")
    assert without(
        logp, torch.zeros_like(RATIO), ADVANTAGES, None, MASK.int()
    ).item() == pytest.approx((0.2 + 2) / 3, rel=1e-14)
    with pytest.raises(pl.InputError, match="per_token_kl"):
        colossalai.PolicyLoss()(logp, torch.zeros_like(RATIO), ADVANTAGES, None, MASK)


def test_the_loss_alone_on_request():
    alone = run(colossalai.PolicyLoss(returns="loss"))
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, run(colossalai.PolicyLoss())[0])


def test_nothing_valid_is_zero():
    for words, more in (
        ({}, {}),
        ({"loss_variation": "token_level"}, {"total_effective_tokens_in_batch": torch.tensor(0)}),
    ):
        loss, largest = run(colossalai.PolicyLoss(**words), torch.zeros_like(MASK), **more)
        assert (loss.item(), largest.item()) == (0, 1)


def test_the_log_ratio_is_not_clamped():
    loss, largest = colossalai.PolicyLoss(beta=0)(rows(30.0), rows(0.0), rows(-1.0), None)
    assert loss.item() == pytest.approx(exp(30), rel=1e-14)
    assert largest.item() == pytest.approx(exp(30), rel=1e-14)


def test_wrong_arguments_are_named():
    with pytest.raises(pl.SpecError, match=r"loss_variation.*sample_level, token_level"):
        colossalai.PolicyLoss(loss_variation="token-level")
    with pytest.raises(pl.SpecError, match=r"returns.*loss, tuple"):
        colossalai.PolicyLoss(returns="both")  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="0 and 1"):
        run(colossalai.PolicyLoss(), loss_mask=torch.tensor([0.5, 1, 1]))
    with pytest.raises(pl.SpecError, match="clip_eps"):
        models.ValueLoss(0.0)


def test_attributes_as_upstream():
    loss = colossalai.PolicyLoss(0.1, 0.3, 0.02, "token_level", "DAPO")
    assert (loss.clip_eps_low, loss.clip_eps_high, loss.beta) == (0.1, 0.3, 0.02)
    assert (loss.loss_variation, loss.adv) == ("token_level", "DAPO")


# --- coati.models.loss ----------------------------------------------------------------------------


def test_the_older_loss_bounds_the_ratio_by_ten_and_returns_a_skip():
    # Ratios 100, 1, 1, 1 in one row: mean 25.75 is above 20. A = −1: the ratio counts as 10,
    # without a gradient: (10 + 3)/4.
    logp = rows([log(100), 0, 0, 0]).requires_grad_()
    old, a = torch.zeros(1, 4, dtype=torch.float64), torch.full((1, 4), -1.0, dtype=torch.float64)
    loss, skip, largest = models.PolicyLoss()(logp, old, a)
    assert loss.item() == pytest.approx(13 / 4, rel=1e-14)
    assert skip is True
    assert largest.item() == pytest.approx(100, rel=1e-14)
    loss.backward()
    torch.testing.assert_close(logp.grad, rows([0, 0.25, 0.25, 0.25]), rtol=1e-12, atol=0)
    assert models.PolicyLoss(skip_threshold=30.0)(logp, old, a)[1] is False
    # Masked, the others still count as ratio 1 in the mean over all positions.
    assert models.PolicyLoss(skip_threshold=25.7)(logp, old, a, rows([1, 0, 0, 0]))[1] is True
    assert models.PolicyLoss().spec.ratio == pl.TokenRatio(log_clamp=(None, log(10)))


def test_the_older_value_loss():
    # Returns = advantage + old: 1, −2 | 5. v − R: 1 − 1 = 0 but clipped at 0.2: 0.8² ;
    # 0 + 2 → 4, clipped the same; 4 − 5.
    v, old, advantage = rows([[1, 0], [4, 9]]), rows([[0, 0], [4, 0]]), rows([[1, -2], [1, 0]])
    got = models.ValueLoss()(v, old, advantage, rows([[1, 1], [1, 0]]))
    assert got.item() == pytest.approx((0.64 + 4 + 1) / 2 / 3, rel=1e-14)
    # Without a mask the fourth token counts: v 9, R 0: 81.
    assert models.ValueLoss()(v, old, advantage).item() == pytest.approx(
        (0.64 + 4 + 1 + 81) / 2 / 4, rel=1e-14
    )
    assert models.ValueLoss()(v, old, advantage, torch.zeros(2, 2)).item() == 0


# --- install() ------------------------------------------------------------------------------------


def _source(cls: Any, name: str = "") -> str:
    """A class with the arguments of ours, as upstream would write it."""

    def places(method: Any) -> str:
        return ", ".join(
            p
            for p, kind in inspect.signature(method).parameters.items()
            if kind.kind is not kind.KEYWORD_ONLY
        )

    return (
        f"class {cls.__name__}:\n"
        f"    def __init__({places(cls.__init__)}): ...\n"
        f"    def forward({places(cls.forward)}{name}): ...\n"
    )


@pytest.fixture
def coati(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes an importable `coati` of the given modules."""

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "coati" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    colossalai.uninstall()
    for name in [n for n in sys.modules if n == "coati" or n.startswith("coati.")]:
        del sys.modules[name]


DISTRIBUTED = {
    "__init__": "",
    "distributed/__init__": "",
    "distributed/loss": _source(colossalai.PolicyLoss),
    "distributed/consumer": "from coati.distributed.loss import PolicyLoss\n",
}
MODELS = {
    "models/__init__": "from .loss import PolicyLoss, ValueLoss\n",
    "models/loss": _source(models.PolicyLoss) + _source(models.ValueLoss),
}


def test_install_reaches_every_binding(coati):
    coati(DISTRIBUTED | MODELS)
    consumer = import_module("coati.distributed.consumer")
    theirs = consumer.PolicyLoss
    names = [
        "coati.distributed.loss.PolicyLoss",
        "coati.models.loss.PolicyLoss",
        "coati.models.loss.ValueLoss",
    ]
    assert colossalai.install() == names
    assert colossalai.install() == names  # once more changes nothing
    package = import_module("coati.models")
    assert consumer.PolicyLoss is colossalai.PolicyLoss
    assert package.PolicyLoss is models.PolicyLoss
    assert package.ValueLoss is package.loss.ValueLoss is models.ValueLoss
    colossalai.uninstall()
    assert consumer.PolicyLoss is theirs
    assert package.ValueLoss is package.loss.ValueLoss is not models.ValueLoss


def test_install_patches_the_modules_that_exist(coati):
    coati(DISTRIBUTED | {"models/__init__": "import a_module_that_is_not_there\n"})
    assert colossalai.install() == ["coati.distributed.loss.PolicyLoss"]


def test_install_refuses_other_arguments(coati):
    coati(
        DISTRIBUTED
        | {"distributed/loss": _source(colossalai.PolicyLoss, ", rollout_log_probs=None")}
    )
    with pytest.raises(
        pl.SpecError, match=r"coati\.distributed\.loss\.PolicyLoss\.forward.*rollout_log_probs"
    ):
        colossalai.install()
    assert import_module("coati.distributed.consumer").PolicyLoss is not colossalai.PolicyLoss


def test_install_does_all_or_nothing(coati):
    coati(
        DISTRIBUTED
        | MODELS
        | {"models/loss": _source(models.PolicyLoss) + _source(models.ValueLoss, ", extra=None")}
    )
    for _ in range(2):
        with pytest.raises(pl.SpecError, match=r"coati\.models\.loss\.ValueLoss\.forward.*extra"):
            colossalai.install()
    assert import_module("coati.distributed.consumer").PolicyLoss is not colossalai.PolicyLoss


def test_install_without_coati(coati):
    with pytest.raises(ModuleNotFoundError, match=r"coati\.distributed\.loss"):
        colossalai.install()
