"""Figures of what a step must move and do, and how near the machine's ceilings it comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.measuring import roofline
from harness.measuring.step_times import StepTimes
from harness.observers.records import DECODE, ITEM_BYTES
from harness.rows.figures import FigureRows

if TYPE_CHECKING:
    from harness.backends.base import Backend

CEILING_DTYPE = "bfloat16"
_VARIES = "the lengths of a decode step vary in this workload"


def cost_figures(
    rows: FigureRows,
    clean: StepTimes | None,
    cfg: Mapping[str, Any],
    backend: Backend,
    ceilings: roofline.Ceilings | None = None,
) -> None:
    """Costs of a decode step of a fixed batch, from the model's shape, and MBU and MFU."""
    work, effective, shape = cfg["workload"], backend.effective, backend.shape
    itemsize = ITEM_BYTES[str(effective["dtype"])]
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
    times = np.zeros(0) if clean is None else clean.of(DECODE).max(axis=1)
    mbu = mfu = None
    if clean is None and reason is None:
        reason = "no device time of a step without the step pass"
    elif cost is not None and len(times):
        mbu, mfu, reason = roofline.utilisation(cost, float(times.mean()), cfg["tp"], ceilings)
    elif reason is None:
        reason = "no pure decode step"
    why = reason
    if mfu is not None and effective["dtype"] != CEILING_DTYPE:
        mfu, why = None, f"the matmul rate was measured in {CEILING_DTYPE}"
    if clean is not None:
        where |= {"pass_name": clean.pass_name, "source": clean.source}
    rows.add("mbu", mbu, n=len(times), reason=reason, **where)
    rows.add("mfu", mfu, n=len(times), reason=why, **where)
