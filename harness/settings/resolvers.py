"""Values of an experiment that follow from others or from the machine: `${on_gpu:A,B}`, ..."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import OmegaConf

from harness.settings.config import SettingsError

_PER_JOB = ("hydra.launcher.gpus_per_node", "hydra.launcher.ray.remote.num_gpus")
"""Where SLURM's launcher and Ray's are told how many GPUs a job gets."""


def register(gpus: int | None = None) -> None:
    """Makes the resolvers known to OmegaConf, which keeps them by name for the process.

    `${on_gpu:A,B}` is A with device=cuda, B with device=cpu, whatever this machine has, since a job
    may run on another; with device=auto it is A where a GPU is visible, else B. `${tp_sizes:}` is
    the list of TP sizes to sweep: the powers of two up to the number of GPUs (at most 8), which is
    the launcher's for one job where it has been given, else this machine's; 1,2 on CPUs. It raises
    SettingsError where device=cuda stands and neither is known.
    `${times:4,${batch}}` is the product, of each point's own values.
    `${on_ranks:TP,A,B}` is A where TP is above 1, else B.

    Args:
        gpus: visible GPUs; None: counted when a resolver is first used.
    """

    def count() -> int:
        if gpus is not None:
            return gpus
        import torch

        return torch.cuda.device_count()

    def is_cuda(root: Any) -> bool:
        device = OmegaConf.select(root, "device", default="auto")
        return device == "cuda" or (device != "cpu" and count() > 0)

    def on_gpu(there: Any, elsewhere: Any, *, _root_: Any) -> Any:
        return there if is_cuda(_root_) else elsewhere

    def tp_sizes(*, _root_: Any) -> str:
        if not is_cuda(_root_):
            return "1,2"
        told = [OmegaConf.select(_root_, name) for name in _PER_JOB]
        most = int(next((n for n in told if n), None) or count())
        if not most:
            raise SettingsError(
                "device=cuda and no GPU here: the experiment's TP sizes follow the number of GPUs; "
                "give tp=1,2,4, or a launcher's hydra.launcher.gpus_per_node (Ray: "
                "+hydra.launcher.ray.remote.num_gpus)"
            )
        return ",".join(str(n) for n in (1, 2, 4, 8) if n <= most)

    def times(*factors: float) -> float:
        return math.prod(factors)

    def on_ranks(tp: int, several: Any, one: Any) -> Any:
        return several if tp > 1 else one

    OmegaConf.register_new_resolver("on_gpu", on_gpu, replace=True)
    OmegaConf.register_new_resolver("tp_sizes", tp_sizes, replace=True)
    OmegaConf.register_new_resolver("times", times, replace=True)
    OmegaConf.register_new_resolver("on_ranks", on_ranks, replace=True)
