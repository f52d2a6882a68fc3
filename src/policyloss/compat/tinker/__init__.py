"""Any loss of this library through the Tinker API.

`loss(spec)` is for `forward_backward_custom`: it runs in the client, sees all data of a call, and
works with every server. `export(spec)` is for `create_custom_loss`: it traces the loss of one
sequence, so that a server can run it. Tested with the SDK 0.25 (which has no `create_custom_loss`)
and 0.36; neither function imports it.
"""

from policyloss.compat.tinker.data import built_in
from policyloss.compat.tinker.losses import ExportedLoss, StepLoss, export, loss

__all__ = ["ExportedLoss", "StepLoss", "built_in", "export", "loss"]
