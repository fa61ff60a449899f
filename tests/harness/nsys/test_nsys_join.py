"""Kernels joined to (rank, step, ordinal, site), in exports written by hand with known times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.comm.types import Site
from harness.nsys.join import Profile, join
from harness.nsys.place import JoinError
from harness.nsys.reader import read
from harness.nsys.results import idle_us, kernels, ranges
from tests.support.nsys_export import KERNEL, Call, Export, session, tid_of

REDUCES: list[Call] = [
    ("all_reduce", site, 4096) for site in ("embed", "attn.o_proj", "mlp.down_proj")
]
STEPS = [("prefill", 8, REDUCES), ("decode", 8, REDUCES), ("replay", 8, REDUCES),
         ("replay", 8, REDUCES)]  # fmt: skip
LAUNCHED_NS, REPLAYED_NS = 8_000, 9_000


def times(step: int, ordinal: int, rank: int) -> int:
    """Rank 1 waits 60 us + 1 us a place in launched steps; in replays rank 0 waits 0.5 us."""
    if step < 2:
        return LAUNCHED_NS + (60_000 + 1_000 * ordinal) * rank
    return REPLAYED_NS + 500 * (1 - rank)


def made(path: Path, export: Export | None = None, **how: object) -> Profile:
    export = session(Export(), STEPS, times) if export is None else export
    return join(read(export.write(path / "export.sqlite", **how)))  # type: ignore[arg-type]


def check(profile: Profile) -> None:
    """Everything that the session of STEPS has."""
    joined = profile.joined
    assert joined.steps["step"].tolist() == [0, 1, 2, 3]
    assert joined.steps["phase"].tolist() == [0, 1, 1, 1]
    assert joined.steps["batch"].tolist() == [8] * 4
    assert joined.replayed.tolist() == [False, False, True, True]
    assert joined.rows["step"].tolist() == [s for s in range(4) for _ in range(3)]
    assert joined.rows["ordinal"].tolist() == [0, 1, 2] * 4
    assert joined.rows["site"].tolist() == [Site.EMBED, Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ] * 4
    assert joined.rows["bytes"].tolist() == [4096] * 6 + [-1] * 6  # a graph may have padded
    assert joined.layer.tolist() == [-1, 0, 0] * 4
    assert joined.transfer_us.tolist() == [8.0] * 6 + [9.0] * 6
    assert joined.wait_us[:, 0].tolist() == [0.0] * 6 + [0.5] * 6
    assert joined.wait_us[:, 1].tolist() == [60.0, 61.0, 62.0] * 2 + [0.0] * 6
    assert joined.latency_us[:, 1].tolist() == [68.0, 69.0, 70.0] * 2 + [9.0] * 6
    assert joined.source == "nsys" and profile.notes == ()
    # From the first gemm to the end of the last all-reduce.
    assert joined.step_us.tolist() == [[50.0, 112.0]] * 2 + [[51.5, 51.0]] * 2
    # 1 us before each collective and, of the 20 us from one to the next, what is left before the
    # gemm: on rank 0 twice 18 - 8 or 18 - 9.5. On rank 1 launched ones last until after the next.
    assert idle_us(profile.views[0]).tolist() == [23.0, 23.0, 20.0, 20.0]
    assert idle_us(profile.views[1]).tolist() == [1.0, 1.0, 21.0, 21.0]


def test_the_split_of_two_ranks(tmp_path: Path) -> None:
    profile = made(tmp_path)
    check(profile)
    assert [(v.rank, v.pid, v.device) for v in profile.views] == [(0, 998, 0), (1, 999, 1)]
    # Both ranks' kernels in one median would say 38 us: neither a transfer nor a wait.
    launched = profile.joined.latency_us[:6]
    assert np.median(launched) == 38.0
    assert np.median(launched, axis=0).tolist() == [8.0, 69.0]


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_rows_says_nothing(tmp_path: Path, seed: int) -> None:
    check(made(tmp_path, shuffled=seed))


def test_texts_in_the_rows_themselves(tmp_path: Path) -> None:
    check(made(tmp_path, session(Export(registered=False), STEPS, times)))


def test_ranks_are_devices_not_process_numbers(tmp_path: Path) -> None:
    profile = made(tmp_path, session(Export(), STEPS, times, pids=(2000, 77)))
    check(profile)
    assert [(v.rank, v.pid) for v in profile.views] == [(0, 2000), (1, 77)]


def test_other_processes_are_left_aside(tmp_path: Path) -> None:
    """A parent that was not spawned, with ranges of the same text in a domain of its own, and a
    process that runs kernels without steps."""
    export = session(Export(), STEPS, times)
    export.process(500, domain=2, name="other")
    export.range("step/decode", 500, 0, 900)
    export.range("all_reduce/embed", 500, 10, 20, 4096)
    export.process(600)
    export.range("all_reduce/embed", 600, 10, 20, 4096)
    export.kernel(KERNEL["all_reduce"], 600, 0, 100, 200, export.launch(600, 15))
    profile = made(tmp_path, export)
    check(profile)
    found = ranges(profile)
    assert found[found["rank"].isna()]["pid"].tolist() == [500, 500, 600]
    assert set(kernels(profile)["rank"]) == {0, 1}


def test_kernels_and_ranges_by_step(tmp_path: Path) -> None:
    export = session(Export(), STEPS, times)
    outside = export.launch(998, 990_000)
    export.kernel(KERNEL["all_reduce"], 998, 0, 995_000, 996_500, outside)
    elsewhere = export.launch(999, 150, thread=5)  # in time within a step, on another thread
    export.kernel("copy", 999, 1, 170_000, 171_000, elsewhere)
    profile = made(tmp_path, export)
    (note,) = profile.notes
    assert note.startswith("1 communication kernels lie outside of all steps")
    found = kernels(profile)
    assert len(found) == 2 * 4 * 6 + 2
    assert found["step"].isna().sum() == 2
    assert found.groupby(["rank", "step"]).size().tolist() == [6] * 8
    of_step = found[(found["rank"] == 1) & (found["step"] == 2) & found["ordinal"].notna()]
    assert of_step["ordinal"].tolist() == [0, 1, 2]
    assert of_step["graph_node"].tolist() == [1 << 33, (1 << 33) + 2, (1 << 33) + 4]
    assert of_step["kernel_us"].tolist() == [9.0] * 3
    assert of_step["begin_us"].tolist() == [2200.0, 2220.0, 2240.0]
    named = ranges(profile)
    assert named.columns.tolist() == ["pid", "domain", "category", "message", "payload", "rank",
                                      "step", "begin_us", "host_us"]  # fmt: skip
    embed = named[(named["message"] == "all_reduce/embed") & (named["rank"] == 1)]
    assert embed["step"].tolist() == [0, 1]
    assert embed["payload"].tolist() == [4096, 4096] and set(embed["category"]) == {"all_reduce"}
    assert embed["host_us"].tolist() == [0.05, 0.05]
    assert embed["begin_us"].tolist() == [0.13, 1000.13]


def test_a_step_that_the_capture_cut_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    export = session(Export(), STEPS, times)
    events = export.rows["NVTX_EVENTS"]
    last = max(i for i, row in enumerate(events) if row[2] == 59 and row[7] == tid_of(999))
    events[last] = (events[last][0], None, *events[last][2:])
    profile = made(tmp_path, export)
    assert profile.left_out.tolist() == [False, False, False, True]
    assert profile.joined.steps["step"].tolist() == [0, 1, 2]
    assert profile.notes[0] == "1 steps had not ended when the capture did"
    assert ranges(profile)["host_us"].isna().sum() == 1


def test_kernels_of_an_unknown_kind_take_their_place(tmp_path: Path) -> None:
    """NCCL runs what it has no kernel of its own for in one called Generic."""
    export = session(Export(), STEPS, times)
    export._strings = {
        text.replace("AllReduce_Sum_bf16_RING_LL", "Generic_4"): n
        for text, n in export._strings.items()
    }
    check(made(tmp_path, export))


def drop(export: Export, pid: int, step: int, which: int, count: int = 1) -> Export:
    """Without communication kernels of a step: the `which`-th and those behind it."""
    rows = export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    own = [row for row in rows if row[5] == (1 << 48 | pid << 24) and row[0] // 1_000_000 == step
           and row[7] != export.string("gemm")]  # fmt: skip
    for row in own[which : which + count]:
        rows.remove(row)
    return export


def test_fewer_kernels_than_collectives_name_the_step(tmp_path: Path) -> None:
    for step, said in (
        (1, r"step 1 \(step/decode\) of rank 1, ordinal 2: 0 communication kernels launched "
            r"within the range all_reduce/mlp.down_proj, where there must be one"),
        (3, r"step 3 \(step/replay\): 2 communication kernels; no launched step"),
    ):  # fmt: skip
        with pytest.raises(JoinError, match=said):
            made(tmp_path, drop(session(Export(), STEPS, times), 999, step, 2))


def test_more_kernels_than_collectives_name_the_step(tmp_path: Path) -> None:
    export = session(Export(), STEPS, times)
    again = export.launch(998, 1_000_000 + 50)  # within the range of ordinal 0
    export.kernel(KERNEL["all_reduce"], 998, 0, 1_210_000, 1_211_000, again)
    with pytest.raises(JoinError, match=r"step 1 \(step/decode\) of rank 0, ordinal 0: 2 commun"):
        made(tmp_path, export)
    export = session(Export(), STEPS, times)
    round_the_seam = export.launch(998, 1_000_000 + 15)  # in the step, in no collective's range
    export.kernel(KERNEL["all_reduce"], 998, 0, 1_210_000, 1_211_000, round_the_seam)
    with pytest.raises(JoinError, match=r"step 1 .* of rank 0: 1 communication kernels launched "
                                        r"outside of the ranges of its 3 collectives"):  # fmt: skip
        made(tmp_path, export)


def test_a_kernel_of_another_kind_than_its_range(tmp_path: Path) -> None:
    calls: list[Call] = [("gather", "lm_head", 64)]
    export = session(Export(), [("decode", 1, calls)], times)
    export._strings = {
        text.replace("SendRecv", "Broadcast"): n for text, n in export._strings.items()
    }
    said = r"step 0 \(step/decode\) of rank 0: 1 communication kernels for 1 .* of other kinds"
    with pytest.raises(JoinError, match=said):
        made(tmp_path, export)


def test_a_graph_whose_kernels_change_their_order_is_refused(tmp_path: Path) -> None:
    """Two streams inside one graph: the n-th to begin is then not always the same node."""
    export = session(Export(), STEPS, times)
    rows = export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    first, second = [
        i for i, row in enumerate(rows)
        if row[5] == (1 << 48 | 998 << 24) and row[0] // 1_000_000 == 3 and row[8] is not None
        and row[8] % 2 == 0
    ][:2]  # fmt: skip
    rows[first], rows[second] = (
        (*rows[first][:8], rows[second][8]), (*rows[second][:8], rows[first][8])
    )  # fmt: skip
    with pytest.raises(JoinError, match=r"step 3 .* began in another order than in step 2"):
        made(tmp_path, export)


def test_two_ranks_without_one_communication_kernel_are_refused(tmp_path: Path) -> None:
    """Replays alone, of a graph whose all-reduce has a name that is not known here: nothing else
    of the export would say that kernels are missing."""
    replays: list[Call] = []
    export = session(Export(), [("replay", 8, replays)] * 3, times)
    for pid, device in ((998, 0), (999, 1)):
        for step in range(3):
            at = 1_000_000 * step + 300_000
            call = export.launch(pid, 1_000_000 * step + 100 * device + 30, "cudaGraphLaunch")
            export.kernel("cross_device_reduce_1stage", pid, device, at, at + 9_000, call, 7)
    with pytest.raises(JoinError, match=r"2 ranks ran steps without one communication kernel \("):
        made(tmp_path, export)


def test_a_kernel_that_begins_before_its_launch_keeps_its_place(tmp_path: Path) -> None:
    """The clocks of host and device are matched to some microseconds: what was launched in a range
    is joined by its launch, and its own time stays what it was."""
    export = session(Export(), STEPS, times)
    rows = export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"] = [
        (row[0] - 205_000, row[1] - 205_000, *row[2:]) for row in rows
    ]
    profile = made(tmp_path, export)
    kernels_of, steps = profile.views[0].kernels, profile.views[0].steps
    first = kernels_of[kernels_of["step"] == 1].iloc[0]
    assert first["start_ns"] < steps["start_ns"].iloc[1], "it began before its step's range"
    check(profile)


def test_ranks_that_differ_or_cannot_be_told_apart(tmp_path: Path) -> None:
    export = session(Export(), STEPS, times)
    export.range("step/decode", 998, 5_000_000, 5_000_100, 8)
    with pytest.raises(JoinError, match=r"the ranks have \[5, 4\] steps"):
        made(tmp_path, export)
    export = session(Export(), STEPS, times)
    rows = export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"] = [(*row[:2], 0, *row[3:]) for row in rows]
    with pytest.raises(JoinError, match="processes 998 and 999 both ran steps on device 0"):
        made(tmp_path, export)
    export = session(Export(), STEPS, times)
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"] = [r for r in rows if r[5] == (1 << 48 | 998 << 24)]
    with pytest.raises(JoinError, match="process 999 opened step ranges and ran no kernel"):
        made(tmp_path, export)


def test_missing_tables_are_named(tmp_path: Path) -> None:
    for table, said in (
        ("CUPTI_ACTIVITY_KIND_KERNEL", r"no kernels \(missing tables: CUPTI_ACTIVITY_KIND_K"),
        ("NVTX_EVENTS", r"no range step/\* of the domain engine .*nsys 2025.3.2.0.*nvtx 0.2.11"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", r"CUPTI_ACTIVITY_KIND_RUNTIME is missing"),
    ):  # fmt: skip
        with pytest.raises(JoinError, match=said):
            made(tmp_path, without=[table])


def test_graphs_recorded_as_a_whole_are_named(tmp_path: Path) -> None:
    export = session(Export(), STEPS, times)
    export.rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"] = [(0, 9, 0, 1, 1), (0, 9, 1, 1, 1)]
    rows = export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"] = [row for row in rows if row[8] is None]
    with pytest.raises(JoinError, match="2 launches of CUDA graphs .* --cuda-graph-trace=node"):
        made(tmp_path, export)
