"""`policyloss what-if RUN_OR_FILE`: reads its options, tries the losses, writes the page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policyloss.doctor.command import load_model
from policyloss.errors import InputError, PolicyLossError, safe_repr, visible
from policyloss.output import check_output, write_output
from policyloss.presets import as_spec, read_loss
from policyloss.whatif.page import page
from policyloss.whatif.reading import read
from policyloss.whatif.result import THROUGH, what_if
from policyloss.whatif.tangent import EachToken
from policyloss.whatif.tokens import StoredTokens

_DIGITS = 18  # of a step


def what_if_command(arguments: Sequence[str]) -> int:
    """Print what every loss would have done with the stored tokens; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="policyloss what-if",
        description="Try losses on the tokens that a run stored: weights, clipping, effective "
        "sample size, cosines, changes, and the smallest change of the loss that cures what is "
        "wrong.",
    )
    parser.add_argument(
        "path",
        type=Path,
        help="a run directory with rollouts.jsonl, or a .jsonl or .safetensors file of tokens",
    )
    parser.add_argument(
        "--presets", nargs="+", metavar="NAME", help="the losses to try (default: every preset)"
    )
    parser.add_argument(
        "--loss", help="your loss: a preset, or a JSON file of a spec (default: that of the run)"
    )
    parser.add_argument(
        "--step",
        help="the stored step to take, or all (default: the last one with an advantage that is not "
        "0)",
    )
    parser.add_argument("--out", type=Path, help="write the page here, such as page.html")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--model", help="the folder of the model, for a file with ids and prompt_ids (transformers)"
    )
    parser.add_argument(
        "--through",
        choices=THROUGH,
        help="what gradients pass: all parameters of the model, the weight of its head, or tokens "
        "alone, without a model (default: the first that is there and fits into memory)",
    )
    args = parser.parse_args(arguments)
    if args.out is not None:
        check_output(args.out, "--out")
    # Names that are wrong are refused before a model is loaded.
    spec = None if args.loss is None else as_spec(read_loss(args.loss))
    for name in args.presets or ():
        as_spec(name)
    tokens = read(args.path, _step(args.step))
    model, temperature = None, 1.0
    if args.model is not None:
        model = load_model(args.model)
    elif args.path.is_dir() and args.through != EachToken.name:
        tokens, model, temperature = with_model_of_run(args.path, tokens)
    result = what_if(
        tokens,
        args.presets,
        spec=spec,
        model=model,
        temperature=temperature,
        through=args.through,
    )
    if args.out is not None:
        write_output(args.out, page(result, args.path.name).encode(), "--out")
    print(result.to_json() if args.json else visible(str(result)), flush=True)
    if args.out is not None and not args.json:
        print(f"{args.out}: open it in a browser.", flush=True)
    return 0


def _step(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if not text.isdecimal() or len(text) > _DIGITS:
        raise InputError(f"--step takes a whole number or all, got {safe_repr(text)}.")
    return int(text)


def with_model_of_run(run: Path, tokens: StoredTokens) -> tuple[StoredTokens, Any, float]:
    """The tokens with their prompts as ids, the policy of the run's last checkpoint, and the
    temperature it was sampled at; a note instead where there is no such policy.
    """

    def without(why: str) -> tuple[StoredTokens, Any, float]:
        note = f"Losses are compared without the model of the run: {why}"
        return tokens.replace(notes=(*tokens.notes, note)), None, 1.0

    if not (run / "checkpoints").is_dir():
        return without("it has no checkpoint.")
    if tokens.ids is None or tokens.prompt_texts is None:
        return without("the ids of tokens or the prompts were not stored.")
    try:
        from policyloss.train.commands import FromRun, load_run, unscored_options
        from policyloss.train.sampler import encode
    except ModuleNotFoundError as error:
        return without(f"it needs {error.name}; pip install 'policyloss[train]'.")
    try:
        config, spec = unscored_options(FromRun(run=run, device="cpu"))
        setup, step = load_run(FromRun(run=run, device="cpu"), config, spec)
        prompts = encode(setup.tokenizer, tokens.prompt_texts)
    except PolicyLossError as error:
        return without(str(error))
    notes = (*tokens.notes, f"Gradients pass the weights after step {step}.")
    return tokens.replace(prompts=prompts, notes=notes), setup.model, config.temperature
