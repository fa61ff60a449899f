"""Help: each verb its own, all of its flags in it; a bare command runs nothing"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.__main__ import FORMS, MODULES, VERBS, main
from harness.judging.verdict import Repeats, judge
from harness.settings.usage import USAGE

ROOT = Path(__file__).resolve().parents[3]


def test_a_bare_command_prints_the_help_and_runs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("Measures tensor-parallel inference")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_its_own_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        assert main([verb, flag]) == 0
        text = capsys.readouterr().out
        assert text.rstrip("\n") == USAGE[verb]
        assert text.startswith("python -m harness") and verb in text.splitlines()[0]


def test_what_a_verdict_needs_is_what_a_run_without_one_is_told() -> None:
    """Five repeats of one engine are none: the verdict itself asks for engines, or the floor."""
    one = Repeats(((100.0, 101.0, 99.0, 100.5, 99.5),), "1/s")
    reason = judge(one, one, "higher").reason or ""
    asked = "measure.n_process=5"
    assert asked in reason and "or give the floor" in reason
    assert asked in USAGE["compare"] and "or one engine and --floor" in USAGE["compare"]
    lines = (ROOT / "README.md").read_text().split("python -m harness compare ", 1)[1].splitlines()
    assert asked in " ".join(lines[:2])


@pytest.mark.parametrize("verb", MODULES)
def test_every_flag_of_a_verb_is_in_its_help(verb: str) -> None:
    source = (ROOT / (MODULES[verb].replace(".", "/") + ".py")).read_text()
    flags = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source))
    forms = re.findall(r"for form in \((.*?)\):", source)
    flags |= {f"--{name}" for names in forms for name in re.findall(r'"(\w+)"', names)}
    assert flags and flags <= set(re.findall(r"--[a-z-]+", USAGE[verb]))


def test_every_form_of_collect_is_in_its_help() -> None:
    assert set(FORMS) <= set(re.findall(r"--[a-z-]+", USAGE["collect"]))


@pytest.mark.parametrize("verb", ["run", "list", "profile"])
def test_a_flag_that_a_verb_has_not_is_answered_with_its_own_usage(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--csv"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {USAGE[verb].splitlines()[0]}\n")
    assert said.endswith(f"python -m harness {verb}: error: unrecognized arguments: --csv\n")
