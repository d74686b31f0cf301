"""Writes a GGUF model anew with its matrices in another type. For benchmarks: needs gguf and numpy.

The blocks of the K types are made here (gguf only reads them), plainly: scales from the extremes of each group,
without a search for better ones. What is compared is always one file read by two ways, so their own error does not
matter.
"""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Type = gguf.GGMLQuantizationType
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

K_BLOCK = 256
FILE_TYPES = {  # OpenVINO wants to be told
    Type.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Type.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Type.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}
SKIPPED_KEYS = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.file_type", "general.architecture"}


def requantize(source: Path, target: Path, kind: Type) -> None:
    """Copy a GGUF file with its matrices in another type; vectors become float32.

    Of the K types only rows that they fit (256 to a block); the other matrices become Q8_0.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    if kind in FILE_TYPES:
        writer.add_file_type(FILE_TYPES[kind])
    for key, field in reader.fields.items():
        if key not in SKIPPED_KEYS:
            main_type, sub_type = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), main_type, sub_type)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        wanted = _type_of(data, kind)
        writer.add_tensor(tensor.name, quantize(data, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type_of(data: Floats, kind: Type) -> Type:
    if data.ndim < 2 or data.shape[-1] % 32:
        return Type.F32
    return Type.Q8_0 if kind in _ENCODERS and data.shape[-1] % K_BLOCK else kind


def quantize(data: Floats, kind: Type) -> NDArray[np.generic]:
    """Rows of float32 in the bytes of a type."""
    if kind not in _ENCODERS:
        encoded: NDArray[np.generic] = gguf.quants.quantize(data, kind)
        return encoded
    blocks = _ENCODERS[kind](data.reshape(-1, K_BLOCK))
    return blocks.reshape(*data.shape[:-1], -1)


# ---------------------------------------------------------------------------------------------- blocks of the K types


def _half(x: Floats) -> tuple[Floats, Bytes]:
    """A scale for each block as float16 holds it, and its two bytes."""
    half = x.astype(np.float16)
    return half.astype(np.float32), half[:, None].view(np.uint8)


def _over(x: Floats, y: Floats) -> Floats:
    return np.divide(x, y, out=np.zeros(np.broadcast_shapes(x.shape, y.shape), np.float32), where=y != 0)


def _bytes(x: Floats) -> Bytes:
    return x.astype(np.uint8)


def _scales_and_minima(x: Floats, group: int, levels: int, most: int) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
    """(d, dmin, scales, minima, q by group) of value = d * scale * q - dmin * minimum."""
    parts = x.reshape(len(x), -1, group)
    low = np.minimum(parts.min(-1), 0)
    scale, minimum = (parts.max(-1).clip(0) - low) / levels, -low
    d, d_bytes = _half(scale.max(-1) / most)
    m, m_bytes = _half(minimum.max(-1) / most)
    scales, minima = np.rint(_over(scale, d[:, None])).clip(0, most), np.rint(_over(minimum, m[:, None])).clip(0, most)
    shifted = parts + (m[:, None] * minima)[..., None]
    q = np.rint(_over(shifted, (d[:, None] * scales)[..., None])).clip(0, levels)
    return d_bytes, m_bytes, _bytes(scales), _bytes(minima), _bytes(q)


def _signed(x: Floats, levels: int, most: int) -> tuple[Bytes, Bytes, Bytes]:
    """(d, scales, q by group of 16) of value = d * scale * (q - levels)."""
    parts = x.reshape(len(x), 16, 16)
    scale = np.abs(parts).max(-1) / (levels - 1)
    d, d_bytes = _half(scale.max(-1) / most)
    scales = np.rint(_over(scale, d[:, None])).clip(0, most)
    q = np.rint(_over(parts, (d[:, None] * scales)[..., None])).clip(-levels, levels - 1) + levels
    return d_bytes, _bytes(scales), _bytes(q)


def _two_bits(q: Bytes) -> Bytes:
    """Four values of two bits in a byte: group g stands in half g // 8 at shift g % 8 // 2 * 2, side g % 2."""
    shifted = q.reshape(len(q), 2, 4, 2, 16) << np.array([0, 2, 4, 6], np.uint8)[:, None, None]
    return np.bitwise_or.reduce(shifted, axis=2).reshape(len(q), 64)


def _six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """Eight scales and minima of six bits in twelve bytes."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], axis=1)


def _nibbles(q: Bytes) -> Bytes:
    """Groups of 32 by pairs: the first in the low nibbles, the second in the high ones."""
    pairs = (q & 15).reshape(len(q), 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(q), 128)


def _q2_k(x: Floats) -> Bytes:
    d, m, scales, minima, q = _scales_and_minima(x, 16, 3, 15)
    return np.concatenate([scales | minima << 4, _two_bits(q), d, m], axis=1)


def _q3_k(x: Floats) -> Bytes:
    d, scales, q = _signed(x, 4, 31)
    scales = scales + 32
    low = scales[:, :8] & 15 | (scales[:, 8:] & 15) << 4
    quarters = (scales >> 4).reshape(len(x), 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    high_bits = (q >> 2).reshape(len(x), 8, 2, 16) << np.arange(8, dtype=np.uint8)[:, None, None]
    mask = np.bitwise_or.reduce(high_bits, axis=1).reshape(len(x), 32)
    return np.concatenate([mask, _two_bits(q & 3), low, np.bitwise_or.reduce(quarters, axis=1), d], axis=1)


def _q4_k(x: Floats) -> Bytes:
    d, m, scales, minima, q = _scales_and_minima(x, 32, 15, 63)
    return np.concatenate([d, m, _six_bits(scales, minima), _nibbles(q)], axis=1)


def _q5_k(x: Floats) -> Bytes:
    d, m, scales, minima, q = _scales_and_minima(x, 32, 31, 63)
    high = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([d, m, _six_bits(scales, minima), high, _nibbles(q)], axis=1)


def _q6_k(x: Floats) -> Bytes:
    d, scales, q = _signed(x, 32, 127)
    quarters = q.reshape(len(x), 2, 4, 32)  # by half: quarters 0 and 1 in the low nibbles, 2 and 3 in the high ones
    low = (quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4).reshape(len(x), 128)
    high = np.bitwise_or.reduce((quarters >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    return np.concatenate([low, high.reshape(len(x), 64), scales, d], axis=1)


_ENCODERS = {Type.Q2_K: _q2_k, Type.Q3_K: _q3_k, Type.Q4_K: _q4_k, Type.Q5_K: _q5_k, Type.Q6_K: _q6_k}
