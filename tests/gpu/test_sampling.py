"""Sampling on GPUs: graphs against eager steps, kernels against the CPU, memory in its reserve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, RequestOutput, SamplingParams
from engine.config import ResolvedConfig
from engine.execution.sizing import _sampling_reserve
from engine.inputs.buffers import SamplingRows
from engine.requests.request import Request
from engine.sampling.filters import keep_most_probable
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.penalties import PenaltyState
from engine.sampling.plan import SamplingPlan
from engine.sampling.step_sampler import StepSampler
from engine.scheduling.step import ScheduledSeq
from engine.shape import ModelShape
from harness.measuring.attribution import join
from harness.measuring.expected import check_expected
from harness.observers import Stamp
from tests.gpu.conftest import HEADS
from tests.support.checkpoints import Checkpoints
from tests.support.sampling import keep_reference, mixed_params, mixed_prompts, tokens_reference

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

PROMPTS, PARAMS = mixed_prompts(), mixed_params()
VOCAB = 151936
# Pages for 20 sequences of 64 positions.
OPTIONS: dict[str, Any] = {
    "page_size": 8, "num_pages": 160, "attention": "sdpa", "max_model_len": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(checkpoints: Checkpoints) -> Path:
    """float32, so that tokens must be those of transformers."""
    return checkpoints(**HEADS)


def assert_equal(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for output, other in zip(found, wanted, strict=True):
        assert output.token_ids == other.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            own, its = getattr(output, name), getattr(other, name)
            assert (own is None) == (its is None)
            for a, b in zip(own or (), its or (), strict=True):
                if a is None:
                    assert b is None
                    continue
                assert (a.token_id, a.rank) == (b.token_id, b.rank)
                assert [t for t, _ in a.top] == [t for t, _ in b.top]
                values = [v for _, v in (*a.top, (0, a.logprob))]
                others = [v for _, v in (*b.top, (0, b.logprob))]
                np.testing.assert_allclose(values, others, atol=1e-4)


@pytest.mark.parametrize("scope", ["off", "model"])
def test_a_mixed_batch_in_graphs_gives_what_eager_steps_give(
    path: Path, scope: str, tmp_path: Path
) -> None:
    compiled: dict[str, Any] = {"compile": scope, "cache_dir": str(tmp_path)}
    with LLM(path, enforce_eager=True, max_num_seqs=20, **OPTIONS) as eager:
        wanted = eager.generate(PROMPTS, PARAMS)
    for prompt, params, output in zip(PROMPTS, PARAMS, wanted, strict=True):
        assert output.token_ids == tokens_reference(path, prompt, params)
    with LLM(path, max_num_seqs=20, **compiled, **OPTIONS) as llm:
        before = llm.counters()["captures"]
        found = llm.generate(PROMPTS, PARAMS)
        late = llm.counters()["captures"] - before
        assert late >= 1
        assert_equal(found, wanted)
        assert_equal(llm.generate(PROMPTS, PARAMS), wanted)
        assert llm.counters()["captures"] == before + late  # each pair once
        (steps,) = llm.drain_steps()
        assert steps["replayed"][steps["phase"] == 1].all()
        assert len(llm.captures()) == before


def test_plain_steps_keep_their_graph(path: Path) -> None:
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, top_p=0.5)
    with LLM(path, max_num_seqs=4, **OPTIONS) as llm:
        before = llm.counters()["captures"]
        wanted = llm.generate(PROMPTS[:3], plain)
        assert llm.counters()["captures"] == before
        mixed = llm.generate(PROMPTS[:3], [plain, PARAMS[5], plain])
        assert llm.counters()["captures"] == before + 2  # of 4 rows, and of the one that is left
        again = llm.generate(PROMPTS[:3], plain)
    assert_equal(again, wanted)
    assert [mixed[i].token_ids[:8] for i in (0, 2)] == [wanted[i].token_ids for i in (0, 2)]


def test_preemption_in_graphs(path: Path) -> None:
    with LLM(path, enforce_eager=True, max_num_seqs=8, **OPTIONS) as eager:
        wanted = eager.generate(PROMPTS, PARAMS)
    with LLM(path, max_num_seqs=8, **{**OPTIONS, "num_pages": 11}) as llm:
        assert_equal(llm.generate(PROMPTS, PARAMS), wanted)
        assert llm.counters()["preemptions"] > 0


def test_stamps_reach_from_one_end_of_a_pair_to_the_other(path: Path) -> None:
    params = SamplingParams(temperature=1.0, top_k=5, seed=1, max_tokens=12, ignore_eos=True)
    with LLM(path, max_num_seqs=2, **OPTIONS) as llm:
        wanted = llm.generate(PROMPTS[:2], params)
        llm.attach([Stamp(collectives=False)])
        llm.generate(PROMPTS[:2], params)
        llm.drain_steps()
        assert_equal(llm.generate(PROMPTS[:2], params), wanted)
        numbers = llm.drain_steps()[0]["step"]
        [[record]] = llm.detach()
    record = record.of_steps(numbers)
    assert record.steps["step"].tolist() == numbers.tolist()
    lasted = record.steps["end_ns"] - record.steps["begin_ns"]
    assert (lasted > 0).all() and (record.steps["begin_ns"][1:] > record.steps["end_ns"][:-1]).all()


@two_gpus
def test_two_ranks_give_what_one_gives_and_their_collectives_are_those_of_the_model(
    path: Path,
) -> None:
    with LLM(path, enforce_eager=True, max_num_seqs=20, **OPTIONS) as alone:
        wanted = alone.generate(PROMPTS, PARAMS)
    with LLM(path, tp=2, max_num_seqs=20, **OPTIONS) as llm:
        assert_equal(llm.generate(PROMPTS, PARAMS), wanted)
        llm.attach([Stamp()])
        filtered = [PARAMS[5]] * 3
        llm.generate(PROMPTS[:3], filtered)
        llm.drain_steps()
        llm.generate(PROMPTS[:3], filtered)
        numbers = llm.drain_steps()[0]["step"]
        records = [observers[0].of_steps(numbers) for observers in llm.detach()]
        joined = join(records)
        assert joined.replayed.any()
        check_expected(joined, llm.shape)


# -- kernels --------------------------------------------------------------------------------------


def test_filters_keep_what_float64_keeps_and_a_row_depends_on_itself() -> None:
    """Of 8 rows at the model's vocabulary: by selection and by sorting, alone and together."""
    rows = 8
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, VOCAB, generator=generator)).bfloat16().float()
    ks = [20, 1, 1000, 500, 50_000, VOCAB, VOCAB, VOCAB]
    ps = [0.95, 1.0, 0.9, 1.0, 0.8, 0.95, 0.5, 1.0]
    ms = [0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.001, 0.02]
    columns = [
        torch.full((rows,), 0.7).cuda(),
        torch.tensor(ks).cuda(),
        torch.tensor(ps, dtype=torch.float64).cuda(),
        torch.tensor(ms, dtype=torch.float64).cuda(),
    ]
    together = keep_most_probable(logits.cuda(), *columns, max(ks)).isfinite().cpu()  # type: ignore[call-arg]
    for i in range(rows):
        part = slice(i, i + 1)
        alone = keep_most_probable(logits[part].cuda(), *(c[part] for c in columns), ks[i])  # type: ignore[call-arg]
        assert torch.equal(alone.isfinite().cpu()[0], together[i]), f"row {i}"
        exact = keep_reference(logits[i].double().numpy(), 0.7, ks[i], ps[i], ms[i])
        # A boundary may fall between tokens that are as good as equal.
        assert abs(int(exact.sum()) - int(together[i].sum())) <= 1, f"row {i}"
        assert int((exact != together[i].numpy()).sum()) <= 1, f"row {i}"


def test_penalties_and_logprobs_are_those_of_the_cpu() -> None:
    rows = 40
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(rows, VOCAB, generator=generator)).bfloat16()
    tokens = torch.randint(0, VOCAB, (rows, 50), generator=generator)
    tokens[:, 25:] = tokens[:, :25]  # twice each
    penalties = [torch.full((rows,), v, dtype=torch.float64) for v in (1.3, 0.5, 0.25)]
    slots = torch.arange(rows).flip(0)
    found = {}
    for device in ("cpu", "cuda"):
        state = PenaltyState(rows, VOCAB, torch.device(device))
        own = [x.to(device) for x in (slots, tokens, logits.float(), *penalties)]
        pairs = own[0].repeat_interleave(50), own[1].flatten()
        state.rebuild(own[0], pairs, pairs)
        state.count(own[0], own[1][:, 0])
        penalised = state.apply(own[2], own[0], *own[3:])
        report = LogprobTensors.of(logits.to(device), own[1][:, 3], 20)
        found[device] = penalised.cpu(), list(report.read([20] * rows))
    torch.testing.assert_close(found["cuda"][0], found["cpu"][0], rtol=1e-6, atol=1e-6)
    for own_entry, other in zip(found["cuda"][1], found["cpu"][1], strict=True):
        assert (own_entry.token_id, own_entry.rank) == (other.token_id, other.rank)
        assert [t for t, _ in own_entry.top] == [t for t, _ in other.top]
        np.testing.assert_allclose(
            [v for _, v in own_entry.top], [v for _, v in other.top], atol=1e-4
        )


def test_sampling_takes_no_more_memory_than_is_reserved() -> None:
    """256 sequences that ask for all of it, at the vocabulary of Qwen3."""
    count, device = 256, torch.device("cuda")
    params = SamplingParams(
        temperature=0.8, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
        logit_bias={5: 1.0}, logprobs=20, min_tokens=1, max_tokens=4,
    )  # fmt: skip
    seqs = []
    for slot in range(count):
        request = Request(str(slot), [slot, 7, 9], params, seed=slot, arrival_s=0.0)
        request.slot = slot
        seqs.append(ScheduledSeq(request, 0, 3, True))
    plan = SamplingPlan.from_schedule(seqs, VOCAB, (2,))
    numbers = torch.arange(count, device=device)
    rows = SamplingRows(numbers, torch.full((count,), 0.8, device=device), numbers, numbers, False)
    raw = torch.randn(count, VOCAB, device=device, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - raw.nbytes  # the kept logits are reserved too
    sampler = StepSampler(count, VOCAB, device)
    ids, logprobs = sampler.planned(raw, rows, plan)
    assert ids.shape == (count,) and logprobs is not None
    taken = torch.cuda.max_memory_allocated() - before
    config = ResolvedConfig(
        model="", max_model_len=64, page_size=16, threads_per_rank=1, max_num_seqs=count
    )
    shape = ModelShape(
        model_type="qwen3", vocab_size=VOCAB, hidden_size=8, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=4, intermediate_size=16, rms_norm_eps=1e-6, rope_theta=1e6,
        max_position=128, tied=True, qk_norm=True, qkv_bias=False, o_bias=False, dtype="bfloat16",
        eos_token_ids=(2,),
    )  # fmt: skip
    reserved = _sampling_reserve(config, shape, 2)
    print(f"sampling took {taken / 2**20:.0f} MiB of {reserved / 2**20:.0f} reserved")
    assert taken <= reserved
