"""The host's time of a decode step by batch and context, beside a device that takes no time.

    python scripts/host_work.py [--batches 1 16 256 1024] [--contexts 128 2048 32000] [--rounds 10]

Plans, makes the message to the other ranks, lays out the inputs and books overlapped steps of
tests/support/host_steps.py. Prints markdown: CPU microseconds a step, of the fastest of --rounds
times 16 steps, in which each sequence fills one page. Block tables are as wide as the longest
context needs, whatever the context. The last two columns say how the time grows.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.tables.console import markdown_table
from tests.support.host_steps import PAGE, HostSteps


def step_us(batch: int, context: int, longest: int, rounds: int) -> float:
    host = HostSteps(batch, context, longest)
    host.run(PAGE)
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        host.run(PAGE)
        times.append((time.process_time() - begin) / PAGE * 1e6)
    return min(times)


def table(found: dict[tuple[int, int], float]) -> str:
    """found: (batch, context) -> us a step."""
    batches, contexts = ([*dict.fromkeys(key[place] for key in found)] for place in (0, 1))
    rows = []
    for batch in batches:
        times = [found[batch, context] for context in contexts]
        rows.append(
            [
                f"{batch:,}",
                *(f"{us:,.0f}" for us in times),
                f"{max(times) / batch:.1f}",
                f"{times[-1] / times[0]:.2f}",
            ]
        )
    headings = ["batch", *(f"context {c:,}, us a step" for c in contexts)]
    return markdown_table([*headings, "us a sequence at most", "longest / shortest"], rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The host's time of a decode step.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048, 32_000])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    longest = max(options.contexts) + (options.rounds + 4) * PAGE
    found = {
        (batch, context): step_us(batch, context, longest, options.rounds)
        for batch in options.batches
        for context in options.contexts
    }
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
