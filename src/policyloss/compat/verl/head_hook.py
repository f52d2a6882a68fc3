"""Importing this module replaces the fused heads of the installed verl (`use_fused_kernels`) and
registers every preset: set `actor_rollout_ref.model.external_lib` to it.
"""

from policyloss.compat.verl.head import install_head
from policyloss.compat.verl.hook import CHECKED, NAMES

REPLACED = install_head()

__all__ = ["CHECKED", "NAMES", "REPLACED"]
