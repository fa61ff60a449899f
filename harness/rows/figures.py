"""Rows of the metrics table, checked against the catalogue of figures as they are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.measuring.stats import SUMMARY, summary
from harness.rows.tables import columns
from harness.tables.figures import FIGURES, STATS
from harness.tables.point_files import TableData


class FigureRows:
    """Collects figures of one point. `key` is run_id, point_id and process; `lacks` names figures
    that its engine cannot give and says why: they are null. `where` below is any of repeat, phase,
    kind, site, bytes, ranks."""

    def __init__(
        self, key: Mapping[str, Any], n_process: int = 1, lacks: Mapping[str, str] | None = None
    ) -> None:
        self._key = {**key, "n_process": n_process}
        self._lacks = lacks or {}
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        value: float | None,
        *,
        n: int,
        pass_name: str,
        source: str = "host",
        stat: str = "value",
        reason: str | None = None,
        **where: Any,
    ) -> None:
        """One figure. A value is None if and only if a reason is given."""
        assert stat in STATS, stat
        assert (value is None) == (reason is not None), (name, value, reason)
        if name in self._lacks:
            value, n, reason = None, 0, self._lacks[name]
        self.rows.append(
            {
                **self._key,
                "name": name,
                "stat": stat,
                "value": None if value is None else float(value),
                "unit": FIGURES[name].unit,
                "n": n,
                "source": source,
                "pass": pass_name,
                "reason": reason,
                **where,
            }
        )

    def summarise(
        self,
        name: str,
        values: Sequence[float] | np.ndarray,
        *,
        pass_name: str,
        source: str = "host",
        reason: str | None = None,
        tick: float = 0.0,
        **where: Any,
    ) -> None:
        """Every statistic of stats.SUMMARY over `values` (iterations, never ranks).

        Args:
            reason: why there are no values; needed if and only if `values` is empty.
            tick: resolution of the timer in the figure's unit: a percentile of single values whose
                magnitude is below two ticks is null, 0 among them; 0 for what is exact.
        """
        assert (len(values) == 0) == (reason is not None), (name, len(values), reason)
        found = summary(values)
        for stat in SUMMARY:
            value, why = found[stat], reason
            if value is None and why is None:
                why = "one value has no spread"
            if stat.startswith("p") and value is not None and abs(value) < 2 * tick:
                value, why = None, f"below two ticks of the timer ({2 * tick:.3g})"
            self.add(
                name, value, n=len(values), pass_name=pass_name, source=source, stat=stat,
                reason=why, **where,
            )  # fmt: skip

    def table(self) -> TableData:
        return columns("metrics", self.rows)
