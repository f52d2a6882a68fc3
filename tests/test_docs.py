"""The generated pages are up to date, whole, and say what the code does; the snippets on them run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import policyloss as pl
from cases import PRESETS, make_batch, run
from policyloss.policy_metrics import FORMULAS

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load()


def test_generated_pages_are_up_to_date() -> None:
    assert generate.stale() == [], "run `make docs`"


def test_generation_is_deterministic() -> None:
    assert generate.pages() == generate.pages()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(f"# Hello\n\n{generate.BEGIN}\nold\n{generate.END}\n\nBye.\n")
    return tmp_path


def test_check_notices_every_kind_of_staleness(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    capsys.readouterr()
    page = elsewhere / "docs/presets/dapo.md"
    page.write_text(page.read_text().replace("0.28", "0.3"))
    (elsewhere / "docs/presets/gone.md").write_text("a preset that no longer exists")
    (elsewhere / "docs/metrics.md").unlink()
    assert generate.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert sorted(out.split("\n")) == [
        "",
        "out of date: docs/metrics.md",
        "out of date: docs/presets/dapo.md",
        "out of date: docs/presets/gone.md",
    ]
    generate.write()
    assert generate.stale() == []
    assert not (elsewhere / "docs/presets/gone.md").exists()


def test_the_readme_keeps_its_prose_and_gets_the_table(elsewhere: Path) -> None:
    generate.write()
    text = (elsewhere / "README.md").read_text()
    assert text.startswith("# Hello\n")
    assert text.endswith("\n\nBye.\n")
    assert "old" not in text.split(generate.BEGIN)[1].split(generate.END)[0].split("\n")
    for name in pl.presets():
        assert f"[`{name}`](docs/presets/{name}.md)" in text


def test_a_readme_without_markers_is_an_error(elsewhere: Path) -> None:
    (elsewhere / "README.md").write_text("# No table here\n")
    with pytest.raises(SystemExit, match="presets:begin"):
        generate.pages()


@pytest.mark.parametrize("name", pl.presets())
def test_the_snippet_on_the_page_runs_and_gives_the_loss(name: str) -> None:
    page = (ROOT / f"docs/presets/{name}.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert snippet is not None
    assert len(snippet[1].split("\n")) == 6
    batch = make_batch(seed=2)
    given: dict[str, Any] = {**batch.kwargs, "logp": batch.logp.clone().requires_grad_(), "print": lambda *_: None}
    exec(snippet[1], given)
    torch.testing.assert_close(given["out"].loss.detach(), run(PRESETS[name], batch).loss, rtol=0, atol=0)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/presets").glob("*.md")), ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    for link in links:
        assert link.startswith("https://") or (page.parent / link).is_file(), link
    rows = [line for line in text.split("\n") if line.startswith("| ")]
    for row in rows:  # a pipe inside a cell would tear the table
        assert len(re.findall(r"(?<!\\)\|", row)) in (3, 4), row


def test_every_metric_of_the_policy_loss_is_on_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").split("## value_loss")[0]
    batch = make_batch(seed=3)
    specs = [*PRESETS.values(), pl.LossSpec(trust=pl.Clip(0.2, 0.2, dual=3.0), correction=pl.Veto(), kl=pl.KL("k3", 0.1))]
    seen = {re.sub(r"/.*", "/<part>", key) for spec in specs for key in run(spec, batch).metrics}
    assert seen == set(FORMULAS), "documented and measured metrics differ"
    for name in FORMULAS:
        assert f"| `{name}` |" in page


def test_every_metric_of_the_value_loss_is_on_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").split("## value_loss")[1]
    batch = make_batch(seed=3)
    out = pl.value_loss(batch.logp, batch.advantages, batch.old_logp, batch.mask)
    assert set(out.metrics.compute()) == set(generate.VALUE_FORMULAS)
    for name in generate.VALUE_FORMULAS:
        assert f"| `{name}` |" in page
