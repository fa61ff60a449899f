"""Communication among the ranks of one engine; alone in knowing torch.distributed."""

from engine.comm.base import Communicator
from engine.comm.solo import SoloCommunicator
from engine.comm.types import (
    Collective,
    CollectiveObserver,
    Kind,
    ObserverContext,
    ObserverFactory,
    Phase,
    Site,
    StepInfo,
)

__all__ = [
    "Collective",
    "CollectiveObserver",
    "Communicator",
    "Kind",
    "ObserverContext",
    "ObserverFactory",
    "Phase",
    "Site",
    "SoloCommunicator",
    "StepInfo",
]
