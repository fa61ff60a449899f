"""The planner: keys, the order of engines, skip reasons, limits of the model."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from harness.__main__ import conf_folder
from harness.machine.capabilities import Machine
from harness.machine.fingerprint import checkpoint
from harness.planning.plan import resolve
from harness.settings.config import AXES, SettingsError, register
from harness.settings.launcher import compose
from tests.support.plans import CPU, SURROUNDINGS, config, plan, sweep

AXIS_LISTS = {"tp": [1, 2], "batch": [1, 4, 16], "compile": ["off", "model"]}
TP_SWEEP = {**AXIS_LISTS, "enforce_eager": [True, False]}


def engine_runs(points: Any) -> list[str]:
    """Engine keys of the points that run, one for each stretch of equal keys."""
    keys = [p.engine_key for p in points if p.skip is None]
    return [k for i, k in enumerate(keys) if i == 0 or keys[i - 1] != k]


@pytest.mark.parametrize("order", list(permutations(TP_SWEEP)), ids="-".join)
def test_every_engine_starts_once_whatever_the_order_of_the_axes(order: tuple[str, ...]) -> None:
    made = plan(sweep(**{axis: TP_SWEEP[axis] for axis in order}))

    assert len(made.points) == 24
    assert sum(p.skip is None for p in made.points) == 12
    runs = engine_runs(made.points)
    assert len(runs) == len(set(runs)) == made.engine_starts == 4  # tp x compile
    assert [p.index for p in made.points] == list(range(24))


def test_fresh_engines_of_a_configuration_are_counted_as_starts() -> None:
    configs = sweep({"measure__n_process": 3}, batch=[1, 2], tp=[1, 2])
    configs += sweep({"measure__n_process": 5}, batch=[4])
    assert plan(configs).engine_starts == 5 + 3


def test_every_engine_starts_once_for_points_in_no_order_at_all() -> None:
    configs = sweep(**TP_SWEEP)
    random.Random(0).shuffle(configs)
    runs = engine_runs(plan(configs).points)
    assert len(runs) == len(set(runs)) == 4


def test_engines_come_in_the_order_in_which_the_axes_name_them() -> None:
    points = plan(sweep(batch=[1, 4], tp=[2, 1])).points
    assert [(p.axes["tp"], p.axes["batch"]) for p in points] == [(2, 1), (2, 4), (1, 1), (1, 4)]


NEW_ENGINE = {
    "tp": 2,
    "compile": "model",
    "attention": "sdpa",
    "comm": "gloo",
    "page_size": 32,
    "dtype": "bfloat16",
    "cache": "warm",
    "model__name": "qwen3-0.6b",
    "model__load_format": "dummy",
    "engine__max_model_len": 256,
    "engine__max_num_seqs": 64,
    "engine__max_num_batched_tokens": 512,
    "engine__num_pages": 99,
    "engine__prefix_cache": True,
    "engine__threads_per_rank": 1,
    "engine__seed": 3,
}
SAME_ENGINE = {
    "workload__prompt_tokens": 17,
    "workload__output_tokens": 33,
    "workload__seed": 5,
    "workload__temperature": 0.5,
    "measure__min_repeats": 4,
    "measure__n_process": 2,
    "instrument": [],
    "timing": "events",
}
NO_OTHER_POINT = {
    "experiment": "another",
    "results_dir": "elsewhere",
    "resume": "never",
    "fail_fast": True,
}


@pytest.mark.parametrize("name", NEW_ENGINE)
def test_what_an_engine_is_started_with_is_in_its_key(name: str) -> None:
    base, other = plan([config(), config(**{name: NEW_ENGINE[name]})]).points
    assert base.engine_key != other.engine_key
    assert base.point_id != other.point_id


@pytest.mark.parametrize("name", SAME_ENGINE)
def test_what_is_asked_of_an_engine_makes_another_point_on_the_same_engine(name: str) -> None:
    base, other = plan([config(), config(**{name: SAME_ENGINE[name]})]).points
    assert base.engine_key == other.engine_key
    assert base.point_id != other.point_id


@pytest.mark.parametrize("name", NO_OTHER_POINT)
def test_how_the_run_is_kept_makes_no_other_point(name: str) -> None:
    assert len(plan([config(), config(**{name: NO_OTHER_POINT[name]})]).points) == 1


@pytest.mark.parametrize("part", SURROUNDINGS)
def test_sources_versions_and_hardware_are_in_every_key(part: str) -> None:
    base, other = plan([config()]), plan([config()], surroundings={**SURROUNDINGS, part: "new"})
    assert base.points[0].point_id != other.points[0].point_id
    assert base.key != other.key


def test_a_shared_engine_takes_the_largest_batch() -> None:
    points = plan(sweep(tp=[1, 2], batch=[1, 4, 16])).points
    assert {p.cfg["engine"]["max_num_seqs"] for p in points} == {16}
    alone = plan(sweep(tp=[1, 2], batch=[1])).points
    assert {p.cfg["engine"]["max_num_seqs"] for p in alone} == {1}
    assert {p.engine_key for p in alone}.isdisjoint(p.engine_key for p in points)


def test_where_batch_limits_how_many_run_at_once_it_is_the_engines_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    trace.write_text(f"{header}2024-01-01,1,1\n")
    fixed = {"workload__kind": "trace", "workload__trace": str(trace)}
    points = plan(sweep(fixed, batch=[4, 16])).points
    assert [p.cfg["engine"]["max_num_seqs"] for p in points] == [4, 16]
    assert points[0].engine_key != points[1].engine_key

    before = plan(sweep(fixed, batch=[4])).points[0].point_id
    trace.write_text(f"{header}2024-01-01,1,2\n")
    assert plan(sweep(fixed, batch=[4])).points[0].point_id != before, "the trace's content counts"


def test_a_point_that_is_named_twice_is_planned_once() -> None:
    assert [p.axes["batch"] for p in plan(sweep(batch=[1, 4, 1])).points] == [1, 4]


def test_a_plan_whose_skipped_points_differ_is_another_plan() -> None:
    configs = sweep(compile=["off", "model"])
    without = Machine(gpus=0, cores=2, cxx=None, packages={})
    assert plan(configs).key != plan(configs, without).key


def test_axes_name_a_point() -> None:
    (point,) = plan([config(tp=2, model__name="tiny", workload__kind="prefill")]).points
    assert tuple(point.axes) == AXES
    assert (point.axes["tp"], point.axes["model"]) == (2, "tiny")
    assert point.axes["workload"] == "prefill"
    assert point.axes["enforce_eager"] is True


def test_a_tp_size_that_the_model_cannot_take_is_an_error_and_no_skipped_row() -> None:
    with pytest.raises(ConfigError, match=r"tp=3: 16 query heads.*\{1, 2, 4, 8, 16\}"):
        plan(sweep(tp=[1, 3]))


def test_requests_longer_than_the_model_are_an_error() -> None:
    with pytest.raises(
        SettingsError, match=r"532 tokens a request, above the limit of model tiny, 512"
    ):
        plan([config(workload__prompt_tokens=500)])
    with pytest.raises(SettingsError, match=r"above engine.max_model_len, 40; shorten them"):
        plan([config(engine__max_model_len=40)])
    with pytest.raises(SettingsError, match=r"engine.max_model_len=513: .* at most 512 tokens"):
        plan([config(engine__max_model_len=513)])
    plan([config(workload__prompt_tokens=480)])


def test_auto_becomes_what_the_machine_has() -> None:
    here = resolve(config(), CPU)
    assert (here["device"], here["model"]) == (
        "cpu",
        {"name": "tiny", "path": None, "load_format": "auto"},
    )
    there = resolve(config(), replace(CPU, gpus=4))
    assert (there["device"], there["model"]) == (
        "cuda",
        {"name": "qwen3-0.6b", "path": None, "load_format": "dummy"},
    )


def test_a_path_names_the_model_and_keeps_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "My-Qwen"
    folder.mkdir()
    model = resolve(config(model__path=str(folder)), CPU)["model"]
    assert model == {"name": "My-Qwen", "path": str(folder), "load_format": "auto"}
    hub = resolve(config(model__path="Qwen/Qwen3-0.6B"), CPU)["model"]
    assert hub == {"name": "Qwen3-0.6B", "path": "Qwen/Qwen3-0.6B", "load_format": "auto"}


@pytest.mark.parametrize("size", ["0.6b", "1.7b", "4b", "8b", "14b", "32b"])
def test_a_path_beside_a_published_size_means_real_weights(size: str, tmp_path: Path) -> None:
    register()
    (tmp_path / "weights").mkdir()
    choice = f"model=qwen3-{size}"
    (cfg,) = compose([choice, f"model.path={tmp_path / 'weights'}"], conf_folder())
    assert resolve(cfg, CPU)["model"]["load_format"] == "auto"
    (cfg,) = compose([choice], conf_folder())
    assert resolve(cfg, CPU)["model"]["load_format"] == "dummy"


def test_planning_leaves_the_given_configurations_as_they_were() -> None:
    given = config()
    plan([given])
    assert given == config()


def test_a_checkpoint_is_known_by_its_config_and_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    os.utime(weights, ns=(0, 10**9))
    seen = [checkpoint(tmp_path)]
    (tmp_path / "config.json").write_text('{"a": 1}')
    seen.append(checkpoint(tmp_path))
    weights.write_bytes(b"12345")
    os.utime(weights, ns=(0, 10**9))
    seen.append(checkpoint(tmp_path))
    os.utime(weights, ns=(0, 2 * 10**9))
    seen.append(checkpoint(tmp_path))
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    assert checkpoint(tmp_path) == seen[-1]
