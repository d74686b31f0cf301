"""Encodes text in which no control token may come into being: what users write, whatever it spells.

Called by `text.tokenizer` only. Built on the same vocabulary in memory as the main tokenizer, without its control
tokens. Must not know chat messages.
"""

import json
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from sayfa.base.errors import InvalidRequest
from sayfa.base.faults import fault
from sayfa.text.control_text import ControlTexts

_LONG_CHARS = 8_192


class PlainEncoder:
    """Encodes pieces of a text whose control tokens were cut out before.

    Invariant: no id that `encode` gives is one of `control`.
    """

    def __init__(self, backend: Tokenizer, control: frozenset[int]) -> None:
        self._control = control
        self._plain = Tokenizer(backend.model)  # shares the vocabulary, copies nothing
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        state = state_of(backend.pre_tokenizer)
        # SentencePiece puts a space before the first piece of a text; a later piece must not get one.
        self._prefix_first = state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first"
        if self._prefix_first:
            self._plain.pre_tokenizer = pre_tokenizers.Metaspace(
                replacement=state["replacement"], prepend_scheme="never", split=state["split"]
            )
        elif backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        self._space = str(state.get("replacement", " "))
        added = backend.get_added_tokens_decoder()
        self._control_tokens = {token.content: (index, token) for index, token in added.items() if index in control}
        self._texts = ControlTexts(self._control_tokens)
        self._plain.add_tokens([token for index, token in sorted(added.items()) if index not in control])
        # Added tokens that are not in the vocabulary got new numbers; these are their right ones.
        self._right_ids = {
            mine: index
            for index, token in added.items()
            if index not in control and (mine := self._plain.token_to_id(token.content)) is not None and mine != index
        }

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
        if first and self._prefix_first and not text.startswith((" ", self._space)):
            text = " " + text
        ids = encode_ids(self._plain, text)
        if not self._control.isdisjoint(ids):
            # The vocabulary itself spells a control token from text: cut it up so far that it cannot.
            ids = [index for char in text for index in encode_ids(self._plain, char) if index not in self._control]
        if self._right_ids:
            ids = [self._right_ids.get(index, index) for index in ids]
        return ids


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
