"""Bytes to characters as they come. Used by `Tokenizer.decode` and by the detokenizer, so that both say the same."""

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Utf8Decoder:
    """Gives whole characters only; the first bytes of an unfinished one wait, and are lost if it never ends.

    Bytes that cannot be part of any character give U+FFFD, one for each longest wrong run, as the Unicode Standard
    (3.9, "substitution of maximal subparts") recommends.
    """

    def __init__(self) -> None:
        self._decoder = _new_decoder("replace")

    def push(self, data: bytes) -> str:
        """Decode what is complete so far."""
        return self._decoder.decode(data)
