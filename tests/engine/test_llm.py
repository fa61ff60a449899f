"""LLM at tp=1 against transformers: tokens, ends, errors, times, several engines."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from engine import (
    LLM,
    CheckpointError,
    ConfigError,
    EngineConfig,
    FinishReason,
    RequestError,
    SamplingParams,
)
from engine.comm import Collective, CollectiveObserver, ObserverContext, StepInfo
from engine.comm.ops import _registry
from tests.support.checkpoints import Checkpoints
from tests.support.greedy import greedy_reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PAGE = 8
# Around every boundary of a page of 8.
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 5)


def prompts_of(lengths: tuple[int, ...], vocab: int = 97, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def engine(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"enforce_eager": True, "page_size": PAGE, "device": "cpu"}
    return LLM(path, **{**defaults, "threads_per_rank": 1, **options})


def assert_greedy(path: Path, llm: LLM, prompts: list[list[int]]) -> None:
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy_reference(path, tuple(prompt), GREEDY.max_tokens)
        assert tuple(output.token_ids) == expected, f"prompt of {len(prompt)} tokens"
        assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_greedy_tokens_are_transformers(
    checkpoints: Checkpoints, tied: bool, bias: bool, kv_heads: int
) -> None:
    path = checkpoints(tied=tied, attention_bias=bias, num_kv_heads=kv_heads)
    with engine(path) as llm:
        assert_greedy(path, llm, prompts_of(LENGTHS))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_page_size(checkpoints: Checkpoints, page_size: int) -> None:
    path = checkpoints()
    with engine(path, page_size=page_size) as llm:
        assert_greedy(path, llm, prompts_of(LENGTHS))


@pytest.mark.parametrize("budget", [3, 8, 11, 40])
def test_any_chunk_budget(checkpoints: Checkpoints, budget: int) -> None:
    path = checkpoints()
    with engine(path, max_num_batched_tokens=budget, max_num_seqs=3) as llm:
        assert_greedy(path, llm, prompts_of(LENGTHS))


def test_the_batch_does_not_change_a_row(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of(LENGTHS)
    with engine(path) as llm:
        for prompt in prompts:
            assert_greedy(path, llm, [prompt])
        assert_greedy(path, llm, prompts[::-1])


@pytest.mark.parametrize(
    "length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE]
)
def test_a_warm_prefix_gives_the_tokens_of_a_cold_one(
    checkpoints: Checkpoints, length: int
) -> None:
    path = checkpoints()
    prompt = prompts_of((length,))[0]
    # At least one token is computed, so a prompt of n whole pages reuses n - 1.
    cached = (length - 1) // PAGE * PAGE
    with engine(path) as llm:
        cold = llm.generate([prompt], GREEDY)[0]
        assert_greedy(path, llm, [prompt])
        warm = llm.generate([prompt], GREEDY)[0]
        assert (cold.cached_tokens, warm.cached_tokens) == (0, cached)
        assert llm.counters()["cached_tokens"] == 2 * cached
        llm.reset_prefix_cache()
        assert llm.generate([prompt], GREEDY)[0].cached_tokens == 0


def test_preempted_requests_end_with_the_same_tokens(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    shared = prompts_of((2 * PAGE,))[0]
    prompts = [shared + tail for tail in prompts_of((3, 5, 7, 9, 2, 6), seed=1)]
    # Each needs 4 to 5 pages at its end, so 9 pages cannot hold three of them.
    with engine(path, num_pages=9, prefix_cache=False) as llm:
        assert_greedy(path, llm, prompts)
        assert llm.counters()["preemptions"] > 0
    with engine(path, num_pages=9) as llm:
        assert_greedy(path, llm, prompts)


def test_seeded_noise_does_not_depend_on_the_batch(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of((5, 9, 14))
    params = [SamplingParams(temperature=0.9, seed=s, max_tokens=10) for s in (1, 2, 3)]
    with engine(path) as llm:
        together = [o.token_ids for o in llm.generate(prompts, params)]
        alone = [llm.generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
        other = llm.generate(prompts[:1], SamplingParams(temperature=0.9, seed=9, max_tokens=10))
    with engine(path, max_num_batched_tokens=4, max_num_seqs=3) as llm:
        chunked = [o.token_ids for o in llm.generate(prompts, params)]
    assert together == alone == chunked
    assert other[0].token_ids != together[0]


def test_eos_ends_a_request_and_ignore_eos_does_not(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of((4, 6, 8, 10, 12))
    params = SamplingParams(temperature=1.5, max_tokens=150, seed=3)
    with engine(path) as llm:
        ended = llm.generate(prompts, params)
        ignored = llm.generate(
            prompts, SamplingParams(temperature=1.5, max_tokens=150, seed=3, ignore_eos=True)
        )
    for short, long in zip(ended, ignored, strict=True):
        assert len(long.token_ids) == 150
        if 2 in long.token_ids:  # the checkpoint's EOS id
            stop = long.token_ids.index(2) + 1
            assert short.token_ids == long.token_ids[:stop]
            assert short.finish_reason is FinishReason.STOP
    assert any(o.finish_reason is FinishReason.STOP for o in ended)


def test_a_bad_request_fails_alone(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    good = prompts_of((5, 7))
    prompts = [good[0], [1] * 64, [], [3, 97], good[1]]
    with engine(path, max_model_len=64) as llm:
        outputs = llm.generate(prompts, GREEDY)
    for output, prompt in ((outputs[0], good[0]), (outputs[4], good[1])):
        assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)
    errors = [o.error for o in outputs[1:4]]
    assert all(o.finish_reason is FinishReason.ERROR for o in outputs[1:4])
    assert "64 tokens" in str(errors[0]) and "max_model_len=64" in str(errors[0])
    assert "no tokens" in str(errors[1])
    assert "97" in str(errors[2]) and "[0, 97)" in str(errors[2])


def test_a_request_larger_than_the_cache_fails_and_one_that_fits_runs(
    checkpoints: Checkpoints,
) -> None:
    path = checkpoints()
    small, large = prompts_of((6, 4 * PAGE))
    with engine(path, num_pages=4) as llm:
        outputs = llm.generate([large, small], GREEDY)
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert "num_pages" in str(outputs[0].error)
    assert tuple(outputs[1].token_ids) == greedy_reference(path, tuple(small), 12)


def test_output_stops_at_max_model_len(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompt = prompts_of((30,))[0]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with engine(path, max_model_len=40) as llm:
        output = llm.generate([prompt], params)[0]
    assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 10)
    assert output.finish_reason is FinishReason.LENGTH


def test_times_of_a_request_are_consistent(checkpoints: Checkpoints) -> None:
    prompts = prompts_of((5, 9))
    begin = time.perf_counter()
    with engine(checkpoints()) as llm:
        outputs = llm.generate(prompts, GREEDY, arrivals_s=[0.0, 0.05])
    for output in outputs:
        times = output.token_times_s
        assert len(times) == 12 and list(times) == sorted(times)
        assert output.queue_s is not None and output.ttft_s is not None
        assert 0 <= output.queue_s <= output.ttft_s <= (output.e2e_s or 0)
        assert output.arrival_s >= begin
        assert output.tpot_s == pytest.approx((times[-1] - times[0]) / 11)
        assert output.arrival_s + output.ttft_s == pytest.approx(times[0])
    assert outputs[1].arrival_s - outputs[0].arrival_s == pytest.approx(0.05)
    assert outputs[1].token_times_s[0] > outputs[1].arrival_s


def test_steps_are_logged_once(checkpoints: Checkpoints) -> None:
    with engine(checkpoints(), max_num_batched_tokens=10, max_num_seqs=4) as llm:
        llm.generate(prompts_of((25,)), GREEDY)
        (steps,) = llm.drain_steps()
        assert steps["tokens"].tolist() == [10, 10, 5] + [1] * 11
        assert steps["samples"].tolist() == [0, 0] + [1] * 12
        assert steps["phase"].tolist() == [0, 0, 0] + [1] * 11
        assert steps["step"].tolist() == list(range(14))
        assert (steps["wall_begin_ns"] <= steps["begin_ns"]).all()
        assert (steps["begin_ns"] < steps["end_ns"]).all()
        assert (steps["end_ns"] <= steps["wall_end_ns"]).all()
        assert len(llm.drain_steps()[0]) == 0


class Listener(CollectiveObserver):
    """Counts what it hears."""

    def __init__(self, context: ObserverContext) -> None:
        self.heard: list[Any] = [(context.rank, context.world, context.device)]

    def step_begin(self, step: StepInfo) -> None:
        self.heard.append(step)

    def before(self, collective: Collective) -> None:
        self.heard.append(collective)

    def result(self) -> list[Any]:
        return self.heard


class Interrupts(Listener):
    """Ctrl-C in the middle of the third step."""

    def step_end(self, step: StepInfo) -> None:
        if len(self.heard) == 4:
            raise KeyboardInterrupt


def test_an_interrupted_call_leaves_the_engine_usable(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of(LENGTHS)
    with engine(path) as llm:
        llm.attach([Interrupts])
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
        llm.detach()
        assert_greedy(path, llm, prompts)
        assert llm.counters()["cached_tokens"] == 0  # nothing of the interrupted step is trusted


def test_one_rank_has_steps_and_no_collectives(checkpoints: Checkpoints) -> None:
    with engine(checkpoints()) as llm:
        llm.attach([Listener])
        llm.generate(prompts_of((5,)), GREEDY)
        ((heard,),) = llm.detach()
        llm.generate(prompts_of((5,)), GREEDY)
    assert heard[0] == (0, 1, "cpu")
    assert [type(h) for h in heard[1:]] == [StepInfo] * 12
    assert [h.phase.value for h in heard[1:]] == ["prefill"] + ["decode"] * 11


def test_engines_one_after_the_other_leave_nothing(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of(LENGTHS)
    before = set(_registry)
    for page_size in (4, 8, 16):
        llm = engine(path, page_size=page_size)
        assert_greedy(path, llm, prompts)
        llm.close()
        llm.close()
        assert set(_registry) == before
    first, second = engine(path), engine(path, page_size=4)  # and two at once
    assert_greedy(path, first, prompts)
    assert_greedy(path, second, prompts)
    first.close()
    assert_greedy(path, second, prompts)
    second.close()


def test_compiled_tokens_are_transformers_whatever_the_cache_holds(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """What other settings left in the compile cache is not taken for this one's."""
    path = checkpoints(num_layers=2)
    hits = []
    for scope, page_size in (("layer", 8), ("model", 4), ("layer", 8)):
        options: dict[str, Any] = {
            "compile": scope, "cache_dir": str(tmp_path), "page_size": page_size,
            "max_num_batched_tokens": 16, "max_num_seqs": 4,  # so that some steps use all of it
        }  # fmt: skip
        with engine(path, **options) as llm:
            before = llm.counters()
            assert before["compiles"] == (2 if scope == "model" else 4)
            assert before["graph_breaks"] == 0
            hits.append(before["cache_hits"])
            assert_greedy(path, llm, prompts_of(LENGTHS))
            assert 16 in llm.drain_steps()[0]["tokens"]
            # Every token count of the run is served by what warm-up compiled.
            assert llm.counters()["compiles"] == before["compiles"]
            assert llm.effective["mode"] == f"compiled-{scope}"
    assert hits[0] < hits[2]
    assert (tmp_path / "rank0" / "inductor").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enforce_eager": False}, "CUDA graphs need a CUDA device"),
        ({"attention": "flash2"}, "attention='flash2'"),
        ({"attention": "flash9"}, "choose one of auto, sdpa"),
        ({"comm": "nccl", "tp": 2}, "comm='nccl'"),
        ({"tp": 3}, "need a TP size in {1, 2, 4}"),
        ({"max_model_len": 257}, "max_model_len=257"),
        ({"page_size": 0}, "page_size=0"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens=8"),
        ({"memory_utilization": 1.5}, "memory_utilization=1.5"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"cpu_kv_bytes": 10}, "cpu_kv_bytes=10"),
    ],
)
def test_impossible_configurations_are_refused(
    checkpoints: Checkpoints, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(checkpoints(), **options)
    assert message in str(caught.value)


def test_a_tp_size_that_does_not_fit_is_refused_before_anything_starts(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From config.json alone: no rank is spawned and no weight is looked for."""
    (tmp_path / "config.json").write_bytes((checkpoints() / "config.json").read_bytes())
    started: list[int] = []
    monkeypatch.setattr(BaseProcess, "start", lambda process: started.append(1))
    for tp in (3, 6, 8):
        with pytest.raises(ConfigError, match=rf"tp={tp}: 4 query heads, 2 .* in \{{1, 2, 4\}}"):
            engine(tmp_path, tp=tp)
    assert not started
    with pytest.raises(CheckpointError, match="neither model.safetensors"):
        engine(tmp_path)


def test_inputs_that_are_not_requests(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    with engine(path) as llm:
        with pytest.raises(RequestError, match="one text"):
            llm.generate("Hello", GREEDY)
        with pytest.raises(RequestError, match="0 params for 2 prompts"):
            llm.generate([[1], [2]], [])
        outputs = llm.generate([[1.7], 3, [5, 6]], GREEDY)  # type: ignore[list-item]
        assert "float" in str(outputs[0].error) and "int" in str(outputs[1].error)
        assert tuple(outputs[2].token_ids) == greedy_reference(path, (5, 6), 12)
    with pytest.raises(RequestError, match=r"max_tokens=2\.5"):
        SamplingParams(max_tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tp='2'"):
        engine(path, tp="2")


def test_a_closed_engine_says_so(checkpoints: Checkpoints) -> None:
    llm = engine(checkpoints())
    llm.close()
    for call in (lambda: llm.generate([[1]], GREEDY), llm.counters, llm.drain_steps):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call()


def test_calls_from_two_threads_are_both_served(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    prompts = prompts_of((5, 9))
    with engine(path) as llm, ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            found = threads.map(lambda prompt: llm.generate([prompt], GREEDY)[0], prompts)
            for prompt, output in zip(prompts, found, strict=True):
                assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 12)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}"),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b"[]"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    checkpoints: Checkpoints, tmp_path: Path, file: str, content: bytes
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints() / "config.json").read_bytes())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file):
        engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "four"}, "num_hidden_layers='four'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
    ],
)
def test_a_config_with_impossible_sizes_is_named(
    checkpoints: Checkpoints, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((checkpoints() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=message):
        engine(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        engine(tmp_path)


def test_an_unknown_option_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        engine(checkpoints(), tensor_paralel_size=2)
    with pytest.raises(TypeError, match="not both"):
        LLM(EngineConfig(model=str(checkpoints())), tp=1)


@pytest.mark.parametrize(
    "params",
    [{"temperature": -1}, {"temperature": float("nan")}, {"max_tokens": 0}, {"seed": -1}],
)
def test_sampling_parameters_outside_their_range(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        SamplingParams(**params)
