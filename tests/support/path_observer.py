"""Observers that a test sends to the ranks of an engine; classes serve as picklable factories."""

from __future__ import annotations

from engine.comm import Collective, CollectiveObserver, ObserverContext


class Paths(CollectiveObserver):
    """Hands over which kinds went which path, (kind, path), of launched steps."""

    def __init__(self, context: ObserverContext) -> None:
        self._heard: set[tuple[str, str]] = set()

    def before(self, collective: Collective) -> None:
        self._heard.add((collective.kind.label, collective.path))

    def result(self) -> set[tuple[str, str]]:
        return self._heard
