"""`partition_check`: its errors, the limits that it reports, and its reports on trainers on two
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from partition_trainers import (
    RIGHT,
    WIDTH,
    library_trainer,
    make_batch,
    make_model,
    token_losses,
    token_sum,
    trainer,
    work,
)
from started import run_ranks, started_once
from torch import Tensor, nn

import policyloss as pl


def test_equal_lengths_are_reported() -> None:
    step = trainer(lambda x, mask, k, n, s: token_sum(x, mask) / n)
    report = pl.partition_check(step, make_batch(lengths=torch.tensor([4, 4, 4])))
    assert not report.moved
    assert "every sequence has 4 valid tokens" in report.notes[0]
    assert "Note: every sequence has 4 valid tokens" in str(report)


def test_dropout_is_refused() -> None:
    model = nn.Sequential(*make_model(), nn.Dropout(0.1))
    step = trainer(lambda x, mask, k, n, s: token_sum(x, mask) / n, model)
    with pytest.raises(
        pl.InputError,
        match=r"another gradient when it ran twice.*switch dropout off \(model.eval\(\)\)",
    ):
        pl.partition_check(step, make_batch())
    model.eval()
    assert not pl.partition_check(step, make_batch()).moved


def test_gradients_that_are_not_zeroed_are_refused() -> None:
    model = make_model()

    def step(micro_batches: list[dict[str, Any]]) -> nn.Module:
        for micro in micro_batches:
            token_sum(token_losses(model, micro), micro["mask"]).backward()
        return model

    with pytest.raises(pl.InputError, match=r"twice the gradient.*zero the gradients"):
        pl.partition_check(step, make_batch())


def test_clipped_gradients_are_refused() -> None:
    model = make_model()
    unclipped = trainer(lambda x, mask, k, n, s: 1e3 * token_sum(x, mask) / n, model)

    def step(micro_batches: list[dict[str, Any]]) -> nn.Module:
        unclipped(micro_batches)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return model

    with pytest.raises(pl.InputError, match=r"the same norm, 1, .*leave clip_grad_norm_ out"):
        pl.partition_check(step, make_batch())


def test_a_cut_that_is_not_finite() -> None:
    step = trainer(lambda x, mask, k, n, s: token_sum(x, mask) / (n if k == 1 else 0))
    report = pl.partition_check(step, make_batch())
    assert "The gradient of 'two halves' is not finite" in report.diagnosis[0]


def right_step(micro_batches: list[dict[str, Any]]) -> nn.Module:
    return trainer(lambda x, mask, k, n, s: token_sum(x, mask) / n)(micro_batches)


@pytest.mark.parametrize(
    ("step", "change", "options", "message"),
    [
        (right_step, {"mask": None}, {}, "batch needs a tensor 'mask'.*it has .*'advantages'"),
        (right_step, {"mask": torch.ones(6, WIDTH) * (torch.arange(6) == 2)[:, None]}, {},
         "needs 2 sequences .* it has 1"),
        (right_step, {}, {"tolerance": 0.0}, "tolerance must be between 0 and 1, got 0.0"),
        (right_step, {}, {"cuts": {}}, "cuts must map a name to a list of micro-batches"),
        (right_step, {}, {"cuts": {"mine": [[0, 1], [1, 2, 3, 4, 5]]}},
         "cut 'mine' must hold each of the 6 sequences once"),
        (right_step, {}, {"cuts": {"mine": [[], [0, 1, 2, 3, 4, 5]]}},
         "cut 'mine' has a micro-batch without a valid token"),
        (right_step, {}, {"group": "dp"}, "group= needs torch.distributed"),
        (right_step, {}, {"reference": torch.ones(3)}, "reference has 3 numbers, step_fn gave 143"),
        (right_step, {}, {"reference": torch.zeros(143)},
         "reference must be a gradient that is finite and not 0"),
        (right_step, {"advantages": torch.zeros(6)}, {},
         "gradient of the whole batch is 0: are the advantages 0"),
        (right_step, {"advantages": torch.full((6,), torch.nan)}, {},
         "gradient of the whole batch is not finite"),
        (lambda m: None, {}, {},
         "step_fn must give the gradients: the model, its parameters or tensors; got NoneType"),
        (lambda m: [1.0], {}, {}, "there is a float among them"),
        (lambda m: [torch.ones(2, dtype=torch.int64)], {}, {},
         "there are integers among its tensors"),
        (lambda m: make_model(), {}, {}, r"every .grad is None. Does it call backward\(\)"),
        (lambda m: m[0]["mask"].sum().expand(len(m)) * 1.0, {}, {},
         "1 numbers for the whole batch, 2 for a cut of it"),
    ],
)  # fmt: skip
def test_bad_input(
    step: Any, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(pl.InputError, match=message):
        pl.partition_check(step, {**make_batch(), **change}, **options)


def test_a_batch_that_is_no_mapping() -> None:
    with pytest.raises(
        pl.InputError, match="batch must be a mapping of names to tensors, got list"
    ):
        pl.partition_check(right_step, [make_batch()])  # type: ignore[arg-type]


def test_indistinguishable_weights_are_not_invented() -> None:
    """Every token has the same gradient here, so any weights that add up
    to the same explain the same.
    """
    base = torch.ones(5, dtype=torch.float64)

    def step(micro_batches: list[dict[str, Any]]) -> Tensor:
        tilt = torch.arange(5, dtype=torch.float64) * (len(micro_batches) > 1)
        return (base + tilt) * sum(int(m["mask"].sum()) for m in micro_batches)

    report = pl.partition_check(step, make_batch())
    assert "Nor can weights be fitted" in report.diagnosis[0]


# Against a reference, and over two ranks ----------------------------------------------------------


def test_a_reference_shows_an_error_that_every_cut_has() -> None:
    reference = pl.partition_check(right_step, make_batch()).gradient
    third = trainer(lambda x, mask, k, n, s: token_sum(x, mask) / n / 3)
    assert not pl.partition_check(third, make_batch()).moved
    report = pl.partition_check(third, make_batch(), reference=reference)
    assert report.cuts[-1].name == "against the reference"
    assert report.cuts[-1].factor == pytest.approx(1 / 3, rel=1e-12)
    assert "in one micro-batch is 0.3333 times the reference" in report.diagnosis[0]
    other = trainer(
        lambda x, mask, k, n, s: (torch.where(mask, x, 0).sum(1) / mask.sum(1)).sum() / s
    )
    assert (
        "by more than a factor"
        in pl.partition_check(other, make_batch(), reference=reference).diagnosis[0]
    )
    assert not pl.partition_check(right_step, make_batch(), reference=reference).moved


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both ranks for every case. Parallel test workers share one pair of
    processes: the first starts it.
    """

    def start(place: Path) -> None:
        model = make_model()
        steps = {
            type(a).__name__: library_trainer(pl.preset("ppo").replace(aggregate=a), model)
            for a in RIGHT
        }
        references = {
            name: pl.partition_check(step, make_batch()).gradient for name, step in steps.items()
        }
        run_ranks(work, str(place), references, count=2)

    folder = started_once(tmp_path_factory, "partition_ranks", start)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize(
    "case", [*(f"right {type(a).__name__}" for a in RIGHT), "right FSDP2", "right sum over ranks"]
)
def test_a_right_trainer_over_two_ranks(case: str, said: list[dict[str, Any]]) -> None:
    for answer in (rank[case] for rank in said):
        assert answer["moved"] is False, answer["text"]
        assert list(answer["cuts"]) == ["two halves", "over 2 ranks", "against the reference"]
        assert answer["notes"] == []


def test_means_of_each_rank(said: list[dict[str, Any]]) -> None:
    answer = said[0]["local means"]
    assert answer["cuts"]["whole"][0] is False
    assert answer["cuts"]["over 2 ranks"][0] is True
    (words,) = answer["diagnosis"]
    assert "a rank counts by its share of the valid tokens; cut, each counts 1/W." in words
    assert "mean over the tokens taken inside each rank, averaged over the W ranks" in words
    assert "pl.Totals.count(mask, group=dp_group)" in words
    assert said[1]["local means"] == answer


def test_dp_size_forgotten_or_used_where_ranks_are_summed(said: list[dict[str, Any]]) -> None:
    for case, factor, cause in (
        (
            "dp_size forgotten",
            0.5,
            (
                "is 0.5 times the reference. That is 1/dp: gradients are averaged over the 2 ranks "
                "and the loss is not"
            ),
        ),
        (
            "dp_size where ranks are summed",
            2.0,
            "is 2 times the reference. That is dp: the loss is multiplied by the 2 ranks",
        ),
    ):
        for answer in (rank[case] for rank in said):
            assert [moved for moved, _ in answer["cuts"].values()] == [False, False, True]
            assert answer["cuts"]["against the reference"][1] == pytest.approx(factor, rel=1e-12)
            assert len(answer["diagnosis"]) == 1
            assert cause in answer["diagnosis"][0]


def test_without_a_reference_it_names_undetectable_errors(said: list[dict[str, Any]]) -> None:
    answer = said[0]["dp_size forgotten, no reference"]
    assert answer["moved"] is False
    assert "every run on these 2 ranks" in answer["notes"][0]


def test_ranks_that_do_not_belong_together(said: list[dict[str, Any]]) -> None:
    for rank in said:
        assert "step_fn gave other gradients on other ranks" in rank["not reduced"]["error"]
        assert "the ranks got different batches" in rank["other batches"]["error"]
