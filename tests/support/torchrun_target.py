"""What tests/engine/ranks/test_nodes.py has torchrun start on two nodes here: engines of tp=2.

CHECKPOINT FILE: the file gets a line of JSON for each thing that was done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from engine import LLM, ConfigError, EngineDeadError, SamplingParams, under_torchrun
from engine.comm import Collective, CollectiveObserver, ObserverContext

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [31, 41, 59, 26, 53]]
TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


class Counts(CollectiveObserver):
    """Where the rank runs, and (step, kind, site, bytes) of each collective."""

    def __init__(self, context: ObserverContext) -> None:
        self.seen: list[tuple[int, int, int, int]] = []

    def after(self, c: Collective) -> None:
        self.seen.append((c.step, int(c.kind), int(c.site), c.bytes))

    def result(self) -> dict[str, Any]:
        node = os.environ["GROUP_RANK"]
        return {"pid": os.getpid(), "agent": os.getppid(), "node": node, "seen": self.seen}


def engine(path: str, **options: Any) -> LLM:
    return LLM(path, enforce_eager=True, page_size=8, device="cpu", threads_per_rank=1,
               ranks="torchrun", **options)  # fmt: skip


def tell(file: Path, what: str, **found: Any) -> None:
    with file.open("a") as lines:
        print(json.dumps({"what": what, **found}), file=lines)


def measured(path: str) -> dict[str, Any]:
    with engine(path, tp=2) as llm:
        llm.attach([Counts])
        tokens = [list(output.token_ids) for output in llm.generate(PROMPTS, GREEDY)]
        return {"tokens": tokens, "ranks": [observers[0] for observers in llm.detach()]}


def killed(path: str, whom: str) -> dict[str, Any]:
    """An engine one of whose processes is killed while it generates."""
    llm = engine(path, tp=2)
    llm.attach([Counts])
    ranks = [observers[0] for observers in llm.detach()]
    with llm.stream(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    ) as s:
        next(iter(s))
        begin = time.monotonic()
        os.kill(ranks[1][whom], signal.SIGKILL)
        try:
            for _ in s:
                pass
            return {"error": None}
        except EngineDeadError as error:
            took = time.monotonic() - begin
            found = {"rank": error.rank, "exitcode": error.exitcode, "lost": error.lost}
            return {**found, "error": str(error).splitlines()[0], "took_s": took, "ranks": ranks}
        finally:
            llm.close()


def main(path: str, file: Path) -> None:
    try:
        engine(path, tp=4)
    except ConfigError as error:
        tell(file, "refused", error=str(error))
    tell(file, "measured", **measured(path))
    tell(file, "rank killed", **killed(path, "pid"))
    tell(file, "measured again", **measured(path))
    tell(file, "agent killed", **killed(path, "agent"))


if __name__ == "__main__":
    with under_torchrun() as first:
        if first:
            main(sys.argv[1], Path(sys.argv[2]))
