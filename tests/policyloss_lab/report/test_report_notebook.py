"""`report.show`, also in a real Jupyter kernel; test_report_charts.py checks the drawing."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from docs.site.notebook import execute, notebook
from report_runs import realistic_run

import policyloss as pl
import policyloss_lab as lab
from policyloss_lab import limits
from policyloss_lab.report import collect, render

CELLS = """
```python
import policyloss_lab as lab
from policyloss_lab import limits
lab.report.show({run!r}, height=600)
```
```python
limits.INLINE_BYTES = len(lab.report.show({run!r}).page) - 1000
lab.report.show({run!r})
```
```python
limits.INLINE_BYTES = 100_000
lab.report.show({run!r}, {run!r})
```
```python
lab.report.show({missing!r})
```
"""


def page_of(output: Any) -> str:
    """The page in the frame of a result."""
    (inside,) = re.findall(r"srcdoc='([^']*)'></iframe>$", output["data"]["text/html"])
    return html.unescape(inside)


def data_of(page: str) -> Any:
    """The drawing of the page."""
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_a_page_that_is_too_large_for_a_notebook_is_cut_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = realistic_run(tmp_path / "run", steps=3)
    complete = lab.report.show(run).page
    assert complete == render(collect([run]))
    monkeypatch.setattr(limits, "INLINE_BYTES", len(complete.encode()) - 1)
    page = lab.report.show(run).page
    (before,), (after,) = (data_of(text)["runs"] for text in (complete, page))
    assert before["rollouts"]
    assert after["rollouts"] == []
    assert after["series"] == before["series"]
    assert "which is too much for a notebook; `policyloss report` writes it" in page
    assert "a note at the top of the page says why they were left out" in page
    monkeypatch.setattr(limits, "INLINE_BYTES", len(page.encode()) - 1)
    with pytest.raises(pl.InputError, match=r"page of 1 run\(s\) has .* give fewer runs, or write"):
        lab.report.show(run)


@pytest.mark.slow
def test_show_in_a_kernel(tmp_path: Path) -> None:
    """One test, because a kernel takes seconds to start."""
    run = realistic_run(tmp_path / "it's <b>&amp;", steps=12)
    cells = notebook(CELLS.format(run=str(run), missing=str(tmp_path / "nothing")))
    for cell in cells.cells[2:]:
        cell.metadata["tags"] = ["raises-exception"]
    shown, shorter, large, missing = [o for cell in execute(cells).cells for o in cell.outputs]

    # The page in a frame, and a sentence for those who see no HTML.
    assert shown["output_type"] == "execute_result"
    assert 'sandbox="allow-scripts allow-downloads"' in shown["data"]["text/html"]
    assert "height:600px" in shown["data"]["text/html"]
    page = page_of(shown)
    assert page == render(collect([run]))  # another process makes the same bytes
    assert shown["data"]["text/plain"] == (
        "the report of it's <b>&amp;; a notebook draws it, and `policyloss report` "
        "writes it to a file"
    )

    # A page that is too large has no completions, and a note about it.
    assert data_of(page_of(shorter))["runs"][0]["rollouts"] == []
    assert "which is too much for a notebook; `policyloss report` writes it" in page_of(shorter)

    # What cannot be shown is an error in words.
    assert (large["output_type"], large["ename"]) == ("error", "InputError")
    assert re.search(r"the page of 2 run\(s\) has .* give fewer runs, or write", large["evalue"])
    assert (missing["output_type"], missing["ename"]) == ("error", "InputError")
    assert missing["evalue"].endswith(
        "nothing does not exist; give the folder or the file of a run."
    )
