"""What a model's files say about its tokenizer, whatever their format.

Filled by the two builders (`gguf_tokenizer`, `hf_tokenizer`), read by `Tokenizer`; knows no files itself.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts beside the vocabulary.

    tokens: each id's spelling in the vocabulary's own alphabet; ids that do not exist have an empty one.
    prefix_ids, suffix_ids: what is put around a raw text when special tokens are asked for (BOS, EOS, or nothing).
    eos_ids: each of them ends an answer. special_ids: control tokens, hidden from answers.
    special_tokens: `bos_token`, `eos_token`, and all others that have names, as chat templates want them.
    """

    tokens: tuple[str, ...]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    special_tokens: dict[str, str]
    chat_template: str | None
