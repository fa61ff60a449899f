from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.measuring import workload
from harness.measuring.trace import TraceError, read_trace
from harness.measuring.workload import WorkloadError, nano_vllm
from harness.settings.config import SettingsError
from harness.settings.validation import arrival_rate
from tests.support.fake_backend import make_cfg

POINT = "0123456789ab"
HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"


def build(vocab_size: int = 64, max_model_len: int = 128, **changes: Any) -> workload.Workload:
    return workload.build(make_cfg(**changes), vocab_size=vocab_size, max_model_len=max_model_len)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Azure's format, both generations of its time stamps, not in order of time."""
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,0\r\n"
        "2023-11-16 18:15:47.1805904,20,7\r\n"
        "2023-11-16 18:16:46.6805900,1,1000\r\n"
    )
    return str(file)


def test_the_published_workload_has_the_published_totals() -> None:
    prompts, output_lens = nano_vllm()
    assert (len(prompts), len(output_lens)) == (256, 256)
    assert (sum(map(len, prompts)), sum(output_lens)) == (142_827, 133_966)


def test_the_published_workload_is_drawn_in_the_published_order() -> None:
    """bench.py of nano-vLLM, word for word but for the names."""
    random.seed(0)
    wanted = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    lens = [random.randint(100, 1024) for _ in range(256)]
    prompts, output_lens = nano_vllm()
    assert prompts == wanted and output_lens == lens
    assert nano_vllm(3) == (wanted[:3], lens[:3])
    with pytest.raises(WorkloadError, match="num_requests=257: nano_vllm has 256"):
        nano_vllm(257)


def test_nano_vllm_ids_are_the_published_ones_in_the_first_repeat_only() -> None:
    asked = build(
        vocab_size=151_936, max_model_len=4096, workload__kind="nano_vllm",
        workload__num_requests=4, workload__temperature=0.6,
    )  # fmt: skip
    published, lens = nano_vllm(4)
    assert asked.prompts(POINT, "plain", 0) == published
    again = asked.prompts(POINT, "plain", 1)
    assert [len(p) for p in again] == [len(p) for p in published]
    assert all(a != b for a, b in zip(again, published, strict=True))
    assert max(map(max, again)) < 10_000
    assert [(p.max_tokens, p.temperature, p.ignore_eos) for p in asked.params()] == [
        (n, 0.6, True) for n in lens
    ]
    assert asked.notes == "" and asked.fixed_batch is None


def test_a_small_model_says_what_it_changed_of_the_published_workload() -> None:
    asked = build(
        vocab_size=1024, max_model_len=300, workload__kind="nano_vllm", workload__num_requests=8,
        workload__max_tokens_cap=16,
    )  # fmt: skip
    assert asked.notes == "ids modulo the vocabulary of 1024; 8 of 8 requests shortened"
    published, _ = nano_vllm(8)
    assert asked.prompts(POINT, "plain", 0) == [[i % 1024 for i in p[:299]] for p in published]
    expected = [(min(len(p), 299), max(1, min(16, 300 - min(len(p), 299)))) for p in published]
    assert list(zip(asked.prompt_lens, asked.output_lens, strict=True)) == expected


def test_decode_is_a_fixed_batch() -> None:
    asked = build(batch=3, workload__prompt_tokens=7, workload__output_tokens=9)
    assert (asked.prompt_lens, asked.output_lens) == ((7, 7, 7), (9, 9, 9))
    assert (asked.arrivals_s, asked.fixed_batch) == (None, 3)
    prompts = asked.prompts(POINT, "plain", 0)
    assert [len(p) for p in prompts] == [7, 7, 7]
    assert all(0 <= i < 64 for p in prompts for i in p) and all(type(i) is int for i in prompts[0])


def test_prompts_are_reproducible_and_differ_everywhere_else() -> None:
    asked = build(batch=2, workload__prompt_tokens=40)
    other_seed = build(batch=2, workload__prompt_tokens=40, workload__seed=1)
    seen = [
        asked.prompts(POINT, "plain", 0),
        asked.prompts(POINT, "plain", 1),
        asked.prompts(POINT, "host", 0),
        asked.prompts(POINT, "warmup", 0),
        asked.prompts("ba9876543210", "plain", 0),
        other_seed.prompts(POINT, "plain", 0),
    ]
    flat = [tuple(p) for prompts in seen for p in prompts]
    assert len(set(flat)) == 12
    assert build(batch=2, workload__prompt_tokens=40).prompts(POINT, "plain", 1) == seen[1]


def test_a_trace_is_read_in_order_of_time(trace: str) -> None:
    rows = read_trace(Path(trace))
    assert rows.arrivals_s == (0.0, 0.5, 4.314579, 60.0)
    assert rows.prompt_tokens == (374, 20, 396, 1)
    assert rows.output_tokens == (44, 7, 0, 1000)
    assert read_trace(Path(trace), 2).prompt_tokens == (374, 396)


def test_time_stamps_with_an_offset_are_read(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10 00:00:01.009930+00:00,7,8\n"
    )
    assert read_trace(file).arrivals_s == (0.0, 1.0)


def test_spaces_blank_lines_and_further_columns_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        "\ufeff\n user, TIMESTAMP , ContextTokens,GeneratedTokens\n\n"
        "\u00e9, 2024-05-10 00:00:01 , 5 ,6,\n  \nb,2024-05-10 00:00:00,7,8\n"
    )
    rows = read_trace(file)
    assert (rows.arrivals_s, rows.prompt_tokens, rows.output_tokens) == ((0, 1), (7, 5), (8, 6))
    assert read_trace(file, 1).prompt_tokens == (5,)


def test_a_request_of_no_tokens_is_raised_and_not_called_shortened(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(HEADER + b"2024-01-01,0,4\n2024-01-01,4,0\n2024-01-01,4,4\n")
    asked = build(workload__kind="trace", workload__trace=str(file))
    assert (asked.prompt_lens, asked.output_lens) == ((1, 4, 4), (4, 1, 4))
    assert asked.notes == "2 of 3 requests have 1 token where 0 were asked"


def test_lengths_of_a_trace_are_capped_to_the_model(trace: str) -> None:
    asked = build(workload__kind="trace", workload__trace=trace, workload__arrivals="trace")
    assert asked.prompt_lens == (127, 20, 127, 1)
    assert asked.output_lens == (1, 7, 1, 127)
    assert asked.arrivals_s == (0.0, 0.5, 4.314579, 60.0)
    assert asked.notes == (
        "1 of 4 requests have 1 token where 0 were asked; 3 of 4 requests shortened"
    )
    capped = build(
        workload__kind="trace", workload__trace=trace, workload__prompt_cap=30,
        workload__max_tokens_cap=10,
    )  # fmt: skip
    assert capped.prompt_lens == (30, 20, 30, 1)
    assert capped.output_lens == (10, 7, 1, 10)
    assert capped.arrivals_s is None


def test_poisson_arrivals_have_the_rate_and_follow_the_seed(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    rows = "".join(f"2024-01-01 00:00:00,{4},{4}\n" for _ in range(4000))
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    changes = {
        "workload__kind": "trace",
        "workload__trace": str(file),
        "workload__arrivals": "poisson(50)",
    }
    times = build(**changes).arrivals_s
    assert times is not None and times[0] == 0 and (np.diff(times) >= 0).all()
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)  # 4000 gaps: 1.6 % standard error
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)
    assert build(**changes).arrivals_s == times
    assert build(**changes, workload__seed=1).arrivals_s != times


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"TIMESTAMP,ContextTokens\n", r"line 1: no column GeneratedTokens; a trace has TIMEST"),
        (HEADER, r": 0 requests, at least 1 asked for"),
        (b"", r": no line with the columns TIMESTAMP, ContextTokens, GeneratedTokens"),
        (HEADER + b"noon,1,2\n", r"line 2: Invalid isoformat"),
        (HEADER + b"2024-01-01,1\n", r"line 2: 2 values for 3 columns"),
        (HEADER + b"2024-01-01,1,234,5\n", r"line 2: 4 values for 3 columns"),
        (HEADER + b"2024-01-01,1,-2\n", r"line 2: a negative number of tokens"),
        (HEADER + b"2024-01-01,1_0,2\n", r"line 2: '1_0' is no number of tokens"),
        (HEADER + b"2024-01-01,1,2.5\n", r"line 2: '2.5' is no number of tokens"),
        (HEADER + b"2024-01-01,,2\n", r"line 2: '' is no number of tokens"),
        (HEADER + b"\n\n  \n2024-01-01,1,x\n", r"line 5: 'x' is no number of tokens"),
        (HEADER + b"2024-01-01,1,2\n" * 2000 + b"2024-01-01,\xff,2\n", r"line 2002: not text in"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n".encode("utf-16"),
            r"line 1: not text in UTF-8",
        ),
        (
            HEADER + b"2024-01-01,1,2\n\n2024-01-01T00:00:01+00:00,1,2\n",
            r"line 4: one of this time and that of line 2 has an offset from UTC",
        ),
    ],
)
def test_traces_that_cannot_be_read_name_file_and_line(
    tmp_path: Path, text: bytes, message: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(text)
    with pytest.raises(TraceError, match=f"t.csv.*{message}"):
        read_trace(file)


def test_a_trace_that_is_too_short_or_absent_is_an_error(trace: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="4 requests, 5 asked for"):
        read_trace(Path(trace), 5)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.csv")


def test_a_request_that_is_too_long_says_what_to_lower() -> None:
    with pytest.raises(WorkloadError, match=r"129 tokens: the engine takes 128; lower workload"):
        build(workload__prompt_tokens=124)
    with pytest.raises(WorkloadError, match=r"workload='train': choose decode"):
        build(workload__kind="train")


def test_arrival_rates() -> None:
    assert arrival_rate("poisson(2)") == 2.0
    assert arrival_rate("poisson(1e-1)") == 0.1
    assert arrival_rate("all") is None
    assert arrival_rate("trace") is None
    for wrong in (
        "poisson",
        "poisson()",
        "poisson(-1)",
        "poisson(e)",
        "poisson(inf)",
        "uniform(2)",
    ):
        with pytest.raises(SettingsError, match="requests per second"):
            arrival_rate(wrong)
