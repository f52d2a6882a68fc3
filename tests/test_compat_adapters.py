"""Adapters are thin: no module of `policyloss.compat` does arithmetic, and none needs more than torch to be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import policyloss as pl

COMPAT = Path(pl.__file__).parent / "compat"
FILES = sorted(COMPAT.rglob("*.py"))
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult, ast.Mod, ast.FloorDiv)
# What torch offers that computes no number: kinds, dtypes, constants shaped like another tensor, masks put together.
HARMLESS = {
    *("Tensor", "Generator", "device", "dtype", "nn", "no_grad", "is_tensor", "distributed", "utils"),
    *("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64", "long"),
    *("logical_and", "tensor", "as_tensor", "zeros_like", "ones_like", "zeros", "ones", "full", "empty", "finfo", "promote_types"),
}
COMPUTING = {
    *(
        "exp",
        "log",
        "expm1",
        "log1p",
        "sum",
        "mean",
        "std",
        "var",
        "norm",
        "cumsum",
        "sqrt",
        "rsqrt",
        "square",
        "pow",
        "abs",
        "sign",
    ),
    *("clamp", "clip", "where", "maximum", "minimum", "amax", "amin", "max", "min", "masked_fill", "nan_to_num", "sigmoid", "neg"),
    *("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "clamp_", "softmax", "log_softmax", "logsumexp", "dot", "matmul"),
}


def arithmetic_in(source: str) -> list[str]:
    """Every place where `source` computes with values: operators on anything but types, and torch's own functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        operator = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ARITHMETIC)
        minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant)
        method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "super()"
        function = method and node.func.attr in COMPUTING  # a trainer's own log(…) is none
        of_torch = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
        if operator or minus or function or (of_torch and node.attr not in HARMLESS):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(COMPAT)) for p in FILES])
def test_an_adapter_computes_nothing(path: Path) -> None:
    assert arithmetic_in(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "loss = a * b",
        "loss -= kl",
        "x = -loss",
        "x = torch.exp(d)",
        "x = d.exp()",
        "x = (a - b).sum()",
        "y = 1 + eps",
        "z = x.mean(-1)",
    ],
)
def test_the_scan_finds_arithmetic(line: str) -> None:
    assert arithmetic_in(line)


def test_the_scan_knows_every_adapter() -> None:
    names = {p.relative_to(COMPAT).parts[0].removesuffix(".py") for p in FILES}
    assert {"verl", "openrlhf", "colossalai", "trl"} <= names


def test_adapters_import_with_torch_alone() -> None:
    """No framework is imported, and no numpy by us: only what `import torch` brings."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import policyloss as pl; [getattr(pl.compat, name) for name in pl.compat.__all__]\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "assert not new & {'verl', 'openrlhf', 'trl', 'coati', 'transformers', 'numpy', 'ray'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_framework_is_named() -> None:
    with pytest.raises(AttributeError, match=r"nemo.*colossalai, openrlhf, trl, verl"):
        pl.compat.nemo  # noqa: B018
