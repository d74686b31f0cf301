"""Page pool. Owns which pages are free, cached or used, and which hash stands for which page.

Called by `kv_cache` only; knows nothing of sequences, tensors or events. A page is an integer; what is known of it lies
in parallel lists by page id.

Invariants (`check` proves them):
1. Page 0 is reserved and never handed out: a zeroed table entry can never name somebody's page.
2. Each other page is in exactly one state:
       blank    no users, no hash            in `_blank`, a stack
       cached   no users, found by its hash  in `_cached`, least recently used first
       used     one or more users, with or without a hash
3. `_index` maps each hash to the one page that carries it, and each hashed page is in it.
4. users(page) = how many tables name the page; more than one only if all of them hold the same tokens there.
All operations are O(1).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from sayfa.base.errors import ConfigError
from sayfa.base.faults import fault


class PagePool:
    """`num_pages` pages with the ids 0 .. num_pages - 1, of which page 0 is never given to anybody."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ConfigError(f"the page pool has {num_pages} pages; it needs at least 2 (page 0 is reserved)")
        self.num_pages = num_pages
        self.capacity = num_pages - 1
        self.num_shares = 0
        """Users beyond the first, over all pages: what sharing saves, in pages."""
        self._users = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._content: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}
        self._blank = list(range(num_pages - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that `take` can hand out: blank ones and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages without users whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages with at least one user."""
        return self.capacity - len(self._blank) - len(self._cached)

    def users(self, page: int) -> int:
        """Return how many users the page has."""
        return self._users[page]

    def hash_of(self, page: int) -> bytes | None:
        """Return the hash the page can be found by, or None."""
        return self._hashes[page]

    def take(self) -> tuple[int, bytes | None]:
        """Hand out a page to one user; return it and, if it was cached until now, the hash that is lost with it.

        The caller makes sure that `num_free` > 0.
        """
        fault("core.take_page")
        lost = None
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            fault("core.evict")
            lost = self._unindex(page)
        self._users[page] = 1
        return page, lost

    def share(self, page: int) -> None:
        """Add one user to a page that is used or cached."""
        users = self._users[page]
        if users:
            self.num_shares += 1
        else:
            del self._cached[page]
        self._users[page] = users + 1

    def drop(self, page: int) -> int:
        """Remove one user; return how many are left. After the last one it is cached if it has a hash, else blank."""
        users = self._users[page] - 1
        if users < 0:
            raise RuntimeError(f"page {page} was given back twice")
        self._users[page] = users
        if users:
            self.num_shares -= 1
        elif self._hashes[page] is None:
            self._blank.append(page)
        else:
            self._cached[page] = None
        return users

    def store(self, page: int, page_hash: bytes, content: bytes) -> bool:
        """Make a used page findable; False if another page already stands for this hash (or this page for another)."""
        if page_hash in self._index or self._hashes[page] is not None:
            return False
        self._index[page_hash] = page
        self._hashes[page] = page_hash
        self._content[page] = content
        return True

    def find(self, page_hash: bytes, content: bytes) -> int:
        """Return the page with this hash and exactly this content, or 0.

        content: parent hash and packed tokens. It is compared because a hash alone may be forged.
        """
        page = self._index.get(page_hash, 0)
        return page if page and self._content[page] == content else 0

    def forget(self, page: int) -> bytes | None:
        """Make a page unfindable (its users keep it); return the hash it had, or None."""
        if self._hashes[page] is None:
            return None
        if self._users[page] == 0:
            del self._cached[page]
            self._blank.append(page)
        return self._unindex(page)

    def cached_pages(self) -> list[int]:
        """Return the cached pages, least recently used first."""
        return list(self._cached)

    def check(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raise RuntimeError at the first broken invariant. `tables`: all page lists, to compare users with."""
        blank, cached = set(self._blank), set(self._cached)
        if len(blank) != len(self._blank):
            raise RuntimeError("a page is twice among the blank ones")
        shares = 0
        for page in range(1, self.num_pages):
            users, hashed = self._users[page], self._hashes[page] is not None
            places = (page in blank) + (page in cached) + (users > 0)
            if places != 1 or users < 0:
                raise RuntimeError(
                    f"page {page} is in {places} states: blank {page in blank}, cached {page in cached}, users {users}"
                )
            if page in cached and not hashed:
                raise RuntimeError(f"page {page} is cached but has no hash")
            if page in blank and hashed:
                raise RuntimeError(f"page {page} is blank but has a hash")
            if hashed != (self._content[page] is not None):
                raise RuntimeError(f"page {page} has a hash without content or content without a hash")
            shares += max(0, users - 1)
        if 0 in blank or 0 in cached or self._users[0] or self._hashes[0] is not None:
            raise RuntimeError("page 0 is reserved but in circulation")
        if shares != self.num_shares:
            raise RuntimeError(f"{shares} extra users counted, but num_shares is {self.num_shares}")
        for page_hash, page in self._index.items():
            if self._hashes[page] != page_hash:
                raise RuntimeError(f"the index names page {page} for a hash it does not carry")
        if len(self._index) != sum(page_hash is not None for page_hash in self._hashes):
            raise RuntimeError("a page has a hash that the index lacks")
        if tables is not None:
            self._check_tables(tables)

    def _check_tables(self, tables: Iterable[Iterable[int]]) -> None:
        named = Counter(page for table in tables for page in table)
        for page in range(self.num_pages):
            if named[page] != self._users[page]:
                raise RuntimeError(f"page {page} is named by {named[page]} tables, but has {self._users[page]} users")
        if any(not 0 <= page < self.num_pages for page in named):
            raise RuntimeError("a table names a page that does not exist")

    def _unindex(self, page: int) -> bytes | None:
        lost = self._hashes[page]
        if lost is not None:
            del self._index[lost]
        self._hashes[page] = None
        self._content[page] = None
        return lost
