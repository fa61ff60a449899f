"""LLM: configurations, checkpoints, inputs and parameters that it refuses, and how."""

from __future__ import annotations

import json
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, CheckpointError, ConfigError, EngineConfig, RequestError, SamplingParams
from tests.support.checkpoints import Checkpoints
from tests.support.engines import small_engine as engine
from tests.support.greedy import GREEDY, greedy_reference


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
        for no_list in (5, None, {"a": 1}, iter([[1]])):
            said = (
                f"prompts is of type {type(no_list).__name__}: give a list of prompts, each a text"
            )
            for call in (llm.generate, llm.stream):
                with pytest.raises(RequestError, match=said):
                    call(no_list)  # type: ignore[operator]
        assert llm.generate([]) == []
        outputs = llm.generate([[1.7], 3, [5, 6]], GREEDY)  # type: ignore[list-item]
        assert "float" in str(outputs[0].error) and "int" in str(outputs[1].error)
        assert tuple(outputs[2].token_ids) == greedy_reference(path, (5, 6), 12)
    with pytest.raises(RequestError, match=r"max_tokens=2\.5"):
        SamplingParams(max_tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tp='2'"):
        engine(path, tp="2")


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
