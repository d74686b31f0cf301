"""F01: after any history of operations each page is in exactly one state and the counts equal the tables."""

import random

import pytest

from sayfa.core.page_pool import PagePool


class Model:
    """The pool's meaning in the plainest words: a list of tables, a dictionary of stored content."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.rnd = random.Random(seed)
        self.pool = PagePool(num_pages)
        self.tables: list[list[int]] = []
        self.stored: dict[bytes, int] = {}
        self.used: dict[int, int] = {}

    def operate(self) -> None:
        """Do one random operation and compare what can be compared at once."""
        choice = self.rnd.random()
        if choice < 0.36:
            self.take()
        elif choice < 0.50:
            self.share()
        elif choice < 0.82:
            self.drop()
        elif choice < 0.97:
            self.store()
        else:
            self.forget()
        pool = self.pool
        assert pool.num_used == len(self.used)
        assert pool.num_cached == len(self.stored) - sum(page in self.used for page in self.stored.values())
        assert pool.num_free + pool.num_used == pool.capacity

    def take(self) -> None:
        if not self.pool.num_free:
            return
        oldest = self.pool.cached_pages()[:1] if self.pool.num_free == self.pool.num_cached else []
        page, lost = self.pool.take()
        assert page not in self.used
        assert page != 0
        if lost is not None:
            assert [page] == oldest, "not the least recently used cached page was taken"
            assert self.stored.pop(lost) == page
        assert page not in self.stored.values()
        self.used[page] = 1
        if self.tables and self.rnd.random() < 0.7:
            self.rnd.choice(self.tables).append(page)
        else:
            self.tables.append([page])

    def share(self) -> None:
        """A new table begins with a stored page, or with the first page of another table."""
        if self.stored and self.rnd.random() < 0.6:
            key = self.rnd.choice(list(self.stored))
            page = self.pool.find(key, b"content" + key)
            assert page == self.stored[key]
            assert self.pool.find(key, b"forged" + key) == 0
        elif self.tables:
            page = self.rnd.choice(self.tables)[0]
        else:
            return
        self.pool.share(page)
        self.used[page] = self.used.get(page, 0) + 1
        self.tables.append([page])

    def drop(self) -> None:
        if not self.tables:
            return
        index = self.rnd.randrange(len(self.tables))
        table = self.tables[index]
        page = table.pop()
        self.used[page] -= 1
        assert self.pool.drop(page) == self.used[page]
        if not self.used[page]:
            del self.used[page]
        if not table:
            self.tables[index] = self.tables[-1]
            self.tables.pop()

    def store(self) -> None:
        if not self.tables:
            return
        page = self.rnd.choice(self.rnd.choice(self.tables))
        key = self.rnd.randrange(2 * self.pool.num_pages).to_bytes(16, "little")
        free = key not in self.stored and page not in self.stored.values()
        assert self.pool.store(page, key, b"content" + key) == free
        if free:
            self.stored[key] = page

    def forget(self) -> None:
        page = self.rnd.randrange(1, self.pool.num_pages)
        lost = self.pool.forget(page)
        assert (lost is not None) == (page in self.stored.values())
        if lost is not None:
            assert self.stored.pop(lost) == page

    def check(self) -> None:
        self.pool.check(self.tables)
        assert {key: self.pool.find(key, b"content" + key) for key in self.stored} == self.stored


def play(seed: int, num_operations: int) -> None:
    model = Model(seed, num_pages=random.Random(seed).choice([2, 3, 9, 33]))
    for number in range(num_operations):
        model.operate()
        if number % 250 == 0:
            model.check()
    model.check()
    for table in model.tables:
        for page in table:
            model.pool.drop(page)
    model.pool.check([])
    assert model.pool.num_used == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_million_random_operations_leave_each_page_in_one_state(seed: int) -> None:
    play(seed, 50_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
@pytest.mark.timeout(600)
def test_twenty_million_random_operations_leave_each_page_in_one_state(seed: int) -> None:
    play(seed, 200_000)
