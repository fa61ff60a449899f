"""The documentation says what the code does: generated parts, links and commands are checked."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.settings.help import question

ROOT = Path(__file__).resolve().parents[1]
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")])


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shell_lines(path: Path) -> list[str]:
    """Commands of a document's `sh` blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    whole = "\n".join(blocks).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in whole.splitlines()]
    return [shlex.join(words) for words in lines if words]


def test_generated_parts_are_current(docs: ModuleType) -> None:
    assert docs.regenerate(ROOT, write=False) == []


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    missing = [x for x in links if "://" not in x and not (path.parent / x).exists()]
    assert not missing


def test_readme_has_the_two_commands_and_ci_runs_the_same_test_command() -> None:
    lines = shell_lines(ROOT / "README.md")
    assert "python -m harness +experiment=tp_sweep" in lines
    assert "python -m pytest -n 2 --dist loadfile" in lines
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().splitlines()
    assert ci[-1] == "step tests python -m pytest -n 2 --dist loadfile"
    assert any("pip install" in x and "'.[test]'" in x for x in lines)
    assert any("pip install" in x and '-e ".[test]"' in x for x in ci)


def test_every_setting_in_the_readme_exists() -> None:
    from harness.settings.config import BenchConfig

    presets = {p.parent.name for p in ROOT.glob("conf/*/*.yaml")}
    for line in shell_lines(ROOT / "README.md"):
        if not line.startswith("python -m harness"):
            continue
        for word in shlex.split(line)[3:]:
            key, _, value = word.lstrip("+").partition("=")
            top = key.partition(".")[0]
            if value and key in presets:
                assert (ROOT / "conf" / key / f"{value}.yaml").exists(), word
            elif value:
                assert top in (*BenchConfig.__dataclass_fields__, "hydra/launcher", "hydra"), word


def test_readme_explains_every_printed_figure() -> None:
    from harness.tables.report import _EXTRA, _PRINTED

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    explained = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert {figure[0].replace("\n", " ") for figure in (*_EXTRA, *_PRINTED)} <= explained


# -- the generator itself -------------------------------------------------------------------------


def test_a_stale_part_is_seen_and_rewritten(
    docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: x -->\nold\n<!-- end of x -->\nafter\n")
    monkeypatch.setattr(docs, "FILES", {"page.md": {"x": lambda: "new"}})
    assert docs.regenerate(tmp_path, write=False) == ["page.md"]
    assert "old" in page.read_text()
    assert docs.regenerate(tmp_path, write=True) == ["page.md"]
    assert page.read_text() == "before\n<!-- generated: x -->\nnew\n<!-- end of x -->\nafter\n"
    assert docs.regenerate(tmp_path, write=True) == []


def test_a_part_without_its_end_is_an_error(docs: ModuleType) -> None:
    with pytest.raises(SystemExit, match="generated part x"):
        docs.replaced("<!-- generated: x -->\n", "x", "new")


def test_comments_behind_fields_are_read_with_their_continuation(docs: ModuleType) -> None:
    source = (
        "class C:\n    a: int = 1  # first\n    # second\n    b: str = '#'  # other\n    c: int\n"
    )
    assert docs.field_comments(source) == {
        ("C", "a"): "first second",
        ("C", "b"): "other",
        ("C", "c"): "",
    }


def test_a_first_sentence_is_whole_or_an_error(docs: ModuleType, tmp_path: Path) -> None:
    module = tmp_path / "a.py"
    module.write_text(f'"""One thing; {"x" * 77}. More."""\n')
    line = docs.tree_line(1, "a.py", docs.summary(module))
    assert line.split() == ["a.py", "One", "thing;", "x" * 77]
    assert line.index("One") == docs.TREE_NAMES
    module.write_text(f'"""One thing; {"x" * 78}. More."""\n')
    with pytest.raises(SystemExit, match="a.py: the first sentence .* has 89 characters"):
        docs.summary(module)


def test_commands_in_a_presets_comment_are_told_from_its_words(
    docs: ModuleType, tmp_path: Path
) -> None:
    preset = tmp_path / "a.yaml"
    preset.write_text(
        "# @package _global_\n# python -m harness +experiment=a\n# Is it\n# so?\n#\n# Then:\n"
        "#   python -m harness b\n#   python -m experiments c\n# a.b says it.\nname: a\n# No.\n"
    )
    commands = "`python -m harness b`, `python -m experiments c`"
    assert docs.first_comment(preset) == f"Is it so? Then: {commands}. a.b says it."
    assert question(preset) == "Is it so?"


def test_a_list_says_what_it_is_of(docs: ModuleType) -> None:
    assert docs.type_name(list[float]) == "list of numbers"
    assert docs.type_name(list[Any]) == "list"
    assert docs.type_name(int | None) == "integer or `null`"
