"""A backend without an engine: it drives observers and step logs by hand-made times.

The clock of the records is set by the test, so every figure has one right value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.comm.types import Kind, Site
from engine.execution.steplog import STEP_DTYPE as ENGINE_STEPS
from engine.requests.request import FinishReason, RequestOutput
from engine.shape import ModelShape
from harness.observers.records import COLLECTIVE_DTYPE, STEP_DTYPE, CountRecord, RankRecord

PREFILL, DECODE = 0, 1

SHAPE = ModelShape(
    model_type="qwen3", vocab_size=64, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, intermediate_size=16, rms_norm_eps=1e-6, rope_theta=1e6, max_position=128,
    tied=True, qk_norm=True, qkv_bias=False, o_bias=False, dtype="float32", eos_token_ids=(63,),
)  # fmt: skip

FLOOR_NS = 100
TRANSFER_NS = 5_000
"""Every collective of every rank takes this and the floor; rank 0 also waits `wait_ns`."""


def host_records(
    world: int,
    steps: Sequence[tuple[int, int, int]],
    *,
    transfer_ns: int = TRANSFER_NS,
    wait_ns: int = 0,
    step_ns: int = 1_000_000,
    shape: ModelShape = SHAPE,
) -> list[RankRecord]:
    """Records of each rank for `steps` of (phase, tokens, samples): the collectives of the model,
    then one broadcast of token ids. The last rank is the latest: all others wait `wait_ns`."""
    records = []
    for rank in range(world):
        step_rows, rows = [], []
        for number, (phase, tokens, samples) in enumerate(steps):
            begin = number * 2 * step_ns
            step_rows.append(
                (number, phase, samples, tokens, tokens, samples, 0, begin, begin + step_ns)
            )
            model = list(shape.expected_collectives(world, samples > 0))
            if world > 1 and samples:
                model.append((Kind.BROADCAST, Site.TOKEN_IDS))
            for ordinal, (kind, site) in enumerate(model):
                size = {
                    Kind.ALL_REDUCE: tokens * shape.hidden_size * 4,
                    Kind.GATHER: samples * shape.vocab_size * 4,
                    Kind.BROADCAST: samples * 8,
                }[kind]
                before = begin + ordinal * 50_000 + 1
                lasts = transfer_ns + FLOOR_NS + (wait_ns if rank < world - 1 else 0)
                dtype = 1 if kind == Kind.BROADCAST else 0
                rows.append((number, ordinal, kind, site, size, dtype, 0, before, before + lasts))
        records.append(
            RankRecord(
                rank=rank, world=world, steps=np.array(step_rows, STEP_DTYPE),
                collectives=np.array(rows, COLLECTIVE_DTYPE), floor_ns=FLOOR_NS, tick_ns=1,
                modes=("eager",), dtypes=("float32", "int64"), paths=("gloo",),
            )
        )  # fmt: skip
    return records


class FakeBackend:
    """harness.backends.base.Backend whose steps take exactly step_ns, and whose instrumented pass
    hands over `host_records`.

    Attributes to set before a point: `short` (tokens withheld from request 0), `grow` (what the
    counters grow by at each call), `records` (edits the records before they are handed over),
    `fail` (raised by generate), `effective`, `instrumented_ns` (what a step takes in the engine's
    log while observers are attached).
    """

    name = "fake"
    lacks: dict[str, str] = {}  # noqa: RUF012
    notes: tuple[str, ...] = ()

    def __init__(self, cfg: dict[str, Any], *, transfer_ns: int = TRANSFER_NS, wait_ns: int = 0,
                 step_ns: int = 1_000_000) -> None:  # fmt: skip
        self.tp, self.batch = cfg["tp"], cfg["batch"]
        self.transfer_ns, self.wait_ns, self.step_ns = transfer_ns, wait_ns, step_ns
        self.instrumented_ns = step_ns
        self.shape = SHAPE
        self.points_served = 0
        self.startup = {"spawn_s": 0.5, "load_s": 0.25, "compile_s": None, "total_s": 0.75}
        self.effective: dict[str, Any] = {
            "tp": self.tp, "enforce_eager": True, "compile": "off", "attention": "sdpa",
            "comm": "gloo" if self.tp > 1 else "solo", "page_size": cfg["page_size"],
            "dtype": "float32", "device": "cpu", "load_format": "auto", "mode": "eager",
            "max_model_len": 128, "max_num_seqs": 16, "num_pages": 64, "threads_per_rank": 1,
            "prefix_cache": False, "memory_utilization": 0.9, "seed": 0,
        }  # fmt: skip
        self.short = 0
        self.grow: dict[str, int] = {}
        self.fail: Exception | None = None
        self.records: Callable[[list[RankRecord]], list[RankRecord]] = lambda records: records
        self.prompts: list[list[list[int]]] = []
        self.resets = 0
        self.counted: Callable[[int], list[CountRecord]] | None = None
        self.captured: list[tuple[int, float, int]] = []
        self._counters = {"compiles": 3, "captures": 0, "preemptions": 0, "cached_tokens": 0}
        self._attached: int = 0
        self._plan: list[tuple[int, int, int]] = []
        self._step = 0

    def start(self, cfg: dict[str, Any], cache_dir: Any, since_s: float | None = None) -> None: ...

    def close(self) -> None: ...

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def captures(self) -> list[tuple[int, float, int]]:
        return list(self.captured)

    def memory(self) -> list[dict[str, int | None]]:
        return [{"weights_bytes": 1000 + rank, "peak_bytes": None} for rank in range(self.tp)]

    def generate(self, prompts: Any, params: Any, arrivals_s: Any = None) -> list[RequestOutput]:
        if self.fail is not None:
            raise self.fail
        self.prompts.append([list(p) for p in prompts])
        for name, by in self.grow.items():
            self._counters[name] = self._counters.get(name, 0) + by
        n = len(prompts)
        longest = max(p.max_tokens for p in params)
        self._plan = [(PREFILL, sum(map(len, prompts)), n)] + [(DECODE, n, n)] * (longest - 1)
        begin = time.perf_counter()
        outputs = []
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            arrival = begin + (arrivals_s[i] if arrivals_s else 0.0)
            asked = param.max_tokens - (self.short if i == 0 else 0)
            times = tuple(arrival + 0.5 + 0.25 * k for k in range(asked))
            outputs.append(
                RequestOutput(
                    request_id=f"r{i}", prompt_token_ids=list(prompt), token_ids=[1] * asked,
                    text=None, finish_reason=FinishReason.LENGTH, error=None, arrival_s=arrival,
                    queue_s=0.125, ttft_s=0.5, tpot_s=0.25 if asked > 1 else None,
                    e2e_s=times[-1] - arrival, token_times_s=times, preemptions=0, cached_tokens=0,
                )
            )  # fmt: skip
        time.sleep(0.001)
        return outputs

    def attach(self, factories: Sequence[Any]) -> None:
        self._attached = len(factories)

    def detach(self) -> list[list[Any]]:
        """One observer alone: the timer, or, where `counted` is set, the counts."""
        assert self._attached == 1, "attach one observer"
        self._attached = 0
        if self.counted is not None:
            self._plan = []
            return [[record] for record in self.counted(self._step)]
        records = host_records(
            self.tp, self._plan, transfer_ns=self.transfer_ns, wait_ns=self.wait_ns,
            step_ns=self.step_ns,
        )  # fmt: skip
        self._plan = []
        return [[record] for record in self.records(records)]

    def replays(self, phase: int) -> bool:
        """Whether steps of the phase are replays of a graph."""
        return False

    def drain_steps(self) -> list[np.ndarray]:
        rows = []
        for phase, tokens, samples in self._plan:
            begin = self._step * 2 * self.step_ns
            end = begin + (self.instrumented_ns if self._attached else self.step_ns)
            wall = (begin - 1000, end + 1000)
            replayed = self.replays(phase)
            rows.append(
                (self._step, phase, samples, tokens, tokens, samples, replayed, begin, end, *wall)
            )
            self._step += 1
        self._plan = self._plan if self._attached else []
        return [np.array(rows, ENGINE_STEPS) for _ in range(self.tp)]


def make_cfg(**changes: Any) -> dict[str, Any]:
    """A resolved configuration; `changes` by dotted name with `__` for the dot."""
    cfg: dict[str, Any] = {
        "experiment": "test", "backend": "native", "tp": 2, "batch": 2, "enforce_eager": True,
        "compile": "off", "attention": "auto", "comm": "auto", "page_size": 16, "dtype": "auto",
        "device": "cpu", "model": {"name": "tiny", "path": None, "load_format": "auto"},
        "workload": {
            "kind": "decode", "prompt_tokens": 4, "output_tokens": 5, "num_requests": None,
            "trace": None, "arrivals": "all", "temperature": 0.0, "seed": 0,
            "max_tokens_cap": None, "prompt_cap": None,
        },
        "engine": {
            "max_model_len": None, "max_num_seqs": 16, "max_num_batched_tokens": None,
            "num_pages": None, "overlap": None, "fused": "auto", "prefix_cache": False,
            "memory_utilization": 0.9, "threads_per_rank": None, "seed": 0,
        },
        "measure": {
            "name": "quick", "warmup": 1, "min_repeats": 2, "max_repeats": 2, "rel_noise": 0.05,
            "wall_limit_s": 10.0, "n_process": 1, "point_timeout_s": 60.0,
            "startup_timeout_s": 60.0, "backlog_us": 20_000.0, "backlog_layers": None,
            "skew_rank": 1, "skew_us": [0.0, 50.0],
        },
        "instrument": ["collectives"], "timing": "host", "cache": "cold", "skip": [],
        "fail_fast": False, "resume": "auto", "results_dir": "results/runs",
    }  # fmt: skip
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (cfg[section] if section else cfg)[key] = value
    return cfg


def make_point(cfg: dict[str, Any], point_id: str = "0123456789ab", index: int = 0) -> Any:
    """A planner's point of that configuration."""
    from harness.planning.plan import Point

    return Point(point_id, index, "0" * 12, {}, cfg)
