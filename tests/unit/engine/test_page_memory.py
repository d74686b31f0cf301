"""What the start says of the operator's own number for page memory."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sayfa.base.settings import engine_config
from sayfa.engine import build

MIB = 1 << 20
EXECUTOR: Any = SimpleNamespace(weights_bytes=50 * MIB, buffers_bytes=10 * MIB, bytes_per_page=MIB)


@pytest.mark.parametrize(
    ("asked", "free", "words"),
    [
        ("100MiB", 1000 * MIB, []),
        ("100MiB", 300 * MIB, ["pages of 100 MiB, buffers and a margin are more than the 300 MiB that are free"]),
        ("500MiB", 1000 * MIB, ["129 MiB of pages are taken, which is all"]),
        (None, 1000 * MIB, []),
    ],
)
def test_memory_that_is_not_there_or_of_no_use_is_told(
    asked: str | None, free: int, words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages fill as they are used, so too many of them end the engine hours later."""
    monkeypatch.setattr(build, "free_memory_bytes", lambda: free)
    config = engine_config({"model": "x", "kv_cache_memory": asked, "max_num_seqs": 2, "block_size": 32})
    with caplog.at_level(logging.INFO, "sayfa.engine"):
        plan, _ = build.size_pages(config, EXECUTOR, 2048)
    told = [record.message for record in caplog.records if "--kv-cache-memory" in record.message]
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True))
    assert plan.num_pages <= 129
