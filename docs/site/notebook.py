"""Tutorials: a page of Markdown becomes a notebook, is run, and becomes a page with its results."""

from __future__ import annotations

import base64
import re
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from traitlets.config import Config

from docs.markdown import fenced, join

_CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SECONDS = 120  # that one cell may take


def notebook(text: str) -> Any:
    """The notebook of a page: its blocks of Python are cells, and so is the text between them."""
    parts = _CODE.split(text)
    cells = []
    for i, part in enumerate(parts):
        if part.strip():
            make = new_code_cell if i % 2 else new_markdown_cell
            cells.append(make(part.strip("\n"), id=f"cell-{i}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def run(text: str) -> Any:
    """The notebook of a page with the results of all its cells; a cell that fails raises."""
    return execute(notebook(text))


def execute(cells: Any) -> Any:
    """A notebook, after a kernel has put their results into its cells."""
    no_port = Config({"KernelManager": {"transport": "ipc"}})
    NotebookClient(cells, timeout=SECONDS, coalesce_streams=True, config=no_port).execute()
    return cells


def executed(text: str, target: str) -> tuple[str, dict[str, bytes]]:
    """The page at `target` with its results, and by their paths the pictures and the notebook."""
    name = target.removesuffix(".md").rpartition("/")[2]
    folder = target.rpartition("/")[0]
    ran = run(text)
    files = {f"{folder}/{name}.ipynb": nbformat.writes(notebook(text)).encode()}
    blocks = []
    for cell in ran.cells:
        if cell.cell_type == "markdown":
            blocks.append(cell.source)
            continue
        blocks.append(fenced(cell.source, "python"))
        for output in cell.outputs:
            if output.output_type == "stream":
                blocks.append(_result(output.text))
            elif "image/png" in output.data:
                path = f"figures/{name}-{len(files)}.png"
                files[f"{folder}/{path}"] = base64.b64decode(output.data["image/png"])
                blocks.append(f"![Output of the cell above]({path})")
            elif "text/html" in output.data:
                html = re.sub(r"\n\s*\n", "\n", output.data["text/html"])
                blocks.append(f'<div class="result">{html}</div>')
            else:
                blocks.append(_result(output.data["text/plain"]))
    title, *rest = join(*blocks).split("\n", 1)
    link = f"{{download}}`The notebook <{name}.ipynb>` runs in any Jupyter."
    return join(title, link, *rest), files


def _result(text: str) -> str:
    return ":::{div} result\n" + fenced(text.rstrip("\n"), "text") + "\n:::"
