"""`what_if`: every loss on tokens that a run stored, side by side.

tokens     what was stored, end to end: `StoredTokens`
reading    from a run directory, a .jsonl or a .safetensors file
outcome    one loss on these tokens: gradients, branches, effective sample size, where the mass is
tangent    from gradients by log-probabilities to cosines and changes, also through a model
remedy     what is wrong with a loss on these tokens, and the smallest change that cures it
result     `what_if` and `WhatIf`
page       the result as one HTML file
command    `policyloss what-if`
"""

from policyloss_lab.whatif.remedy import Limits
from policyloss_lab.whatif.result import WhatIf, what_if

__all__ = ["Limits", "WhatIf", "what_if"]
