"""policyloss-lab: reads the runs of any trainer, and finds out why one goes wrong.

import policyloss_lab as lab
print(lab.doctor(rollout_logp=rollout_logp, old_logp=old_logp, mask=mask))
"""

from typing import TYPE_CHECKING

from policyloss.lazy import read_public

if TYPE_CHECKING:
    from policyloss_lab.public import *  # noqa: F403

__getattr__, __dir__ = read_public(globals())
