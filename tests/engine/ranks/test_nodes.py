"""Ranks on two nodes, here two process groups of one machine that torchrun brings together."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM, ConfigError
from engine.comm import SoloCommunicator
from engine.comm.rendezvous import LaunchedBy
from engine.comm.types import Kind, Site
from engine.config import EngineConfig, ResolvedConfig
from engine.execution import runner
from engine.ranks import nodes
from engine.resolve import resolve
from engine.shape import ModelShape
from tests.support.checkpoints import Checkpoints
from tests.support.fake_engine import wait_until
from tests.support.greedy import greedy_reference
from tests.support.nodes import two_nodes
from tests.support.pids import assert_gone
from tests.support.torchrun_target import PROMPTS, TOKENS

LAYERS, HIDDEN, VOCAB = 3, 24, 98  # of the checkpoint; 97 ids are padded to 98 over two ranks
LAST = "agent killed"


@pytest.fixture(scope="module")
def told(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, Any]]]:
    """What the target's process of rank 0 says, whichever of the two nodes that is on."""
    file = tmp_path_factory.mktemp("nodes") / "told"
    with two_nodes("tests.support.torchrun_target", str(checkpoints()), str(file)) as nodes:
        wait_until(lambda: _done(file) or all(node.poll() is not None for node in nodes), 240)
        lines = file.read_text().splitlines() if file.exists() else []
        yield {found.pop("what"): found for found in map(json.loads, lines)}


def _done(file: Path) -> bool:
    return file.exists() and LAST in file.read_text()


@pytest.mark.parametrize("which", ["measured", "measured again"])
def test_tokens_are_transformers_and_each_rank_has_the_collectives_of_one_machine(
    told: dict[str, dict[str, Any]], which: str, checkpoints: Checkpoints
) -> None:
    found = told[which]
    expected = [list(greedy_reference(checkpoints(), tuple(p), TOKENS)) for p in PROMPTS]
    assert found["tokens"] == expected
    first, second = found["ranks"]
    assert (first["node"] != second["node"], first["agent"] != second["agent"]) == (True, True)
    assert first["seen"] == second["seen"]
    # One step for all prompts, then one a token; a step has 2L + 1 all-reduces, a gather of the
    # logits of its 3 rows and a broadcast of as many ids.
    rows = [sum(map(len, PROMPTS))] + [len(PROMPTS)] * (TOKENS - 1)
    sites = [Site.EMBED, *[Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ] * LAYERS]
    assert [tuple(c[1:]) for c in first["seen"]] == [
        one
        for tokens in rows
        for one in (
            *((Kind.ALL_REDUCE, site, tokens * HIDDEN * 4) for site in sites),
            (Kind.GATHER, Site.LM_HEAD, len(PROMPTS) * VOCAB * 4),
            (Kind.BROADCAST, Site.TOKEN_IDS, len(PROMPTS) * 8),
        )
    ]


def test_a_killed_rank_of_another_node_ends_its_engine_and_the_next_one_has_a_new_one(
    told: dict[str, dict[str, Any]],
) -> None:
    found = told["rank killed"]
    assert (found["rank"], found["exitcode"], found["lost"]) == (1, -9, False)
    assert found["error"] == "rank 1 ended with exit code -9; the engine is closed"
    assert found["took_s"] < 60
    assert told["measured again"]["ranks"][1]["agent"] == found["ranks"][1]["agent"]


def test_a_node_that_is_lost_surfaces_and_nothing_is_left_running(
    told: dict[str, dict[str, Any]],
) -> None:
    found = told[LAST]
    assert (found["rank"], found["exitcode"], found["lost"]) == (1, None, True)
    assert found["error"] == (
        "rank 1 is lost: its node or the process that torchrun started there is gone; the engine "
        "is closed"
    )
    assert found["took_s"] < 60
    engines = [one["ranks"] for one in told.values() if "ranks" in one]
    pids = [rank["pid"] for ranks in engines for rank in ranks]
    assert len(set(pids)) == 8
    assert_gone([*pids, found["ranks"][1]["agent"]])


def test_more_ranks_than_processes_are_refused(told: dict[str, dict[str, Any]]) -> None:
    assert told["refused"]["error"] == (
        "ranks='torchrun': tp=4 in the process of rank 0, and torchrun has started 2; build "
        "engines in that of rank 0, of at most as many ranks"
    )


def test_outside_of_torchrun_nothing_starts(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"'RANK' .*start the script by torchrun, or leave"):
        LLM(checkpoints(), tp=2, ranks="torchrun", device="cpu", enforce_eager=True)


# -- the GPU of a rank ----------------------------------------------------------------------------


class Stopped(Exception):
    """Raised in place of what needs a GPU."""


def stop(*args: Any, **kwargs: Any) -> Any:
    raise Stopped(args, kwargs)


@pytest.fixture
def on_gpus(checkpoints: Checkpoints) -> tuple[ResolvedConfig, ModelShape]:
    path = checkpoints()
    config = EngineConfig(model=str(path), tp=4, device="cpu", enforce_eager=True)
    shape = ModelShape.from_hf(path)
    return replace(resolve(config, shape), device="cuda"), shape


@pytest.mark.parametrize(
    ("rank", "local_rank", "first_gpu", "gpu"), [(3, 1, 0, 1), (2, 0, 0, 0), (1, 1, 2, 3)]
)
def test_a_remote_rank_has_the_gpu_of_its_place_on_its_node(
    on_gpus: tuple[ResolvedConfig, ModelShape],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    local_rank: int,
    first_gpu: int,
    gpu: int,
) -> None:
    """Ranks 3 and 2 on the second of two nodes of two GPUs each, and rank 1 of an engine that
    begins at GPU 2 of a single node."""
    config, shape = on_gpus
    caller, agent = multiprocessing.Pipe()
    links = iter([agent, *multiprocessing.Pipe()])
    monkeypatch.setattr(nodes, "dial", lambda *to: next(links))
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method: SimpleNamespace(Process=stop)
    )
    caller.send((replace(config, first_gpu=first_gpu), shape, "127.0.0.1", 77))
    me = LaunchedBy(rank, 4, local_rank, 2, "127.0.0.1", 5, True, "0")
    with pytest.raises(Stopped) as stopped:
        nodes._be_rank({"key": "00", "host": "127.0.0.1", "port": 7, "tp": 4}, me)
    place = stopped.value.args[1]["args"][0]
    assert (place.rank, place.gpu) == (rank, gpu)
    caller.close()


def test_a_rank_runs_where_it_was_put(
    on_gpus: tuple[ResolvedConfig, ModelShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of its engine, whose first GPU is number 0, and GPU 3 is the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(runner, "Qwen3ForCausalLM", stop)
    with pytest.raises(Stopped) as stopped:
        runner.Runner(*on_gpus, SoloCommunicator())
    assert stopped.value.args[0][5] == torch.device("cuda", 3)
