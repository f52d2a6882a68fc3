"""Tasks and rewards: held-out prompts are never trained on, errors in files name the line, and a
reward cannot fail unnoticed.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from policyloss.errors import InputError
from policyloss_train.tasks import make_task
from policyloss_train.tasks.base import Example, normalise_spaces
from policyloss_train.tasks.rewards import RewardError, check_reward, make_reward


def written(path: Path, *rows: Any) -> str:
    """A .jsonl file of `rows`; strings are written as they are."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def pair(prompt: str, answer: str = "a", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, **more}


def prompts(examples: Any) -> list[str]:
    return [example.prompt for example in examples]


# --- the built-in task


def test_sort_has_thousands_of_prompts_with_sorted_answers() -> None:
    task = make_task("sort", reward=None, seed=0)
    assert (len(task.train), len(task.held_out)) == (4096, 512)
    # Disjoint, and none twice.
    assert len({*prompts(task.train), *prompts(task.held_out)}) == 4096 + 512
    assert [example.id for example in task.train] == list(range(4096))
    for example in task.train[:200]:
        digits = example.prompt.removeprefix("sort ").removesuffix("=")
        assert 4 <= len(digits) <= 6
        assert Counter(example.answer) == Counter(digits)
        assert all(a < b for a, b in zip(example.answer, example.answer[1:], strict=False))
        assert task.score(example, example.answer) == 1.0
        assert task.score(example, example.answer[::-1]) == 0.0


def test_the_seed_changes_the_training_set_of_sort_alone() -> None:
    first, again, other = (make_task("sort", reward=None, seed=seed) for seed in (0, 0, 1))
    assert first.train == again.train
    assert prompts(first.train) != prompts(other.train)
    assert first.held_out == other.held_out
    assert not {*prompts(other.train)} & {*prompts(other.held_out)}


def test_one_demonstration_in_ten_is_right_and_the_others_leave_the_last_digit() -> None:
    task = make_task("sort", reward=None, seed=0)
    example = Example("sort 52731=", "12357", 0, {"digits": "52731"})
    rng = Random(0)
    shown = Counter(task.demonstration(example, rng) for _ in range(2000))
    assert set(shown) == {"12357", "23571"}  # 5273 in order is 2357, then the 1
    # 4.5 standard deviations of sqrt(0.1 · 0.9 / 2000).
    assert abs(shown["12357"] / 2000 - 0.1) < 0.03


def test_an_unknown_task_names_the_kinds() -> None:
    with pytest.raises(
        InputError,
        match=r"unknown task 'sorting'. Valid: sort, lookup, reasoning_gym:<data set>, .*\.jsonl",
    ):
        make_task("sorting", reward=None, seed=0)


# --- reasoning-gym


def test_reasoning_gym_by_name_with_its_own_score() -> None:
    task = make_task("reasoning_gym:chain_sum", reward=None, seed=0)
    assert task.name == "reasoning_gym:chain_sum"
    assert (len(task.train), len(task.held_out)) == (1024, 128)
    assert not {*prompts(task.train)} & {*prompts(task.held_out)}
    assert "arithmetic" in task.train[0].prompt
    for example in (task.train[3], task.held_out[5]):
        expression = example.meta["entry"]["metadata"]["expression"]
        assert example.answer == str(
            sum(int(term) for term in expression.replace("- ", "-").replace("+ ", "").split())
        )
        assert task.score(example, f" {example.answer}\n") == 1.0
        assert task.score(example, example.answer + "1") < 1.0
        assert task.demonstration(example, Random(0)) == example.answer


def test_reasoning_gym_with_neighbouring_seeds_trains_on_other_prompts() -> None:
    # Item i of seed s is item i + 1 of seed s − 1 in the package itself,
    # so seeds 0 and 1 would share 1023 of 1024.
    first, second = (
        make_task("reasoning_gym:chain_sum", reward=None, seed=seed) for seed in (0, 1)
    )
    assert len({*prompts(first.train)} & {*prompts(second.train)}) < 20
    assert prompts(first.held_out) == prompts(second.held_out)


def test_reasoning_gym_with_another_reward_and_with_an_unknown_name() -> None:
    task = make_task("reasoning_gym:leg_counting", reward="exact", seed=0)
    assert task.score(Example("p", "8", 0), "8") == 1.0  # no entry of the package is needed
    with pytest.raises(
        InputError, match=r"unknown task of reasoning_gym 'chain_sums'; did you mean 'chain_sum'\?"
    ):
        make_task("reasoning_gym:chain_sums", reward=None, seed=0)
    with pytest.raises(
        InputError,
        match=r"reasoning_gym:composite cannot be made with its default settings: Must specify",
    ):
        make_task("reasoning_gym:composite", reward=None, seed=0)


def test_reasoning_gym_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match="pip install reasoning-gym"):
        make_task("reasoning_gym:chain_sum", reward=None, seed=0)


# --- files


def test_a_file_with_a_split_loses_held_out_prompts_that_are_trained_on(tmp_path: Path) -> None:
    rows = [
        pair("p 1", "a", level=3),
        pair("p 2", "b"),
        "",
        pair("p 3", "c", split="held_out"),
        pair(" p  1", "a", split="held_out"),
    ]
    task = make_task(written(tmp_path / "d.jsonl", *rows), reward=None, seed=0)
    assert task.train == (Example("p 1", "a", 0, {"level": 3}), Example("p 2", "b", 1))
    assert task.held_out == (Example("p 3", "c", 0),)
    assert task.score(task.train[1], " b\n") == 1.0
    assert task.demonstration(task.train[0], Random(0)) == "a"


def test_a_file_without_a_split_holds_out_a_tenth_whatever_the_order_and_the_seed(
    tmp_path: Path,
) -> None:
    rows = [pair(f"p{i % 50}", str(i)) for i in range(60)]  # 50 different prompts, 10 of them twice
    task = make_task(written(tmp_path / "a.jsonl", *rows), reward="exact", seed=0)
    turned = make_task(written(tmp_path / "b.jsonl", *reversed(rows)), reward="exact", seed=7)
    assert len({*prompts(task.held_out)}) == 5
    # A prompt that is there twice goes to one side as a whole.
    assert len(task.train) + len(task.held_out) == 60
    assert not {*prompts(task.train)} & {*prompts(task.held_out)}
    assert sorted(prompts(task.held_out)) == sorted(prompts(turned.held_out))


def test_a_file_marked_train_throughout_is_a_file_without_a_split(tmp_path: Path) -> None:
    task = make_task(
        written(tmp_path / "d.jsonl", *(pair(f"p{i}", split="train") for i in range(3))),
        reward=None,
        seed=0,
    )
    assert (len(task.train), len(task.held_out)) == (2, 1)


BAD_LINES = [
    ("{", r"d\.jsonl, line 2: not JSON"),
    ("[1]", r"line 2: list where an object .* belongs"),
    (
        '{"prompt": "x", "question": "y"}',
        r"line 2: the key 'answer' is missing; there are: 'prompt', 'question'",
    ),
    ("{}", r"line 2: the key 'prompt' is missing; there are: none"),
    ('{"prompt": "x", "answer": 42}', r"line 2: 'answer' is 42; write a string"),
    ('{"prompt": " ", "answer": "a"}', r"line 2: the prompt is empty"),
    (
        '{"prompt": "x", "answer": "a", "split": "test"}',
        r"line 2: 'split' is 'test'; valid are 'train' and 'held_out'",
    ),
    ("[" * 100_000, r"line 2: not JSON"),
]


@pytest.mark.parametrize(
    ("line", "message"), BAD_LINES, ids=[message[:30] for _, message in BAD_LINES]
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_task(written(tmp_path / "d.jsonl", pair("p"), line, pair("q")), reward=None, seed=0)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    cases = {
        "has no examples": b"\n \n",
        "line 2: not UTF-8 .*byte 12": (
            json.dumps(pair("p")).encode() + b'\n{"prompt": "\xff", "answer": "a"}'
        ),
        "leaves no prompt to train on": b'{"prompt": "p", "answer": "a"}',
        "leaves no prompt to hold out": (
            b'{"prompt": "p", "answer": "a"}\n{"prompt": "p", "answer": "a", "split": "held_out"}'
        ),
    }
    for message, data in cases.items():
        (tmp_path / "d.jsonl").write_bytes(data)
        with pytest.raises(InputError, match=message):
            make_task(str(tmp_path / "d.jsonl"), reward=None, seed=0)
    with pytest.raises(InputError, match=r"cannot read the task .*nowhere\.jsonl: No such file"):
        make_task(str(tmp_path / "nowhere.jsonl"), reward=None, seed=0)


def test_a_file_from_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(pair(f"p{i}")).encode() for i in range(2))
    )
    task = make_task(str(tmp_path / "d.jsonl"), reward=None, seed=0)
    assert sorted(prompts(task.train) + prompts(task.held_out)) == ["p0", "p1"]


# --- rewards


def test_exact_ignores_white_space_only() -> None:
    reward, example = make_reward("exact"), Example("p", "a  b", 0)
    assert [reward(example, text) for text in (" a b\n", "a\tb", "ab", "A b", "a b c", "")] == [
        1,
        1,
        0,
        0,
        0,
        0,
    ]
    assert normalise_spaces(" a \n b ") == "a b"


def test_math_compares_values() -> None:
    reward = make_reward("math")
    assert reward(Example("p", "1/2", 0), r"so it is \boxed{0.5}") == 1.0
    assert reward(Example("p", r"2\sqrt{3}", 0), r"$\sqrt{12}$") == 1.0
    # The whole answer counts, not the 2 it begins with.
    assert reward(Example("p", r"2\sqrt{3}", 0), "2") == 0.0
    assert reward(Example("p", "$7$", 0), "it is 8") == 0.0
    assert reward(Example("p", "7", 0), "no idea") == 0.0
    with pytest.raises(RewardError, match="the answer '' cannot be read as mathematics"):
        reward(Example("p", "", 0), "7")


def test_math_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(InputError, match="pip install math-verify"):
        make_reward("math")


def test_a_function_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "def length(example, completion):",
        "    return len(completion) / len(example.answer)",
        "number = 3",
    ]
    (tmp_path / "own_rewards.py").write_text("\n".join(lines))
    (tmp_path / "broken_rewards.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert make_reward("own_rewards:length")(Example("p", "abcd", 0), "ab") == 0.5
    assert sys.path == before
    with pytest.raises(InputError, match=r"'own_rewards' has no function 'width'"):
        make_reward("own_rewards:width")
    with pytest.raises(
        InputError, match=r"the reward 'own_rewards:number' is .*, which is no function"
    ):
        make_reward("own_rewards:number")
    with pytest.raises(InputError, match=r"No module named 'rewards_nowhere'"):
        make_reward("rewards_nowhere:length")
    with pytest.raises(InputError, match=r"No module named 'rewards_nowhere'"):
        make_reward("rewards_nowhere.inner:length")
    with pytest.raises(
        InputError,
        match="raised ModuleNotFoundError: No module named 'a_package_that_is_not_there'",
    ):
        make_reward("broken_rewards:length")


@pytest.mark.parametrize(
    ("name", "message"),
    [("exactly", "did you mean 'exact'"), (":f", "not of the form"), ("m:", "not of the form")],
)
def test_a_reward_that_does_not_exist(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_reward(name)


def test_a_failing_reward_names_the_completion() -> None:
    def fails(example: Example, completion: str) -> float:
        raise KeyError("score")

    with pytest.raises(
        RewardError,
        match=r"the reward 'mine' raised KeyError: 'score'; prompt 'the p', completion 'the c'\.",
    ) as caught:
        check_reward("mine", fails)(Example("the p", "a", 0), "the c")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, None, "1.0", torch.tensor(1.0), [1.0]], ids=repr
)
def test_a_reward_that_is_no_finite_number_is_an_error(value: Any) -> None:
    with pytest.raises(
        RewardError, match="where a finite number belongs; prompt 'p', completion 'c'"
    ):
        check_reward("mine", lambda example, completion: value)(Example("p", "a", 0), "c")


@pytest.mark.parametrize(
    ("value", "expected"), [(True, 1.0), (0, 0.0), (-2.5, -2.5), (np.float32(0.25), 0.25)], ids=repr
)
def test_numbers_of_any_kind_are_rewards(value: Any, expected: float) -> None:
    found = check_reward("mine", lambda example, completion: value)(Example("p", "a", 0), "c")
    assert type(found) is float
    assert found == expected
