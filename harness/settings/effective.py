"""Requested against effective: the engine must run what it was asked to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.settings.abilities import PEERS
from harness.settings.config import ENGINE_AXES

# What the row of a point says of the engine that ran it.
EFFECTIVE = (*ENGINE_AXES, "mode", "load_format", "num_pages", "max_model_len", "threads_per_rank")


def differences(cfg: Mapping[str, Any], effective: Mapping[str, Any]) -> list[str]:
    """`name: asked, runs` for every setting that is not what was asked for. What was left open
    (null or auto) may become anything, and so may what a peer has no setting for; one rank needs no
    path for collectives."""
    asked: dict[str, Any] = {name: cfg[name] for name in ENGINE_AXES}
    peer = PEERS.get(cfg["backend"])
    taken = cfg["engine"] if peer is None else peer.takes
    asked |= {name: cfg["engine"][name] for name in taken}
    # What the engine takes of it: nothing where it captures nothing, and no more than a step has.
    if (rows := asked.get("graph_prompt_tokens")) is not None:
        most = 0 if cfg["enforce_eager"] else effective.get("max_num_batched_tokens", rows)
        asked["graph_prompt_tokens"] = min(rows, most)
    asked["load_format"] = cfg["model"]["load_format"]
    if cfg["tp"] == 1:
        del asked["comm"]
    wrong = []
    for name, value in asked.items():
        if value is None or value == "auto":
            continue
        found = effective.get(name, "nothing")
        if found != value:
            wrong.append(f"{name}: asked for {value}, the engine runs {found}")
    return wrong
