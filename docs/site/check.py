"""Checks the built site: links lead somewhere, nothing is loaded from elsewhere, words are found,
and each page has its twin.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.search.en import SearchEnglish

# What a reader may search for, and a page that the index must lead to.
WORDS = {
    "dual clip": "losses/ppo_dual_clip",
    "TIS": "losses/tis",
    "denominator": "guides/denominators",
    "policy_loss": "reference/loss",
}
WITHOUT_TWIN = ("search.html", "genindex.html", "py-modindex.html", "explorer.html")
# An attribute that makes a browser load something; a link is only followed.
_LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src")}
_LOADED_LINKS = ("stylesheet", "preload", "icon", "prefetch", "dns-prefetch", "preconnect")


class PageReader(HTMLParser):
    """The links, the loads and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag points at."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.loads += [values[name] for name in values if (tag, name) in _LOADS]
        if tag == "link" and any(word in values.get("rel", "") for word in _LOADED_LINKS):
            self.loads.append(values.get("href", ""))
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])


def problems(site: Path) -> list[str]:
    """What is wrong with the pages below `site`, one line each."""
    pages = {
        path: PageReader(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts  # templates of the theme, which nobody reads
    }
    wrong = [line for path, page in pages.items() for line in _page_problems(site, path, pages)]
    for path in sorted(site.rglob("*.css")):
        for address in re.findall(r"(?:url\(|@import\s)['\"]?(\w+://[^'\")\s]+)", path.read_text()):
            wrong.append(f"{path.relative_to(site)}: loads {address}")
    return wrong + search_problems(site)


def _page_problems(site: Path, path: Path, pages: dict[Path, PageReader]) -> list[str]:
    page, name = pages[path], path.relative_to(site).as_posix()
    wrong = [f"{name}: loads {load}" for load in page.loads if urlsplit(load).netloc]
    local = [link for link in (*page.links, *page.loads) if not urlsplit(link).scheme]
    for link in local:
        parts = urlsplit(link)
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if site not in target.parents and target != site:
            continue  # the list of versions, above the folder of this one
        if not target.exists():
            wrong.append(f"{name}: the link {link} leads nowhere")
        elif "=" in parts.fragment:
            continue  # what the explorer shows, and no heading
        elif parts.fragment and target in pages and parts.fragment not in pages[target].anchors:
            wrong.append(f"{name}: {link} names a heading that is not there")
    if name not in WITHOUT_TWIN and not path.with_suffix(".md").is_file():
        wrong.append(f"{name}: has no Markdown twin")
    return wrong


def found_pages(site: Path, query: str) -> list[str]:
    """The pages that hold every word of `query`, by the index that the search page reads."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    names = index["docnames"]
    stem = SearchEnglish({}).stem
    results: set[str] | None = None
    for word in query.lower().split():
        holding: set[int] = set()
        for table in (index["terms"], index["titleterms"]):
            for term, places in table.items():
                if term in (word, stem(word)):
                    holding |= set(places if isinstance(places, list) else [places])
        pages = {names[i] for i in holding}
        results = pages if results is None else results & pages
    return sorted(results or ())


def search_problems(site: Path) -> list[str]:
    """The words of `WORDS` that a search does not find on their page."""
    return [
        f"a search for {query!r} does not find {page}"
        for query, page in WORDS.items()
        if page not in found_pages(site, query)
    ]
