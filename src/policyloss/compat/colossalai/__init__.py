"""ColossalChat's losses: `PolicyLoss` as in `coati.distributed.loss`; `models` has the older two of
`coati.models.loss`. `install()` puts them into the `coati` that can be imported. ColossalChat's
consumers are Ray actors, so it must run there: `ray.init(runtime_env={"worker_process_setup_hook":
"policyloss.compat.colossalai.install"})`.
"""

from policyloss.compat.colossalai import models
from policyloss.compat.colossalai.distributed import PolicyLoss
from policyloss.compat.colossalai.hook import install, uninstall

__all__ = ["PolicyLoss", "install", "models", "uninstall"]
