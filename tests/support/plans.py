"""Configurations, machines and models for planning without Hydra, hardware or weights."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

from engine.shape import ModelShape
from harness.machine.capabilities import Machine
from harness.planning.plan import Model, Plan, build
from harness.settings.config import BenchConfig

SHAPE = ModelShape(
    model_type="qwen3",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=8,
    intermediate_size=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position=512,
    tied=True,
    qk_norm=True,
    qkv_bias=False,
    o_bias=False,
    dtype="float32",
    eos_token_ids=(1,),
)
CPU = Machine(gpus=0, cores=2, cxx="/usr/bin/g++", packages={})
SURROUNDINGS: dict[str, Any] = {"sources": "s", "versions": {"torch": "2"}, "hardware": "h"}


def config(**changes: Any) -> dict[str, Any]:
    """The default configuration as a plain dict, with `a__b=value` for a.b."""
    cfg = asdict(BenchConfig())
    cfg["instrument"] = ["collectives", "nvtx", "counts"]
    del cfg["workload"]["shape"]  # to_plain turns it into the two lengths
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = cfg
        for section in sections:
            place = place[section]
        assert key in place, name
        place[key] = value
    return cfg


def sweep(fixed: dict[str, Any] | None = None, **axes: list[Any]) -> list[dict[str, Any]]:
    """Every combination, the last axis fastest, as Hydra orders them."""
    return [
        config(**(fixed or {}), **dict(zip(axes, values, strict=True)))
        for values in product(*axes.values())
    ]


def plan(
    configs: list[dict[str, Any]],
    machine: Machine = CPU,
    surroundings: dict[str, Any] | None = None,
) -> Plan:
    """The plan of `configs` for the model SHAPE."""
    return build(
        configs,
        machine=machine,
        surroundings=SURROUNDINGS if surroundings is None else surroundings,
        load_model=lambda model: Model(SHAPE, {"name": model["name"]}),
    )
