"""Stand-ins for a `GRPOConfig` of TRL 1.16.0, which need no TRL."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from types import SimpleNamespace
from typing import Any

from policyloss.compat.trl.config import DEFAULTS


def config(**options: Any) -> SimpleNamespace:
    """GRPOConfig of TRL 1.16.0 with these options set."""
    return SimpleNamespace(
        **{**DEFAULTS, "gradient_accumulation_steps": 1, "steps_per_generation": 1, **options}
    )


def grpo_config(**options: Any) -> Any:
    """The same as a dataclass, which has defaults like the real one."""
    defaults = {
        **DEFAULTS,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "world_size": 1,
    }
    made = make_dataclass(
        "GRPOConfig", [(name, Any, field(default=value)) for name, value in defaults.items()]
    )
    return made(**options)
