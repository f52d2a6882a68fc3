"""Builds the sdist and the three wheels, and puts them into dist/ if they pass every check.

    python -m release.dist          (or `make dist`)

The sdist must hold the files that git tracks, and each wheel the files of its package in src; so an
asset needs no entry in any list, and a stray file is an error. The wheel of the library is built
twice, from the sdist and from the tree, and both must be equal. Nothing is fetched from a network.
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
LICENCE, PYTHONS = "Apache-2.0", ">=3.10"
LIBRARY, LAB, TRAIN = "policyloss", "policyloss_lab", "policyloss_train"
NEEDS = {  # without an extra; VERSION is that of the library
    LIBRARY: ["torch>=2.6"],
    LAB: ["policyloss==VERSION"],
    TRAIN: [
        "numpy>=1.26",
        "policyloss-lab==VERSION",
        "policyloss==VERSION",
        "rich>=13.9",
        "safetensors>=0.5",
        "tensorboard>=2.18",
        'tomli>=2; python_version < "3.11"',
        "transformers>=5",
    ],
}
ENTRY_POINTS = {
    LIBRARY: ("console_scripts", "policyloss"),
    LAB: ("policyloss.commands", "lab"),
    TRAIN: ("policyloss.commands", "train"),
}
LARGEST_MB = {LIBRARY: 0.55, LAB: 0.45, TRAIN: 0.45, "sdist": 5.0}
_BUILD = (sys.executable, "-m", "build", "--no-isolation")


def tracked_files() -> dict[str, bytes]:
    """The files that git tracks, by their paths from the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        raise SystemExit("`make dist` compares with the files that git tracks: run it in a clone.")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}


def wheel_faults(wheel: Path, files: dict[str, bytes]) -> list[str]:
    """The faults of a wheel of the tracked `files`: its contents, size, commands, metadata."""
    package = wheel.name.partition("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    source = files["src/policyloss/__init__.py"].decode()
    version = re.findall('^__version__ = "(.+)"', source, re.MULTILINE)[0]
    info = f"{package}-{version}.dist-info/"
    expected: dict[str, bytes | None] = {
        name.removeprefix("src/"): data
        for name, data in files.items()
        if name.startswith(f"src/{package}/") and not name.endswith("/README.md")
    }
    licence = info + "licenses/LICENSE" if package == LIBRARY else f"{package}/LICENSE"
    expected |= dict.fromkeys(info + name for name in ("METADATA", "WHEEL", "RECORD"))
    expected |= {info + "entry_points.txt": None, licence: files["LICENSE"]}
    faults = _differences(expected, contents) + _size_faults(wheel, LARGEST_MB[package])
    points = ConfigParser(delimiters=("=",))
    points.read_string(contents.get(info + "entry_points.txt", b"").decode())
    if not points.has_option(*ENTRY_POINTS[package]):
        faults.append("the entry point {1!r} of {0!r} is missing".format(*ENTRY_POINTS[package]))
    tested = pythons_that_passed(json.loads(files[VERSIONS]))
    needs = [need.replace("VERSION", version) for need in NEEDS[package]]
    faults += metadata_faults(contents.get(info + "METADATA", b""), version, tested, needs)
    return [f"{wheel.name}: {fault}" for fault in faults]


def sdist_faults(sdist: Path, files: dict[str, bytes]) -> list[str]:
    """The faults of an sdist of the tracked `files`."""
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
        contents = {
            name: stream.read()
            for name, member in members.items()
            if (stream := archive.extractfile(member)) is not None
        }
    faults = _differences({**files, "PKG-INFO": None}, contents)
    faults += _size_faults(sdist, LARGEST_MB["sdist"])
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


def _size_faults(path: Path, most: float) -> list[str]:
    megabytes = path.stat().st_size / 1e6
    return [f"{megabytes:.2f} MB; at most {most} MB"] if megabytes > most else []


def metadata_faults(text: bytes, version: str, tested: set[str], needs: list[str]) -> list[str]:
    """The faults of the metadata: against their standard, and against this project.

    tested: the interpreters that ran the tests; classifiers must name these and no others.
    needs: the requirements without an extra.
    """
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        return [f"metadata: {error}" for error in group.exceptions]
    required = [str(line) for line in metadata.requires_dist or [] if "extra ==" not in str(line)]
    pythons = set(re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.classifiers or [])))
    local = [url for url in (metadata.project_urls or {}).values() if url[:8] != "https://"]
    checks = [
        (str(metadata.version) == version, f"version {metadata.version}, not {version}"),
        (metadata.license_expression == LICENCE, f"the licence is {metadata.license_expression}"),
        (metadata.requires_python == PYTHONS, f"needs Python {metadata.requires_python}"),
        (sorted(required) == sorted(needs), f"needs {required} without an extra"),
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


def build(folder: Path) -> tuple[Path, ...]:
    """Build the sdist and the three wheels into `folder`, which holds nothing else then. A fault
    ends the program, and leaves `folder` unchanged.
    """
    files = tracked_files()
    with tempfile.TemporaryDirectory() as name:
        built, from_tree = Path(name) / "dist", Path(name) / "from_tree"
        # The wheel of the first command is made from the sdist, that of the second from the tree.
        for options in (["--outdir", str(built)], ["--wheel", "--outdir", str(from_tree)]):
            subprocess.run([*_BUILD, *options, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
        (library,) = built.glob("*.whl")
        for package in (LAB, TRAIN):
            command = [*_BUILD, "--wheel", "--outdir", str(built), str(ROOT / "packages" / package)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (sdist,), wheels = built.glob("*.tar.gz"), sorted(built.glob("*.whl"))
        twine = [sys.executable, "-m", "twine", "check", "--strict"]
        subprocess.run([*twine, str(sdist), *map(str, wheels)], check=True)
        faults = sdist_faults(sdist, files)
        faults += [fault for wheel in wheels for fault in wheel_faults(wheel, files)]
        if (from_tree / library.name).read_bytes() != library.read_bytes():
            faults.append(f"{library.name}: the sdist gives another wheel than the tree")
        if faults:
            raise SystemExit("\n".join(faults))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(built, folder)
    return tuple(folder / path.name for path in (sdist, *wheels))


def main() -> None:
    """The command."""
    for path in build(ROOT / "dist"):
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
