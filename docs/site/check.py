"""Checks the built site: links have targets, nothing is loaded from other servers, the search finds
its words, and each page has its twin.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit

from policyloss.cli import all_commands
from policyloss.commands import flag

# Words that a reader may search for, and a page that must be among the first.
WORDS = {
    "dual clip": "losses/ppo_dual_clip",
    "TIS": "losses/tis",
    "denominator": "guides/denominators",
    "policy_loss": "reference/loss",
    "Recorder": "reference/report",
    "export": "guides/commands",
    "learning rate": "guides/commands",
    "lora": "guides/commands",
    "multi-turn": "guides/turns",
}
AMONG = 3
HISTORY = ("decisions/", "project/changelog")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_SEARCH = ("doctools.js", "sphinx_highlight.js", "searchtools.js", "language_data.js")
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
        """Record the target of the tag."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.loads += [values[name] for name in values if (tag, name) in _LOADS]
        if tag == "link" and any(word in values.get("rel", "") for word in _LOADED_LINKS):
            self.loads.append(values.get("href", ""))
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])


def problems(site: Path) -> list[str]:
    """The problems of the pages below `site`, one line each."""
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
            continue  # a state of the explorer, not a heading
        elif parts.fragment and target in pages and parts.fragment not in pages[target].anchors:
            wrong.append(f"{name}: {link} names a heading that does not exist")
    if name not in WITHOUT_TWIN and not path.with_suffix(".md").is_file():
        wrong.append(f"{name}: has no Markdown twin")
    return wrong


def search(site: Path, queries: Sequence[str]) -> dict[str, list[str]]:
    """The search results of the site for each query, best first."""
    scripts = [site / "_static" / name for name in _SEARCH] + [site / "searchindex.js"]
    loaded = "".join(f'<script src="{path.as_uri()}"></script>' for path in scripts)
    pages = "Search._performSearch(...Search._parseQuery(query)).map((result) => result[0])"
    page = (
        f"<body>{loaded}<script>const found = {json.dumps(queries)}.map((query) => {pages});"
        "document.body.textContent = JSON.stringify(found)</script>"
    )
    with TemporaryDirectory() as folder:
        file = Path(folder) / "search.html"
        file.write_text(page, encoding="utf-8")
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, check=True)
    found = json.loads(unescape(re.findall(r"<body>(.*)</body>", done.stdout, re.DOTALL)[0]))
    return {
        query: list(dict.fromkeys(reversed(pages)))
        for query, pages in zip(queries, found, strict=True)
    }


def search_problems(site: Path) -> list[str]:
    """The words of `WORDS` that a search does not find on their page, pages of history that precede
    a guide, and options that are not found.
    """
    if CHROMIUM is None:
        print("The search was not tried: there is no Chromium here.")
        return []
    options = [flag(a.name) for c in all_commands().values() for a in c.arguments if not a.place]
    results = search(site, [*WORDS, *options])
    wrong = [
        f"a search for {query!r} does not show {page} among the first {AMONG}"
        for query, page in WORDS.items()
        if page not in results[query][:AMONG]
    ]
    for query, pages in results.items():
        history = [i for i, page in enumerate(pages) if page.startswith(HISTORY)]
        guides = [i for i, page in enumerate(pages) if page.startswith("guides/")]
        if history and guides and history[0] < guides[-1]:
            wrong.append(f"a search for {query!r} shows {pages[history[0]]} before guides")
        if query in options and "guides/commands" not in pages:
            wrong.append(f"a search for {query!r} does not find the option")
    return wrong
