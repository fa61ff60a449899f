"""The engines of others: what each needs, which settings it has, why a point is skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.config import EngineSection, as_written

if TYPE_CHECKING:
    from engine.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine.

    Attributes:
        modules: importable module -> how to get it.
        gpu: whether it runs on CUDA devices alone.
        has: axis -> the values that it has; an axis that is not here has all of them.
        takes: settings of the section `engine`; the others must stand at their defaults.
        arrivals: whether requests may come over time.
        refuses: (configuration, model's shape) -> why that cannot run.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False
    has: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    arrivals: bool = True
    refuses: Callable[[Mapping[str, Any], ModelShape | None], str | None] = lambda cfg, shape: None


PEERS: dict[str, Peer] = {
    "transformers": Peer(
        has={
            "tp": (1,),
            "enforce_eager": (True,),
            "compile": ("off",),
            "attention": ("auto", "sdpa"),
            "comm": ("auto",),
            "page_size": (None,),
        },
        takes=("max_model_len", "max_num_seqs", "threads_per_rank", "seed"),
        arrivals=False,
    ),
}


def skip_reason(
    cfg: Mapping[str, Any], gpus: int, packages: Mapping[str, str], shape: ModelShape | None = None
) -> str | None:
    """Why a resolved configuration cannot run by its backend; None if it can. What the engine does
    not have comes first, for no package helps there.

    Args:
        gpus: visible CUDA devices; packages: modules that are installed.
    """
    name = cfg["backend"]
    peer = PEERS[name]
    for axis, values in peer.has.items():
        if cfg.get(axis, values[0]) not in values:
            has = ", ".join("null" if value is None else as_written(value) for value in values)
            return f"backend={name} has {axis}={has}, not {as_written(cfg[axis])}"
    defaults = asdict(EngineSection())
    for setting, value in cfg.get("engine", {}).items():
        if setting not in peer.takes and value != defaults[setting]:
            return f"backend={name} has no setting engine.{setting}, here {as_written(value)}"
    arrivals = cfg.get("workload", {}).get("arrivals", "all")
    if arrivals != "all" and not peer.arrivals:
        return f"backend={name} takes requests all at once, not workload.arrivals={arrivals}"
    reason = peer.refuses(cfg, shape)
    if reason is not None:
        return f"backend={name}: {reason}"
    missing = [f"{module} is not installed ({how})" for module, how in peer.modules.items()
               if module not in packages]  # fmt: skip
    if peer.gpu and cfg["device"] != "cuda":
        where = "device=cpu" if gpus else "none visible"
        missing.insert(0, f"it needs a CUDA device, {where}")
    return f"backend={name}: {'; '.join(missing)}" if missing else None
