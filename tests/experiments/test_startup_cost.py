"""Start-ups whose phases are known, and the tokens after which they are earned back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from experiments.base import ExperimentError, report
from experiments.startup_cost import EXPERIMENT, summary
from harness.store import load
from tests.support.made_tables import FIGURE, Row, write

GPU: dict[str, Any] = {"device": "cuda", "timing": "stamps", "instrument": []}


def phase(name: str, seconds: float | None = None, **more: Any) -> Row:
    return {"repeat": 0, "phase": name, "seconds": seconds, "shared": False, **more}


def tables(
    total: float,
    rate: float,
    *,
    compiling: float | None = None,
    buckets: int = 0,
    hits: int = 0,
    misses: int = 0,
) -> dict[str, list[Row]]:
    """An engine that starts in `total` s, a second of it load, and then makes `rate` tok/s."""
    captures = [phase("capture", 0.25, bucket=2**n, bytes=500_000_000) for n in range(buckets)]
    rows = [
        phase("total", total), phase("load", 1.0), phase("compile", compiling),
        phase("capture", 0.25 * buckets if buckets else None), phase("warmup", 0.5),
        phase("spawn", total - 1.5 - (compiling or 0) - 0.25 * buckets), *captures,
        phase("cache_hits", count=hits), phase("cache_misses", count=misses),
    ]  # fmt: skip
    figures = [{**FIGURE, "name": "output_tok_s", "unit": "1/s", "value": rate, "repeat": 0,
                "pass": "plain", "source": "host"}]  # fmt: skip
    return {"phases": rows, "metrics": figures}


def four(run: Path) -> pd.DataFrame:
    """Eager 100 tok/s after 8 and 9 s; graphs 400 tok/s after 10.5 s; compiled graphs 500 tok/s
    after 68.5 s with an empty cache, 13.5 s with a full one; compiled alone 80 tok/s after 20 s."""
    for process in (0, 1):
        write(run, tables(8.0 + process, 100.0), process=process, **GPU)
        write(run, tables(10.5, 400.0, buckets=4), process=process, index=1,
              enforce_eager=False, **GPU)  # fmt: skip
    both = {"index": 2, "compile": "model", "enforce_eager": False, "cache": "cold", **GPU}
    write(run, tables(68.5, 500.0, compiling=60.0, buckets=4, misses=3), **both)
    write(run, tables(13.5, 500.0, compiling=5.0, buckets=4, hits=3), process=1, **both)
    alone = {"index": 3, "compile": "model", **GPU}
    for process in (0, 1):
        part = tables(20.0, 80.0, compiling=11.0, hits=1, misses=2)
        write(run, part, process=process, **alone)
    return summary(load(run))


def row(frame: pd.DataFrame, how: str, eager: bool, state: str) -> pd.Series:
    found = frame[(frame["compile"] == how) & (frame["enforce_eager"] == eager)]
    (one,) = found[found["compiled_code"] == state].index
    return frame.loc[one]


def test_break_even_is_extra_start_over_time_saved_per_token(tmp_path: Path) -> None:
    frame = four(tmp_path / "run")
    eager = row(frame, "off", True, "-")
    assert (eager["start_s"], eager["engines"], eager["load_s"]) == (8.5, 2, 1.0)
    assert pd.isna(eager["compile_s"]) and pd.isna(eager["break_even_tokens"])
    graphs = row(frame, "off", False, "-")
    assert (graphs["capture_s"], graphs["buckets"], graphs["graphs_GB"]) == (1.0, 4, 2.0)
    assert graphs["extra_s"] == 2.0
    assert graphs["break_even_tokens"] == pytest.approx(2.0 / (1 / 100 - 1 / 400))
    cold, warm = row(frame, "model", False, "cold"), row(frame, "model", False, "warm")
    assert (cold["compile_s"], warm["compile_s"]) == (60.0, 5.0)
    assert cold["break_even_tokens"] == pytest.approx(60 / (1 / 100 - 1 / 500))
    assert warm["break_even_tokens"] == pytest.approx(5 / (1 / 100 - 1 / 500))
    alone = row(frame, "model", True, "part")
    assert (alone["extra_s"], alone["reason"]) == (11.5, "it saves no time per token")
    assert pd.isna(alone["break_even_tokens"])


def test_a_mode_that_never_earns_its_start_back_is_a_miss(tmp_path: Path) -> None:
    frame = four(tmp_path / "run")
    found = EXPERIMENT.verdict(frame)
    assert found.holds is False
    assert found.text == (
        "compiling and graphs start 2.0 to 60.0 s later than eager; 3 of 4 rows earn it back, "
        "after 267 to 7,500 output tokens"
    )
    assert EXPERIMENT.verdict(frame[frame["compile"] == "off"]).holds is True


def test_a_gain_within_the_noise_earns_nothing(tmp_path: Path) -> None:
    """Graphs 1 % faster by the median where engines differ by 4 %: until then 7,500 tokens were
    said to earn 0.75 s back."""
    run = tmp_path / "run"
    for process, (eager, graph) in enumerate([(98.0, 103.0), (102.0, 99.0)]):
        write(run, tables(8.0, eager), process=process, **GPU)
        write(run, tables(8.75, graph, buckets=1), process=process, index=1,
              enforce_eager=False, **GPU)  # fmt: skip
    frame = summary(load(run))
    graphs = row(frame, "off", False, "-")
    means = np.log([103, 99]).mean() - np.log([98, 102]).mean()
    each = [np.log(own).var(ddof=1) / 2 for own in ([103, 99], [98, 102])]
    df = sum(each) ** 2 / sum(v**2 for v in each)
    half = scipy.stats.t.ppf(0.975, df) * np.sqrt(sum(each))
    found = graphs["gain"], graphs["gain_lo"], graphs["gain_hi"]
    assert found == pytest.approx(tuple(np.exp([means, means - half, means + half])))
    assert graphs["extra_s"] == 0.75 and pd.isna(graphs["break_even_tokens"])
    assert graphs["reason"] == "its gain's interval reaches 1"
    said = EXPERIMENT.verdict(frame)
    assert said.holds is None and said.text == (
        "compiling and graphs start 0.8 s later than eager; 0 of 1 rows earn it back; of 1 no "
        "interval tells whether they do"
    )


def test_without_the_eager_point_there_is_no_break_even(tmp_path: Path) -> None:
    write(tmp_path / "run", tables(10.0, 400.0, buckets=1), enforce_eager=False, **GPU)
    frame = summary(load(tmp_path / "run"))
    assert frame["reason"].to_list() == ["eager, not compiled: not in the run"]
    assert frame["start_s"].to_list() == [10.0]
    assert EXPERIMENT.verdict(frame).holds is None
    write(tmp_path / "none", {}, status="error", reason="no memory")
    write(tmp_path / "bare", {}, **GPU)
    with pytest.raises(ExperimentError, match=r"is known \(its start-up was not recorded\); run"):
        summary(load(tmp_path / "bare"))
    with pytest.raises(ExperimentError, match=r"start-up is known \(error: no memory\); run pyth"):
        summary(load(tmp_path / "none"))


def test_the_report_names_others(tmp_path: Path) -> None:
    four(tmp_path / "run")
    text = report(EXPERIMENT, tmp_path / "run", tmp_path / "out")
    assert "**The claim does not hold**" in text and "39.34 s with -O3" in text
    assert (tmp_path / "out" / "startup_cost.png").read_bytes()[:4] == b"\x89PNG"
