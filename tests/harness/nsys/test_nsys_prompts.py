"""Exports whose steps with prompts are replays: their phase, and which graph each replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from engine.comm.types import Kind, Site
from harness.nsys import summary
from harness.nsys.join import Profile, join
from harness.nsys.known import FromRun
from harness.nsys.place import JoinError
from harness.nsys.reader import read
from harness.observers.records import PHASES
from tests.support.nsys_export import Call, Export, session

ROWS = 8
KERNEL_US = {"prefill": 90, "mixed": 70, "decode": 9}


def calls(rows: int, sampled: int) -> list[Call]:
    """Of a model of one layer, width 64 and vocabulary 96, in bfloat16; ids are int64."""
    reduces = [("all_reduce", s, rows * 128) for s in ("embed", "attn.o_proj", "mlp.down_proj")]
    return [*reduces, ("gather", "lm_head", sampled * 192), ("broadcast", "token_ids", sampled * 8)]


PROMPTS, DECODE = calls(ROWS, 3), calls(ROWS, ROWS)
"""Of as many rows; of the graph with prompts 3 sequences sample, whatever a step has."""
REPLAYS = [("replay-prefill", 2, PROMPTS), ("replay", 8, DECODE), ("replay-mixed", 3, PROMPTS)]


def made(
    path: Path,
    steps: list[tuple[str, int, list[Call]]],
    known: FromRun | None = None,
    kernels: dict[str, int] = KERNEL_US,
) -> Profile:
    """The export of two ranks; an all-reduce takes as long as KERNEL_US says of its step's phase,
    and rank 1 waits 1 us in each."""

    def kernel_ns(step: int, ordinal: int, rank: int) -> int:
        what = steps[step][0]
        phase = "decode" if what == "replay" else what.removeprefix("replay-")
        return 1000 * (kernels[phase] + rank)

    export = session(Export(), steps, kernel_ns)
    return join(read(export.write(path / "export.sqlite", shuffled=1)), known)


def phases(profile: Profile) -> list[str]:
    return [PHASES[code] for code in profile.joined.steps["phase"]]


class Run:
    """harness.store.Results of one point: what the pass graph_timed heard while its graphs were
    captured, and the steps of the pass nsys.

    Args:
        timed: (phase, rows, collectives) of its replays; own: (phase, rows) of those of nsys.
    """

    def __init__(
        self, timed: list[tuple[str, int, list[Call]]], own: list[tuple[str, int]]
    ) -> None:
        steps: list[dict[str, Any]] = []
        sent: list[dict[str, Any]] = []
        for rank in range(2):
            for number, (phase, rows, of_step) in enumerate(timed):
                step = {"point_id": "p", "rank": rank, "pass": "graph_timed", "step": number,
                        "mode": "graph"}  # fmt: skip
                steps.append(step | shape(phase, rows))
                sent += [
                    step | {"ordinal": n, "kind": kind, "site": site, "bytes": size,
                            "dtype": "bfloat16", "path": "nccl"}
                    for n, (kind, site, size) in enumerate(of_step)
                ]  # fmt: skip
            steps += [
                {"point_id": "p", "rank": rank, "pass": "nsys", "step": 50 + n, "mode": "graph"}
                | shape(phase, rows)
                for n, (phase, rows) in enumerate(own)
            ]
        self.tables = {"steps": pd.DataFrame(steps), "collectives": pd.DataFrame(sent)}

    def table(self, name: str, columns: list[str]) -> pd.DataFrame:
        return self.tables[name][columns]


def shape(phase: str, rows: int) -> dict[str, Any]:
    return {"phase": phase, "batch": 2, "tokens": rows - 1, "bucket": rows, "samples": 1}


TIMED = [("prefill", ROWS, PROMPTS), ("decode", ROWS, DECODE)]
OWN = [("prefill", ROWS), ("decode", ROWS), ("mixed", ROWS)]


def known(timed: list[tuple[str, int, list[Call]]], own: list[tuple[str, int]]) -> FromRun:
    return FromRun(Run(timed, own), "p")  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 1])
def test_graphs_of_as_many_rows_with_and_without_prompts_are_two(
    tmp_path: Path, first: int
) -> None:
    """Whichever the other pass replayed first. A mixed step replays the graph of prefills, though
    the other pass had prefills alone."""
    timed = TIMED[first:] + TIMED[:first]
    profile = made(tmp_path, REPLAYS, known(timed, OWN))
    assert phases(profile) == ["prefill", "decode", "mixed"]
    assert profile.joined.steps["step"].tolist() == [50, 51, 52]
    assert profile.joined.replayed.all() and profile.notes == ()
    expected = [size for _, _, of_step in REPLAYS for *_, size in of_step]
    assert profile.joined.rows["bytes"].tolist() == expected
    assert expected[3::5] == [576, 1536, 576], "gathers of 3, 8 and 3 rows"
    reduces = profile.joined.is_kind(Kind.ALL_REDUCE)
    assert profile.joined.transfer_us[reduces].tolist() == [90.0] * 3 + [9.0] * 3 + [70.0] * 3


def test_rows_of_a_decode_graph_say_nothing_of_prompts(tmp_path: Path) -> None:
    """The other pass replayed 8 rows that decode, and prompts of 16."""
    timed = [("prefill", 16, calls(16, 3)), ("decode", ROWS, DECODE)]
    profile = made(tmp_path, REPLAYS, known(timed, OWN))
    assert profile.left_out.tolist() == [True, False, True]
    assert phases(profile) == ["decode"]
    (note,) = profile.notes
    assert note == (
        "2 replays left out: no other pass of the run replayed a graph of 8 rows with prompts, "
        "which would say what it holds"
    )


def test_a_range_of_another_phase_than_the_runs_step_is_refused(tmp_path: Path) -> None:
    said = r"step 0 \(step/replay-mixed\) of rank 0: the run's table has step/replay-prefill at"
    with pytest.raises(JoinError, match=said):
        made(tmp_path, [("replay-mixed", 2, PROMPTS), *REPLAYS[1:]], known(TIMED, OWN))
    with pytest.raises(JoinError, match=r"step 0 \(step/prefill\) .* has step/replay-prefill at"):
        made(tmp_path, [("prefill", 2, PROMPTS), *REPLAYS[1:]], known(TIMED, OWN))


def test_an_export_alone_has_phases_and_no_sizes_of_replays(tmp_path: Path) -> None:
    steps = [("prefill", 2, PROMPTS), *REPLAYS, ("decode", 8, DECODE)]
    profile = made(tmp_path, steps)
    assert phases(profile) == ["prefill", "prefill", "decode", "mixed", "decode"]
    assert profile.joined.replayed.tolist() == [False, True, True, True, False]
    assert profile.joined.steps["batch"].tolist() == [2, 2, 8, 3, 8]
    sizes = profile.joined.rows["bytes"].reshape(5, 5)
    assert (sizes[1:4] == -1).all() and (sizes[[0, 4]] > 0).all()
    sites = [Site.EMBED, Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ, Site.LM_HEAD, Site.TOKEN_IDS]
    assert profile.joined.rows["site"].tolist() == sites * 5


def test_an_export_alone_that_cannot_be_told_is_refused(tmp_path: Path) -> None:
    said = (
        r"step 0 \(step/replay-prefill\): 5 communication kernels, and no step of this export was "
        r"launched, .* or profile with engine.graph_prompt_tokens=0"
    )
    with pytest.raises(JoinError, match=said):
        made(tmp_path, REPLAYS)
    short = [("prefill", 2, PROMPTS), ("replay-mixed", 3, PROMPTS[:-1])]
    said = r"step 1 \(step/replay-mixed\): 4 .* no launched step .* \(they have \[5\]\)"
    with pytest.raises(JoinError, match=said):
        made(tmp_path, short)
    with pytest.raises(JoinError, match="ranges step/other: no such kind of step is known here"):
        made(tmp_path, [("replay-other", 2, PROMPTS)], kernels={"other": 1})


def test_graphs_of_prompts_recorded_as_a_whole_are_named(tmp_path: Path) -> None:
    """Nothing of the export decodes."""
    export = session(Export(), [("replay-prefill", 2, PROMPTS)], lambda *_: 1000)
    export.rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"] = [(0, 9, 0, 1, 1), (0, 9, 1, 1, 1)]
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"] = []
    with pytest.raises(JoinError, match="2 launches of CUDA graphs .* --cuda-graph-trace=node"):
        join(read(export.write(tmp_path / "export.sqlite")))


def test_what_is_printed_keeps_graphs_apart(tmp_path: Path) -> None:
    """All of batch 8, sizes unknown: a prefill and a decode step, and prefills of two graphs."""
    steps = [
        ("decode", 8, DECODE), ("replay", 8, DECODE), ("replay-prefill", 8, PROMPTS),
        ("replay-prefill", 8, calls(16, 3)), ("replay-prefill", 8, PROMPTS),
    ]  # fmt: skip
    profile = made(tmp_path, steps)
    _, _, table = summary.collectives(profile)
    embeds = [(row[0], row[3], row[4], row[6]) for row in table if row[2] == "embed"]
    assert embeds == [
        ("launched", "1,024", "1", "9.0"),
        ("replay", "(batch 8)", "1", "9.0"),
        ("replay-prefill", "(batch 8)", "2", "90.0"),
        ("replay-prefill", "(batch 8)", "1", "90.0"),
    ]
    _, _, table = summary.kernels(profile)
    gemm = {row[0]: row[2:] for row in table if row[1].startswith("gemm")}
    assert set(gemm) == {"launched", "replay", "replay-prefill"}
    assert set(map(tuple, gemm.values())) == {("5.0 / 5.0", "5.0 / 5.0")}  # of 1 us each
    _, _, table = summary.steps(profile)
    assert [row[:2] for row in table] == [
        ["step/decode", "1"], ["step/replay", "1"], ["step/replay-prefill", "3"],
    ]  # fmt: skip
