"""The rules that keep this repository readable, checked on its source text.

They are not style: "torch.distributed stands in two places" is what makes "every all-reduce and
gather is observed" true by construction, and "no module state" lets engines follow each other in
one process. Each checker is itself tried on a small violation.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "harness", "experiments")
MAX_LINES = 300
HARNESS_LIBRARIES = ("hydra", "omegaconf", "pandas", "pyarrow", "nvtx", "pynvml", "rich")


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def parse(path: Path) -> ast.Module:
    return ast.parse(text(path))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names imported anywhere in a module, inside functions and TYPE_CHECKING included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain that starts at a name, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def uses_distributed(tree: ast.AST) -> bool:
    chains = (dotted(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    named = (*imports(tree), *chains)
    return any(n == "torch.distributed" or n.startswith("torch.distributed.") for n in named)


# -- module state -------------------------------------------------------------------------------

MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "deque", "OrderedDict", "Counter", "count"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove",
            "discard", "clear", "sort", "reverse", "appendleft"}  # fmt: skip
MUTABLE_NODES = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)


def assigned_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


def module_state(tree: ast.Module) -> list[str]:
    """Names at module level whose value changes after import.

    That is: anything a function declares `global`; a dict, list or set that is not spelled as a
    constant (UPPER_CASE); and a constant that some line of the module mutates.
    """
    found: set[str] = set()
    constants: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            for target in assigned_names(node):
                spelled_constant = re.fullmatch(r"_{0,2}[A-Z][A-Z0-9_]*(__)?|__all__", target)
                (constants if spelled_constant else found).add(target)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.update(node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in MUTATORS and isinstance(owner, ast.Name) and owner.id in constants:
                found.add(owner.id)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if node.value.id in constants and not isinstance(node.ctx, ast.Load):
                found.add(node.value.id)
    return sorted(found)


# -- the tests ------------------------------------------------------------------------------------


def test_torch_distributed_stands_in_the_communicators_and_the_workers_only() -> None:
    found = {name(p) for p in sources(*PACKAGES) if uses_distributed(parse(p))}
    strangers = {f for f in found if not f.startswith("engine/comm/") and f != "engine/workers.py"}
    assert not strangers
    assert "engine/comm/process_group.py" in found  # the checker sees the one that must be there


def test_imports_point_from_experiments_to_harness_to_engine() -> None:
    forbidden = {"engine": ("harness", "experiments"), "harness": ("experiments",)}
    for package, others in forbidden.items():
        for path in sources(package):
            roots = {i.partition(".")[0] for i in imports(parse(path))}
            assert not roots & set(others), name(path)


def test_no_jax_anywhere() -> None:
    for path in sources(*PACKAGES, "tests", "scripts"):
        roots = {i.partition(".")[0] for i in imports(parse(path))}
        assert not roots & {"jax", "jaxlib", "flax"}, name(path)


def test_engine_keeps_no_module_state_but_the_registry_of_communicators() -> None:
    found = {(name(p), state) for p in sources("engine") for state in module_state(parse(p))}
    assert found == {("engine/comm/ops.py", "_registry")}


def test_no_unfinished_code() -> None:
    words = re.compile(
        r"\bNotImplemented" + r"Error\b|\bTO" + r"DO\b|\bFIX" + r"ME\b|\bX" + r"XX\b"
    )
    for path in [*sources(*PACKAGES, "tests", "scripts"), *(ROOT / "conf").rglob("*.yaml")]:
        hits = [line for line in text(path).splitlines() if words.search(line)]
        assert not hits, name(path)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_is_one_noun_of_at_most_300_lines(package: str) -> None:
    lengths = {name(p): len(text(p).splitlines()) for p in sources(package)}
    assert not {f: n for f, n in lengths.items() if n > MAX_LINES}


def test_the_model_file_is_arithmetic_only() -> None:
    path = ROOT / "engine" / "models" / "qwen.py"
    roots = {i.partition(".")[0] for i in imports(parse(path))}
    assert roots <= {"__future__", "collections", "dataclasses", "typing", "torch", "engine"}
    words = re.findall(r"(?i)\b(?:perf_counter\w*|profil\w*|timer?s?|nvtx|record_function|cuda)\b",
                       text(path))  # fmt: skip
    assert not words


def test_every_module_says_what_it_is() -> None:
    for path in sources(*PACKAGES, "scripts"):
        assert ast.get_docstring(parse(path)), f"{name(path)}: no docstring"


def test_the_whole_engine_imports_without_the_harness_libraries() -> None:
    """Nor do the packages that it uses bring them in: each would cost a rank seconds to start."""
    absent = {p for p in ("triton", "flash_attn") if importlib.util.find_spec(p) is None}
    modules = [
        name(path)[:-3].replace("/", ".").removesuffix(".__init__")
        for path in sources("engine")
        if not absent & {i.partition(".")[0] for i in imports(parse(path))}
    ]
    strangers = {*HARNESS_LIBRARIES, "harness", "experiments"} - {"pynvml"}  # torch imports that
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; "
        f"print(sorted({strangers!r} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_no_file_names_a_path_of_one_machine() -> None:
    """An absolute path in a source or a document works on its author's machine only."""
    homes = re.compile(r"(?<![\w.:/])/(?:" + "|".join(["root", "home", "work", "Users"]) + r")/\w")
    suffixes = {".py", ".md", ".toml", ".yaml", ".cff"}
    folders = (*PACKAGES, "conf", "tests", "scripts", "docs")
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    paths += [p for p in ROOT.glob("*") if p.suffix in suffixes]
    for path in [*paths, ROOT / ".ci" / "run"]:
        hits = [line for line in text(path).splitlines() if homes.search(line)]
        assert not hits, name(path)


# -- the checkers themselves ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "def f():\n    import torch.distributed",
        "import torch\ntorch.distributed.all_reduce(x)",
    ],
)
def test_every_spelling_of_torch_distributed_is_seen(source: str) -> None:
    assert uses_distributed(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("cache = {}", ["cache"]),
        ("cache: dict[int, int] = {}", ["cache"]),
        ("ids = itertools.count()", ["ids"]),
        ("TABLE = {1: 2}", []),
        ("TABLE = {1: 2}\ndef f(k):\n    return TABLE[k]", []),
        ("TABLE = {1: 2}\ndef f(k):\n    TABLE[k] = 1", ["TABLE"]),
        ("TABLE = {}\ndef f(k):\n    TABLE.update(k)", ["TABLE"]),
        ("TABLE = {}\ndef f(k):\n    del TABLE[k]", ["TABLE"]),
        ("_current = None\ndef f(x):\n    global _current\n    _current = x", ["_current"]),
        ("def f():\n    local = {}\n    local[1] = 2", []),
    ],
)
def test_module_state_is_told_from_constants(source: str, expected: list[str]) -> None:
    assert module_state(ast.parse(source)) == expected
