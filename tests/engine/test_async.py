"""AsyncLLM: what tasks await is what generate() gives; cancellation, aborts, engines that die."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from engine import AsyncLLM, ConfigError, EngineDeadError, FinishReason, SamplingParams
from engine.comm import CollectiveObserver, ObserverContext, StepInfo
from tests.support.checkpoints import Checkpoints
from tests.support.engines import SMALL, Unhurried, assert_idle
from tests.support.pids import TellsItsProcess
from tests.support.tokenizers import text_checkpoint

SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
ENDLESS = SamplingParams(temperature=1.0, max_tokens=220, ignore_eos=True)
PROMPTS: list[Any] = ["the cat sat", [5, 6, 7], "öäü €€", [1] * 20, "a", [9]]


def started(checkpoints: Checkpoints, tp: int) -> AsyncLLM:
    llm = AsyncLLM(text_checkpoint(checkpoints), **SMALL, max_num_seqs=4, tp=tp)
    asyncio.run(llm.start())
    return llm


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def llm(checkpoints: Checkpoints, request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    llm = started(checkpoints, request.param)
    yield llm
    asyncio.run(llm.close())


@pytest.fixture
def unhurried(llm: AsyncLLM) -> Iterator[AsyncLLM]:
    llm.llm.attach([Unhurried])
    yield llm
    llm.llm.detach()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def first_token(llm: AsyncLLM, **kwargs: Any) -> Any:
    """A stream that has begun."""
    stream = llm.stream("the cat", ENDLESS, **kwargs)
    await anext(stream)
    return stream


def test_tasks_are_served_together(llm: AsyncLLM) -> None:
    expected = llm.llm.generate(PROMPTS, SEEDED)
    before = llm.llm.counters()["scheduled_steps"]

    async def main() -> None:
        outputs = await asyncio.gather(*(llm.generate(p, SEEDED) for p in PROMPTS))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert [o.text for o in outputs] == [o.text for o in expected]

    run(main())
    # Four at a time: 6 requests of 30 steps take a third of what they would one by one.
    assert llm.llm.counters()["scheduled_steps"] - before < 120


def test_a_stream_is_generate_in_pieces(llm: AsyncLLM) -> None:
    expected = llm.llm.generate(PROMPTS[:1], SamplingParams(**{**vars_of(SEEDED), "n": 2}))[0]

    async def main() -> None:
        tokens: list[list[int]] = [[], []]
        texts, outputs = ["", ""], {}
        stream = llm.stream(PROMPTS[0], SamplingParams(**{**vars_of(SEEDED), "n": 2}))
        async for update in stream:
            assert update.request_id == stream.request_id
            tokens[update.sample] += update.token_ids
            texts[update.sample] += update.text or ""
            outputs[update.sample] = update.output
        assert tokens == [s.token_ids for s in expected.samples]
        assert texts == [s.text for s in expected.samples]
        assert [outputs[i].token_ids for i in (0, 1)] == tokens
        whole = await llm.generate(PROMPTS[0], SamplingParams(**{**vars_of(SEEDED), "n": 2}))
        assert [s.token_ids for s in whole.samples] == tokens

    run(main())


def vars_of(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "seed", "max_tokens", "ignore_eos")
    return {name: getattr(params, name) for name in names}


def test_a_cancelled_task_aborts_its_request(llm: AsyncLLM) -> None:
    async def follow(entered: asyncio.Event) -> None:
        async for _ in llm.stream("the cat", ENDLESS):
            entered.set()
            await asyncio.sleep(0)

    async def stand_still(entered: asyncio.Event) -> None:
        async for _ in llm.stream("the cat", ENDLESS):
            entered.set()
            await asyncio.sleep(3600)  # cancelled here, outside of the stream

    async def main() -> None:
        entered = [asyncio.Event(), asyncio.Event()]
        tasks = [
            asyncio.create_task(follow(entered[0])),
            asyncio.create_task(stand_still(entered[1])),
            asyncio.create_task(llm.generate("the cat", ENDLESS)),
        ]
        for event in entered:
            await event.wait()
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(e) for e in ended] == [asyncio.CancelledError] * 3

    run(main())
    assert_idle(llm.llm)


def test_leaving_a_stream_aborts_its_request(unhurried: AsyncLLM) -> None:
    llm = unhurried

    async def main() -> None:
        async for update in llm.stream("the cat", ENDLESS, request_id="x"):
            if update.token_ids:
                break
        stream = await first_token(llm, request_id="x")  # free again
        await stream.aclose()
        await stream.aclose()
        assert [u async for u in stream] == []

    run(main())
    assert_idle(llm.llm)


def test_abort_ends_what_others_await(unhurried: AsyncLLM) -> None:
    llm = unhurried

    async def main() -> None:
        task = asyncio.create_task(llm.generate("the cat", ENDLESS, request_id="x"))
        stream = await first_token(llm, request_id="y")
        for name in ("x", "y", "nobody"):
            llm.abort(name)
        output = await task
        assert output.finish_reason is FinishReason.ABORT and len(output.token_ids) < 220
        last = [u.output async for u in stream][-1]
        assert last.finish_reason is FinishReason.ABORT and 0 < len(last.token_ids) < 220

    run(main())


def test_a_bad_request_fails_alone(llm: AsyncLLM) -> None:
    async def main() -> None:
        bad, good = await asyncio.gather(llm.generate([1] * 256), llm.generate([1], SEEDED))
        assert "256 tokens" in str(bad.error) and bad.finish_reason is FinishReason.ERROR
        assert len(good.token_ids) == 30
        updates = [u async for u in llm.stream([0.5], SEEDED)]  # type: ignore[list-item]
        assert [u.output.error is not None for u in updates if u.output] == [True]
        twice = await asyncio.gather(*(llm.generate([1], SEEDED, request_id="x") for _ in "12"))
        assert sorted(o.error is None for o in twice) == [False, True]

    run(main())


def test_the_loop_runs_on_while_the_engine_works(llm: AsyncLLM) -> None:
    """No step runs in the loop's thread: between two tokens the loop turns, however long a step."""

    async def main() -> None:
        turns = 0

        async def spin() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(spin())
        seen = []
        async for _ in llm.stream([1], ENDLESS):
            seen.append(turns)
        task.cancel()
        assert len(set(seen)) > 10

    run(main())


def test_arguments_are_checked_at_once_and_nothing_runs_before_start() -> None:
    with pytest.raises(ConfigError, match="tp=0"):
        AsyncLLM("nowhere", tp=0)
    llm = AsyncLLM("nowhere", device="cpu", enforce_eager=True)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="was not started"):
            await llm.generate([1])
        with pytest.raises(ConfigError, match="config.json does not exist"):
            await llm.start()
        await llm.close()

    run(main())


def test_close_reaches_every_waiter(checkpoints: Checkpoints) -> None:
    async def main() -> None:
        async with AsyncLLM(text_checkpoint(checkpoints), **SMALL) as llm:
            llm.llm.attach([Unhurried])
            stream = await first_token(llm)
            task = asyncio.create_task(llm.generate([1], ENDLESS))
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await task
        with pytest.raises(RuntimeError, match="the engine is closed"):
            async for _ in stream:
                pass
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await llm.generate([1])

    run(main())


def test_a_rank_that_dies_reaches_every_waiter(checkpoints: Checkpoints) -> None:
    llm = started(checkpoints, tp=2)
    llm.llm.attach([TellsItsProcess])
    pids = [observers[0] for observers in llm.llm.detach()]
    llm.llm.attach([Unhurried])

    async def main() -> None:
        stream = await first_token(llm)
        waiting = [
            asyncio.create_task(llm.generate([1], ENDLESS)),
            asyncio.create_task(llm.generate([2], ENDLESS)),
            asyncio.create_task(asyncio.to_thread(llm.llm.generate, [[3]], ENDLESS)),
            asyncio.create_task(asyncio.to_thread(lambda: list(llm.llm.stream([4], ENDLESS)))),
        ]
        await asyncio.sleep(0.05)
        os.kill(pids[1], signal.SIGKILL)
        for task in waiting:
            with pytest.raises(EngineDeadError, match="rank 1 ended with exit code -9"):
                await task
        with pytest.raises(EngineDeadError, match="rank 1"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="rank 1"):
            await llm.generate([1])
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.abort("x")
        await llm.close()

    run(main())


class RaisesWhenTold(CollectiveObserver):
    told = threading.Event()

    def __init__(self, context: ObserverContext) -> None: ...

    def step_begin(self, step: StepInfo) -> None:
        if self.told.is_set():
            raise OSError("planted")


def test_a_step_that_raises_reaches_every_waiter_and_tp1_goes_on(checkpoints: Checkpoints) -> None:
    llm = started(checkpoints, tp=1)
    expected = llm.llm.generate([[1]], SEEDED)[0].token_ids
    llm.llm.attach([RaisesWhenTold])

    async def main() -> None:
        waiting = [asyncio.create_task(llm.generate([n], ENDLESS)) for n in range(6)]
        await asyncio.sleep(0)  # all are submitted; two of them still queue
        RaisesWhenTold.told.set()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [(type(e), str(e)) for e in ended] == [(OSError, "planted")] * 6
        await asyncio.to_thread(llm.llm.detach)
        assert (await llm.generate([1], SEEDED)).token_ids == expected
        await llm.close()

    run(main())
