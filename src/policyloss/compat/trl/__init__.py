"""TRL: every loss of `GRPOConfig` as a `LossSpec`, and a `GRPOTrainer` that takes any `LossSpec`.

    from policyloss.compat.trl import GRPOTrainer, explain_config, spec_from_config

    # The loss of that config, and its traps:
    print(explain_config(GRPOConfig(loss_type="cispo")))
    # TRL's trainer with another loss; None keeps the loss that the config describes:
    trainer = GRPOTrainer(model, reward, args, policy_loss="gspo")
    # The same without logits, head and loss in one pass:
    trainer = GRPOTrainer(model, reward, args, policy_loss="gspo", head="fused")
    # TRL's experimental asynchronous trainer with another loss:
    trainer = AsyncGRPOTrainer(model, reward, args, policy_loss="cispo")
    # TRL's other trainers (RLOO, SFT, DPO, KTO, distillation) with the head of this library:
    install_head()

The numbers are those of TRL 1.14 to 1.16 (trl/trainer/grpo_trainer.py). Only the
trainers and `install_head` need TRL installed.
"""

from __future__ import annotations

from typing import Any

from policyloss.compat.trl.batch import batch_loss, loss_mask
from policyloss.compat.trl.config import spec_from_config, totals_for
from policyloss.compat.trl.explanation import explain_config
from policyloss.compat.trl.head import install_head, uninstall_head
from policyloss.compat.trl.trainer import TRAINERS, trainer_class

# The trainers are not here, so that `import *` works without TRL.
__all__ = [
    "batch_loss",
    "explain_config",
    "install_head",
    "loss_mask",
    "spec_from_config",
    "totals_for",
    "uninstall_head",
]


def __getattr__(name: str) -> Any:
    if name in TRAINERS:
        return trainer_class(name)
    raise AttributeError(
        f"policyloss.compat.trl has no {name!r}; there are {', '.join([*TRAINERS, *__all__])}."
    )
