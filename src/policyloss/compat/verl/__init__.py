"""verl's losses, value loss, aggregation, KL penalty, advantage estimators and rollout correction,
under verl's names.

Each function has verl's arguments, defaults, return values and numbers (`make conformance` compares
them with the installed package); a keyword `release="0.8.0"` keeps the meaning of an older release
where a number changed. `register()` makes `actor.policy_loss.loss_mode="policyloss/<preset>"` work
in verl; `install()` replaces verl's functions by these, and `install_head()` its fused heads.
"""

from policyloss.compat.verl import advantages, aggregation, losses, rollout_correction
from policyloss.compat.verl.advantages import *
from policyloss.compat.verl.aggregation import *
from policyloss.compat.verl.head import (
    FusedLinearForPPO,
    install_head,
    linear_cross_entropy,
    uninstall_head,
)
from policyloss.compat.verl.losses import *
from policyloss.compat.verl.registry import install, register, uninstall
from policyloss.compat.verl.rollout_correction import *
from policyloss.compat.verl.settings import check_config

__all__ = [
    "FusedLinearForPPO",
    "check_config",
    "install",
    "install_head",
    "linear_cross_entropy",
    "register",
    "uninstall",
    "uninstall_head",
]
__all__.extend(advantages.__all__)
__all__.extend(aggregation.__all__)
__all__.extend(losses.__all__)
__all__.extend(rollout_correction.__all__)
