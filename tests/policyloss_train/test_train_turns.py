"""Tasks in turns: the tool's tokens are inserted and never trained on, credit is given by turn, and
runs repeat and resume to the byte.
"""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from train_loop_ranks import lines, resume, train
from walk import walked

from policyloss.cli import main
from policyloss.errors import InputError
from policyloss_train.advantages import judge
from policyloss_train.batches import Pack
from policyloss_train.collect import Collector, Completions
from policyloss_train.config import TrainConfig
from policyloss_train.drawing import Rule
from policyloss_train.models import load_model
from policyloss_train.rollout.session import Rollout
from policyloss_train.sampler import (
    Completed,
    Sample,
    complete,
    cut_at_stop,
    sample,
    take_turns,
    uniforms,
)
from policyloss_train.setup import _pack
from policyloss_train.tasks import make_task
from policyloss_train.tasks.base import Tool

TASK = make_task("lookup", reward=None, seed=0)
RUN: dict[str, Any] = {
    "task": "lookup",
    "model": "tiny",
    "reward": None,
    "loss": "dr_grpo",
    "advantage": "turn_loo",
    "max_new_tokens": 16,
    "warmup_steps": 30,
}


def tiny() -> Any:
    return load_model("tiny", TASK, dtype=torch.float32, device="cpu", seed=0)


def chain_of(prompt: str) -> str:
    """The keys and the answer, by calling the tool until it writes a digit."""
    assert TASK.tool is not None
    chain = prompt.removeprefix("find ")[0]
    while not chain[-1].isdigit():
        chain += TASK.tool.answer(prompt, f"{chain[-1]}?")
    return chain


EXAMPLE = next(e for e in TASK.train if len(chain_of(e.prompt)) == 4)  # three keys and a digit

# ---------------------------------------------------------------- the task


def test_every_chain_ends_in_its_answer_and_is_scored_step_by_step() -> None:
    assert TASK.tool is not None
    lengths = set()
    for example in (*TASK.train[:200], *TASK.held_out):
        chain = chain_of(example.prompt)
        assert chain[-1] == example.answer
        lengths.add(len(chain))
        text, steps = "", len(chain)
        for i, (key, entry) in enumerate(pairwise(chain), 1):
            text += f"{key}?{entry}"
            assert TASK.score(example, text) == pytest.approx(i / steps)
        assert TASK.score(example, text + example.answer) == 1
        assert TASK.score(example, example.answer) == pytest.approx(1 / steps), "a guess"
        twice = f"{chain[0]}?{chain[1]}" * 2
        assert TASK.score(example, twice) == pytest.approx(1 / steps), "the same key again"
        # The key must be the policy's own: `?` after the tool's answer calls nothing.
        assert TASK.tool.answer(example.prompt, "?") == "-"
        if len(chain) > 2:
            idle = f"{chain[0]}?{chain[1]}?-"
            assert TASK.score(example, idle) == pytest.approx(1 / steps)
        wrapped = f"<user>{example.prompt}</user>"
        assert TASK.tool.answer(wrapped, f"{chain[0]}?") == chain[1], "in a chat template"
    assert TASK.tool.answer("no question", "a?") == "-"
    assert lengths == {2, 3, 4, 5}
    assert not {e.prompt for e in TASK.train} & {e.prompt for e in TASK.held_out}


# ---------------------------------------------------------------- the turns

TOOL = Tool("?", lambda prompt, call: f"{call[0]}{len(prompt)}")


def scripted(turns: list[str], limit: int, *, support: bool = False) -> Completed:
    """A completion whose turns are these texts."""
    _, tokenizer = tiny()
    rest = iter(turns)

    def go_on(rows: list[int], starts: list[list[int]], ends: list[int]) -> list[Completed]:
        tokens = tokenizer.encode(next(rest))
        n = len(tokens)
        kept = (torch.tensor(tokens * 2, dtype=torch.int32), torch.arange(0, 2 * n + 1, 2))
        seen.append("".join(tokenizer.decode(starts[0])))
        return [Completed(tokens, torch.full((n,), -0.5), kept if support else None)]

    seen: list[str] = []
    ids = [tokenizer.encode("abc")]
    (one,) = take_turns(TOOL, tokenizer, ["abc"], ids, limit, go_on)
    text = tokenizer.decode(one.tokens)
    assert all(f"abc{text}".startswith(start) for start in seen), "each turn continues the last"
    return one


def test_the_tool_writes_after_each_call() -> None:
    _, tokenizer = tiny()
    one = scripted(["x?", "yz?", "w"], 20, support=True)
    assert tokenizer.decode(one.tokens) == "x?x3yz?y3w"
    assert one.turn_ids is not None
    assert one.turn_ids.tolist() == [0, 0, -1, -1, 1, 1, 1, -1, -1, 2]
    assert one.logp.tolist() == [-0.5, -0.5, 0, 0, -0.5, -0.5, -0.5, 0, 0, -0.5]
    assert one.support is not None
    ids, offsets = one.support
    assert offsets.diff().tolist() == [2, 2, 1, 1, 2, 2, 2, 1, 1, 2]
    assert ids[4:6].tolist() == one.tokens[2:4], "a token of the tool could only be itself"


def test_a_completion_without_room_ends_with_its_call() -> None:
    """After `x?x3` and `y?` there are six tokens; two of the tool and one more would be nine."""
    for limit, turns in ((9, 3), (8, 2)):
        one = scripted(["x?", "y?", "w"], limit)
        assert one.turn_ids is not None
        assert one.turn_ids.max() == turns - 1
        assert one.turn_ids[-1] == turns - 1, "the last token is the policy's"


def test_the_end_of_a_call_is_one_token() -> None:
    _, tokenizer = tiny()
    with pytest.raises(InputError, match=r"must read '\?!', the end of a call, as one token"):
        take_turns(Tool("?!", TOOL.answer), tokenizer, ["a"], [[5]], 9, lambda *_: [])


def drawn(model: Any, tokenizer: Any, places: list[int], batch_tokens: int) -> list[Sample]:
    """Completions of some prompts."""
    numbers = uniforms(0, 0, 12, 16)[places]
    options: Any = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 16}
    options |= {"batch_tokens": batch_tokens, "uniforms": numbers, "tool": TASK.tool}
    prompts = [(e.id, 0, e.prompt) for e in (TASK.train[place] for place in places)]
    return sample(model, tokenizer, prompts, **options)


def test_samples_do_not_depend_on_batches_and_have_the_log_probs_of_the_model() -> None:
    """Each turn is sampled from its own start; one forward over everything gives the same
    numbers, and the tool's tokens are those of the tool.
    """
    from policyloss_train.setup import warm_up

    model, tokenizer = tiny()
    warm_up(model, tokenizer, TASK, steps=40, seed=0)
    model.double()
    every = drawn(model, tokenizer, list(range(12)), 10_000)
    apart = drawn(model, tokenizer, [7, 2, 11, 3], 40)
    for place, s in zip([7, 2, 11, 3], apart, strict=True):
        assert torch.equal(s.completion_ids, every[place].completion_ids)
    counts = []
    for s in every:
        turns = s.turn_ids
        assert turns is not None
        assert len(turns) == len(s.completion_ids) <= 16
        counts.append(int(turns.max()) + 1)
        ids = torch.cat([s.prompt_ids, s.completion_ids])
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
        logp = logp.gather(-1, ids[1:, None])[len(s.prompt_ids) - 1 :, 0].float()
        torch.testing.assert_close(s.rollout_logp[turns >= 0], logp[turns >= 0])
        assert (s.rollout_logp[turns < 0] == 0).all()
        parts = s.text.split("?")
        for call, entry in islice(pairwise(parts), counts[-1] - 1):
            key = call[1:] if call is not parts[0] else call
            assert TASK.tool is not None
            assert entry[0] == TASK.tool.answer(TASK.train[s.example].prompt, f"{key}?")
    assert len(set(counts)) > 1


def test_a_later_turn_draws_the_next_numbers_and_has_less_room() -> None:
    """Without an end token, all rows end at the limit, 8 tokens."""
    model, _ = tiny()
    starts, written, numbers = [[9, 8, 7], [6, 5], [4, 3]], [3, 0, 6], uniforms(0, 0, 3, 8)
    rule = Rule(1.0)
    together = complete(model, starts, numbers, [], rule, 1000, written=written)
    for start, skipped, row, one in zip(starts, written, numbers, together, strict=True):
        (alone,) = complete(model, [start], row[None, skipped:], [], rule, 1000)
        assert one.tokens == alone.tokens
    assert [len(one.tokens) for one in together] == [5, 8, 2]


def test_a_demonstration_is_imitated_without_the_tools_tokens() -> None:
    _, tokenizer = tiny()
    chain = chain_of(EXAMPLE.prompt)
    shown = "".join(f"{key}?" for key in chain[:-1]) + chain[-1]
    pack = _pack(tokenizer, [(EXAMPLE.prompt, shown)], TASK.tool)
    targets = pack.tokens["targets"]
    whole = "".join(f"{key}?{entry}" for key, entry in pairwise(chain))
    whole += f"{chain[-1]}<end>"
    assert tokenizer.decode(targets[pack.tokens["completion"]]) == whole
    assert tokenizer.decode(targets[pack.tokens["mask"]]) == f"{shown}<end>"


# ---------------------------------------------------------------- credit


def in_turns(group: int, turn_ids: list[int], rewards: list[float]) -> Sample:
    n = len(turn_ids)
    ids = torch.arange(n) + 5
    more: Any = {"turn_ids": torch.tensor(turn_ids), "turn_rewards": tuple(rewards)}
    return Sample(
        *(0, group, torch.tensor([3, 4]), ids, torch.zeros(n), True, ""), sum(rewards), **more
    )


ROWS = [
    in_turns(0, [0, 0, -1, 1], [0.25, 0.5]),
    in_turns(0, [0], [1.0]),
    in_turns(0, [0, -1, 1, 1], [0.5, 0.0]),
]


def test_a_pack_knows_turns_and_their_rewards() -> None:
    """Of each row, the first position predicts the second token of the prompt."""
    pack = Pack.of(ROWS)
    turns = [-1, 0, 0, -1, 1, -1, 0, -1, 0, -1, 1, 1]
    assert pack.tokens["turn_ids"].tolist() == turns
    assert pack.tokens["mask"].tolist() == [turn >= 0 for turn in turns]
    expected = [0, 0, 0.25, 0, 0.5, 0, 1, 0, 0.5, 0, 0, 0]
    assert pack.tokens["turn_rewards"].tolist() == expected
    cut = Pack.of([*ROWS[:2], Sample(**{**vars(ROWS[2]), "finished": False})], train_on_cut=False)
    assert cut.tokens["mask"].tolist() == [i < 7 and turn >= 0 for i, turn in enumerate(turns)]


def test_credit_by_turn_by_hand() -> None:
    """Returns: 0.75 and 0.5; 1; 0.5 and 0. Without a tool, turn_loo is rloo."""
    config = TrainConfig(advantage="turn_loo")
    advantages, _ = judge(config, Pack.of(ROWS), "local")
    first, second, third = 0.75 - 0.75, 1 - 0.625, 0.5 - 0.875
    expected = [0, first, first, 0, 0.5, 0, second, 0, third, 0, -0.5, -0.5]
    torch.testing.assert_close(advantages, torch.tensor(expected))
    plain = Pack.of([Sample(**{**vars(s), "turn_ids": None, "turn_rewards": ()}) for s in ROWS])
    ours, theirs = (
        judge(TrainConfig(advantage=name), plain, "local")[0] for name in ("turn_loo", "rloo")
    )
    mask = plain.tokens["mask"]
    torch.testing.assert_close(ours[mask], theirs[mask])


def test_the_rewards_of_turns_sum_to_the_score() -> None:
    """A right call, a wrong one, two right ones and the answer: each right step is a quarter."""
    _, tokenizer = tiny()
    a, b, c, answer = chain_of(EXAMPLE.prompt)
    wrong = next(key for key in ascii_lowercase if key not in (a, b, c))
    text = f"{a}?{b}{wrong}?-{b}?{c}{c}?{answer}{answer}"
    ids = torch.tensor(tokenizer.encode(text))
    turns = torch.tensor([0, 0, -1, 1, 1, -1, 2, 2, -1, 3, 3, -1, 4])
    s = Sample(EXAMPLE.id, 0, ids, ids, torch.zeros(13), True, text, turn_ids=turns)
    nothing: Any = None
    rollout = Rollout("built-in", nothing, nothing, nothing, tokenizer)
    config = TrainConfig(task="lookup", reward_timeout=0)
    collector = Collector(config, TASK, rollout, nothing, warn=pytest.fail)
    scored = collector._score(EXAMPLE, s)
    assert scored.reward == 1
    assert scored.turn_rewards == pytest.approx((0.25, 0, 0.25, 0.25, 0.25))


def test_completions_that_wait_keep_their_turns() -> None:
    tensors, numbers = Completions(ROWS, statistics={"tokens": 9.0}).state()
    again = Completions.from_state(tensors, json.loads(json.dumps(numbers)))
    again.check(1, 10)
    for before, after in zip(ROWS, again.samples, strict=True):
        assert before.turn_ids is not None
        assert after.turn_ids is not None
        assert torch.equal(before.turn_ids, after.turn_ids)
        assert before.turn_rewards == after.turn_rewards
    damages: list[Any] = [{"turn_ids": torch.tensor([0, 0, -1, 2])}, {"turn_rewards": (1.0, "a")}]
    for damage in damages:
        damaged = replace(again, samples=[replace(again.samples[0], **damage)])
        with pytest.raises(TypeError, match="a completion with the turns"):
            damaged.check(1, 10)


def test_a_stop_text_cuts_the_turns_too() -> None:
    _, tokenizer = tiny()
    ids = tokenizer("a?bc", return_tensors="pt")["input_ids"][0]
    turns = torch.tensor([0, 0, -1, 1])
    s = Sample(0, 0, ids, ids, torch.zeros(4), True, "a?bc", turn_ids=turns)
    cut = cut_at_stop(tokenizer, s, ["b"])
    assert cut.turn_ids is not None
    assert cut.turn_ids.tolist() == [0, 0, -1]


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("turns") / "run"
    assert train(out, **RUN, staleness=1, top_p=0.95, steps=3) == 0
    return out


def test_the_rows_of_a_run_have_turns(run: Path) -> None:
    rows = lines(run, "rollouts")
    assert any(-1 in row["turn_ids"] for row in rows)
    for row in rows:
        turns = row["turn_ids"]
        assert row["mask"] == [turn >= 0 for turn in turns]
        by_turn: dict[int, set[float]] = {}
        for turn, advantage in zip(turns, row["token_advantage"], strict=True):
            by_turn.setdefault(turn, set()).add(advantage)
        assert all(len(found) == 1 for found in by_turn.values()), "one advantage for each turn"
        assert by_turn.get(-1, {0.0}) == {0.0}
        gap = [
            abs(a - b)
            for a, b, turn in zip(row["old_logp"], row["rollout_logp"], turns, strict=True)
            if turn >= 0
        ]
        assert row["weights"] != row["step"] - 1 or max(gap) < 1e-4
    assert all("turn_ids" in row for row in lines(run, "answers"))


def test_a_run_in_turns_resumes_to_the_byte(run: Path, tmp_path: Path) -> None:
    """In the middle, completions wait for their step."""
    out = tmp_path / "run"
    assert train(out, **RUN, staleness=1, top_p=0.95, steps=2) == 0
    assert resume(out, reward=None, extend=3) == 0
    for name in ("metrics.jsonl", "rollouts.jsonl", "answers.jsonl"):
        assert (out / name).read_bytes() == (run / name).read_bytes(), name


def test_eval_and_sample_call_the_tool(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--json", "--prompts", "16"]) == 0
    found = {r["prompt"]: r["completion"] for r in json.loads(capsys.readouterr().out)["results"]}
    last = lines(run, "answers")[-8:]
    assert {row["prompt"]: row["completion"] for row in last}.items() <= found.items()
    assert main(["sample", str(run), EXAMPLE.prompt, "--number", "4"]) == 0
    assert capsys.readouterr().out.startswith(repr(EXAMPLE.prompt))


@walked(
    "option",
    [
        {"rollout": "vllm"},
        {"rollout": "http://localhost:1"},
        {"engine": "tinker:http://localhost:1"},
        {"parallel": "fsdp"},
    ],
    ids=["vllm", "server", "tinker", "fsdp"],
)
def test_engines_that_cannot_call_a_tool_are_refused(option: dict[str, str]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(InputError, match=rf"--task lookup calls a tool .* --{name} {value}"):
        TrainConfig(**{"task": "lookup", "lora_rank": 4, **option})  # type: ignore[arg-type]


@pytest.mark.slow
def test_reinforcement_teaches_the_calls(tmp_path: Path) -> None:
    """`docs/turns.md` has the numbers of three seeds."""
    options = ["--task", "lookup", "--loss", "dr_grpo", "--advantage", "turn_loo"]
    assert main(["train", *options, "--steps", "60", "--out", str(tmp_path / "run")]) == 0
    rows = [row for row in lines(tmp_path / "run") if "accuracy" in row]
    assert rows[0]["accuracy"] < 0.3
    assert sum(row["accuracy"] for row in rows[-10:]) / 10 > 0.8
    assert rows[-1]["eval/accuracy"] > 0.95


def test_the_example_prints_the_numbers_of_its_runs(run: Path, tmp_path: Path) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "turns.py"))
    (tmp_path / "turn_loo-0").symlink_to(run)
    numbers = example["train"](tmp_path, "turn_loo", 0)
    rows = [row for row in lines(run) if "accuracy" in row]
    assert numbers["first step"] == rows[0]["accuracy"]
    assert numbers["held out, after"] == rows[-1]["eval/accuracy"]
    table = example["table"]({"a": [{"x": 0.25}, {"x": 0.5}]})
    assert table.splitlines() == [
        "| advantage | x |",
        "|---|---|",
        "| `a` | **0.375** (0.250, 0.500) |",
    ]
