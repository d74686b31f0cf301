"""Page identity (T25): every part of it counts, no two inputs share an encoding, the bytes are the same for ever."""

import itertools
import random
import struct
import subprocess
import sys

import pytest

from sayfa.base.page_hash import HASH_BYTES, chain, pack_tokens, page_hash, root_hash


def test_each_part_of_the_root_changes_it() -> None:
    models, versions, adapters, salts = ["", "a", "b"], [0, 1], [None, "", "a"], ["", "a", "b"]
    parts = list(itertools.product(models, versions, adapters, salts))
    roots = {root_hash(*part) for part in parts}
    assert len(roots) == len(parts)


def test_moving_a_border_between_two_parts_changes_the_root() -> None:
    """Length prefixes: "ab" + "c" is not "a" + "bc"."""
    assert root_hash("ab", 1, None, "c") != root_hash("a", 1, None, "bc")
    assert root_hash("m", 1, "ab", "c") != root_hash("m", 1, "a", "bc")
    assert root_hash("m", 11, None, "") != root_hash("m1", 1, None, "")


@pytest.mark.parametrize("seed", range(20))
def test_a_hash_names_all_tokens_up_to_its_page(seed: int) -> None:
    rnd = random.Random(seed)
    tokens = [rnd.randrange(2**17) for _ in range(64)]
    root = root_hash("m", 0, None, "")
    hashes = chain(root, tokens, 8)
    assert len(set(hashes)) == 8
    assert chain(root, [*tokens, 1], 8) == hashes
    changed = list(tokens)
    index = rnd.randrange(64)
    changed[index] ^= 1
    for page, (old, new) in enumerate(zip(hashes, chain(root, changed, 8), strict=True)):
        assert (old == new) == (page < index // 8)


def test_a_root_never_stands_for_a_page() -> None:
    """Roots and pages are hashed in different domains, even over the same bytes."""
    root = root_hash("m", 0, None, "")
    assert page_hash(root, b"") != root
    assert len(root) == len(page_hash(root, b"")) == HASH_BYTES


def test_ids_outside_32_bits_are_refused() -> None:
    for token in (-1, 2**32):
        with pytest.raises(struct.error):
            pack_tokens([token])


def test_the_bytes_are_the_same_in_each_process_and_release() -> None:
    """A change here makes every router and every stored page useless: it needs a new domain name in the hash."""
    expected = "8bb4e85063f6cbd3146898bfffa33546"
    code = (
        "from sayfa.base.page_hash import *\n"
        "print(chain(root_hash('digest', 3, 'adapter', 'salt'), list(range(100, 196)), 32)[-1].hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    ).stdout.strip()
    assert printed == expected
