"""The column catalogue: every table and column that is written, with unit and meaning.

Stored files are checked against it and the documentation is printed from it (schema_docs.py), so
the two cannot differ. A change that a reader of old files would notice raises SCHEMA_VERSION.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.tables import nsys_columns as nsys

SCHEMA_VERSION = 1

STATUSES = ("ok", "predicted", "skipped", "contaminated", "error", "killed", "oom", "timeout")
"""From the best to the worst."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `dtype` is string, int, float, bool or time; `required` forbids nulls."""

    name: str
    dtype: str
    unit: str
    meaning: str
    required: bool = False


_KEY = """
run_id       string! - folder of the run under results/runs
point_id     string! - hash of the point's resolved configuration
process      int!    - which of the point's fresh engines, from 0
"""
_REPEAT = "repeat       int!    - number of the repeat within its pass, from 0\n"

# One line a column: name, dtype (! = never null), unit (- = none), meaning.
_TABLES: dict[str, tuple[str, str]] = {
    "points": (
        "one point x repeat; a point that never ran has one row, repeat 0",
        _KEY
        + _REPEAT
        + """
index        int     - place in the order of the run
experiment   string  - name of the experiment
status       string! - ok, oom, timeout, killed, error, skipped, contaminated or predicted
reason       string  - why the status is not ok
traceback    string  - of the error, from the rank that failed first
notes        string  - what a reader must know: shortened requests, instruments left out
backend      string  - axis, as requested: the engine measured
tp           int     - axis, as requested: ranks of the tensor-parallel group
batch        int     - axis, as requested: sequences of a decode step
enforce_eager bool   - axis, as requested: no CUDA graphs
compile      string  - axis, as requested: off, layer or model
attention    string  - axis, as requested
comm         string  - axis, as requested
page_size    int     tokens axis, as requested
dtype        string  - axis, as requested
device       string  - axis, as requested
model        string  - axis, as requested: name of the model
model.path   string  - axis, as requested: directory or hub id
model.load_format string - axis, as requested
workload     string  - axis, as requested: decode, prefill, nano_vllm or trace
workload.prompt_tokens int tokens as requested
workload.output_tokens int tokens as requested
workload.num_requests int - as requested
workload.arrivals string - as requested: all, trace or poisson(RATE)
workload.temperature float - as requested
workload.seed int    - as requested
measure      string  - axis, as requested: name of the measuring plan
timing       string  - axis, as requested: how collectives are timed
instrument   string  - axis, as requested: what the instrumented pass attaches
cache        string  - compile caches before the engine started: cold or warm
requested    string  - the whole resolved configuration as JSON
effective.tp int     - read back from the engine
effective.batch int  - most sequences in one pure decode step of the repeat
effective.enforce_eager bool - read back from the engine
effective.compile string - read back from the engine
effective.mode string - how the forward ran: eager, compiled-layer, compiled-model, graph, ...
effective.attention string - read back from the engine
effective.comm string - read back from the engine
effective.page_size int tokens read back from the engine
effective.dtype string - read back from the engine
effective.device string - read back from the engine
effective.load_format string - read back from the engine
effective.num_pages int - pages of the K/V cache
effective.max_model_len int tokens longest request that the engine takes
effective.threads_per_rank int - intra-op threads of a rank
effective    string  - everything that was read back, as JSON
requests     int     - requests served in the window
prompt_tokens int    tokens prompt tokens of the window
output_tokens int    tokens generated tokens of the window, counted
cached_tokens int    tokens prompt tokens taken from the prefix cache
preemptions  int     - preemptions in the window
stop_reason  string  - why no further repeat was made: noise, max_repeats or wall_limit
rel_noise    float   1 standard deviation / median of output_tok_s over the repeats
counters     string  - what the engine's counters grew by in the window, as JSON
started_at   time    UTC when the repeat began
wall_s       float   s wall time of the measured window
sm_clock_mhz float   MHz median of the window's samples, of the GPU where it is lowest
power_w      float   W mean over the window's samples, all GPUs of the engine together
temperature_c float  C highest sample of its GPUs
throttled    float   1 share of the samples in which one of its GPUs was throttled; null: none taken
throttle_reasons string - of those samples: sw_power_cap, hw_thermal_slowdown, ...
gpu_others   int     - most compute processes of others on one of its GPUs; null: cannot be told
git_sha      string  - commit of the harness' source tree
git_dirty    bool    - whether tracked files differed from it
hardware_fingerprint string - hash of CPU, GPUs, driver, memory and operating system
host         string  - name of the machine
cpu          string  - name of the CPU
cpu_cores    int     - cores this process may use
gpu          string  - names of the visible GPUs
driver       string  - GPU driver
python_version string - of the interpreter
torch_version string - of the package
triton_version string - of the package
nccl_version string  - of the package
flash_attn_version string - of the package
transformers_version string - of the package
environment  string  - the captured environment as JSON (allow-listed variables only)
""",
    ),
    "metrics": (
        "one figure",
        _KEY
        + """
repeat       int     - null: over all repeats of the point
name         string! - see the figures below
stat         string! - value, p50, p90, p99, mean, min, max, std, ci_lo, ci_hi (95 % interval)
value        float   unit null where the figure is missing, never 0
unit         string! - of the value
n            int!    - values that the figure rests on
n_process    int!    - fresh engines that it rests on
source       string! - what was read: host, stamps, events, cupti, nsys, nvml_*, count, model
pass         string! - the pass that it rests on: plain, host, step, graph_timed, backlog, ...
phase        string  - prefill, decode or mixed; null: all steps or not of steps
kind         string  - of the collective
site         string  - of the collective
bytes        int     B payload of the collective; figures never mix sizes
ranks        string  - a rank's number; min, max: ranks reduced first; null: not of ranks
reason       string  - why the value is null
""",
    ),
    "steps": (
        "a step on a rank",
        _KEY
        + _REPEAT
        + """
rank         int!    - rank
pass         string! - plain, host, step, graph_timed, backlog, span, skew, profiler or nsys
step         int!    - counts over the life of the engine; equal on all ranks
phase        string! - prefill, decode or mixed
batch        int!    - sequences in the step
tokens       int!    tokens query tokens in the step
bucket       int!    tokens rows that the forward ran with
samples      int!    - sequences that sampled a token
mode         string! - how the forward ran
begin_ns     int!    ns host clock (perf_counter) at the begin of the forward
device_us    float   us forward and sampling on this rank; CPU: host time; GPU: stamps, else null
compute_us   float   us profiler pass: what does not communicate
comm_kernel_us float us profiler pass: sum of the communication kernels, waiting included
idle_us      float   us profiler pass: between the step's first and last kernel none runs
idle_comm_us float   us profiler pass: part of idle_us right before or after a communication kernel
kernels      int     - profiler pass: kernels and copies by the device
host_us      float   us plan to collect, less what the step before took of it; rank 0 only
skew_asked_us float  us skew pass: how long one rank was to be delayed before each all-reduce
skew_us      float   us skew pass: mean of this rank's own delays, as they came out
padding      float!  1 rows that a graph bucket or a static batch added / all of them
source       string! - whose clock device_us is: host, stamps, events or cupti
""",
    ),
    "collectives": (
        "a collective on a rank; a row holds what its pass measured, the rest is null",
        _KEY
        + _REPEAT
        + """
rank         int!    - rank
pass         string! - host (CPU); graph_timed, backlog, span, profiler, nsys (GPU); skew
step         int!    - key of the join over ranks, with ordinal
ordinal      int!    - place in the step, from 0
phase        string! - prefill, decode or mixed
kind         string! - all_reduce, gather or broadcast
site         string! - embed, attn.o_proj, mlp.down_proj, lm_head or token_ids
layer        int     - from the order in the step; null outside the decoder layers
bytes        int!    B payload; gather: the whole result at the root
expected_bytes int   B from the model's shape and the step's rows
dtype        string! - of the payload
world        int!    - ranks
mode         string! - how the forward ran
path         string! - gloo, nccl, symm_one_shot, symm_two_shot, symm_fused (and addition and norm)
latency_us   float   us on this rank, waiting included, less floor_us
floor_us     float   us what the same method reads round nothing (GPU: the smallest kernel)
below_floor  bool    - latency_us is below zero; kept, never clamped
span_us      float   us the pair without a backlog, as read, launch gaps included; null on a CPU
kernel_us    float   us time of the kernel alone; passes profiler and nsys only
transfer_us  float   us minimum over ranks of latency_us (or kernel_us), or as transfer_source says
wait_us      float   us latency_us (or kernel_us) - transfer_us: waiting for the last rank
algbw_GBps   float   GB/s bytes / transfer_us; rooted kinds: bytes / latency_us at the root
busbw_GBps   float   GB/s algbw x 2(n-1)/n all_reduce, (n-1)/n gather, 1 broadcast
transfer_source string - ranks; calibrated: rooted kind, the root's in an aligned run
transfer_reason string - why transfer_us is null: rooted, span or starved
source       string! - host, stamps, events, cupti or nsys
starved      bool    - in this step the host was not ahead of the GPU; backlog pass only
""",
    ),
    "requests": (
        "a request",
        _KEY
        + _REPEAT
        + """
request      int!    - place in the workload, from 0
request_id   string! - the engine's name of it
pass         string! - plain, host, step, graph_timed, backlog, span, skew, profiler or nsys
prompt_tokens int!   tokens in the prompt
output_tokens int!   tokens generated
asked_tokens int!    tokens that were asked for
arrival      float   s after the window's begin
queue        float   s arrival to the first step that held it
ttft         float   s arrival to first token
tpot         float   s (last - first token) / (tokens - 1); null for one token
e2e          float   s arrival to last token
preemptions  int     - times that it lost its pages; null: the engine does not tell
cached_tokens int    tokens of its prompt taken from the prefix cache; null: as above
finish_reason string! - stop, length, abort or error
error        string  - why it could not be served
""",
    ),
    "phases": (
        "a start-up phase or a counter of the engine",
        _KEY
        + _REPEAT
        + """
phase        string! - spawn, load, compile, capture, warmup, total; counters by their name
bucket       int     - capture: rows of the graph; null: all graphs together
seconds      float   s time spent; null for counters and where it is unknown
bytes        int     B capture: device memory that the bucket's graph took
count        int     - counters: value after the point, since the engine's start
cache        string  - compile caches before the engine started: cold or warm
shared       bool!   - the engine already lived: an earlier point paid for the start
reason       string  - why seconds is null
""",
    ),
    "memory": (
        "a reading of memory",
        _KEY
        + _REPEAT
        + """
rank         int!    - rank
name         string! - weights_bytes, kv_bytes, peak_bytes (CPU: resident set), device_used_bytes
bytes        int     B null where it cannot be read
reason       string  - why bytes is null
""",
    ),
    "telemetry": (
        "a reading of the machine",
        _KEY
        + _REPEAT
        + """
pass         string! - plain, host, step, graph_timed, backlog, span, skew, profiler or nsys
when         string! - before the window, during it (sampled) or after it
at_s         float   s of a sample: after the window's begin
device       string! - cpu or gpu0, gpu1, ...
name         string! - load_1m, cpu_busy_s, sm_clock_mhz, power_w, energy_j, other_processes, ...
value        float   unit null where it cannot be read
unit         string! - of the value
reason       string  - why the value is null
""",
    ),
}
_TABLES |= {name: (row, _KEY + _REPEAT + text) for name, (row, text) in nsys.TABLES.items()}


def _parse(text: str) -> tuple[Column, ...]:
    columns = []
    for line in filter(None, (raw.strip() for raw in text.splitlines())):
        name, dtype, unit, meaning = line.split(None, 3)
        required = dtype.endswith("!")
        columns.append(Column(name, dtype.rstrip("!"), unit.replace("-", ""), meaning, required))
    return tuple(columns)


TABLES: dict[str, tuple[Column, ...]] = {t: _parse(text) for t, (_, text) in _TABLES.items()}
ROWS: dict[str, str] = {table: row for table, (row, _) in _TABLES.items()}


def column(table: str, name: str) -> Column:
    """The catalogue's entry.

    Raises:
        KeyError: no such table or column, with the ones that exist.
    """
    if table not in TABLES:
        raise KeyError(f"table {table!r}: choose one of {', '.join(TABLES)}")
    for entry in TABLES[table]:
        if entry.name == name:
            return entry
    raise KeyError(f"{table} has no column {name!r}: {', '.join(c.name for c in TABLES[table])}")
