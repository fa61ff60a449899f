"""Writes the parts of the documentation that follow from the code.

    python scripts/docs.py            rewrite them
    python scripts/docs.py --check    change nothing; exit 1 and name the files that are stale

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. The names:
`tree` from the modules' docstrings; `settings` from harness/settings/config.py, where the comment
behind a field is its meaning; `presets` from conf/, the first comment of each file; `tables` from
harness/tables/schema.py.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TREE_NAMES = 24  # column at which descriptions start
TREE_TEXT = 88  # characters of one; a page of a code host shows about 115 columns
Comments = dict[tuple[str, str], str]  # (class, field) -> the comment behind the field
# What has no docstring to take the description from.
TREE_OTHER = {
    "conf": "the Hydra configuration; packed into a wheel as harness/conf",
    "results": "published tables, how to read them and how to submit; runs/ is not kept in git",
    "tests": "mirrors engine/, harness/ and experiments/; gpu/ needs a device",
    "docs": "architecture, method, one step, verdicts, calibration, experiments, clusters, options",
    "scripts": "generated documentation; the gate; checks of both verdicts; a trained model",
}


# -- the file tree --------------------------------------------------------------------------------


def summary(path: Path) -> str:
    """First sentence of a module's docstring, without its full stop; SystemExit if it is too long,
    since what a shortened one says need not be true."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = re.split(r"\.(?:\s|$)", " ".join(doc.split("\n\n")[0].split()))[0]
    if len(first) > TREE_TEXT:
        raise SystemExit(
            f"{path}: the first sentence of its docstring has {len(first)} characters, and the "
            f"file tree room for {TREE_TEXT}; shorten it: {first}"
        )
    return first


def tree_line(depth: int, label: str, text: str) -> str:
    return (f"{'  ' * depth}{label} ".ljust(TREE_NAMES) + text).rstrip()


def package_lines(folder: Path, depth: int) -> Iterator[str]:
    init = folder / "__init__.py"
    yield tree_line(depth, f"{folder.name}/", summary(init) if init.exists() else "")
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        if path.is_dir() and any(path.glob("*.py")):
            yield from package_lines(path, depth + 1)
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield tree_line(depth + 1, path.name, summary(path))


def group_lines(folder: Path) -> Iterator[str]:
    yield tree_line(0, f"{folder.name}/", TREE_OTHER[folder.name])
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        if path.suffix == ".yaml":
            yield tree_line(1, path.name, "")
        elif names := sorted(p.stem for p in path.glob("*.yaml") if path.is_dir()):
            yield tree_line(1, f"{path.name}/", " ".join(names))


def tree() -> str:
    lines: list[str] = []
    for package in ("engine", "harness", "experiments"):
        lines += package_lines(ROOT / package, 0)
    lines += group_lines(ROOT / "conf")
    for folder in ("results", "tests", "docs", "scripts"):
        lines.append(tree_line(0, f"{folder}/", TREE_OTHER[folder]))
    return "\n".join(["```", *lines, "```"])


# -- settings and presets -------------------------------------------------------------------------


def field_comments(source: str) -> Comments:
    """(class, field) -> the comment behind the field; comment lines directly below continue it."""
    lines = source.splitlines()
    comments: Comments = {}
    for node in ast.parse(source).body:
        for item in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                assert isinstance(node, ast.ClassDef) and item.end_lineno and item.end_col_offset
                found = [lines[item.end_lineno - 1][item.end_col_offset :].strip()]
                for line in lines[item.end_lineno :]:
                    if not line.strip().startswith("#"):
                        break
                    found.append(line.strip())
                text = " ".join(part.lstrip("# ") for part in found).strip()
                comments[node.name, item.target.id] = text
    return comments


def composed() -> Any:
    """The configuration that a command line without settings gives."""
    from hydra import compose, initialize_config_dir

    from harness.settings.config import register

    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config")


def setting_rows(cls: Any, comments: Comments, config: Any, prefix: str = "") -> Iterator[str]:
    from harness.settings.config import CHOICES

    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from setting_rows(hint, comments, config[field.name], f"{key}.")
            continue
        meaning = comments.get((cls.__name__, field.name), "").replace("|", r"\|")
        if not meaning:
            where = f"{cls.__name__}.{field.name}"
            raise SystemExit(f"harness/settings/config.py: {where} has no comment behind it")
        kind = ", ".join(f"`{c}`" for c in CHOICES.get(key, ())) or type_name(hint)
        yield f"| `{key}` | {kind} | `{yaml_value(config[field.name])}` | {meaning} |"


def type_name(hint: Any) -> str:
    names = {int: "integer", float: "number", bool: "`true` or `false`", str: "text"}
    names[typing.Any] = "list"
    if typing.get_origin(hint) is list and typing.get_args(hint) != (typing.Any,):
        return f"list of {type_name(typing.get_args(hint)[0])}s"
    parts = [names[t] for t in typing.get_args(hint) or (hint,) if t is not type(None)]
    return " or ".join([*parts, *(["`null`"] if type(None) in typing.get_args(hint) else [])])


def yaml_value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings() -> str:
    from harness.settings.config import BenchConfig

    comments = field_comments((ROOT / "harness/settings/config.py").read_text(encoding="utf-8"))
    head = ["| setting | value | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *setting_rows(BenchConfig, comments, composed())])


def first_comment(path: Path) -> str:
    """The comment that opens a preset as one line of Markdown, its commands in backticks."""
    from harness.settings.help import comment

    parts = [f"`{x.strip()}`" if x.startswith(" ") else x for x in comment(path) if x]
    text = " ".join(parts).replace("` `", "`, `")
    return re.sub(r"(: `[^`]+`(?:, `[^`]+`)*) (?=\w)", r"\1. ", text)


def presets() -> str:
    lines = ["| preset | what it sets |", "|---|---|"]
    for path in sorted((ROOT / "conf").glob("*/*.yaml")):
        group = path.parent.name
        plus = "+" if group == "experiment" else ""
        lines.append(f"| `{plus}{group}={path.stem}` | {first_comment(path) or listed(path)} |")
    return "\n".join(lines)


def listed(path: Path) -> str:
    """`key: value` lines of a preset too plain to need a comment."""
    body = [x for x in path.read_text(encoding="utf-8").splitlines() if x and x[0] != "#"]
    return ", ".join(f"`{line}`" for line in body)


def tables() -> str:
    from harness.tables.schema_docs import markdown

    return markdown().strip()


# -- files ----------------------------------------------------------------------------------------

FILES = {
    "README.md": {"tree": tree},
    "docs/config.md": {"settings": settings, "presets": presets},
    "docs/tables.md": {"tables": tables},
}


def replaced(text: str, name: str, body: str) -> str:
    begin, end = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"generated part {name}: needs {begin!r} and {end!r}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{body}\n{end}{rest.split(end)[1]}"


def regenerate(root: Path, write: bool) -> list[str]:
    """Names of files whose generated parts differ from the code; rewritten if `write`."""
    stale = []
    for name, parts in FILES.items():
        path = root / name
        old = new = path.read_text(encoding="utf-8")
        for part, body in parts.items():
            new = replaced(new, part, body())
        if new != old:
            stale.append(name)
            if write:
                path.write_text(new, encoding="utf-8")
    return stale


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate documentation from the code.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    check = parser.parse_args(argv).check
    stale = regenerate(ROOT, write=not check)
    for name in stale:
        print(f"{name}: {'stale; run python scripts/docs.py' if check else 'rewritten'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
