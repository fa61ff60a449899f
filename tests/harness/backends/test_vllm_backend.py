"""vLLM as a backend, over a fake of its interface: what it is asked, and what is read back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.requests.sampling_params import SamplingParams
from harness.backends import create
from harness.backends.vllm import VllmBackend
from harness.settings.effective import differences
from harness.store import load
from harness.sweep.point import measure_point
from tests.support import fake_vllm
from tests.support.fake_backend import make_cfg, make_point
from tests.support.fake_vllm import LLM


def cfg_of(**changes: Any) -> dict[str, Any]:
    settings = {"tp": 1, "page_size": None, "compile": "model", "enforce_eager": False, **changes}
    return make_cfg(backend="vllm", device="cuda", timing="stamps", **settings)


def params(*outputs: int, temperature: float = 0.0) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in outputs]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmBackend]:
    fake_vllm.install(monkeypatch)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT",
                 "VLLM_NO_USAGE_STATS", "VLLM_WORKER_MULTIPROC_METHOD"):  # fmt: skip
        monkeypatch.setenv(name, "")
    made = create("vllm")
    assert isinstance(made, VllmBackend)
    yield made
    made.close()
    made.close()
    assert all(llm.llm_engine.shut == 1 for llm in LLM.made)


def test_its_settings_are_named_and_read_back(backend: VllmBackend, tmp_path: Path) -> None:
    cfg = cfg_of(tp=2, page_size=32, engine__max_model_len=128, engine__seed=5)
    backend.start(cfg, tmp_path)
    assert LLM.made[-1].options == {
        "tensor_parallel_size": 2, "dtype": "float32", "load_format": "auto",
        "enforce_eager": False, "block_size": 32, "max_model_len": 128, "max_num_seqs": 16,
        "compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        "gpu_memory_utilization": 0.9, "enable_prefix_caching": False, "async_scheduling": True,
        "seed": 5, "skip_tokenizer_init": True, "disable_log_stats": False,
    }  # fmt: skip
    found = backend.effective
    assert (found["mode"], found["cudagraph_mode"]) == (
        "graph+compiled-model",
        "FULL_AND_PIECEWISE",
    )
    assert (found["num_pages"], found["overlap"], found["version"]) == (512, True, "0.20.2")
    assert differences(cfg, found) == []
    assert differences(cfg, found | {"prefix_cache": True, "tp": 1}) == [
        "tp: asked for 2, the engine runs 1",
        "prefix_cache: asked for False, the engine runs True",
    ]
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")
    assert backend.startup["total_s"] and backend.startup["compile_s"] is None


@pytest.mark.parametrize(
    ("eager", "compiled", "asked", "mode"),
    [
        (True, "off", (True, 0, "NONE"), "eager"),
        (True, "model", (False, 3, "NONE"), "compiled-model"),
        (False, "off", (False, 0, "FULL_DECODE_ONLY"), "graph"),
        (False, "model", (False, 3, "FULL_AND_PIECEWISE"), "graph+compiled-model"),
    ],
)
def test_each_mode_is_asked_for_by_name(
    backend: VllmBackend, eager: bool, compiled: str, asked: tuple[bool, int, str], mode: str
) -> None:
    cfg = cfg_of(enforce_eager=eager, compile=compiled, engine__overlap=False)
    backend.start(cfg, None)
    options = LLM.made[-1].options
    how = options["compilation_config"]
    assert (options["enforce_eager"], how["mode"], how["cudagraph_mode"]) == asked
    assert backend.effective["mode"] == mode and backend.effective["overlap"] is False
    assert differences(cfg, backend.effective) == []


def test_times_of_a_request_are_vllms_stamps(backend: VllmBackend) -> None:
    """Two at once: the third is scheduled when the first, of one token, has ended."""
    backend.start(cfg_of(engine__max_num_seqs=2), None)
    begin = time.perf_counter()
    for _ in range(2):  # ids are unique over calls
        outputs = backend.generate([[1, 2], [3], [4]], params(1, 4, 2))
    end = time.perf_counter()
    engine = LLM.made[-1].llm_engine
    assert [(name, p.max_tokens, p.ignore_eos, p.detokenize) for name, _, p in engine.added] == [
        (str(i), n, True, False) for i, n in enumerate((1, 4, 2) * 2)
    ]
    assert [o.token_ids for o in outputs] == [[0], [0, 1, 2, 3], [0, 1]]
    assert [o.prompt_token_ids for o in outputs] == [[1, 2], [3], [4]]
    one, four, late = outputs
    assert begin < one.arrival_s == four.arrival_s == late.arrival_s < end
    assert one.tpot_s is None and one.ttft_s == four.ttft_s == one.e2e_s
    assert one.ttft_s is not None and late.queue_s is not None and late.queue_s >= one.ttft_s
    assert four.e2e_s is not None and four.ttft_s is not None
    assert four.tpot_s == pytest.approx((four.e2e_s - four.ttft_s) / 3)
    assert 0.001 <= four.tpot_s < end - begin
    assert {o.token_times_s for o in outputs} == {()}
    assert {o.preemptions for o in outputs} == {None}


def test_requests_come_when_they_are_due(backend: VllmBackend) -> None:
    backend.start(cfg_of(), None)
    begin = time.perf_counter()
    outputs = backend.generate([[1], [2]], params(1, 1), [0.03, 0.0])
    assert time.perf_counter() - begin >= 0.03
    assert [prompt for _, prompt, _ in LLM.made[-1].llm_engine.added] == [[2], [1]]
    assert outputs[0].arrival_s - outputs[1].arrival_s == pytest.approx(0.03)
    assert all(o.ttft_s is not None and o.ttft_s >= 0.001 for o in outputs)


def test_a_request_that_ended_otherwise_says_so(backend: VllmBackend) -> None:
    backend.start(cfg_of(), None)
    LLM.made[-1].llm_engine.reason = "abort"
    (only,) = backend.generate([[1]], params(2))
    assert (str(only.finish_reason), only.error) == ("error", "vLLM ended it as abort")
    with pytest.raises(ValueError, match="asks for more than"):
        backend.generate([[1]], [SamplingParams(temperature=0.0, ignore_eos=True, seed=1)])


def test_a_point_has_what_vllm_tells_and_reasons_for_the_rest(
    backend: VllmBackend, tmp_path: Path
) -> None:
    cfg = cfg_of()
    backend.start(cfg, None)
    point = make_point(cfg)
    outcome = measure_point(backend, point, tmp_path / "run" / "points" / point.point_id)
    assert outcome.status == "ok", outcome.reason
    results = load(tmp_path / "run")
    rows, points = results.metrics, results.points
    assert set(points["output_tokens"]) == {10} and set(points["preemptions"]) == {0}
    assert set(points["effective.batch"]) == {2}
    assert (rows["value"].isna() == rows["reason"].notna()).all()
    for name in ("output_tok_s", "ttft", "tpot", "e2e", "queue"):
        assert (rows[rows["name"] == name]["value"].dropna() > 0).any(), name
    for name in ("prefill_tok_s", "decode_tok_s", "step_host_us", "itl", "step_us", "comm_share"):
        own = rows[rows["name"] == name]
        assert len(own) and own["value"].isna().all(), name
        assert not own["reason"].str.startswith("no such step").any(), name
    assert results.steps.empty and results.requests["preemptions"].isna().all()
    assert "cannot be seen" in points["notes"][0]
    counted = results.phases.set_index("phase")["count"]
    assert counted["preemptions"] == 3
    assert LLM.made[-1].llm_engine.resets == 1
    LLM.made[-1].llm_engine.withheld = 1
    outcome = measure_point(backend, point, tmp_path / "again" / "points" / point.point_id)
    assert outcome.status == "error" and "short_output: 2 of 2" in str(outcome.reason)


def test_a_batch_that_was_served_in_parts_is_an_error(backend: VllmBackend, tmp_path: Path) -> None:
    cfg = cfg_of(engine__max_num_seqs=1)
    backend.start(cfg, None)
    point = make_point(cfg)
    outcome = measure_point(backend, point, tmp_path / "run" / "points" / point.point_id)
    assert outcome.status == "error"
    assert "asked for 2, the engine decoded at most 1 sequences together" in str(outcome.reason)
