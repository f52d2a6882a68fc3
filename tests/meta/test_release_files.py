"""The files around the code are correct: versions, targets, workflow, citation, templates."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dependencies.installed import pins
from release.runs import run_tests
from release.versions import PAGE, RECORDS, pythons_that_passed, table, with_table

import policyloss as pl

ROOT = Path(__file__).resolve().parents[2]


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def data_of(path: str) -> Any:
    return yaml.safe_load(text_of(path))


MAKEFILE = text_of("Makefile")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VERSIONS = re.findall(r"^VERSIONS := (.+)$", MAKEFILE, re.MULTILINE)[0].split()
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    ".github/pull_request_template.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))),
]


def commands_in(text: str) -> set[str]:
    """The targets that a text calls: in backticks, or at the start of a line of code."""
    return set(re.findall(r"(?:`|^(?:      - run: )?)make ([a-z-]+)(?=[ `\n])", text, re.M))


def test_every_target_that_a_page_names_exists() -> None:
    named = {page: commands_in(text_of(page)) - TARGETS for page in PAGES}
    assert {page: targets for page, targets in named.items() if targets} == {}
    assert {"demo", "test", "site"} <= commands_in(text_of("README.md"))
    assert commands_in("`make it`, make that\nmake demo  # x\n") == {"it", "demo"}


def test_every_target_is_phony_and_stands_in_the_help() -> None:
    phony = set(re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[0].split())
    explained = set(re.findall(r"^([a-z-]+):.*## \S", MAKEFILE, re.MULTILINE))
    assert phony == explained == TARGETS
    assert ".DEFAULT_GOAL := help" in MAKEFILE


def test_the_workflow_runs_the_checks_of_ci() -> None:
    workflow = data_of(".github/workflows/ci.yml")
    steps = [step.get("run", "") for step in workflow["jobs"]["all"]["steps"]]
    assert ".ci/run" in steps
    assert workflow["permissions"] == {"contents": "read"}
    for path in (".ci/run", ".github/workflows/ci.yml", ".devcontainer/devcontainer.json"):
        assert set(re.findall(r"\bmake ([a-z-]+)", text_of(path))) <= TARGETS
    assert (ROOT / ".ci/run").stat().st_mode & 0o100, "the workflow starts it as a program"
    steps = {"lint", "test", "test-docs", "test-slow", "conformance", "dist"}
    assert steps <= commands_in(text_of(".ci/run"))


def test_the_lowest_versions_are_one_number_everywhere() -> None:
    """The versions of pyproject.toml, in the files that run the tests and in the documentation."""
    project = text_of("pyproject.toml")
    python = re.findall(r'^requires-python = ">=(.+)"', project, re.M)[0]
    torch = re.findall(r'^dependencies = \["torch>=(.+)"\]', project, re.M)[0]
    assert f'target-version = "py{python.replace(".", "")}"' in project
    assert f'\npython_version = "{python}"' in project
    assert VERSIONS[0] == f"{python},{torch}.0"
    assert f"Python {python} and torch {torch}." in text_of("docs/versions.md")
    assert f"Python ≥ {python}" in text_of("README.md")
    assert f"torch ≥ {torch}" in text_of("README.md")


def test_the_three_packages_have_one_version() -> None:
    (version,) = re.findall('__version__ = "(.+)"', text_of("src/policyloss/__init__.py"))
    for folder in ("", "packages/policyloss_lab/", "packages/policyloss_train/"):
        pinned = re.findall(r'"policyloss[a-z-]*==(.+?)"', text_of(f"{folder}pyproject.toml"))
        assert set(pinned) == {version}


def test_the_versions_that_were_run_are_the_same_everywhere() -> None:
    """In the Makefile, the workflow, the record, the page and the classifiers."""
    records = json.loads(RECORDS.read_text())
    pairs = [f"{record['python']},{record['torch']}" for record in records]
    assert pairs == VERSIONS
    matrix = data_of(".github/workflows/ci.yml")["jobs"]["versions"]["strategy"]["matrix"]
    assert [f"{each['python']},{each['torch']}" for each in matrix["include"]] == VERSIONS
    assert with_table(PAGE.read_text(), records) == PAGE.read_text()
    passed = sorted(pythons_that_passed(records), key=lambda x: int(x[2:]))
    for folder in ("", "packages/policyloss_lab/", "packages/policyloss_train/"):
        assert re.findall(r"Python :: (3\.\d+)", text_of(f"{folder}pyproject.toml")) == passed


def test_results_of_tests_are_counted(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import os, pytest\n"
        "def test_passes(): assert os.environ['SET'] == 'here'\n"
        "def test_fails(): assert False\n"
        "def test_skips(): pytest.skip()\n"
        "def test_breaks(missing): pass\n"
    )
    counts = run_tests(sys.executable, ["-q", "-pno:cacheprovider", str(tests)], {"SET": "here"})
    del counts["seconds"]
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}


def test_a_table_of_results_takes_the_place_of_the_older() -> None:
    old = {"python": "3.9", "torch": "2.0", "passed": 1, "failed": 2, "skipped": 3, "date": "d"}
    page = f"before\n\n{table([old])}\nafter\n"
    new = [{**old, "python": "3.10"}, old]
    assert with_table(page, new) == f"before\n\n{table(new)}\nafter\n"
    assert "| 3.10 | 2.0 | 1 | 2 | 3 | d |\n| 3.9 |" in with_table(page, new)
    assert pythons_that_passed(
        [old, {**old, "failed": 0}, {**old, "python": "3.10", "failed": 0}]
    ) == {"3.10", "3.11"}


def test_ruff_before_a_commit_is_that_of_the_linter() -> None:
    (repository,) = data_of(".pre-commit-config.yaml")["repos"]
    assert repository["rev"] == f"v{pins()['ruff']}"
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-check", "ruff-format"]


def citation_faults(citation: dict[str, Any]) -> list[str]:
    """The rules of the Citation File Format 1.2.0, for the keys that this project uses."""
    required = {"cff-version", "message", "title", "authors"}
    optional = {"abstract", "type", "version", "license", "keywords", "date-released", "url"}
    optional |= {"repository-code", "doi"}
    faults = [f"{key} is missing" for key in sorted(required - set(citation))]
    faults += [f"{key} is unknown" for key in sorted(set(citation) - required - optional)]
    texts = set(citation) - {"authors", "keywords"}
    faults += [f"{key} is no text" for key in sorted(texts) if not isinstance(citation[key], str)]
    if citation.get("cff-version") != "1.2.0":
        faults.append("cff-version is not 1.2.0")
    if citation.get("type", "software") not in ("software", "dataset"):
        faults.append("type is neither software nor dataset")
    for author in citation.get("authors") or [{}]:
        if not {"name", "family-names", "given-names", "alias"} & set(author):
            faults.append("an author has no name")
    return faults


def test_the_citation_is_valid_and_of_this_version() -> None:
    citation = data_of("CITATION.cff")
    assert citation_faults(citation) == []
    assert citation["version"] == pl.__version__
    project = text_of("pyproject.toml")
    assert f'\nlicense = "{citation["license"]}"' in project
    urls = dict(re.findall(r'^(\w+) = "(https://.+)"$', project, re.MULTILINE))
    assert citation.get("repository-code") == urls.get("Source")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"title": None}, "title is missing"),
        ({"version": 0.1}, "version is no text"),
        ({"author": "x"}, "author is unknown"),
        ({"authors": []}, "an author has no name"),
        ({"authors": [{"email": "x"}]}, "an author has no name"),
        ({"cff-version": "1.1.0"}, "cff-version is not 1.2.0"),
        ({"type": "library"}, "type is neither software nor dataset"),
    ],
)
def test_a_fault_of_the_citation_is_named(change: dict[str, Any], fault: str) -> None:
    citation = {k: v for k, v in {**data_of("CITATION.cff"), **change}.items() if v is not None}
    assert citation_faults(citation) == [fault]


def test_the_changelog_has_one_heading_for_each_version() -> None:
    """The newest first; only the first may be unreleased, and it is the version of the package."""
    headings = re.findall(r"^## (.+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    form = re.compile(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d|unreleased)")
    versions = [form.fullmatch(heading) for heading in headings]
    assert all(versions), headings
    numbers = [tuple(map(int, match.groups()[:3])) for match in versions if match]
    assert ".".join(map(str, numbers[0])) == pl.__version__
    assert numbers == sorted(set(numbers), reverse=True)
    assert "unreleased" not in "".join(headings[1:])


@pytest.mark.parametrize("name", ["bug", "loss"])
def test_the_issue_forms_have_the_fields_github_needs(name: str) -> None:
    """A form without these keys, or with an id used twice, is not shown."""
    form = data_of(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [item for item in form["body"] if item["type"] != "markdown"]
    assert {item["type"] for item in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert all(item["attributes"]["label"] for item in fields)
    ids = [item["id"] for item in fields]
    assert len(set(ids)) == len(ids) > 0


def test_the_dev_container_makes_the_environment_of_the_makefile() -> None:
    container = json.loads(text_of(".devcontainer/devcontainer.json"))
    assert container["postCreateCommand"] == "make env"
    interpreter = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter.endswith("/.venv/bin/python")
    assert "\nVENV   := .venv\n" in MAKEFILE
