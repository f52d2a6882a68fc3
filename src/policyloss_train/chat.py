"""Prompts as messages: the tokenizer's chat template turns them into text before sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.output import read_regular
from policyloss_train.tasks import Example, Task
from policyloss_train.tasks.base import is_text
from policyloss_train.time_limit import TimeIsUp, call_within, many_calls

TEMPLATE_BYTES = 1 << 20
TEMPLATE_S = 5.0  # time limit of a template for one prompt


def with_template(
    task: Task, tokenizer: Any, system_prompt: str | None, chat_template: Path | None
) -> Task:
    """The task with the prompts that the model reads. The template renders prompts that are
    messages, up to the start of the assistant's reply. Plain prompts stay unchanged, unless a
    system prompt or a template is named: then each prompt becomes a user message.

    chat_template: a file with a template that replaces the tokenizer's own.
    """
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    wanted = system_prompt is not None or chat_template is not None

    def written(examples: Sequence[Example]) -> tuple[Example, ...]:
        return tuple(
            replace(example, prompt=render_messages(tokenizer, _messages(example, system_prompt)))
            if example.messages or wanted
            else example
            for example in examples
        )

    with many_calls():
        return replace(task, train=written(task.train), held_out=written(task.held_out))


def read_template(path: Path) -> str:
    """The chat template in a file."""
    try:
        return read_regular(path, TEMPLATE_BYTES, follow=True).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read --chat-template {path}: {error}.") from error


def render_messages(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """Messages as the text of a prompt, without special tokens that the tokenizer adds itself."""
    if tokenizer.chat_template is None:
        raise InputError(
            "prompts are messages, but the tokenizer has no chat template; name a file with one: "
            "--chat-template FILE."
        )
    try:
        write = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
        text: str = call_within(TEMPLATE_S, write, list(map(dict, messages)))
    except TimeIsUp:
        late = f"takes longer than {TEMPLATE_S:g} s for {messages!r:.200}"
        raise InputError(f"the chat template {late}; use another one.") from None
    except Exception as error:  # a template is third-party code
        raise InputError(f"the chat template fails on {messages!r:.200}: {error}.") from error
    if not is_text(text):
        raise InputError(f"half of a surrogate pair, which is no character, is in {text!r:.200}.")
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    for candidate in (text, text.removeprefix(tokenizer.bos_token or "")):
        if tokenizer(candidate)["input_ids"] == expected:
            return candidate
    raise InputError(
        f"the tokenizer puts special tokens around {text!r:.200}, which the chat template does "
        "not contain; set add_bos_token and add_eos_token to false in its tokenizer_config.json."
    )


def _messages(example: Example, system_prompt: str | None) -> list[Mapping[str, str]]:
    messages = list(example.messages) or [{"role": "user", "content": example.prompt}]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages
