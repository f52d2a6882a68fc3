"""Assembles the site: every page as Sphinx reads it, its twin in plain Markdown, and `llms.txt`.

A page of the repository is copied unchanged except for its links, which lead to their targets on
the site. A link to a file that is not a page leads to a copy of that file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import policyloss as pl
from docs.choose_page import FORM, form
from docs.commands_page import commands_page
from docs.generate import ROOT
from docs.markdown import join
from docs.site import loss_page, notebook
from docs.site.reference import reference_pages
from docs.site.structure import (
    DECISIONS,
    GUIDES,
    LOSSES,
    MORE,
    REFERENCE,
    SECTIONS,
    Group,
    Section,
    site_path,
)
from policyloss.output import write_output
from policyloss_lab.explore.page import explorer_page

PRESETS, TUTORIALS, FILES = "docs/presets/", "docs/tutorials/", "files"
CHOOSE, EXPLORER, COMMANDS = "docs/choose.md", "docs/explorer.md", "docs/commands.md"
_FENCE = re.compile(r"(^(`{3,}|~{3,}).*?^\2`*$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


@dataclass
class Page:
    """A page of the site. plain: its Markdown twin. source: the text for Sphinx, if it differs."""

    path: str
    plain: str
    source: str = ""
    figures: dict[str, bytes] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The heading at its top."""
        return str(re.findall(r"^# (.+)$", self.plain, re.MULTILINE)[0])

    @property
    def first_sentence(self) -> str:
        """How its text begins, on one line and without marks, at most 200 letters."""
        body = re.sub(r"^(#.*|<!--.*|\|.*|- .*|!.*|`{3}.*)$", "", self.plain, flags=re.MULTILINE)
        paragraphs = [part for part in body.split("\n\n") if part.strip()]
        text = _LINK.sub(r"\2", " ".join(paragraphs[0].split())) if paragraphs else ""
        return re.split(r"(?<=[.?!]) ", text.replace("**", ""))[0][:200].rstrip(":")


def listed_groups(section: Section) -> tuple[Group, ...]:
    """The groups of a section; pages under docs that no section lists are below `MORE`."""
    groups = section.groups
    if section is GUIDES:
        listed = {page for one in SECTIONS for group in one.groups for page in group.pages}
        rest = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - listed
        groups += (Group(MORE, tuple(sorted(rest))),) if rest else ()
    return groups


def site_map() -> dict[str, str]:
    """The place of each page of the repository on the site."""
    places = {
        page: site_path(page, section)
        for section in SECTIONS
        for group in listed_groups(section)
        for page in group.pages
    }
    for path in sorted((ROOT / "docs" / DECISIONS).glob("*.md")):
        places[f"docs/{DECISIONS}/{path.name}"] = f"{DECISIONS}/{_index_or(path.name)}"
    for name in (*(f"{name}.md" for name in pl.presets()), "README.md"):
        places[PRESETS + name] = f"{LOSSES}/{_index_or(name)}"
    return places


def _index_or(name: str) -> str:
    return "index.md" if name == "README.md" else name


def relinked(text: str, origin: str, target: str, place: Callable[[str], str | None]) -> str:
    """`text` of the page `origin`, with links that work at `target` on the site.

    place: the place of a file of the repository on the site, or None.
    """

    def changed(match: re.Match[str]) -> str:
        picture, words, link = match.groups()
        path, mark, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        there = place(os.path.normpath(os.path.join(os.path.dirname(origin), path)))
        if there is None:
            return words
        path = os.path.relpath(there, os.path.dirname(target))
        return f"{picture}[{words}]({path}{mark}{anchor})"

    parts = _FENCE.split(text)
    # Each fence gives two groups: its whole text, and its marks.
    return "".join(
        _LINK.sub(changed, part) if i % 3 == 0 else part
        for i, part in enumerate(parts)
        if i % 3 != 2
    )


class Assembly:
    """The pages of the site and the files that they link to."""

    def __init__(self, *, run: bool) -> None:
        """run: whether to execute the notebooks and draw the curves, which takes a minute."""
        self.run = run
        self.places = site_map()
        self.files: dict[str, bytes] = {}
        self.pages: dict[str, Page] = {}
        for origin, target in self.places.items():
            self.pages[target] = self._page(origin, target)
        for name, (plain, source) in reference_pages().items():
            self.pages[f"{REFERENCE}/{name}"] = Page(f"{REFERENCE}/{name}", plain, source)
        for section in SECTIONS:
            self._index(section)
        self._landing()

    def _place(self, path: str) -> str | None:
        """The place of a file of the repository on the site; copies it if it is not a page."""
        if path in self.places:
            return self.places[path]
        if not (ROOT / path).is_file():
            return None
        self.files[f"{FILES}/{path}"] = (ROOT / path).read_bytes()
        return f"{FILES}/{path}"

    def _page(self, origin: str, target: str) -> Page:
        def link(text: str) -> str:
            return relinked(text, origin, target, self._place)

        name = Path(origin).stem
        if origin.startswith(PRESETS) and name != "README":
            page = Page(target, link(loss_page.plain_page(name)))
            if self.run:
                page.source, figures = loss_page.loss_page(name, page.plain)
                page.figures = {path: text.encode() for path, text in figures.items()}
            return page
        text = (ROOT / origin).read_text(encoding="utf-8")
        page = Page(target, link(text))
        if origin.startswith(TUTORIALS) and self.run:
            page.source, page.figures = notebook.executed(page.plain, target)
        elif origin == EXPLORER:
            title, rest = page.plain.split("\n", 1)
            link_to_it = '<p><a href="../explorer.html">Open the explorer.</a></p>'
            page.source = join(title, link_to_it, rest)
        elif origin == CHOOSE:
            page.source = page.plain.replace(FORM, form())
        elif origin == COMMANDS:
            page.source = link(commands_page(marked=True))
        return page

    def _index(self, section: Section) -> None:
        """The first page of a section, with the list of its pages."""
        path = f"{section.folder}/index.md"
        groups = {
            group.caption: [self.places[page] for page in group.pages]
            for group in listed_groups(section)
        }
        if section.folder == LOSSES:
            for name in pl.presets():
                groups.setdefault(loss_page.family(name), []).append(f"{LOSSES}/{name}.md")
        listed = {path, *(page for pages in groups.values() for page in pages)}
        in_folder = [page for page in self.pages if page.startswith(f"{section.folder}/")]
        rest = [page for page in in_folder if page not in listed]
        if rest:
            groups = {"": rest, **groups}
        if path not in self.pages:
            lists = [
                join(f"## {caption}" if caption else "", self._list(pages, path))
                for caption, pages in groups.items()
            ]
            self.pages[path] = Page(path, join(f"# {section.title}", section.about, *lists))
        page = self.pages[path]
        page.source = join(page.plain, *(_toctree(*group, path) for group in groups.items()))

    def _list(self, pages: list[str], path: str) -> str:
        folder = os.path.dirname(path)
        return "\n".join(
            f"- [{self.pages[page].title}]({os.path.relpath(page, folder or '.')}): "
            f"{self.pages[page].first_sentence}"
            for page in pages
        )

    def _landing(self) -> None:
        """The front page: the beginning of README.md, and the sections."""
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        begin = readme.split("\n## ")[0].split("\nNew here?")[0]
        plain = relinked(begin, "README.md", "index.md", self._place)
        indexes = [f"{section.folder}/index.md" for section in SECTIONS]
        cards = "\n\n".join(
            f":::{{grid-item-card}} {section.title}\n:link: {section.folder}/index\n"
            f":link-type: doc\n\n{section.about}\n:::"
            for section in SECTIONS
        )
        grid = f"::::{{grid}} 1 2 3 3\n:gutter: 3\n\n{cards}\n::::"
        links = "\n".join(
            f"- [{section.title}]({index}): {section.about}"
            for section, index in zip(SECTIONS, indexes, strict=True)
        )
        play = '<p><a href="explorer.html">Play with the losses in the explorer.</a></p>'
        source = join(plain, grid, play, _toctree("", indexes, "index.md"))
        self.pages["index.md"] = Page("index.md", join(plain, links), source)

    def llms(self) -> str:
        """The list of all pages for a program that reads: https://llmstxt.org."""
        start = self.pages["index.md"]
        sections = []
        for section in SECTIONS:
            pages = [page for page in self.pages if page.startswith(f"{section.folder}/")]
            sections.append(join(f"## {section.title}", self._list(sorted(pages), "llms.txt")))
        return join(f"# {start.title}", f"> {start.first_sentence}", *sections)

    def write(self, sources: Path, twins: Path) -> None:
        """Write the input of Sphinx to `sources`, and the files that are only copied to `twins`."""
        for page in self.pages.values():
            write_output(sources / page.path, (page.source or page.plain).encode(), "page")
            write_output(twins / page.path, page.plain.encode(), "page")
            for path, content in page.figures.items():
                write_output(sources / path, content, "figure")
        for path, content in self.files.items():
            write_output(sources / path, content, "file")
            write_output(twins / path, content, "file")
        write_output(twins / "llms.txt", self.llms().encode(), "page")
        write_output(twins / "explorer.html", explorer_page().encode(), "page")


def _entry(path: str) -> str:
    """A line of a table of contents; losses and sections have a shorter title there."""
    name = path.rpartition("/")[2]
    if name in pl.presets():
        return f"{name} <{path}>"
    if name == "overview":
        return f"Overview <{path}>"
    titles = {f"{section.folder}/index": section.title for section in SECTIONS}
    return f"{titles[path]} <{path}>" if path in titles else path


def _toctree(caption: str, pages: list[str], path: str) -> str:
    folder = os.path.dirname(path)
    lines = [_entry(os.path.relpath(page, folder or ".").removesuffix(".md")) for page in pages]
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *lines, "```"])
