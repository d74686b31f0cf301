"""How many bytes a model needs: per weight, per token, per page; and how many pages a budget holds. Formulas only.

The engine sizes its pool by them; who plans a machine before there is one can ask the same functions, and compare
with the report of the start. Asks no machine anything; see `base.host` for that.
"""

import math

from sayfa.base.errors import ModelError
from sayfa.base.gguf import BLOCK_SIZES
from sayfa.base.messages import MemoryPlan
from sayfa.base.model_config import ModelConfig

# Bytes of one number, and bytes of scales for each token's head (int8 keeps one float32 for K and one for V).
_KV_BYTES: dict[str, tuple[int, int]] = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}

# Python, its libraries and allocator slack, beside what is counted exactly.
MARGIN_BYTES = 256 << 20
RESERVED_PAGES = 1

MAX_SLOTS = 2**31 - 1
"""A token's place is one 32-bit number, page × page size + offset; beyond this it would name another page."""


def weight_bytes(rows: int, columns: int, type_name: str) -> int:
    """Bytes of a matrix [rows, columns] as a file of this type holds it. Raises ModelError for an unknown type."""
    if type_name not in BLOCK_SIZES:
        raise ModelError(f"weight type {type_name!r} is not known; known: {', '.join(BLOCK_SIZES)}")
    values, num_bytes = BLOCK_SIZES[type_name]
    return rows * (-(-columns // values)) * num_bytes


def num_parameters(config: ModelConfig) -> int:
    """Weights of the model, norms and biases included; a tied head is counted once."""
    c = config
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = c.hidden_size * (2 * query + 2 * kv)
    if c.attention_bias:
        attention += query + 2 * kv
    if c.qk_norm:
        attention += 2 * c.head_dim
    layer = attention + 3 * c.hidden_size * c.intermediate_size + (4 if c.post_norms else 2) * c.hidden_size
    ends = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2) + c.hidden_size
    return c.num_layers * layer + ends


def weights_lower_bound_bytes(config: ModelConfig, bits_per_weight: float) -> int:
    """Parameters × bits ÷ 8: what the weights take at least (scales, padding and packing come on top)."""
    return math.ceil(num_parameters(config) * bits_per_weight / 8)


def kv_bytes_per_token(config: ModelConfig, kv_type: str) -> int:
    """Bytes of K and V of one token over all layers. Raises ModelError for an unknown type."""
    if kv_type not in _KV_BYTES:
        raise ModelError(f"K/V type {kv_type!r} is not known; known: {', '.join(_KV_BYTES)}")
    number, scales = _KV_BYTES[kv_type]
    return 2 * config.num_layers * config.num_kv_heads * (config.head_dim * number + scales)


def kv_bytes_per_page(config: ModelConfig, kv_type: str, page_size: int) -> int:
    """Bytes of one page; executors may round each layer's part up for alignment and then say so themselves."""
    return page_size * kv_bytes_per_token(config, kv_type)


def pages_budget_bytes(free_bytes: int, share: float, buffers_bytes: int, margin_bytes: int = MARGIN_BYTES) -> int:
    """Bytes for pages if `share` of what is free after loading may be used, buffers and margin included."""
    return max(0, int(free_bytes * share) - buffers_bytes - margin_bytes)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that a sequence of this length uses."""
    return -(-num_tokens // page_size)


def plan_memory(
    *,
    weights_bytes: int,
    buffers_bytes: int,
    bytes_per_page: int,
    page_size: int,
    pages_bytes: int,
    most_tokens: int,
    margin_bytes: int = MARGIN_BYTES,
) -> MemoryPlan:
    """Turn a budget for pages into a plan, each part counted separately.

    most_tokens: tokens that can ever be in use at once (`--max-num-seqs` × `--max-model-len`); more pages than these
    need are not taken. Raises ModelError if the budget does not hold even one page beside the reserved one, or if the
    pages have more slots than MAX_SLOTS.
    """
    wanted = pages_for(most_tokens, page_size) + RESERVED_PAGES
    num_pages = min(wanted, pages_bytes // bytes_per_page)
    if num_pages < RESERVED_PAGES + 1:
        raise ModelError(
            f"{pages_bytes} bytes for the KV cache hold {pages_bytes // bytes_per_page} pages of {bytes_per_page} "
            "bytes, but at "
            f"least {RESERVED_PAGES + 1} are needed; raise --kv-cache-memory or --kv-cache-memory-share, or free memory"
        )
    if num_pages * page_size > MAX_SLOTS:
        most_bytes = MAX_SLOTS // page_size * bytes_per_page
        raise ModelError(
            f"the KV cache would have {num_pages} pages of {page_size} tokens, {num_pages * page_size} in all, but at "
            f"most {MAX_SLOTS} can be told apart; lower --max-num-seqs or --max-model-len, or set --kv-cache-memory to "
            f"{most_bytes} or less"
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        pages_bytes=num_pages * bytes_per_page,
        buffers_bytes=buffers_bytes,
        margin_bytes=margin_bytes,
        num_pages=num_pages,
        page_size=page_size,
        bytes_per_page=bytes_per_page,
    )
