"""Prompts as messages, and texts that end a completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import train_loop_ranks
from train_loop_ranks import lines

from policyloss.cli import main
from policyloss.errors import InputError
from policyloss_train.chat import render_messages, with_template
from policyloss_train.models import tiny_tokenizer
from policyloss_train.sampler import Sample, cut_at_stop
from policyloss_train.tasks import Example, make_task
from policyloss_train.tasks.base import Task

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> Any:
    return tiny_tokenizer(make_task("sort", reward=None, seed=0))


def task(path: Path, rows: list[dict[str, Any]]) -> Any:
    path.write_text("\n".join(map(json.dumps, rows)))
    return make_task(str(path), reward="exact", seed=0)


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def test_messages_are_written_by_the_template_up_to_the_assistant(tmp_path: Path) -> None:
    rows = [
        {"messages": chat("2+2="), "answer": "4", "level": 3},
        {"messages": chat("2+2=", "4", "and 3+3="), "answer": "6"},
        {"prompt": "5+5=", "answer": "10", "split": "held_out"},
    ]
    made = task(tmp_path / "task.jsonl", rows)
    assert made.train[0].prompt == "2+2="
    assert made.train[1].prompt == "2+2=\n4\nand 3+3="
    tok = tokenizer()
    tok.chat_template = TEMPLATE
    written = with_template(made, tok, None, None)
    assert [example.prompt for example in written.train] == [
        "<user>2+2=\n<assistant>",
        "<user>2+2=\n<assistant>4\n<user>and 3+3=\n<assistant>",
    ]
    assert written.train[0].meta == {"level": 3}
    assert written.train[0].messages == made.train[0].messages
    assert written.held_out[0].prompt == "5+5="  # a plain prompt does not change
    assert written.score(written.train[0], "4") == 1


def test_a_system_prompt_or_a_template_makes_messages_of_plain_prompts(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2+2=", "answer": "4"},
        {"messages": [{"role": "system", "content": "Own."}, *chat("3+3=")], "answer": "6"},
        {"prompt": "5+5=", "answer": "10", "split": "held_out"},
    ]
    made = task(tmp_path / "task.jsonl", rows)
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    tok = tokenizer()
    written = with_template(made, tok, None, file)
    assert written.train[0].prompt == "<user>2+2=\n<assistant>"
    assert tok.chat_template == TEMPLATE  # so that an exported tokenizer has it
    written = with_template(made, tok, "Be brief.", None)
    assert [example.prompt for example in (*written.train, *written.held_out)] == [
        "<system>Be brief.\n<user>2+2=\n<assistant>",
        "<system>Own.\n<user>3+3=\n<assistant>",
        "<system>Be brief.\n<user>5+5=\n<assistant>",
    ]


def test_special_tokens_are_there_once() -> None:
    """Templates write the BOS that many tokenizers add as well; such a prompt would begin twice."""
    from tokenizers.processors import TemplateProcessing

    tok = tokenizer()
    tok.add_special_tokens({"bos_token": "<bos>"})
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tok.bos_token_id)]
    )
    assert tok("a")["input_ids"][0] == tok.bos_token_id
    tok.chat_template = "{{ bos_token }}" + TEMPLATE
    text = render_messages(tok, chat("hi"))
    ids = tok(text)["input_ids"]
    assert text == "<user>hi\n<assistant>"
    assert ids.count(tok.bos_token_id) == 1
    assert ids == tok.apply_chat_template(chat("hi"), add_generation_prompt=True)["input_ids"]
    tok.chat_template = TEMPLATE  # one without a BOS, where the tokenizer adds it all the same
    with pytest.raises(InputError, match="puts special tokens around"):
        render_messages(tok, chat("hi"))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": chat("a"), "prompt": "a", "answer": ""}, "both 'prompt' and 'messages'"),
        ({"messages": [], "answer": ""}, "write a list of messages"),
        ({"messages": "a", "answer": ""}, "'messages' is 'a'; write a list"),
        ({"messages": [{"role": "user"}], "answer": ""}, "is not of the form"),
        ({"messages": [{"role": "user", "content": 1}], "answer": ""}, "is not of the form"),
        ({"messages": chat("a", "b"), "answer": ""}, "the last message is the assistant's"),
        ({"messages": chat(" "), "answer": ""}, "the prompt is empty"),
        ({"messages": chat("a")}, "the key 'answer' is missing"),
    ],
)
def test_messages_of_another_form_are_refused(row: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"task.jsonl, line 1: .*{text}"):
        task(tmp_path / "task.jsonl", [row])


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    tok = tokenizer()
    with pytest.raises(InputError, match=r"has no chat template; .* --chat-template FILE"):
        render_messages(tok, chat("a"))
    tok.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match=r"the chat template fails on .*roles must alternate"):
        render_messages(tok, chat("a"))
    plain = Task("t", (Example("a", "b"),), (), lambda e, c: 0.0)
    with pytest.raises(InputError, match=r"cannot read --chat-template .*nowhere"):
        with_template(plain, tok, None, tmp_path / "nowhere")


# --- stop texts


def made(text: str, finished: bool = False) -> Sample:
    ids = torch.tensor(tokenizer()(text)["input_ids"])
    return Sample(0, 0, ids[:1], ids, torch.arange(len(ids)) / 10, finished, text)


def test_a_completion_ends_by_the_first_stop_text() -> None:
    """One token per character: `12;3` is written by four tokens, and the stop by the third."""
    found = cut_at_stop(tokenizer(), made("12;3;4"), ["x", ";"])
    assert found.text == "12"
    assert found.completion_ids.tolist() == made("12;").completion_ids.tolist()
    assert found.rollout_logp.tolist() == pytest.approx([0, 0.1, 0.2])
    assert found.finished
    # Of two, the one that is complete first ends it: "ab" is there after two tokens.
    found = cut_at_stop(tokenizer(), made("abcd"), ["bcd", "ab"])
    assert (found.text, len(found.completion_ids)) == ("", 2)
    for text in ("1234", ""):
        whole = made(text + "5", finished=True)
        assert cut_at_stop(tokenizer(), whole, [";"]) is whole


def test_a_run_with_messages_and_stop_texts_trains_evaluates_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"messages": chat(f"{a}+{b}="), "answer": str(a + b)} for a in range(6) for b in range(4)
    ]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    out = tmp_path / "run"
    options = {
        "task": tmp_path / "task.jsonl",
        "chat_template": tmp_path / "chat.jinja",
        "system_prompt": "Add.",
        "max_new_tokens": 24,
        "eval_prompts": 2,
        "steps": 1,
    }
    command = [*train_loop_ranks.arguments(out, {**train_loop_ranks.SMALL, **options}), "--stop"]
    assert main([*command, "a", "b", "c", "d"]) == 0
    again = [*command, "a", "b", "c", "d", "--resume"]
    assert main(again) == 0
    for row in lines(out, "rollouts"):
        assert row["prompt"].startswith("<system>Add.\n<user>")
        assert not set(row["completion"]) & set("abcd")
    metrics = lines(out)[-1]
    assert metrics["truncated"] < 0.9  # of random characters, most of 24 have one of four
    capsys.readouterr()
    (tmp_path / "chat.jinja").write_text("{{ another }}")  # the run has the text of its own
    assert main(again) == 2
    copy = out / "chat_template.jinja"
    assert f"--chat-template is {tmp_path / 'chat.jinja'}, and the run has {copy}" in (
        capsys.readouterr().err
    )
    assert main(["sample", str(out), "1+1=", "--number", "2"]) == 0
    assert "'<system>Add.\\n<user>1+1=\\n<assistant>'" in capsys.readouterr().out
