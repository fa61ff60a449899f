"""Rules that leave combinations out: what they match, what is no rule, what a plan makes of it"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.errors import ConfigError
from harness.__main__ import conf_folder
from harness.settings.config import SettingsError, register
from harness.settings.launcher import compose
from harness.settings.skip_rules import skip_rule
from tests.support.plans import config, plan, sweep

ROOT = Path(__file__).resolve().parents[3]
POINT = {"tp": 2, "batch": 16, "compile": "layer", "device": "cpu", "workload__prompt_tokens": 128,
         "model__name": "tiny", "workload__temperature": 0.5}  # fmt: skip


def reason(*rules: Any, **changes: Any) -> str | None:
    return skip_rule(config(**{**POINT, **changes, "skip": list(rules)}))


MET = [
    {"tp": 2},
    {"tp": 2.0},
    {"tp": 2, "compile": "layer"},
    {"tp": [1, 2]},
    {"batch": ">=16"},
    {"batch": "> 15.5"},
    {"batch": ["<8", ">=16"]},
    {"compile": "!=off"},
    {"enforce_eager": True},
    {"enforce_eager": "!=false"},
    {"page_size": None},
    {"workload.prompt_tokens": 128, "model": "tiny", "workload": "decode", "measure": "quick"},
    {"workload.temperature": 0.5},
    {"workload.trace": None},
]
NOT_MET = [
    {"tp": 1},
    {"tp": 2, "compile": "off"},
    {"tp": [1, 4]},
    {"batch": "<16"},
    {"batch": "<=15"},
    {"compile": "!=layer"},
    {"enforce_eager": False},
    {"page_size": 16},
    {"page_size": ">=16"},
    {"model": "!=tiny"},
]


@pytest.mark.parametrize("when", MET, ids=str)
def test_a_rule_is_met_where_all_of_it_holds(when: dict[str, Any]) -> None:
    assert reason({"when": {"tp": 8}, "reason": "no"}, {"when": when, "reason": "yes"}) == "yes"


@pytest.mark.parametrize("when", NOT_MET, ids=str)
def test_a_rule_is_not_met_where_part_of_it_does_not_hold(when: dict[str, Any]) -> None:
    assert reason({"when": when, "reason": "yes"}) is None


WRONG = [
    ({"wen": {"tp": 2}, "reason": "x"}, r"skip\[0\].wen: a rule has when and reason; did you m"),
    ({"when": {"tp": 2}}, r"skip\[0\].reason: say why"),
    ({"when": {"tp": 2}, "reason": " "}, r"skip\[0\].reason: say why"),
    ({"when": {}, "reason": "x"}, r"skip\[0\].when: name at least one setting"),
    ({"when": {"bach": 2}, "reason": "x"}, r"skip\[0\].when.bach: no such .* did you mean batch\?"),
    ({"when": {"model.name": "tiny"}, "reason": "x"}, r"when.model.name: .* did you mean model\?"),
    ({"when": {"compile": "layr"}, "reason": "x"}, r"compile=layr: choose among off, layer, model"),
    ({"when": {"compile": False}, "reason": "x"}, r'compile=false: .* write "off" in quotes'),
    ({"when": {"tp": "two"}, "reason": "x"}, r"skip\[0\].when.tp=two: tp is a number, as in 2"),
    ({"when": {"tp": True}, "reason": "x"}, r"tp=True: tp is a number"),
    ({"when": {"enforce_eager": 3}, "reason": "x"}, r"enforce_eager=3: .* true or false"),
    ({"when": {"model": ">3"}, "reason": "x"}, r"model=>3: > compares numbers, and model is tiny"),
    ({"when": {"tp": ">two"}, "reason": "x"}, r"tp=>two: > compares numbers"),
    ({"when": {"batch": 1, "tp": "two"}, "reason": "x"}, r"tp=two: tp is a number"),
    ("tp=2", r"skip\[0\]=tp=2: a rule is \{when"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "words"), WRONG, ids=str)
def test_what_is_no_rule_is_named_with_its_place(rule: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        reason(rule)


def test_a_later_rule_is_checked_though_an_earlier_one_is_met() -> None:
    with pytest.raises(SettingsError, match=r"skip\[1\].when.tpp: no such setting"):
        reason({"when": {"tp": 2}, "reason": "x"}, {"when": {"tpp": 2}, "reason": "y"})


def test_points_that_a_rule_leaves_out_are_skipped_with_its_reason() -> None:
    rule = {"when": {"tp": 2, "batch": ">=8"}, "reason": "known not to fit"}
    made = plan(sweep({"skip": [rule]}, batch=[1, 8, 16], tp=[1, 2]))
    asked = [(p.axes["tp"], p.axes["batch"], p.skip) for p in made.points]
    assert asked == [
        (1, 1, None), (1, 8, None), (1, 16, None),
        (2, 1, None), (2, 8, "known not to fit"), (2, 16, "known not to fit"),
    ]  # fmt: skip
    assert made.engine_starts == 2


def test_a_skipped_point_in_the_middle_starts_no_second_engine() -> None:
    from harness.sweep.execute import Unit, _engine, units

    rule = {"when": {"batch": 8}, "reason": "in the middle"}
    made = plan(sweep({"skip": [rule]}, batch=[1, 8, 16]))
    assert [p.axes["batch"] for p in made.points] == [1, 16, 8]
    found: list[Unit] = units(made)
    keys = [_engine(unit) for unit in found if unit.point.skip is None]
    assert len(set(keys)) == 1 and [u.point.skip for u in found] == [None, None, "in the middle"]


def test_other_points_are_the_same_ones_with_a_rule_and_without() -> None:
    without = {p.point_id for p in plan(sweep(tp=[1, 2], batch=[1, 4])).points}
    rules = [{"when": {"tp": 2, "batch": 1}, "reason": "x"}]
    points = plan(sweep({"skip": rules}, tp=[1, 2], batch=[1, 4])).points
    assert {p.point_id for p in points} == without


def test_an_engine_is_not_made_for_a_batch_that_a_rule_leaves_out() -> None:
    rules = [{"when": {"batch": 256}, "reason": "out of memory"}]
    points = plan(sweep({"skip": rules}, batch=[1, 16, 256])).points
    assert {p.cfg["engine"]["max_num_seqs"] for p in points} == {16}


def test_a_rule_spares_a_combination_that_no_model_takes() -> None:
    with pytest.raises(ConfigError, match="tp=3"):
        plan(sweep(tp=[1, 3]))
    rule = {"when": {"tp": 3}, "reason": "16 heads"}
    assert [p.skip for p in plan(sweep({"skip": [rule]}, tp=[1, 3])).points] == [None, "16 heads"]


def test_rules_are_written_in_an_experiment_or_on_the_command_line(tmp_path: Path) -> None:
    register()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "skip:\n"
        '  - {when: {tp: 2, compile: "off", workload.prompt_tokens: ">8"}, reason: "slow, here"}\n'
        "hydra: {sweeper: {params: {tp: '1,2', compile: 'off,layer'}}}\n"
    )
    cfgs = compose(["+experiment=mine"], conf_folder(), tmp_path)
    found = [(c["tp"], c["compile"], skip_rule(c)) for c in cfgs]
    assert found == [
        (1, "off", None), (1, "layer", None), (2, "off", "slow, here"), (2, "layer", None),
    ]  # fmt: skip
    words = ["tp=1,2", 'skip=[{when:{tp:">1"},reason:"a reason, with a comma"}]']
    cfgs = compose(words, conf_folder())
    assert [skip_rule(c) for c in cfgs] == [None, "a reason, with a comma"]


def test_the_rules_of_the_documents_are_rules() -> None:
    (text,) = re.findall(r"```yaml\n(  skip:.*?)```", (ROOT / "docs/config.md").read_text(), re.S)
    rules = yaml.safe_load(text)["skip"]
    assert reason(*rules) == "known to be slow here"
    long = {"tp": 1, "batch": 64, "workload__prompt_tokens": 2048}
    assert reason(*rules, **long) is None
    assert reason(*rules, **long, model__name="qwen3-8b") == "no room"
