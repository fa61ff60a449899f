"""What a profile says, as printed tables; nothing in them is taken over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.comm.types import Kind, Site
from harness.nsys.join import Profile
from harness.nsys.place import RankView
from harness.nsys.results import idle_us, ranges
from harness.observers.nvtx import REPLAY
from harness.observers.records import DECODE
from harness.tables.console import print_line, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from harness.rows.figures import FigureRows

TOP = 12  # kernels by name that are printed, those with the most time; and sizes of collectives
Section = tuple[str, list[str], list[list[str]]]
"""(what is said above it, headings, rows of text)"""


def print_profile(console: Console, profile: Profile, figures: FigureRows | None = None) -> None:
    """The tables of a profile; with the figures of its run, the stamps beside the kernels."""
    for line in head(profile):
        print_line(console, line)
    made = [collectives, steps, kernels, nvtx]
    sections = [make(profile) for make in made]
    if figures is not None:
        sections.insert(1, stamps(figures))
    for said, headings, rows in sections:
        if rows:
            print_line(console, f"\n{said}")
            print_table(console, headings, rows, wrapped="", right=_figures(headings))


def head(profile: Profile) -> list[str]:
    """The file, its ranks, what it lacks and what was left out."""
    export, views = profile.export, profile.views
    ranks = ", ".join(f"{v.rank} (pid {v.pid}, device {v.device})" for v in views)
    graphs = int(export.kernels["graph_node"].notna().sum())
    lines = [
        f"{export.path}: nsys {export.product or 'of a version that is not given'}; ranks {ranks}",
        f"{len(profile.joined.steps)} steps, {len(profile.joined.rows)} collectives a rank; "
        f"{len(export.kernels)} kernels, {graphs} of them in CUDA graphs; "
        f"{len(export.ranges)} NVTX ranges",
    ]
    if export.missing:
        lines.append(f"tables that the export lacks: {', '.join(export.missing)}")
    return [*lines, *profile.notes]


def collectives(profile: Profile) -> Section:
    """Kernel times by site, with all sites of a size together, split into transfer and waiting."""
    joined, rows = profile.joined, profile.joined.rows
    names = _how(profile.views[0])[~profile.left_out][joined.step_index]
    graphs = _graphs(profile)[joined.step_index]
    batch = joined.steps["batch"][joined.step_index]
    alike: dict[tuple[str, int, int, int, int], dict[int, list[int]]] = {}
    for place, row in enumerate(rows):
        size = int(row["bytes"])
        # Replays of one graph have one size, also where it is not known.
        same = (0, 0) if size >= 0 else (int(batch[place]), int(graphs[place]))
        key = str(names[place]), int(row["kind"]), size, *same
        alike.setdefault(key, {}).setdefault(int(row["site"]), []).append(place)
    groups = []
    often = sorted(alike, key=lambda key: -sum(map(len, alike[key].values())))[:TOP]
    for (how, kind, size, sequences, _), of_site in sorted((key, alike[key]) for key in often):
        known = f"{size:,}" if size >= 0 else f"(batch {sequences})" if sequences else "-"
        groups += [(how, kind, Site(site).label, known, of_site[site]) for site in sorted(of_site)]
        if len(of_site) > 1:
            together = [place for places in of_site.values() for place in places]
            groups.append((how, kind, "these sites", known, together))
    table = []
    for how, kind, site, known, places in groups:
        kernel, wait = joined.latency_us[places], joined.wait_us[places]
        transfer = joined.transfer_us[places]
        rooted = bool(np.isnan(transfer).all())
        table.append(
            [how, Kind(kind).label, site, known, str(len(places)),
             _by_rank(np.median(kernel, axis=0)),
             "-" if rooted else _us(np.median(transfer)),
             "-" if rooted else _by_rank(np.median(wait, axis=0)),
             "-" if rooted else _by_rank(wait.max(axis=0))]
        )  # fmt: skip
    said = (
        "collectives: medians over iterations; transfer is the shortest kernel among the ranks of "
        "each, wait what a rank's kernel takes above it"
    )
    if len(alike) > TOP:
        said += f"; the {TOP} most frequent of {len(alike)} sizes"
    headings = ["", "kind", "site", "bytes", "n", "kernel us\nby rank", "transfer\nus",
                "wait us\nby rank", "longest wait\nby rank"]  # fmt: skip
    return said, headings, table


def _how(view: RankView) -> np.ndarray:
    """[S] of the view's steps: launched, or what a replay's range is called."""
    what = view.steps["what"]
    return what.where(what.str.startswith(REPLAY), "launched").to_numpy(object)


def _graphs(profile: Profile) -> np.ndarray:
    """[S] of the joined steps: the lowest node of rank 0's communication kernels, which tells the
    graphs of prompts apart; 0 where steps decode, whose batch tells, or were launched."""
    view = profile.views[0]
    own = view.kernels[view.kernels["communication"] & (view.kernels["step"] >= 0)]
    nodes = own.groupby("step")["graph_node"].min().reindex(range(len(view.steps))).fillna(0)
    nodes = nodes.to_numpy(np.int64)[~profile.left_out]
    return np.where(profile.joined.steps["phase"] == DECODE, 0, nodes)


def stamps(figures: FigureRows) -> Section:
    """How far the same run's stamps lie above the kernels, site by site."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in figures.rows:
        if row["name"] == "stamp_vs_cupti_us":
            key = row["kind"], row["site"], row["bytes"]
            found.setdefault(key, {})[row["ranks"]] = row["value"]
    table = []
    for (kind, site, size), by in found.items():
        ranks = [value for ranks, value in by.items() if ranks != "min"]
        table.append([kind, site, f"{size:,}", _us(by["min"]), _by_rank(ranks)])
    said = (
        "stamps less kernels, decode steps: difference of the two passes' medians; the minimum "
        "over ranks holds no waiting, which differs from pass to pass"
    )
    return said, ["kind", "site", "bytes", "of the minimum\nus", "by rank\nus"], table


def steps(profile: Profile) -> Section:
    """Steps by what they ran: kernels, device time, idle time between kernels, communication."""
    kept = ~profile.left_out
    whats = profile.views[0].steps["what"].to_numpy()[kept]
    idle = np.stack([idle_us(view) for view in profile.views], axis=1)[kept]
    count, comm = (
        np.stack(list(each), axis=1)[kept] for each in (_counts(profile), _comm(profile))
    )
    table = []
    for what in dict.fromkeys(whats):
        own = whats == what
        medians = [
            _by_rank(np.median(values[own], axis=0), digits)
            for values, digits in ((count, 0), (profile.joined.step_us, 1), (idle, 1), (comm, 1))
        ]
        table.append([f"step/{what}", str(int(own.sum())), *medians])
    headings = ["range", "n", "kernels\nby rank", "device us\nby rank", "no kernel us\nby rank",
                "communication us\nby rank"]  # fmt: skip
    said = "steps: medians; device time is first kernel's begin to last kernel's end"
    return said, headings, table


def _counts(profile: Profile) -> Iterator[np.ndarray]:
    for view in profile.views:
        inside = view.kernels["step"][view.kernels["step"] >= 0]
        yield np.bincount(inside, minlength=len(view.steps))


def _comm(profile: Profile) -> Iterator[np.ndarray]:
    for view in profile.views:
        own = view.kernels[view.kernels["communication"] & (view.kernels["step"] >= 0)]
        times = (own["end_ns"] - own["start_ns"]).to_numpy(np.float64) / 1e3
        yield np.bincount(own["step"], weights=times, minlength=len(view.steps))


def kernels(profile: Profile) -> Section:
    """Kernels by name: calls and time per step, launched steps and each kind of replays apart."""
    sums: dict[tuple[str, str], np.ndarray] = {}
    world, totals = len(profile.views), Counter[str]()
    for view in profile.views:
        of_step = _how(view)
        totals = Counter(of_step.tolist())
        inside = view.kernels[view.kernels["step"] >= 0]
        how = of_step[inside["step"]]
        us = (inside["end_ns"] - inside["start_ns"]).to_numpy(np.float64) / 1e3
        for name, mode, time in zip(inside["name"].astype(str), how, us, strict=True):
            total = sums.setdefault((mode, name), np.zeros((2, world)))
            total[0, view.rank] += 1
            total[1, view.rank] += time
    largest = sorted(sums.items(), key=lambda item: -item[1][1].max())[:TOP]
    table = [
        [how, name[:60], *(_by_rank(total / totals[how]) for total in totals_of)]
        for (how, name), totals_of in sorted(largest, key=lambda item: item[0][0])
    ]
    said = f"kernels by name, means over steps; the {TOP} with the most time"
    return said, ["", "kernel", "calls a step\nby rank", "us a step\nby rank"], table


def nvtx(profile: Profile) -> Section:
    """NVTX ranges by text, of each rank; host time."""
    frame = ranges(profile)
    frame = frame[frame["rank"].notna()]
    table = []
    for (domain, message), group in frame.groupby(["domain", "message"], dropna=False, sort=True):
        of_rank = group.groupby("rank")["host_us"]
        counts = of_rank.size().reindex(range(len(profile.views)), fill_value=0)
        times = of_rank.median().reindex(range(len(profile.views))).to_numpy(float, na_value=np.nan)
        table.append([str(domain), str(message)[:60], _by_rank(counts, 0), _by_rank(times)])
    return (
        "NVTX ranges, host time: medians",
        ["domain", "range", "n\nby rank", "us\nby rank"],
        table,
    )


def _figures(headings: Sequence[str]) -> list[str]:
    """The columns that hold figures."""
    return [heading for heading in headings if "\n" in heading or heading in ("n", "bytes")]


def _us(value: Any, digits: int = 1) -> str:
    missing = value is None or value != value
    return "-" if missing else f"{value:,.{digits}f}"


def _by_rank(values: Sequence[Any] | np.ndarray, digits: int = 1) -> str:
    return " / ".join(_us(value, digits) for value in values)
