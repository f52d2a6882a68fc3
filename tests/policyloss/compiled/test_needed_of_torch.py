"""What the library uses of torch beyond its public interface is listed, and is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import policyloss as pl
from policyloss.compiled import trace

SOURCE = Path(pl.__file__).parent
PRIVATE = re.compile(r"\btorch(?:\.[a-z]\w*)*\._[a-z]\w*(?:\.\w+)*|\btorch\.fx\.experimental\.\w+")


def test_this_torch_has_all_of_it() -> None:
    missing = trace.missing_of_torch()
    assert not missing, (
        f"torch {torch.__version__} lacks {', '.join(missing)}, which policyloss uses; see "
        "docs/decisions/0036-the-loss-on-a-gpu.md for what each is needed for."
    )


def test_a_missing_function_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    monkeypatch.delattr("torch.fx.experimental.symbolic_shapes.ShapeEnv.produce_guards_expression")
    assert trace.missing_of_torch() == [
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.produce_guards_expression",
        "torch._foreach_copy_",
    ]


def test_no_other_private_name_is_used() -> None:
    """In the core; the trainer says apart what it needs of transformers and torchao."""
    listed = " ".join(trace.NEEDED_OF_TORCH)
    used = set()
    for file in SOURCE.rglob("*.py"):
        if "train" in file.relative_to(SOURCE).parts:
            continue
        code = re.sub(r'""".*?"""|`[^`]*`', "", file.read_text(), flags=re.DOTALL)
        code = re.sub(r"from (torch\S*) import (\w+)", r"\1.\2", code)
        used |= set(PRIVATE.findall(code))
    assert used
    assert {name for name in used if name not in listed} == set()
