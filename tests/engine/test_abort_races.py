"""Aborts at every point of a turn of scheduler and core, on a fake model.

With prefix hits, chunks, preemption, streams, stop strings and n > 1: each request ends once, with
the tokens of a run alone or the beginning of them, and no page is lost or freed twice.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core import EngineCore
from engine.launched import Launched
from engine.messages import Results
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Schedule
from tests.support.fake_model import VOCAB, FakeRunner, reference, spell

# Random loads of the last test, 2 ms each; RANGEFINDER_SCHEDULES=10000 for a thorough run.
LOADS = int(os.environ.get("RANGEFINDER_SCHEDULES", "1500"))
TURNS = {False: 18, True: 25}  # of the scenario below, without and with overlap
PHASES = ("before plan", "planned", "in flight", "collected")


class Drive:
    """A core, the requests that were given to it, and all that came back."""

    def __init__(self, **config: Any) -> None:
        self.max_model_len = config["max_model_len"]
        self.runner: Any = FakeRunner(**config)
        self.core = EngineCore(self.runner)
        self.core._tokenizer = SimpleNamespace(decode=spell)  # type: ignore[assignment]
        self.runner.pool = self.core._pool
        self.requests: dict[str, Request] = {}
        self.ended: Counter[str] = Counter()
        self.heard: dict[str, list[int]] = {}
        self.turns = 0
        self.preemptions = 0
        self.depth = 2 if config.get("overlap") else 1
        self.flying: deque[tuple[Schedule, Launched]] = deque()

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.core.add(request)

    def turn(self, aborts: dict[str, list[str]]) -> None:
        self.turns += 1
        self._abort(aborts, "before plan")
        schedule, plan = self.core.plan()
        self.preemptions += len(schedule.preempted)
        self._check()
        if plan is not None:
            self._abort(aborts, "planned")
            self.runner.schedule = schedule
            self.flying.append((schedule, self.core.launch(schedule, plan)))
            self._abort(aborts, "in flight")
        if self.flying and (plan is None or len(self.flying) == self.depth):
            self._book(self.core.collect(*self.flying.popleft()))
            self._check()
            self._abort(aborts, "collected")
        elif plan is None:
            self._book(self.core.step())

    @property
    def has_work(self) -> bool:
        return self.core.has_work or bool(self.flying)

    def _abort(self, aborts: dict[str, list[str]], phase: str) -> None:
        for request_id in aborts.get(phase, ()):
            self.core.abort(request_id)
            self._check()

    def _check(self) -> None:
        self.core._scheduler.check_invariants()

    def _book(self, results: Results) -> None:
        for request_id, token in results.tokens:
            assert self.requests[request_id].streams and not self.ended[request_id]
            self.heard.setdefault(request_id, []).append(token)
        self.ended.update(request.request_id for request in results.finished)

    def check_end(self, aborted: set[str]) -> None:
        """After the last turn; `aborted`: those that may have been."""
        assert not self.core.has_work
        assert self.ended == Counter(self.requests.keys()), "a request is lost or ended twice"
        assert self.core._pool.num_free == self.core._pool.num_pages
        assert not self.core._streams
        for request_id, request in self.requests.items():
            if request.finish_reason is FinishReason.ERROR:
                continue
            tokens, reason, stop_reason = reference(
                request.prompt_ids, request.params, self.max_model_len
            )
            if request.finish_reason is FinishReason.ABORT:
                assert request_id in aborted and request.finished_s is not None
                assert request.output_ids == tokens[: len(request.output_ids)]
            else:
                ended = (request.output_ids, request.finish_reason, request.stop_reason)
                assert ended == (tokens, reason, stop_reason)
            assert len(request.token_times_s) == len(request.output_ids)
            heard = self.heard.get(request_id, [])
            assert heard == request.output_ids[: len(heard)]
            if request.streams and request.finish_reason is not FinishReason.ABORT:
                assert len(heard) == len(tokens) - 1  # the last one comes with the request
            if request.params.stop:
                text, stop = spell(request.output_ids), request.params.stop[0]
                assert request.text == text.split(stop)[0] and request.watched is None


def scenario(overlap: bool = False) -> Drive:
    """Two samples of one prompt, one that shares its first page, one of its own; too few pages."""
    drive = Drive(
        num_pages=8, page_size=4, prefix_cache=True, max_num_seqs=4, max_num_batched_tokens=7,
        max_model_len=40, overlap=overlap,
    )  # fmt: skip
    long = SamplingParams(max_tokens=9, ignore_eos=True)
    stem = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    for name, prompt, leader, streams in (
        ("a", stem, None, True),
        ("a.1", stem, "a", True),
        ("b", [*stem[:4], 6, 6], None, False),
        ("c", [5, 5, 5, 5, 5, 5], None, False),
    ):
        drive.add(Request(name, prompt, long, 0, 0.0, leader_id=leader, streams=streams))
    return drive


def finish(drive: Drive, aborts: dict[int, dict[str, list[str]]]) -> None:
    while drive.has_work:
        assert drive.turns < 500, "no end"
        drive.turn(aborts.get(drive.turns, {}))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_scenario_has_what_it_is_for(overlap: bool) -> None:
    drive = scenario(overlap)
    finish(drive, {})
    drive.check_end(set())
    assert drive.preemptions >= 1
    # With overlap b is admitted while the step that computes its first page is in flight.
    hits = [0, 8, 0 if overlap else 4, 0]
    assert [r.cached_tokens for r in drive.requests.values()] == hits
    assert drive.turns == TURNS[overlap]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["a", "a.1", "b", "c", "nobody"])
def test_an_abort_at_every_point(victim: str, phase: str, overlap: bool) -> None:
    """The turn in which the last token is in flight included: 800 runs of some 20 turns."""
    reasons = set()
    for turn in range(TURNS[overlap]):
        drive = scenario(overlap)
        finish(drive, {turn: {phase: [victim, victim]}})
        drive.check_end({victim})
        if victim in drive.requests:
            reasons.add(drive.requests[victim].finish_reason)
    # Late aborts meet a request that has ended already.
    assert victim == "nobody" or FinishReason.ABORT in reasons


def test_a_token_in_flight_is_dropped_with_its_request() -> None:
    drive = scenario()
    drive.turn({})
    drive.turn({})
    before = list(drive.requests["a"].output_ids)
    drive.turn({"in flight": ["a"]})
    assert drive.requests["a"].output_ids == before
    finish(drive, {})
    drive.check_end({"a"})


def random_load(rng: random.Random) -> None:
    page_size, max_num_seqs = rng.randint(1, 5), rng.randint(1, 5)
    drive = Drive(
        num_pages=rng.randint(6, 14),
        page_size=page_size,
        prefix_cache=rng.random() < 0.7,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 10),
        max_model_len=rng.choice([16, 40]),
        overlap=rng.random() < 0.6,
    )
    stems = [[rng.randrange(3) for _ in range(12)] for _ in range(2)]
    aborted: set[str] = set()
    coming = rng.randint(2, 7)
    while coming or drive.has_work:
        assert drive.turns < 1_000, "no end"
        if coming and rng.random() < 0.5:
            coming -= 1
            add_prompt(drive, rng, stems)
        aborts: dict[str, list[str]] = {}
        while rng.random() < 0.12 and drive.requests:
            victim = rng.choice([*drive.requests, "nobody"])
            aborts.setdefault(rng.choice(PHASES), []).append(victim)
            aborted.add(victim)
        drive.turn(aborts)
    drive.check_end(aborted)


def add_prompt(drive: Drive, rng: random.Random, stems: list[list[int]]) -> None:
    prompt = rng.choice(stems)[: rng.randint(0, 12)] + [
        rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 3]))
    ]
    params = SamplingParams(
        max_tokens=rng.randint(1, 12),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=[rng.randrange(1, VOCAB)] if rng.random() < 0.2 else [],
        stop=["".join(rng.choices("abcdefg", k=rng.randint(1, 2)))] if rng.random() < 0.3 else [],
    )
    name, streams = f"r{len(drive.requests)}", rng.random() < 0.5
    for sample in range(rng.choice([1, 1, 2, 4])):
        drive.add(
            Request(
                name if sample == 0 else f"{name}.{sample}",
                list(prompt),
                params,
                seed=sample,
                arrival_s=0.0,
                leader_id=None if sample == 0 else name,
                streams=streams,
            )
        )


def test_random_loads_with_random_aborts() -> None:
    for seed in range(LOADS):
        try:
            random_load(random.Random(seed))
        except BaseException as error:
            error.add_note(f"random.Random({seed})")
            raise
