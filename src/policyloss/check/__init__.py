"""Tests that the library runs on a user's code: `check_loss` and `partition_check`.

`loss` checks a loss. `partition` checks a training step: `cutting` cuts its batch, `running` runs
it, `diagnosis` finds the normalisation that explains the gradients, and `wording` puts it into
words.
"""

from policyloss.check.loss import check_loss
from policyloss.check.partition import PartitionReport, partition_check

__all__ = ["PartitionReport", "check_loss", "partition_check"]
