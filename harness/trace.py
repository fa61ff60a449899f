"""Request traces in the format of the Azure LLM inference dataset."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace that cannot be read; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. arrivals_s: seconds after the first request."""

    arrivals_s: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]


def read_trace(path: Path, num_requests: int | None = None) -> Trace:
    """Reads the first `num_requests` rows (all by default).

    Columns TIMESTAMP (ISO 8601, any number of decimals, with or without an offset), ContextTokens,
    GeneratedTokens; others are ignored. Rows are sorted by time; digits past the microsecond are
    cut.

    Raises:
        TraceError: no such file, a missing column, a value that cannot be read, too few rows.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(
                    f"{path}: no column {', '.join(missing)}; a trace has {', '.join(COLUMNS)}"
                )
            rows = [
                _row(path, line, row) for line, row in enumerate(islice(reader, num_requests), 2)
            ]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if not rows or (num_requests is not None and len(rows) < num_requests):
        raise TraceError(f"{path}: {len(rows)} requests, {num_requests or 'at least 1'} asked for")
    rows.sort(key=lambda row: row[0])
    begin = rows[0][0]
    return Trace(
        arrivals_s=tuple((time - begin).total_seconds() for time, _, _ in rows),
        prompt_tokens=tuple(prompt for _, prompt, _ in rows),
        output_tokens=tuple(output for _, _, output in rows),
    )


def _row(path: Path, line: int, row: dict[str, str]) -> tuple[datetime, int, int]:
    try:
        time = datetime.fromisoformat(row["TIMESTAMP"].strip())
        prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}, line {line}: {error}") from error
    if prompt < 0 or output < 0:
        raise TraceError(f"{path}, line {line}: a negative number of tokens")
    return time, prompt, output
