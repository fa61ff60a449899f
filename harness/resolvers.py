"""Values of an experiment that follow from others or from the machine: `${on_gpu:A,B}`, ..."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import OmegaConf


def register(gpus: int | None = None) -> None:
    """Makes the resolvers known to OmegaConf, which keeps them by name for the process.

    `${on_gpu:A,B}` is A where a GPU is visible, else B. `${tp_sizes:}` is the list of TP sizes to
    sweep: the powers of two up to the number of GPUs (at most 8), and 1,2 without one.
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

    def on_gpu(there: Any, elsewhere: Any) -> Any:
        return there if count() else elsewhere

    def tp_sizes() -> str:
        return ",".join(str(n) for n in (1, 2, 4, 8) if n <= (count() or 2))

    def times(*factors: float) -> float:
        return math.prod(factors)

    def on_ranks(tp: int, several: Any, one: Any) -> Any:
        return several if tp > 1 else one

    OmegaConf.register_new_resolver("on_gpu", on_gpu, replace=True)
    OmegaConf.register_new_resolver("tp_sizes", tp_sizes, replace=True)
    OmegaConf.register_new_resolver("times", times, replace=True)
    OmegaConf.register_new_resolver("on_ranks", on_ranks, replace=True)
