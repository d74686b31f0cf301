"""What all handlers share: the fingerprint of answers."""

import platform

import pytest

from fakes.client import FakeEngineClient, make_info
from sayfa.base.config import ServerOptions
from sayfa.server.context import ServerContext

KEPT = {"threads": 7, "pid": 77, "max_num_seqs": 3, "prefix_caching": False}
"""What changes no bit of an answer."""
CHANGED = {"model": "other", "architecture": "qwen3", "dtype": "bfloat16", "kv_dtype": "int8", "isa": "plain"}


def fingerprint(version: str = "1", **changes: object) -> str:
    context = ServerContext(FakeEngineClient(), None, ServerOptions(), ["tiny"], version)
    context.pool.shutdown()
    context.reader.shutdown()
    context.fingerprint(make_info())  # an engine that was there before leaves nothing behind
    return context.fingerprint(make_info(**changes))


def test_the_fingerprint_is_equal_exactly_where_the_arithmetic_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version, model, types, instruction set and machine each change it: "plain" has other bits on AArch64."""
    first = fingerprint()
    assert fingerprint(**KEPT) == first
    others = [fingerprint("2"), *(fingerprint(**{name: value}) for name, value in CHANGED.items())]
    monkeypatch.setattr(platform, "machine", lambda: "another")
    others.append(fingerprint())
    assert len({first, *others}) == 1 + len(others)
