"""Identity of a full page of tokens: a hash chain, the same in every process and on every machine.

Used by `core.kv_cache` to find pages again and by whoever wants to know which engine holds which prefix. Must not know
pools, sequences or tensors.

    root = H_root(model digest, weight version, adapter, salt)
    page 0 = H_page(root, tokens 0 .. P-1)        page i = H_page(page i-1, tokens i*P .. i*P+P-1)

The encoding is tagged and length-prefixed, so no two different inputs have the same bytes; root and page hashes live in
different domains (BLAKE2's personalisation), so one can never stand for the other. 16 bytes are kept; whoever uses a
hash for reuse compares the parent and the tokens as well, so that a forged collision gains nothing.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16

_ROOT = b"sayfa.root.1"
_PAGE = b"sayfa.page.1"
_packers: dict[int, struct.Struct] = {}


def root_hash(model_digest: str, weight_version: int, adapter: str | None, salt: str) -> bytes:
    """Return the parent of a first page: everything besides the tokens that decides what K and V hold.

    adapter: content identity of the adapter, None for the base model (not the same as an adapter named "").
    salt: keeps tenants apart; pages are never shared across two salts.
    """
    hasher = blake2b(digest_size=HASH_BYTES, person=_ROOT)
    hasher.update(_field(b"M", model_digest.encode()))
    hasher.update(_field(b"W", str(weight_version).encode()))
    hasher.update(_field(b"-", b"") if adapter is None else _field(b"A", adapter.encode()))
    hasher.update(_field(b"S", salt.encode()))
    return hasher.digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return the ids as unsigned 32-bit little-endian numbers; raises struct.error for an id outside that range."""
    packer = _packers.get(len(tokens))
    if packer is None:
        packer = struct.Struct(f"<{len(tokens)}I")
        if len(_packers) < 64:  # an engine has one page size; the bound only stops a careless caller
            _packers[len(tokens)] = packer
    return packer.pack(*tokens)


def page_hash(parent: bytes, packed: bytes) -> bytes:
    """Return the hash of a full page whose tokens are `packed` and which follows the page (or root) `parent`."""
    head = b"P" + len(parent).to_bytes(8, "little") + parent + b"T" + len(packed).to_bytes(8, "little")
    return blake2b(head + packed, digest_size=HASH_BYTES, person=_PAGE).digest()


def chain(root: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Return the hashes of all full pages of `tokens`, first page first."""
    hashes = []
    parent = root
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = page_hash(parent, pack_tokens(tokens[start : start + page_size]))
        hashes.append(parent)
    return hashes


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(8, "little") + value
