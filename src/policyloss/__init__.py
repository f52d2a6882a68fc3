"""policyloss: the loss functions of LLM reinforcement learning,
as short compositions of orthogonal parts.

import policyloss as pl
spec = pl.preset("dapo")
out = pl.policy_loss(spec, logp, old_logp, advantages, mask)
out.loss.backward()
"""

from typing import TYPE_CHECKING

from policyloss.lazy import read_public

if TYPE_CHECKING:
    from policyloss.public import *  # noqa: F403

__version__ = "0.1.0"
__getattr__, __dir__ = read_public(globals())
