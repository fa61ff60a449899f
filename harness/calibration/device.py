"""What one device and its host do: rates, launches, and the floors of the timers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from harness.calibration.parts import DTYPE
from harness.observers import clocks

RUNS = 10
READ_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices
LAUNCHES, LAUNCH_ROUNDS = 200, 20  # the GPU's queue holds about 1,024
NODES = (100, 900)  # of the two graphs whose difference gives the time of a node
NODE_ROUNDS = 32
SPIN_US, SHORT_US = 20_000.0, 1_000.0

Rows = list[dict[str, Any]]


def figure(name: str, value: float, unit: str, n: int, source: str, how: str, **more: Any) -> Rows:
    return [
        {"name": name, "value": value, "unit": unit, "n": n, "source": source, "how": how, **more}
    ]


class DeviceMeter:
    """Measures parts in a process of its own; what `crew` calls there."""

    def __init__(self, comm: None, device: str) -> None:
        self._device = device
        self._kind = device.partition(":")[0]
        self._source = "events" if self._kind == "cuda" else "host"

    def __call__(self, name: str) -> Rows:
        measure: Callable[[], Rows] = getattr(self, f"_{name}")
        return measure()

    # -- rates ------------------------------------------------------------------------------------

    def _read(self) -> Rows:
        size = READ_BYTES[self._kind]
        values = torch.ones(size // 4, device=self._device)
        how = f"sum over {size} bytes of float32, fastest of {RUNS}"
        return self._rate("read_bytes_s", "B/s", size, values.sum, how)

    def _copy(self) -> Rows:
        size = READ_BYTES[self._kind] // 2
        source = torch.ones(size // 4, device=self._device)
        target = torch.empty_like(source)
        how = f"copy of {size} bytes, read and written ones counted, fastest of {RUNS}"
        return self._rate("copy_bytes_s", "B/s", 2 * size, partial(target.copy_, source), how)

    def _matmul(self) -> Rows:
        side, dtype = SIDE[self._kind], DTYPE[self._kind]
        a, b = (
            torch.randn(side, side, device=self._device, dtype=getattr(torch, dtype))
            for _ in range(2)
        )
        how = f"{side}^3 in {dtype}, fastest of {RUNS}"
        return self._rate(
            "matmul_flops_s", "1/s", 2 * side**3, lambda: a @ b, how, dtype=dtype
        )  # fmt: skip

    def _rate(
        self, name: str, unit: str, amount: float, run: Callable[[], Any], how: str, **more: Any
    ) -> Rows:
        for _ in range(3):
            run()
        rates = [amount / self._seconds(run) for _ in range(RUNS)]
        median = float(np.median(rates))
        return figure(name, max(rates), unit, RUNS, self._source, how, p50=median, **more)

    def _seconds(self, run: Callable[[], Any]) -> float:
        if self._kind == "cpu":
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3

    # -- launches ---------------------------------------------------------------------------------

    def _launch(self) -> Rows:
        """The host's cost of an elementwise operation; the GPU spins meanwhile, so that it is the
        enqueueing alone."""
        from harness.calibration.pairs import CudaGpu

        gpu, x = CudaGpu(self._device), torch.zeros(8, device=self._device)
        costs = []
        for _ in range(1 + LAUNCH_ROUNDS):
            gpu.spin(SPIN_US)
            begin = time.perf_counter()
            for _ in range(LAUNCHES):
                x.add_(1)
            costs.append((time.perf_counter() - begin) * 1e6 / LAUNCHES)
            gpu.synchronize()
        how = f"x.add_(1) of 8 floats from Python, {LAUNCHES} in a row behind a spin, median"
        return self._quantiles("launch_us", costs[1:], "host", how)

    def _graph_node(self) -> Rows:
        """Device time of one more node in a graph of kernels that do nothing, each behind the one
        before."""
        from harness.calibration.pairs import CudaGpu
        from harness.observers.stamp_kernels import Nothing

        gpu, nothing = CudaGpu(self._device), Nothing(self._device)
        replays = [gpu.capture(partial(_repeat, nothing, count)) for count in NODES]
        times = []
        for _ in range(2 + NODE_ROUNDS):
            of_graph = []
            for replay in replays:
                gpu.spin(SHORT_US)  # so that the host's launch is no part of it
                of_graph.append(self._seconds(replay))
            times.append((of_graph[1] - of_graph[0]) * 1e6 / (NODES[1] - NODES[0]))
        how = f"graph of {NODES[1]} less one of {NODES[0]} nodes, by events, median"
        return self._quantiles("graph_node_us", times[2:], self._source, how)

    def _quantiles(self, name: str, values: list[float], source: str, how: str) -> Rows:
        p10, p50, p90 = (float(np.percentile(values, q)) for q in (10, 50, 90))
        return figure(name, p50, "us", len(values), source, how, p10=p10, p90=p90)

    # -- timers -----------------------------------------------------------------------------------

    def _clock(self) -> Rows:
        def pair() -> int:
            begin = time.perf_counter_ns()
            return time.perf_counter_ns() - begin

        floor = clocks.floor_ns(pair, samples=1001) / 1e3
        return _timer("host", clocks.tick_ns() / 1e3, {"floor": (floor, "nothing, median")})

    def _stamps(self) -> Rows:
        from harness.calibration.pairs import device_pairs

        pairs = device_pairs(self._device)
        floors = {
            "floor": (pairs.floor_ns("eager") / 1e3, "a kernel of one thread, launched, mean"),
            "graph_floor": (pairs.floor_ns("graph") / 1e3, "the same in a CUDA graph, mean"),
        }
        return _timer("stamps", pairs.tick_ns / 1e3, floors)

    def _events(self) -> Rows:
        from harness.observers.events import CudaEvents

        tick, launched, replayed = CudaEvents(self._device).calibrate()
        floors = {
            "floor": (launched / 1e3, "a kernel of one thread, launched, mean"),
            "graph_floor": (replayed / 1e3, "the same in a CUDA graph, mean"),
        }
        return _timer("events", tick / 1e3, floors)


def _repeat(run: Callable[[], None], times: int) -> None:
    for _ in range(times):
        run()


def _timer(source: str, tick_us: float, floors: dict[str, tuple[float, str]]) -> Rows:
    rows = figure(f"{source}_tick_us", tick_us, "us", 1, source, "smallest step between readings")
    for name, (value, how) in floors.items():
        rows += figure(f"{source}_{name}_us", value, "us", 1, source, f"a pair round {how}")
    return rows
