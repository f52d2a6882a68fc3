"""`policyloss what-if RUN_OR_FILE`: reads its options, tries the losses, writes the page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from policyloss.catalogue import as_spec
from policyloss.commands import read_options
from policyloss.errors import InputError, PolicyLossError, safe_repr, visible
from policyloss.mixture import read_loss
from policyloss.output import check_output, write_output
from policyloss_lab.commands import WhatIfTokens
from policyloss_lab.diagnosis.command import load_model
from policyloss_lab.whatif.page import page
from policyloss_lab.whatif.result import what_if
from policyloss_lab.whatif.tokens import StoredTokens, read
from policyloss_lab.whatif.weights import EachToken

_DIGITS = 18  # the most digits of a step


def what_if_command(arguments: Sequence[str]) -> int:
    """Try every loss on the stored tokens and print the result; returns the exit code."""
    options = read_options("what-if", WhatIfTokens, arguments)
    if options.out is not None:
        check_output(options.out, "--out")
    # Refuse wrong names before a model is loaded.
    spec = None if options.loss is None else as_spec(read_loss(options.loss))
    for name in options.presets:
        as_spec(name)
    tokens = read(options.path, _step(options.step))
    model, temperature = None, 1.0
    if options.model is not None:
        model = load_model(options.model)
    elif options.path.is_dir() and options.through != EachToken.name:
        tokens, model, temperature = with_model_of_run(options.path, tokens)
    result = what_if(
        tokens,
        options.presets or None,
        spec=spec,
        model=model,
        temperature=temperature,
        through=options.through,
    )
    if options.out is not None:
        write_output(options.out, page(result, options.path.name).encode(), "--out")
    print(result.to_json() if options.json else visible(str(result)), flush=True)
    if options.out is not None and not options.json:
        print(f"{options.out}: open it in a browser.", flush=True)
    return 0


def _step(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if not text.isdecimal() or len(text) > _DIGITS:
        raise InputError(f"--step takes a whole number or all, got {safe_repr(text)}.")
    return int(text)


def with_model_of_run(run: Path, tokens: StoredTokens) -> tuple[StoredTokens, Any, float]:
    """The tokens with their prompts as ids, the policy of the run's last checkpoint, and its
    sampling temperature; a note if there is no such policy.
    """

    def without(why: str) -> tuple[StoredTokens, Any, float]:
        note = f"Losses are compared without the model of the run: {why}"
        return tokens.replace(notes=(*tokens.notes, note)), None, 1.0

    if not (run / "checkpoints").is_dir():
        return without("it has no checkpoint.")
    if tokens.ids is None or tokens.prompt_texts is None:
        return without("the ids of tokens or the prompts were not stored.")
    loaders = entry_points(group="policyloss.policies")  # policyloss-train has one
    if not loaders:
        return without("it needs policyloss-train; pip install 'policyloss[train]'.")
    try:
        policy = next(iter(loaders)).load()(run)
        prompts = policy.encode(tokens.prompt_texts)
    except PolicyLossError as error:
        return without(str(error))
    notes = (*tokens.notes, f"Gradients pass the weights after step {policy.step}.")
    return tokens.replace(prompts=prompts, notes=notes), policy.model, policy.temperature
