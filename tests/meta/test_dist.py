"""The release: the checks of `make dist` find every kind of fault, and the wheel works where only
torch is installed.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from dependencies.installed import CORE, closure

from release import dist

FILES = {
    "LICENSE": b"the licence",
    "tests/test_x.py": b"assert True",
    dist.VERSIONS: b'[{"python": "3.11", "failed": 0}, {"python": "3.12", "failed": 1}]',
    "src/policyloss/__init__.py": b'__version__ = "1.2.3"\n',
    "src/policyloss/py.typed": b"",
    "src/policyloss/page/assets/page.js": b"draw()",
}
METADATA = """\
Metadata-Version: 2.4
Name: policyloss
Version: 1.2.3
Summary: Losses.
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Programming Language :: Python :: 3
Classifier: Programming Language :: Python :: 3.11
Requires-Python: >=3.10
Requires-Dist: torch>=2.6
Provides-Extra: demo
Requires-Dist: matplotlib>=3.8; extra == 'demo'
Project-URL: Source, https://example.org/policyloss
Description-Content-Type: text/markdown

# policyloss
"""
INFO = "policyloss-1.2.3.dist-info/"
NEEDS = ["torch>=2.6"]
CONTENTS = {
    "policyloss/__init__.py": b'__version__ = "1.2.3"\n',
    "policyloss/py.typed": b"",
    "policyloss/page/assets/page.js": b"draw()",
    INFO + "METADATA": METADATA.encode(),
    INFO + "WHEEL": b"Wheel-Version: 1.0",
    INFO + "RECORD": b"",
    INFO + "entry_points.txt": b"[console_scripts]\npolicyloss = policyloss.cli:main\n",
    INFO + "licenses/LICENSE": b"the licence",
}


def wheel_of(folder: Path, contents: dict[str, bytes]) -> Path:
    path = folder / "policyloss-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


def sdist_of(folder: Path, contents: dict[str, bytes]) -> Path:
    path = folder / "policyloss-1.2.3.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(f"policyloss-1.2.3/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_a_right_wheel_and_a_right_sdist_have_no_faults(tmp_path: Path) -> None:
    assert dist.wheel_faults(wheel_of(tmp_path, CONTENTS), FILES) == []
    assert dist.sdist_faults(sdist_of(tmp_path, {**FILES, "PKG-INFO": b"x"}), FILES) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"policyloss/page/assets/page.js": None}, "policyloss/page/assets/page.js is missing"),
        ({"policyloss/py.typed": None}, "policyloss/py.typed is missing"),
        ({"policyloss/page/assets/page.js": b"old()"}, "page.js differs from the file in the tree"),
        ({"tests/test_x.py": b"assert True"}, "tests/test_x.py does not belong there"),
        ({"policyloss/notes.tmp": b"x"}, "policyloss/notes.tmp does not belong there"),
        ({INFO + "licenses/LICENSE": None}, "licenses/LICENSE is missing"),
        ({INFO + "entry_points.txt": b"[console_scripts]\n"}, "the entry point 'policyloss'"),
        ({"policyloss/__init__.py": bytes(2_000_000)}, "2.00 MB; at most"),
    ],
)
def test_a_fault_of_the_wheel_is_named(
    tmp_path: Path, change: dict[str, bytes | None], fault: str
) -> None:
    contents = {k: v for k, v in {**CONTENTS, **change}.items() if v is not None}
    faults = dist.wheel_faults(wheel_of(tmp_path, contents), FILES)
    assert any(fault in line for line in faults), faults


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("Version: 1.2.3", "Version: 1.2.4", "version 1.2.4, not 1.2.3"),
        ("License-Expression: Apache-2.0", "License-Expression: MIT", "licence is MIT"),
        (">=3.10", ">=3.11", "needs Python >=3.11"),
        ("torch>=2.6", "numpy>=2", "needs ['numpy>=2'] without an extra"),
        ("https://example.org", "file:///srv", "file:///srv/policyloss"),
        ("Python :: 3.11", "Python :: 3.13", "3.13"),
        ("text/markdown", "text/plain", "text/plain"),
        ("License-Expression: Apache-2.0", "License-Expression: nonsense 1", "nonsense 1"),
    ],
)
def test_a_fault_of_the_metadata_is_named(old: str, new: str, fault: str) -> None:
    assert dist.metadata_faults(METADATA.encode(), "1.2.3", {"3.11"}, NEEDS) == []
    assert old in METADATA
    faults = dist.metadata_faults(METADATA.replace(old, new).encode(), "1.2.3", {"3.11"}, NEEDS)
    assert any(fault in line for line in faults), faults


def test_a_fault_of_the_sdist_is_named(tmp_path: Path) -> None:
    contents = {**FILES, "PKG-INFO": b"x", "notes.tmp": b"x", "LICENSE": b"another"}
    del contents["tests/test_x.py"]
    assert dist.sdist_faults(sdist_of(tmp_path, contents), FILES) == [
        "policyloss-1.2.3.tar.gz: tests/test_x.py is missing",
        "policyloss-1.2.3.tar.gz: notes.tmp does not belong there; does git track it?",
        "policyloss-1.2.3.tar.gz: LICENSE differs from the file in the tree",
    ]


SCRIPT = """
import sys, policyloss as pl, torch
assert not {"numpy", "transformers", "pytest"} & set(sys.modules)
logp = torch.zeros(1, 2, requires_grad=True)
out = pl.policy_loss("dapo", logp, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2).bool())
out.loss.backward()
print(pl.__file__, pl.__version__, out.loss.item(), logp.grad.tolist())
"""


@pytest.mark.slow
def test_the_wheel_works_with_torch_alone(tmp_path: Path) -> None:
    """Built as `make dist` does, and installed in an environment that holds torch, linked from
    here, and what torch needs. Two tokens at ratio 1 with A = 1: loss −1, gradient −1/2 each.
    """
    sdist, wheel, lab, train = built = dist.build(tmp_path / "dist")
    assert sdist.is_file()
    assert train.is_file()
    assert sorted((tmp_path / "dist").iterdir()) == sorted(built)
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    packages = next((fresh / "lib").glob("python*/site-packages"))
    for package in closure(CORE).values():
        for top in {file.parts[0] for file in package.files or ()} - {".."}:
            if not (packages / top).exists():
                (packages / top).symlink_to(package.locate_file(top))

    def output(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python = str(fresh / "bin/python")
    pip = (sys.executable, "-m", "pip", "--python", python)
    output(*pip, "install", "--quiet", "--no-index", "--no-compile", str(wheel))  # torch suffices
    output(*pip, "check")
    where, version, *numbers = output(python, "-W", "ignore", "-I", "-c", SCRIPT).split(maxsplit=2)
    assert Path(where) == packages / "policyloss/__init__.py"
    assert f"policyloss-{version}-" in wheel.name
    assert numbers == ["-1.0 [[-0.5, -0.5]]\n"]
    command = str(fresh / "bin/policyloss")
    assert "usage: policyloss" in output(command, "--help")
    missing = subprocess.run([command, "report", "x"], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "pip install 'policyloss[lab]'" in missing.stderr
    output(*pip, "install", "--quiet", "--no-index", "--no-compile", str(lab))
    page = tmp_path / "page.html"
    output(command, "explore", "--no-open", "--out", str(page))  # reads the assets
    assert "<script" in page.read_text(encoding="utf-8")
