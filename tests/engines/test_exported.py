"""A chat model that learned adapters while vLLM sampled, then exported: the likeliest answers are
the same tokens everywhere, by the engine of the run, by a fresh vLLM and by transformers. Which
answers these are depends on the rounding of the processor, and no test demands certain ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

pytestmark = pytest.mark.engines
WORKER = Path(__file__).parents[1] / "workers" / "greedy_vllm.py"
STEPS, NEW_TOKENS, HELD_OUT = 6, 16, 24
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Scores that differ among the completions of a prompt, and a note of everything that was scored.
REWARD = """
import json
def reward(example, completion):
    with open({file!r}, "a") as file:
        file.write(json.dumps([example.prompt, completion]) + "\\n")
    return sum(map(ord, completion)) % 5 / 4
"""


def python(*words: object) -> None:
    """Run Python with these arguments, and show its output if it fails."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@dataclass
class Exported:
    """A run and its export. scored: every prompt and completion, in order."""

    base: Path
    merged: Path
    adapter: Path
    conversations: Path
    scored: list[tuple[str, str]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    from policyloss_train.chat import with_template
    from policyloss_train.models import load_model
    from policyloss_train.setup import warm_up
    from policyloss_train.tasks import make_task

    folder = tmp_path_factory.mktemp("exported")
    base, run, file = folder / "base", folder / "run", folder / "task.jsonl"
    examples = make_task("sort", reward=None, seed=0).train[: 64 + HELD_OUT]
    conversations = [[{"role": "user", "content": e.prompt}] for e in examples]
    rows = [
        {"messages": m, "answer": e.answer, "split": "train" if i < 64 else "held_out"}
        for i, (e, m) in enumerate(zip(examples, conversations, strict=True))
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    (folder / "held_out.json").write_text(json.dumps(conversations[64:]))
    task = make_task(str(file), reward="exact", seed=0)
    model, tokenizer = load_model("tiny32", task, dtype=torch.float32, device="cpu", seed=0)
    tokenizer.chat_template = TEMPLATE
    warm_up(model, tokenizer, with_template(task, tokenizer, None, None), steps=60, seed=0)
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    reward, notes = folder / "reward.py", folder / "scored.jsonl"
    reward.write_text(REWARD.format(file=str(notes)))
    options = {
        "model": base,
        "task": file,
        "reward": f"{reward}:reward",
        "rollout": "vllm",
        "lora_rank": 4,
        "lr": 1e-2,
        "steps": STEPS,
        "eval_every": STEPS,
        "eval_prompts": HELD_OUT,
        "prompts": 8,
        "max_new_tokens": NEW_TOKENS,
        "dtype": "float32",
    }
    words = [word for k, x in options.items() for word in (f"--{k.replace('_', '-')}", x)]
    python("-m", "policyloss", "train", "--out", run, *words)
    python("-m", "policyloss", "export", run, folder / "merged")
    python("-m", "policyloss", "export", run, folder / "adapter", "--adapter")
    scored = [tuple(json.loads(line)) for line in notes.read_text().splitlines()]
    return Exported(base, folder / "merged", folder / "adapter", folder / "held_out.json", scored)


Answers = list[list[Any]]  # ids of the prompt, ids of the answer, their log-probabilities


def assert_same(answers: Answers, expected: Answers) -> None:
    """Equal tokens, whose log-probabilities differ by the rounding of float32 alone."""
    assert [row[:2] for row in answers] == [row[:2] for row in expected]
    for (*_, logp), (*_, other) in zip(answers, expected, strict=True):
        torch.testing.assert_close(torch.tensor(logp), torch.tensor(other), rtol=0, atol=1e-4)


def by_vllm(exported: Exported, model: Path, *adapter: Path) -> Answers:
    out = exported.conversations.with_name("answers.json")
    python(WORKER, model, exported.conversations, out, *adapter)
    answers: Answers = json.loads(out.read_text())
    return answers


def by_transformers(exported: Exported, model: Path, adapter: Path | None = None) -> Answers:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter or model)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        policy.load_adapter(str(adapter))
    answers: Answers = []
    for messages in json.loads(exported.conversations.read_text()):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        written = policy.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = written.sequences[:, len(ids) :]
        logp = torch.cat(written.logits).log_softmax(1).gather(1, new.T).flatten()
        answers.append([ids, *new.tolist(), logp.tolist()])
    return answers


@pytest.fixture(scope="module")
def expected(exported: Exported) -> Answers:
    """The answers of the merged folder by transformers. They differ from the answers before
    learning, so a route without the adapters fails.
    """
    answers = by_transformers(exported, exported.merged)
    assert len(answers) == HELD_OUT
    with pytest.raises(AssertionError):
        assert_same(by_transformers(exported, exported.base), answers)
    return answers


def test_the_engine_of_the_run_answers_as_the_policy_after_its_last_step(
    exported: Exported, expected: Answers
) -> None:
    """The run ends with an evaluation, for which vLLM was given the adapters of the last step."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported.merged)

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    assert {(text(p), text(a)) for p, a, _ in expected} == set(exported.scored[-HELD_OUT:])


def test_a_fresh_vllm_answers_the_same_from_the_merged_folder(
    exported: Exported, expected: Answers
) -> None:
    assert_same(by_vllm(exported, exported.merged), expected)


def test_an_adapter_gives_the_same_answers_on_its_base_model(
    exported: Exported, expected: Answers
) -> None:
    assert_same(by_transformers(exported, exported.base, exported.adapter), expected)
    assert_same(by_vllm(exported, exported.base, exported.adapter), expected)
