"""nano-vLLM as a backend, over a fake of its interface: what it is asked, and what is read off."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.requests.sampling_params import SamplingParams
from harness.backends import create
from harness.backends.nanovllm import NanoVllmBackend
from harness.machine import models
from harness.store import load
from harness.sweep.point import measure_point
from tests.support import fake_nanovllm
from tests.support.fake_backend import make_cfg, make_point
from tests.support.fake_nanovllm import LLM

TINY = {"name": "tiny", "path": None, "load_format": "auto"}


def cfg_of(**changes: Any) -> dict[str, Any]:
    settings = {"engine__max_num_seqs": 16, "workload__temperature": 0.6, **changes}
    return make_cfg(backend="nanovllm", tp=settings.pop("tp", 1), page_size=None, device="cuda",
                    timing="stamps", model=TINY, **settings)  # fmt: skip


def params(*outputs: int, temperature: float = 0.6) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in outputs]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nanovllm.install(monkeypatch)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[NanoVllmBackend]:
    made = create("nanovllm")
    assert isinstance(made, NanoVllmBackend)
    yield made
    made.close()
    made.close()
    assert all(engine.exits == 1 for engine in LLM.made)


def started(backend: NanoVllmBackend, **changes: Any) -> LLM:
    backend.start(cfg_of(**changes), None)
    return LLM.made[-1]


def log_of(backend: NanoVllmBackend) -> list[tuple[int, ...]]:
    """phase, batch, tokens, bucket, samples, replayed."""
    (log,) = backend.drain_steps()
    names = ["phase", "batch", "tokens", "bucket", "samples", "replayed"]
    return [tuple(map(int, row)) for row in log[names].tolist()]


def test_it_is_asked_for_exact_lengths_on_every_path(backend: NanoVllmBackend) -> None:
    engine = started(backend, tp=2, enforce_eager=False, engine__max_model_len=64)
    assert engine.options == {
        "max_model_len": 64, "max_num_seqs": 16, "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 2, "enforce_eager": False,
    }  # fmt: skip
    prompts = [[1, 2, 3], [4, 5]]
    for arrivals in (None, [0.0, 0.01]):
        outputs = backend.generate(prompts, params(3, 2), arrivals)
        assert [len(o.token_ids) for o in outputs] == [3, 2]
        assert [o.prompt_token_ids for o in outputs] == prompts
    asked = [(prompt, p.temperature, p.max_tokens, p.ignore_eos) for prompt, p in engine.asked]
    assert asked == [([1, 2, 3], 0.6, 3, True), ([4, 5], 0.6, 2, True)] * 2


def test_effective_is_read_back_and_a_dropped_setting_shows(backend: NanoVllmBackend) -> None:
    started(backend, enforce_eager=False)
    found = backend.effective
    assert (found["tp"], found["max_model_len"], found["page_size"]) == (1, 4096, 256)
    assert (found["mode"], found["dtype"], found["prefix_cache"]) == ("graph", "bfloat16", True)
    assert (found["num_pages"], found["max_num_batched_tokens"]) == (99, 16384)
    assert backend.startup["total_s"] and backend.startup["load_s"] is None


def test_tokens_go_to_the_requests_that_got_them(backend: NanoVllmBackend) -> None:
    """Outputs of 1, 3 and 2 tokens in batches of at most 7 prompt tokens: two prompts, one, then
    decode steps of two and of one."""
    started(backend, engine__max_num_batched_tokens=7, enforce_eager=False)
    outputs = backend.generate([[1] * 4, [2] * 3, [3] * 5], params(1, 3, 2))
    ids = [o.token_ids for o in outputs]
    assert [[token % 1000 for token in own] for own in ids] == [[0], [0, 1, 2], [0, 1]]
    assert len({token // 1000 for own in ids for token in own}) == 3
    (log,) = backend.drain_steps()
    rows = [(int(r["phase"]), int(r["batch"]), int(r["tokens"]), int(r["bucket"]),
             int(r["samples"]), bool(r["replayed"])) for r in log]  # fmt: skip
    assert rows == [
        (0, 2, 7, 7, 2, False), (0, 1, 5, 5, 1, False), (1, 2, 2, 2, 2, True),
        (1, 1, 1, 1, 1, True),
    ]  # fmt: skip
    ends, begins = log["wall_end_ns"] / 1e9, log["wall_begin_ns"] / 1e9
    assert outputs[0].token_times_s == pytest.approx([ends[0]], abs=1e-8)
    assert outputs[1].token_times_s == pytest.approx([ends[0], ends[2], ends[3]], abs=1e-8)
    assert outputs[2].token_times_s == pytest.approx([ends[1], ends[2]], abs=1e-8)
    assert outputs[2].queue_s == pytest.approx(begins[1] - outputs[2].arrival_s, abs=1e-8)
    assert outputs[0].tpot_s is None
    assert outputs[1].tpot_s == pytest.approx((ends[3] - ends[0]) / 2, abs=1e-8)


def test_a_prompt_that_is_cut_is_queued_until_its_first_part(backend: NanoVllmBackend) -> None:
    started(backend, engine__max_num_batched_tokens=4)
    (only,) = backend.generate([[1] * 10], params(2))
    (log,) = backend.drain_steps()
    assert log["tokens"].tolist() == [4, 4, 2, 1] and log["samples"].tolist() == [0, 0, 1, 1]
    begins, ends = log["wall_begin_ns"] / 1e9, log["wall_end_ns"] / 1e9
    assert only.queue_s == pytest.approx(begins[0] - only.arrival_s, abs=1e-8)
    assert only.ttft_s == pytest.approx(ends[2] - only.arrival_s, abs=1e-8)
    assert not log["replayed"].any()


def test_a_batch_above_max_num_seqs_decodes_its_first_ones(backend: NanoVllmBackend) -> None:
    """max_num_seqs bounds a step and not who is in the queue."""
    started(backend, engine__max_num_seqs=2, engine__max_num_batched_tokens=3)
    outputs = backend.generate([[1], [2], [3]], params(3, 3, 3))
    assert [len(o.token_times_s) for o in outputs] == [3, 3, 3]
    assert [row[:3] for row in log_of(backend)] == [
        (0, 3, 3), (1, 2, 2), (1, 2, 2), (1, 1, 1), (1, 1, 1)
    ]  # fmt: skip
    assert outputs[2].token_times_s[1] > outputs[0].token_times_s[2]


def test_preemptions_and_cached_tokens_are_counted(
    backend: NanoVllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "cached", 2)
    started(backend)
    outputs = backend.generate([[1] * 5, [2] * 4], params(2, 2))
    assert backend.counters()["cached_tokens"] == 4 and backend.counters()["preemptions"] == 0
    assert [o.cached_tokens for o in outputs] == [None, None]  # of which, it does not tell
    monkeypatch.setattr(LLM, "cached", 0)
    monkeypatch.setattr(LLM, "pool", 10)
    outputs = backend.generate([[1] * 4, [2] * 4], params(4, 4))
    assert [len(o.token_times_s) for o in outputs] == [4, 4]
    assert backend.counters()["preemptions"] == 1
    assert "cached_tokens" not in backend.counters()  # null with a reason, and so it stays
    monkeypatch.setattr(LLM, "pool", 1000)
    backend.generate([[1] * 4], params(2))
    assert "cached_tokens" not in backend.counters() and backend.counters()["preemptions"] == 1
    assert [o.preemptions for o in outputs] == [None, None]


def test_greedy_and_what_it_has_not_are_refused_before_a_request(backend: NanoVllmBackend) -> None:
    engine = started(backend)
    with pytest.raises(ValueError, match="temperature=0.0: it refuses"):
        backend.generate([[1]], params(2, temperature=0.0))
    with pytest.raises(ValueError, match="asks for more than"):
        backend.generate([[1]], [SamplingParams(temperature=0.6, ignore_eos=True, seed=1)])
    assert engine.asked == []


def test_dummy_weights_become_files_once(
    backend: NanoVllmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that transformers and the native engine can load, bfloat16, with a tokenizer."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path))
    source = models.resolve_model(TINY)
    shape = tmp_path / "shape"
    shape.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    (shape / "config.json").write_text(json.dumps(config))
    model = {"name": "shape", "path": str(shape), "load_format": "dummy"}
    backend.start({**cfg_of(), "model": model}, tmp_path / "cache")
    folder = Path(LLM.made[-1].model)
    assert folder.parent == tmp_path / "models" and folder.name.startswith("shape-dummy-")
    weights = load_file(folder / "model.safetensors")
    own = load_file(source / "model.safetensors")
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in own.items()}
    assert {v.dtype for v in weights.values()} == {torch.bfloat16}
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 258
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.with_weights(model) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert backend.effective["load_format"] == "dummy"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    assert models.with_weights(TINY) == models.resolve_model(TINY)


def test_a_point_counts_every_token(
    backend: NanoVllmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = cfg_of(enforce_eager=False)
    backend.start(cfg, None)
    point = make_point(cfg)
    outcome = measure_point(backend, point, tmp_path / "run" / "points" / point.point_id)
    assert outcome.status == "ok", outcome.reason
    results = load(tmp_path / "run")
    assert set(results.points["output_tokens"]) == {10}
    assert set(results.points["effective.batch"]) == {2}
    notes = results.points["notes"][0]
    assert "prefix cache cannot be switched off" in notes and "flag:" not in notes
    rates = results.metrics[results.metrics["name"] == "prefill_tok_s"].set_index("stat")["value"]
    # the interval of a mean of few values may reach below zero where they differ widely
    assert (rates.drop(["std", "ci_lo"]).dropna() > 0).all() and rates.notna().any()
    assert (results.metrics["value"].isna() == results.metrics["reason"].notna()).all()
    assert results.steps["device_us"].isna().all()
    original = LLM._sample

    def withheld(self: LLM, batch: Any) -> Any:
        return [(seq_id, tokens[:-1]) for seq_id, tokens in original(self, batch)]

    monkeypatch.setattr(LLM, "_sample", withheld)
    outcome = measure_point(backend, point, tmp_path / "again" / "points" / point.point_id)
    assert outcome.status == "error"
    assert "short_output: 2 of 2 requests gave fewer tokens than asked" in str(outcome.reason)
