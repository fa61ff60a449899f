"""Where built models and compile caches stand, and what is said where they cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.machine import cache, models
from harness.machine.cache import CacheError
from harness.machine.models import resolve_model


def model(name: str = "tiny", load_format: str = "auto") -> dict[str, object]:
    return {"name": name, "path": None, "load_format": load_format}


@pytest.mark.parametrize(
    ("own", "named"),
    [(True, "RANGEFINDER_CACHE=.+/file/cache: .+/file/cache"),
     (False, "RANGEFINDER_CACHE=: .+/file/home/rangefinder")],
)  # fmt: skip
def test_a_cache_that_cannot_be_written_is_one_sentence(
    own: bool, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "home"))
    if own:
        monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path / "file" / "cache"))
    else:
        monkeypatch.delenv("RANGEFINDER_CACHE", raising=False)
    why = r" cannot be written \(Not a directory\); set it to a folder that can$"
    for section in (model(), model("qwen3-0.6b", load_format="dummy")):
        with pytest.raises(CacheError, match=f"^{named}/models{why}"):
            resolve_model(section)
    with pytest.raises(CacheError, match=f"^{named}/compile{why}"):
        cache.compile_cache(used=True)
    assert cache.compile_cache(used=False) == cache.cache_root() / "compile"


def test_a_full_disk_while_a_model_is_built_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path))

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CacheError, match=r"models cannot be written \(No space left on device\)"):
        models.built("x", "recipe", full)
    assert list((tmp_path / "models").iterdir()) == []
