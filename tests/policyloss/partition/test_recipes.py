"""The recipes run, on two ranks where they are distributed, and all end at the parameters of one
process and one whole batch.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_ranks import RANKS, RECIPES, ROOT
from started import started_once
from walk import walked

Saved = dict[str, Any]
PAGE = ROOT / "docs" / "recipes.md"
needs_linux = pytest.mark.skipif(
    platform.system() != "Linux", reason="the recipes extra installs DeepSpeed on Linux only"
)
EACH = [
    pytest.param(name, marks=needs_linux if name == "deepspeed_zero2" else ()) for name in RANKS
]
TOLERANCE = (
    1e-6  # of float32 parameters; they are below 1, and five steps move some of them by 0.03
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every recipe saved its result. Parallel test workers share one run:
    the first starts it.
    """
    command = [sys.executable, ROOT / "tests/workers/recipe_ranks.py"]
    return started_once(
        tmp_path_factory,
        "recipes",
        lambda place: subprocess.run([*command, place], check=True, timeout=300),
    )


def saved(folder: Path, name: str) -> Saved:
    """The file that a recipe saved; if one of its ranks failed, their output is the error."""
    codes = (folder / f"{name}.codes").read_text().split() if name in RANKS else []
    printed = "\n".join(log.read_text() for log in sorted(folder.glob(f"{name}.*.log")))
    assert set(codes) <= {"0"}, f"exit codes {codes} (negative: ended from outside)\n{printed}"
    result: Saved = torch.load(folder / f"{name}.pt", weights_only=True)
    return result


def distance(a: Saved, b: Saved) -> float:
    """The largest difference of any parameter."""
    assert a["parameters"].keys() == b["parameters"].keys()
    return max(
        float((x.double() - b["parameters"][name].double()).abs().max())
        for name, x in a["parameters"].items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_a_recipe_ends_where_the_whole_batch_does(name: str, folder: Path) -> None:
    """The whole batch: one process, one micro-batch, float64,
    `policy_loss` without `accumulate`.
    """
    recipe, whole = saved(folder, name), saved(folder, "whole_batch")
    assert recipe["ranks"] == RANKS[name]
    assert distance(recipe, whole) <= TOLERANCE
    assert recipe["metrics"] == pytest.approx(whole["metrics"], rel=TOLERANCE, abs=TOLERANCE)
    # 1 + 14 + 2 + 9 + 3 + 16 + 1 + 5 + 12 + 2 + 7 + 4: every completion once.
    assert recipe["metrics"]["tokens"] == 76


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in EACH if one.values != ("plain_loop",)])
def test_a_recipe_ends_where_the_plain_loop_does(name: str, folder: Path) -> None:
    assert distance(saved(folder, name), saved(folder, "plain_loop")) <= TOLERANCE


@pytest.mark.slow
def test_the_batch_shows_a_wrong_denominator(folder: Path) -> None:
    """The mean of the micro-batches' own means, and no training at all, are four orders of
    magnitude outside the tolerance.
    """
    for other in ("mean_of_means", "untrained"):
        assert distance(saved(folder, other), saved(folder, "whole_batch")) > 1e4 * TOLERANCE


def command(name: str) -> str:
    """The command that starts a recipe, from its first line."""
    said = ast.get_docstring(ast.parse((RECIPES / f"{name}.py").read_text(encoding="utf-8")))
    assert said is not None
    return said.partition(": ")[2]


@pytest.mark.slow
def test_the_command_of_a_recipe_starts_it(tmp_path: Path, folder: Path) -> None:
    """Through the real launcher, for one recipe; the others' ranks are started
    with the environment that it makes.
    """
    launcher, *rest = shlex.split(command("ddp"))
    # Standalone: a free port.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",
    }
    path = tmp_path / "ddp.pt"
    begun = [Path(sys.executable).with_name(launcher), *rest, path]
    ended = subprocess.run(
        begun, cwd=ROOT, env=environment, timeout=120, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "after 5 steps on 2 ranks" in ended.stdout
    assert distance(torch.load(path, weights_only=True), saved(folder, "plain_loop")) <= TOLERANCE


@walked("name", RANKS)
def test_a_recipe_is_short_and_printed_on_the_page(name: str) -> None:
    code = (RECIPES / f"{name}.py").read_text(encoding="utf-8")
    assert len(code.splitlines()) < 40
    assert f"examples/recipes/{name}.py" in command(name)
    shown = re.findall(
        r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert code in shown, f"copy examples/recipes/{name}.py into docs/recipes.md"


def test_every_recipe_is_run_and_shown() -> None:
    assert {path.stem for path in RECIPES.glob("*.py")} == {*RANKS, "task"}
    assert len(re.findall(r"^```py$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == len(RANKS)
