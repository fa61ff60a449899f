"""Experiments of a user's own, by --config-dir: every verb finds them, and what is wrong in them is
told with its file and key"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.store import load
from tests.support.cli import Cli
from tests.support.fake_engine import recorded

ROOT = Path(__file__).resolve().parents[2]
HEAD = "# @package _global_\n"


def readme_example(folder: Path) -> str:
    """The example in the README, written to the place that it names; -> its name."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "--config-dir" in block]
    (place,) = re.findall(r"my_configs/(experiment/\w+\.yaml)", text)
    (folder / "experiment").mkdir(parents=True)
    (folder / place).write_text(text)
    assert f"--config-dir my_configs +experiment={Path(place).stem}\n" in text
    return Path(place).stem


def test_the_readmes_example_is_listed_and_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "my_configs"
    words = ["--config-dir", str(mine), f"+experiment={readme_example(mine)}"]
    assert main(["list", *words, f"results_dir={tmp_path}"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert main([*words[:2], "list", *words[2:], f"results_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines() == listed, "the verb may stand behind the folder"
    assert "page_size=null, " in listed[0] and "None" not in "".join(listed)
    assert listed[0].startswith("mine: ") and listed[-2] == "8 points, 2 skipped, 2 engine starts"

    (tmp_path / "fake").mkdir()
    cli = Cli(tmp_path / "fake")
    cli.arguments = cli.arguments[2:]  # the axes are the experiment's
    status, last, _ = cli.run(*words)
    assert (status, last["ok"], last["skipped"]) == (0, 6, 2)
    rows = load(last["run"]).points
    assert set(rows["reason"].dropna()) == {"two cores, and both are taken"}
    assert len(recorded("starts", cli.folder)) == 2
    frame = load(last["run"]).summary
    assert frame[frame["status"] == "ok"]["scaling_efficiency"].notna().all()


def test_the_readmes_example_can_be_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSYS", "/no/such/nsys")
    mine = tmp_path / "my_configs"
    words = ["--config-dir", str(mine), f"+experiment={readme_example(mine)}"]
    assert main(["profile", *words]) == 1
    assert "give one value of each" in capsys.readouterr().err.lower()
    one = ["tp=1", "batch=1", "workload.shape=8/8"]
    assert main(["profile", *words, *one]) == 1
    assert f"run --config-dir {mine} +experiment=mine tp=1" in capsys.readouterr().err


WRONG = [
    ("tpp: 2", ["Key 'tpp' not in 'BenchConfig'"]),
    ("workload: {prompt: 3}", ["full_key: workload.prompt"]),
    ("tp: two", ["Value 'two'", "full_key: tp"]),
    ("compile: off", ["compile=False: choose one of", 'write "off" in quotes']),
    ("tp: 3", ["tp=3: "]),
    ("hydra: {sweeper: {params: {tpp: '1,2'}}}", ["tpp: no such setting; did you mean tp?"]),
    ("hydra: {sweeper: {params: {tp: '1,two'}}}", ["tp=two: give an integer, as in tp=1"]),
    ("hydra: {sweeper: {params: {tp: '1,[2'}}}", ["is quoted: "]),
    ("defaults: [{override /modell: tiny}]", ["Could not override 'modell'"]),
    ("defaults: [{override /model: tyni}]", ["Could not find 'model/tyni'"]),
    ("tp: ${foo}", ["Interpolation key 'foo' not found"]),
    ("workload: {num_requests: 4}", ["workload.num_requests=4: workload=decode serves `batch`"]),
    ("hydra: {sweeper: {parms: {tp: '1'}}}", ["full_key: hydra.sweeper.parms"]),
    ("skip: [{when: {tpp: 2}, reason: x}]", ["skip[0].when.tpp: no such setting"]),
    ("workload: {shape: '8'}", ["workload.shape=8: give tokens"]),
    ("tp: 2\n batch: 3", ["mapping values are not allowed here"]),
    ("hydra: {sweeper: {params: {tp: 'range(2,1)'}}}", ["tp=range(2,1): an axis without a value"]),
    ("# \udcff", ["can't decode byte 0xff"]),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[text for text, _ in WRONG])
def test_what_is_wrong_is_told_with_its_file_and_key(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"{HEAD}{text}\n", errors="surrogateescape")
    arguments = ["--config-dir", str(tmp_path), "+experiment=mine", f"results_dir={tmp_path}/r"]
    assert main(["list", *arguments]) == 1
    err = capsys.readouterr().err
    assert all(word in err for word in words)
    assert err.splitlines()[-1] == f"the experiment is {file}"
    assert not (tmp_path / "r").exists()


BESIDE = [
    ("tpp=2", "tpp: no such setting; did you mean tp?"),
    ("tp=two", "tp=two: give an integer, as in tp=1"),
    ("tp=0", "tp=0: give at least 1"),
    ("tp=range(3,3)", "tp=range(3,3): an axis without a value; give one at least, as in tp=A,B"),
    ("model=glob(x*)", "an axis without a value; give one at least, as in model=A,B"),
    ("batch=[1", "is quoted: "),
    ("model=tinny", "Could not find 'model/tinny'"),
    ("hydra.foo=1", "Could not override 'hydra.foo'"),
    ("workload=trace", "workload.trace=null: workload=trace needs"),
    ("workload.num_requests=4", "workload.num_requests=4: workload=decode serves `batch` requests"),
    ("workload.seed=${foo}", "Interpolation key 'foo' not found"),
]


@pytest.mark.parametrize(("word", "told"), BESIDE, ids=[word for word, _ in BESIDE])
def test_a_file_is_not_named_for_what_is_wrong_beside_it(
    word: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    text = "tp: 2\nbatch: 2\nworkload: {seed: 1}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(HEAD + text)
    arguments = ["--config-dir", str(tmp_path), "+experiment=mine", f"results_dir={tmp_path}/r"]
    assert main(["list", *arguments, word]) == 1
    err = capsys.readouterr().err
    assert told in err
    assert "the experiment is" not in err


def test_a_file_without_its_first_line_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("tp: 2\n")
    assert main(["list", "--config-dir", str(tmp_path), "+experiment=mine"]) == 1
    assert "mine.yaml; its first line must be # @package _global_" in capsys.readouterr().err
