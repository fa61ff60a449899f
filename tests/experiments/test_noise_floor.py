"""The A/A experiment on runs whose variances are known, and the frame that experiments share."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import scipy.stats

from experiments.__main__ import main, names
from experiments.base import ExperimentError
from experiments.noise_floor import EXPERIMENT, halved, summary
from harness.store import load
from harness.tables.point_files import to_arrow
from tests.support.made_runs import noisy, write_cell


def balanced() -> tuple[list[list[float]], float, float]:
    """(rates of ten engines of six repeats, MSW, MSB) of the logarithms, by hand: repeats lie at
    +-1, +-2 and +-3 % of their engine, engines at +-1 ... +-5 % of the whole."""
    inner = np.array([-0.03, -0.02, -0.01, 0.01, 0.02, 0.03])
    outer = np.array([-5, 4, -3, 2, -1, 1, -2, 3, -4, 5]) / 100
    rates = (200 * np.exp(outer[:, None] + inner[None, :])).tolist()
    msw = 2 * (0.01**2 + 0.02**2 + 0.03**2) / 5
    msb = 6 * 2 * (1 + 4 + 9 + 16 + 25) * 1e-4 / 9
    return rates, msw, msb


def test_variance_components_of_a_design_worked_by_hand(tmp_path: Path) -> None:
    rates, msw, msb = balanced()
    write_cell(tmp_path / "run", rates, batch=4)
    frame = summary(load(tmp_path / "run"))
    assert frame["metric"].tolist() == ["output_tok_s", "tpot", "step_us"]
    row = frame.iloc[0]
    between = (msb - msw) / 6
    assert (row["engines"], row["repeats"], row["batch"]) == (10, 60, 4)
    assert row["within"] == pytest.approx(math.expm1(math.sqrt(msw)))
    assert row["between"] == pytest.approx(math.expm1(math.sqrt(between)))
    assert row["icc"] == pytest.approx((msb - msw) / (msb + 5 * msw))
    assert row["centre"] == pytest.approx(200, rel=1e-4)
    t = scipy.stats.t.ppf(0.975, [50, 9])
    assert row["detect_within"] == pytest.approx(math.expm1(t[0] * math.sqrt(2 * msw)))
    assert row["floor"] == pytest.approx(math.expm1(t[1] * math.sqrt(2 * msb / 6)), rel=1e-3)
    assert row["six_runs"] == pytest.approx(math.expm1(0.09)), "-5 to +4 %"
    assert frame["icc"].to_numpy() == pytest.approx(row["icc"])


def test_halves_of_a_steady_drift_have_one_mean() -> None:
    outer, inner = halved([(float(place),) for place in range(8)])
    assert [e[0] for e in outer] == [0, 3, 4, 7]
    assert np.mean(outer) == np.mean(inner) == 3.5


def test_the_claim_holds_where_all_are_the_same_and_fails_on_an_alarm(tmp_path: Path) -> None:
    quiet = noisy(10, 6, between=0.004, within=0.01, seed=2)
    write_cell(tmp_path / "quiet", quiet)
    found = EXPERIMENT.verdict(summary(load(tmp_path / "quiet")))
    assert found.holds is True
    assert found.text.startswith("3 of 3 A/A comparisons are SAME, 0 false alarms; two fresh eng")
    # Another thing is measured by every second pair of engines: that is no noise.
    planted = [[v * (1.1 if place % 4 in (1, 2) else 1) for v in engine]
               for place, engine in enumerate(quiet)]  # fmt: skip
    write_cell(tmp_path / "planted", planted)
    frame = summary(load(tmp_path / "planted"))
    assert frame["verdict"].tolist() == ["FASTER"] * 3
    assert frame["ratio"].to_numpy() == pytest.approx([1.1, 1 / 1.1, 1 / 1.1], rel=0.02)
    assert EXPERIMENT.verdict(frame).holds is False
    write_cell(tmp_path / "wild", noisy(10, 6, between=0.2, within=0.1, seed=3))
    assert EXPERIMENT.verdict(summary(load(tmp_path / "wild"))).holds is None


def test_points_that_cannot_answer_say_why(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_cell(run, noisy(3, 6, between=0.01, within=0.01, seed=0), index=0, batch=1)
    with pytest.raises(ExperimentError, match=r"at least 8 engines of 6 repeats \(3 engines, of"):
        summary(load(run))
    write_cell(run, balanced()[0], index=1, batch=2)
    write_cell(run, [], index=2, batch=3, status="oom", reason="no memory")
    frame = summary(load(run)).set_index("batch")
    assert frame.loc[1, "reason"] == "3 engines, of which one has 6 repeats"
    assert frame.loc[3, "reason"] == "oom: no memory"
    assert frame.loc[[1, 3], "floor"].isna().all() and frame.loc[2, "floor"].notna().all()


def test_one_reading_an_engine_has_a_floor_and_no_variance_within(tmp_path: Path) -> None:
    """As step_us of a GPU, which the step pass gives once an engine."""
    rates, _, _ = balanced()
    write_cell(tmp_path / "run", rates)
    for path in (tmp_path / "run" / "points").glob("*/steps.parquet"):
        steps = pd.read_parquet(path)
        steps.loc[steps["repeat"] > 0, "device_us"] = None
        pq.write_table(to_arrow("steps", steps), path)
    row = summary(load(tmp_path / "run")).set_index("metric").loc["step_us"]
    assert (row["engines"], row["repeats"]) == (10, 10)
    assert pd.isna(row["within"]) and pd.isna(row["icc"]) and pd.isna(row["detect_within"])
    logs = np.log([engine[0] for engine in rates])
    assert row["between"] == pytest.approx(math.expm1(logs.std(ddof=1)))
    assert row["floor"] == pytest.approx(
        math.expm1(scipy.stats.t.ppf(0.975, 9) * math.sqrt(2) * logs.std(ddof=1))
    )


def test_the_report_is_markdown_csv_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cell(tmp_path / "run", noisy(8, 6, between=0.004, within=0.01, seed=2))
    assert main(["noise_floor", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / "out" / "noise_floor.md").read_text()
    assert "**The claim holds**: 3 of 3 A/A comparisons are SAME" in text
    assert "Run run on a CPU, torch 2.13.0, commit 0123456." in text
    rows = [line for line in text.splitlines() if line.startswith("| 2 | 2 |")]
    frame = pd.read_csv(tmp_path / "out" / "noise_floor.csv")
    assert [row.split(" | ")[13] for row in rows] == [f"{v:.1%}" for v in frame["floor"]]
    assert "Measured by others, on other machines:" in text
    assert (tmp_path / "out" / "noise_floor.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_the_report_says_how_to_get_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cell(tmp_path / "run", balanced()[0])
    monkeypatch.setattr("experiments.base.find_spec", lambda name: None)
    assert main(["noise_floor", str(tmp_path / "run")]) == 0
    out = tmp_path / "run" / "report"
    assert "pip install 'rangefinder[report]'" in (out / "noise_floor.md").read_text()
    assert sorted(p.name for p in out.iterdir()) == ["noise_floor.csv", "noise_floor.md"]


def test_a_run_that_cannot_answer_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["noise_floor", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("none: no such run folder\n")
    (tmp_path / "empty").mkdir()
    assert main(["noise_floor", str(tmp_path / "empty")]) == 2
    assert "empty holds no run" in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())
    assert main(["noise"]) == 2
    assert main(["--help"]) == 0
    assert "noise_floor: How far do two measurements" in capsys.readouterr().out


@pytest.mark.parametrize("name", names())
def test_every_experiment_has_its_sweep(name: str) -> None:
    conf = Path(__file__).resolve().parents[2] / "conf" / "experiment" / f"{name}.yaml"
    assert conf.is_file()


def test_a_report_that_cannot_be_written_names_its_folder_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cell(tmp_path / "run", balanced()[0])
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert main(["noise_floor", str(tmp_path / "run"), "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"noise_floor: --out {out}: the report cannot be written there (Not a directory); name a "
        "folder that can be made and written\n"
    )
