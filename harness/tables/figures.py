"""The figures that the metrics table may hold: name, unit, meaning."""

from __future__ import annotations

from dataclasses import dataclass

STATS = ("value", "p50", "p90", "p99", "mean", "min", "max", "std", "ci_lo", "ci_hi")


@dataclass(frozen=True, slots=True)
class Figure:
    unit: str
    meaning: str


# One line a figure: name, unit (1 = a ratio or a count), meaning.
_FIGURES = """
output_tok_s      1/s  generated tokens / wall of the measured window
total_tok_s       1/s  (prompt + generated tokens) / wall of the measured window
prefill_tok_s     1/s  prompt tokens computed / time in prefill steps; null after a preemption
decode_tok_s      1/s  tokens of pure decode steps / their time, measured directly
tok_s_per_gpu     1/s  output_tok_s / GPUs; null on a CPU
ttft              s    arrival to first token
queue             s    arrival to the first step that held the request
tpot              s    (last - first token) / (tokens - 1) of a request
itl               s    gap between consecutive tokens of a request
e2e               s    arrival to last token
step_us           us   a clean step (GPU: its device time, by the step pass); ranks reduced first
step_host_us      us   plan to collect on rank 0, less what the step before took of it
between_steps_us  us   end of one step to begin of the next on rank 0, idle time included
padding           1    rows that a graph bucket or a static batch added / all of them
preemptions       1    preemptions in the window
cached_tokens     1    prompt tokens taken from the prefix cache in the window
all_reduces_per_step  1  counted; a model of L layers has 2L+1, at TP=1 none
gathers_per_step  1    counted, over steps that sample
token_ids_per_step 1   counted: broadcasts of sampled ids
expected_all_reduces_per_step 1  from the model's shape
latency_us        us   one collective, waiting included, less the floor; ranks reduced first
transfer_us       us   minimum of latency_us over ranks; calibrated: the root's in an aligned run
wait_us           us   latency_us - transfer_us; rooted kinds: at the root alone
transfer_us_per_step us  sum over the all-reduces of a step
wait_us_per_step  us   sum over the all-reduces of a step, of one rank; ranks reduced first
algbw_GBps        GB/s bytes / transfer_us; rooted kinds: bytes / latency_us at the root
busbw_GBps        GB/s algbw x 2(n-1)/n all_reduce, (n-1)/n gather, 1 broadcast
comm_share        1    sum of latency_us / time of as many clean steps (GPU: of the step pass)
transfer_share    1    sum of transfer_us / the same time
wait_share        1    sum of wait_us / the same time
span_us           us   one collective of a launched step without a backlog, launch gaps included
kernel_us         us   one collective's kernel as CUPTI timed it, waiting included
stamp_vs_cupti_us us   median latency_us - median kernel_us of a site, by rank and of the minimum
starved_steps     1    steps left out because the host was not ahead of the GPU
transfer_bias_us  us   by how much the minimum over ranks of whole ticks is too small
floor_us          us   what the timer reads round nothing (GPU: a tiny kernel); already taken off
tick_us           us   smallest step of the timer; no percentile below two ticks is given
below_floor       1    collectives whose latency_us is below zero
instrument_us     us   (instrumented - clean step) / collectives, medians; the rank that waits least
instrument_share  1    (instrumented - clean step) / clean step, medians; the rank that waits least
launch_gap_us     us   time between a step's first and last kernel in which none runs: CUPTI or nsys
weights_read_bytes B   weights that a decode step reads, of all ranks
kv_bytes          B    K/V that a decode step reads and writes, mean over the steps, of all ranks
step_bytes        B    bytes that a decode step must move, mean over the steps, of all ranks
step_flops        1    floating-point operations of a decode step, mean over the steps
mbu               1    step_bytes / (step time x measured read bandwidth of all GPUs)
mfu               1    step_flops / (step time x measured matmul rate of all GPUs)
energy_j_per_token J   energy of the engine's boards over the window / generated tokens
"""


def _parse() -> dict[str, Figure]:
    rows = (line.split(None, 2) for line in _FIGURES.strip().splitlines())
    return {name: Figure(unit, meaning) for name, unit, meaning in rows}


FIGURES: dict[str, Figure] = _parse()
