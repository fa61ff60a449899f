"""Settings: what Hydra composes of conf/ and a command line, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.__main__ import conf_folder
from harness.settings.config import SettingsError, register
from harness.settings.launcher import compose, run
from harness.settings.validation import validate
from tests.support.plans import config

CONF = conf_folder()
GROUPS = [
    f"{group.name}={path.stem}"
    for group in sorted(CONF.iterdir())
    for path in sorted(group.glob("*.yaml"))
    if group.name != "experiment"
]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _schema() -> None:
    register()


def composed(*overrides: str, config_dir: Path | None = None) -> list[dict[str, Any]]:
    return compose(overrides, CONF, config_dir)


def test_tp_sweep_is_the_product_of_its_axes_without_a_flag() -> None:
    points = composed("+experiment=tp_sweep")
    asked = [(c["tp"], c["batch"], c["enforce_eager"], c["compile"]) for c in points]
    assert asked == [
        (tp, batch, eager, how)
        for tp in (1, 2)
        for batch in (1, 4, 16)
        for eager in (True, False)
        for how in ("off", "model")
    ]
    assert {c["experiment"] for c in points} == {"tp_sweep"}
    assert {c["workload"]["kind"] for c in points} == {"decode"}


def test_the_defaults_that_tables_leave_out_are_those_of_a_bare_command_line() -> None:
    from harness.settings.naming import changed, defaults, settings

    (bare,) = composed()
    known = {**defaults()}
    assert known.pop("workload.shape") is None, "it has become the two lengths"
    assert known == settings(bare)
    asked = [settings(cfg) for cfg in composed("workload=nano_vllm", "engine.fused=none", "tp=1,2")]
    assert changed(asked) == [
        "workload.num_requests", "workload.temperature", "engine.max_model_len", "engine.fused",
    ]  # fmt: skip


def test_the_command_line_narrows_and_replaces_the_axes() -> None:
    overrides = ("tp=2", "batch=8,32", "enforce_eager=true", "compile=off,layer")
    points = composed("+experiment=tp_sweep", *overrides)
    assert [(c["tp"], c["batch"], c["compile"]) for c in points] == [
        (2, 8, "off"),
        (2, 8, "layer"),
        (2, 32, "off"),
        (2, 32, "layer"),
    ]


def test_run_mode_takes_the_base_values_alone() -> None:
    (point,) = composed("+experiment=tp_sweep", "hydra.mode=RUN", "tp=2")
    assert (point["tp"], point["batch"], point["experiment"]) == (2, 1, "tp_sweep")


def test_off_and_booleans_mean_what_they_say() -> None:
    points = composed("compile=off,model", "enforce_eager=true,false")
    assert [(c["compile"], c["enforce_eager"]) for c in points] == [
        ("off", True),
        ("off", False),
        ("model", True),
        ("model", False),
    ]


@pytest.mark.parametrize("choice", GROUPS)
def test_every_file_of_a_group_composes_and_stands(choice: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").touch()
    further = [f"workload.trace={tmp_path}/trace.csv"] if choice == "workload=trace" else []
    (point,) = composed(choice, *further)
    validate(point)
    group, _, name = choice.partition("=")
    found = {
        "model": point["model"]["name"],
        "measure": point["measure"]["name"],
        "workload": point["workload"]["kind"],
        "parallel": f"tp{point['tp']}",
    }
    assert found.get(group, name) == name


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_stands(experiment: str) -> None:
    points = composed(f"+experiment={experiment}")
    assert points
    for point in points:
        validate(point)
        assert point["experiment"] == experiment


def test_groups_preset_the_axes() -> None:
    (graph,) = composed("engine=compile_graph", "parallel=tp4")
    assert (graph["enforce_eager"], graph["compile"], graph["tp"]) == (False, "model", 4)
    (nano,) = composed("workload=nano_vllm")
    assert (nano["batch"], nano["workload"]["num_requests"]) == (256, 256)
    assert (nano["workload"]["temperature"], nano["engine"]["max_model_len"]) == (0.6, 4096)
    (named,) = composed("model=qwen3-8b")
    assert named["model"] == {"name": "qwen3-8b", "path": None, "load_format": "auto"}


def test_instruments_are_a_list() -> None:
    assert composed()[0]["instrument"] == ["collectives", "nvtx", "counts"]
    assert composed("instrument=none")[0]["instrument"] == []
    assert composed("instrument=[nvtx,counts]")[0]["instrument"] == ["nvtx", "counts"]
    assert composed("instrument.nvtx=false")[0]["instrument"] == ["collectives", "counts"]


@pytest.mark.parametrize("name", ["workload.trace", "model.path", "results_dir"])
def test_a_quoted_path_is_one_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = "a,b = [c] {d}(e)/f.csv"
    (cfg,) = composed(f'{name}="{path}"')
    *section, key = name.split(".")
    assert (cfg[section[0]] if section else cfg)[key] == path
    assert refused(f"{name}={path}")
    assert "is quoted: 'workload.trace=\"a,b.csv\"'" in capsys.readouterr().err


def test_arrivals_need_no_quotes_for_hydra() -> None:
    arrivals = [c["workload"]["arrivals"] for c in composed("workload.arrivals=all,poisson(2.5)")]
    assert arrivals == ["all", "poisson(2.5)"]
    assert composed('workload.arrivals="poisson(3)"')[0]["workload"]["arrivals"] == "poisson(3)"


def test_profile_is_of_the_native_engine_alone() -> None:
    with pytest.raises(SettingsError, match="backend=vllm: profile reads the ranges of the native"):
        validate(config(backend="vllm", instrument=["nsys"]))
    validate(config(backend="vllm", instrument=["collectives"]))


@pytest.mark.parametrize("name", ["plain", "a, b=[c]", 'q"uote', "it's", "end\\", 'both\\"'])
def test_ones_own_experiments_are_found_and_override_with_config_dir(
    name: str, tmp_path: Path
) -> None:
    tmp_path = tmp_path / name
    (tmp_path / "experiment").mkdir(parents=True)
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntp: 4\nhydra: {sweeper: {params: {batch: '2,3'}}}\n"
    )
    points = composed("+experiment=mine", config_dir=tmp_path)
    assert [(c["experiment"], c["tp"], c["batch"]) for c in points] == [
        ("mine", 4, 2),
        ("mine", 4, 3),
    ]


WRONG_FILES = {
    "a key": "tpp: 2",
    "a nested key": "workload: {promt_tokens: 3}",
    "a type": "tp: two",
    "an axis": "hydra: {sweeper: {params: {batchs: '1,2'}}}",
    "an axis value": "hydra: {sweeper: {params: {batch: '1,x'}}}",
    "a setting of the sweeper": "hydra: {sweeper: {parameters: {batch: '1,2'}}}",
    "a group": "defaults: [{override /modell: tiny}]",
    "a choice of a group": "defaults: [{override /model: tyni}]",
    "an unquoted off": "compile: off",
    "YAML": "tp: [1",
}


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_mistake_in_an_experiment_ends_it_before_the_points_are_known(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "wrong.yaml"
    path.write_text(f"# @package _global_\n{WRONG_FILES[what]}\n")

    assert refused("+experiment=wrong", "--config-dir", str(tmp_path)), what
    assert capsys.readouterr().err.strip()


WRONG_WORDS = [
    "tpp=1",
    "+tpp=1",
    "+workload.promt_tokens=1",
    "tp=two",
    "tp=1,2,x",
    "tp=1.5",
    "compile=on",
    "compile=off,on",
    "model=tinny",
    "+experiment=tp_swep",
    "+experiment=tp_sweep,smoke",
    "batch",
    "hydra/launcher=joblib",
    "hydra/sweeper=optuna",
    "--no-such-flag",
    "--config-dir=/no/such/folder",
]


@pytest.mark.parametrize("word", WRONG_WORDS)
def test_a_mistake_on_the_command_line_ends_it_before_the_points_are_known(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(word)
    assert capsys.readouterr().err.strip()


def refused(*words: str) -> bool:
    """Whether the command line is refused, with a status that a script sees."""
    reached = []

    def handler(configs: list[dict[str, Any]]) -> int:
        for cfg in configs:
            validate(cfg)
        reached.append(configs)
        return 0

    return run(words, CONF, handler) != 0 and not reached


WRONG_VALUES = [
    ({"tp": 0}, "tp=0: give at least 1"),
    ({"batch": -1}, "batch=-1: give at least 1"),
    ({"page_size": 0}, "page_size=0: give at least 1"),
    ({"compile": "all"}, "compile=all: choose one of off, layer, model"),
    ({"compile": "False"}, r'choose one of off, layer, model \(in a YAML file write "off" in quot'),
    (
        {"attention": "flash3"},
        "attention=flash3: choose one of auto, flash2, flash2_triton, flash4, triton, sdpa",
    ),
    ({"comm": "mpi"}, "comm=mpi: choose one of auto, nccl, gloo, symm_mem"),
    ({"dtype": "fp8"}, "dtype=fp8: choose one of auto, bfloat16, float16, float32"),
    ({"device": "tpu"}, "device=tpu: choose one of auto, cpu, cuda"),
    ({"model__load_format": "gguf"}, "model.load_format=gguf: choose one of auto, dummy"),
    ({"engine__fused": "all"}, "engine.fused=all: choose one of auto, none, layers, store"),
    ({"timing": "cupti"}, "timing=cupti: choose one of auto, stamps, events, host"),
    ({"cache": "hot"}, "cache=hot: choose one of cold, warm"),
    ({"workload__kind": "chat"}, "workload.kind=chat: choose one of decode, prefill"),
    ({"workload__output_tokens": 0}, "workload.output_tokens=0: give at least 1"),
    ({"workload__temperature": -0.1}, "workload.temperature=-0.1: give at least 0"),
    ({"engine__graph_prompt_tokens": -1}, "engine.graph_prompt_tokens=-1: give at least 0"),
    ({"workload__temperature": float("nan")}, "workload.temperature=nan: give a finite number"),
    ({"workload__temperature": float("inf")}, "workload.temperature=inf: give a finite number"),
    ({"measure__rel_noise": float("inf")}, "measure.rel_noise=inf: give a finite number"),
    ({"measure__wall_limit_s": float("inf")}, "measure.wall_limit_s=inf: give a finite number"),
    ({"measure__backlog_us": float("-inf")}, "measure.backlog_us=-inf: give a finite number"),
    ({"engine__memory_utilization": float("nan")}, "engine.memory_utilization=nan: give a fini"),
    ({"workload__arrivals": "trace"}, "workload.arrivals=trace: decode sends its whole batch"),
    ({"workload__arrivals": "poisson(0)"}, r"workload.arrivals=poisson\(0\): give all, trace or"),
    ({"workload__kind": "trace"}, "workload.trace=null: workload=trace needs workload.trace="),
    (
        {"workload__kind": "trace", "workload__trace": "/no/such.csv"},
        "workload.trace=/no/such.csv: no such file",
    ),
    (
        {"workload__kind": "nano_vllm", "workload__arrivals": "trace"},
        "workload.arrivals=trace: nano_vllm has no arrival times; use workload=trace",
    ),
    ({"measure__max_repeats": 2}, "measure.max_repeats=2: must be at least measure.min_repeats=3"),
    ({"measure__warmup": 0}, "measure.warmup=0: give at least 1"),
    ({"measure__rel_noise": 0.0}, "measure.rel_noise=0.0: give a value above 0"),
    ({"measure__point_timeout_s": 0}, "measure.point_timeout_s=0: give a value above 0"),
    ({"engine__memory_utilization": 1.5}, r"engine.memory_utilization=1.5: give a value in \(0, 1"),
    ({"results_dir": ""}, "results_dir=: give a folder, as in results_dir=results/runs"),
    ({"engine__num_pages": 0}, "engine.num_pages=0: give at least 1"),
    ({"engine__max_num_seqs": 4, "batch": 16}, "engine.max_num_seqs=4: batch=16 needs at least 16"),
    (
        {"engine__max_num_batched_tokens": 8, "batch": 16},
        "engine.max_num_batched_tokens=8: a decode step of 16 requests has as many tokens",
    ),
]


@pytest.mark.parametrize(("settings", "words"), WRONG_VALUES)
def test_a_value_that_cannot_stand_is_named_with_its_limit(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        validate(config(**settings))


def test_the_defaults_stand() -> None:
    validate(config())
    validate(composed()[0])
