"""Aborts at every point of a turn of scheduler and core, on a fake model.

With prefix hits, chunks, preemption, streams, stop strings and n > 1: each request ends once, with
the tokens of a run alone or the beginning of them, and no page is lost or freed twice.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.requests.request import FinishReason, Request
from engine.requests.sampling_params import SamplingParams
from tests.support.drive import PHASES, Drive, schedules
from tests.support.fake_model import VOCAB

LOADS = schedules(1_000)  # of the last test, some 3 ms each
TURNS = {False: 18, True: 25}  # of the scenario below, without and with overlap


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


class Planted(Exception):
    """What a device or an observer might raise in the middle of a step."""


def random_load(rng: random.Random) -> Counter[str]:
    """-> what the load had in it."""
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
    taken_apart = rng.random() < 0.6  # else whole steps, some of which raise, and cache resets
    stems = [[rng.randrange(3) for _ in range(12)] for _ in range(2)]
    aborted: set[str] = set()
    found: Counter[str] = Counter()
    coming = rng.randint(2, 7)

    def fail(call: str) -> None:
        if rng.random() < 0.03:
            raise Planted(call)

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
        if taken_apart:
            drive.turn(aborts)
            continue
        drive.runner.before = fail
        for phase in aborts:
            drive.abort(aborts, phase)
        try:
            if rng.random() < 0.05:
                drive.reset_prefix_cache()
                found["resets"] += 1
            drive.step()
        except Planted:
            found["failed steps"] += 1
            aborted.update(drive.requests)  # those that ended before have ended otherwise
    drive.check_end(aborted)
    requests = drive.requests.values()
    found["preemptions"] = sum(r.preemptions > 0 for r in requests)
    found["prefix hits"] = sum(r.cached_tokens > 0 for r in requests)
    found["siblings"] = sum(r.leader_id is not None for r in requests)
    found.update(r.finish_reason.value for r in requests if r.finish_reason)
    found["overlapped"] = drive.depth == 2
    return found


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


@pytest.mark.timeout(300 + LOADS // 10)
def test_random_loads_with_random_aborts() -> None:
    found: Counter[str] = Counter()
    for seed in range(LOADS):
        try:
            found += random_load(random.Random(seed))
        except BaseException as error:
            error.add_note(f"random.Random({seed})")
            raise
    print(f"{LOADS} loads: {dict(found)}")
    kinds = ("preemptions", "prefix hits", "siblings", "overlapped", "failed steps", "resets")
    rare = {kind: found[kind] for kind in (*kinds, *FinishReason) if found[kind] < LOADS / 10}
    assert not rare, "the loads do not hold what they are for"
