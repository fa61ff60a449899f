"""What rank 0 does between two steps of a device: choose, hand out pages, lay out, book."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.inputs.buffers import BatchBuffers
from engine.requests.request import Request
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import ScheduledSeq, StepPlan
from tests.support import fake_cuda
from tests.support.host_steps import PAGE, PARAMS, HostSteps
from tests.support.measuring import Measure

BATCH, CONTEXT, STEPS = 256, 64, PAGE
"""Sixteen steps a round, so that each sequence fills one page in each."""


def requests() -> list[Request]:
    prompt = list(range(CONTEXT))
    return [Request(str(i), prompt, PARAMS, 0, 0.0) for i in range(BATCH)]


def test_scheduler_step(measure: Measure) -> None:
    def decoding() -> tuple[Scheduler, list[Request]]:
        scheduler = Scheduler(
            pool=BlockPool(BATCH * (2 + CONTEXT // PAGE), PAGE, prefix_cache=False),
            max_num_seqs=BATCH,
            max_num_batched_tokens=BATCH * CONTEXT,
            max_model_len=CONTEXT + 2 * STEPS,
            eos_token_ids=(0,),
        )
        asked = requests()
        for request in asked:
            scheduler.add(request)
        scheduler.update(scheduler.schedule(), [1] * BATCH, 0.0)
        return scheduler, asked

    def steps(state: tuple[Scheduler, list[Request]]) -> list[Request]:
        scheduler, asked = state
        for _ in range(STEPS):
            scheduler.update(scheduler.schedule(), [1] * BATCH, 0.0)
        return asked

    asked = measure(steps, decoding)
    assert {len(r.output_ids) for r in asked} == {1 + STEPS}
    assert {len(r.page_ids) for r in asked} == {-(-(CONTEXT + STEPS) // PAGE)}


def test_block_pool(measure: Measure) -> None:
    """64 prompts of 32 pages that share the first 17: looked up, taken, published, given back."""
    prompts, pages, shared = 64, 32, 17
    tokens = [
        [1000 * page + (prompt if page >= shared else 0) for page in range(pages)]
        for prompt in range(prompts)
    ]

    def serve(pool: BlockPool) -> tuple[BlockPool, list[int]]:
        found = []
        for prompt in tokens:
            ids = [token for token in prompt for _ in range(PAGE)]
            hits = pool.match(ids, pages - 1)
            taken = pool.allocate(pages - len(hits), hits)
            assert taken is not None
            for place in range(len(hits), pages):
                parent = taken[place - 1] if place else None
                pool.publish(taken[place], parent, ids[place * PAGE : (place + 1) * PAGE])
            pool.release(taken)
            found.append(len(hits))
        return pool, found

    pool, found = measure(serve, lambda: BlockPool(prompts * pages, PAGE))
    assert found == [0] + [shared] * (prompts - 1)
    assert pool.num_free == prompts * pages


def test_batch_building(measure: Measure) -> None:
    """A plan of 256 decoding sequences and one new prompt -> message -> buffers."""
    prompt = 512
    asked = requests()
    asked.append(Request("new", list(range(prompt)), PARAMS, 0, 0.0))
    for slot, request in enumerate(asked):
        request.slot, request.page_ids = slot, list(range(slot * 4, slot * 4 + 4))
    asked[-1].page_ids = list(range(BATCH * 4, BATCH * 4 + prompt // PAGE))
    seqs = [ScheduledSeq(r, CONTEXT - 1, 1, True, True) for r in asked[:-1]]
    seqs.append(ScheduledSeq(asked[-1], 0, prompt, True))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    buffers = BatchBuffers(
        max_num_seqs=BATCH + 1, max_num_batched_tokens=1024, max_model_len=4096,
        page_size=PAGE, dummy_page=BATCH * 8, device=device,
    )  # fmt: skip

    def build() -> torch.Tensor:
        for request in asked:
            request.pages_sent = 0
        plan = StepPlan.from_bytes(StepPlan.from_schedule(0, seqs).to_bytes())
        batch, _ = buffers.fill(plan)
        return batch.slot_mapping

    slots = measure(build).tolist()
    assert slots[:BATCH] == [(4 * i + 3) * PAGE + PAGE - 1 for i in range(BATCH)]
    assert slots[BATCH:] == list(range(BATCH * 4 * PAGE, BATCH * 4 * PAGE + prompt))


@pytest.mark.parametrize("batch", [1, 256])
def test_host_step(measure: Measure, batch: int) -> None:
    """Plan, message, inputs and booking of overlapped steps, beside a device that takes no time."""
    rounds = 20
    steps = STEPS * (16 if batch == 1 else 1)  # a round of 1 ms would be what caches hold
    host = HostSteps(batch, 1024, longest=1024 + (rounds + 3) * steps)
    before = [len(r.output_ids) for r in host.requests]
    measure(lambda: host.run(steps), rounds=rounds)
    (done,) = {len(r.output_ids) - n for r, n in zip(host.requests, before, strict=True)}
    assert done in (steps, (rounds + 1) * steps)  # once as a test
    assert {r.output_ids[-1] for r in host.requests} == {1}


@pytest.mark.parametrize("how", ["looked_up", "triton"])
def test_kernel_launch(
    measure: Measure, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The activation's kernel 1,000 times beside a GPU that takes no time, by the engine's launcher
    and by Triton's."""
    pytest.importorskip("triton")
    from engine.kernels import layers_triton

    gpu = fake_cuda.install(monkeypatch, str(tmp_path))
    kernel, constants = layers_triton._silu_and_mul, {"BLOCK": 1024}
    x = torch.zeros(1, 2048, dtype=torch.bfloat16)
    out = x.new_empty(1, 1024)

    def launches() -> int:
        launch = (kernel if how == "looked_up" else kernel.jit)[(1, 1)]
        for _ in range(1000):
            launch(x, out, 1024, **constants)
        return len(gpu.launches)

    launches()
    before = len(gpu.launches)
    assert (measure(launches) - before) % 1000 == 0
    assert {args[:3] for _, _, args in gpu.launches} == {(x, out, 1024)}
