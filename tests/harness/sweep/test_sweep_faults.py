"""Sweeps that go wrong as those of other harnesses did, from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness import __main__ as entry
from harness.store import load
from harness.tables.report import summary
from tests.support.cli import ROOT, Cli
from tests.support.fake_engine import behave, recorded


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cli, int, dict[str, Any], str]:
    """A ladder of batches of which four in the middle fail, each in a way of its own: the sweep,
    its exit status, its last line, and what it printed on stderr."""
    cli = Cli(tmp_path_factory.mktemp("failing"))
    behave(cli.folder, p1="watchdog", p2="memory", p3="assertion", p4="SIGKILL")
    return cli, *cli.run("tp=1", "batch=1,2,4,8,16,32")


Failing = tuple[Cli, int, dict[str, Any], str]


def test_the_ladder_goes_on_above_the_batch_that_ran_out_of_memory(failing: Failing) -> None:
    cli, status, last, _ = failing
    assert status == 1
    assert (last["points"], last["ok"], last["pending"]) == (6, 2, 0)
    assert cli.measured() == [0, 1, 2, 3, 4, 5]
    assert len(recorded("starts", cli.folder)) == 5, "a fresh engine after each that failed"


def test_memory_time_a_fault_and_a_signal_are_four_statuses(failing: Failing) -> None:
    """NCCL's watchdog aborts its rank, whose exit code alone says no more than any other signal's;
    what it waited for stands in what the engine printed."""
    _, _, last, err = failing
    assert [last[name] for name in ("oom", "timeout", "error", "killed")] == [1, 1, 1, 1]
    rows = load(last["run"]).points.set_index("batch").sort_index()
    assert rows["status"].to_dict() == {
        1: "ok", 2: "timeout", 4: "oom", 8: "error", 16: "killed", 32: "ok"
    }  # fmt: skip
    assert rows["reason"].dropna().tolist() == [
        "rank 1 was ended by signal 6 (SIGABRT): Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=300000) ran for 300017 milliseconds "
        "before timing out.",
        "MemoryError: no memory for this batch",
        "AssertionError: a page was freed twice",
        "the engine's process was ended by SIGKILL",
    ]
    assert "[5/6] batch=16: killed (the engine's process was ended by SIGKILL)" in err


def test_an_engine_that_dies_has_no_figure_and_no_rank(failing: Failing) -> None:
    """Nowhere is there a 0 that could be averaged, plotted or chosen as the best."""
    _, _, last, _ = failing
    results = load(last["run"])
    rows = results.points.set_index("batch")
    dead = rows.loc[[2, 4, 8, 16]]
    assert not set(dead["point_id"]) & set(results.metrics["point_id"])
    assert dead[["wall_s", "output_tokens", "rel_noise"]].isna().all(axis=None)
    frame = summary(last["run"]).set_index("batch")
    figures = ["output_tok_s", "tpot_p50_s", "step_p50_us", "comm_share", "mbu", "spread",
               "scaling_efficiency"]  # fmt: skip
    assert frame.loc[dead.index, figures].isna().all(axis=None)
    assert set(frame.loc[dead.index, "repeats"]) == {0}
    assert frame.loc[16, "scaling_reason"] == "the point is killed"
    assert frame["output_tok_s"].dropna().to_dict() == {1: 100.0, 32: 100.0}


def test_folders_are_short_hashes_whatever_the_settings_hold(tmp_path: Path) -> None:
    """A path with slashes, =, commas and spaces, and a sweep over lists."""
    cli = Cli(tmp_path)
    odd = cli.folder / "hub=a,b" / ("long " * 40).strip()
    odd.parent.mkdir()
    (cli.folder / "model").rename(odd)
    cli.arguments[-2] = f"""model.path="{odd}\""""
    status, last, err = cli.run("tp=1", "batch=1", "measure.skew_us=[0.0,50.0],[0.0,250.0,1000.0]")
    assert (status, last["ok"]) == (0, 2), err
    folders = sorted(path.name for path in (Path(last["run"]) / "points").iterdir())
    assert len(folders) == 2 and all(re.fullmatch(r"[0-9a-f]{12}", name) for name in folders)
    rows = load(last["run"]).points
    asked = {row.point_id: json.loads(row.requested) for row in rows.itertuples()}
    assert sorted(asked) == folders
    assert {one["model"]["path"] for one in asked.values()} == {str(odd)}
    lists = sorted(one["measure"]["skew_us"] for one in asked.values())
    assert lists == [[0.0, 50.0], [0.0, 250.0, 1000.0]]
    plan = json.loads((Path(last["run"]) / "plan.json").read_text())
    assert {p["point_id"]: p["cfg"] for p in plan["points"]} == asked
    assert Path(last["run"]).name.startswith("adhoc-")
    shown = summary(last["run"])["measure.skew_us"]
    assert shown.tolist() == ["0.0,50.0", "0.0,250.0,1000.0"]
    deepest = max(len(str(p.relative_to(last["run"]))) for p in Path(last["run"]).rglob("*"))
    assert deepest < 60


@pytest.mark.parametrize("verb", [["list"], ["doctor"], ["--help"], ["tp=1"]])
@pytest.mark.parametrize("version", ["3.14", "3.10"])
def test_a_python_that_cannot_run_it_is_named_before_anything_is_imported(
    verb: list[str], version: str
) -> None:
    """Of a checkout, which no installer has refused."""
    code = (
        f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0, 'final', 0); "
        f"from harness.__main__ import main; status = main({verb!r}); "
        "heavy = {'hydra', 'omegaconf', 'torch', 'engine'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    why = "; Hydra 1.3 fails at its start on 3.14" if version == "3.14" else ""
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: Python {version}: Rangefinder runs on 3.11 to 3.13{why}. Make the environment "
        "with one of them: python3.13 -m venv .venv\n"
    )


def test_installers_refuse_the_same_pythons() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    (oldest, newest) = entry.PYTHONS
    assert asked == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert entry.unfit_python(oldest) is None and entry.unfit_python(newest) is None
