"""Columns of the tables that only a profile by nsys has, in the form of schema.py"""

from __future__ import annotations

TABLES: dict[str, tuple[str, str]] = {
    "kernels": (
        "a kernel that nsys saw on a rank",
        """
rank         int!    - rank
pass         string! - nsys
step         int     - within whose range it was launched; null: outside of all steps
ordinal      int     - place of its collective in the step; null: not a collective's kernel
name         string! - of the kernel, without its template's arguments
stream       int!    - CUDA stream
graph_node   int     - node of the CUDA graph; null: launched by itself
begin_us     float!  us after the begin of the first step's range on any rank, one clock for all
kernel_us    float!  us its own time
""",
    ),
    "ranges": (
        "an NVTX range that nsys saw",
        """
rank         int     - rank; null: of a process that ran no steps
pass         string! - nsys
pid          int!    - process
domain       string  - NVTX domain: engine, NCCL, ...
category     string  - NVTX category, in `engine` step or the kind of the collective
message      string  - in `engine` step/prefill|decode|mixed|replay[-prefill|-mixed] or kind/site
payload      float   - in `engine` sequences of a step, bytes of a collective
step         int     - within whose range it began; null: outside of all steps
begin_us     float!  us as in `kernels`
host_us      float   us on the host's clock; null: the capture ended first
""",
    ),
}
