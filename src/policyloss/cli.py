"""The `policyloss` command. Each subcommand is a function of the words after its name, which prints
and returns the exit code. Neither a help nor a list needs torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from policyloss import __version__
from policyloss.choose import ARGUMENTS, losses
from policyloss.commands import (
    HELP,
    OPTIONS,
    Argument,
    Parser,
    arguments_of,
    parser_of,
    read_options,
    read_words,
)
from policyloss.commands.arguments import (
    JSON,
    Diff,
    Doctor,
    Eval,
    Explain,
    ExplainTrl,
    Explore,
    Export,
    Report,
    Sample,
    WhatIfTokens,
)
from policyloss.errors import InputError, PolicyLossError, unknown_name, visible
from policyloss.train.config import TrainConfig


class Command(NamedTuple):
    """A subcommand: a sentence about it, its arguments or the dataclass that declares them, and the
    module of its function.
    """

    about: str
    options: type | list[Argument]
    module: str

    @property
    def arguments(self) -> list[Argument]:
        """Its arguments."""
        return self.options if isinstance(self.options, list) else arguments_of(self.options)


COMMANDS = {
    "presets": Command("List the named losses.", [JSON], "policyloss.cli"),
    "choose": Command(
        "Name a loss for what you know about your run, with the reasons.",
        ARGUMENTS,
        "policyloss.choose",
    ),
    "explain": Command(
        "Explain a loss: formula, numbers, zero gradients, names, traps.",
        Explain,
        "policyloss.cli",
    ),
    "diff": Command("Show how two losses differ.", Diff, "policyloss.cli"),
    "explain-trl": Command(
        "Explain the loss of a TRL GRPOConfig: the options that decide, traps, the loss.",
        ExplainTrl,
        "policyloss.cli",
    ),
    "explore": Command(
        "Write a page to play with losses, which opens offline: curves, gradients, formulas.",
        Explore,
        "policyloss.explore.command",
    ),
    "train": Command(
        "Train a language model by reinforcement learning with any policy loss.",
        TrainConfig,
        "policyloss.train.commands",
    ),
    "eval": Command(
        "Evaluate the policy of a run on held-out prompts, greedily.",
        Eval,
        "policyloss.train.commands",
    ),
    "sample": Command(
        "Sample completions from the policy of a run.", Sample, "policyloss.train.commands"
    ),
    "export": Command(
        "Write the policy of a run as a Hugging Face folder: weights, tokenizer, chat template.",
        Export,
        "policyloss.train.export",
    ),
    "report": Command(
        "Draw one or more runs as one HTML page, which opens offline.",
        Report,
        "policyloss.report.command",
    ),
    "doctor": Command(
        "Find out why engine and trainer disagree, or what is wrong with a run. The exit code is 0 "
        "for healthy, 1 for a cause, 2 for wrong input, 3 for a gap without a known cause.",
        Doctor,
        "policyloss.doctor.command",
    ),
    "what-if": Command(
        "Try every loss on the tokens that a run stored, and find the smallest change of the loss "
        "that cures what is wrong.",
        WhatIfTokens,
        "policyloss.whatif.command",
    ),
}


def presets_command(words: Sequence[str]) -> int:
    """The named losses, one per line."""
    rows = losses()["presets"]
    if read_words("presets", [JSON], words):
        names = ("title", "paper", "spec")
        _print_json([{"name": name, **{k: row[k] for k in names}} for name, row in rows.items()])
        return 0
    width, column = max(map(len, rows)), max(len(row["title"]) for row in rows.values())
    for name, row in rows.items():
        print(f"{name:<{width}}  {row['title']:<{column}}  {row['paper']}")
    return 0


def explain_command(words: Sequence[str]) -> int:
    """One loss: formula, numbers, traps."""
    from policyloss.explain import explain

    options = read_options("explain", Explain, words)
    explanation = explain(_loss(options.loss))
    _print_json(explanation.to_dict()) if options.json else print(explanation)
    return 0


def explain_trl_command(words: Sequence[str]) -> int:
    """The loss of a TRL GRPOConfig."""
    from policyloss.compat.trl import explain_config, spec_from_config
    from policyloss.compat.trl.config import BESIDE
    from policyloss.compat.trl.options import DEFAULTS
    from policyloss.presets import read_json

    args = read_options("explain-trl", ExplainTrl, words)
    options = read_json(args.config)
    if not isinstance(options, dict):
        raise PolicyLossError(
            f"{args.config} must hold one JSON object, the options of a GRPOConfig by name."
        )
    for name in options:
        meant = get_close_matches(name, DEFAULTS, 1, cutoff=0.88) if name not in DEFAULTS else []
        if meant:
            raise PolicyLossError(
                f"{args.config}: unknown option {name!r}; did you mean {meant[0]!r}?"
            )
    config = SimpleNamespace(**{**DEFAULTS, **options})
    if args.json:
        _print_json(spec_from_config(config, handled=BESIDE).to_dict())
    else:
        print(explain_config(config))
    return 0


def diff_command(words: Sequence[str]) -> int:
    """How two losses differ."""
    from policyloss.explain import diff

    options = read_options("diff", Diff, words)
    difference = diff(_loss(options.a), _loss(options.b))
    _print_json(difference.to_dict()) if options.json else print(difference)
    return 0


def _loss(name: str) -> Any:
    """`read_loss`, also of TRL's parts, which `explain-trl --json` writes."""
    import policyloss.compat.trl  # noqa: F401  # makes those parts known
    from policyloss.presets import read_loss

    return read_loss(name)


def overview() -> Parser:
    """The parser without a command, whose help lists the commands."""
    about = "The loss functions of LLM reinforcement learning."
    top = Parser("policyloss", "COMMAND [options]", about)
    group = top.add_argument_group("commands")
    for name, command in COMMANDS.items():
        group.add_argument(name, nargs="?", help=command.about.partition(". ")[0])
    last = top.add_argument_group(OPTIONS)
    version = f"policyloss {__version__}"
    last.add_argument("--version", action="version", version=version, help="Print the version.")
    last.add_argument(*HELP, action="help", help="Print this help, or that of a command.")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 for a wrong argument, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a letter gets "?", not a traceback.
            stream.reconfigure(errors="replace")
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(arguments or ["--help"])
        print(end="", flush=True)  # what is still in the buffer
        return code
    except PolicyLossError as error:
        return _failure(str(error))
    except KeyboardInterrupt:
        print("policyloss: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe (`| head`)
        _close_output()
        return 0
    except OSError as error:
        if error.filename is not None:
            return _failure(f"{error.filename}: {error.strerror}.")
        _close_output()
        return _failure(f"cannot write the output: {error.strerror or error}.")


def _run(words: Sequence[str]) -> int:
    name, *rest = words
    if name.startswith("-"):
        overview().parse_args([name])
    if name not in COMMANDS:
        raise InputError(unknown_name("command", name, COMMANDS))
    if {*HELP} & set(rest):
        parser_of(name, COMMANDS[name].about, COMMANDS[name].arguments).print_help()
        return 0
    return _function(name)(rest)


def _failure(sentence: str) -> int:
    """Print the sentence on one line, in which no name of a file can move the cursor."""
    print(f"policyloss: {' '.join(visible(sentence).split())}", file=sys.stderr)
    return 2


def _close_output() -> None:
    """Let Python flush into a sink when it ends: it would fail again, and say so."""
    with suppress(OSError):  # no file can be opened any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _function(name: str) -> Callable[[Sequence[str]], int]:
    """The function of a command, or an error that names the extra to install."""
    module = COMMANDS[name].module
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith("policyloss.train") or str(error.name).startswith("policyloss"):
            raise  # nothing that could be installed is missing
        raise PolicyLossError(
            f"policyloss {name} needs {error.name}; pip install 'policyloss[train]'."
        ) from None
    command: Callable[[Sequence[str]], int] = getattr(loaded, f"{name.replace('-', '_')}_command")
    return command


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
