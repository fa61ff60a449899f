"""Other engines on a GPU, where they are installed: a small point of each, every token counted."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.requests.sampling_params import SamplingParams
from harness.backends import create
from harness.settings.abilities import PEERS
from harness.store import load
from harness.sweep.point import measure_point
from tests.support.fake_backend import make_cfg, make_point

pytestmark = pytest.mark.gpu
MODEL = {"name": "qwen3-0.6b", "path": None, "load_format": "dummy"}


def cfg_of(backend: str, **changes: Any) -> dict[str, Any]:
    settings = {"tp": 1, "page_size": None, "workload__temperature": 0.6, **changes}
    # Pages of 16 tokens for two requests of 1,024; nano-vLLM has a share of the memory alone, and
    # vLLM starts only where its share is free.
    settings |= {"engine__num_pages": 128, "engine__memory_utilization": 0.3}
    return make_cfg(backend=backend, device="cuda", timing="stamps", model=MODEL,
                    engine__max_model_len=1024, **settings)  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "eager", "compiled"),
    [
        ("transformers", True, "off"),
        ("nanovllm", False, "off"),
        ("vllm", False, "model"),
        ("vllm", False, "off"),
    ],
)
def test_a_point_of_each_peer(backend: str, eager: bool, compiled: str, tmp_path: Path) -> None:
    missing = [name for name in PEERS[backend].modules if find_spec(name) is None]
    if missing:
        pytest.skip(f"backend={backend} needs {', '.join(missing)}")
    cfg = cfg_of(backend, enforce_eager=eager, compile=compiled)
    engine = create(backend)
    engine.start(cfg, tmp_path / "cache")
    try:
        point = make_point(cfg)
        outcome = measure_point(engine, point, tmp_path / "run" / "points" / point.point_id)
    finally:
        engine.close()
    assert outcome.status == "ok", outcome.reason
    results = load(tmp_path / "run")
    assert set(results.points["output_tokens"]) == {10}
    assert (results.requests["ttft"] > 0).all() and (results.requests["tpot"] > 0).all()


def test_transformers_decodes_the_native_engines_tokens() -> None:
    """In float32, from the small model's file."""
    tiny = {"name": "tiny", "path": None, "load_format": "auto"}
    prompts = [[5, 9, 3], [7, 1, 4, 8]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (6, 4)]
    tokens = []
    for backend in ("native", "transformers"):
        engine = create(backend)
        engine.start({**cfg_of(backend), "model": tiny}, None)
        try:
            tokens.append([o.token_ids for o in engine.generate(prompts, params)])
        finally:
            engine.close()
    assert tokens[0] == tokens[1]
