"""F12, R16, T09: a weight file damaged anywhere is refused by name, or gives the very same weights; it never crashes.

The whole path is walked as at a start: facts, header, every tensor that the model asks for. Flips of a file's own facts
(a norm's epsilon in GGUF) cannot be known for damage without a checksum; with one, every flip is refused.
"""

import hashlib
import json
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import every_bit, every_cut

from fakes.gguf_files import convert
from fakes.models import make_successor
from sayfa.base.errors import ModelError
from sayfa.base.gguf import read_gguf
from sayfa.models import load_program
from sayfa.models.config import read_config
from sayfa.models.formats.source import open_weights

LIMIT_S = 1.0
MEMORY_LIMIT_KIB = 100 << 10
FORMATS = ("safetensors", "gguf")
Found = tuple[Any, dict[str, tuple[tuple[int, ...], str, str]]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """One small model in both formats; and its config.json."""
    folder = make_successor(tmp_path_factory.mktemp("good"), {}, 32, default=1)
    facts = json.loads((folder / "config.json").read_text()) | {"rope_parameters": {"rope_theta": 10_000.0}}
    (folder / "config.json").write_text(json.dumps(facts))
    convert(folder, folder / "model.gguf")
    names = {"safetensors": "model.safetensors", "gguf": "model.gguf", "config": "config.json"}
    return {kind: (folder / name).read_bytes() for kind, name in names.items()}


def header_bytes(kind: str, data: bytes, folder: Path) -> int:
    """Where the tensors' data begin."""
    if kind == "safetensors":
        return 8 + int.from_bytes(data[:8], "little")
    (folder / "whole.gguf").write_bytes(data)
    return min(tensor.offset for tensor in read_gguf(folder / "whole.gguf").tensors.values())


def load(kind: str, data: bytes, good: dict[str, bytes], folder: Path) -> Found:
    """Load as a start does: the facts, and each tensor's shape, type and digest. Raises ModelError."""
    place = folder / "model.gguf" if kind == "gguf" else folder
    (place if kind == "gguf" else folder / "model.safetensors").write_bytes(data)
    if kind == "safetensors":
        (folder / "config.json").write_bytes(good["config"])
    config = read_config(place)
    source = open_weights(place)
    load_program(str(place), config, source, num_positions=8)
    digests = {
        name: (*source.info(name), hashlib.sha256(source.read(name).tobytes()).hexdigest()) for name in source.names()
    }
    return config, digests


def judge(kind: str, good: dict[str, bytes], folder: Path, cases: Iterator[tuple[str, bytes]]) -> dict[str, int]:
    """Load each damaged file; count what came out. Fails for a surprise, a slow one, and other weights in silence."""
    config, digests = load(kind, good[kind], good, folder)
    counts = {"refused": 0, "equal": 0, "other facts": 0}
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, data in cases:
        start_s = time.thread_time()
        try:
            found = load(kind, data, good, folder)
        except ModelError as error:
            counts["refused"] += 1
            told = str(error)
        else:
            told = ""
            assert found[1] == digests, f"{what}: other weights are loaded in silence"
            counts["equal" if found[0] == config else "other facts"] += 1
        assert str(folder) not in told, what
        assert time.thread_time() - start_s < LIMIT_S, what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MEMORY_LIMIT_KIB
    return counts


@pytest.mark.parametrize("kind", FORMATS)
def test_f12_every_cut_is_refused(kind: str, good: dict[str, bytes], tmp_path: Path) -> None:
    """Cut at every 64 bytes of the whole file."""
    counts = judge(kind, good, tmp_path, every_cut(good[kind], 64))
    assert counts == {"refused": -(-len(good[kind]) // 64), "equal": 0, "other facts": 0}


@pytest.mark.parametrize("kind", FORMATS)
def test_f12_flips_of_header_bits_give_no_other_weights(kind: str, good: dict[str, bytes], tmp_path: Path) -> None:
    """One random bit of every byte of the header here; every bit in `make test-all`."""
    rng = random.Random(12)
    cases = every_bit(good[kind], 0, header_bytes(kind, good[kind], tmp_path))
    counts = judge(kind, good, tmp_path, (rng.choice(case) for case in zip(*[cases] * 8, strict=True)))
    assert counts["refused"] > 300, counts
    assert kind == "gguf" or counts["other facts"] == 0, "the facts lie in another file"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", FORMATS)
def test_f12_no_flip_of_any_header_bit_gives_other_weights(kind: str, good: dict[str, bytes], tmp_path: Path) -> None:
    judge(kind, good, tmp_path, every_bit(good[kind], 0, header_bytes(kind, good[kind], tmp_path)))


@pytest.mark.parametrize("kind", FORMATS)
def test_t09_with_a_checksum_every_flip_is_refused(kind: str, good: dict[str, bytes], tmp_path: Path) -> None:
    """Header and body alike, 200 random bits of each format."""
    name = f"model.{kind}"
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(good[kind]).hexdigest()}  {name}\n")
    load(kind, good[kind], good, tmp_path)
    rng = random.Random(9)
    for _ in range(200):
        data = bytearray(good[kind])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(ModelError):
            load(kind, bytes(data), good, tmp_path)
