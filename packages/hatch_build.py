"""Puts the package of src/ into its wheel. An editable install points at src/ instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SourceFolder(BuildHookInterface[Any]):
    """Includes ../../src/NAME, where NAME is the folder that holds pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to a wheel, unless it is an editable install."""
        if version == "standard":
            name, root = Path(self.root).name, Path(self.root).parents[1]
            build_data["force_include"] |= {
                str(root / "src" / name): name,
                str(root / "LICENSE"): f"{name}/LICENSE",
            }
