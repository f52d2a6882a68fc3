"""The completions that a run stores: whole groups that explain a step best, followed prompts, every
number of their tokens, and no more bytes than allowed.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train_loop_ranks import lines, resume, train

from policyloss_train.sampler import Sample
from policyloss_train.view import token_log
from policyloss_train.view.token_log import stored_groups

# Groups of 4, of prompts whose numbers are far from 0; rewards are written as digits.
PLAIN = {"prompts": 4, "group_size": 4, "minibatches": 2, "eval_every": 0}


def samples(*groups: tuple[int, str]) -> list[Sample]:
    """Completions of groups (number of the prompt, one digit for the reward of each)."""
    empty = torch.zeros(1, dtype=torch.int64)
    return [
        Sample(example, number, empty, empty, torch.zeros(1), True, "", reward=float(digit))
        for number, (example, digits) in enumerate(groups)
        for digit in digits
    ]


def test_whole_groups_are_stored_for_their_spread() -> None:
    made = samples((50, "0000"), (51, "0001"), (52, "0011"), (53, "1111"))
    groups = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert stored_groups(made, 4) == [groups[2]]
    assert stored_groups(made, 8) == [groups[2], groups[0]]
    assert stored_groups(made, 15) == [groups[2], groups[0], groups[1]]
    assert stored_groups(made, 16) == [groups[2], groups[0], groups[1], groups[3]]
    # Fewer rows than a group has: the group is whole all the same. 0 stores nothing.
    assert stored_groups(made, 1) == [groups[2]]
    assert stored_groups(made, 0) == []
    assert stored_groups([], 8) == []


def test_the_first_prompts_are_stored_whenever_they_are_trained_on() -> None:
    made = samples((50, "01"), (1, "00"), (token_log.FOLLOWED, "00"))
    assert stored_groups(made, 0) == [[2, 3]]
    assert stored_groups(made, 2) == [[2, 3], [0, 1]]
    assert stored_groups(samples((0, "01")), 2) == [[0, 1]]  # once, not twice


def test_a_row_holds_every_number_of_its_tokens(model: str, tmp_path: Path) -> None:
    """The KL term of GRPO brings a reference; with a rate of 0 it is the policy itself."""
    options = {"loss": "grpo", "lr": 0, "steps": 1, "rollouts_rows": 16, "overlong": "mask"}
    assert train(tmp_path / "run", model=model, **{**PLAIN, **options, "max_new_tokens": 5}) == 0
    rows = lines(tmp_path / "run", "rollouts")
    assert [row["group"] for row in rows] == [g for g in range(4) for _ in range(4)]
    assert {row["groups"] for row in rows} == {4}
    assert {row["finish_reason"] for row in rows} == {"end", "length"}
    for row in rows:
        n = len(row["tokens"])
        assert all(
            len(row[name]) == n
            for name in ("logp", "ref_logp", "rollout_logp", "entropy", "mask", "branch")
        )
        assert row["finished"] == (row["finish_reason"] == "end") == (row["tokens"][-1] == "<end>")
        # A completion that was cut is not trained on.
        assert row["mask"] == [row["finished"]] * n
        kinds = {"masked"} if not row["finished"] else {"plain" if row["advantage"] else "no_adv"}
        assert {b.replace("no_advantage", "no_adv") for b in row["branch"]} == kinds
        assert row["logp"] == pytest.approx(row["ref_logp"], abs=1e-6)
        if row["finished"]:
            assert all(0 < h < math.log(100) for h in row["entropy"])
    # The mean entropy of the tokens that are trained on is the metric.
    entropies = [
        h for row in rows for h, used in zip(row["entropy"], row["mask"], strict=True) if used
    ]
    metric = lines(tmp_path / "run")[-1]["policy/entropy"]
    assert sum(entropies) / len(entropies) == pytest.approx(metric, rel=1e-5)


@pytest.mark.parametrize("head", ["fused", "logits"])
def test_the_branches_of_a_run_are_its_clip_fractions(
    model: str, tmp_path: Path, head: str
) -> None:
    """One minibatch and two epochs: the stored numbers are those of the second update, which the
    metrics average with the first, where every ratio is 1 and nothing is clipped.
    """
    options = {"loss": "dapo", "lr": 0.05, "steps": 1, "epochs": 2, "minibatches": 1, "head": head}
    assert train(tmp_path / "run", model=model, **{**PLAIN, **options, "rollouts_rows": 16}) == 0
    rows = lines(tmp_path / "run", "rollouts")
    names = [name for row in rows for name in row["branch"]]
    metrics = lines(tmp_path / "run")[-1]
    for kind in ("upper", "lower"):
        share = names.count(kind) / len(names) / 2
        assert share == pytest.approx(metrics[f"policy/clip_fraction_{kind}"])
    assert names.count("upper") + names.count("lower") > 5
    for row in rows:
        for name, no_gradient in zip(row["branch"], row["clipped"], strict=True):
            assert no_gradient == (name in ("upper", "lower"))


def test_held_out_answers_are_stored_at_every_evaluation(model: str, tmp_path: Path) -> None:
    options = {**PLAIN, "steps": 3, "eval_every": 2, "eval_prompts": 16}
    assert train(tmp_path / "run", model=model, **options) == 0
    rows = lines(tmp_path / "run", "answers")
    assert [row["step"] for row in rows] == [s for s in (0, 2, 3) for _ in range(8)]
    assert [row["example"] for row in rows] == [*range(8)] * 3
    assert len({row["prompt"] for row in rows}) == 8
    for row in rows:
        assert len(row["rollout_logp"]) == len(row["tokens"]) == len(row["ids"])
        assert "".join(row["tokens"]).removesuffix("<end>") == row["completion"]
    # The first eight of sixteen answers, whose mean reward is the metric.
    few = {**options, "eval_prompts": 8}
    assert train(tmp_path / "few", model=model, **few) == 0
    by_step = [
        sum(row["reward"] for row in lines(tmp_path / "few", "answers") if row["step"] == step) / 8
        for step in (0, 2, 3)
    ]
    evaluations = [row["eval/reward"] for row in lines(tmp_path / "few") if "eval/reward" in row]
    assert by_step == pytest.approx(evaluations)
    texts = [
        [row["completion"] for row in lines(tmp_path / name, "answers")] for name in ("few", "run")
    ]
    assert texts[0] == texts[1]


def test_rollouts_stay_within_their_bound_and_cover_the_run(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight steps share 48 KiB, where one whole step takes about 18: each stores the groups that
    fit its share, at least one, and the run prints once that it leaves some out.
    """
    limit = 48 / 1024
    options = {**PLAIN, "steps": 8, "rollouts_every": 1, "rollouts_rows": 16, "checkpoint_every": 3}
    out = tmp_path / "run"
    assert train(out, model=model, **options, rollouts_mib=limit) == 0
    rows = lines(out, "rollouts")
    groups = {step: {r["group"] for r in rows if r["step"] == step} for step in range(1, 9)}
    assert all(1 <= len(stored) < 4 for stored in groups.values())
    assert all(
        sum(r["step"] == step and r["group"] == group for r in rows) == 4
        for step, stored in groups.items()
        for group in stored
    )
    size = (out / "rollouts.jsonl").stat().st_size
    assert 0.5 * limit * 2**20 < size <= limit * 2**20
    output = capsys.readouterr()
    said = " ".join((output.out + output.err).split())
    assert said.count("rollouts.jsonl leaves out") == 1
    assert "of 4 groups of step 1, so that it stays below --rollouts-mib 0.046875" in said
    # Its last two steps, made again from a checkpoint, store the same bytes.
    before = (out / "rollouts.jsonl").read_bytes()
    shutil.rmtree(out / "checkpoints/step_000008")
    assert resume(out) == 0
    assert (out / "rollouts.jsonl").read_bytes() == before


def test_no_rollouts_store_no_answers(model: str, tmp_path: Path) -> None:
    assert train(tmp_path / "run", model=model, steps=1, rollouts_every=0) == 0
    for name in ("rollouts", "answers"):
        assert (tmp_path / f"run/{name}.jsonl").read_bytes() == b""


def test_a_stop_text_is_a_reason_of_its_own(model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {**PLAIN, "steps": 1, "rollouts_rows": 16, "stop": "1"}
    assert train(tmp_path / "run", model=model, **options) == 0
    rows = lines(tmp_path / "run", "rollouts")
    assert {row["finish_reason"] for row in rows if "1" in "".join(row["tokens"])} == {"stop"}
    assert "stop" not in {r["finish_reason"] for r in rows if "1" not in "".join(r["tokens"])}
    json.dumps(rows, allow_nan=False)
