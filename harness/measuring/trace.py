"""Request traces in the format of the Azure LLM inference dataset."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
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


Row = tuple[datetime, int, int]


def read_trace(path: Path, num_requests: int | None = None) -> Trace:
    """Reads the first `num_requests` rows (all by default).

    Columns TIMESTAMP (ISO 8601, any number of decimals, all with or all without an offset),
    ContextTokens, GeneratedTokens; others are ignored, blank lines too. Rows are sorted by time;
    digits past the microsecond are cut.

    Raises:
        TraceError: no such file, a missing column, a value that cannot be read, too few rows.
    """
    try:
        # What is no UTF-8 becomes surrogates, so that it is found in the line where it stands.
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = list(islice(_rows(path, file), num_requests))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if not rows or (num_requests is not None and len(rows) < num_requests):
        raise TraceError(
            f"{path}: {len(rows)} requests, {num_requests or 'at least 1'} asked for; name a "
            "longer trace or lower workload.num_requests"
        )
    rows.sort(key=lambda row: row[0])
    begin = rows[0][0]
    return Trace(
        arrivals_s=tuple((time - begin).total_seconds() for time, _, _ in rows),
        prompt_tokens=tuple(prompt for _, prompt, _ in rows),
        output_tokens=tuple(output for _, _, output in rows),
    )


def _rows(path: Path, file: Iterator[str]) -> Iterator[Row]:
    reader = csv.reader(file)
    header: list[str] | None = None
    first: tuple[int, datetime] | None = None
    try:
        for cells in reader:
            values = [cell.strip() for cell in cells]
            if values in ([], [""]):
                continue
            "".join(values).encode()
            if header is None:
                header = values
                missing = [c for c in COLUMNS if c not in header]
                if missing:
                    raise TraceError(
                        f"{path}, line {reader.line_num}: no column {', '.join(missing)}; a trace "
                        f"has {', '.join(COLUMNS)}"
                    )
                continue
            if len(values) < len(header) or any(values[len(header) :]):
                raise ValueError(f"{len(values)} values for {len(header)} columns")
            row = _row(dict(zip(header, values, strict=False)))
            line, time = first = first or (reader.line_num, row[0])
            if (row[0].tzinfo is None) != (time.tzinfo is None):
                raise ValueError(f"one of this time and that of line {line} has an offset from UTC")
            yield row
    except TraceError:
        raise
    except UnicodeEncodeError as error:
        raise TraceError(f"{path}, line {reader.line_num}: not text in UTF-8") from error
    except (ValueError, csv.Error) as error:
        raise TraceError(f"{path}, line {reader.line_num}: {error}") from error
    if header is None:
        raise TraceError(f"{path}: no line with the columns {', '.join(COLUMNS)}")


def _row(values: dict[str, str]) -> Row:
    return (
        datetime.fromisoformat(values["TIMESTAMP"]),
        _tokens(values["ContextTokens"]),
        _tokens(values["GeneratedTokens"]),
    )


def _tokens(text: str) -> int:
    if re.fullmatch(r"-[0-9]+", text):
        raise ValueError("a negative number of tokens")
    if not re.fullmatch(r"[0-9]{1,18}", text):  # int() would also take 1_0
        raise ValueError(f"{text!r} is no number of tokens")
    return int(text)
