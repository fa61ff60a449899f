"""Engines whose ratios are known, and what the experiment says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.base import ExperimentError, report
from experiments.peers import EXPERIMENT, summary
from harness.store import load
from tests.support.made_runs import noisy, write_cell

GPU: dict[str, Any] = {"device": "cuda", "timing": "stamps", "tp": 1}


def write_engine(
    run: Path, backend: str, speed: float, index: int, *, batch: int = 1, eager: bool = True,
    compiled: str = "off",
) -> None:  # fmt: skip
    """Five engines at `speed` times 100 tok/s; 1 % of noise within, 0.4 % between them."""
    rates = noisy(5, 6, between=0.004, within=0.01, seed=index, centre=100 * speed)
    write_cell(run, rates, index=index, backend=backend, batch=batch, enforce_eager=eager,
               compile=compiled, **GPU)  # fmt: skip


def write_run(run: Path, vllm: float, nano: float) -> None:
    """Native twice as fast with graphs; vLLM so many times as fast as that, compiled too; nano-vLLM
    so many times; transformers at a quarter; a batch of 8 in which there is native alone."""
    write_engine(run, "native", 1.0, 0)
    write_engine(run, "native", 2.0, 1, eager=False)
    write_engine(run, "transformers", 0.5, 2)
    write_engine(run, "vllm", 1.5, 3)
    write_engine(run, "vllm", 2 * vllm, 4, eager=False, compiled="model")
    write_engine(run, "nanovllm", 2 * nano, 5, eager=False)
    write_cell(run, [], index=6, backend="transformers", batch=1, enforce_eager=False,
               status="skipped", reason="backend=transformers has enforce_eager=true, not false",
               **GPU)  # fmt: skip
    write_engine(run, "native", 2.0, 7, batch=8, eager=False)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which nobody is ahead of native."""
    run = tmp_path_factory.mktemp("peers") / "run"
    write_run(run, vllm=0.8, nano=0.9)
    return run


def test_each_engine_stands_in_its_fastest_mode(behind: Path) -> None:
    frame = summary(load(behind))
    one = frame[frame["batch"] == 1].set_index("metric")
    assert list(one.index) == [
        "output_tok_s", "tpot", "ttft", "prefill_tok_s", "start_total_s", "memory_peak_bytes",
        "memory_device_used_bytes",
    ]  # fmt: skip
    assert set(one["modes"]) == {
        "native: graph, transformers: eager, nanovllm: graph, vllm: graph+compile=model"
    }
    rate, tpot = one.loc["output_tok_s"], one.loc["tpot"]
    assert rate["native"] == pytest.approx(200, rel=0.01)
    assert rate["vllm"] == pytest.approx(160, rel=0.01)
    # A request's TPOT is 2 / rate: as many times better as the rate is higher.
    assert tpot["native"] == pytest.approx(0.01, rel=0.01)
    for name, ratio in (("transformers", 0.25), ("vllm", 0.8), ("nanovllm", 0.9)):
        for row in (rate, tpot):
            assert row[f"{name}_ratio"] == pytest.approx(ratio, rel=0.01)
            assert row[f"{name}_lo"] < row[f"{name}_ratio"] < row[f"{name}_hi"]
            assert row[f"{name}_verdict"] == "SLOWER"
    assert one["native"].isna()["ttft"] and one["reason"].isna()["tpot"]


def test_an_engine_that_is_not_there_says_why_and_costs_no_row(behind: Path) -> None:
    frame = summary(load(behind))
    eight = frame[frame["batch"] == 8].set_index("metric")
    assert eight.loc["output_tok_s", "reason"] == (
        "transformers: not in the run; nanovllm: not in the run; vllm: not in the run"
    )
    assert eight["reason"].isna()["tpot"] and set(eight["modes"]) == {"native: graph"}
    assert eight.loc["tpot", "native"] == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(("vllm", "holds"), [(1.2, False), (1.0, True)], ids=["ahead", "level"])
def test_the_claim_is_that_nobody_is_ahead(tmp_path: Path, vllm: float, holds: bool | None) -> None:
    write_run(tmp_path / "run", vllm=vllm, nano=0.9)
    found = EXPERIMENT.verdict(summary(load(tmp_path / "run")))
    assert found.holds is holds, found.text
    ahead = int(vllm > 1)
    assert f"vllm is FASTER in {ahead} of 1 cells ({vllm:.2f} to {vllm:.2f} times" in found.text
    assert "transformers is FASTER in 0 of 1 cells (0.25 to 0.25 times native)" in found.text


def test_too_few_repeats_decide_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_engine(run, "native", 1.0, 0)
    write_cell(run, [[50.0, 51.0]], index=1, backend="vllm", batch=1, **GPU)
    frame = summary(load(run))
    assert EXPERIMENT.verdict(frame).holds is None
    row = frame[frame["metric"] == "tpot"].iloc[0]
    assert row["vllm_verdict"] == "AMBIGUOUS"
    assert row["reason"] == "vllm: B has 2 repeats; a verdict needs 5"


def test_native_alone_is_no_comparison(tmp_path: Path) -> None:
    write_engine(tmp_path / "run", "native", 1.0, 0)
    write_cell(tmp_path / "run", [], index=1, backend="vllm", batch=1, status="skipped",
               reason="vllm is not installed", **GPU)  # fmt: skip
    with pytest.raises(ExperimentError, match=r"vllm: skipped: vllm is not installed.*peers$"):
        summary(load(tmp_path / "run"))
    write_engine(tmp_path / "alone", "native", 1.0, 0)
    with pytest.raises(ExperimentError) as refused:
        summary(load(tmp_path / "alone"))
    assert str(refused.value) == (
        "no cell has native and another engine (transformers: not in the run; nanovllm: not in the "
        "run; vllm: not in the run); run python -m harness +experiment=peers"
    )


def test_the_report_has_a_column_an_engine(behind: Path, tmp_path: Path) -> None:
    text = report(EXPERIMENT, behind, tmp_path / "out")
    assert "**The claim holds**: tpot: transformers is FASTER in 0 of 1 cells" in text
    header = next(line for line in text.splitlines() if line.startswith("| tp"))
    for engine in ("native", "transformers", "nanovllm", "vllm"):
        assert f"| {engine} |" in header
    assert (tmp_path / "out" / "peers.png").read_bytes()[:4] == b"\x89PNG"
