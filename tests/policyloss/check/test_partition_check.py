"""`partition_check` names the right cause for trainers that are broken as people have shipped them,
and leaves right ones alone.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from partition_trainers import (
    StepLoss,
    library_trainer,
    log_probs,
    make_batch,
    make_model,
    packed,
    sequence_mean,
    token_losses,
    token_mean,
    token_sum,
    trainer,
)
from torch import Tensor, nn

import policyloss as pl
from cases import AGGREGATES, LOCAL, label
from policyloss.check.cutting import CuttableBatch
from policyloss.check.diagnosis import Counts, Experiment, Weighing, find_weighing, fitted_weights

ROOT = Path(__file__).resolve().parents[3]
BY_TOKENS = "counts by its share of the valid tokens; cut, each counts "
BY_SEQUENCES = "counts by its share of the sequences; cut, each counts "
ON_PACKS = "A pack treated as one sequence looks like this"
NO_CAUSE = "No normalisation that is known here explains it."
STRAIGHT = "The direction is right"
COMPANIONS = "is no weighted sum of those"
KINDS = (BY_TOKENS, BY_SEQUENCES, ON_PACKS, NO_CAUSE, STRAIGHT, COMPANIONS)

# loss_of(each token's loss, mask, k, valid tokens of the step, sequences of the step),
# and the words of the diagnosis.
BROKEN: dict[str, tuple[StepLoss, list[str]]] = {
    "token mean / k": (
        lambda x, mask, k, n, s: token_mean(x, mask) / k,
        [BY_TOKENS + "1/k.", "mean over the tokens taken inside each micro-batch, averaged over",
         "count the valid tokens of"],
    ),
    "token mean, summed": (
        lambda x, mask, k, n, s: token_mean(x, mask),
        [BY_TOKENS + "in full.", "mean over the tokens taken inside each micro-batch, summed",
         "count the valid tokens of"],
    ),
    "token mean / k²": (lambda x, mask, k, n, s: token_mean(x, mask) / k**2,
                        [BY_TOKENS + "1/k, divided by k once more."]),
    "sequence mean / k": (
        lambda x, mask, k, n, s: sequence_mean(x, mask) / k,
        [BY_SEQUENCES + "1/k.", "mean over the sequences (or padded rows) taken inside each",
         "count the sequences of"],
    ),
    "sequence mean, summed": (lambda x, mask, k, n, s: sequence_mean(x, mask),
                              [BY_SEQUENCES + "in full."]),
    "token mean, by sequences": (
        lambda x, mask, k, n, s: token_mean(x, mask) * len(mask) / s,
        [BY_TOKENS + "by its share of the sequences."],
    ),
    "right / k": (
        lambda x, mask, k, n, s: token_sum(x, mask) / n / k,
        [STRAIGHT, "the gradient is 1/k of what it should be", "divided by k once too often",
         "loss / accumulation_steps"],
    ),
    "right / k²": (lambda x, mask, k, n, s: token_sum(x, mask) / n / k**2,
                   [STRAIGHT, "1/k² of what it", "twice too often"]),
    "right · k": (lambda x, mask, k, n, s: token_sum(x, mask) / n * k,
                  [STRAIGHT, "k times too large", "drop the factor k"]),
    "a sum / k": (lambda x, mask, k, n, s: token_sum(x, mask) / 50 / k,
                  [STRAIGHT, "1/k of what it should be"]),
    "a sum, by tokens": (
        lambda x, mask, k, n, s: token_sum(x, mask) * mask.sum() / n,
        ["a micro-batch counts in full; cut, each counts by its share of the valid tokens.",
         "sum them with no further weight"],
    ),
    "2.5 where there are several": (
        lambda x, mask, k, n, s: token_sum(x, mask) / n / (1 if k == 1 else 2.5),
        [STRAIGHT, "a factor that no count here explains: 0.4× at k = 2, 0.4× at k = 6."],
    ),
    # 1/√n of each micro-batch: √(3/40) = 0.274 for the first of "one sequence each",
    # and 1 in the loop.
    "square root of the tokens": (
        lambda x, mask, k, n, s: token_sum(x, mask) / mask.sum() ** 0.5,
        [NO_CAUSE,
         "'one sequence each': weights 0.274 0.474 0.354 0.548 0.316 0.418 in the whole batch, "
         "1 1 1 1 1 1 cut",
         "for 3 9 5 12 4 7 valid tokens"],
    ),
    "centred among companions": (
        lambda x, mask, k, n, s: token_sum(x * (x.detach() - x.detach().mean()), mask) / n,
        [COMPANIONS, "of its micro-batches",
         "advantages normalised or groups compared per micro-batch"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_is_named(name: str) -> None:
    loss_of, expected = BROKEN[name]
    report = pl.partition_check(trainer(loss_of), make_batch())
    assert report.moved
    assert len(report.diagnosis) == 1
    assert not report.notes
    for words in expected:
        assert words in report.diagnosis[0]
    # And nothing that contradicts it.
    assert [kind for kind in KINDS if kind in report.diagnosis[0]] == [
        kind for kind in KINDS if any(kind in w for w in expected)
    ]
    assert {cut.explanation for cut in report.cuts if cut.moved} == {report.diagnosis[0]}
    assert {cut.explanation for cut in report.cuts if not cut.moved} <= {None}


# Advantages that are made of the rewards of one micro-batch; of one sequence, each is 0.
COMPARED = {
    "centred": lambda a: a - a.mean(),
    "normalised": lambda a: (a - a.mean()) / (a.std(correction=0) + 1e-6),
    "ranked": lambda a: (a[:, None] > a).sum(1) - (len(a) - 1) / 2,
}


def test_advantages_compared_per_micro_batch() -> None:
    """Every single sequence has no gradient then, and several have one."""
    model, wrong = make_model(), {}
    batches = {"padded": make_batch(), "packed": packed(make_batch())}
    cuts = {"default": None, "singles": {"each": [[i] for i in range(6)]}}
    for case in itertools.product(COMPARED, batches, cuts, (0, 3)):
        name, layout, cut, parameters = case

        def step(micro_batches: list[dict[str, Any]]) -> list[Tensor]:
            model.zero_grad()
            n = sum(int(micro["mask"].sum()) for micro in micro_batches)
            for micro in micro_batches:
                advantages = COMPARED[name](micro["advantages"])  # noqa: B023
                compared = {**micro, "advantages": advantages}
                (token_sum(token_losses(model, compared), micro["mask"]) / n).backward()
            gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
            return [gradients[-parameters:]]  # noqa: B023

        said = pl.partition_check(step, batches[layout], cuts=cuts[cut]).diagnosis[0]
        if [kind for kind in KINDS if kind in said] != [COMPANIONS]:
            wrong[case] = said
    assert not wrong


def one_hot_step(micro_batches: list[dict[str, Any]]) -> list[Tensor]:
    """Each token pushes the entry of its id by 1; token mean / k, without autograd."""
    gradient = torch.zeros(4, dtype=torch.float64)
    for micro in micro_batches:
        gradient += torch.eye(4, dtype=torch.float64)[micro["ids"][micro["mask"]]].mean(0) / len(
            micro_batches
        )
    return [gradient]


def test_difference_and_factor_by_hand() -> None:
    """Sequences of ids 0 and 1 2 3. Whole: g = (1 1 1 1)/4. Cut: (1/2 1/6 1/6 1/6),
    which is off by (1/4 −1/12 −1/12 −1/12).

    ‖off‖² = 1/16 + 3/144 = 1/12 and ‖g‖² = 1/4, so the difference is √(1/3); ⟨cut, g⟩ = (1/2 +
    3/6)/4 = ‖g‖², so the factor is 1.
    """
    batch = {
        "ids": torch.tensor([[0, 0, 0], [1, 2, 3]]),
        "mask": torch.tensor([[True, False, False], [True, True, True]]),
    }
    report = pl.partition_check(one_hot_step, batch)
    (cut,) = report.cuts  # with two sequences the default cuts are all the same
    assert (cut.name, cut.micro_batches, cut.moved) == ("two halves", 2, True)
    assert cut.relative_difference == pytest.approx(3**-0.5, abs=1e-12)
    assert cut.factor == pytest.approx(1.0, abs=1e-12)
    assert BY_TOKENS + "1/k." in report.diagnosis[0]
    assert (report.sequences, report.tokens) == (2, 4)
    torch.testing.assert_close(report.gradient, torch.full((4,), 0.25, dtype=torch.float64))


def test_the_factors_of_a_division_too_many() -> None:
    """0.5× with two micro-batches, 0.25× with four, 1/6 with six."""
    four = {
        "four": [[0, 1], [2], [3], [4, 5]],
        "two": [[0], [1, 2, 3, 4, 5]],
        "six": [[i] for i in range(6)],
    }
    for power in (-1, 1):
        step = trainer(lambda x, mask, k, n, s, p=power: token_sum(x, mask) / n * k**p)
        report = pl.partition_check(step, make_batch(), cuts=four)
        assert [cut.factor for cut in report.cuts] == pytest.approx(
            [4.0**power, 2.0**power, 6.0**power], rel=1e-12
        )


def test_a_group_that_is_split() -> None:
    """A mean over prompts, local: where a micro-batch holds one of a prompt's three answers, their
    tokens are not counted together.

    One sequence each is still a weighted sum (n_i / (G·N_g) each); the halves are not.
    """
    batch = {**make_batch(), "group_ids": torch.arange(6) % 2}
    model, spec = make_model(), pl.preset("ppo").replace(aggregate=pl.PromptMean())

    def step(micro_batches: list[dict[str, Any]]) -> nn.Module:
        model.zero_grad()
        for m in micro_batches:
            out = pl.policy_loss(
                spec,
                log_probs(model, m),
                m["old_logp"],
                m["advantages"],
                m["mask"],
                group_ids=m["group_ids"],
            )
            (out.loss / len(micro_batches)).backward()
        return model

    report = pl.partition_check(step, batch)
    assert COMPANIONS in report.diagnosis[0]
    one_by_one = pl.partition_check(
        step, batch, cuts={"one sequence each": [[i] for i in range(6)]}
    )
    # N_g is 3 + 5 + 4 = 12 and 9 + 12 + 7 = 28, so the first two weigh 3/24 and 9/56.
    assert (
        "weights 0.125 0.161 0.208 0.214 0.167 0.125 in the whole batch, 0.167 0.167"
        in one_by_one.diagnosis[0]
    )


def experiment(alone: Tensor, whole: Tensor, cut: Tensor, tokens: list[float]) -> Experiment:
    ones = torch.ones(len(tokens), dtype=torch.float64)
    return Experiment(
        "by hand",
        whole @ alone,
        cut @ alone,
        alone,
        Counts(torch.tensor(tokens).double(), ones, ones, ones),
    )


def test_the_best_law_wins_under_a_wide_tolerance_and_the_plainest_where_rounding_decides() -> None:
    """Shares 10/21 and 11/21 are within 9 % of 1/2, which fits exactly.
    And 1/10 · 10⁻¹ is not 10⁻² in float64, by one bit.
    """
    half, eye = torch.full((2,), 0.5, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    one = experiment(eye, half, torch.tensor([10 / 21, 11 / 21], dtype=torch.float64), [10, 11])
    assert find_weighing([one], 0.09) == Weighing("sequences", "tokens", 0)
    ten, tokens = torch.eye(10, dtype=torch.float64), [float(i) for i in range(1, 11)]
    ten_cut = torch.full((10,), 10.0**-2, dtype=torch.float64)
    assert find_weighing(
        [experiment(ten, torch.tensor(tokens).double() / 55, ten_cut, tokens)], 1e-8
    ) == Weighing("tokens", "equal", -1)


def test_weights_are_fitted_where_they_are_unique() -> None:
    # The third is the sum of the others.
    alone = torch.tensor([[1.0, 0, 0], [1.0, 2, 0], [2.0, 2, 0]], dtype=torch.float64)
    # The first, and three times the second.
    gradient = torch.tensor([4.0, 6, 0], dtype=torch.float64)
    torch.testing.assert_close(
        fitted_weights(gradient, alone[:2], 1e-8), torch.tensor([1.0, 3], dtype=torch.float64)
    )
    assert fitted_weights(gradient, alone, 1e-8) is None
    assert fitted_weights(gradient + torch.eye(3, dtype=torch.float64)[2], alone[:2], 1e-8) is None


# The mask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("right_loop", [True, False])
def test_a_mask_that_misses_the_numerator(right_loop: bool) -> None:
    step = trainer(lambda x, mask, k, n, s: x.sum() / (n if right_loop else mask.sum() * k))
    report = pl.partition_check(step, make_batch())
    assert report.moved
    assert "The mask does not reach the numerator" in report.diagnosis[0]
    assert [BY_TOKENS + "1/k." in words for words in report.diagnosis] == (
        [False] if right_loop else [False, True]
    )
    assert (
        "but it depends on tokens outside the mask" in " ".join(str(report).split())
    ) is right_loop
    with pytest.raises(AssertionError, match="mask does not reach the numerator"):
        report.raise_if_moved()


def test_a_step_with_other_masks_gets_a_note_and_no_accusation() -> None:
    step = trainer(lambda x, mask, k, n, s: token_sum(x, make_batch()["mask"][:1].expand_as(x)))
    report = pl.partition_check(step, make_batch())
    assert not report.moved
    assert len(report.notes) == 1
    assert "step_fn does not read batch['mask']" in report.notes[0]


# Packs --------------------------------------------------------------------------------------------


def test_a_pack_treated_as_one_sequence() -> None:
    """A mean over "sequences" that sees one per micro-batch, the pack; divided by the packs, or by
    the true count of sequences.
    """
    by_packs = pl.partition_check(
        trainer(lambda x, mask, k, n, s: token_mean(x, mask) / k), packed(make_batch())
    )
    assert ON_PACKS in by_packs.diagnosis[0]
    assert BY_TOKENS + "1/k." in by_packs.diagnosis[0]
    by_count = pl.partition_check(
        trainer(lambda x, mask, k, n, s: token_mean(x, mask) / s), packed(make_batch())
    )
    assert ON_PACKS in by_count.diagnosis[0]
    assert "count the sequences (by cu_seqlens) of the whole step" in by_count.diagnosis[0]


def test_packs_are_cut_between_sequences() -> None:
    """Lengths 2, 0, 3: the third, then the first. Token- and sequence-shaped tensors follow,
    the rest is passed through.
    """
    batch = {
        "mask": torch.tensor([True, False, True, True, True]),
        "cu_seqlens": torch.tensor([0, 2, 2, 5], dtype=torch.int32),
        "ids": torch.tensor([[10, 11, 12, 13, 14]]),
        "hidden": torch.arange(10).reshape(5, 2),
        "advantages": torch.tensor([0.1, 0.2, 0.3]),
        "eos": torch.tensor(7),
        "note": [1, 2, 3, 4, 5],
    }
    data = CuttableBatch(batch)
    micro = data.take([2, 0])
    assert micro["cu_seqlens"].tolist() == [0, 3, 5]
    assert micro["cu_seqlens"].dtype == torch.int32
    assert micro["mask"].tolist() == [True, True, True, True, False]
    assert micro["ids"].tolist() == [[12, 13, 14, 10, 11]]
    assert micro["hidden"][:, 0].tolist() == [4, 6, 8, 0, 2]
    assert micro["advantages"].tolist() == pytest.approx([0.3, 0.1])
    assert micro["note"] is batch["note"]
    assert micro["eos"] is batch["eos"]
    assert data.mask_half(2)["mask"].tolist() == [True, False, False]
    assert data.lengths.tolist() == [1, 0, 3]
    assert data.positions.tolist() == [2, 0, 3]
    # The one without a valid token rides along.
    assert data.default_cuts() == {"two halves": [[0], [2, 1]]}


def test_the_default_cuts() -> None:
    """Lengths 3 9 5 12 4 7: the short ones are 0, 2 and 4.
    Over ranks the shortest go out one by one.
    """
    data = CuttableBatch(make_batch())
    assert data.default_cuts() == {
        "two halves": [[0, 1, 2], [3, 4, 5]],
        "one sequence each": [[0], [1], [2], [3], [4], [5]],
        "one and the rest": [[0], [1, 2, 3, 4, 5]],
        "short and long": [[0, 2, 4], [1, 3, 5]],
    }
    assert data.over_ranks(3) == [[0], [4], [2, 5, 1, 3]]
    with pytest.raises(
        pl.InputError, match="6 sequences with valid tokens, too few to share among 7 ranks"
    ):
        data.over_ranks(7)


# Right ones ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "aggregate", [a for a in AGGREGATES if not isinstance(a, LOCAL)], ids=label
)
def test_the_library_does_not_move(aggregate: Any, dtype: torch.dtype) -> None:
    spec = pl.preset("ppo_dual_clip").replace(aggregate=aggregate)
    batch = make_batch(dtype, torch.tensor([3, 9, 0, 5, 12, 4]))  # one row has nothing to train on
    batch["weights"] = torch.linspace(0.5, 1.5, 6, dtype=dtype)
    for laid_out in (batch, packed(batch)):
        report = pl.partition_check(library_trainer(spec, make_model(dtype)), laid_out)
        assert not report.moved, str(report)
        assert report.notes == []
        assert len(report.cuts) == 4
        assert report.tolerance == torch.finfo(dtype).eps ** 0.5
        # Far below the tolerance: the rest is rounding.
        assert max(cut.relative_difference for cut in report.cuts) < 100 * torch.finfo(dtype).eps
        report.raise_if_moved()


@pytest.mark.parametrize(
    ("aggregate", "law"),
    [(pl.LocalTokenMean(), BY_TOKENS), (pl.LocalSeqMeanTokenMean(), BY_SEQUENCES)],
    ids=str,
)
def test_the_legacy_local_means_move_in_float32_too(aggregate: Any, law: str) -> None:
    step = library_trainer(pl.preset("ppo").replace(aggregate=aggregate), make_model(torch.float32))
    report = pl.partition_check(step, make_batch(torch.float32))
    assert law + "in full." in report.diagnosis[0]


def test_a_sequence_level_loss_and_half_precision_do_not_move() -> None:
    step = library_trainer(pl.preset("gspo"), make_model(torch.bfloat16))
    report = pl.partition_check(step, make_batch(torch.float32))
    assert not report.moved, str(report)
    assert report.tolerance == pytest.approx(0.0884, abs=1e-4)  # √(2⁻⁷)
    broken = trainer(lambda x, mask, k, n, s: token_mean(x, mask) / k, make_model(torch.bfloat16))
    assert BY_TOKENS + "1/k." in pl.partition_check(broken, make_batch(torch.float32)).diagnosis[0]


def test_every_way_to_return_gradients_is_the_same() -> None:
    model = make_model()
    step = trainer(lambda x, mask, k, n, s: token_sum(x, mask) / n, model)
    ways = [
        lambda m: step(m),
        lambda m: step(m).parameters(),
        lambda m: {name: p.grad for name, p in step(m).named_parameters()},
        lambda m: [p.grad for p in step(m).parameters()],
        lambda m: torch.cat([p.grad.flatten() for p in step(m).parameters()]),
    ]
    gradients = [pl.partition_check(way, make_batch()).gradient for way in ways]
    assert gradients[0].numel() == sum(p.numel() for p in model.parameters())
    assert all(torch.equal(g, gradients[0]) for g in gradients)


# The page -----------------------------------------------------------------------------------------


def test_the_page_shows_the_printed_output() -> None:
    """Block after block; the text after a block is its output."""
    page = (ROOT / "docs/partition_check.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|text)\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    printed: list[str] = []
    made: dict[str, Any] = {"print": lambda *words: printed.append(" ".join(map(str, words)))}
    shown = 0
    for language, text in blocks:
        if language == "python":
            printed.clear()
            exec(compile(text, "partition_check.md", "exec"), made)
        else:
            assert "\n".join(printed) == text
            shown += 1
    assert shown == 2
