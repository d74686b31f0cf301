"""Tokenizer files of the less common kinds, and damaged ones: what is wrong is named, what is odd is read right."""

import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from fakes.tokenizers import byte_fallback, byte_level, gguf_bytes, gguf_metadata, save_folder
from sayfa.base.errors import InvalidRequest, ModelError
from sayfa.text import hf_tokenizer
from sayfa.text.chat_template import ChatTemplate
from sayfa.text.control_text import ControlTexts
from sayfa.text.plain_text import encode_ids
from sayfa.text.tokenizer import Tokenizer, load_tokenizer


def from_gguf(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(metadata))
    return load_tokenizer(path)


def pieces(tokens: list[str], **more: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: `tokens` after the unknown one and one for each byte."""
    listed = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": listed,
        "tokenizer.ggml.token_type": [2] + [6] * 256 + [1] * len(tokens),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(listed))],
        "tokenizer.ggml.add_space_prefix": False,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


# ----------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.scores", [1.0, 2.0], "tokens have 2 scores"),
        ("tokenizer.ggml.merges", ["zz yy"], "the vocabulary lacks"),
        ("tokenizer.ggml.merges", ["ab"], "not two pieces"),
    ],
)
def test_a_damaged_sentencepiece_vocabulary_is_refused_by_name(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        from_gguf(tmp_path, pieces(["a", "b", "ab"]) | {key: value})


def test_merges_of_very_long_pieces_are_not_looked_for(tmp_path: Path) -> None:
    """A megabyte of one token has a million cuts, each of which copies a megabyte: minutes, out of a small file."""
    metadata = pieces(["a", "b", "ab", "b" * 1_000_000])
    with pytest.raises(ModelError, match="up to 1,000,000 characters"):
        from_gguf(tmp_path, metadata)
    told = from_gguf(tmp_path, metadata | {"tokenizer.ggml.merges": ["a b"]})
    assert told.token_bytes(told.vocab_size - 1) == b"b" * 1_000_000


@pytest.mark.parametrize("texts", [["<" + "a" * 5000 + ">"], [f"<{i:0>500}>" for i in range(70)]])
def test_control_tokens_that_no_model_needs_are_refused(tmp_path: Path, texts: list[str]) -> None:
    """All their beginnings and endings are kept: of one of a megabyte they would be a terabyte."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken(text, special=True) for text in texts])
    tokenizer = load_tokenizer(save_folder(tmp_path, backend))
    with pytest.raises(ModelError, match=r"control tokens of up to [\d,]+ characters"):
        ChatTemplate("{{ messages }}", tokenizer.special_tokens, tokenizer.control_texts)


def test_merges_of_a_sentencepiece_file_count_more_than_its_scores(tmp_path: Path) -> None:
    """Scores alone would join "bc" first, as it stands before "ab"."""
    metadata = pieces(["a", "b", "c", "bc", "ab"])
    by_score = from_gguf(tmp_path, metadata)
    by_merges = from_gguf(tmp_path, metadata | {"tokenizer.ggml.merges": ["a b", "b c"]})
    spelled = [[ours.token_text(i) for i in ours.encode("abc", add_special=False)] for ours in (by_score, by_merges)]
    assert spelled == [["a", "bc"], ["ab", "c"]]


def test_gemma_s_files_are_read_by_the_order_of_tokens_and_keep_spaces_as_spaces(tmp_path: Path) -> None:
    """Its scores say nothing, and its tokens of spaces are written as spaces, not as ▁."""
    metadata = pieces(["a", "b", "▁", "  ", "ab", "▁a"], general__architecture="gemma3")
    metadata["tokenizer.ggml.scores"] = [0.0] * len(metadata["tokenizer.ggml.tokens"])
    ours = from_gguf(tmp_path, metadata)
    ids = ours.encode("a  b ab", add_special=False)
    assert [ours.token_text(i) for i in ids] == ["a", "  ", "b", " ", "ab"]
    assert ours.decode(ids) == "a  b ab"


def test_phi3_s_space_is_put_before_the_whole_text_only(tmp_path: Path) -> None:
    tokens = ["a", "▁", "▁a"]
    phi = from_gguf(tmp_path, pieces(tokens, general__architecture="phi3", tokenizer__ggml__add_space_prefix=True))
    assert [phi.token_bytes(i) for i in phi.encode("a a", add_special=False)] == [b" a", b" a"]
    assert phi.decode(phi.encode("a a", add_special=False)) == "a a"


def test_a_token_that_only_looks_like_a_byte_is_text(tmp_path: Path) -> None:
    metadata = pieces(["a", "<0xZZ>"])
    ours = from_gguf(tmp_path, metadata)
    token_id = metadata["tokenizer.ggml.tokens"].index("<0xZZ>")
    assert ours.token_bytes(token_id) == b"<0xZZ>"
    assert ours.token_bytes(metadata["tokenizer.ggml.tokens"].index("<0xFF>")) == b"\xff"


def test_a_byte_level_token_outside_the_alphabet_is_text(tmp_path: Path) -> None:
    """Vocabularies hold entries that no text leads to; they can be drawn all the same."""
    metadata = gguf_metadata(byte_level(), "gpt2")
    metadata["tokenizer.ggml.tokens"].append("東京")
    metadata["tokenizer.ggml.token_type"].append(1)
    ours = from_gguf(tmp_path, metadata)
    assert ours.token_text(ours.vocab_size - 1) == "東京"


# ----------------------------------------------------------------------------------------- Hugging Face folders


def test_the_file_itself_may_be_named_in_place_of_its_folder(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, byte_level())
    assert load_tokenizer(folder / "tokenizer.json").encode("the dog") == load_tokenizer(folder).encode("the dog")


def test_a_file_too_large_for_a_vocabulary_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(hf_tokenizer.MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(ModelError, match=r"tokenizer\.json: has more than 134217728 bytes"):
        load_tokenizer(tmp_path)


def test_an_interruption_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's panics are no Exception; other things that are none pass on."""
    save_folder(tmp_path, byte_level())

    class Interrupted:
        @staticmethod
        def from_file(path: str) -> Backend:
            raise KeyboardInterrupt

    monkeypatch.setattr(hf_tokenizer, "Tokenizer", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(tmp_path)


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(ModelError, match="vocabulary is empty"):
        load_tokenizer(save_folder(tmp_path, backend))


def test_a_vocabulary_with_ids_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_tokenizer, "MAX_TOKENS", 100)
    with pytest.raises(ModelError, match="ids above 100"):
        load_tokenizer(save_folder(tmp_path, byte_level()))


@pytest.mark.parametrize("more", [0, 1])
def test_a_vocabulary_may_leave_out_so_many_ids_and_no_more(tmp_path: Path, more: int) -> None:
    """T07: a file of some KB names an id of millions, and a list of all below it is made."""
    highest = 2 + hf_tokenizer.MAX_UNUSED_IDS + more
    backend = Backend(models.BPE({"a": 0, "b": 1, "c": highest}, []))
    backend.decoder = decoders.ByteLevel()
    folder = save_folder(tmp_path, backend, {"bos_token": None, "eos_token": None})
    if more:
        with pytest.raises(ModelError, match=r"3 tokens have ids up to 100,003; at most 100,000"):
            load_tokenizer(folder)
    else:
        assert load_tokenizer(folder).encode_text("cab") == [highest, 0, 1]


def test_an_added_token_with_the_number_of_another_is_refused(tmp_path: Path) -> None:
    """The library numbers it by the vocabulary's size, where this one has a token of that number."""
    backend = Backend(models.BPE({"a": 0, "b": 1, "c": 2, "d": 4}, []))
    backend.decoder = decoders.ByteLevel()
    config = {"bos_token": None, "eos_token": "<end>"}
    with pytest.raises(ModelError, match=r"'<end>' and the vocabulary's 'd' have the same id, 4"):
        load_tokenizer(save_folder(tmp_path, backend, config))


@pytest.mark.parametrize("value", [None, False, True, "yes", 1, [0]])
def test_a_folder_whose_control_tokens_are_to_be_split_is_refused(tmp_path: Path, value: Any) -> None:
    """transformers would cut up the chat template's own control tokens, too."""
    folder = save_folder(tmp_path, byte_level(), {"split_special_tokens": value})
    if not value:
        assert load_tokenizer(folder).vocab_size == 450
    else:
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: `split_special_tokens` is .*set it to false"):
            load_tokenizer(folder)


def test_odd_tokens_beside_a_tokenizer_are_passed_over(tmp_path: Path) -> None:
    files = {
        "special_tokens_map_json": {
            "sep_token": 7,
            "pad_token": {"content": ["x"]},
            "extra_special_tokens": ["", 1, {}],
        },
        "added_tokens_json": {"": 450, "<a>": "451", "<b>": None, "<c>": True, "<d>": 452},
    }
    ours = load_tokenizer(save_folder(tmp_path, byte_level(), **files))
    assert ours.vocab_size == 451
    assert ours.token_text(450) == "<d>"


def test_a_decoder_that_we_do_not_know_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"'WordPiece'.*known: ByteLevel, ByteFallback, Metaspace"):
        load_tokenizer(save_folder(tmp_path, backend))


@pytest.mark.parametrize(
    ("rows", "size"), [(700, 700), (10, 450), (0, 450), ("700", 450), (True, 450), (5_000_000, 450)]
)
@pytest.mark.parametrize("inner", [False, True])
def test_padded_embeddings_have_ids_of_empty_text(tmp_path: Path, rows: Any, size: int, inner: bool) -> None:
    facts = {"text_config": {"vocab_size": rows}} if inner else {"vocab_size": rows}
    ours = load_tokenizer(save_folder(tmp_path, byte_level(), config_json=facts))
    assert ours.vocab_size == size
    assert (ours.token_bytes(size - 1) == b"") == (size == 700)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(("rows", "size"), [(None, 0), (10, 0), (700, 700)])
def test_padded_embeddings_of_a_gguf_file_have_ids_of_empty_text(
    tmp_path: Path, model: str, rows: int | None, size: int
) -> None:
    """The model may draw each of its rows, and an answer with such an id is none that fails."""
    metadata = gguf_metadata(byte_level() if model == "gpt2" else byte_fallback(), model)
    tensors = [] if rows is None else [("token_embd.weight", [1, rows], 0, 0)]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors, b"\0" * 4 * (rows or 0)))
    ours = load_tokenizer(path)
    num_known = len(metadata["tokenizer.ggml.tokens"])
    assert ours.vocab_size == max(num_known, size)
    for token in range(num_known, size):
        assert ours.token_bytes(token) == b""
    assert ours.decode([num_known - 1, ours.vocab_size - 1]) == ours.decode([num_known - 1] * (2 - (size > 0)))


def test_special_tokens_may_be_named_in_a_map_of_their_own(tmp_path: Path) -> None:
    named = {"bos_token": {"content": "<s>"}, "eos_token": 7, "pad_token": ""}
    config = {"bos_token": None, "eos_token": None}
    ours = load_tokenizer(save_folder(tmp_path, byte_level(), config, special_tokens_map_json=named))
    assert ours.special_tokens == {"bos_token": "<s>"}
    assert ours.token_text(ours.bos_id or 0) == "<s>"


@pytest.mark.parametrize(
    ("config", "files", "found"),
    [
        ({"chat_template": "a"}, {}, "a"),
        ({}, {"chat_template_json": {"chat_template": "b"}}, "b"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, {}, "d"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, {}, None),
        ({}, {}, None),
    ],
)
def test_where_a_chat_template_is_found(tmp_path: Path, config: Any, files: Any, found: str | None) -> None:
    assert load_tokenizer(save_folder(tmp_path, byte_level(), config, **files)).chat_template == found


@pytest.mark.parametrize("template", [7, {"a": 1}, "x" * (hf_tokenizer.MAX_TEMPLATE_BYTES + 1)])
def test_a_chat_template_that_is_no_text_of_sensible_length_is_refused(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: `chat_template`"):
        load_tokenizer(save_folder(tmp_path, byte_level(), {"chat_template": template}))


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\xff\xfe", "not valid UTF-8"), (b"x" * (hf_tokenizer.MAX_TEMPLATE_BYTES + 1), "has more than 1048576 bytes")],
)
def test_a_damaged_template_file_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    save_folder(tmp_path, byte_level(), {"chat_template": "not this one"})
    (tmp_path / "chat_template.jinja").write_bytes(data)
    with pytest.raises(ModelError, match=rf"chat_template\.jinja: .*{message}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("ends", [[-1], [True], ["1"], 5_000_000, [1, None]])
def test_end_tokens_are_ids_of_the_vocabulary(tmp_path: Path, ends: Any) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: `eos_token_id`"):
        load_tokenizer(save_folder(tmp_path, byte_level(), generation_config_json={"eos_token_id": ends}))


@pytest.mark.parametrize("lacks_letter", [False, True])
def test_an_unknown_token_that_the_vocabulary_lacks_is_told_when_needed(tmp_path: Path, lacks_letter: bool) -> None:
    """Many files name one that is never needed, so they load. The library raises plain Exception where it is."""
    letters = "xyz" if lacks_letter else "axyz"
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, [], unk_token="<none>"))
    backend.decoder = decoders.ByteLevel()
    folder = save_folder(tmp_path, backend)
    if lacks_letter:
        with pytest.raises(ModelError, match=r"tokenizer\.json: its rules cannot encode a letter"):
            load_tokenizer(folder)
        return
    ours = load_tokenizer(folder)
    assert ours.encode_text("axyz") == [0, 1, 2, 3]
    with pytest.raises(InvalidRequest, match="files are damaged"):
        ours.encode_text("axyz?")


# ----------------------------------------------------------------------------------------- plain text


class Panicking:
    """A backend that fails as the library does on some damaged vocabularies."""

    def __init__(self, name: str) -> None:
        self.error = type(name, (BaseException,), {})("index out of bounds")

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        raise self.error


def test_a_panic_of_the_library_ends_one_request() -> None:
    with pytest.raises(InvalidRequest, match="files are damaged"):
        encode_ids(Panicking("PanicException"), "text")  # type: ignore[arg-type]


def test_control_tokens_that_take_the_space_behind_cost_no_more_in_a_longer_text(tmp_path: Path) -> None:
    """Some models have such: 1 MB with one between two letters took 40 s, since each looked at all that follows."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|x|>", special=True, rstrip=True)])
    ours = load_tokenizer(save_folder(tmp_path, backend))
    control = backend.token_to_id("<|x|>")
    encoder = ours._plain_encoder()
    assert encoder.encode_marked("a<|x|> \n b<|x|>", "\0") == [
        *encoder.encode("a"),
        control,
        *encoder.encode("b"),
        control,
    ]
    start_s = time.thread_time()
    ids = encoder.encode_marked("<|x|> b" * 150_000, "\0")
    took_s = time.thread_time() - start_s
    assert len(ids) == 300_000
    assert took_s < 4.0, f"{took_s:.1f} s of CPU"


def test_what_is_no_panic_passes_on() -> None:
    broken = Panicking("Interrupted")
    with pytest.raises(type(broken.error)):
        encode_ids(broken, "text")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["<s>", "a<s>b", "<s><s>"])
def test_a_vocabulary_that_spells_a_control_token_by_merges_is_cut_up(tmp_path: Path, text: str) -> None:
    """T29: the control token is an entry that merges lead to; a user's text still cannot have it."""
    metadata = pieces(["a", "b", "<", "s", ">", "<s", "<s>"])
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    types[tokens.index("<s>")] = 3
    metadata["tokenizer.ggml.merges"] = ["< s", "<s >"]
    metadata["tokenizer.ggml.eos_token_id"] = tokens.index("<s>")
    ours = from_gguf(tmp_path, metadata)
    ids = ours.encode_text(text)
    assert tokens.index("<s>") not in ids
    assert b"".join(map(ours.token_bytes, ids)).decode() == text


def test_a_text_s_first_space_is_added_once(tmp_path: Path) -> None:
    """A text that begins with a space, or with the sign that stands for one, gets no second."""
    ours = load_tokenizer(save_folder(tmp_path, byte_fallback("first")))
    for text in ("the", " the", "▁the"):
        assert b"".join(map(ours.token_bytes, ours.encode_text(text))) == b" the"
    assert ours.encode_text("") == []


@pytest.mark.parametrize(
    ("texts", "text", "found"),
    [
        (["<a>", "<a>b"], "<a>b<a>", [(0, 4), (4, 7)]),  # the longest of those that begin at one place
        (["aba"], "ababa aba", [(0, 3), (6, 9)]),  # none over another
        (["ab", "ba"], "aba", [(0, 2)]),
        ([], "anything", []),
    ],
)
def test_spellings_of_control_tokens_are_found_one_beside_the_other(
    texts: list[str], text: str, found: list[tuple[int, int]]
) -> None:
    assert list(ControlTexts(texts).find(text)) == found
