from __future__ import annotations

import pytest

from tests.support.checkpoints import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny checkpoints, written once a session: checkpoints(tied=True, num_kv_heads=1) -> path."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
