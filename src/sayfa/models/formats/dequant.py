"""Stored weights → float32, in numpy, exactly as the formats define them.

Called by the model loader for small tensors, by the reference ops, and by tests as the truth for native kernels. Knows
the block layouts of GGUF; must not know files or models.

Every function takes blocks as uint8 `[blocks, bytes of a block]` and gives float32 `[blocks, values of a block]`. The
order of the float operations is part of the format here: results are bit-equal to those of the `gguf` package.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sayfa.base.errors import ModelError
from sayfa.base.gguf import BLOCK_SIZES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Blocks are worked on in groups of this many values, so that the intermediate arrays stay in the processor's cache.
_GROUP_VALUES = 1 << 18


def dequantize(raw: Bytes, type_name: str, shape: tuple[int, ...]) -> Floats:
    """Give the values of a tensor as a new float32 array of `shape`.

    raw: uint8 `[bytes]`, all of the tensor. Raises ModelError for an unknown type and for a wrong number of bytes.
    """
    if type_name not in _BLOCKS:
        raise ModelError(f"weights of the type {type_name} cannot be read; known: {', '.join(_BLOCKS)}.")
    values, num_bytes = BLOCK_SIZES[type_name]
    total = math.prod(shape)
    if total % values or raw.size != total // values * num_bytes:
        raise ModelError(f"{raw.size} bytes of {type_name} cannot be a tensor of the shape {list(shape)}.")
    blocks = raw.reshape(-1, num_bytes)
    out = np.empty((len(blocks), values), np.float32)
    step = max(1, _GROUP_VALUES // values)
    # Damaged scales may be infinite or no numbers; that shows in the values and needs no warning.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = _BLOCKS[type_name](blocks[start : start + step])
    return out.reshape(shape)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _low_high(packed: Bytes) -> Bytes:
    """Unpack 4-bit numbers along the last axis: first all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """Unpack single bits along the last axis, lowest first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _pairs(packed: Bytes) -> Bytes:
    """Unpack 2-bit numbers `[n, bytes]` → `[n, 4, bytes]`: the lowest pair of every byte first."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    return (packed[:, None, :] >> shifts) & np.uint8(3)


def _q8_0(blocks: Bytes) -> Floats:
    """Layout: d f16 | 32 × i8. Value d·q."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _f16(blocks[:, :2])


def _q4_0(blocks: Bytes) -> Floats:
    """Layout: d f16 | 16 bytes, low halves first. Value d·(q − 8)."""
    return _f16(blocks[:, :2]) * (_low_high(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    """Layout: d f16 | m f16 | 16 bytes. Value d·q + m."""
    return _f16(blocks[:, :2]) * _low_high(blocks[:, 4:]).astype(np.float32) + _f16(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    """Layout: d f16 | 32 fifth bits | 16 bytes. Value d·(q − 16)."""
    q = _low_high(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _f16(blocks[:, :2]) * (q.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    """Layout: d f16 | m f16 | 32 fifth bits | 16 bytes. Value d·q + m."""
    q = _low_high(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _f16(blocks[:, :2]) * q.astype(np.float32) + _f16(blocks[:, 2:4])


def _q2_k(blocks: Bytes) -> Floats:
    """Layout: 16 × (scale, min in 4 bits each) | 64 bytes of pairs | d f16 | dmin f16. Value (d·scale)·q − dmin·min.

    256 values are two halves of 4 × 32; each run of 16 values has its own scale and min.
    """
    scales = blocks[:, :16]
    d, dmin = _f16(blocks[:, 80:82]), _f16(blocks[:, 82:84])
    scale = (d * (scales & 15).astype(np.float32))[:, :, None]
    least = (dmin * (scales >> 4).astype(np.float32))[:, :, None]
    q = _pairs(blocks[:, 16:80].reshape(-1, 32)).reshape(-1, 16, 16)
    return (scale * q.astype(np.float32) - least).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    """Layout: 32 bytes of third bits | 64 bytes of pairs | 16 six-bit scales in 12 bytes | d f16.

    Value (d·(scale − 32))·q, where q is the pair, less 4 if the third bit is *not* set.
    """
    packed, d = blocks[:, 96:108], _f16(blocks[:, 108:110])
    six_bits = _low_high(packed[:, :8]) | (_pairs(packed[:, 8:]).reshape(-1, 16) << 4)
    scale = (d * (six_bits.astype(np.float32) - 32))[:, :, None]
    third = _bits(blocks[:, :32].reshape(-1, 32, 1)).transpose(0, 2, 1).reshape(-1, 16, 16)
    pair = _pairs(blocks[:, 32:96].reshape(-1, 32)).reshape(-1, 16, 16)
    q = pair.astype(np.float32) - ((third ^ 1) << 2).astype(np.float32)
    return (scale * q).reshape(-1, 256)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the 8 six-bit scales and 8 six-bit mins of Q4_K and Q5_K from their 12 bytes.

    The first four of each lie in the low six bits of bytes 0–3 and 4–7; the last four have their low halves in bytes
    8–11 and their top two bits in the top of the former.
    """
    scale, least, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    return (
        np.concatenate([scale & 63, (rest & 15) | ((scale >> 2) & 48)], axis=1),
        np.concatenate([least & 63, (rest >> 4) | ((least >> 2) & 48)], axis=1),
    )


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Give d·scale and dmin·min of Q4_K and Q5_K as `[blocks, 8, 1]`."""
    scale, least = _six_bit_pairs(blocks[:, 4:16])
    d, dmin = _f16(blocks[:, 0:2]), _f16(blocks[:, 2:4])
    return (d * scale.astype(np.float32))[:, :, None], (dmin * least.astype(np.float32))[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    """Layout: d f16 | dmin f16 | 12 bytes of scales and mins | 4 × 32 bytes, low halves first. Value scale·q − min."""
    scale, least = _k_scales(blocks)
    q = _low_high(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32)
    return (scale * q.astype(np.float32) - least).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> Floats:
    """As Q4_K, with 32 bytes of fifth bits before the halves: bit g of byte i belongs to value i of group g."""
    scale, least = _k_scales(blocks)
    low = _low_high(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    fifth = _bits(blocks[:, 16:48].reshape(-1, 32, 1)).transpose(0, 2, 1)
    return (scale * (low | (fifth << 4)).astype(np.float32) - least).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    """Layout: 2 × 64 bytes of low halves | 2 × 32 of top pairs | 16 × i8 scale | d f16. Value d·scale·(q − 32)."""
    scale = (_f16(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32))[:, :, None]
    low = _low_high(blocks[:, :128].reshape(-1, 64)).reshape(-1, 256)
    top = _pairs(blocks[:, 128:192].reshape(-1, 32)).reshape(-1, 256)
    q = (low | (top << 4)).astype(np.float32) - 32
    return (scale * q.reshape(-1, 16, 16)).reshape(-1, 256)


_BLOCKS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
