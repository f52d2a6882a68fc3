"""Tests that the library runs on a user's code: `check_loss`, `partition_check`, `bits_check`.

`loss` checks a loss. `partition` checks a training step: `cutting` splits its batch and
runs the step on the pieces, and `diagnosis` finds and describes the normalisation that explains the
gradients. `bits` compares log-probabilities bit by bit.
"""

from policyloss.check.bits import BitsReport, bits_check
from policyloss.check.loss import check_loss
from policyloss.check.partition import PartitionReport, partition_check

__all__ = ["BitsReport", "PartitionReport", "bits_check", "check_loss", "partition_check"]
