"""Any loss of this library through the Tinker API: `forward_backward_custom` and
`create_custom_loss`.

`loss(spec)` runs in the client, sees all data of a call, and works with every server.
`export(spec)` traces the loss of one sequence, so that a server can run it. Neither imports the
SDK; both are tested with its releases 0.25 (without `create_custom_loss`) and 0.36.
"""

from policyloss.compat.tinker.exported import ExportedLoss, export
from policyloss.compat.tinker.losses import StepLoss, loss
from policyloss.compat.tinker.own_losses import built_in

__all__ = ["ExportedLoss", "StepLoss", "built_in", "export", "loss"]
