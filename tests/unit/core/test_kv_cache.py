"""The five verbs: match, grow, commit, fork, release."""

import pytest

from fakes.deciding import request
from sayfa.base.messages import PageCopied, PageDropped, PagesReleased, PagesShared, PagesTaken, PageStored
from sayfa.core.kv_cache import KvCache, ReservedCache
from sayfa.core.page_pool import PagePool
from sayfa.core.sequence import RequestState, Sequence

PAGE = 4


def make(num_pages: int = 20, **settings: object) -> KvCache:
    return KvCache(PagePool(num_pages), PAGE, model_digest="m", **settings)  # type: ignore[arg-type]


def sequence(cache: KvCache, tokens: list[int], *, salt: str = "", branch: int = 0, **params: object) -> Sequence:
    state = RequestState(request("r", tokens, salt=salt, **params), 0, 0.0, 1000)
    cache.open(state)
    return state.branch(branch)


def computed(cache: KvCache, tokens: list[int], *, salt: str = "") -> Sequence:
    """A sequence whose tokens are all in pages and stored."""
    seq = sequence(cache, tokens, salt=salt)
    assert cache.grow(seq, len(tokens)) is not None
    seq.computed = len(tokens)
    cache.commit(seq)
    return seq


def test_a_page_is_taken_only_when_a_token_needs_it() -> None:
    cache = make()
    seq = sequence(cache, list(range(30)))
    for num_tokens in range(1, 31):
        added = cache.grow(seq, num_tokens)
        assert added is not None
        assert len(added) == (num_tokens % PAGE == 1)
        assert len(seq.pages) == -(-num_tokens // PAGE)
    assert 0 not in seq.pages


def test_growing_is_all_or_nothing() -> None:
    cache = make(num_pages=4)
    seq = sequence(cache, list(range(30)))
    assert cache.grow(seq, 13) is None
    assert seq.pages == []
    assert cache.pool.num_free == 3
    assert cache.grow(seq, 12) is not None


@pytest.mark.parametrize("length", range(1, 14))
def test_a_full_hit_leaves_one_token_to_compute(length: int) -> None:
    cache = make()
    first = computed(cache, list(range(length)))
    cache.release(first)
    matched = cache.match(sequence(cache, list(range(length))))
    assert len(matched) == (length - 1) // PAGE


def test_pages_are_found_while_in_use_and_after() -> None:
    cache = make()
    first = computed(cache, list(range(9)))
    second = sequence(cache, list(range(9)))
    assert cache.match(second) == first.pages[:2]
    cache.release(first)
    matched = cache.match(second)
    assert len(matched) == 2
    assert cache.num_idle(matched) == 2
    cache.grow(second, 9, matched)
    second.computed = 8
    assert second.pages[:2] == matched
    assert cache.num_idle(matched) == 0
    cache.check([second])


@pytest.mark.parametrize(
    ("change", "found"),
    [({}, 2), ({"salt": "other"}, 0), ({"tokens": [9, *range(1, 9)]}, 0), ({"tokens": [0, 1, 2, 3, 9, 5, 6, 7, 8]}, 1)],
)
def test_only_the_same_tokens_under_the_same_salt_are_found(change: dict[str, object], found: int) -> None:
    cache = make()
    computed(cache, list(range(9)))
    arguments: dict[str, object] = {"tokens": list(range(9)), **change}
    assert len(cache.match(sequence(cache, **arguments))) == found  # type: ignore[arg-type]


def test_new_weights_find_no_old_pages() -> None:
    cache = make()
    computed(cache, list(range(9)))
    cache.weight_version += 1
    assert cache.match(sequence(cache, list(range(9)))) == []


def test_a_forged_hash_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """T25: even if two token lists had the same hash, the tokens are compared."""
    monkeypatch.setattr("sayfa.core.kv_cache.page_hash", lambda parent, packed: b"always the same!")
    cache = make()
    computed(cache, [1, 2, 3, 4])
    assert cache.match(sequence(cache, [5, 6, 7, 8, 9])) == []
    assert len(cache.match(sequence(cache, [1, 2, 3, 4, 9]))) == 1


def test_nothing_is_found_without_caching_or_when_the_prompt_is_to_be_scored() -> None:
    off = make(caching=False)
    computed(off, list(range(9)))
    assert off.match(sequence(off, list(range(9)))) == []
    cache = make()
    computed(cache, list(range(9)))
    scored = sequence(cache, list(range(9)), prompt_logprobs=0)
    assert cache.match(scored) == []
    scored.scored = 8
    assert len(cache.match(scored)) == 2


def test_the_end_of_a_chain_is_reused_before_its_start() -> None:
    cache = make(num_pages=4)
    first = computed(cache, list(range(12)))
    pages = list(first.pages)
    cache.release(first)
    other = sequence(cache, [40] * 9)
    assert cache.grow(other, 4) == [pages[2]]
    assert cache.match(sequence(cache, list(range(12)))) == pages[:2]


@pytest.mark.parametrize("num_tokens", [4, 5, 7, 8, 9])
def test_a_fork_shares_whole_pages_and_copies_the_open_one(num_tokens: int) -> None:
    cache = make()
    source = computed(cache, list(range(num_tokens + 1)))
    branch = sequence(cache, list(range(num_tokens + 1)))
    copies = cache.fork(source, branch, num_tokens)
    whole = num_tokens // PAGE
    assert branch.pages[:whole] == source.pages[:whole]
    assert copies == ([(source.pages[whole], branch.pages[whole])] if num_tokens % PAGE else [])
    assert not set(branch.pages[whole:]) & set(source.pages)
    branch.computed = num_tokens
    cache.check([source, branch])


def test_a_fork_without_a_free_page_changes_nothing() -> None:
    cache = make(num_pages=3)
    source = computed(cache, list(range(7)))
    branch = sequence(cache, list(range(7)))
    assert cache.fork(source, branch, 6) is None
    assert branch.pages == []
    cache.check([source])


def test_pages_of_a_spoiled_sequence_are_not_found_again() -> None:
    cache = make()
    helper = computed(cache, list(range(9)))
    spoiled = sequence(cache, list(range(12)))
    cache.grow(spoiled, 12, cache.match(spoiled))
    spoiled.computed = 12
    cache.commit(spoiled)
    cache.release(spoiled, keep=False)
    assert cache.match(sequence(cache, list(range(12)))) == []
    cache.check([helper])
    cache.release(helper)
    assert cache.pool.num_cached == 0


def test_two_that_computed_the_same_page_leave_one_entry() -> None:
    cache = make()
    first, second = computed(cache, list(range(8))), computed(cache, list(range(8)))
    cache.check([first, second])
    cache.release(first)
    cache.release(second)
    assert cache.pool.num_cached == 2
    cache.pool.check([])


def test_reset_forgets_what_nobody_holds() -> None:
    cache = make()
    gone, kept = computed(cache, [1] * 8), computed(cache, [2] * 8)
    cache.release(gone)
    assert cache.reset() == 2
    assert cache.match(sequence(cache, [1] * 8)) == []
    assert len(cache.match(sequence(cache, [2] * 9))) == 2
    cache.check([kept])


def test_events_tell_each_change_in_order() -> None:
    cache = make(num_pages=5)
    first = computed(cache, list(range(5)))
    branch = sequence(cache, list(range(5)), branch=1)
    cache.fork(first, branch, 4)
    cache.fork(first, sequence(cache, list(range(7)), branch=2), 5)
    a, b = first.pages
    digest = first.hashes[0].hex()
    assert cache.events == [
        PagesTaken([a, b], "r", 0), PageStored(a, digest, ""),
        PagesShared([a], "r", 1), PagesShared([a], "r", 2), PageCopied(b, 3, "r", 2),
    ]  # fmt: skip
    cache.events.clear()
    cache.release(branch)
    cache.release(first)
    assert cache.events == [PagesReleased([a], "r", 1), PagesReleased([b, a], "r", 0)]
    cache.events.clear()
    cache.release(first)
    assert cache.events == []


def test_what_a_sequence_takes_shares_or_gives_back_at_once_is_one_event() -> None:
    """A request of many branches over many pages must not flood the feed when it forks or leaves."""
    cache = make(num_pages=1002)
    first = sequence(cache, list(range(4000)))
    cache.grow(first, 4000)
    first.computed = 4000
    branches = [sequence(cache, list(range(4000)), branch=number) for number in range(1, 128)]
    for branch in branches:
        cache.fork(first, branch, 4000)
    for leaving in (*branches, first):
        cache.release(leaving)
    assert len(cache.events) == 1 + 127 + 128
    assert cache.pool.num_free == 1001


def test_a_cached_page_that_is_taken_for_other_use_is_dropped() -> None:
    cache = make(num_pages=2)
    first = computed(cache, [1] * 4)
    digest = first.hashes[0].hex()
    cache.release(first)
    cache.events.clear()
    cache.grow(sequence(cache, [2]), 1)
    assert cache.events == [PageDropped(1, digest), PagesTaken([1], "r", 0)]


def test_a_reservation_takes_the_full_length_at_once() -> None:
    cache = ReservedCache(PagePool(9), PAGE, max_model_len=16)
    first, second, third = (sequence(cache, [1, 2]) for _ in range(3))
    assert len(cache.grow(first, 2) or []) == 4
    assert cache.grow(first, 16) == []
    copies = cache.fork(first, second, 2)
    assert copies == [(first.pages[0], second.pages[0])]
    assert len(second.pages) == 4
    assert cache.grow(third, 1) is None
    assert cache.fork(first, third, 2) is None
    second.computed = 2
    cache.check([first, second])


@pytest.mark.parametrize("damage", ["shared", "wrong_hash", "lost"])
def test_the_check_sees_damage(damage: str) -> None:
    """The audit is worth something only if it can fail."""
    cache = make()
    first, second = computed(cache, list(range(7))), computed(cache, [9] * 7)
    match damage:
        case "shared":  # an open page in two tables
            cache.pool.share(first.pages[1])
            second.pages.append(first.pages[1])
        case "wrong_hash":
            first.tokens[2] += 1
            first.hashes.clear()
        case "lost":
            first.pages.pop()
    with pytest.raises(RuntimeError):
        cache.check([first, second])
