"""Importing this puts the head of this library into the installed verl, where `use_fused_kernels`
is set, and registers every preset: set `actor_rollout_ref.model.external_lib` to this module.
"""

from policyloss.compat.verl.head import install_head
from policyloss.compat.verl.hook import CHECKED, NAMES

REPLACED = install_head()

__all__ = ["CHECKED", "NAMES", "REPLACED"]
