"""Which pages a sequence holds. Five verbs: match, grow, commit, fork, release.

Called by `scheduler`; owns the `PagePool` and tells of each change in the event list: with one event for all pages that
a sequence takes, shares or gives back at once. Must not know queues, budgets or tensors.

    match    look up the longest run of whole pages that already hold the sequence's first tokens (changes nothing)
    grow     share matched pages, take new ones, until a number of tokens has room
    commit   make pages that are now full and computed findable by their hash
    fork     give a new branch the pages of another one: whole pages are shared, the partly filled one is copied
    release  give all pages back

A page that two sequences name is full, so nobody ever writes to a shared page.
"""

from collections.abc import Iterable

from sayfa.base.faults import fault
from sayfa.base.messages import (
    Event,
    PageCopied,
    PageDropped,
    PagesReleased,
    PagesShared,
    PagesTaken,
    PageStored,
)
from sayfa.base.page_hash import chain, pack_tokens, page_hash, root_hash
from sayfa.core.page_pool import PagePool
from sayfa.core.sequence import RequestState, Sequence

HEADROOM = 64
"""One part in so many of the pool stays free when somebody enters beside others."""


class KvCache:
    """Pages on demand: a page is taken when a token needs it, full pages are shared and found again.

    model_digest, weight_version: part of every page's identity. caching: whether full pages can be found again.
    """

    def __init__(
        self, pool: PagePool, page_size: int, *, model_digest: str = "", weight_version: int = 0, caching: bool = True
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.caching = caching
        self.model_digest = model_digest
        self.weight_version = weight_version
        self.events: list[Event] = []
        """Filled here and by the scheduler, emptied by the scheduler's `take_events`."""

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def pages_for_request(self, state: RequestState) -> int:
        """Return the least pages this request needs; more than the pool has can never be served."""
        return self.num_pages(state.num_prompt)

    def pages_to_enter(self, sequence: Sequence) -> int:
        """Return the pages, found ones included, that should be there when this sequence starts."""
        return self.num_pages(len(sequence.tokens))

    def headroom(self, sequence: Sequence, num_running: int) -> int:
        """Return the pages to leave free when this sequence enters beside `num_running` others, so that those can grow.

        One that had to yield comes back only if half of those who run could take a page before it yields again.
        """
        if not num_running:
            return 0
        return self.pool.capacity // HEADROOM + (num_running // 2 if sequence.preempted else 0)

    def pages_to_fork(self, num_tokens: int) -> int:
        """Return the free pages that a fork at this many tokens and the token after them take."""
        return 1

    def room(self, sequence: Sequence) -> int:
        """Return up to how many tokens this sequence could grow now."""
        return (len(sequence.pages) + self.pool.num_free) * self.page_size

    def open(self, state: RequestState) -> None:
        """Give a new request its root in the hash chain."""
        request = state.request
        state.root = root_hash(self.model_digest, self.weight_version, request.adapter, request.salt)

    def match(self, sequence: Sequence) -> list[int]:
        """Return the pages that hold the sequence's first tokens. At least one token is always left to compute."""
        fault("core.match")
        pages: list[int] = []
        if not self.caching or sequence.wants_scores:
            return pages
        for index in range((len(sequence.tokens) - 1) // self.page_size):
            page = self.pool.find(*self._identity(sequence, index))
            if not page:
                break
            pages.append(page)
        return pages

    def first_missing(self, sequence: Sequence, num_matched: int) -> bytes | None:
        """Return the hash of the first page that `match` did not find, or None if no whole page is missing."""
        if not self.caching or sequence.wants_scores or num_matched >= (len(sequence.tokens) - 1) // self.page_size:
            return None
        return self._identity(sequence, num_matched)[0]

    def coming(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the whole pages that this running sequence's known tokens will still fill.

        Without those with a position to score: few are scored in a step, so others are better off computing such pages.
        """
        num_known = sequence.scored if sequence.wants_scores else len(sequence.tokens)
        num_whole = num_known // self.page_size
        if not self.caching or num_whole <= sequence.num_stored:
            return []
        self._identity(sequence, num_whole - 1)
        return sequence.hashes[sequence.num_stored : num_whole]

    def num_idle(self, pages: Iterable[int]) -> int:
        """Return how many of these pages have no user now (sharing them makes fewer pages free)."""
        return sum(self.pool.users(page) == 0 for page in pages)

    def grow(self, sequence: Sequence, num_tokens: int, matched: list[int] | None = None) -> list[int] | None:
        """Make room for the first `num_tokens` tokens; return the page ids added.

        None, and no change, if too few pages are free.

        matched: pages from `match`, shared first; only for a sequence that has none yet.
        """
        fault("core.grow")
        matched = matched or []
        missing = self.num_pages(num_tokens) - len(sequence.pages) - len(matched)
        if missing > self.pool.num_free - (self.num_idle(matched) if matched else 0):
            return None
        if matched:
            self._share(matched, sequence)
        added = matched + (self._take(missing, sequence) if missing > 0 else [])
        sequence.pages.extend(added)
        sequence.num_stored = max(sequence.num_stored, len(matched))
        return added

    def commit(self, sequence: Sequence) -> None:
        """Make the pages that are full up to `computed` findable. A hash that another page stands for stays with it."""
        fault("core.commit")
        if not self.caching:
            return
        for index in range(sequence.num_stored, sequence.computed // self.page_size):
            identity, content = self._identity(sequence, index)
            page = sequence.pages[index]
            if self.pool.store(page, identity, content):
                parent = sequence.hashes[index - 1].hex() if index else ""
                self.events.append(PageStored(page, identity.hex(), parent))
            sequence.num_stored = index + 1

    def fork(self, source: Sequence, branch: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Give `branch` the first `num_tokens` tokens of `source`; return the page copies to make.

        None, and no change, if too few pages are free.

        Whole pages are shared. If the last page is only partly needed, its content must be copied to the new page
        before the next tokens are computed.
        """
        fault("core.fork")
        num_whole, partial = divmod(num_tokens, self.page_size)
        if partial and not self.pool.num_free:
            return None
        if num_whole:
            self._share(source.pages[:num_whole], branch)
        branch.pages.extend(source.pages[:num_whole])
        branch.hashes = source.hashes[:num_whole]
        branch.contents = source.contents[:num_whole]
        branch.num_stored = min(source.num_stored, num_whole)
        return [self._copy(source.pages[num_whole], branch)] if partial else []

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Give all pages back, the last one first, so that the start of a chain outlives its end.

        keep: whether full pages may be found again. False for a sequence whose K/V cannot be trusted: its pages then
        lose their hash, also those that it found, since one of them may be what spoiled it.
        """
        fault("core.release")
        if not keep:
            self._spoil(sequence)
        pages = sequence.pages[::-1]
        for page in pages:
            self.pool.drop(page)
        if pages:
            self.events.append(PagesReleased(pages, sequence.id, sequence.branch))
        sequence.pages = []
        sequence.computed = 0
        sequence.num_stored = 0

    def reset(self) -> int:
        """Forget all cached pages that no sequence holds; return how many."""
        pages = self.pool.cached_pages()
        for page in pages:
            self._dropped(page, self.pool.forget(page))
        return len(pages)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError if pool and page tables disagree or a hash does not recompute. Slow: for audits."""
        held = [sequence for sequence in sequences if sequence.pages]
        self.pool.check(sequence.pages for sequence in held)
        for sequence in held:
            hashes = chain(sequence.state.root, sequence.tokens[: sequence.computed], self.page_size)
            for index, page in enumerate(sequence.pages):
                full = sequence.computed >= (index + 1) * self.page_size
                if not full and (self.pool.users(page) > 1 or self.pool.hash_of(page) is not None):
                    raise RuntimeError(f"{sequence.id}: page {page} is shared or findable but not full")
                stored = self.pool.hash_of(page)
                if stored is not None and stored != hashes[index]:
                    raise RuntimeError(f"{sequence.id}: page {page} does not hold the tokens its hash says")

    def _identity(self, sequence: Sequence, index: int) -> tuple[bytes, bytes]:
        """Return (hash, content) of the sequence's page `index`; its tokens must be there."""
        hashes = sequence.hashes
        for known in range(len(hashes), index + 1):
            parent = self._parent(sequence, known)
            packed = pack_tokens(sequence.tokens[known * self.page_size : (known + 1) * self.page_size])
            hashes.append(page_hash(parent, packed))
            sequence.contents.append(parent + packed)
        return hashes[index], sequence.contents[index]

    def _parent(self, sequence: Sequence, index: int) -> bytes:
        return sequence.hashes[index - 1] if index else sequence.state.root

    def _share(self, pages: list[int], sequence: Sequence) -> None:
        for page in pages:
            self.pool.share(page)
        self.events.append(PagesShared(pages, sequence.id, sequence.branch))

    def _take(self, num_pages: int, sequence: Sequence) -> list[int]:
        pages = []
        for _ in range(num_pages):
            page, lost = self.pool.take()
            self._dropped(page, lost)
            pages.append(page)
        self.events.append(PagesTaken(pages, sequence.id, sequence.branch))
        return pages

    def _copy(self, source: int, branch: Sequence) -> tuple[int, int]:
        page, lost = self.pool.take()
        self._dropped(page, lost)
        self.events.append(PageCopied(source, page, branch.id, branch.branch))
        branch.pages.append(page)
        return source, page

    def _spoil(self, sequence: Sequence) -> None:
        for page in sequence.pages:
            self._dropped(page, self.pool.forget(page))

    def _dropped(self, page: int, lost: bytes | None) -> None:
        if lost is not None:
            self.events.append(PageDropped(page, lost.hex()))


class ReservedCache(KvCache):
    """Contiguous reservation, as engines did before paging: the full length is set aside at the start. To compare with.

    Nothing is shared and nothing is found again. All reservations have the same size, so the free memory never breaks
    into unusable pieces: what is lost is only what was reserved and not used, the kindest case for this scheme.
    """

    def __init__(self, pool: PagePool, page_size: int, max_model_len: int) -> None:
        super().__init__(pool, page_size, caching=False)
        self._reserve = self.num_pages(max_model_len)

    def pages_for_request(self, state: RequestState) -> int:
        """Return the pages of one whole reservation."""
        return self._reserve

    def pages_to_enter(self, sequence: Sequence) -> int:
        """Return the pages of one whole reservation."""
        return self._reserve

    def pages_to_fork(self, num_tokens: int) -> int:
        """Return the pages of one whole reservation."""
        return self._reserve

    def headroom(self, sequence: Sequence, num_running: int) -> int:
        """Return 0: nobody grows."""
        return 0

    def grow(self, sequence: Sequence, num_tokens: int, matched: list[int] | None = None) -> list[int] | None:
        """Take the whole reservation at the first call; nothing after that."""
        return super().grow(sequence, self._reserve * self.page_size, matched)

    def fork(self, source: Sequence, branch: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Copy each filled page of `source` into a reservation of the branch's own."""
        if self.pool.num_free < self._reserve:
            return None
        copies = [self._copy(page, branch) for page in source.pages[: self.num_pages(num_tokens)]]
        super().grow(branch, self._reserve * self.page_size)
        return copies
