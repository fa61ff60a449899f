"""The real engine through the command line: nothing of one engine, or one point, is in the next."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from harness.__main__ import main
from harness.machine.models import TINY
from harness.measuring.window import BUILD_COUNTERS
from harness.store import Results, load

PROMPT, OUTPUT, PAGE = 48, 4, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    (folder / "model").mkdir()
    config = {"model_type": "qwen3", **TINY, "num_hidden_layers": 1}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder


def run(folder: Path, *settings: str) -> Results:
    runs = folder / "runs"
    seen = set(runs.glob("*"))
    status = main(
        ["device=cpu", f"model.path={folder / 'model'}", "model.load_format=dummy", "tp=1",
         "batch=1,2", "workload=decode",
         f"workload.prompt_tokens={PROMPT}", f"workload.output_tokens={OUTPUT}",
         f"page_size={PAGE}", "engine.prefix_cache=true", "measure.min_repeats=2",
         "measure.max_repeats=2", f"results_dir={runs}", "resume=never", *settings]
    )  # fmt: skip
    assert status == 0
    (made,) = set(runs.glob("*")) - seen
    return load(made)


@pytest.fixture(scope="module")
def swept(folder: Path) -> Results:
    """A compiled engine, then an eager one, of two points each."""
    return run(folder, "compile=model,off")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    return run(folder, "compile=off")


def counts(results: Results, name: str) -> dict[str, int]:
    """point_id -> what its engine had counted after the point."""
    rows = results.phases[results.phases["phase"] == name]
    return {str(k): int(v) for k, v in zip(rows["point_id"], rows["count"], strict=True)}


def peaks(results: Results) -> dict[str, int]:
    rows = results.memory[results.memory["name"] == "peak_bytes"]
    return {str(k): int(v) for k, v in zip(rows["point_id"], rows["bytes"], strict=True)}


def ids(results: Results, **where: object) -> list[str]:
    rows: pd.DataFrame = results.points
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return list(dict.fromkeys(rows.sort_values("index")["point_id"]))


def test_an_engine_behind_another_is_as_if_it_were_alone(swept: Results, alone: Results) -> None:
    """Resident memory and compiled code of the eager engine: those of a sweep that has no other,
    though the engine before it took half as much memory again for its compiler."""
    compiled, eager = ids(swept, compile="model"), ids(swept, compile="off")
    assert eager == ids(alone) and len(eager) == 2
    assert min(counts(swept, "compiles")[point] for point in compiled) > 0
    for results in (swept, alone):
        for name in ("compiles", "cache_hits", "cache_misses", "triton_builds"):
            assert [counts(results, name)[point] for point in eager] == [0, 0]
    before, after = peaks(alone), peaks(swept)
    for point in eager:
        assert after[point] == pytest.approx(before[point], rel=0.05)
    assert max(after[point] for point in compiled) > 1.2 * max(after[point] for point in eager)


def test_no_point_or_repeat_finds_anothers_prefix(swept: Results, alone: Results) -> None:
    """With the prefix cache on and prompts of three pages; the second point of an engine comes
    after four windows of the first one, and its cache could hold them all."""
    for results in (swept, alone):
        points = results.points
        assert len(points) == 2 * len(ids(results))
        requested = points["requested"].map(json.loads)
        assert all(one["engine"]["prefix_cache"] for one in requested)
        effective = points["effective"].map(json.loads)
        assert all(one["prefix_cache"] for one in effective)
        assert (points["prompt_tokens"] == points["batch"] * PROMPT).all()
        assert points["cached_tokens"].tolist() == [0] * len(points)
        assert set(results.requests["cached_tokens"]) == {0}
        assert min(one["num_pages"] for one in effective) > 4 * 2 * (PROMPT + OUTPUT) / PAGE


def test_warm_up_compiles_every_shape_of_the_window(swept: Results) -> None:
    points = swept.points[swept.points["compile"] == "model"]
    assert set(points["status"]) == {"ok"}
    for grown in points["counters"].map(json.loads):
        assert [grown[name] for name in BUILD_COUNTERS] == [0] * len(BUILD_COUNTERS)
