"""A program whose heads do not fit is refused when it is made: past it, the native library divides by what it has."""

import pytest

from sayfa.base.errors import ModelError
from sayfa.nn.program.program import Attention, KvSpec, Program, ProgramBuilder, View


def attention(num_heads: int, num_kv_heads: int, head_dim: int, window: int = 0) -> Program:
    builder = ProgramBuilder(KvSpec(1, num_kv_heads, head_dim))
    query, out = (builder.buffer(name, num_heads * head_dim) for name in ("query", "out"))
    builder.add(Attention(View(query, 0, query.width), out, 0, num_heads, 1.0, window))
    return builder.finish(builder.buffer("logits", 1, "logits"))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 2, 16), (3, 2, 16), (0, 1, 16), (1, 0, 16), (1, -1, 16), (-2, 1, 16), (4, 2, 0)],
)
def test_query_heads_that_cannot_share_the_kv_heads_are_refused(num_heads, num_kv_heads, head_dim):
    words = rf"{num_heads} query heads cannot share {num_kv_heads} KV heads of {head_dim} dims evenly; give"
    with pytest.raises(ModelError, match=words):
        attention(num_heads, num_kv_heads, head_dim)


def test_a_window_below_zero_is_refused():
    with pytest.raises(ModelError, match=r"layer 0 is -5; give 0"):
        attention(4, 2, 16, window=-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 1), (4, 2, 100), (71, 1, 256)])
def test_heads_that_fit_are_taken(num_heads, num_kv_heads, head_dim):
    assert len(attention(num_heads, num_kv_heads, head_dim, window=7).ops) == 1
