"""Words of a command line: what is no setting, or of another kind, is told with what to give"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.__main__ import conf_folder, main
from harness.measuring.workload import build
from harness.settings.config import IDLE, BenchConfig, SettingsError, WorkloadConfig, register
from harness.settings.launcher import compose
from harness.settings.validation import validate
from tests.support.plans import config

WRONG = [
    ("tpp=2", "tpp: no such setting; did you mean tp?"),
    ("+tpp=2", "tpp: no such setting; did you mean tp?"),
    ("++tpp=2", "tpp: no such setting; did you mean tp?"),
    ("~tpp", "tpp: no such setting; did you mean tp?"),
    ("workload.promt_tokens=5", "workload.promt_tokens: no such setting; did you mean "
                                "workload.prompt_tokens?"),
    ("+workload.promt_tokens=5,6", "workload.promt_tokens: no such setting; did you mean "
                                   "workload.prompt_tokens?"),
    ("tp.size=2", "tp.size: no such setting"),
    ("xyzzy=1", "xyzzy: no such setting"),
    ("model={nme:tiny}", "model.nme: no such setting; did you mean model.name?"),
    ("tp=two", "tp=two: give an integer, as in tp=1"),
    ("tp=1,2,two", "tp=two: give an integer, as in tp=1"),
    ("++tp=two", "tp=two: give an integer, as in tp=1"),
    ("tp=1.5", "tp=1.5: give an integer, as in tp=1"),
    ("tp=null", "tp=null: give an integer, as in tp=1"),
    ("page_size=big", "page_size=big: give an integer or null"),
    ("enforce_eager=maybe", "enforce_eager=maybe: give true or false, as in enforce_eager=true"),
    ("workload.temperature=hot", "workload.temperature=hot: give a number, as in "
                                 "workload.temperature=0.0"),
    ("measure.skew_us=5", "measure.skew_us=5: give a list, as in "
                          "measure.skew_us=[0.0,50.0,250.0,1000.0]"),
    ("engine.overlap=7up", "engine.overlap=7up: give true or false or null"),
    ("~tp", "~tp: a setting cannot be taken out; give it a value, tp="),
    ("~workload.seed", "~workload.seed: a setting cannot be taken out; give it a value, "
                       "workload.seed="),
]  # fmt: skip


@pytest.mark.parametrize(("word", "told"), WRONG, ids=[word for word, _ in WRONG])
@pytest.mark.parametrize("further", [[], ["+experiment=smoke"], ["--cfg", "job"]])
def test_one_line_says_what_to_give(
    word: str, told: str, further: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", word, *further] if "--cfg" not in further else [word, *further]) == 1
    assert capsys.readouterr().err == f"error: {told}\n"


OWN = {"num_requests": 4, "trace": "a.csv", "max_tokens_cap": 8, "prompt_cap": 8,
       "prompt_tokens": 9, "output_tokens": 9}  # fmt: skip
REASONS = {
    ("decode", "num_requests"): "workload=decode serves `batch` requests; it is of nano_vllm and "
    "trace; leave it out",
    ("prefill", "prompt_cap"): "all requests of workload=prefill are of the same lengths; it is of "
    "nano_vllm and trace; leave it out",
    ("nano_vllm", "trace"): "workload=nano_vllm reads no file; it is of trace; leave it out",
    ("trace", "output_tokens"): "the requests of workload=trace have lengths of their own; it is "
    "of decode and prefill; leave it out",
}


@pytest.mark.parametrize("key", OWN)
@pytest.mark.parametrize("kind", IDLE)
def test_what_a_workload_does_not_read_is_refused(kind: str, key: str, tmp_path: Path) -> None:
    """A key is read if other requests come of it: those of a file of 9 rows, or of 5 at once."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for name, rows in (("a.csv", 9), ("b.csv", 7)):
        rest = [f"2023-11-16 18:15:{n:02},{20 + n},{30 + n}" for n in range(rows)]
        (tmp_path / name).write_text("\n".join(lines + rest))
    settings = {"workload__kind": kind, "batch": 5}
    if kind == "trace":
        settings["workload__trace"] = str(tmp_path / "b.csv")
    value = str(tmp_path / "a.csv") if key == "trace" else OWN[key]
    asked = config(**{**settings, f"workload__{key}": value})

    built = [build(c, vocab_size=512, max_model_len=4096) for c in (config(**settings), asked)]
    read = built[0] != built[1]
    assert read == (key not in IDLE[kind])
    validate(config(**settings))
    if read:
        validate(asked)
    else:
        told = REASONS.get((kind, key), "leave it out")
        with pytest.raises(SettingsError, match=rf"^workload.{key}={value}: .*{re.escape(told)}$"):
            validate(asked)


def test_every_key_of_a_workload_is_of_some_kind() -> None:
    of_all = {"kind", "shape", "arrivals", "temperature", "seed"}
    known = set(WorkloadConfig.__dataclass_fields__)
    assert known - of_all == set(OWN) == {key for keys in IDLE.values() for key in keys}


def test_the_example_of_the_settings_page_does_what_it_says() -> None:
    register()
    text = (Path(__file__).resolve().parents[3] / "docs" / "config.md").read_text()
    (line,) = re.findall(r"`(workload=nano_vllm batch=8,32 [^`]+)`", text)
    points = compose([word.strip("'") for word in line.split(" ")], conf_folder())
    for point in points:
        validate(point)
    asked = [(point["batch"], point["workload"]["num_requests"]) for point in points]
    assert asked == [(8, 32), (32, 128)]
    assert BenchConfig().workload.num_requests is None
