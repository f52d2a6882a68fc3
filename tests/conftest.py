"""One thread and fixed hypothesis settings for every test: small tensors gain nothing from more, and failures repeat."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("fixed")
