"""Figures of the plain pass: tokens per second, latencies of requests, times of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from harness.measuring.gpu_state import energy_j
from harness.measuring.step_times import StepTimes
from harness.measuring.window import Window
from harness.observers.records import DECODE, PHASES, PREFILL
from harness.rows.figures import FigureRows

PASS = "plain"
_NO_STEP = "no such step in the window"
_NO_REQUEST = {
    "ttft": "no request has a token",
    "queue": "no request was in a step",
    "tpot": "no request has a second token",
    "itl": "no request has a second token",
    "e2e": "no request has a token",
}
_RECOMPUTED = "preempted requests computed prompt tokens twice"


def plain_figures(
    rows: FigureRows,
    windows: Sequence[Window],
    *,
    tp: int,
    device: str,
    clean: StepTimes | None,
) -> None:
    """Everything that the plain pass gives, per repeat and over all repeats; of `clean`, the times
    of steps (on a GPU the step pass gives them, in the plain one the host only enqueues)."""
    _rates(rows, windows, tp, device)
    _requests(rows, windows)
    _step_times(rows, clean)
    _steps(rows, windows)
    for name in ("preemptions", "cached_tokens"):
        for window in windows:
            count = window.counters.get(name)
            rows.add(
                name,
                count,
                n=len(window.outputs),
                pass_name=PASS,
                source="count",
                repeat=window.repeat,
                reason=None if count is not None else "the engine does not count it",
            )


def energy_figure(rows: FigureRows, windows: Sequence[Window], devices: Sequence[str]) -> None:
    """Energy of each repeat and their mean; `devices`: the engine's GPUs, as telemetry names them.

    A figure over repeats of which one has none has the reason of that one."""
    name = "energy_j_per_token"
    found: list[float] = []
    last = ("host", "no repeat was measured")
    for window in windows:
        joules, source, reason = energy_j(window, devices)
        value = None if joules is None else joules / window.output_tokens
        rows.add(
            name, value, n=int(value is not None), pass_name=PASS, source=source, reason=reason,
            repeat=window.repeat,
        )  # fmt: skip
        if value is not None:
            found.append(value)
        last = (source, reason or last[1])
    rows.summarise(name, found, pass_name=PASS, source=last[0], reason=None if found else last[1])


def rate(window: Window, phase: int) -> tuple[float | None, int]:
    """(tokens/s, steps) of the steps of one phase alone: pure decode steps give one token a
    sequence, prefill steps compute prompt tokens (cache hits are not among them). The time is from
    plan to collect on rank 0, less what the step before took of it. None without such a step."""
    log = window.steps[0]
    log = log[log["phase"] == phase]
    wall_ns = int((log["wall_end_ns"] - log["wall_begin_ns"]).sum())
    if wall_ns == 0:
        return None, len(log)
    return float(log["tokens"].sum()) / (wall_ns / 1e9), len(log)


def _rates(rows: FigureRows, windows: Sequence[Window], tp: int, device: str) -> None:
    gpus = tp if device == "cuda" else None
    of_window: dict[str, Callable[[Window], float | None]] = {
        "output_tok_s": lambda w: w.output_tok_s,
        "total_tok_s": lambda w: (w.prompt_tokens + w.output_tokens) / w.wall_s,
        "prefill_tok_s": lambda w: None if _preempted(w) else rate(w, PREFILL)[0],
        "decode_tok_s": lambda w: rate(w, DECODE)[0],
        "tok_s_per_gpu": lambda w: None if gpus is None else w.output_tok_s / gpus,
    }
    missing = dict.fromkeys(("prefill_tok_s", "decode_tok_s"), _NO_STEP)
    missing["tok_s_per_gpu"] = "no GPU"
    for name, read in of_window.items():
        values = [read(window) for window in windows]
        for window, value in zip(windows, values, strict=True):
            reason = missing[name] if value is None else None
            if reason and name == "prefill_tok_s" and _preempted(window):
                reason = _RECOMPUTED
            rows.add(
                name, value, n=int(value is not None), pass_name=PASS, repeat=window.repeat,
                reason=reason,
            )  # fmt: skip
        found = [value for value in values if value is not None]
        why = missing.get(name)
        if name == "prefill_tok_s" and any(map(_preempted, windows)):
            why = _RECOMPUTED
        rows.summarise(name, found, pass_name=PASS, reason=None if found else why)


def _preempted(window: Window) -> bool:
    return window.counters.get("preemptions", 0) > 0


def _requests(rows: FigureRows, windows: Sequence[Window]) -> None:
    outputs = [output for window in windows for output in window.outputs]
    gaps = [np.diff(output.token_times_s) for output in outputs]
    values = {
        "ttft": [o.ttft_s for o in outputs],
        "queue": [o.queue_s for o in outputs],
        "tpot": [o.tpot_s for o in outputs],
        "itl": np.concatenate([*gaps, np.zeros(0)]).tolist(),
        "e2e": [o.e2e_s for o in outputs],
    }
    for name, all_values in values.items():
        found = [value for value in all_values if value is not None]
        reason = None if found else _NO_REQUEST[name]
        rows.summarise(name, found, pass_name=PASS, reason=reason)


def _step_times(rows: FigureRows, clean: StepTimes | None) -> None:
    for code, phase in enumerate(PHASES):
        if clean is None:
            reason = "on a GPU it needs the step pass (instrument collectives)"
            rows.summarise("step_us", [], pass_name=PASS, phase=phase, reason=reason)
            continue
        times = clean.of(code)
        missing = None if len(times) else _NO_STEP
        for ranks, values in (("min", times.min(axis=1)), ("max", times.max(axis=1))):
            rows.summarise(
                "step_us", values, pass_name=clean.pass_name, source=clean.source, phase=phase,
                ranks=ranks, reason=missing,
            )  # fmt: skip


def _steps(rows: FigureRows, windows: Sequence[Window]) -> None:
    for code, phase in enumerate(PHASES):
        logs = [window.steps[0][window.steps[0]["phase"] == code] for window in windows]
        log = np.concatenate(logs)
        host = (log["wall_end_ns"] - log["wall_begin_ns"]) / 1e3
        padding = (log["bucket"] - log["tokens"]) / np.maximum(log["bucket"], 1)
        reason = None if len(log) else _NO_STEP
        rows.summarise("step_host_us", host, pass_name=PASS, phase=phase, reason=reason)
        rows.summarise(
            "padding", padding, pass_name=PASS, phase=phase, source="count", reason=reason
        )
    gaps = np.concatenate([_gaps_us(window.steps[0]) for window in windows])
    reason = None if len(gaps) else "the window has one step"
    rows.summarise("between_steps_us", gaps, pass_name=PASS, reason=reason)


def _gaps_us(log: np.ndarray) -> np.ndarray:
    return (log["wall_begin_ns"][1:] - log["wall_end_ns"][:-1]) / 1e3
