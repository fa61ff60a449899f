"""BlockPool: counts, order of eviction, and that a prefix is found by its content alone."""

from __future__ import annotations

import random
from array import array

import pytest

from engine.scheduling.blocks import BlockPool

SIZE = 4


def take(pool: BlockPool, count: int, hits: list[int] | None = None) -> list[int]:
    pages = pool.allocate(count, hits or [])
    assert pages is not None
    pool.check_invariants()
    return pages


def publish(pool: BlockPool, pages: list[int], tokens: list[int], first: int = 0) -> None:
    """Publishes the full pages of a request, as the scheduler does."""
    for i in range(first, len(tokens) // SIZE):
        parent = pages[i - 1] if i else None
        pool.publish(pages[i], parent, tokens[i * SIZE : (i + 1) * SIZE])
    pool.check_invariants()


def serve(pool: BlockPool, tokens: list[int]) -> list[int]:
    """One request from admission to its end; returns the pages it had."""
    hits = pool.match(tokens, len(tokens) // SIZE)
    pages = take(pool, pool.pages_for(len(tokens)) - len(hits), hits)
    publish(pool, pages, tokens, first=len(hits))
    pool.release(pages)
    pool.check_invariants()
    return pages


@pytest.mark.parametrize(
    ("positions", "pages"), [(0, 0), (1, 1), (SIZE - 1, 1), (SIZE, 1), (SIZE + 1, 2), (2 * SIZE, 2)]
)
def test_pages_for(positions: int, pages: int) -> None:
    assert BlockPool(1, SIZE).pages_for(positions) == pages


def test_pages_come_once_and_return_once() -> None:
    pool = BlockPool(5, SIZE)
    first, second = take(pool, 3), take(pool, 2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    pool.release(first)
    assert pool.num_free == 3
    assert pool.allocate(4) is None
    assert pool.num_free == 3  # a refusal takes nothing
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(first)


def test_a_prefix_is_found_up_to_the_first_difference() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(12))
    pages = serve(pool, tokens)
    assert pool.match(tokens, 3) == pages
    assert pool.match(tokens, 2) == pages[:2]
    assert pool.match(tokens, 0) == []
    for position in range(12):
        other = tokens.copy()
        other[position] = 99
        assert pool.match(other, 3) == pages[: position // SIZE]
    # The same tokens elsewhere in a prompt are not the same K/V.
    assert pool.match(tokens[4:], 2) == []


def test_two_prompts_of_equal_hash_are_two_prompts() -> None:
    """Content decides, not a hash: ids that differ by 2^32 or that hash alike are not confused."""
    pool = BlockPool(8, SIZE)
    pages = serve(pool, [1, 2, 3, 4])
    assert pool.match([1 + 2**32, 2, 3, 4], 1) == []
    serve(pool, [-1, -1, -1, -1])
    assert hash(-1) == hash(-2)
    assert pool.match([-2, -2, -2, -2], 1) == []
    assert pool.match([1, 2, 3, 4], 1) == pages


def test_a_collision_of_hashes_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys whose hash is 7 whatever their content, the dictionary still compares content."""

    class Constant(bytes):
        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            return bytes(self) == bytes(other) if isinstance(other, Constant) else NotImplemented

    class Key(tuple):  # type: ignore[type-arg]
        def __hash__(self) -> int:
            return 7

    monkeypatch.setattr(
        BlockPool,
        "_key",
        staticmethod(lambda uid, ids: Key((uid, Constant(array("q", ids).tobytes())))),
    )
    pool = BlockPool(8, SIZE)
    one, two = serve(pool, [1] * 8), serve(pool, [2] * 8)
    assert pool.match([1] * 8, 2) == one
    assert pool.match([2] * 8, 2) == two
    assert pool.match([1] * 4 + [2] * 4, 2) == one[:1]


def test_references_of_shared_pages() -> None:
    pool = BlockPool(6, SIZE)
    tokens = list(range(8))
    pages = take(pool, 3)
    publish(pool, pages, tokens)
    hits = pool.match([*tokens, 50], 2)
    other = take(pool, 1, hits)
    assert other[:2] == pages[:2]
    assert [pool.references(p) for p in pages] == [2, 2, 1]
    pool.release(pages)
    assert [pool.references(p) for p in pages] == [1, 1, 0]
    assert pool.num_free == 6 - 3
    pool.release(other)
    pool.check_invariants()
    assert pool.num_free == 6


def test_a_held_page_survives_when_all_else_is_evicted() -> None:
    pool = BlockPool(6, SIZE)
    kept = serve(pool, [1] * 4)
    serve(pool, [2] * 20)
    held = take(pool, 0, pool.match([1] * 4, 1))
    assert held == kept
    everything = take(pool, 5)
    assert kept[0] not in everything
    assert pool.match([1] * 4, 1) == kept
    assert pool.match([2] * 20, 5) == []
    pool.release(everything)
    pool.release(held)
    pool.check_invariants()
    assert pool.num_free == 6


def test_hits_are_safe_from_the_eviction_that_makes_room_for_their_own_request() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(16))
    pages = serve(pool, tokens)  # all four pages are free and published
    got = take(pool, 2, pool.match(tokens, 2))
    assert got[:2] == pages[:2]
    assert len(set(got)) == 4
    pool.release(got)
    # Two free hits leave two pages, not three.
    hits = pool.match(tokens, 2)
    assert hits == pages[:2]
    assert pool.allocate(3, hits) is None
    assert pool.match(tokens, 2) == pages[:2]
    pool.check_invariants()


def test_unpublished_pages_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(6, SIZE)
    old, new = serve(pool, [1] * 4), serve(pool, [2] * 4)
    assert pool.match([1] * 4, 1) == old
    plain = take(pool, 4)  # the four unpublished ones
    assert not set(plain) & {*old, *new}
    used_again = take(pool, 0, pool.match([1] * 4, 1))
    pool.release(used_again)
    assert take(pool, 1) == new
    assert pool.match([2] * 4, 1) == []
    assert take(pool, 1) == old


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(16))
    pages = serve(pool, tokens)
    for left in (3, 2, 1, 0):
        assert take(pool, 1) == [pages[left]]
        assert pool.match(tokens, 4) == pages[:left]


def test_of_equal_pages_the_first_stays_and_both_go_on_from_it() -> None:
    pool = BlockPool(8, SIZE)
    prefix = [1] * 4
    first, second = take(pool, 2), take(pool, 2)  # admitted together: neither could hit
    publish(pool, first, [*prefix, 5, 5, 5, 5])
    publish(pool, second, [*prefix, 6, 6, 6, 6])
    assert pool.match(prefix, 1) == first[:1]
    assert pool.match([*prefix, 5, 5, 5, 5], 2) == first
    assert pool.match([*prefix, 6, 6, 6, 6], 2) == [first[0], second[1]]
    pool.release(second)
    pool.check_invariants()
    assert pool.match(prefix, 1) == first[:1]


def test_what_hung_on_an_evicted_page_is_not_found_under_a_new_one() -> None:
    """The head is evicted while a tail that was chained onto it lives on; a new head of equal
    content is another page, and the old tail is not taken for its continuation."""
    pool = BlockPool(3, SIZE)
    head, tail = [1] * 4, [2] * 4
    first = take(pool, 1)
    publish(pool, first, head)
    second = take(pool, 2)  # a duplicate of the head, then the tail
    publish(pool, second, head + tail)
    pool.release(first)
    assert take(pool, 1) == first  # evicts the head
    assert pool.match(head + tail, 2) == []
    publish(pool, first, head)
    assert pool.match(head + tail, 2) == first
    pool.check_invariants()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(4, SIZE, prefix_cache=False)
    serve(pool, list(range(16)))
    assert pool.match(list(range(16)), 4) == []
    assert pool.num_free == 4


def test_reset_forgets_and_a_running_request_publishes_no_more() -> None:
    pool = BlockPool(6, SIZE)
    idle = list(range(8))
    serve(pool, idle)
    running = take(pool, 2)
    publish(pool, running, [7] * 4)
    pool.reset_prefix_cache()
    pool.check_invariants()
    assert pool.match(idle, 2) == []
    assert pool.match([7] * 4, 1) == []
    publish(pool, running, [7] * 8, first=1)
    assert pool.match([7] * 8, 2) == []
    pages = serve(pool, idle)
    assert pool.match(idle, 2) == pages
    pool.release(running)
    assert pool.num_free == 6
    # Both pages of the running request were freed as unpublished ones: they go before `idle`'s.
    take(pool, 4)
    assert pool.match(idle, 2) == pages


def test_after_a_reset_a_reused_page_does_not_continue_what_it_held_before() -> None:
    """A running request's prefix is unknown after a reset, also when it gets a page that was a
    duplicate of one that is still published: what follows must not be chained onto that one."""
    pool = BlockPool(5, SIZE)
    running = take(pool, 1)
    publish(pool, running, [7] * 4)
    pool.reset_prefix_cache()
    first, second = take(pool, 1), take(pool, 1)
    publish(pool, first, [1] * 4)
    publish(pool, second, [1] * 4)
    plain = take(pool, 2)
    pool.release(second)
    running += take(pool, 1)
    assert running[1:] == second
    pool.release(plain)
    running += take(pool, 1)
    publish(pool, running, [7] * 4 + [8] * 4 + [9] * 4, first=1)
    assert pool.match([1] * 4 + [9] * 4, 2) == first


def test_random_requests_keep_every_invariant() -> None:
    rng = random.Random(0)
    pool = BlockPool(17, SIZE)
    held: list[tuple[list[int], list[int]]] = []
    content: dict[int, list[int]] = {}  # page -> the whole prefix that it ends
    for _ in range(1_500):
        if held and rng.random() < 0.5:
            pages, _ = held.pop(rng.randrange(len(held)))
            pool.release(pages)
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            hits = pool.match(tokens, (len(tokens) - 1) // SIZE)
            for i, page in enumerate(hits):
                assert content[page] == tokens[: (i + 1) * SIZE]
            pages_or_none = pool.allocate(pool.pages_for(len(tokens)) - len(hits), hits)
            if pages_or_none is None:
                continue
            held.append((pages_or_none, tokens))
            for i in range(len(hits), len(tokens) // SIZE):
                content[pages_or_none[i]] = tokens[: (i + 1) * SIZE]
            publish(pool, pages_or_none, tokens, first=len(hits))
        pool.check_invariants()
        counts = [0] * pool.num_pages
        for pages, _ in held:
            for page in pages:
                counts[page] += 1
        assert counts == [pool.references(p) for p in range(pool.num_pages)]
        assert pool.num_free == counts.count(0)
