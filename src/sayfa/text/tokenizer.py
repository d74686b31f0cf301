"""Text to token ids and back, for a GGUF file or a folder in Hugging Face's format.

Called by the server and by `llm`, in threads; a `Tokenizer` does not change after it was built. It must not know
requests, engines or chat messages; those become text in `text.chat_template`.

Rules that the callers rely on:
1. `encode` is for raw prompts: control tokens in the text count, BOS is put before it where the model's files say so,
   and never a second one where the text begins with it already.
2. `encode_chat` is for rendered templates: control tokens count, nothing is put around them.
3. `encode_text` is for what a user wrote: no control token can come out of it.
4. `decode` joins the true bytes of the tokens. Bytes that can never become a character give U+FFFD; an unfinished
   character at the end is dropped, as it is when streaming.
"""

import threading
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as Backend

from sayfa.base.errors import InvalidRequest, ModelError
from sayfa.base.gguf import read_gguf
from sayfa.text.facts import TokenizerFacts
from sayfa.text.gguf_tokenizer import build_from_gguf
from sayfa.text.hf_tokenizer import build_from_folder
from sayfa.text.plain_text import PlainEncoder, encode_ids, state_of
from sayfa.text.utf8 import Utf8Decoder

SPACE = "▁"


class Tokenizer:
    """A vocabulary with its rules, and the facts that the model's files tell about it."""

    def __init__(self, backend: Backend, facts: TokenizerFacts) -> None:
        self._backend = backend
        self._facts = facts
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self._byte_level, self._strip_left = _spelling(backend)
        self._bytes: dict[int, bytes] = {}
        self._plain: PlainEncoder | None = None
        self._lock = threading.Lock()

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id. Rows that only pad the model's embedding count; they are empty text."""
        return len(self._facts.tokens)

    @property
    def bos_id(self) -> int | None:
        """The id of the beginning-of-text token, if the model has one."""
        return self._facts.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end an answer: end of text, end of turn, and what the generation config lists."""
        return self._facts.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens; they are left out of answers unless asked for."""
        return self._facts.special_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and all others that the model's files give a name, by name."""
        return dict(self._facts.special_tokens)

    @property
    def control_texts(self) -> list[str]:
        """The spelling of each control token."""
        return sorted(text for index, text in self._added.items() if index in self._facts.special_ids)

    @property
    def chat_template(self) -> str | None:
        """The source of the model's own chat template, if it has one."""
        return self._facts.chat_template

    @property
    def add_bos(self) -> bool:
        """Whether a raw prompt gets BOS put before it."""
        return self._facts.bos_id is not None and self._facts.bos_id in self._facts.prefix_ids

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Encode a raw prompt (rule 1). Raises InvalidRequest for text that is no valid Unicode."""
        ids = encode_ids(self._backend, text)
        if not add_special:
            return ids
        prefix, suffix = self._facts.prefix_ids, self._facts.suffix_ids
        if prefix and ids[: len(prefix)] == list(prefix):
            prefix = ()
        return [*prefix, *ids, *suffix]

    def encode_text(self, text: str) -> list[int]:
        """Encode what a user wrote (rule 3)."""
        return self._plain_encoder().encode(text)

    def encode_chat(self, text: str, mark: str = "") -> list[int]:
        """Encode a rendered chat (rule 2).

        `mark` is a character that the template's renderer put inside the control tokens that users had spelled; such
        a broken token is encoded as the plain text it was, without the mark. Control tokens count in their own
        spelling alone, also where the library would find them in text that only becomes it by normalization.
        """
        plain = self._plain_encoder()
        if not plain.only_way and (not mark or mark not in text):
            return encode_ids(self._backend, text)
        return plain.encode_marked(text, mark)

    def _plain_encoder(self) -> PlainEncoder:
        with self._lock:
            if self._plain is None:
                self._plain = PlainEncoder(self._backend, self._facts.special_ids)
            return self._plain

    def token_bytes(self, token_id: int) -> bytes:
        """Give the true bytes of a token; they may be part of a character. Raises InvalidRequest for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < len(self._facts.tokens):
                raise InvalidRequest(
                    f"The token id {token_id} is outside [0, {len(self._facts.tokens) - 1}].", code="invalid_token_id"
                )
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            # A token that is looked for in normalized text is shown as it was found there.
            text = self._backend.id_to_token(token_id) or self._added[token_id]
            return (text if self._byte_level else text.replace(SPACE, " ")).encode()
        token = self._facts.tokens[token_id]
        if self._byte_level:
            try:
                return token.translate(_to_byte_char()).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(SPACE, " ").encode()

    def token_text(self, token_id: int) -> str:
        """Show a token as text; parts of characters show as U+FFFD (their bytes tell the truth)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode a whole text that begins with these ids (rule 4)."""
        special = self._facts.special_ids if skip_special else frozenset()
        text = Utf8Decoder().push(b"".join(self.token_bytes(index) for index in ids if index not in special))
        return text[1:] if self._strip_left and text.startswith(" ") else text


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a GGUF file or of a model folder. Raises ModelError with the reason and the way out."""
    path = Path(path)
    if path.is_dir():
        return Tokenizer(*build_from_folder(path))
    if path.name == "tokenizer.json":
        return Tokenizer(*build_from_folder(path.parent))
    file = read_gguf(path)
    try:
        return Tokenizer(*build_from_gguf(file))
    finally:
        file.close()


def _spelling(backend: Backend) -> tuple[bool, bool]:
    """Tell whether tokens spell bytes in the byte-level alphabet, and whether a whole text loses its first space."""
    state = state_of(backend.decoder)
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if kinds & {"ByteFallback", "Metaspace"}:
        metaspace = any(step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
        strip = any(step.get("type") == "Strip" and step.get("content") == " " and step.get("start") for step in steps)
        return False, metaspace or strip
    raise ModelError(
        f"the tokenizer's decoder is {sorted(str(kind) for kind in kinds)}, which is not supported; "
        "known: ByteLevel, ByteFallback, Metaspace."
    )


@lru_cache(maxsize=1)
def _to_byte_char() -> dict[int, int]:
    """Map each character of the byte-level alphabet to the byte it stands for.

    Printable Latin-1 characters stand for themselves; the other bytes were given the characters from U+0100 on, in
    order. Source: GPT-2's byte-level BPE.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}
