"""Encodes text in which no control token may come into being: what users write, whatever it spells.

Called by `text.tokenizer` only. Built on the same vocabulary in memory as the main tokenizer, without its control
tokens. Must not know chat messages.
"""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from sayfa.base.errors import InvalidRequest
from sayfa.base.faults import fault
from sayfa.text.control_text import ControlTexts

_LONG_CHARS = 8_192


class PlainEncoder:
    """Encodes pieces of a text whose control tokens were cut out before.

    Invariant: no id that `encode` gives is one of `control`.

    only_way: whether the main tokenizer may find control tokens in other spellings than their own, so that a rendered
    chat has to go this way even if nobody wrote a control token out.
    """

    def __init__(self, backend: Tokenizer, control: frozenset[int]) -> None:
        self._control = control
        added = backend.get_added_tokens_decoder()
        self._control_tokens = {token.content: (index, token) for index, token in added.items() if index in control}
        self._texts = ControlTexts(self._control_tokens)
        others = {index: token for index, token in sorted(added.items()) if index not in control}
        self._plain = self._first = _with(backend, backend.pre_tokenizer, others)
        state = state_of(backend.pre_tokenizer)
        if state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first":
            # SentencePiece puts a space before the first piece of a text; a later piece must not get one.
            never = pre_tokenizers.Metaspace(
                replacement=state["replacement"], prepend_scheme="never", split=state["split"]
            )
            self._plain = _with(backend, never, others)
        # Added tokens outside the vocabulary are numbered behind it in their order. Without the control tokens among
        # them they have other numbers here, often those of control tokens; these are their right ones.
        self._right_ids = {
            mine: index
            for index, token in others.items()
            if (mine := self._plain.token_to_id(token.content)) is not None and mine != index
        }
        normalized = any(token.normalized for _, token in self._control_tokens.values())
        self.only_way = (normalized and backend.normalizer is not None) or self._spells_control()

    def _spells_control(self) -> bool:
        """Tell whether plain text can become a control token by merges, which see it with other spaces and letters."""
        try:
            for text in self._control_tokens:
                ids = self._plain.encode(text, add_special_tokens=False).ids
                if any(self._right_ids.get(index, index) in self._control for index in ids):
                    return True
            return False
        except BaseException as error:
            if not is_library_failure(error):
                raise
            return True

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Encode a rendered chat: control tokens in it count, those broken by the mark are plain text without it."""
        ids: list[int] = []
        at = 0
        for start, end in self._texts.find(text):
            index, token = self._control_tokens[text[start:end]]
            before = text[at:start].rstrip() if token.lstrip else text[at:start]
            ids += self.encode(before.replace(mark, ""), first=at == 0)
            ids.append(index)
            at = end
            while token.rstrip and text[at : at + 1].isspace():
                at += 1
        return ids + self.encode(text[at:].replace(mark, ""), first=at == 0)

    def encode(self, text: str, first: bool = True) -> list[int]:
        """Encode `text`; `first` says whether the whole text begins here."""
        if not text:
            return []
        ids = self._ids(self._first if first else self._plain, text)
        if not self._control.isdisjoint(ids):
            # The vocabulary itself spells a control token from text: cut it up so far that it cannot.
            cut = self._ids(self._first if first else self._plain, text[0])
            for char in text[1:]:
                cut += self._ids(self._plain, char)
            ids = [index for index in cut if index not in self._control]
        return ids

    def _ids(self, backend: Tokenizer, text: str) -> list[int]:
        ids = encode_ids(backend, text)
        return [self._right_ids.get(index, index) for index in ids] if self._right_ids else ids


def _with(backend: Tokenizer, pre_tokenizer: Any, added: dict[int, AddedToken]) -> Tokenizer:
    """Make a tokenizer on the same vocabulary, which is shared and not copied, with these added tokens alone."""
    made = Tokenizer(backend.model)
    if backend.normalizer is not None:
        made.normalizer = backend.normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.add_tokens(list(added.values()))
    return made


def is_library_failure(error: BaseException) -> bool:
    """Tell whether the library itself gave up: it raises plain Exception, and its panics are no Exception at all."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def encode_ids(backend: Tokenizer, text: str) -> list[int]:
    """Encode without anything put around.

    Raises InvalidRequest for a text that is no valid Unicode (a lone surrogate), and where the library fails, as it
    does on some damaged vocabularies: that is the end of one request.
    """
    fault("text.encode")
    try:
        if len(text) < _LONG_CHARS:
            return list(backend.encode(text, add_special_tokens=False).ids)
        # Leaves out where each token lies in the text, which halves the time; worth the longer way in for long texts.
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    except (UnicodeEncodeError, TypeError):
        raise InvalidRequest(
            "The text holds a lone surrogate, which is no valid Unicode; send whole characters.", code="invalid_unicode"
        ) from None
    except BaseException as error:
        if not is_library_failure(error):
            raise
        raise InvalidRequest(
            "This model's tokenizer cannot encode the text; its files are damaged.", code="tokenizer_failed"
        ) from None


def state_of(part: Any) -> dict[str, Any]:
    """Read the settings of a normalizer, pre-tokenizer or decoder; empty where there is none."""
    if part is None:
        return {}
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else {}
