"""The pool's own errors, and that its check sees each kind of damage. Histories are in tests/property."""

from collections.abc import Callable

import pytest

from sayfa.base.errors import ConfigError
from sayfa.core.page_pool import PagePool


def pool_with_all_states() -> tuple[PagePool, list[list[int]]]:
    """Pages 1 and 2 used (1 twice, stored), 3 cached, the others blank."""
    pool = PagePool(8)
    pages = [pool.take()[0] for _ in range(3)]
    assert pages == [1, 2, 3]
    pool.share(1)
    pool.store(1, b"one", b"1")
    pool.store(3, b"three", b"3")
    pool.drop(3)
    return pool, [[1, 2], [1]]


def _break_index(pool: PagePool) -> None:
    pool._index[b"two"] = 2


def _blank_twice(pool: PagePool) -> None:
    pool._blank.append(pool._blank[0])


def _used_and_blank(pool: PagePool) -> None:
    pool._blank.append(2)


def _lost(pool: PagePool) -> None:
    pool._blank.pop()


def _reserved(pool: PagePool) -> None:
    pool._blank.append(0)


def _too_many_users(pool: PagePool) -> None:
    pool._users[2] += 1


def _hash_without_index(pool: PagePool) -> None:
    del pool._index[b"three"]


def _cached_without_hash(pool: PagePool) -> None:
    pool._hashes[3] = None


def _blank_with_hash(pool: PagePool) -> None:
    pool._hashes[5] = b"five"
    pool._content[5] = b"5"


def _hash_without_content(pool: PagePool) -> None:
    pool._content[1] = None


def _wrong_count(pool: PagePool) -> None:
    pool.num_shares += 1


def test_a_sound_pool_passes_its_check() -> None:
    pool, tables = pool_with_all_states()
    pool.check(tables)
    pool.check()  # without tables nothing is compared with them
    assert (pool.num_used, pool.num_cached, pool.num_free, pool.num_shares) == (2, 1, 5, 1)


@pytest.mark.parametrize(
    "damage",
    [
        _break_index, _blank_twice, _used_and_blank, _lost, _reserved, _too_many_users, _hash_without_index,
        _cached_without_hash, _wrong_count, _blank_with_hash, _hash_without_content,
    ],
)  # fmt: skip
def test_the_check_sees_each_kind_of_damage(damage: Callable[[PagePool], None]) -> None:
    pool, tables = pool_with_all_states()
    damage(pool)
    with pytest.raises(RuntimeError):
        pool.check(tables)


@pytest.mark.parametrize("tables", [[[1, 2]], [[1, 2], [1], [1]], [[1, 2], [1], [3]], [[1, 2], [1], [99]], []])
def test_the_check_compares_users_with_tables(tables: list[list[int]]) -> None:
    pool, _ = pool_with_all_states()
    with pytest.raises(RuntimeError):
        pool.check(tables)


def test_giving_back_twice_is_noticed_at_once() -> None:
    pool = PagePool(3)
    page, _ = pool.take()
    assert pool.drop(page) == 0
    with pytest.raises(RuntimeError, match="twice"):
        pool.drop(page)


def test_a_pool_without_a_page_to_give_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        PagePool(1)
