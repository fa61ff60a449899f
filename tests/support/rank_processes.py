"""Ranks as processes of a test, which fails as soon as one of them does."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.multiprocessing

from engine.comm.rendezvous import Rendezvous

WITHIN_S = 180.0  # less than pytest's 300, which would leave the ranks behind
_GRACE_S = 1.0


def run_processes(
    run: Callable[..., object], *arguments: Any, world: int = 2, within_s: float = WITHIN_S
) -> None:
    """`run(rank, port, *arguments)` in a spawned process for each rank; `port` is for a
    ProcessGroupCommunicator. None of them is left, however this ends: without its peer a rank would
    wait in a collective until NCCL gives up, after 300 s.

    Raises:
        torch.multiprocessing.ProcessException: a rank raised (its traceback is in the message) or
            was killed.
        TimeoutError: after `within_s` some still run.
    """
    rendezvous = Rendezvous()
    deadline = time.monotonic() + within_s
    ranks = torch.multiprocessing.spawn(
        run, (rendezvous.port, *arguments), nprocs=world, join=False, daemon=True
    )
    try:
        while not ranks.join(max(0.0, deadline - time.monotonic()), grace_period=_GRACE_S):
            if time.monotonic() >= deadline:
                late = [i for i, process in enumerate(ranks.processes) if process.is_alive()]
                raise TimeoutError(f"ranks {late} have not ended within {within_s:g} s")
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
        rendezvous.close()


def found_by_ranks(
    run: Callable[..., object], world: int, arguments: Callable[[Any], Sequence[Any]]
) -> list[dict[str, Any]]:
    """What each of `world` spawned processes sends back: `run(rank, port, *arguments, pipe)`, which
    sends one pickled dict. `arguments` makes them by the context that the processes are of."""
    context = multiprocessing.get_context("spawn")
    rendezvous = Rendezvous()
    given = arguments(context)
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=run, args=(rank, rendezvous.port, *given, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    found = [pickle.loads(ours.recv_bytes()) for ours, _ in pipes]
    for process in processes:
        process.join()
    rendezvous.close()
    assert [process.exitcode for process in processes] == [0] * world
    return found
