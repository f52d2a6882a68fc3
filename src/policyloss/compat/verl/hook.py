"""Importing this module registers every preset and the distillation estimates in the installed
verl: set `actor_rollout_ref.model.external_lib` to it.

With `VERL_USE_EXTERNAL_MODULES` set to it as well, the process that starts the run has the names
too, and checks the complete configuration.
"""

from policyloss.compat.verl.distillation import register_distillation
from policyloss.compat.verl.registry import register
from policyloss.compat.verl.settings import extend_validation

NAMES = (*register(), *register_distillation())
CHECKED = extend_validation()
