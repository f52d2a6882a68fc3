"""Builds the sdist and the wheel, and puts them into dist/ if they pass every check.

    python -m release.dist          (or `make dist`)

The sdist must hold the files that git tracks, and the wheel those of src/policyloss; so an asset
needs no entry in any list, and a stray file is noticed. The wheel is built twice, from the sdist
and from the tree, and both must hold the same. Nothing is fetched from a network.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

from packaging.metadata import ExceptionGroup, Metadata

from release.runs import ROOT
from release.versions import pythons_that_passed

VERSIONS = "docs/versions.json"  # the interpreters that ran the tests
LICENCE, PYTHONS, NEEDS = "Apache-2.0", ">=3.10", ["torch>=2.6"]
LARGEST_MB = {".whl": 1.5, ".gz": 5.0}
_BUILD = (sys.executable, "-m", "build", "--no-isolation")


def tracked_files() -> dict[str, bytes]:
    """The files that git tracks, by their paths from the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        raise SystemExit("`make dist` compares with the files that git tracks: run it in a clone.")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}


def wheel_faults(wheel: Path, files: dict[str, bytes]) -> list[str]:
    """What is wrong with a wheel of the tracked `files`: its contents, size, command, metadata."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    source = files["src/policyloss/__init__.py"].decode()
    version = re.findall('^__version__ = "(.+)"', source, re.MULTILINE)[0]
    info = f"policyloss-{version}.dist-info/"
    expected: dict[str, bytes | None] = {
        name.removeprefix("src/"): data
        for name, data in files.items()
        if name.startswith("src/policyloss/")
    }
    expected |= dict.fromkeys(info + name for name in ("METADATA", "WHEEL", "RECORD"))
    expected |= {info + "entry_points.txt": None, info + "licenses/LICENSE": files["LICENSE"]}
    faults = _differences(expected, contents) + _size_faults(wheel)
    commands = ConfigParser()
    commands.read_string(contents.get(info + "entry_points.txt", b"").decode())
    if not commands.has_option("console_scripts", "policyloss"):
        faults.append("the command `policyloss` is not installed")
    tested = pythons_that_passed(json.loads(files[VERSIONS]))
    faults += metadata_faults(contents.get(info + "METADATA", b""), version, tested)
    return [f"{wheel.name}: {fault}" for fault in faults]


def sdist_faults(sdist: Path, files: dict[str, bytes]) -> list[str]:
    """What is wrong with an sdist of the tracked `files`."""
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
        contents = {
            name: stream.read()
            for name, member in members.items()
            if (stream := archive.extractfile(member)) is not None
        }
    faults = _differences({**files, "PKG-INFO": None}, contents) + _size_faults(sdist)
    return [f"{sdist.name}: {fault}" for fault in faults]


def _differences(expected: dict[str, bytes | None], contents: dict[str, bytes]) -> list[str]:
    missing = sorted(set(expected) - set(contents))
    stray = sorted(set(contents) - set(expected))
    changed = sorted(
        name
        for name, data in expected.items()
        if data is not None and contents.get(name, data) != data
    )
    return [
        *(f"{name} is missing" for name in missing),
        *(f"{name} does not belong there; does git track it?" for name in stray),
        *(f"{name} differs from the file in the tree" for name in changed),
    ]


def _size_faults(path: Path) -> list[str]:
    megabytes, most = path.stat().st_size / 1e6, LARGEST_MB[path.suffix]
    return [f"{megabytes:.1f} MB; at most {most} MB"] if megabytes > most else []


def metadata_faults(text: bytes, version: str, tested: set[str]) -> list[str]:
    """What is wrong with the metadata: against their standard, and against this project.
    tested: the interpreters that ran the tests; classifiers must name these and no others.
    """
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        return [f"metadata: {error}" for error in group.exceptions]
    needs = [str(line) for line in metadata.requires_dist or [] if "extra ==" not in str(line)]
    pythons = set(re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.classifiers or [])))
    local = [url for url in (metadata.project_urls or {}).values() if url[:8] != "https://"]
    checks = [
        (str(metadata.version) == version, f"version {metadata.version}, not {version}"),
        (metadata.license_expression == LICENCE, f"the licence is {metadata.license_expression}"),
        (metadata.requires_python == PYTHONS, f"needs Python {metadata.requires_python}"),
        (needs == NEEDS, f"needs {needs} without an extra"),
        (not local, f"{local} can be opened on one machine only"),
        (
            pythons == tested,
            f"classifiers name Python {sorted(pythons)}, but {sorted(tested)} passed the tests "
            f"({VERSIONS})",
        ),
        (
            metadata.description_content_type == "text/markdown",
            f"the description is {metadata.description_content_type}, not Markdown",
        ),
    ]
    return [fault for passes, fault in checks if not passes]


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel in `folder`, which holds nothing else then. A fault ends the
    program, and leaves `folder` as it is.
    """
    files = tracked_files()
    with tempfile.TemporaryDirectory() as name:
        built, from_tree = Path(name) / "dist", Path(name) / "from_tree"
        # The wheel of the first command is made from the sdist, that of the second from the tree.
        for options in (["--outdir", str(built)], ["--wheel", "--outdir", str(from_tree)]):
            subprocess.run([*_BUILD, *options, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
        (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        subprocess.run(
            [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], check=True
        )
        faults = sdist_faults(sdist, files) + wheel_faults(wheel, files)
        if (from_tree / wheel.name).read_bytes() != wheel.read_bytes():
            faults.append(f"{wheel.name}: the sdist gives another wheel than the tree")
        if faults:
            raise SystemExit("\n".join(faults))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(built, folder)
    return folder / sdist.name, folder / wheel.name


def main() -> None:
    """The command."""
    for path in build(ROOT / "dist"):
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
