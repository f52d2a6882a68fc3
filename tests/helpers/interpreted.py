"""Triton kernels on any machine: compiled where there is a GPU, else run by Triton's interpreter.
Import this before triton.

Triton decides when it is imported whether its own functions are interpreted, so the choice is made
here, while tests are collected.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "triton was imported before TRITON_INTERPRET=1 was set; import tests/interpreted.py "
            "first."
        )
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton")

if DEVICE == "cpu":
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, *scope: Any) -> None:
        """Loop bounds are arrays of one number there, which NumPy 2.4 no longer takes
        for an index. scope: restores the old function; Triton 3.4 has no scope.
        """
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_with_index
