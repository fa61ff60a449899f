"""What holds for every test: no network, and `gpu` tests are skipped where there is none."""

from __future__ import annotations

import os

import pytest

# Before transformers is imported anywhere: a test that would ask a hub fails, here as in CI.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none is visible"))
