"""The generated pages are up to date and complete, and describe the code; their snippets run."""

from __future__ import annotations

import ast
import json
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance import snippets
from conformance.environments import PEERS as FRAMEWORKS
from docs.metric_formulas import FORMULAS, VALUE_FORMULAS
from walk import walked

import policyloss as pl
from cases import PRESETS, make_batch, run, unweighted
from docs import conformance_page, generate

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_up_to_date() -> None:
    assert generate.stale() == [], "run `make docs`"


def test_generation_is_deterministic() -> None:
    assert generate.pages() == generate.pages()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    return tmp_path


def test_check_notices_every_kind_of_staleness(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    capsys.readouterr()
    page = elsewhere / "docs/presets/dapo.md"
    page.write_text(page.read_text().replace("0.28", "0.3"))
    (elsewhere / "docs/presets/gone.md").write_text("a preset that no longer exists")
    (elsewhere / "docs/metrics.md").unlink()
    (elsewhere / "docs/names.md").write_text("# Names of yesterday")
    assert generate.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert sorted(out.split("\n")) == [
        "",
        "out of date: docs/metrics.md",
        "out of date: docs/names.md",
        "out of date: docs/presets/dapo.md",
        "out of date: docs/presets/gone.md",
    ]
    generate.write()
    assert generate.stale() == []
    assert not (elsewhere / "docs/presets/gone.md").exists()


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@walked("name", pl.presets())
def test_the_snippet_on_the_page_runs_and_gives_the_loss(name: str) -> None:
    page = (ROOT / f"docs/presets/{name}.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert snippet is not None
    assert len(snippet[1].split("\n")) == 6
    batch = unweighted(make_batch(seed=2))
    given: dict[str, Any] = {
        **batch.kwargs,
        "logp": batch.logp.clone().requires_grad_(),
        "divergence": batch.divergence.clone().requires_grad_(),
        "print": lambda *_: None,
    }
    exec(snippet[1], given)
    expected = run(pl.preset(name).for_run(4096), batch).loss  # the budget that the page shows
    torch.testing.assert_close(given["out"].loss.detach(), expected, rtol=0, atol=0)


PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@walked("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for link in re.findall(r"\]\(([^)]+)\)", text):
        target, _, heading = link.partition("#")
        assert link.startswith("https://") or (page.parent / target).exists(), link
        headings = [
            re.sub(r"[^\w -]", "", line.lstrip("# ")).lower()
            for line in text.split("\n")
            if line.startswith("#")
        ]
        assert target or heading in [one.replace(" ", "-") for one in headings], link


@walked("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_table_is_torn(page: Path) -> None:
    """A pipe inside a cell would tear its row."""
    width = 0
    for line in page.read_text(encoding="utf-8").split("\n"):
        pipes = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not width or not pipes or pipes == width, line
        width = pipes


# Code on the pages --------------------------------------------------------------------------------


def plain_blocks(page: Path) -> list[str]:
    """The Python of a page that needs no framework."""
    return re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def things_the_pages_speak_of() -> dict[str, Any]:
    """A batch of two micro-batches, and what else the blocks take as given."""
    batch = make_batch(seed=5)
    given = {name: x.clone() for name, x in batch.kwargs.items() if isinstance(x, torch.Tensor)}
    given |= {"token_advantages": batch.advantages, "logp": batch.logp.clone().requires_grad_()}
    rows = given["mask"].shape[0]
    cut = [slice(0, rows // 2), slice(rows // 2, rows)]
    names = ("logp", "old_logp", "advantages", "mask")
    parts = [
        SimpleNamespace(
            **{name: given[name][part].detach().requires_grad_(name == "logp") for name in names}
        )
        for part in cut
    ]
    values = batch.logp.clone().requires_grad_()
    return {
        **given,
        "pl": pl,
        "torch": torch,
        "print": lambda *_: None,
        "spec": pl.preset("icepop").replace(correction=()),
        "rewards": torch.arange(rows).double(),
        "group_ids": torch.arange(rows) // 2,
        "token_rewards": batch.advantages,
        "values": values,
        "old_values": batch.old_logp,
        "returns": batch.advantages,
        "per_token_kl": batch.advantages.abs(),
        "mask_of_the_whole_step": given["mask"],
        "micro_batches": parts,
        "data_parallel_group": None,
        "model_logp": lambda: batch.logp,
    }


# These have their own tests, which also check the numbers.
TESTED_ELSEWHERE = (
    ROOT / "README.md",
    ROOT / "docs/presets",
    ROOT / "docs/tutorials",
    ROOT / "docs/names.md",
)
CODE = [
    p
    for p in PAGES
    if p not in TESTED_ELSEWHERE and p.parent not in TESTED_ELSEWHERE and plain_blocks(p)
]


@pytest.mark.parametrize("page", CODE, ids=lambda p: p.name)
def test_the_code_on_a_page_runs(page: Path) -> None:
    """Block after block, each with the names it assumes and the names of the blocks before it."""
    made: dict[str, Any] = {}
    for block in plain_blocks(page):
        made |= things_the_pages_speak_of()
        exec(compile(block, str(page), "exec"), made)


def test_the_readme_runs_as_it_stands() -> None:
    """A reader has nothing but the page: each block runs with what those before it made."""
    names: dict[str, Any] = {"print": lambda *_: None}
    blocks = plain_blocks(ROOT / "README.md")
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_the_plan_on_the_page_of_the_head_is_the_one_that_is_printed() -> None:
    page = ROOT / "docs/head.md"
    printed: list[str] = []
    made: dict[str, Any] = {}
    for block in plain_blocks(page):
        made |= {
            **things_the_pages_speak_of(),
            "print": lambda *words: printed.append(" ".join(map(str, words))),
        }
        exec(compile(block, str(page), "exec"), made)
    shown = re.findall(
        r"^```text\n(.*?)\n```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert len(shown) == 1
    assert shown[0] in printed
    assert "36.0 48.0" in printed, (
        "the tokens behind the metrics, with and without those at zero advantage"
    )


def test_the_drop_in_on_the_page_of_frameworks_gives_the_loss_it_stands_for() -> None:
    given = things_the_pages_speak_of()
    (block,) = [b for b in plain_blocks(ROOT / "docs/frameworks.md") if "compat.verl" in b]
    exec(block, given)
    dual = pl.LossSpec(trust=pl.Clip(0.2, 0.2, dual=3.0))
    tensors = [given[name] for name in ("logp", "old_logp", "token_advantages", "mask")]
    expected = pl.policy_loss(dual, *tensors).loss.detach()
    torch.testing.assert_close(given["pg_loss"].detach(), expected, rtol=1e-12, atol=1e-12)


def test_the_readme_names_every_framework() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {
        name
        for name in ("verl", "openrlhf", "trl", "colossalai")
        if f"policyloss.compat.{name}" in text
    } == {
        "verl",
        "openrlhf",
        "trl",
        "colossalai",
    }


def test_blocks_for_a_framework_are_marked_for_one_that_exists_and_every_one_has_some() -> None:
    found = snippets.snippets()
    assert {one.peer for one in found} == set(FRAMEWORKS)
    assert {one.peer for one in found if one.where.startswith("README.md")} == {
        "verl",
        "openrlhf",
        "trl",
    }
    for one in found:
        if one.language == "python":
            ast.parse(one.code)
    fences = [
        line
        for page in PAGES
        for line in page.read_text(encoding="utf-8").split("\n")
        if re.match(r"```(python|sh) ", line)
    ]
    assert len(fences) == len(found), "a marked block that the runner does not see"


def test_a_block_for_an_unknown_framework_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("```python verk\nprint(1)\n```\n")
    with pytest.raises(ValueError, match=r"README.md:1: a block for 'verk'; there are verl"):
        snippets.snippets(tmp_path)


def test_snippets_run_in_their_own_process_and_report_a_failure() -> None:
    # Nothing to install: this interpreter runs it.
    framework = replace(FRAMEWORKS["openrlhf"], steps=())
    # A stand-in answers.
    right = snippets.Snippet("page.md:1", "openrlhf", "python", "import flash_attn")
    wrong = snippets.Snippet(
        "page.md:9", "openrlhf", "python", "import flash_attn\nnothing_like_that()"
    )
    assert snippets.run(right, framework) == snippets.Result("page.md:1", None)
    failed = snippets.run(wrong, framework)
    assert failed.where == "page.md:9"
    assert failed.error is not None
    assert "nothing_like_that" in failed.error


# Conformance --------------------------------------------------------------------------------------


def result(release: str = "1.0", **changes: Any) -> dict[str, Any]:
    """The results of a run for one framework with two functions."""
    worst = {
        "float64": {"loss": 2e-16, "gradient of x": 3.25e-15},
        "float32": {"loss": 1e-7, "gradient of x": 0.0},
    }
    plain = {
        "name": "agg_loss",
        "cases": 10,
        "both_refuse": 0,
        "undefined": 0,
        "worst": worst,
        "failed": 0,
        "defects": {},
    }
    tally = {"instead": "0 with a zero gradient", "declared": 4, "seen": 3, "example": None}
    defective = {
        **plain,
        "name": "PolicyLoss",
        "cases": 32,
        "both_refuse": 5,
        "defects": {"NaN for |mask| = 0": tally},
        **changes,
    }
    return {
        "peer": "verl",
        "release": release,
        "environment": {"python": "3.11.7"},
        "functions": [plain, defective],
    }


@pytest.fixture
def page_of(tmp_path: Path) -> Any:
    def made(*results: dict[str, Any], **others: Any) -> list[str]:
        path = tmp_path / "conformance.json"
        path.write_text(json.dumps({"results": results, **others}))
        return conformance_page.conformance_page(path).split("\n")

    return made


def test_the_conformance_page_has_the_table_and_the_defects(page_of: Any) -> None:
    page = page_of(result(), result("0.9"))
    assert "| verl | 1.0 | 2 | 42 | 5 | 2.0e-16 | 3.2e-15 | 1.0e-07 | 0 | 4 |" in page
    assert "| `agg_loss` | 10 |  | 2.0e-16 | 3.2e-15 | 1.0e-07 | 0 |  |" in page
    assert "| `PolicyLoss` | 32 | 5 | 2.0e-16 | 3.2e-15 | 1.0e-07 | 0 | 4 |" in page
    # One row for a defect, however many releases have it: seen three times in each of the two.
    assert (
        "| verl | 1.0, 0.9 | NaN for \\|mask\\| = 0 | 0 with a zero gradient | `PolicyLoss` | 6 |"
        in page
    )
    assert "### verl 0.9" in page
    assert not [line for line in page if "failures" in line]


def test_every_declared_defect_has_a_report_or_a_reason_for_none() -> None:
    results = json.loads((ROOT / "conformance/results/conformance.json").read_text())["results"]
    declared = {(r["peer"], why) for r in results for f in r["functions"] for why in f["defects"]}
    assert len(declared) > 5
    missing = []
    for peer, why in sorted(declared):
        page = (ROOT / f"docs/upstream/{peer}.md").read_text(encoding="utf-8")
        if why not in " ".join(page.split()):
            missing.append((peer, why))
    assert missing == []


def test_the_conformance_page_shows_failures_and_nonfinite_results(page_of: Any) -> None:
    page = page_of(result(failed=2, worst={"float64": {"loss": "inf"}, "float32": {}}))
    assert "**2 failures.**" in page
    assert "| `PolicyLoss` | 32 | 5 | inf |  |  |  | 4 |" in page


def test_the_conformance_page_shows_the_programs(page_of: Any) -> None:
    ran = [
        {"name": "conformance.trl_run", "status": 0, "output": "grpo 20 steps\n"},
        {"name": "x", "status": 1, "output": "no"},
    ]
    page = page_of(result(), programs=ran)
    assert "`python -m conformance.trl_run`: passed" in page
    assert page[page.index("grpo 20 steps") - 1] == "```text"
    assert "`python -m x`: **failed**" in page


def test_the_conformance_page_before_the_first_run(tmp_path: Path) -> None:
    assert "No run has been recorded yet." in conformance_page.conformance_page(
        tmp_path / "none.json"
    )


# Metrics ------------------------------------------------------------------------------------------


# Counted only where they could not be checked at once.
INVALID = (
    "invalid_mask_values",
    "invalid_cu_seqlens",
    "negative_ages",
    "negative_weights",
    "tokens_without_turn",
)


def test_every_metric_of_the_policy_loss_is_on_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").split("## value_loss")[0]
    batch = make_batch(seed=3)
    specs = [
        *PRESETS.values(),
        pl.LossSpec(trust=pl.Clip(0.2, 0.2, dual=3.0), correction=pl.Veto(), kl=pl.KL("k3", 0.1)),
    ]
    seen = {re.sub(r"/.*", "/<part>", key) for spec in specs for key in run(spec, batch).metrics}
    assert seen == set(FORMULAS) - set(INVALID), "documented and measured metrics differ"
    for name in FORMULAS:
        assert f"| `{name}` |" in page


def test_every_metric_of_the_value_loss_is_on_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").split("## value_loss")[1]
    batch = make_batch(seed=3)
    out = pl.value_loss(batch.logp, batch.advantages, batch.old_logp, batch.mask)
    assert set(out.metrics.compute()) == set(VALUE_FORMULAS) - set(INVALID)
    # Inputs that could not be checked at once: a mask that is not bool, and offsets, where there
    # are no values to look at.
    tokens, offsets = (
        torch.zeros(4, device="meta"),
        torch.zeros(3, device="meta", dtype=torch.int64),
    )
    unchecked = pl.value_loss(tokens, tokens, tokens, tokens.long(), cu_seqlens=offsets).metrics
    assert set(unchecked) == set(VALUE_FORMULAS)
    for name in VALUE_FORMULAS:
        assert f"| `{name}` |" in page


def own_loss() -> dict[str, Any]:
    """The example of docs/custom.md, which `make lint` checks with mypy as it does all examples."""
    return runpy.run_path(str(ROOT / "examples" / "own_loss.py"))


def test_the_page_on_custom_losses_shows_the_functions_of_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/custom.md").read_text(), re.DOTALL)
    on_page = [
        ast.unparse(node)
        for block in blocks
        for node in ast.parse(block).body
        if isinstance(node, ast.FunctionDef)
    ]
    example = ast.parse((ROOT / "examples/own_loss.py").read_text())
    assert on_page == [
        ast.unparse(node) for node in example.body if isinstance(node, ast.FunctionDef)
    ]


def test_the_custom_losses_of_the_page_match_its_text() -> None:
    batch, example = make_batch(3, dtype=torch.float32), own_loss()
    spec = pl.LossSpec(trust=pl.Clip(0.2, 0.28, dual=3.0), aggregate=pl.SeqMeanTokenMean())
    expected = pl.policy_loss(spec, batch.logp, batch.old_logp, batch.advantages, batch.mask).loss
    torch.testing.assert_close(
        example["my_loss"](batch.logp, batch.old_logp, batch.advantages, batch.mask), expected
    )
    # Half a clip is PPO's where A > 0, and no limit elsewhere.
    positive = pl.LossSpec(trust=pl.Clip(math.inf, 0.2))
    loss = pl.policy_loss(
        pl.LossSpec(trust=example["half_clip"]),
        batch.logp,
        batch.old_logp,
        batch.advantages,
        batch.mask,
    ).loss
    torch.testing.assert_close(
        loss,
        pl.policy_loss(positive, batch.logp, batch.old_logp, batch.advantages, batch.mask).loss,
    )
