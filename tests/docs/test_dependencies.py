"""The list of dependencies and the lock are those of the pinned environment,
and name no place that files come from.
"""

from __future__ import annotations

import re

import pytest
from dependencies import licences, lock
from dependencies.installed import CORE, ROOT, closure, extras, pins

LOCKED = dict(
    re.findall(
        r"^([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$",
        (ROOT / "requirements.lock").read_text(),
        re.MULTILINE,
    )
)
_ROW = re.compile(r"^\| (\S+) \| (\d\S*) \| (.+?) \| (.+?) \|$", re.MULTILINE)
LISTED = {row[0].strip("*"): (row[0], *row[1:]) for row in _ROW.findall(licences.PAGE.read_text())}


def test_the_pinned_versions_are_listed_and_locked() -> None:
    """After a change of constraints.txt, `make licences lock` is due."""
    versions = {name: row[1] for name, row in LISTED.items()}
    for name, version in pins().items():
        assert versions[name] == version, "run `make licences`"
        assert LOCKED.get(name) == (None if name in lock.LEFT_OUT else version), "run `make lock`"


def test_the_lock_holds_all_that_is_listed() -> None:
    assert set(LISTED) - set(LOCKED) == set(lock.LEFT_OUT)
    assert {name: LISTED[name][1] for name in LOCKED} == LOCKED


def test_every_line_of_the_lock_has_a_digest_and_no_address() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) == len(LOCKED)
    for text in (*lines, licences.PAGE.read_text()):
        assert not re.search(r"https?:|file:|index-url|find-links", text)


def test_the_page_matches_the_installed_packages() -> None:
    """Of the pinned packages, whose versions are the same in every environment
    that `make` builds.
    """
    made = {row[0].strip("*"): row for row in licences.rows()}
    for name, version in pins().items():
        if made[name][1] == version:
            assert tuple(made[name]) == LISTED[name], "run `make licences`"


def test_requirements_form_a_graph() -> None:
    optional = ["demo", "lab", "train", "recipes", "site", "dev"]
    optional += [f"policyloss-lab[{name}]" for name in ("parquet", "tensorboard")]
    optional += [f"policyloss-train[{name}]" for name in ("lora", "optimizers", "tasks")]
    assert extras() == [CORE, *optional]
    assert set(closure("lab")) == set(closure(CORE))
    core = set(closure(CORE))
    assert "torch" in core
    assert not core & {"transformers", "pytest", "numpy", "policyloss"}
    assert core < set(closure("train")) < set(closure("dev"))
    assert LISTED["torch"][3] == CORE
    assert LISTED["pytest"][3] == "dev"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"License-Expression": ["MIT"], "License": ["other"]}, "MIT"),
        (
            {
                "Classifier": ["License :: OSI Approved :: MIT License", "Topic :: x"],
                "License": ["x\ny"],
            },
            "MIT License",
        ),
        ({"Classifier": ["License :: OSI Approved"], "License": ["Apache 2.0"]}, "Apache 2.0"),
        ({"License": ["a whole text\nof a licence"]}, "not stated"),
        ({}, "not stated"),
    ],
)
def test_where_a_licence_is_looked_for(metadata: dict[str, list[str]], said: str) -> None:
    from email.message import Message
    from types import SimpleNamespace

    message = Message()
    for name, values in metadata.items():
        for value in values:
            message[name] = value
    assert licences.licence(SimpleNamespace(metadata=message)) == said  # type: ignore[arg-type]


def test_the_lock_keeps_digests_only() -> None:
    """From pip's own report, made up here: its addresses and paths stay out,
    and a file without a digest is an error.
    """

    def item(name: str, hashes: dict[str, str]) -> dict[str, object]:
        return {
            "metadata": {"name": name, "version": "1.0"},
            "download_info": {
                "url": f"file:///secret/{name}.whl",
                "archive_info": {"hashes": hashes},
            },
        }

    both = {"install": [item("Zed_Name", {"sha256": "ab"}), item("alpha", {"sha256": "cd"})]}
    assert lock.lines(both) == ["alpha==1.0 --hash=sha256:cd", "zed-name==1.0 --hash=sha256:ab"]
    with pytest.raises(SystemExit, match=r"knows no SHA-256 digest of alpha 1\.0"):
        lock.lines({"install": [item("alpha", {"md5": "x"})]})
