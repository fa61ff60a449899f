"""Commits of a git work tree to compare with: found by name, and laid out beside it"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.judging.gate import GateError


def git(root: Path, *arguments: str) -> str:
    """What git prints; GateError where it fails, or is not there."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise GateError(f"git: {error}") from error
    except subprocess.CalledProcessError as error:
        raise GateError(f"git {arguments[0]}: {error.stderr.strip()}") from error
    return done.stdout.strip()


def find_base(root: Path, asked: str | None) -> str:
    """The commit to compare with: the one asked for, else HEAD where tracked files are changed,
    else HEAD's first parent.

    Raises:
        GateError: there is none.
    """
    if Path(git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
        raise GateError("this tree is no git work tree of its own")
    why = "a first commit, or a shallow clone: fetch one commit more"
    if asked is None:
        asked = "HEAD" if git(root, "status", "--porcelain", "-uno") else "HEAD^"
    else:
        why = "--base: fetch it, or correct the name"
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{asked}^{{commit}}")
    except GateError:
        raise GateError(f"{asked} is not here ({why})") from None


def accepted(root: Path) -> frozenset[str]:
    """Benchmarks of which HEAD's message says `Slower: NAME`, each on a line of its own."""
    return frozenset(re.findall(r"(?m)^Slower: (\S+)", git(root, "log", "-1", "--format=%B")))


@contextmanager
def work_tree(root: Path, commit: str) -> Iterator[Path]:
    """A work tree of the commit, removed at the end.

    Raises:
        GateError: git cannot make one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / commit[:10]
        git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            yield tree
        finally:
            git(root, "worktree", "remove", "--force", str(tree))
