"""Makes docs/commands.md from the same arguments as the help of each command."""

from __future__ import annotations

import re
from collections.abc import Iterator

from docs.markdown import GENERATED, fenced, join, table
from policyloss.cli import all_commands
from policyloss.commands import OPTIONS, Argument, flag, parser_of

ABOUT = (
    "`policyloss` alone lists the commands, and `policyloss COMMAND --help` prints a section of "
    "this page. Guides show how to use them: [train](train.md), [report](report.md), "
    "[doctor](doctor.md), [what-if](what_if.md), [choose](choose.md), [explore](explorer.md)."
)
PLACES = "arguments"


def commands_page(*, marked: bool = False) -> str:
    """The page. marked: for Sphinx, whose search finds each argument by its name."""
    return join("# Commands and options", GENERATED, ABOUT, *_sections(marked))


def _sections(marked: bool) -> Iterator[str]:
    for name, command in all_commands().items():
        usage = parser_of(name, command.about, command.arguments).usage
        yield join(f"## {name}", command.about, fenced(f"{usage}", "text"))
        if marked:
            yield f"```{{program}} policyloss {name}\n```"
        groups: dict[str, list[Argument]] = {}
        for argument in command.arguments:
            groups.setdefault(PLACES if argument.place else argument.title, []).append(argument)
        for title, arguments in groups.items():
            yield "" if title in (PLACES, OPTIONS) else f"### {title}"
            if marked:
                yield from map(_directive, arguments)
            else:
                rows = [[f"`{words(a)}`", _text(a), _code(a.shown_default)] for a in arguments]
                yield table(["argument", "meaning", "default"], rows)


def words(argument: Argument) -> str:
    """The argument as a user types it."""
    if argument.place:
        return argument.usage
    if argument.kind is bool and argument.default:
        return f"{flag(argument.name)}, {flag(f'no_{argument.name}')}"
    if argument.kind is bool:
        return flag(argument.name)
    return " ".join([flag(argument.name), *argument.values, *(["..."] if argument.is_list else [])])


def _directive(argument: Argument) -> str:
    """The argument by its name, and by the first words of "Learning rate of the policy"."""
    default = f" Default: `{argument.shown_default}`." if argument.shown_default else ""
    topic = re.match(r"(?!The|How|What)(\w+ \w+) of ", argument.meaning)
    index = f"```{{index}} ! {topic[1].lower()}\n```\n" if topic else ""
    return f"{index}:::{{option}} {words(argument)}\n\n{_text(argument)}{default}\n:::"


def _text(argument: Argument) -> str:
    """The meaning with its options as code, and without marks of Markdown."""
    parts = re.split(r"(--[\w.-]*\w)", re.sub(r"([*<\[\]])", r"\\\1", argument.meaning))
    return "".join(f"`{part}`" if i % 2 else part for i, part in enumerate(parts))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
