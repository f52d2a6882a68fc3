"""The frameworks: one virtual environment for each, and its other releases unpacked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".conformance"
CONSTRAINTS = Path(__file__).resolve().parent / "constraints"
# Marks a process as the right one for a framework and release.
ENTERED = "CONFORMANCE_ENTERED"
PYTHON = (3, 11)  # OpenRLHF's wheels exist for this Python only

Step = tuple[str, ...]  # arguments of one `pip install`


@dataclass(frozen=True)
class Peer:
    """A framework: its releases, the modules of `conformance.peers` that compare with it,
    and how it is installed.

    release: the pinned one, installed whole. others: releases compared as well, taken from their
    wheels and run with the pinned environment's dependencies. steps: the `pip install`s that build
    the environment, each under the framework's constraints file; empty for a framework that exists
    as recorded numbers only. programs: modules that run more than a function call, with exit status
    0 on success. tests: the framework's own tests that run with our functions in place, in the
    folder `tests` of its wheel. minimum: how many cases the pinned release must be compared in.
    """

    name: str
    release: str
    modules: tuple[str, ...]
    others: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    programs: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    minutes: int = 2
    minimum: int = 2000

    @property
    def home(self) -> Path:
        """The directory of the virtual environment."""
        return HOME / self.name

    @property
    def releases(self) -> tuple[str, ...]:
        """Every release compared with, the pinned one first."""
        return (self.release, *self.others)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "verl",
            "0.9.1",
            (
                "verl_losses",
                "verl_advantages",
                "verl_rollout",
                "verl_worker",
                "verl_distillation",
                "verl_head",
            ),
            others=("0.9.0", "0.8.0"),
            steps=(
                ("torch", "numpy"),
                ("--no-deps", "verl"),
                ("ray", "tensordict", "omegaconf", "transformers", "codetiming"),
                ("datasets", "pillow"),  # for verl's workers
                ("pytest",),
            ),
            programs=("conformance.verl_attach_run",),
            tests=("trainer/ppo",),
        ),
        Peer(
            "openrlhf",
            "0.11.2",
            ("openrlhf", "openrlhf_head"),
            others=("0.11.1", "0.11.0"),
            steps=(
                ("torch", "numpy", "setuptools", "wheel"),
                ("transformers", "peft", "einops", "pylatexenc", "tqdm"),
                ("py-cpuinfo", "hjson", "msgpack", "ninja", "psutil", "pydantic"),  # for DeepSpeed
                ("--no-deps", "--no-build-isolation", "deepspeed"),
                ("--no-deps", "openrlhf"),
                ("pytest",),
            ),
            tests=("test_loss_aggregation.py", "test_kl_estimator_gradient.py"),
        ),
        Peer(
            "trl",
            "1.16.0",
            ("trl", "trl_distillation", "trl_preference"),
            others=("1.15.0", "1.14.0"),
            steps=(
                ("torch", "numpy"),
                ("trl", "peft"),
                ("py-cpuinfo", "hjson", "msgpack", "ninja", "psutil", "pydantic", "einops"),
                ("--no-deps", "--no-build-isolation", "deepspeed"),
            ),
            programs=(
                "conformance.trl_run",
                "conformance.trl_head_run",
                "conformance.trl_ranks_run",
                "conformance.trl_tree_run",
                "conformance.trl_attach_run",
            ),
            minutes=2,
        ),
        Peer(
            "tinker",
            "0.36.0",
            ("tinker",),
            others=("0.25.0",),
            steps=(("torch", "numpy"), ("tinker",)),
        ),
        # Its package is on no index: there are only the recorded cases.
        Peer("colossalai", "0.5.0", ("colossalai",), minimum=0),
    )
}


class BuildError(RuntimeError):
    """An environment could not be built; the message ends with pip's output."""


def interpreter(peer: Peer) -> Path:
    """The Python that imports this framework: its environment's,
    or the current one if there is nothing to install.
    """
    return peer.home / "bin" / "python" if peer.steps else Path(sys.executable)


def ensure(peer: Peer) -> None:
    """Build the framework's environment if it is missing or if its pins have changed."""
    if not peer.steps or (_stamp(peer).is_file() and _stamp(peer).read_text() == _pins(peer)):
        return
    print(
        f"building the {peer.name} environment ({peer.name} {peer.release}, about {peer.minutes} "
        "min)",
        flush=True,
    )
    shutil.rmtree(peer.home, ignore_errors=True)
    _run([_base_python(), "-m", "venv", str(peer.home)], peer.name)
    for step in peer.steps:
        pip_install(peer, "-c", str(CONSTRAINTS / f"{peer.name}.txt"), *step)
    mark_built(peer)


def mark_built(peer: Peer) -> None:
    """Write the stamp that marks the environment as built from the current pins."""
    _stamp(peer).write_text(_pins(peer))


def ensure_release(peer: Peer, release: str) -> Path | None:
    """The directory of another release's wheel, unpacked, to be put first on the path;
    None for the pinned release.
    """
    if release == peer.release:
        return None
    target = HOME / "releases" / f"{peer.name}-{release}"
    if not target.is_dir():
        print(f"unpacking {peer.name} {release}", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            wheel = (
                "--no-deps",
                "--no-compile",
                "--only-binary",
                ":all:",
                "--target",
                f"{scratch}/it",
                f"{peer.name}=={release}",
            )
            pip_install(peer, *wheel)
            Path(scratch, "it").rename(target)
    return target


def pip_install(peer: Peer, *arguments: str) -> None:
    """`pip install` in the framework's environment; quiet unless it fails."""
    _run(
        [
            str(interpreter(peer)),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *arguments,
        ],
        peer.name,
    )


def child_environment(
    peer: Peer | None = None, release: str = "", release_path: Path | None = None
) -> dict[str, str]:
    """The environment variables of a process that compares: the release first on the path, our
    sources, one thread, no network.
    """
    paths = [path for path in (release_path, ROOT / "src", ROOT) if path is not None]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        ENTERED: f"{peer.name} {release}" if peer else "",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }


def _stamp(peer: Peer) -> Path:
    return peer.home / ".installed"


def _pins(peer: Peer) -> str:
    """A digest of everything that determines the contents of the environment."""
    pins = (CONSTRAINTS / f"{peer.name}.txt").read_text()
    return hashlib.sha256(repr((pins, peer.steps, PYTHON)).encode()).hexdigest() + "\n"


def _base_python() -> str:
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    name = ".".join(map(str, PYTHON))
    found = shutil.which(f"python{name}")
    if found is None:
        raise BuildError(
            f"the frameworks are pinned for Python {name}; put a python{name} on the PATH."
        )
    return found


def _run(command: list[str], name: str) -> None:
    # DeepSpeed would build its kernels when it is installed; nothing here needs them.
    done = subprocess.run(
        command, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(
            f"{name}: `{' '.join(command)}` failed:\n{(done.stdout + done.stderr)[-4000:]}"
        )
