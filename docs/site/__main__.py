"""Builds the site: python -m docs.site [FOLDER], by default build/site.

FOLDER/VERSION holds the pages of this version, FOLDER/versions.js lists all versions there, and
FOLDER/index.html leads to the newest.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path

from sphinx.cmd.build import build_main

from docs.generate import ROOT
from docs.site.assemble import Assembly
from docs.site.check import problems
from policyloss import __version__
from policyloss.output import write_output

HERE = Path(__file__).resolve().parent


def build(folder: Path) -> Path:
    """Build this version below `folder`, and give the folder of its pages."""
    sources, twins = folder.parent / "site-src", folder.parent / "site-md"
    pages = folder / __version__
    for old in (sources, twins, pages):
        shutil.rmtree(old, ignore_errors=True)
    Assembly(run=True).write(sources, twins)
    arguments = ["-b", "html", "-q", "-W", "--keep-going", "-c", str(HERE), "-j", "2"]
    places = ["-d", str(folder.parent / "site-doctrees"), str(sources), str(pages)]
    if build_main([*arguments, "-E", "-D", f"html_extra_path={twins}", *places]):
        raise SystemExit("Sphinx reported a problem.")
    write_versions(folder)
    return pages


def write_versions(folder: Path) -> None:
    """List the versions in `folder`, the newest first, and lead from its top to the newest."""
    found = [path.name for path in folder.iterdir() if (path / "index.html").is_file()]
    names = sorted(found, key=_order, reverse=True)
    script = f"window.policylossVersions = {json.dumps(names)};\n"
    write_output(folder / "versions.js", script.encode(), "list of versions")
    refresh = f'<meta http-equiv="refresh" content="0; url={names[0]}/index.html">'
    link = f'<a href="{names[0]}/index.html">policyloss {names[0]}</a>'
    page = f'<!doctype html><html lang="en"><title>policyloss</title>{refresh}{link}</html>\n'
    write_output(folder / "index.html", page.encode(), "page")


def _order(version: str) -> list[tuple[int, str]]:
    return [(int(part or 0), rest) for part, rest in re.findall(r"(\d*)([^\d.]*)\.?", version)]


def main() -> int:
    """The command: 1 if a check of the built pages fails."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description="Build the site.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    folder: Path = parser.parse_args().folder.resolve()
    start = time.monotonic()
    pages = build(folder)
    wrong = problems(pages)
    print("\n".join(wrong))
    print(f"{pages / 'index.html'}: {time.monotonic() - start:.0f} s, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
