"""`what_if`: every loss on tokens that a run stored, side by side.

tokens     the stored tokens: `StoredTokens`, read from a run directory or a file
outcome    one loss on these tokens: gradients, branches, problems, and the change that cures them
weights    cosines and changes of gradients, by log-probability or through a model
result     `what_if` and `WhatIf`
page       the result as one HTML file
command    `policyloss what-if`
"""

from policyloss_lab.whatif.outcome import Limits
from policyloss_lab.whatif.result import WhatIf, what_if

__all__ = ["Limits", "WhatIf", "what_if"]
