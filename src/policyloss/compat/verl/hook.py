"""Importing this registers every preset in the installed verl: set
`actor_rollout_ref.model.external_lib` to this module.

With `VERL_USE_EXTERNAL_MODULES` set to it as well, the process that starts the run checks the
complete configuration too.
"""

from policyloss.compat.verl.registry import register
from policyloss.compat.verl.settings import check_when_verl_does

NAMES = register()
CHECKED = check_when_verl_does()
