"""The GGUF reader: right about good files, quick and clear about bad ones (T06, T09, R16, B059)."""

import random
import struct
import time
import tracemalloc
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fakes.tokenizers import gguf_bytes
from sayfa.base.errors import WeightFileError
from sayfa.base.gguf import BLOCK_SIZES, GgufArray, GgufFile, read_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.float": 1.5,
    "a.bool": True,
    "a.negative": -3,
    "a.strings": ["x", "", "ığdır 😀"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.5, -1.0],
    "a.bools": [True, False],
}
# name, dimensions as stored (fastest first), type number, offset: F32 [2, 4] and Q8_0 [2, 32]
TENSORS = [("one", [4, 2], 0, 0), ("two", [32, 2], 8, 32)]
DATA = bytes(range(100))


def write(folder: Path, data: bytes) -> Path:
    path = folder / "tiny.gguf"
    path.write_bytes(data)
    return path


def read(folder: Path, data: bytes) -> GgufFile:
    return read_gguf(write(folder, data))


def good() -> bytes:
    return gguf_bytes(METADATA, TENSORS, DATA)


def plain(value: Any) -> Any:
    return value.to_list() if isinstance(value, GgufArray) else value


def test_a_good_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = read(tmp_path, good())
    assert {key: plain(value) for key, value in file.metadata.items()} == METADATA
    assert [(t.name, t.shape, t.type_name, t.num_bytes) for t in file.tensors.values()] == [
        ("one", (2, 4), "F32", 32),
        ("two", (2, 32), "Q8_0", 68),
    ]
    assert bytes(file.data(file.tensors["one"])) == DATA[:32]
    assert bytes(file.data(file.tensors["two"])) == DATA[32:]
    assert file.strings("a.strings")[2] == "ığdır 😀"


def test_asking_for_the_wrong_kind_of_array_names_the_key(tmp_path: Path) -> None:
    file = read(tmp_path, good())
    for ask, key in (
        (file.strings, "a.ints"),
        (file.numbers, "a.strings"),
        (file.strings, "a.float"),
        (file.strings, "b"),
    ):
        with pytest.raises(WeightFileError, match=key.replace(".", r"\.")):
            ask(key)


def test_every_prefix_of_a_good_file_is_refused(tmp_path: Path) -> None:
    """B059, R16: cut at each byte, with the file's name and a field in the message and no folder."""
    data = good()
    for size in range(len(data)):
        with pytest.raises(WeightFileError, match=r"^tiny\.gguf: ") as caught:
            read(tmp_path, data[:size])
        assert str(tmp_path) not in str(caught.value)


def test_every_flipped_bit_of_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    """F12: a flip gives a clear error, or a file that stays inside itself."""
    data = gguf_bytes({"general.alignment": 32, "s": ["x", "é"], "b": True, "f": [0.5]}, TENSORS, DATA)
    header_bytes = len(data) - len(DATA)
    outcomes = {"refused": 0, "read": 0}
    for at in range(header_bytes):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            try:
                file = read(tmp_path, bytes(damaged))
                for value in file.metadata.values():
                    plain(value)
            except WeightFileError:
                outcomes["refused"] += 1
                continue
            outcomes["read"] += 1
            for tensor in file.tensors.values():
                assert len(file.data(tensor)) == tensor.num_bytes
    assert min(outcomes.values()) > header_bytes // 2, "names and values can be anything, structure cannot"


def kv(key: bytes, type_id: int, body: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type_id) + body


def head(num_tensors: int, num_keys: int, body: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def tensor(
    dims: list[int], type_id: int = 0, offset: int = 0, name: bytes = b"t", num_dims: int | None = None
) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", count, *dims, type_id, offset)


PAD = b"\0" * 4096
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "file"),
    "magic only": (b"GGUF", "file"),
    "other magic": (b"GGML" + PAD, "magic"),
    "version 1": (head(0, 0, PAD, version=1), "version"),
    "version 4": (head(0, 0, PAD, version=4), "version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + PAD, "big-endian"),
    "2^60 tensors": (head(2**60, 0, PAD), "tensor_count"),
    "2^64-1 keys": (head(0, 2**64 - 1, PAD), "metadata_kv_count"),
    "more keys than bytes": (head(0, 10_000, PAD), "metadata_kv_count"),
    "key past the end": (head(0, 1, struct.pack("<Q", 2**63) + PAD), "key 0"),
    "key of 1025 bytes": (head(0, 1, kv(b"k" * 1025, 0, b"\0") + PAD), "key 0"),
    "empty key": (head(0, 1, kv(b"", 0, b"\0") + PAD), "key 0"),
    "key that is no UTF-8": (head(0, 1, kv(b"\xff", 0, b"\0") + PAD), "key 0"),
    "twice the same key": (head(0, 2, kv(b"k", 0, b"\0") * 2 + PAD), "k: appears twice"),
    "unknown value type": (head(0, 1, kv(b"k", 13, PAD)), "type 13"),
    "string past the end": (head(0, 1, kv(b"k", 8, struct.pack("<Q", 2**62) + PAD)), "k: "),
    "string of 2 MiB": (head(0, 1, kv(b"k", 8, struct.pack("<Q", 2 << 20) + b"a" * (3 << 20))), "k: "),
    "string that is no UTF-8": (head(0, 1, kv(b"k", 8, struct.pack("<Q", 2) + b"\xc3\x28" + PAD)), "UTF-8"),
    "bool of 2": (head(0, 1, kv(b"k", 7, b"\x02" + PAD)), "bool"),
    "array of 2^60": (head(0, 1, kv(b"k", 9, struct.pack("<IQ", 0, 2**60) + PAD)), "k: "),
    "array of 5,000,000": (head(0, 1, kv(b"k", 9, struct.pack("<IQ", 0, 5_000_000) + b"\0" * 5_000_000)), "k: "),
    "array of strings past the end": (head(0, 1, kv(b"k", 9, struct.pack("<IQQ", 8, 3, 4_095) + PAD)), "item"),
    "array whose last string ends late": (head(0, 1, kv(b"k", 9, struct.pack("<IQQ", 8, 1, 5_000) + PAD)), "last item"),
    "array of arrays": (head(0, 1, kv(b"k", 9, struct.pack("<IQ", 9, 2) + PAD)), "arrays of arrays"),
    "array of unknown": (head(0, 1, kv(b"k", 9, struct.pack("<IQ", 77, 2) + PAD)), "item type 77"),
    "alignment 0": (head(0, 1, kv(b"general.alignment", 4, struct.pack("<I", 0)) + PAD), "general.alignment"),
    "alignment 48": (head(0, 1, kv(b"general.alignment", 4, struct.pack("<I", 48)) + PAD), "general.alignment"),
    "alignment 2^20": (head(0, 1, kv(b"general.alignment", 4, struct.pack("<I", 1 << 20)) + PAD), "general.alignment"),
    "alignment true": (head(0, 1, kv(b"general.alignment", 7, b"\1") + PAD), "general.alignment"),
    "alignment in words": (head(0, 1, kv(b"general.alignment", 8, struct.pack("<Q", 2) + b"32") + PAD), "alignment"),
    "no dimension": (head(1, 0, tensor([]) + PAD), "dimensions"),
    "5 dimensions": (head(1, 0, tensor([1] * 5) + PAD), "dimensions"),
    "2^32-1 dimensions": (head(1, 0, tensor([1], num_dims=2**32 - 1) + PAD), "dimensions"),
    "zero dimension": (head(1, 0, tensor([0, 4]) + PAD), "shape"),
    "dimension 2^62": (head(1, 0, tensor([2**62]) + PAD), "shape"),
    "dimension 2^63 (negative)": (head(1, 0, tensor([2**63]) + PAD), "shape"),
    "product that wraps in 64 bits": (head(1, 0, tensor([2**33, 2**31]) + PAD), "shape"),
    "product that wraps to nothing": (head(1, 0, tensor([2**40, 2**40, 2**40, 2**40]) + PAD), "shape"),
    "unknown type": (head(1, 0, tensor([4], type_id=99) + PAD), "number 99"),
    "type without support": (head(1, 0, tensor([256], type_id=23) + PAD), "IQ4_XS"),
    "row that is no whole block": (head(1, 0, tensor([33], type_id=8) + PAD), "blocks of 32"),
    "offset that is not aligned": (head(1, 0, tensor([4], offset=8) + PAD), "alignment"),
    "offset past the end": (head(1, 0, tensor([4], offset=1 << 20) + PAD), "cut off"),
    "offset 2^64-32": (head(1, 0, tensor([4], offset=2**64 - 32) + PAD), "cut off"),
    "empty tensor name": (head(1, 0, tensor([4], name=b"") + PAD), "tensor 0"),
    "twice the same tensor": (head(2, 0, tensor([4]) + tensor([4], offset=32) + PAD), "twice"),
    "tensors over each other": (head(2, 0, tensor([16]) + tensor([4], offset=32, name=b"u") + PAD), "lies over"),
    "a hole between tensors": (head(2, 0, tensor([8]) + tensor([4], offset=64, name=b"u") + PAD), "to no tensor"),
    "bytes behind the last tensor": (head(1, 0, tensor([4]) + PAD), "bytes follow"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_crafted_file_is_refused_quickly_and_by_its_field(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = write(tmp_path, data)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(WeightFileError, match=message):
            read_gguf(path)
        assert time.process_time() - start < 1
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


def test_a_wall_of_strings_is_refused_in_time(tmp_path: Path) -> None:
    """Three arrays of empty strings, each within its limit, together over the limit of the file."""
    count = 3_500_000
    body = b"".join(kv(name, 9, struct.pack("<IQ", 8, count) + bytes(8 * count)) for name in (b"a", b"b", b"c"))
    path = write(tmp_path, head(0, 3, body))
    start = time.process_time()
    with pytest.raises(WeightFileError, match=r"c: .*together"):
        read_gguf(path)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_after_a_good_start_never_crash(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = good()
    for _ in range(30):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
        try:
            file = read(tmp_path, bytes(damaged))
            for value in file.metadata.values():
                plain(value)
            for item in file.tensors.values():
                assert len(file.data(item)) == item.num_bytes
        except WeightFileError:
            pass


def test_a_file_that_shrinks_while_open_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = write(tmp_path, good())
    file = read_gguf(path)
    path.write_bytes(good()[:200])
    with pytest.raises(WeightFileError, match="shorter"):
        file.data(file.tensors["two"])


@pytest.mark.parametrize("kind", ["missing", "folder", "empty"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    with pytest.raises(WeightFileError, match=r"x\.gguf: file"):
        read_gguf(path)


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    path, bad = write(tmp_path, good()), tmp_path / "bad.gguf"
    bad.write_bytes(good()[:100])
    before = count()
    for _ in range(20):
        read_gguf(path).close()
        with pytest.raises(WeightFileError):
            read_gguf(bad)
    assert count() <= before + 1


def test_block_sizes_are_those_of_the_format() -> None:
    gguf = import_module("gguf")
    for name, size in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == size


def test_walking_a_vocabulary_costs_little(tmp_path: Path) -> None:
    """262,144 tokens, as Gemma has: opening takes well under half a second, since nothing is decoded."""
    tokens = [f"token{i}" for i in range(262_144)]
    path = write(tmp_path, gguf_bytes({"t.tokens": tokens, "t.scores": [float(i) for i in range(len(tokens))]}))
    start = time.process_time()
    file = read_gguf(path)
    assert time.process_time() - start < 0.5
    assert file.strings("t.tokens") == tokens
