"""One thread and fixed hypothesis settings for every test:
small tensors gain nothing from more, and failures repeat.
"""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # decided when triton is imported, which some libraries do by themselves
    )

torch.set_num_threads(1)

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("fixed")
