"""Hand-made records: every latency, wait and share has one right value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.comm.fused import FUSED
from engine.comm.types import Kind, Site
from harness.measuring.attribution import AttributionError, bandwidth, join, shares
from harness.measuring.expected import check_expected, expected_bytes
from harness.measuring.step_times import StepTimes
from harness.observers.records import RankRecord
from tests.support.fake_backend import DECODE, PREFILL, SHAPE, host_records

STEPS = [(PREFILL, 6, 2), (DECODE, 2, 2), (DECODE, 2, 2)]


def edited(records: list[RankRecord], rank: int, **columns: tuple[int, object]) -> list[RankRecord]:
    """A copy in which rank's rows have `column=(row, value)`."""
    rows = records[rank].collectives.copy()
    for name, (row, value) in columns.items():
        rows[name][row] = value
    return [replace(r, collectives=rows) if r.rank == rank else r for r in records]


def test_known_delays_give_exact_transfer_and_wait() -> None:
    joined = join(host_records(3, STEPS, transfer_ns=5_000, wait_ns=2_000_000))
    reduces = joined.is_kind(Kind.ALL_REDUCE)
    assert joined.transfer_us[reduces].tolist() == [5.0] * 15
    assert joined.latency_us[reduces].tolist() == [[2005.0, 2005.0, 5.0]] * 15
    assert joined.wait_us[reduces].tolist() == [[2000.0, 2000.0, 0.0]] * 15
    assert np.isnan(joined.transfer_us[~reduces]).all()
    assert np.isnan(joined.wait_us[~reduces]).all()
    assert joined.latency_us[~reduces].tolist() == [[2005.0, 2005.0, 5.0]] * 6


def test_rooted_kinds_take_their_transfer_from_the_root_s_aligned_run() -> None:
    """3 us aligned at the root: rank 0 waited for what is above that; a sender says nothing."""
    records = host_records(3, STEPS, transfer_ns=5_000, wait_ns=2_000_000)
    gather, size = int(Kind.GATHER), int(records[0].collectives["bytes"][5])
    for rank, record in enumerate(records):
        record.rooted_ns = {(gather, size): 3_000.0 + 1_000 * rank}
    joined = join(records)
    known = joined.is_kind(Kind.GATHER) & (joined.rows["bytes"] == size)
    assert joined.calibrated.tolist() == known.tolist() and known.sum() == 3
    assert joined.transfer_us[known].tolist() == [3.0] * 3
    assert joined.wait_us[known, 0].tolist() == [2002.0] * 3
    assert np.isnan(joined.wait_us[known, 1:]).all()
    others = ~known & ~joined.is_kind(Kind.ALL_REDUCE)
    assert np.isnan(joined.transfer_us[others]).all() and others.sum() == 3
    step = StepTimes(joined.steps["phase"], np.full((3, 3), 1e4), "stamps", "step")
    bare = join(host_records(3, STEPS, transfer_ns=5_000, wait_ns=2_000_000))
    for name, values in shares(joined, step, None).items():  # shares are the all-reduces'
        assert np.array_equal(values, shares(bare, step, None)[name])


def test_a_delay_on_one_rank_is_waiting_on_the_others_and_no_transfer() -> None:
    calm, late = (join(host_records(2, STEPS, wait_ns=w)) for w in (0, 2_000_000))
    assert np.array_equal(calm.transfer_us, late.transfer_us, equal_nan=True)
    assert np.nansum(calm.wait_us) == 0
    assert np.nansum(late.wait_us) == 2000.0 * 15


@pytest.mark.parametrize(("world", "most"), [(2, 0.25), (4, 0.4725), (8, 0.6501)])
def test_whole_ticks_take_a_part_of_one_off_the_minimum(world: int, most: float) -> None:
    """Ranks that need the same time, read by a timer of whole ticks at random phases: each reads
    one tick more with probability p, the minimum only if all do. Short by p - p^n of a tick on
    average, and no more than at p = n^(-1/(n-1))."""
    tick, worst = 1024, world ** (-1 / (world - 1))
    assert worst - worst**world == pytest.approx(most, abs=1e-4)
    rng = np.random.default_rng(0)
    for part in (0.0, 0.25, worst, 0.9):
        lasts = (8 + part) * tick
        records = host_records(world, [(DECODE, 2, 2)] * 600)
        for record in records:
            begin = rng.uniform(0, tick, len(record.collectives))
            record.collectives["before_ns"] = begin // tick * tick + tick
            record.collectives["after_ns"] = (begin + lasts) // tick * tick + tick
        joined = join([replace(record, floor_ns=0) for record in records])
        reduces = joined.is_kind(Kind.ALL_REDUCE)
        each = joined.latency_us[reduces].mean() * 1e3 / tick
        assert each == pytest.approx(8 + part, abs=0.02)
        shortest = joined.transfer_us[reduces].mean() * 1e3 / tick
        assert shortest - (8 + part) == pytest.approx(part**world - part, abs=0.04)


def test_layers_follow_from_the_order_in_the_step() -> None:
    joined = join(host_records(2, STEPS[:1]))
    assert joined.rows["ordinal"].tolist() == list(range(7))
    assert joined.layer.tolist() == [-1, 0, 0, 1, 1, -1, -1]
    in_layers = joined.layer >= 0
    assert (joined.layer[in_layers] == (joined.rows["ordinal"][in_layers] - 1) // 2).all()
    assert join(host_records(2, STEPS)).layer.tolist() == [-1, 0, 0, 1, 1, -1, -1] * 3


def test_shuffled_rows_and_ranks_join_to_the_same() -> None:
    records = host_records(3, STEPS, wait_ns=7_000)
    rng = np.random.default_rng(0)
    mixed = [
        replace(
            r,
            collectives=rng.permutation(r.collectives),
            steps=rng.permutation(r.steps),
        )
        for r in reversed(records)
    ]
    a, b = join(records), join(mixed)
    assert np.array_equal(a.latency_us, b.latency_us)
    assert np.array_equal(a.rows, b.rows) and np.array_equal(a.steps, b.steps)
    assert np.array_equal(a.step_index, b.step_index)


def test_a_missing_row_is_an_error_that_names_it() -> None:
    records = host_records(2, STEPS)
    records[1] = replace(records[1], collectives=np.delete(records[1].collectives, 10))
    with pytest.raises(AttributionError, match=r"step 1, ordinal 3: rank 1 lacks this row"):
        join(records)
    with pytest.raises(AttributionError, match=r"step 1, ordinal 3: rank 1 alone has this row"):
        join([replace(records[1], rank=0), replace(host_records(2, STEPS)[0], rank=1)])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("bytes", 12, r"step 1, ordinal 2: bytes is 64 on rank 0 and 12 on rank 1"),
        (
            "kind",
            Kind.GATHER,
            r"step 1, ordinal 2: kind is all_reduce on rank 0 and gather on rank 1",
        ),
        ("site", Site.EMBED, r"step 1, ordinal 2: site is mlp.down_proj on rank 0 and embed on"),
        ("dtype", 1, r"step 1, ordinal 2: dtype is float32 on rank 0 and int64 on rank 1"),
        ("after_ns", 0, r"step 1, ordinal 2: did not end on rank 1"),
    ],
)
def test_ranks_that_disagree_are_an_error(column: str, value: int, message: str) -> None:
    with pytest.raises(AttributionError, match=message):
        join(edited(host_records(2, STEPS), 1, **{column: (9, value)}))


def test_missing_ranks_and_doubled_rows_are_errors() -> None:
    records = host_records(3, STEPS)
    with pytest.raises(AttributionError, match=r"records of ranks \[0, 2\]"):
        join([records[0], records[2]])
    doubled = replace(records[1], collectives=np.repeat(records[1].collectives, 2))
    with pytest.raises(AttributionError, match=r"rank 1 recorded a \(step, ordinal\) twice"):
        join([records[0], doubled, records[2]])
    steps = records[1].steps.copy()
    steps["tokens"][2] = 9
    with pytest.raises(AttributionError, match=r"step 2: tokens is 2 on rank 0 and 9 on rank 1"):
        join([records[0], replace(records[1], steps=steps), records[2]])


def test_a_result_below_the_floor_is_kept_below_zero() -> None:
    records = edited(host_records(2, STEPS), 1, after_ns=(0, 41))  # before 1, floor 100
    joined = join(records)
    assert joined.latency_us[0].tolist() == [5.0, pytest.approx(-0.06)]
    assert joined.transfer_us[0] == pytest.approx(-0.06)
    assert joined.wait_us[0].tolist() == [pytest.approx(5.06), 0.0]
    algbw, busbw = bandwidth(joined)
    assert np.isnan(algbw[0]) and np.isnan(busbw[0]) and not np.isnan(algbw[1])


def test_a_time_that_holds_a_norm_gives_no_bandwidth() -> None:
    records = [replace(r, paths=(FUSED,)) for r in host_records(2, STEPS)]
    joined = join(records)
    assert (joined.transfer_us[joined.is_kind(Kind.ALL_REDUCE)] > 0).all()
    assert np.isnan(bandwidth(joined)).all()


def test_bandwidths_follow_their_definitions() -> None:
    joined = join(host_records(4, STEPS[:1], transfer_ns=2_000, wait_ns=6_000))
    algbw, busbw = bandwidth(joined)
    size, gathered, ids = 6 * 8 * 4, 2 * 64 * 4, 16
    assert algbw[:5] == pytest.approx([size / 2.0 / 1e3] * 5)  # waiting moves no bytes
    assert busbw[:5] == pytest.approx([size / 2.0 / 1e3 * 1.5] * 5)  # 2 (4-1) / 4
    assert (algbw[5], busbw[5]) == pytest.approx((gathered / 8e3, gathered / 8e3 * 0.75))
    assert (algbw[6], busbw[6]) == pytest.approx((ids / 8e3, ids / 8e3))


def clean(world: int, *steps: tuple[int, int]) -> StepTimes:
    """Clean steps of (phase, ns), the same on all ranks."""
    phase = np.array([phase for phase, _ in steps])
    us = np.array([ns / 1e3 for _, ns in steps])
    return StepTimes(phase, np.stack([us] * world, axis=1), "host", "plain")


def test_shares_are_of_as_many_clean_steps() -> None:
    """7 collectives a step, of them 5 all-reduces of 5 us transfer; all 7 last 25 us on rank 0 and
    5 us on rank 1. Clean steps: prefill 1000 us; decode 400 us on the mean of three."""
    joined = join(host_records(2, STEPS, transfer_ns=5_000, wait_ns=20_000))
    plain = clean(2, (PREFILL, 1_000_000), (DECODE, 300_000), (DECODE, 400_000), (DECODE, 500_000))
    decode = shares(joined, plain, DECODE)
    assert decode is not None
    assert decode["comm_share"].tolist() == pytest.approx([7 * 25 / 400, 7 * 5 / 400])
    assert decode["transfer_share"].tolist() == pytest.approx([5 * 5 / 400] * 2)
    assert decode["wait_share"].tolist() == pytest.approx([5 * 20 / 400, 0])
    whole = shares(joined, plain, None)
    assert whole is not None
    assert whole["comm_share"].tolist() == pytest.approx([3 * 175 / 1800, 3 * 35 / 1800])
    assert shares(joined, clean(2, (PREFILL, 1_000_000)), DECODE) is None
    assert shares(joined, plain, 2) is None


def test_one_rank_has_no_collectives_and_a_share_of_zero() -> None:
    joined = join(host_records(1, STEPS))
    check_expected(joined, SHAPE)
    assert joined.latency_us.shape == (0, 1)
    found = shares(joined, clean(1, (PREFILL, 1000), (DECODE, 1000)), None)
    assert found is not None and [found[k].tolist() for k in found] == [[0.0]] * 3


def test_expected_counts_and_bytes() -> None:
    joined = join(host_records(2, [*STEPS, (PREFILL, 5, 0)]))
    check_expected(joined, SHAPE)
    wanted = expected_bytes(joined, SHAPE)
    assert wanted[:7].tolist() == [6 * 8 * 4] * 5 + [2 * 64 * 4, -1]
    assert wanted[21:].tolist() == [5 * 8 * 4] * 5  # a prompt chunk that ends no prompt


@pytest.mark.parametrize(
    ("world", "rows", "message"),
    [
        (
            2,
            slice(1, None),
            r"step 0 \(prefill\): 2 all_reduce/attn.o_proj, .* 1 all_reduce/embed, 2",
        ),
        (2, [*range(5), 6, *range(7, 21)], r"step 0 .*a model of 2 layers at tp=2 has .*gather"),
        (2, [*range(21), 20], "twice"),
    ],
)
def test_a_step_with_other_collectives_than_the_model_is_an_error(
    world: int, rows: slice | list[int], message: str
) -> None:
    records = [replace(r, collectives=r.collectives[rows]) for r in host_records(world, STEPS)]
    with pytest.raises(AttributionError, match=message):
        check_expected(join(records), SHAPE)


def test_collectives_on_one_rank_and_wrong_sizes_are_errors() -> None:
    alone = replace(host_records(2, STEPS)[0], world=1)
    with pytest.raises(AttributionError, match=r"a model of 2 layers at tp=1 has no collectives"):
        check_expected(join([alone]), SHAPE)
    records = host_records(2, STEPS)
    for rank in range(2):
        records = edited(records, rank, bytes=(8, 128))
    with pytest.raises(
        AttributionError, match=r"step 1, ordinal 1: an all_reduce of 128 bytes, .* make 64"
    ):
        check_expected(join(records), SHAPE)
