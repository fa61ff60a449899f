"""The real engine through the command line: nothing of one engine, or one point, is in the next."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.store import Results, load

PROMPT, OUTPUT, PAGE = 48, 4, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path_factory.mktemp("state")
    signal.signal(signal.SIGTERM, before)


def run(folder: Path, *settings: str) -> Results:
    runs = folder / "runs"
    seen = set(runs.glob("*"))
    status = main(
        ["device=cpu", "model=tiny", "tp=1", "batch=1,2", "workload=decode",
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


def test_x(swept, alone):
    for r in (swept, alone):
        print(r.points[["index","compile","batch","status","cached_tokens","stop_reason","counters"]].to_string())
        print(r.phases[r.phases["count"].notna()].pivot_table(index="point_id",columns="phase",values="count").to_string())
        print(r.memory.to_string())
