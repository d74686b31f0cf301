"""Loads the tokenizer of a model folder in Hugging Face's format.

Called by `text.tokenizer` only. Reads tokenizer.json (the vocabulary and its rules), and what tokenizer_config.json,
special_tokens_map.json, added_tokens.json, generation_config.json, config.json and chat_template.jinja say beside it.
Runs no code of the folder. Must not know chat messages or HTTP.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sayfa.base.errors import ModelError
from sayfa.base.json_file import read_json_object
from sayfa.base.quoting import quoted
from sayfa.text.facts import TokenizerFacts
from sayfa.text.hf_added_tokens import named_tokens
from sayfa.text.plain_text import is_library_failure

MAX_TOKENIZER_BYTES = 128 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENS = 4_000_000
MAX_UNUSED_IDS = 100_000
"""Ids below the highest that no token has; each costs memory all the same, and a file of some KB could name any."""


def build_from_folder(folder: Path) -> tuple[Tokenizer, TokenizerFacts]:
    """Load the tokenizer; raise ModelError naming the file that is absent or wrong."""
    backend = _read_backend(folder)
    config = _optional(folder, "tokenizer_config.json")
    _refuse_split(config)
    special_map, added_file = _optional(folder, "special_tokens_map.json"), _optional(folder, "added_tokens.json")
    tokens = named_tokens(config, special_map, added_file, backend.get_added_tokens_decoder())
    backend.add_tokens(tokens.to_add)
    _refuse_shared_ids(backend)
    ids = {name: index for name, text in tokens.by_name.items() if (index := backend.token_to_id(text)) is not None}
    added = backend.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special or token.content in tokens.control}
    eos_ids = _end_ids(folder, backend) | {index for name, index in ids.items() if name == "eos_token"}
    # What stands around a text is tokenizer.json's affair; `add_bos_token` beside it is a left-over of older formats.
    prefix, suffix = _around(backend)
    return backend, TokenizerFacts(
        tokens=_tokens(backend, _embedding_rows(folder)),
        prefix_ids=prefix,
        suffix_ids=suffix,
        bos_id=ids.get("bos_token"),
        eos_ids=frozenset(eos_ids),
        special_ids=frozenset(special | eos_ids),
        special_tokens=tokens.by_name,
        chat_template=_chat_template(folder, config),
    )


def _read_backend(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder.name}: has no tokenizer.json. Save the tokenizer in the fast format "
            "(`AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)`) and put the file beside the weights."
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelError(f"tokenizer.json: has more than {MAX_TOKENIZER_BYTES} bytes, which no vocabulary needs.")
    try:
        # The library's parser bounds the depth itself (128 levels); a second parse would double the time of a start.
        backend = Tokenizer.from_file(str(path))
    except BaseException as error:
        if isinstance(error, Exception) or is_library_failure(error):
            raise ModelError("tokenizer.json: is damaged, or written for a newer version of `tokenizers`.") from None
        raise
    if not backend.get_vocab_size():
        raise ModelError("tokenizer.json: its vocabulary is empty.")
    backend.no_truncation()
    backend.no_padding()
    return backend


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return read_json_object(folder / name) if (folder / name).is_file() else {}


def _refuse_split(config: dict[str, Any]) -> None:
    split = config.get("split_special_tokens")
    if split not in (None, False):
        raise ModelError(
            f"tokenizer_config.json: `split_special_tokens` is {quoted(split, 60)}: control tokens, also those of the "
            "chat template, would be plain text, which is not served; set it to false if the model knows them as "
            "tokens."
        )


def _refuse_shared_ids(backend: Tokenizer) -> None:
    """Added tokens are numbered from the vocabulary's size on; where it leaves out ids, one could be given twice."""
    for index, token in backend.get_added_tokens_decoder().items():
        other = backend.model.id_to_token(index)
        if other is not None and other != token.content:
            raise ModelError(
                f"tokenizer.json: the added token {quoted(token.content, 60)} and the vocabulary's {quoted(other, 60)} "
                f"have the same id, {index}; number the vocabulary without gaps."
            )


def _embedding_rows(folder: Path) -> int:
    """Read how many ids the model itself has; 0 if config.json does not tell or makes no sense."""
    config = _optional(folder, "config.json")
    rows = config.get("vocab_size", _inner(config).get("vocab_size"))
    return rows if type(rows) is int and 0 < rows <= MAX_TOKENS else 0


def _inner(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def _tokens(backend: Tokenizer, num_rows: int) -> tuple[str, ...]:
    """List the spelling of each id. Embeddings are often padded to a round number of rows: such ids can be drawn, and
    are empty text.
    """
    vocab = backend.get_vocab(with_added_tokens=True)
    if max(vocab.values()) > MAX_TOKENS:
        raise ModelError(f"tokenizer.json: its vocabulary holds ids above {MAX_TOKENS:,}.")
    if max(vocab.values()) >= len(vocab) + MAX_UNUSED_IDS:
        raise ModelError(
            f"tokenizer.json: its {len(vocab):,} tokens have ids up to {max(vocab.values()):,}; at most "
            f"{MAX_UNUSED_IDS:,} ids may be left out."
        )
    tokens = [""] * max(max(vocab.values()) + 1, num_rows)
    for text, index in vocab.items():
        tokens[index] = text
    return tuple(tokens)


def _around(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find what tokenizer.json puts before and after a text."""
    try:
        plain = backend.encode("a", add_special_tokens=False).ids
        full = backend.encode("a", add_special_tokens=True).ids
    except BaseException as error:
        if is_library_failure(error):
            raise ModelError("tokenizer.json: its rules cannot encode a letter; the file is damaged.") from None
        raise
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise ModelError("tokenizer.json: its post-processor changes the text's own tokens, which is not supported.")


def _end_ids(folder: Path, backend: Tokenizer) -> set[int]:
    """Collect the end tokens that generation_config.json names, or config.json where the former is silent."""
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder, name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value] if value is not None else []
        for index in ids:
            if type(index) is not int or not 0 <= index <= MAX_TOKENS or backend.id_to_token(index) is None:
                raise ModelError(f"{name}: `eos_token_id` holds {quoted(index, 60)}, which is no id of the vocabulary.")
        if ids:
            return set(ids)
    return set()


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelError(f"chat_template.jinja: has more than {MAX_TEMPLATE_BYTES} bytes.")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ModelError("chat_template.jinja: is not valid UTF-8.") from None
    template = config.get("chat_template") or _optional(folder, "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES:
        raise ModelError(f"tokenizer_config.json: `chat_template` is no text of up to {MAX_TEMPLATE_BYTES} characters.")
    return template
