"""The library uses a few functions of torch that have no public name; all are listed here."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import policyloss as pl

SOURCE = Path(pl.__file__).parent
PRIVATE = re.compile(r"\btorch(?:\.[a-z]\w*)*\._[a-z]\w*(?:\.\w+)*|\btorch\.fx\.experimental\.\w+")
# docs/decisions/0036-the-loss-on-a-gpu.md gives the purpose of each.
NEEDED = (
    "torch.fx.experimental.proxy_tensor.make_fx",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._assert_async",
    "torch._C._are_functorch_transforms_active",
)


def missing() -> list[str]:
    """The names of `NEEDED` that the installed torch lacks."""
    parts = [name.rsplit(".", 1) for name in NEEDED]
    return [
        f"{module}.{name}"
        for module, name in parts
        if not callable(getattr(import_module(module), name, None))
    ]


def test_this_torch_has_all_of_it() -> None:
    assert not missing(), (
        f"torch {torch.__version__} lacks {', '.join(missing())}, which policyloss uses; see "
        "docs/decisions/0036-the-loss-on-a-gpu.md for what each is needed for."
    )


def test_a_missing_function_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_assert_async")
    assert missing() == ["torch._assert_async"]


def test_no_other_private_name_is_used() -> None:
    listed = " ".join(NEEDED)
    used = set()
    for file in SOURCE.rglob("*.py"):
        code = re.sub(r'""".*?"""|`[^`]*`', "", file.read_text(), flags=re.DOTALL)
        code = re.sub(r"from (torch\S*) import (\w+)", r"\1.\2", code)
        used |= set(PRIVATE.findall(code))
    assert used
    assert {name for name in used if name not in listed} == set()
