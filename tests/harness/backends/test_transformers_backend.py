"""transformers as a backend: its tokens, its step log by hand-counted rows, and what is null."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from engine.requests.sampling_params import SamplingParams
from harness.backends import create
from harness.backends.transformers import TransformersBackend
from harness.machine.models import TINY, resolve_model
from harness.store import Results, load
from harness.sweep.point import measure_point
from tests.support.fake_backend import make_cfg, make_point
from tests.support.greedy import greedy_reference

LENGTHS, OUTPUTS = (5, 9, 3, 7), (4, 6, 1, 3)


def cfg_of(**changes: Any) -> dict[str, Any]:
    return make_cfg(backend="transformers", tp=1, page_size=None, engine__threads_per_rank=1,
                    **{"engine__max_num_seqs": 3, **changes})  # fmt: skip


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, TINY["vocab_size"], n).tolist() for n in LENGTHS]


def params(temperature: float = 0.0, outputs: tuple[int, ...] = OUTPUTS) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in outputs]


@pytest.fixture(scope="module")
def backend() -> Iterator[TransformersBackend]:
    made = create("transformers")
    assert isinstance(made, TransformersBackend)
    made.start(cfg_of(), None)
    yield made
    made.close()
    made.close()


def test_greedy_tokens_are_those_of_each_prompt_alone_and_of_the_native_engine(
    backend: TransformersBackend,
) -> None:
    """Batches of three, padded on the left to the longest."""
    outputs = backend.generate(prompts(), params())
    folder = resolve_model({"name": "tiny", "path": None, "load_format": "auto"})
    alone = [
        list(greedy_reference(folder, tuple(prompt), n))
        for prompt, n in zip(prompts(), OUTPUTS, strict=True)
    ]
    assert [o.token_ids for o in outputs] == alone
    native = create("native")
    native.start(make_cfg(tp=1, engine__threads_per_rank=1), None)
    try:
        same = native.generate(prompts(), params())
    finally:
        native.close()
    assert [o.token_ids for o in same] == alone
    assert [o.prompt_token_ids for o in outputs] == prompts()


def test_the_step_log_counts_what_each_forward_held(backend: TransformersBackend) -> None:
    """Two batches: outputs of 4, 6 and 1 tokens from 17 prompt tokens in 3 rows of 9; then one of 3
    from 7."""
    backend.drain_steps()
    backend.generate(prompts(), params())
    (log,) = backend.drain_steps()
    names = ["phase", "batch", "tokens", "bucket", "samples"]
    assert [tuple(map(int, row)) for row in log[names].tolist()] == [
        (0, 3, 17, 27, 3), (1, 2, 2, 3, 2), (1, 2, 2, 3, 2), (1, 2, 2, 3, 2), (1, 1, 1, 3, 1),
        (1, 1, 1, 3, 1), (0, 1, 7, 7, 1), (1, 1, 1, 1, 1), (1, 1, 1, 1, 1),
    ]  # fmt: skip
    assert np.all(np.diff(log["step"]) == 1) and not log["replayed"].any()
    assert np.all(log["wall_begin_ns"] < log["wall_end_ns"])
    assert np.all(log["wall_begin_ns"][1:] >= log["wall_end_ns"][:-1])
    assert backend.drain_steps()[0].size == 0


def test_times_of_a_request_are_those_of_its_batch(backend: TransformersBackend) -> None:
    backend.drain_steps()
    outputs = backend.generate(prompts(), params())
    (log,) = backend.drain_steps()
    ends = log["wall_end_ns"] / 1e9
    first, last = outputs[0], outputs[3]
    np.testing.assert_allclose(first.token_times_s, ends[:4], atol=1e-8)
    np.testing.assert_allclose(last.token_times_s, ends[6:9], atol=1e-8)
    assert first.ttft_s == pytest.approx(first.token_times_s[0] - first.arrival_s)
    assert first.tpot_s == pytest.approx((ends[3] - ends[0]) / 3, abs=1e-8)
    assert outputs[2].tpot_s is None and len(outputs[2].token_times_s) == 1
    waited = log["wall_begin_ns"][6] / 1e9 - last.arrival_s
    assert last.queue_s == pytest.approx(waited, abs=1e-8) and waited > (first.e2e_s or 0)


def test_sampling_is_seeded_and_unfiltered(backend: TransformersBackend) -> None:
    """At a temperature of 1000 all 1024 tokens are about equally likely: with the library's filter
    (top_k=50) a row of 40 tokens could only hold the 50 best."""
    import torch

    hot = params(1000.0, (40,) * 4)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append([o.token_ids for o in backend.generate(prompts(), hot)])
    assert drawn[0] == drawn[1] != drawn[2]
    first = backend._model(torch.tensor([prompts()[0]])).logits[0, -1]
    best = set(first.topk(512).indices.tolist())
    firsts = [
        o.token_ids[0] for o in backend.generate([prompts()[0]] * 30, params(1000.0, (1,) * 30))
    ]
    assert 3 < sum(token in best for token in firsts) < 27


@pytest.mark.parametrize(
    ("asked", "arrivals", "what"),
    [
        ([SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2)], None, "asks for more than"),
        ([SamplingParams(max_tokens=2)], None, "asks for more than"),
        (params(0.0, (2,)), [0.0], "all at once"),
        ([*params(0.0, (2,)), *params(1.0, (2,))], None, r"temperatures \[0.0, 1.0\] in one batch"),
    ],
)
def test_what_it_would_leave_out_is_refused(
    backend: TransformersBackend, asked: Any, arrivals: Any, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        backend.generate(prompts()[: len(asked)], asked, arrivals)


def test_what_runs_is_read_back(backend: TransformersBackend) -> None:
    found = backend.effective
    assert (found["attention"], found["dtype"], found["device"]) == ("sdpa", "float32", "cpu")
    assert (found["threads_per_rank"], found["max_model_len"]) == (1, 4096)
    start = backend.startup
    assert start["load_s"] and start["spawn_s"] and start["compile_s"] is None
    assert start["total_s"] == pytest.approx(start["load_s"] + start["spawn_s"])
    (memory,) = backend.memory()
    assert memory["weights_bytes"] == 4 * sum(
        int(np.prod(p.shape)) for p in backend._model.parameters()
    )
    assert memory["peak_bytes"] and memory["peak_bytes"] > memory["weights_bytes"]


def test_dummy_weights_need_no_file_and_follow_the_seed(tmp_path: Path) -> None:
    source = resolve_model({"name": "tiny", "path": None, "load_format": "auto"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    model = {"name": "shape", "path": str(tmp_path), "load_format": "dummy"}
    seen = []
    for seed in (0, 0, 1):
        made = TransformersBackend()
        made.start(cfg_of(model=model, engine__seed=seed), None)
        assert made.effective["load_format"] == "dummy"
        seen.append(made._model.lm_head.weight.detach().clone())
        made.close()
    assert seen[0].equal(seen[1]) and not seen[0].equal(seen[2])


@pytest.fixture(scope="module")
def measured(backend: TransformersBackend, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two requests of 4 prompt and 5 output tokens, twice, with the default instruments."""
    run = tmp_path_factory.mktemp("run")
    point = make_point(cfg_of(instrument=["collectives", "nvtx", "counts"]))
    outcome = measure_point(backend, point, run / "points" / point.point_id)
    assert outcome.status == "ok", outcome.reason
    return load(run)


def test_a_point_has_the_figures_that_every_engine_has(measured: Results) -> None:
    points, rows = measured.points, measured.metrics
    assert set(points["backend"]) == {"transformers"}
    assert points["output_tokens"].tolist() == [10, 10]
    assert points["effective.batch"].tolist() == [2, 2]
    for repeat, wall in zip(points["repeat"], points["wall_s"], strict=True):
        of = rows[(rows["name"] == "output_tok_s") & (rows["repeat"] == repeat)]
        assert of["value"].tolist() == pytest.approx([10 / wall])
    served = measured.requests
    assert set(served["pass"]) == {"plain"} and set(served["output_tokens"]) == {5}
    for name in ("ttft", "tpot"):
        median = rows[(rows["name"] == name) & (rows["stat"] == "p50")]["value"]
        assert median.tolist() == pytest.approx([served[name].median()])
    steps = measured.steps
    prefill = steps[(steps["phase"] == "prefill") & (steps["repeat"] == 0)]
    rate = rows[(rows["name"] == "prefill_tok_s") & (rows["repeat"] == 0)]["value"]
    assert rate.tolist() == pytest.approx([8 / (prefill["host_us"].sum() / 1e6)])


def test_what_it_cannot_tell_is_null_with_a_reason(measured: Results) -> None:
    rows = measured.metrics
    assert (rows["value"].isna() == rows["reason"].notna()).all()
    for name in ("latency_us", "comm_share", "transfer_us", "wait_us"):
        own = rows[rows["name"] == name]
        assert set(own["reason"]) == {"no observer is heard at its collectives"}, name
    for name in ("step_us", "mbu", "mfu"):
        own = rows[rows["name"] == name]
        assert len(own) and own["value"].isna().all(), name
        assert set(own["reason"]) == {"its forward is not timed apart from the rest of a step"}
    assert measured.collectives.empty
    assert measured.steps["device_us"].isna().all()
    assert measured.steps["host_us"].notna().all()
    (note,) = set(measured.points["notes"])
    assert "instruments left out: no observer is heard at its collectives" in note
    phases = measured.phases.set_index("phase")
    assert phases.loc["total", "seconds"] > 0
    assert pd.isna(phases.loc["compile", "seconds"])
    assert json.loads(measured.points["effective"][0])["cache"] == "dynamic"
