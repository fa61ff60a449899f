"""BlockPool: which pages of the K/V cache are free, shared, or kept for equal prefixes."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

# A page's content: the uid of the page before it and the bytes of its own token ids. Equal keys
# mean equal prefixes from position 0 on: two prompts cannot collide, whatever a hash function does.
_Key = tuple[int, bytes]
_ROOT = 0  # parent uid of a sequence's first page
_NO_UID = -1  # not (or no longer) part of a published prefix


class BlockPool:
    """Free list, reference counts and prefix map over pages 0 .. num_pages-1.

    A page is either free or referenced by at least one request. A full page whose K/V has been
    computed can be published: later requests with the same prefix then find it by content, while it
    is referenced and also after it was freed, until it is evicted. Free pages are taken unpublished
    ones first, then the least recently used published one.

    Each published page gets a uid that is never reused, so that what was chained onto an evicted
    page can no longer be found. When the same content is published twice, the first page stays the
    one that is found; the second keeps its own K/V and only borrows the first one's uid, so that
    both continue the same prefix.

    Attributes:
        num_pages: pages in the pool; page_size: tokens of one page.
        prefix_cache: False: nothing is ever published or matched.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        assert num_pages >= 1 and page_size >= 1, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._references = [0] * num_pages
        self._uids = [_NO_UID] * num_pages
        self._keys: list[_Key | None] = [None] * num_pages
        self._published: dict[_Key, int] = {}
        self._next_uid = _ROOT + 1
        self._free_plain = deque(range(num_pages))
        self._free_published: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that can be taken now, published ones included."""
        return len(self._free_plain) + len(self._free_published)

    def references(self, page: int) -> int:
        """How many requests hold this page."""
        return self._references[page]

    def pages_for(self, num_positions: int) -> int:
        """ceil(num_positions / page_size)."""
        return -(-num_positions // self.page_size)

    def match(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """The published pages that hold the longest prefix of `token_ids`, at most `limit` pages.

        The answer holds until the next allocation only: a free page in it can be evicted.
        """
        pages: list[int] = []
        uid = _ROOT
        for start in range(0, limit * self.page_size, self.page_size):
            page = self._published.get(self._key(uid, token_ids[start : start + self.page_size]))
            if page is None:
                break
            pages.append(page)
            uid = self._uids[page]
        return pages

    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        """Takes a reference on every page of `hits` (from `match`) and on `count` fresh pages.

        Returns hits + fresh pages, or None, with nothing changed, if the pool cannot give them. The
        hits are referenced first, so that making room cannot evict them.
        """
        free_hits = sum(self._references[page] == 0 for page in hits)
        if count + free_hits > self.num_free:
            return None
        for page in hits:
            if self._references[page] == 0:
                del self._free_published[page]
            self._references[page] += 1
        return [*hits, *(self._take_free() for _ in range(count))]

    def release(self, page_ids: Sequence[int]) -> None:
        """Drops one reference on each page of a request (pages in order of position).

        Freed in reverse, so that the tail of a prefix is evicted before its head, without which the
        tail could not be found anyway.
        """
        for page in reversed(page_ids):
            assert self._references[page] > 0, f"page {page} released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._keys[page] is None:
                    self._free_plain.append(page)
                else:
                    self._free_published[page] = None

    def publish(self, page: int, parent: int | None, token_ids: Sequence[int]) -> None:
        """Lets later requests find a full, computed page.

        Args:
            page: a referenced page, not published yet.
            parent: the page before it in the same request; None for the first page.
            token_ids: the page_size tokens whose K/V it holds.
        """
        if not self.prefix_cache:
            return
        assert len(token_ids) == self.page_size, (len(token_ids), self.page_size)
        assert self._references[page] > 0 and self._keys[page] is None, f"page {page}"
        parent_uid = _ROOT if parent is None else self._uids[parent]
        if parent_uid == _NO_UID:
            return  # the cache was reset while this request ran: its prefix is not published
        key = self._key(parent_uid, token_ids)
        first = self._published.get(key)
        if first is not None:
            self._uids[page] = self._uids[first]
            return
        self._published[key] = page
        self._keys[page] = key
        self._uids[page] = self._next_uid
        self._next_uid += 1

    def reset_prefix_cache(self) -> None:
        """Forgets every published page. Requests keep their pages; none of them is found again."""
        self._published.clear()
        self._keys = [None] * self.num_pages
        self._uids = [_NO_UID] * self.num_pages
        self._free_plain.extend(self._free_published)
        self._free_published.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError unless pages are conserved and the prefix map is consistent."""
        free = [*self._free_plain, *self._free_published]
        assert len(free) == len(set(free)) == self.num_free, "a page is twice in the free list"
        free_by_count = {page for page, count in enumerate(self._references) if count == 0}
        assert min(self._references) >= 0
        assert set(free) == free_by_count, "a page is neither or both free and referenced"
        assert all(self._keys[page] is None for page in self._free_plain)
        assert all(self._keys[page] is not None for page in self._free_published)
        by_page = {key: page for page, key in enumerate(self._keys) if key is not None}
        assert by_page == self._published, "prefix map and pages disagree"
        assert self.prefix_cache or not self._published
        uids = [self._uids[page] for page in self._published.values()]
        assert len(uids) == len(set(uids)) and all(_ROOT < uid < self._next_uid for uid in uids)

    @staticmethod
    def _key(parent_uid: int, token_ids: Sequence[int]) -> _Key:
        return parent_uid, array("q", token_ids).tobytes()

    def _take_free(self) -> int:
        if self._free_plain:
            page = self._free_plain.popleft()
        else:
            page, _ = self._free_published.popitem(last=False)
            key = self._keys[page]
            assert key is not None
            del self._published[key]
            self._keys[page] = None
        self._uids[page] = _NO_UID
        self._references[page] = 1
        return page
