"""What an installed wheel must contain, and what the metadata promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel that the build backend makes of this tree, without an isolated venv."""
    out = tmp_path_factory.mktemp("dist")
    code = f"from hatchling.build import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    with ZipFile(next(out.glob("*.whl"))) as archive:
        return archive.namelist()


def test_wheel_has_every_module_and_every_setting(wheel: list[str]) -> None:
    for package in ("engine", "harness", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            assert path.relative_to(ROOT).as_posix() in wheel
        assert f"{package}/py.typed" in wheel
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"harness/{path.relative_to(ROOT).as_posix()}" in wheel
    assert "harness/conf/__init__.py" in wheel


def test_wheel_brings_nothing_else_to_the_top_level(wheel: list[str]) -> None:
    top = {name.partition("/")[0] for name in wheel}
    assert {t for t in top if not t.endswith(".dist-info")} == {"engine", "harness", "experiments"}


def test_console_script_names_a_function_that_exists(project: dict[str, Any]) -> None:
    module, _, function = project["project"]["scripts"]["rangefinder"].partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=;\[]", requirement)[0] for requirement in requirements}


def test_every_imported_package_is_declared_and_the_other_way_round(
    project: dict[str, Any],
) -> None:
    imported: set[str] = set()
    for package in ("engine", "harness", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    imported.add((node.module or "").partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"engine", "harness", "experiments"}
    # transformers and omegaconf require these, each in the range that it works with.
    foreign -= {"huggingface_hub", "tokenizers", "yaml"}
    foreign -= {"nanovllm"}  # which no index has
    distributions = {
        "flash_attn": "flash-attn", "hydra": "hydra-core", "pynvml": "nvidia-ml-py",
    }  # fmt: skip
    needed = {distributions.get(name, name) for name in foreign}
    required = names(project["project"]["dependencies"])
    extras = project["project"]["optional-dependencies"]
    optional = names([*extras["gpu"], *extras["report"], *extras["peers"]])
    assert required <= needed <= required | optional


def test_version_is_the_same_everywhere(project: dict[str, Any]) -> None:
    version = project["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
