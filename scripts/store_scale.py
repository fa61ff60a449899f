"""Times a question to a store of 60 million collective rows, beside pandas reading the files.

    python scripts/store_scale.py [--points 100] [--rows 600000] [--limit-gib 8] [--folder DIR]

Makes a run of that many points and rows of collectives each (some 3 GB; removed at the end unless
--folder is given), then asks for the median latency by site, TP and mode: by the harness, and by
pandas in three ways. Each is a process of its own, asked twice, so that the second finds the files
in memory. Prints markdown. Exit status 0 if all that came to an end gave the same medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.tables.console import markdown_table  # noqa: E402

LAYERS = 28
SITES = ["embed", *["attn.o_proj", "mlp.down_proj"] * LAYERS, "lm_head", "token_ids"]
"""The collectives of one step, in their order."""
KINDS = ["all_reduce"] * (1 + 2 * LAYERS) + ["gather", "broadcast"]
TP = (2, 4, 8)
MODES = ("eager", "compiled-layer", "compiled-model", "graph")
BY = ["site", "tp", "mode"]
GIB = 2**30


def make(run: Path, points: int, rows: int) -> None:
    """A run of `points` points that have `rows` collectives each, on TP ranks in turn."""
    for index in range(points):
        write_made(run, index, rows)


def write_made(run: Path, index: int, rows: int) -> None:
    """One point: latencies log-normal round a centre of its site, TP and mode, readings of 1 ns."""
    import numpy as np
    import pyarrow as pa

    from harness.tables.point_files import write_point

    draw = np.random.default_rng(index)
    point_id, tp, mode = f"{index:012x}", TP[index % len(TP)], MODES[index // 3 % len(MODES)]
    place = np.arange(rows)
    ordinal, rank = place % len(SITES), place // len(SITES) % tp
    centre = 8 + 3 * tp + 2 * MODES.index(mode) + ordinal % 7
    latency = np.round(centre * draw.lognormal(0, 0.4, rows), 3)
    transfer = np.round(latency * draw.uniform(0.5, 1, rows), 3)
    size = np.full(rows, 64 * 1024 * (1 + index % 5))

    def text(values: list[str]) -> pa.Array:
        return pa.array(values).take(pa.array(ordinal))

    def same(value: Any) -> pa.Array:
        return pa.repeat(value, rows)

    decode = place // (len(SITES) * tp) % 16 > 0
    key = {"run_id": run.name, "point_id": point_id, "process": 0, "repeat": 0}
    collectives = {name: same(value) for name, value in key.items()} | {
        "rank": rank,
        "pass": same("graph_timed" if mode == "graph" else "backlog"),
        "step": place // (len(SITES) * tp),
        "ordinal": ordinal,
        "phase": pa.array(["prefill", "decode"]).take(pa.array(decode.astype(int))),
        "kind": text(KINDS),
        "site": text(SITES),
        "layer": (ordinal - 1) // 2,
        "bytes": size,
        "expected_bytes": size,
        "dtype": same("bfloat16"),
        "world": same(tp),
        "mode": same(mode),
        "path": same("nccl"),
        "latency_us": latency,
        "floor_us": same(2.1),
        "below_floor": same(False),
        "transfer_us": transfer,
        "wait_us": latency - transfer,
        "algbw_GBps": size / transfer / 1e3,
        "busbw_GBps": size / transfer / 1e3 * 2 * (tp - 1) / tp,
        "transfer_source": same("ranks"),
        "source": same("stamps"),
    }
    row = {**key, "status": "ok", "index": index, "tp": tp, "batch": 1 + index % 5}
    points = {name: [value] for name, value in row.items()}
    write_point(run / "points" / point_id, {"points": points, "collectives": collectives})


def by_harness(run: Path) -> Any:
    from harness.store import load

    return load(run).quantiles("collectives", "latency_us", by=BY)


def one_of_them(run: Path) -> Any:
    from harness.store import load

    where = {"tp": 2, "mode": "graph", "phase": "decode"}
    return load(run).quantiles("collectives", "latency_us", by=["site"], where=where)


def by_pandas(run: Path, columns: list[str] | None, kept: list[str] | None) -> Any:
    """Reads `columns` of each file and keeps `kept` of them; None: all."""
    import pandas as pd

    files = sorted(run.glob("points/*/collectives.parquet"))
    parts = (pd.read_parquet(file, columns=columns) for file in files)
    frame = pd.concat([part if kept is None else part[kept] for part in parts])
    points = pd.concat(
        [
            pd.read_parquet(file.with_name("points.parquet"), columns=["point_id", "tp"])
            for file in files
        ]
    )
    frame = (
        frame.merge(points, on="point_id")
        if kept is None
        else frame.rename({"world": "tp"}, axis=1)
    )
    found = frame.groupby(BY)["latency_us"].agg(["size", "median"]).reset_index()
    return found.set_axis([*BY, "n", "p50"], axis=1)


FEW = ["site", "world", "mode", "latency_us"]
WAYS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "harness": (f'`load(run).quantiles("collectives", "latency_us", {BY})`', by_harness),
    "few": ("pandas, the four columns of each file", lambda run: by_pandas(run, FEW, FEW)),
    "one": ("pandas, each file whole, four columns kept", lambda run: by_pandas(run, None, FEW)),
    "whole": ("pandas, all files whole", lambda run: by_pandas(run, None, None)),
    "pruned": ('`by=["site"]` of one TP, mode and phase by `where`', one_of_them),
}


def ask(way: str, run: Path, limit: int) -> None:
    """In a process of its own: prints seconds from after the imports, those of its threads on a
    core, the most memory that was resident, and the medians."""
    import pandas  # noqa: F401
    import pyarrow.dataset  # noqa: F401

    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        frame = WAYS[way][1](run)
    except MemoryError:
        print(json.dumps({"s": None}, allow_nan=False))
        return
    taken, cpu = time.perf_counter() - begin, time.process_time() - cpu
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    said = {"s": taken, "cpu": cpu, "peak": peak, "medians": frame.values.tolist()}
    print(json.dumps(said, allow_nan=False))


def asked(way: str, run: Path, limit: int) -> dict[str, Any]:
    """The second of two processes that ask. SystemExit where one fails."""
    for _ in range(2):
        words = [sys.executable, __file__, "--ask", way, "--folder", str(run)]
        done = subprocess.run(
            [*words, "--limit-gib", str(limit / GIB)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        if done.returncode:
            raise SystemExit(f"{way}: a process ended with {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        if found["s"] is None:
            break
    return found


def report(run: Path, points: int, rows: int, limit: int) -> tuple[str, bool]:
    """(markdown, whether all medians are the same)."""
    import pandas as pd
    import pyarrow as pa

    from harness.machine.hardware import capture

    found = {way: asked(way, run, limit) for way in WAYS}
    lines = []
    for way, (name, _) in WAYS.items():
        one = found[way]
        figures = ["-", "-", f"> {limit / GIB:g}"]
        if one["s"] is not None:
            figures = [f"{one['s']:.1f}", f"{one['cpu']:.1f}", f"{one['peak'] / GIB:.2f}"]
        lines.append([name, *figures])
    ended = [found[way]["medians"] for way in WAYS if way != "pruned" and found[way]["s"]]
    alike = all(one == ended[0] for one in ended)
    machine = capture()
    disk = sum(file.stat().st_size for file in run.rglob("*.parquet"))
    parts = [
        f"{points * rows / 1e6:g} million rows of collectives over {points} points, "
        f"{disk / GIB:.1f} GiB of parquet; {len(ended[0])} medians by site, TP and mode, "
        f"{'equal in all ways that came to an end' if alike else 'DIFFERENT'}.",
        f"{machine['cpu']}, {machine['cpu_cores']} cores, Python {platform.python_version()}, "
        f"pandas {pd.__version__}, pyarrow {pa.__version__}, commit "
        f"{str(machine['git']['sha'])[:7]}, {datetime.now(UTC):%Y-%m-%d}; load of the last minute "
        f"{os.getloadavg()[0]:.1f}. Seconds from after the imports, files in the page cache.",
        markdown_table(["way", "s", "CPU s", "peak memory GiB"], lines),
    ]
    return "\n\n".join(parts), alike


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A question to a large store.")
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--rows", type=int, default=600_000, help="of collectives, a point")
    parser.add_argument("--limit-gib", type=float, default=8, help="memory that a process may take")
    parser.add_argument("--folder", type=Path, help="make the run here, and keep it")
    parser.add_argument("--ask", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    limit = int(options.limit_gib * GIB)
    if options.ask:
        ask(options.ask, options.folder, limit)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        run = options.folder or Path(scratch) / "made"
        make(run, options.points, options.rows)
        text, alike = report(run, options.points, options.rows, limit)
    print(text)
    return int(not alike)


if __name__ == "__main__":
    raise SystemExit(main())
