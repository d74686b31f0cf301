"""safetensors: right about good files, clear about bad ones, never out of the model's folder (T02, T07, T09, R16)."""

import hashlib
import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fakes.tokenizers import gguf_bytes
from sayfa.base.errors import ModelError, WeightFileError
from sayfa.models.formats.dequant import dequantize
from sayfa.models.formats.source import open_weights


def build(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_good_file_is_read_as_the_library_wrote_it(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=rng).to(dtype)
        for name, shape, dtype in [
            ("a", (3, 5), torch.float32),
            ("b", (2, 3, 4), torch.float16),
            ("c", (7,), torch.bfloat16),
            ("d", (), torch.float32),
        ]
    }
    save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    source = open_weights(tmp_path)
    assert sorted(source.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        shape, type_name = source.info(name)
        assert shape == tuple(tensor.shape)
        assert np.array_equal(dequantize(source.read(name), type_name, shape), tensor.float().numpy())
        assert not source.read(name).flags.writeable


def good() -> bytes:
    return build({"a": entry(), "b": entry("F16", [2, 2], [16, 24]), "__metadata__": {"x": "y"}}, b"\1" * 24)


def read_all(path: Path) -> None:
    source = open_weights(path)
    for name in source.names():
        source.info(name)
        source.read(name)


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for size in range(len(good())):
        path.write_bytes(good()[:size])
        with pytest.raises(WeightFileError, match=r"^model\.safetensors: "):
            read_all(path)


def test_every_flipped_bit_of_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    refused = 0
    for at in range(len(good()) - 24):
        for bit in range(8):
            damaged = bytearray(good())
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                read_all(path)
            except WeightFileError:
                refused += 1
    assert refused > 4 * (len(good()) - 24)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "file"),
    "7 bytes": (b"\0" * 7, "file"),
    "length 2^63": (build({}, length=2**63), "header length"),
    "length one too long": (build({"a": entry()}, length=len(json.dumps({"a": entry()})) + 17), "header length"),
    "over 100 MiB": (struct.pack("<Q", 101 << 20) + b"{", "header length"),
    "no JSON": (build(b"hello"), "JSON"),
    "no UTF-8": (build(b'{"\xff": 1}'), "JSON"),
    "a list": (build([1]), "object"),
    "deep": (build(b'{"a":' * 50_000 + b"1" + b"}" * 50_000), "header"),
    "fairly deep": (build(b'{"a":' * 20 + b"1" + b"}" * 20), "nested"),
    "same name twice": (build(b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2)), "twice"),
    "entry is a number": (build({"a": 1}), "a: "),
    "empty name": (build({"": entry()}), "name"),
    "no dtype": (build({"a": {"shape": [4], "data_offsets": [0, 16]}}), "type"),
    "unknown dtype": (build({"a": entry("F12")}), "F12"),
    "dtype list": (build({"a": entry(["F32"])}), "type"),
    "shape a number": (build({"a": entry(shape=4)}), "shape"),
    "negative shape": (build({"a": entry(shape=[-4])}), "shape"),
    "zero shape": (build({"a": entry(shape=[0, 4], offsets=[0, 0])}), "shape"),
    "shape of floats": (build({"a": entry(shape=[4.0])}), "shape"),
    "shape of bools": (build({"a": entry(shape=[True, 4])}), "shape"),
    "shape 2^70": (build({"a": entry(shape=[2**70])}), "shape"),
    "shape that wraps": (build({"a": entry(shape=[2**33, 2**31])}), "shape"),
    "9 dimensions": (build({"a": entry(shape=[1] * 9)}), "shape"),
    "offsets swapped": (build({"a": entry(offsets=[16, 0])}), "offsets"),
    "one offset": (build({"a": entry(offsets=[0])}), "offsets"),
    "negative offset": (build({"a": entry(offsets=[-16, 0])}), "offsets"),
    "offset past the end": (build({"a": entry(offsets=[16, 32])}), "offsets"),
    "size unlike the shape": (build({"a": entry(shape=[3])}), "needs 12"),
    "hole before": (build({"a": entry(offsets=[4, 20])}, b"\0" * 20), "hole"),
    "hole behind": (build({"a": entry()}, b"\0" * 20), "data"),
    "overlap": (build({"a": entry(), "b": entry(shape=[2], offsets=[8, 16])}), "overlaps"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_crafted_file_is_refused_quickly_and_by_its_field(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(WeightFileError, match=message):
        read_all(path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_never_crashes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "model.safetensors"
    for _ in range(30):
        damaged = bytearray(good())
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
        path.write_bytes(damaged)
        try:
            read_all(path)
        except WeightFileError:
            pass


# ----------------------------------------------------------------------------------------- folders


def shards(folder: Path) -> dict[str, str]:
    (folder / "model-1.safetensors").write_bytes(build({"a": entry()}))
    (folder / "model-2.safetensors").write_bytes(build({"b": entry()}))
    return {"a": "model-1.safetensors", "b": "model-2.safetensors"}


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    write_index(tmp_path, shards(tmp_path))
    assert sorted(open_weights(tmp_path).names()) == ["a", "b"]


@pytest.mark.parametrize(
    "file",
    ["../model-2.safetensors", "/etc/passwd", "sub/model-2.safetensors", "..", "a\\b.safetensors", 7, "x.bin", None],
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, file: Any) -> None:
    weight_map: dict[str, Any] = shards(tmp_path)
    write_index(tmp_path, weight_map | {"b": file})
    with pytest.raises(ModelError, match=r"index\.json"):
        open_weights(tmp_path)


@pytest.mark.parametrize("weight_map", [{}, [], None, "x"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    shards(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelError, match="weight_map"):
        open_weights(tmp_path)


def test_a_missing_shard_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    write_index(tmp_path, weight_map | {"c": "model-2.safetensors"})
    with pytest.raises(ModelError, match=r"model-2\.safetensors.*'c'"):
        open_weights(tmp_path)
    write_index(tmp_path, weight_map | {"c": "model-3.safetensors"})
    with pytest.raises(ModelError, match=r"model-3\.safetensors"):
        open_weights(tmp_path)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(build({"a": entry()}))
    (tmp_path / "b.safetensors").write_bytes(build({"a": entry()}))
    with pytest.raises(ModelError, match=r"b\.safetensors: a: is in a\.safetensors too"):
        open_weights(tmp_path)


def test_a_whole_file_wins_over_an_index_and_what_is_not_read_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers has it; not even the checksums of the others are looked at."""
    write_index(tmp_path, shards(tmp_path))
    (tmp_path / "model-2.safetensors.sha256").write_text("0" * 64)
    (tmp_path / "model.safetensors").write_bytes(build({"c": entry()}))
    assert open_weights(tmp_path).names() == ["c"]
    assert "model-1.safetensors, model-2.safetensors lie beside model.safetensors and are not read" in caplog.text


@pytest.mark.parametrize("extra", ["adapter_model.safetensors", "consolidated.safetensors"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_that_is_no_part_of_the_model_is_not_read(tmp_path: Path, extra: str, sharded: bool) -> None:
    if sharded:
        write_index(tmp_path, shards(tmp_path))
    else:
        (tmp_path / "model.safetensors").write_bytes(build({"a": entry(), "b": entry(offsets=[16, 32])}, b"\0" * 32))
    (tmp_path / extra).symlink_to(tmp_path.parent / "elsewhere.safetensors")
    assert sorted(open_weights(tmp_path).names()) == ["a", "b"]


def test_shards_of_an_index_are_checked_as_a_whole_file_is(tmp_path: Path) -> None:
    write_index(tmp_path, shards(tmp_path))
    digest = tmp_path / "model-2.safetensors.sha256"
    digest.write_text("0" * 64)
    with pytest.raises(ModelError, match=r"model-2\.safetensors: sha256: is"):
        open_weights(tmp_path)
    digest.unlink()
    (tmp_path / "model-2.safetensors").rename(tmp_path.parent / "moved.safetensors")
    (tmp_path / "model-2.safetensors").symlink_to(tmp_path.parent / "moved.safetensors")
    with pytest.raises(ModelError, match=r"model-2\.safetensors: is a link that leads out"):
        open_weights(tmp_path)


def test_a_link_that_leads_out_is_refused_but_the_hub_s_own_layout_is_not(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(build({"a": entry()}))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(ModelError, match="leads out"):
        open_weights(folder)
    hub = tmp_path / "models--x"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "1").mkdir(parents=True)
    (hub / "blobs" / "abc").write_bytes(build({"a": entry()}))
    (hub / "snapshots" / "1" / "model.safetensors").symlink_to("../../blobs/abc")
    assert open_weights(hub / "snapshots" / "1").names() == ["a"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl", "w.npy"])
def test_formats_that_can_carry_code_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    """T02."""
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match=r"can carry code.*safetensors"):
            open_weights(path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        open_weights(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"name the \.gguf file"):
        open_weights(tmp_path)


def test_a_part_of_a_split_gguf_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00003.gguf"
    path.write_bytes(gguf_bytes({"split.count": 3}, [("a", [4], 0, 0)], b"\0" * 16))
    with pytest.raises(ModelError, match="one of 3 parts"):
        open_weights(path)


def test_a_gguf_file_is_read_through_the_same_door(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({}, [("a", [2, 2], 0, 0)], np.arange(4, dtype=np.float32).tobytes()))
    source = open_weights(path)
    assert (source.names(), source.info("a")) == (["a"], ((2, 2), "F32"))
    assert dequantize(source.read("a"), "F32", (2, 2)).tolist() == [[0, 1], [2, 3]]


# ----------------------------------------------------------------------------------------- checksums (T09)


@pytest.mark.parametrize("form", ["{digest}\n", "{digest}  model.safetensors\n", "{digest} *model.safetensors"])
@pytest.mark.parametrize("listing", ["model.safetensors.sha256", "SHA256SUMS"])
def test_a_checksum_beside_the_file_finds_a_flipped_bit(tmp_path: Path, form: str, listing: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(good())
    digest = hashlib.sha256(good()).hexdigest()
    (tmp_path / listing).write_text(form.format(digest=digest))
    open_weights(path)
    path.write_bytes(good()[:-1] + b"\x03")
    with pytest.raises(WeightFileError, match="sha256"):
        open_weights(path)


def test_a_checksum_file_that_says_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(good())
    (tmp_path / "model.safetensors.sha256").write_text("nothing\n")
    with pytest.raises(WeightFileError, match="no digest"):
        open_weights(path)


def test_in_a_list_of_checksums_only_the_file_s_own_line_counts(tmp_path: Path) -> None:
    """Lines of other files and remarks are passed over; a list without the file promises nothing about it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(good())
    right, wrong = hashlib.sha256(good()).hexdigest(), "0" * 64
    listing = tmp_path / "SHA256SUMS"
    listing.write_text(f"# made by hand\n\n{wrong}  other.safetensors\n{right.upper()}  ./model.safetensors\n")
    open_weights(path)
    listing.write_text(f"# made by hand\n{right}  other.safetensors\n{wrong}  model.safetensors\n")
    with pytest.raises(WeightFileError, match=f"{wrong[:16]}… is promised"):
        open_weights(path)
    listing.write_text(f"{wrong}  other.safetensors\n")
    open_weights(path)


def test_a_file_s_own_checksum_may_have_blank_lines_and_counts_more_than_the_list(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(good())
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    (tmp_path / "model.safetensors.sha256").write_text(f"\n{hashlib.sha256(good()).hexdigest()}\n")
    open_weights(path)


def test_too_many_tensors_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(build({"__metadata__": {}, "a": entry(), "b": 7}))
    monkeypatch.setattr("sayfa.models.formats.safetensors.MAX_TENSORS", 1)
    with pytest.raises(WeightFileError, match="lists 2 tensors; at most 1"):
        open_weights(path)
    path.write_bytes(build({"__metadata__": {}, "a": entry()}))
    assert open_weights(path).names() == ["a"]


@pytest.mark.parametrize("name", ["model.onnx", "model", "nowhere.txt"])
def test_a_file_of_no_known_kind_is_refused(tmp_path: Path, name: str) -> None:
    """Whether it is there or not: the name alone tells."""
    if name != "nowhere.txt":
        (tmp_path / name).write_bytes(good())
    with pytest.raises(ModelError, match=rf"{name}: is neither a \.gguf nor a \.safetensors file nor a model folder"):
        open_weights(tmp_path / name)
