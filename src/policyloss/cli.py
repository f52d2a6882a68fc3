"""The `policyloss` command. Each subcommand is a function of the words after its name, which prints
and returns the exit code. Neither a help nor a list needs torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, Literal

from policyloss import __version__
from policyloss.choose import ARGUMENTS, read_losses
from policyloss.commands import (
    HELP,
    JSON,
    OPTIONS,
    Argument,
    Command,
    Parser,
    parser_of,
    read_words,
)
from policyloss.errors import InputError, PolicyLossError, unknown_name, visible

LOSS = Argument(
    "loss",
    str,
    MISSING,
    "The name of a preset, or the path of a JSON file that holds LossSpec.to_dict().",
    place="LOSS",
)
OTHER = Argument("other", str, MISSING, "The loss to compare it with.", place="OTHER")
CONFIG = Argument(
    "config",
    str,
    MISSING,
    "The path of a JSON file with options. An option that it leaves out has TRL's default.",
    place="FILE",
)
EXPLAIN, EXPLAIN_TRL, DIFF = [LOSS, JSON], [CONFIG, JSON], [LOSS, OTHER, JSON]
_Framework = Literal["trl", "verl", "openrlhf"]
PORT = [
    Argument(
        "loss",
        str,
        MISSING,
        "The path of a JSON file with the options of --from; without --from, the name of a preset "
        "or the path of a JSON file that holds LossSpec.to_dict().",
        place="FILE",
    ),
    Argument("from", _Framework, None, "The framework of the options in FILE."),
    Argument("to", _Framework, MISSING, "The framework whose options to print."),
    JSON,
]
OWN = {
    "presets": Command("List the named losses.", [JSON], "policyloss.cli"),
    "choose": Command(
        "Name a loss for what you know about your run, with the reasons.",
        ARGUMENTS,
        "policyloss.choose",
    ),
    "explain": Command(
        "Explain a loss: formula, numbers, zero gradients, names, traps.", EXPLAIN, "policyloss.cli"
    ),
    "diff": Command("Show how two losses differ.", DIFF, "policyloss.cli"),
    "explain-trl": Command(
        "Explain the loss of a TRL GRPOConfig: the options that decide, traps, the loss.",
        EXPLAIN_TRL,
        "policyloss.cli",
    ),
    "port": Command(
        "Print the options of one framework as those of another, and what is lost as notes.",
        PORT,
        "policyloss.cli",
    ),
}
# The commands that policyloss-lab and policyloss-train add, and the extra that installs them.
EXTRAS = dict.fromkeys(("explore", "report", "doctor", "what-if"), "lab")
EXTRAS |= dict.fromkeys(("train", "eval", "sample", "export", "bench"), "train")


@cache
def all_commands() -> dict[str, Command]:
    """The commands of every installed package, by name."""
    added: dict[str, Command] = {}
    for group in sorted(entry_points(group="policyloss.commands"), key=lambda group: group.name):
        added |= group.load()
    return OWN | added


def presets_command(words: Sequence[str]) -> int:
    """The named losses, one per line."""
    rows = read_losses()["presets"]
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
    from policyloss.explanations import explain

    options = read_words("explain", EXPLAIN, words)
    explanation = explain(_loss(options["loss"]))
    _print_json(explanation.to_dict()) if options.get("json") else print(explanation)
    return 0


def explain_trl_command(words: Sequence[str]) -> int:
    """The loss of a TRL GRPOConfig."""
    from policyloss.compat.trl import explain_config, spec_from_config
    from policyloss.compat.trl.config import DEFAULTS, EXTRA_OPTIONS
    from policyloss.porting import read_option_file

    options = read_words("explain-trl", EXPLAIN_TRL, words)
    config = SimpleNamespace(**{**DEFAULTS, **read_option_file(options["config"], DEFAULTS)})
    if options.get("json"):
        _print_json(spec_from_config(config, handled=EXTRA_OPTIONS).to_dict())
    else:
        print(explain_config(config))
    return 0


def diff_command(words: Sequence[str]) -> int:
    """How two losses differ."""
    from policyloss.explanations import diff

    options = read_words("diff", DIFF, words)
    difference = diff(_loss(options["loss"]), _loss(options["other"]))
    _print_json(difference.to_dict()) if options.get("json") else print(difference)
    return 0


def port_command(words: Sequence[str]) -> int:
    """Options of another framework on the output, and notes on the differences after them."""
    from policyloss.catalogue import as_spec, find_preset
    from policyloss.compat.options import FRAMEWORKS
    from policyloss.porting import Reading, as_text, port_loss, read_option_file, read_options

    options = read_words("port", PORT, words)
    if "to" not in options:
        raise InputError(f"--to is missing; name the framework: {', '.join(FRAMEWORKS)}.")
    others: list[str] = []
    if "from" in options:
        known = FRAMEWORKS[options["from"]].defaults
        theirs = read_option_file(options["loss"], known)
        wanted = read_options(options["from"], theirs)
        others = [name for name in theirs if name not in known]
    else:
        loss = _loss(options["loss"])
        advantage = find_preset(loss).advantage if isinstance(loss, str) else None
        wanted = Reading(as_spec(loss), advantage)
    port = port_loss(wanted, options["to"])
    if options.get("json"):
        _print_json({**port._asdict(), "not_of_the_loss": others})
        return 0
    print(as_text(FRAMEWORKS[options["to"]].style, port.options))
    for text in port.lost:
        print(f"lost: {text}.", file=sys.stderr)
    if others:
        print(f"not of the loss, left out: {', '.join(others)}.", file=sys.stderr)
    return 0


def _loss(name: str) -> Any:
    """`read_loss`, also of TRL's parts, which `explain-trl --json` writes."""
    import policyloss.compat.trl  # noqa: F401  # makes those parts known
    from policyloss.mixture import read_loss

    return read_loss(name)


def overview_parser() -> Parser:
    """The parser without a command, whose help lists the commands."""
    about = "The loss functions of LLM reinforcement learning."
    top = Parser("policyloss", "COMMAND [options]", about)
    group = top.add_argument_group("commands")
    for name, command in all_commands().items():
        group.add_argument(name, nargs="?", help=command.about.partition(". ")[0])
    for name in EXTRAS.keys() - all_commands().keys():
        group.add_argument(name, nargs="?", help=f"Needs {_install(name)}.")
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
        overview_parser().parse_args([name])
    command = OWN.get(name) or all_commands().get(name)
    if command is None and name in EXTRAS:
        raise PolicyLossError(f"policyloss {name} needs another package; {_install(name)}.")
    if command is None:
        raise InputError(unknown_name("command", name, all_commands()))
    if {*HELP} & set(rest):
        parser_of(name, command.about, command.arguments).print_help()
        return 0
    function = getattr(import_module(command.module), f"{name.replace('-', '_')}_command")
    return int(function(rest))


def _install(name: str) -> str:
    return f"pip install 'policyloss[{EXTRAS[name]}]'"


def _failure(sentence: str) -> int:
    """Print the sentence on one line, in which no name of a file can move the cursor."""
    print(f"policyloss: {' '.join(visible(sentence).split())}", file=sys.stderr)
    return 2


def _close_output() -> None:
    """Redirect the output, so that Python's flush at exit does not fail and print an error."""
    with suppress(OSError):  # no file can be opened any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
