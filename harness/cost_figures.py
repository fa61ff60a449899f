"""Figures of what a step must move and do, and how near the machine's ceilings it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import roofline
from harness.figure_rows import FigureRows
from harness.window import DECODE, Window

if TYPE_CHECKING:
    from harness.backends.base import Backend

_VARIES = "the lengths of a decode step vary in this workload"


def cost_figures(
    rows: FigureRows,
    windows: Sequence[Window],
    cfg: Mapping[str, Any],
    backend: Backend,
    ceilings: roofline.Ceilings | None = None,
) -> None:
    """Costs of a decode step of a fixed batch, from the model's shape, and MBU and MFU."""
    work, effective, shape = cfg["workload"], backend.effective, backend.shape
    itemsize = roofline.ITEM_BYTES[str(effective["dtype"])]
    where: dict[str, Any] = {"pass_name": "plain", "source": "model", "phase": "decode"}
    cost = None
    if work["kind"] in ("decode", "prefill"):
        cost = roofline.mean_decode_cost(
            shape,
            tp=cfg["tp"],
            itemsize=itemsize,
            prompt_tokens=work["prompt_tokens"],
            output_tokens=work["output_tokens"],
            batch=cfg["batch"],
        )
    reason = None if cost else _VARIES if work["kind"] == "trace" else "no pure decode step"
    if work["kind"] == "nano_vllm":
        reason = _VARIES
    costs: dict[str, float | None] = dict.fromkeys(
        ("weights_read_bytes", "kv_bytes", "step_bytes", "step_flops")
    )
    if cost is not None:
        values = (cost.weights_bytes, cost.kv_bytes, cost.bytes, cost.flops)
        costs = dict(zip(costs, values, strict=True))
    for name, value in costs.items():
        rows.add(name, value, n=int(value is not None), reason=reason, **where)
    times = np.concatenate([w.step_us(DECODE) for w in windows]).max(axis=1)
    mbu = mfu = None
    if cost is not None and len(times):
        mbu, mfu, reason = roofline.utilisation(cost, float(times.mean()), cfg["tp"], ceilings)
    for name, value in (("mbu", mbu), ("mfu", mfu)):
        rows.add(name, value, n=len(times), reason=reason, **where)
