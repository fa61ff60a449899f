"""What a step must have issued, where steps with prompts are replays of a graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.comm.types import Kind
from harness.measuring.attribution import AttributionError, join
from harness.measuring.expected import check_expected, expected_bytes
from harness.measuring.profile import join_profiles
from harness.observers.records import PHASES, SPLIT_DTYPE, ProfileRecord, RankRecord
from harness.rows import tables
from harness.tables.point_files import to_arrow
from tests.support.fake_backend import DECODE, PREFILL, SHAPE, host_records

MIXED = PHASES.index("mixed")
EAGER, GRAPH = 0, 1
REDUCES, TAIL = [8 * 8 * 4] * 5, [16 * 64 * 4, 16 * 8]
"""Of 8 rows of a width of 8 in float32; 16 sequences sample into a vocabulary of 64, ids int64."""


def records(*steps: tuple[int, int, int], seqs: int = 16) -> list[RankRecord]:
    """Steps (phase, samples, mode) of two ranks, of 8 rows each. What is sent is that of a graph
    whose `seqs` rows sample, whatever the step's own number of samples and mode."""
    found = host_records(2, [(phase, 8, seqs) for phase, _, _ in steps])
    for record in found:
        record.steps["samples"] = [samples for _, samples, _ in steps]
        record.steps["mode"] = [mode for *_, mode in steps]
    return [replace(record, modes=("eager", "graph")) for record in found]


@pytest.mark.parametrize("phase", [PREFILL, MIXED])
@pytest.mark.parametrize("samples", [0, 3])
def test_a_replay_has_its_gather_whatever_the_step_samples(phase: int, samples: int) -> None:
    made = records((phase, samples, GRAPH))
    check_expected(join(made), SHAPE)
    without = [
        replace(r, collectives=r.collectives[r.collectives["kind"] != Kind.GATHER]) for r in made
    ]
    said = rf"step 0 \({PHASES[phase]}\): .*, 1 broadcast/token_ids; a model .* 1 gather"
    with pytest.raises(AttributionError, match=said):
        check_expected(join(without), SHAPE)


def test_a_launched_step_that_samples_nothing_has_none() -> None:
    made = records((PREFILL, 0, EAGER))
    with pytest.raises(
        AttributionError, match=r"step 0 \(prefill\): .* 1 gather/lm_head, .*; a model"
    ):
        check_expected(join(made), SHAPE)
    reduces = [replace(r, collectives=r.collectives[:5]) for r in made]
    check_expected(join(reduces), SHAPE)


def test_bytes_of_a_gather_are_said_but_of_replays_with_prompts() -> None:
    """There the sequences that a graph takes decide, which no step knows; the rows of the forward
    are those of the graph all the same."""
    steps = [(PREFILL, 3, GRAPH), (MIXED, 3, GRAPH), (DECODE, 7, GRAPH), (PREFILL, 3, EAGER)]
    joined = join(records(*steps))
    wanted = expected_bytes(joined, SHAPE)
    gathers = [-1, -1, 8 * 64 * 4, 3 * 64 * 4]  # all rows of a decode step's graph sample
    assert wanted.tolist() == [b for gather in gathers for b in [*REDUCES, gather, -1]]
    key = {"run_id": "r", "point_id": "p", "process": 0}
    table = to_arrow("collectives", tables.collectives(key, joined, wanted, "graph_timed", 0))
    frame = table.to_pandas()
    of_gathers = frame[(frame["kind"] == "gather") & (frame["rank"] == 1)]
    assert of_gathers["bytes"].tolist() == [TAIL[0]] * 4
    assert of_gathers["expected_bytes"].isna().tolist() == [True, True, False, False]
    assert of_gathers["expected_bytes"].dropna().tolist() == [2048, 768]
    reduces = frame[frame["kind"] == "all_reduce"]
    assert reduces["expected_bytes"].tolist() == reduces["bytes"].tolist() == [256] * 40


def test_an_all_reduce_of_other_rows_than_the_graphs_is_an_error() -> None:
    made = records((PREFILL, 3, GRAPH))
    for record in made:
        record.collectives["bytes"][2] = 5 * 8 * 4  # of the prompts' 5 rows, without the padding
    said = r"step 0, ordinal 2: an all_reduce of 160 bytes, .* make 256"
    with pytest.raises(AttributionError, match=said):
        check_expected(join(made), SHAPE)


def test_profiled_decode_steps_are_not_taken_for_prompts_of_as_many_rows() -> None:
    """Both of 8 rows, 8 of which sample: gathers of 16 rows with prompts, of 8 without."""
    prompts, decode = records((PREFILL, 8, GRAPH)), records((DECODE, 8, GRAPH), seqs=8)
    pattern = []
    for before, after in zip(prompts, decode, strict=True):
        after.steps["step"] += 1
        after.collectives["step"] += 1
        pattern.append(
            replace(
                before,
                steps=np.concatenate([before.steps, after.steps]),
                collectives=np.concatenate([before.collectives, after.collectives]),
            )
        )
    profiles = []
    for rank, record in enumerate(decode):
        steps = np.repeat(record.steps, 2)
        steps["step"] = [20, 21]
        names = ["AllReduce"] * 5 + ["SendRecv", "Broadcast"]
        begin = np.arange(14) * 1000
        profiles.append(
            ProfileRecord(
                rank=rank, world=2, steps=steps, modes=record.modes, names=names * 2,
                begin_ns=begin, duration_ns=np.full(14, 500), splits=np.zeros(2, SPLIT_DTYPE),
            )
        )  # fmt: skip
    kernels = join_profiles(profiles, join(pattern))
    assert kernels.steps["step"].tolist() == [21]
    assert kernels.rows["bytes"].tolist() == [*REDUCES, 8 * 64 * 4, 8 * 8]
