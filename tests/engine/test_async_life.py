"""AsyncLLM and its streams from begin to end: start by several tasks, tokenizers, held streams."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

import engine.async_llm
from engine import LLM, AsyncLLM, SamplingParams
from tests.support.checkpoints import Checkpoints
from tests.support.engines import SMALL
from tests.support.tokenizers import hf_tokenizer, text_checkpoint

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """Every engine that an AsyncLLM loads."""
    found: list[LLM] = []

    class Noted(LLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            found.append(self)

    monkeypatch.setattr(engine.async_llm, "LLM", Noted)
    return found


def test_tasks_that_start_at_once_load_one_engine(
    checkpoints: Checkpoints, loaded: list[LLM]
) -> None:
    llm = AsyncLLM(text_checkpoint(checkpoints), **SMALL)

    async def main() -> None:
        await asyncio.gather(*(llm.start() for _ in range(3)))
        await llm.start()
        assert loaded == [llm.llm]
        # The first text finds the tokenizer there: no task waits for transformers' import.
        assert llm.llm._tokenizer._hf is not None
        output = await llm.generate("the cat", SHORT)
        assert output.prompt_token_ids == hf_tokenizer().encode("the cat")
        await llm.close()

    asyncio.run(main())


def test_a_start_that_was_cancelled_may_be_repeated_or_closed(
    checkpoints: Checkpoints, loaded: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load, noted = threading.Event(), engine.async_llm.LLM

    class Held(noted):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            assert may_load.wait(60)
            super().__init__(*args, **options)

    monkeypatch.setattr(engine.async_llm, "LLM", Held)

    async def cancelled() -> AsyncLLM:
        may_load.clear()
        llm = AsyncLLM(text_checkpoint(checkpoints), **SMALL)
        task = asyncio.create_task(llm.start())
        while not llm._loading.locked():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_load.set()
        return llm

    async def main() -> None:
        llm = await cancelled()
        await llm.start()
        assert len(loaded) == 1 and len((await llm.generate([1], SHORT)).token_ids) == 4
        await llm.close()
        llm = await cancelled()
        await llm.close()  # waits for the engine, which would be nobody's
        with pytest.raises(RuntimeError, match="the engine is closed"):
            loaded[1].counters()

    asyncio.run(main())


def test_a_folder_without_a_tokenizer_starts(checkpoints: Checkpoints) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoints(), **SMALL) as llm:
            assert "has no tokenizer" in str((await llm.generate("the cat", SHORT)).error)
            assert len((await llm.generate([1], SHORT)).token_ids) == 4

    asyncio.run(main())


def test_a_stream_that_a_name_holds_ends_with_its_with(checkpoints: Checkpoints) -> None:
    async def main() -> None:
        async with AsyncLLM(text_checkpoint(checkpoints), **SMALL) as llm:
            async with llm.stream([1], ENDLESS, request_id="x") as held:
                async for _ in held:
                    break
            async with aclosing(llm.stream([1], ENDLESS, request_id="x")) as again:  # free
                async for _ in again:
                    break
            with pytest.raises(ZeroDivisionError):
                async with llm.stream([1], ENDLESS, request_id="x") as failed:
                    async for _ in failed:
                        raise ZeroDivisionError
            assert [[u async for u in stream] for stream in (held, again, failed)] == [[], [], []]
            # What the class says of `break` alone: the id is in use while the name lives.
            alone = llm.stream([1], ENDLESS, request_id="x")
            async for _ in alone:
                break
            assert "in use" in str((await llm.generate([1], SHORT, request_id="x")).error)
            del alone
            assert (await llm.generate([1], SHORT, request_id="x")).error is None

    asyncio.run(main())
