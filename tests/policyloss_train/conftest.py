"""The model that the tests of whole runs start from."""

from __future__ import annotations

import pytest
from started import started_once
from train_loop_ranks import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its folder, made once for all tests, which do not change it."""
    return str(started_once(tmp_path_factory, "small_model", make_model))
