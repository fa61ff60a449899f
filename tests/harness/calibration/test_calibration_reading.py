"""Times read off calibrated curves: between sizes, and at other numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from harness.calibration.curves import CalibrationError, Curves


def rows(world: int, times: dict[int, float | None], kind: str = "all_reduce") -> list[Any]:
    where = {"kind": kind, "path": "nccl", "mode": "graph", "world": world}
    return [{**where, "bytes": size, "transfer_us": us} for size, us in times.items()]


def time_us(curves: Curves, world: int, nbytes: int, kind: str = "all_reduce") -> float:
    return curves.time_us(kind, "nccl", "graph", world, nbytes)


def test_sizes_between_are_read_in_logarithms() -> None:
    curves = Curves(rows(2, {1024: 10.0, 4096: 10.0, 65_536: 160.0, 131_072: None}))
    assert time_us(curves, 2, 1024) == pytest.approx(10.0)
    assert time_us(curves, 2, 2000) == pytest.approx(10.0)
    assert time_us(curves, 2, 16_384) == pytest.approx(40.0)  # in proportion to the bytes
    assert curves.worlds("all_reduce", "nccl", "graph") == [2]


@pytest.mark.parametrize("size", [1023, 65_537, 131_072])
def test_no_size_outside_is_made_up(size: int) -> None:
    curves = Curves(rows(2, {1024: 10.0, 65_536: 160.0, 131_072: None}))
    with pytest.raises(CalibrationError, match=f"of {size} bytes: .* are 1024 to 65536 bytes"):
        time_us(curves, 2, size)


def test_what_was_not_calibrated_is_named_with_the_command() -> None:
    curves = Curves(rows(2, {1024: 10.0}))
    with pytest.raises(CalibrationError, match="no graph gather over nccl .* --world 2"):
        time_us(curves, 2, 1024, "gather")
    with pytest.raises(CalibrationError, match="no eager all_reduce over nccl .* --world 4"):
        curves.time_us("all_reduce", "nccl", "eager", 4, 1024)


SIZES = [2048, 8192, 262_144, 1 << 20]


def test_one_number_of_ranks_extends_by_its_bytes_alone() -> None:
    """8 us + 2 us a MiB that a link carries: of the payload 1 with two ranks, 1.5 with four."""
    curves = Curves(rows(2, {size: 8.0 + 2.0 * size / 2**20 for size in SIZES}))
    model = curves.model("all_reduce", "nccl", "graph")
    assert model.alpha_us == pytest.approx(8.0) and model.gamma_us == 0
    assert model.beta_us == pytest.approx(2.0 / 2**20)
    for size in SIZES:
        assert time_us(curves, 4, size) == pytest.approx(8.0 + 3.0 * size / 2**20)


def test_two_numbers_of_ranks_give_a_latency_a_doubling() -> None:
    """5 us + 3 us a doubling of the ranks + 2 us a carried MiB; measured at 2 and 4."""

    def us(n: int, size: int) -> float:
        return 5.0 + 3.0 * {2: 1, 4: 2, 8: 3}[n] + 2.0 * 2 * (n - 1) / n * size / 2**20

    curves = Curves([r for n in (2, 4) for r in rows(n, {size: us(n, size) for size in SIZES})])
    model = curves.model("all_reduce", "nccl", "graph")
    assert (model.alpha_us, model.gamma_us) == (pytest.approx(5.0), pytest.approx(3.0))
    assert time_us(curves, 8, 262_144) == pytest.approx(us(8, 262_144))
    assert time_us(curves, 4, 262_144) == pytest.approx(us(4, 262_144))


def test_another_number_of_ranks_keeps_the_shape_of_the_nearest_curve() -> None:
    """The measured curve has a hump at 8 KiB that no straight line has; it stays, in proportion."""
    times = {2048: 8.0, 8192: 20.0, 32_768: 8.0}
    curves = Curves(rows(2, times, "broadcast"))
    assert [time_us(curves, 4, s, "broadcast") for s in times] == [
        pytest.approx(us) for us in times.values()
    ]  # fmt: skip
