"""Which points of other engines are skipped, in which words, and what is compared of settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.machine.capabilities import Machine, importable, skip_reason
from harness.planning.plan import resolve
from harness.settings.config import CHOICES
from harness.settings.effective import differences
from tests.support.fake_backend import FakeBackend, make_cfg
from tests.support.plans import CPU, SHAPE, config, plan, sweep

GPU = Machine(gpus=1, cores=2, cxx=None, packages={})
READY = Machine(gpus=2, cores=2, cxx=None, packages={"nanovllm": "", "flash_attn": "", "vllm": ""})
NANO: dict[str, Any] = {"backend": "nanovllm", "workload__temperature": 0.6}
NANO_PACKAGES = (
    "nanovllm is not installed (pip install git+https://github.com/GeeeekExplorer/nano-vllm); "
    "flash_attn is not installed (pip install flash-attn)"
)

SKIPPED: list[tuple[Machine, dict[str, Any], str | None]] = [
    (CPU, {"backend": "transformers"}, None),
    (GPU, {"backend": "transformers"}, None),
    (GPU, {"backend": "transformers", "device": "cpu"}, None),
    (CPU, {"backend": "transformers", "device": "cuda"}, "needs 1 GPU, 0 visible"),
    (CPU, {"backend": "transformers", "attention": "sdpa", "dtype": "float32"}, None),
    (CPU, {"backend": "transformers", "tp": 2}, "backend=transformers has tp=1, not 2"),
    (
        GPU,
        {"backend": "transformers", "enforce_eager": False},
        "backend=transformers has enforce_eager=true, not false",
    ),
    (
        CPU,
        {"backend": "transformers", "compile": "model"},
        "backend=transformers has compile=off, not model",
    ),
    (
        CPU,
        {"backend": "transformers", "attention": "flash2"},
        "backend=transformers has attention=auto, sdpa, not flash2",
    ),
    (
        CPU,
        {"backend": "transformers", "page_size": 16},
        "backend=transformers has page_size=null, not 16",
    ),
    (
        CPU,
        {"backend": "transformers", "engine__num_pages": 8},
        "backend=transformers has no setting engine.num_pages, here 8",
    ),
    (
        CPU,
        {"backend": "transformers", "engine__prefix_cache": True},
        "backend=transformers has no setting engine.prefix_cache, here true",
    ),
    (CPU, {"backend": "transformers", "engine__threads_per_rank": 1, "engine__seed": 3}, None),
    (
        CPU,
        {
            "backend": "transformers",
            "workload__kind": "nano_vllm",
            "workload__arrivals": "poisson(4)",
        },
        "backend=transformers takes requests all at once, not workload.arrivals=poisson(4)",
    ),
    (CPU, NANO, f"backend=nanovllm: it needs a CUDA device, none visible; {NANO_PACKAGES}"),
    (GPU, NANO, f"backend=nanovllm: {NANO_PACKAGES}"),
    (READY, NANO, None),
    (READY, {**NANO, "tp": 2, "comm": "nccl", "attention": "flash2"}, None),
    (READY, {**NANO, "tp": 4}, "needs 4 GPUs, 2 visible"),
    (READY, {**NANO, "device": "cpu"}, "backend=nanovllm: it needs a CUDA device, device=cpu"),
    (READY, {**NANO, "compile": "layer"}, "backend=nanovllm has compile=off, not layer"),
    (READY, {**NANO, "dtype": "float16"}, "backend=nanovllm has dtype=auto, not float16"),
    (
        READY,
        {**NANO, "workload__temperature": 0.0},
        "backend=nanovllm: it refuses to decode greedily; set workload.temperature, of every "
        "engine alike",
    ),
    (
        READY,
        {**NANO, "enforce_eager": False, "engine__max_num_seqs": 20},
        "backend=nanovllm: its graphs end at the last multiple of 16 up to "
        "engine.max_num_seqs=20, and a larger batch has none; give a multiple of 16",
    ),
    (READY, {**NANO, "enforce_eager": False, "engine__max_num_seqs": 32}, None),
    (READY, {**NANO, "engine__max_num_seqs": 20}, None),
    (
        CPU,
        {"backend": "vllm"},
        "backend=vllm: it needs a CUDA device, none visible; vllm is not installed (pip install "
        "'rangefinder[peers]')",
    ),
    (READY, {"backend": "vllm", "tp": 2, "enforce_eager": False, "compile": "model"}, None),
    (
        READY,
        {"backend": "vllm", "compile": "layer"},
        "backend=vllm has compile=off, model, not layer",
    ),
    (READY, {"backend": "vllm", "comm": "nccl"}, "backend=vllm has comm=auto, not nccl"),
    (
        READY,
        {"backend": "vllm", "attention": "triton"},
        "backend=vllm has attention=auto, not triton",
    ),
    (READY, {"backend": "vllm", "engine__prefix_cache": True, "engine__num_pages": 8}, None),
]


@pytest.mark.parametrize(("machine", "settings", "reason"), SKIPPED)
def test_what_a_peer_cannot_run_says_why(
    machine: Machine, settings: dict[str, Any], reason: str | None
) -> None:
    assert skip_reason(resolve(config(timing="host", **settings), machine), machine) == reason


@pytest.mark.parametrize(
    ("changes", "tp", "reason"),
    [
        ({"dtype": "bfloat16"}, 2, None),
        ({}, 1, "flash-attn has no kernels of float32, the checkpoint's dtype"),
        (
            {"dtype": "bfloat16", "vocab_size": 511},
            2,
            "tp=2 must divide the vocabulary of 511 and the 8 K/V heads",
        ),
        (
            {"dtype": "bfloat16", "model_type": "qwen2"},
            1,
            "it computes qwen3 without rope scaling, not tiny",
        ),
    ],
)
def test_nanovllm_is_asked_about_the_models_own_shape(
    changes: dict[str, Any], tp: int, reason: str | None
) -> None:
    cfg = resolve(config(**NANO, tp=tp, model__name="tiny"), READY)
    found = skip_reason(cfg, READY, replace(SHAPE, **changes))
    assert found == (reason and f"backend=nanovllm: {reason}")


def test_a_skipped_peer_costs_no_engine_and_no_other_row() -> None:
    made = plan(sweep(backend=["native", "transformers"], tp=[1, 2]))
    found = [(p.axes["backend"], p.axes["tp"], p.skip is None) for p in made.points]
    assert found == [
        ("native", 1, True), ("native", 2, True), ("transformers", 1, True),
        ("transformers", 2, False),
    ]  # fmt: skip
    assert made.engine_starts == 3
    assert len({p.engine_key for p in made.points}) == len({p.point_id for p in made.points}) == 4


def test_only_what_a_peer_takes_is_compared_with_what_runs() -> None:
    cfg = make_cfg(backend="transformers", tp=1, page_size=None, engine__threads_per_rank=2)
    runs = {
        "tp": 1, "enforce_eager": True, "compile": "off", "device": "cpu", "load_format": "auto",
        "max_num_seqs": 16, "threads_per_rank": 2, "seed": 0, "prefix_cache": False,
    }  # fmt: skip
    assert differences(cfg, runs) == []
    assert differences(cfg, runs | {"threads_per_rank": 1}) == [
        "threads_per_rank: asked for 2, the engine runs 1"
    ]
    native = differences({**cfg, "backend": "native"}, runs)
    assert native == ["memory_utilization: asked for 0.9, the engine runs nothing"]


@pytest.mark.parametrize(
    ("eager", "asked", "runs", "wrong"),
    [
        (False, 512, 512, []),
        (False, None, 1024, []),
        (False, 8192, 4096, []),  # a step has no more rows
        (False, 512, 0, ["graph_prompt_tokens: asked for 512, the engine runs 0"]),
        (False, 0, 512, ["graph_prompt_tokens: asked for 0, the engine runs 512"]),
        (True, 512, 0, []),  # as in a sweep with and without graphs
    ],
)
def test_rows_of_graphs_with_prompts_are_compared_as_far_as_there_can_be(
    eager: bool, asked: int | None, runs: int, wrong: list[str]
) -> None:
    cfg = make_cfg(enforce_eager=eager, engine__graph_prompt_tokens=asked)
    effective = FakeBackend(cfg).effective | {"enforce_eager": eager}
    effective |= {"max_num_batched_tokens": 4096, "graph_prompt_tokens": runs}
    assert differences(cfg, effective) == wrong


def test_modules_are_found_without_importing_them() -> None:
    assert importable("json", "no_such_module") == {"json": ""}


def test_each_backend_can_be_made_by_its_name() -> None:
    from harness.backends import NAMES, create

    assert CHOICES["backend"] == NAMES
    assert [create(name).name for name in NAMES] == list(NAMES)
    with pytest.raises(ValueError, match="backend='sglang': choose one of native"):
        create("sglang")
