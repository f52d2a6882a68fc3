"""Pieces of a page in GitHub's Markdown."""

from __future__ import annotations

import re

GENERATED = "<!-- Made by `python -m docs.generate`; edit the data it is made from instead. -->"


def linked(text: str) -> str:
    """Markdown links for arXiv numbers and DOIs."""
    text = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"doi (10\.\S+)", r"[doi \1](https://doi.org/\1)", text)


def table(heading: list[str], rows: list[list[str]]) -> str:
    """A GitHub table; pipes inside cells are escaped."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def fenced(text: str, language: str) -> str:
    """A fenced block. Formulas are marked as text, lest a formatter of Python rewrite them."""
    return f"```{language}\n{text}\n```"


def join(*blocks: str) -> str:
    """Blocks with an empty line between them; empty blocks are left out."""
    return "\n\n".join(block.strip("\n") for block in blocks if block) + "\n"
