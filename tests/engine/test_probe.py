"""Probe on two ranks that are processes, and what becomes of a test one of whose ranks fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from engine.comm.process_group import ProcessGroupCommunicator
from tests.support.checkpoints import Checkpoints, reference_logits
from tests.support.probe import Probe
from tests.support.rank_processes import run_processes

SEQUENCES = [[(7 * i + 3 * n) % 97 for i in range(13)] for n in range(3)]
PROMPT = 9


def _probe_rank(rank: int, port: int, path: Path, out: Path) -> None:
    torch.set_num_threads(1)
    comm = ProcessGroupCommunicator(rank, 2, "gloo", port, 60.0)
    options = {"device": "cpu", "enforce_eager": True, "page_size": 4, "max_model_len": 64}
    probe = Probe(path, comm, tp=2, **options)
    logits = probe.teacher_forced(SEQUENCES, PROMPT)
    assert (logits is None) == (rank == 1)
    if logits is not None:
        torch.save(logits, out)
    comm.barrier()
    probe.close()


def test_logits_of_two_ranks_are_transformers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Rank 0 alone collects its steps; the other has nothing to collect."""
    path, out = checkpoints(), tmp_path / "logits.pt"
    run_processes(_probe_rank, path, out)
    found = torch.load(out)
    for own, ids in zip(found, SEQUENCES, strict=True):
        expected = reference_logits(path, ids)[PROMPT - 1 :]
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def _fail(rank: int, port: int, how: str) -> None:
    if rank == 1 and how == "raises":
        raise ValueError("rank 1 cannot go on")
    if rank == 1 and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "within_s", "error", "said"),
    [
        ("raises", 180.0, ProcessRaisedException, "rank 1 cannot go on"),
        ("is killed", 180.0, ProcessExitedException, "process 1 terminated with signal SIGKILL"),
        ("hangs", 0.0, TimeoutError, r"ranks \[0, 1\] have not ended within 0 s"),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    how: str, within_s: float, error: type[Exception], said: str
) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(error, match=said):
        run_processes(_fail, how, within_s=within_s)
    assert set(multiprocessing.active_children()) <= before
