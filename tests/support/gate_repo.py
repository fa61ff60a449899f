"""A small git repository with one benchmark, in which time is what a clock of its own says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "tests/__init__.py", "tests/benchmarks/conftest.py", "tests/support/__init__.py",
    "tests/support/measuring.py", "tests/support/turns.py",
)  # fmt: skip
TEXTS = {
    # What conftest.py asks of torch, which takes two seconds to import.
    "torch.py": """
class cuda:
    is_available = staticmethod(lambda: False)
get_num_threads = lambda: 1
set_num_threads = lambda n: None
""",
    "clock.py": """
time_s = 0.0
def now():
    global time_s
    time_s += 1e-9  # a wait for the clock ends
    return time_s
def work(seconds):
    global time_s
    time_s += seconds
""",
    "product.py": "import clock\ndef step(): clock.work(1e-3)\n",
    "tests/benchmarks/test_a.py": """
import product
def test_step(measure):
    measure(product.step, rounds=5)
""",
}


def write(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path, message: str, **texts: str) -> None:
    write(root, **texts)
    git(root, "add", "--all")
    git(root, "commit", "--allow-empty", "-m", message)


def make(root: Path) -> Path:
    """A repository of one commit."""
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    write(root, **TEXTS)
    git(root, "init", "-q")
    commit(root, "first")
    return root
