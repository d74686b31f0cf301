"""JSON files of a model folder: bounded in size and depth, refused by name (T07)."""

from pathlib import Path

import pytest

from sayfa.base.errors import ModelError
from sayfa.base.json_file import MAX_JSON_DEPTH, read_json_object


def test_an_object_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes('{"a": [1, 2.5, null, "ı"]}'.encode())
    assert read_json_object(path) == {"a": [1, 2.5, None, "ı"]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": \xff}', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b"[1]", "no JSON object"),
        (b"7", "no JSON object"),
        (b'{"a":' * (MAX_JSON_DEPTH + 1) + b"1" + b"}" * (MAX_JSON_DEPTH + 1), "nested deeper"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper"),
        (b'{"a": "' + b"x" * 1000 + b'"}', "more than 900 bytes"),
    ],
)
def test_anything_else_is_refused_by_name_and_without_the_folder(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"^config.json: .*{message}") as caught:
        read_json_object(path, max_bytes=900 if "900" in message else 64 << 20)
    assert str(tmp_path) not in str(caught.value)


def test_the_deepest_allowed_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a":' * MAX_JSON_DEPTH + b"1" + b"}" * MAX_JSON_DEPTH)
    assert "a" in read_json_object(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: cannot be read"):
        read_json_object(tmp_path / "config.json")
