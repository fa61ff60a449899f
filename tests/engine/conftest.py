from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import LLM
from tests.support.checkpoints import Checkpoints
from tests.support.engines import Unhurried, small_engine
from tests.support.tokenizers import text_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny checkpoints, written once a session: checkpoints(tied=True, num_kv_heads=1) -> path."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session", params=[1, 2], ids=["tp1", "tp2"])
def speaking(checkpoints: Checkpoints, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An engine with a tokenizer, for tests that leave it as they find it: 4 requests at once, 104
    pages of 8 tokens (4 requests of 208)."""
    with small_engine(
        text_checkpoint(checkpoints), tp=request.param, max_num_seqs=4, num_pages=104
    ) as llm:
        yield llm


@pytest.fixture
def unhurried(speaking: LLM) -> Iterator[LLM]:
    """The same engine, whose steps last 10 ms at least."""
    speaking.attach([Unhurried])
    yield speaking
    speaking.detach()
