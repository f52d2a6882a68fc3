"""The `policyloss` command. Each subcommand is a function that returns the text to print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from policyloss.errors import PolicyLossError, visible


class Command(NamedTuple):
    """A subcommand: its name, a line about it, its arguments, and what returns its text."""

    name: str
    about: str
    run: Callable[[argparse.Namespace], str]
    arguments: dict[str, str]


def presets_command(args: argparse.Namespace) -> str:
    """The named losses, one per line."""
    from policyloss.presets import PRESETS

    if args.json:
        rows = [
            {"name": p.name, "title": p.title, "paper": p.paper, "spec": p.spec.to_dict()}
            for p in PRESETS.values()
        ]
        return _json(rows)
    width = max(len(name) for name in PRESETS)
    column = max(len(p.title) for p in PRESETS.values())
    return "\n".join(f"{p.name:<{width}}  {p.title:<{column}}  {p.paper}" for p in PRESETS.values())


def explain_command(args: argparse.Namespace) -> str:
    """What one loss is."""
    from policyloss.explain import explain

    explanation = explain(_loss(args.loss))
    return _json(explanation.to_dict()) if args.json else str(explanation)


def explain_trl_command(args: argparse.Namespace) -> str:
    """What a TRL GRPOConfig trains."""
    from policyloss.compat.trl import explain_config, spec_from_config
    from policyloss.compat.trl.config import BESIDE
    from policyloss.compat.trl.options import DEFAULTS
    from policyloss.presets import read_json

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
        return _json(spec_from_config(config, handled=BESIDE).to_dict())
    return explain_config(config)


def diff_command(args: argparse.Namespace) -> str:
    """How two losses differ."""
    from policyloss.explain import diff

    difference = diff(_loss(args.a), _loss(args.b))
    return _json(difference.to_dict()) if args.json else str(difference)


_LOSS = "the name of a preset, or the path of a JSON file that holds LossSpec.to_dict()"
COMMANDS = (
    Command("presets", "list the named losses", presets_command, {}),
    Command(
        "explain",
        "say what a loss is: formula, numbers, zero gradients, names, traps",
        explain_command,
        {"loss": _LOSS},
    ),
    Command(
        "explain-trl",
        "say what a TRL GRPOConfig trains: the options that decide, traps, the loss",
        explain_trl_command,
        {"config": "the path of a JSON file with options; one that is missing has TRL's default"},
    ),
    Command("diff", "say how two losses differ", diff_command, {"a": _LOSS, "b": _LOSS}),
)


TRAINING = {
    "choose": "name a loss for what you know about your run, with the reasons",
    "train": "train a language model with any of these losses",
    "eval": "evaluate the policy of a run on held-out prompts",
    "sample": "sample completions from the policy of a run",
    "export": "write the policy of a run as a Hugging Face folder",
    "report": "draw one or more runs as one HTML page",
    "doctor": "say why engine and trainer disagree, or what is wrong with a run",
    "explore": "write a page to play with losses: curves, gradients, formulas, names",
    "what-if": "try every loss on the tokens that a run stored",
}
# The commands that need torch alone, and the module of each.
LIGHT = {
    "choose": "policyloss.choose",
    "report": "policyloss.report.command",
    "doctor": "policyloss.doctor.command",
    "explore": "policyloss.explore.command",
    "what-if": "policyloss.whatif.command",
}


def _loss(name: str) -> Any:
    """`read_loss` that also knows TRL's parts, which `explain-trl --json` writes."""
    import policyloss.compat.trl  # noqa: F401  # makes those parts known
    from policyloss.presets import read_loss

    return read_loss(name)


def command_line() -> argparse.ArgumentParser:
    """The command line: one subparser per entry of `COMMANDS`."""
    from policyloss import __version__

    top = argparse.ArgumentParser(
        prog="policyloss",
        description="The loss functions of LLM reinforcement learning, explained.",
    )
    top.add_argument("--version", action="version", version=f"policyloss {__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about, run, arguments in COMMANDS:
        parser = subparsers.add_parser(name, help=about, description=about)
        for argument, meaning in arguments.items():
            parser.add_argument(argument, help=meaning)
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        parser.set_defaults(run=run)
    for name, about in TRAINING.items():
        subparsers.add_parser(name, help=about, add_help=False)  # it reads its options by itself
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 for a wrong argument, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a letter gets "?", not a traceback.
            stream.reconfigure(errors="replace")
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = 0
        if arguments and arguments[0] in TRAINING:
            code = _training_command(arguments[0])(arguments[1:])
        else:
            args = command_line().parse_args(arguments)
            print(args.run(args))
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


def _failure(sentence: str) -> int:
    """Print the sentence on one line, in which no name of a file can move the cursor."""
    print(f"policyloss: {' '.join(visible(sentence).split())}", file=sys.stderr)
    return 2


def _close_output() -> None:
    """Let Python flush into a sink when it ends: it would fail again, and say so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _training_command(name: str) -> Callable[[Sequence[str]], int]:
    """What runs a command that reads its own options, or an error that says what to install."""
    module = {**LIGHT, "export": "policyloss.train.export"}.get(name, "policyloss.train.commands")
    function = f"{name.replace('-', '_')}_command"
    try:
        command: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if name in LIGHT or (error.name or "").partition(".")[0] == "policyloss":
            raise  # these need torch alone, so nothing that could be installed is missing
        raise PolicyLossError(
            f"policyloss {name} needs {error.name}; pip install 'policyloss[train]'."
        ) from None
    return command


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False)
