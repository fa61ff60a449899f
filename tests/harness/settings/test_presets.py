"""Presets on a command line win over its experiment, and a key given by itself over both"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.__main__ import conf_folder, main
from harness.planning.plan import resolve
from harness.settings.config import BenchConfig, SettingsError, register
from harness.settings.launcher import compose
from harness.settings.validation import validate
from tests.support.plans import CPU, config

CONF = conf_folder()
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
LENGTHS = ("prompt_tokens", "output_tokens")


@pytest.fixture(autouse=True)
def _schema() -> None:
    register()


def composed(*words: str, config_dir: Path | None = None) -> list[dict[str, Any]]:
    points = compose(words, CONF, config_dir)
    for point in points:
        validate(point)
    assert len({json.dumps(point) for point in points}) == len(points), "each point once"
    return points


def lengths(points: list[dict[str, Any]]) -> set[tuple[int, int]]:
    return {tuple(point["workload"][key] for key in LENGTHS) for point in points}  # type: ignore[misc]


def preset(group: str, name: str) -> dict[str, Any]:
    read = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    assert isinstance(read, dict)
    return read


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_presets_are_what_they_say_under_every_experiment(experiment: str) -> None:
    points = composed(f"+experiment={experiment}", "workload=prefill", "measure=careful")
    assert {point["workload"]["kind"] for point in points} == {"prefill"}
    assert lengths(points) == {(512, 1)}
    assert all(preset("measure", "careful").items() <= p["measure"].items() for p in points)
    assert {point["experiment"] for point in points} == {experiment}

    words = ("workload=prefill", "workload.output_tokens=4", "parallel=tp1", "engine=compile_graph")
    narrow = composed(f"+experiment={experiment}", *words)
    assert lengths(narrow) == {(512, 4)}, "what is given by itself wins"
    modes = {(point["tp"], point["enforce_eager"], point["compile"]) for point in narrow}
    assert modes == {(1, False, "model")}, "no axis is left"
    assert {point["batch"] for point in narrow} == {point["batch"] for point in points}


@pytest.mark.parametrize("name", ["default", "quick"])
def test_a_way_to_measure_leaves_no_number_to_the_experiment(name: str) -> None:
    asked = preset("measure", name)
    assert set(asked) == set(preset("measure", "careful"))
    for point in composed("+experiment=levers", f"measure={name}", "parallel=tp1", "tp=2"):
        assert asked.items() <= point["measure"].items()
        assert point["tp"] == 2


@pytest.mark.parametrize("experiment", ["comm_share", "peers", "tp_sweep"])
def test_a_workload_with_lengths_of_its_own_takes_none_of_the_experiment(experiment: str) -> None:
    (nano,) = {json.dumps(p["workload"]) for p in composed("workload=nano_vllm")}
    points = composed(f"+experiment={experiment}", "workload=nano_vllm")
    assert {json.dumps(point["workload"]) for point in points} == {nano}
    assert {(p["batch"], p["engine"]["max_model_len"]) for p in points} == {(256, 4096)}


def test_each_of_several_presets_has_its_own_points() -> None:
    points = composed("+experiment=smoke", "workload=prefill,nano_vllm", "measure=quick,careful")
    found = [(p["workload"]["kind"], p["measure"]["name"], p["tp"], p["batch"]) for p in points]
    expected = [
        (kind, name, tp, batch)
        for tp in (1, 2)
        for kind, batches in (("prefill", (1, 2)), ("nano_vllm", (256,)))
        for name in ("quick", "careful")
        for batch in batches
    ]
    assert sorted(found) == sorted(expected)


def test_groups_of_the_same_keys_win_in_the_order_of_reading() -> None:
    """lever is read behind engine, wherever they stand, with an experiment as without one."""
    keys = ("enforce_eager", "compile", "attention", "comm", "engine")
    (alone,) = composed("lever=base", "engine=compile", "tp=2")
    for words in (("lever=base", "engine=compile"), ("engine=compile", "lever=base")):
        (point, other) = composed("+experiment=smoke", *words, "tp=2")
        assert {key: point[key] for key in keys} == {key: alone[key] for key in keys}
        assert other["compile"] == "off"


def test_a_preset_that_follows_from_the_point_does_so_under_an_experiment() -> None:
    points = composed("+experiment=smoke", "lever=nccl", "batch=1")
    assert [(point["tp"], point["comm"]) for point in points] == [(1, "symm_fused"), (2, "nccl")]


def test_presets_of_a_list_are_all_taken() -> None:
    points = composed("+experiment=smoke", "instrument=[stamps,profiler]", "batch=1", "tp=1")
    (point,) = points
    assert (point["timing"], point["instrument"]) == ("stamps", ["collectives", "profiler"])


OWN = """# @package _global_
timing: events
instrument: {profiler: true}
workload: {num_requests: 8, kind: nano_vllm}
measure: {min_repeats: 1}
hydra: {sweeper: {params: {batch: "1,2", workload.seed: "1,2"}}}
"""


def test_ones_own_presets_win_over_ones_own_experiment(tmp_path: Path) -> None:
    for place, text in {
        "experiment/mine": OWN,
        "measure/mine": "name: mine\nmin_repeats: 7\nskew_us: [1.5, 2.0]\n",
        "workload/mine": 'kind: decode\nseed: 9\nprompt_tokens: "${times:2,${batch}}"\n',
    }.items():
        (tmp_path / place).parent.mkdir()
        (tmp_path / f"{place}.yaml").write_text(text)
    words = ("+experiment=mine", "measure=mine", "workload=mine", "instrument=none")
    one, two = composed(*words, config_dir=tmp_path)
    assert (one["batch"], one["workload"]["prompt_tokens"], one["instrument"]) == (1, 2, [])
    assert (two["batch"], two["workload"]["prompt_tokens"], two["instrument"]) == (2, 4, [])
    for point in (one, two):
        assert (point["workload"]["seed"], point["workload"]["num_requests"]) == (9, None)
        assert (point["measure"]["min_repeats"], point["measure"]["skew_us"]) == (7, [1.5, 2.0])
        assert (point["timing"], point["measure"]["name"]) == ("events", "mine")


def test_groups_of_ones_own_are_presets_too(tmp_path: Path) -> None:
    (tmp_path / "size").mkdir()
    for name, batch in (("small", 3), ("large", 9)):
        text = f"# @package _global_\nbatch: {batch}\n"
        (tmp_path / "size" / f"{name}.yaml").write_text(text)
    for words in ([], ["+experiment=smoke", "tp=1"]):
        points = composed("+size=small,large", *words, config_dir=tmp_path)
        assert [point["batch"] for point in points] == [3, 9]


def test_a_model_and_instruments_are_whole(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "model: {path: /a, load_format: dummy}\ninstrument: {profiler: true}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    words = ("+experiment=mine", "model=tiny", "instrument=[nvtx,stamps]")
    (point,) = composed(*words, config_dir=tmp_path)
    assert point["model"] == {"name": "tiny", "path": None, "load_format": "auto"}
    assert (point["instrument"], point["timing"]) == (["collectives", "nvtx"], "stamps")
    (point,) = composed(*words, "model.path=/b", "instrument.skew=true", config_dir=tmp_path)
    assert point["model"] == {"name": "tiny", "path": "/b", "load_format": "auto"}
    assert point["instrument"] == ["collectives", "nvtx", "skew"]


def test_linked_lengths_are_lengths(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    axes = 'hydra: {sweeper: {params: {workload.shape: "8/8,64/8"}}}'
    for name, text in {"axis": axes, "base": "workload: {shape: 8/8}"}.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        word = f"+experiment={name}"
        assert lengths(composed(word, "workload=prefill", config_dir=tmp_path)) == {(512, 1)}
        both = (word, "workload=prefill", "workload.output_tokens=4")
        assert lengths(composed(*both, config_dir=tmp_path)) == {(512, 4)}
        both = (word, "workload=prefill", "workload.shape=2/3")
        assert lengths(composed(*both, config_dir=tmp_path)) == {(2, 3)}
        with pytest.raises(
            SettingsError, match=r"shape and workload.output_tokens: shape sets bot"
        ):
            composed(word, "workload.output_tokens=4", config_dir=tmp_path)
    shaped = composed("+experiment=comm_share", "workload.shape=2/3,4/5")
    assert lengths(shaped) == {(2, 3), (4, 5)}, "the axis of prompts gives way"


def test_the_base_alone_and_the_printed_configuration_have_the_presets(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ("+experiment=smoke", "workload=prefill", "measure=careful", "measure.warmup=5")
    (base,) = composed(*words, "hydra.mode=RUN")
    assert lengths([base]) == {(512, 1)}
    assert (base["measure"]["min_repeats"], base["measure"]["warmup"]) == (10, 5)
    for line in ([*words, "--cfg", "job"], ["--cfg", "job", *words]):
        assert main(line) == 0
        printed = yaml.safe_load(capfd.readouterr().out)
        assert printed["measure"] == base["measure"]
        assert {key: printed["workload"][key] for key in LENGTHS} == {
            "prompt_tokens": 512,
            "output_tokens": 1,
        }


def test_the_hand_made_points_of_other_tests_are_what_is_composed() -> None:
    assert asdict(BenchConfig())["measure"] == composed()[0]["measure"]
    assert resolve(config(), CPU) == resolve(composed()[0], CPU)


def test_hydra_is_asked_once_for_each_name_however_many_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It copies all files it has read at each question: 10 ms a word, 20 s for 300 points."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    asked: list[str] = []
    plain = ConfigLoaderImpl.get_group_options

    def counted(self: ConfigLoaderImpl, group_name: str, *more: Any, **options: Any) -> list[str]:
        asked.append(group_name)
        return plain(self, group_name, *more, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "get_group_options", counted)
    assert [cfg["batch"] for cfg in composed("batch=range(1,8)", "tp=1")] == [*range(1, 8)]
    assert asked.count("batch") == asked.count("tp") == 1
