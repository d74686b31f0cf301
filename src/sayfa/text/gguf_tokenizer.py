"""Builds a tokenizer from the metadata of a GGUF file.

Called by `text.tokenizer` only. Two kinds of vocabulary exist there: `gpt2` (bytes spelled in a printable alphabet, and
merges) and `llama` (SentencePiece pieces with scores, and bytes as a last resort). A GGUF file does not carry the rules
around them, so they are put together here. Must not know chat messages or HTTP.
"""

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sayfa.base.errors import ModelError
from sayfa.base.gguf import GgufFile
from sayfa.base.quoting import quoted
from sayfa.text.facts import TokenizerFacts
from sayfa.text.pretokenizers import find_rule

log = logging.getLogger(__name__)

SPACE = "▁"
MAX_TEMPLATE_CHARS = 1 << 20
MAX_TOKENS = 4_000_000
MAX_CUT_CHARS = 1 << 32
"""What the cuts of all tokens in two copy, where merges are to be found: half a second. Vocabularies need some 20
million; one token of a megabyte would take minutes."""

# `tokenizer.ggml.token_type`
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# Control tokens with which a family ends a turn or a text. Files often name only one of them as their end token.
_END_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<eos>"}
)
_NAMED_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_MODELS = ("gpt2", "llama")


def build_from_gguf(file: GgufFile) -> tuple[Tokenizer, TokenizerFacts]:
    """Build the tokenizer; raise ModelError (with what is known) where the file asks for something unknown."""
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.name}: `tokenizer.ggml.tokens` is empty; the file holds no vocabulary.")
    types = file.numbers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in file.metadata else []
    types = types or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{file.name}: {len(tokens)} tokens have {len(types)} types; the file is damaged.")
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        rule = find_rule(file.metadata.get("tokenizer.ggml.pre"), file.name)
        if file.metadata["tokenizer.ggml.pre"] == "default":
            log.warning(
                "%s: the pre-tokenizer is 'default', which few models were trained with; if answers are poor, "
                "convert the model again or give its Hugging Face tokenizer folder", file.name,
            )  # fmt: skip
        backend = _byte_level(file, tokens, rule)
        add_bos = rule.add_bos
    elif kind == "llama":
        tokens = _respell(file, tokens)
        backend = _sentence_piece(file, tokens, types)
        add_bos = True
    else:
        raise ModelError(
            f"{file.name}: `tokenizer.ggml.model` is {quoted(kind, 99)}, which is not supported; known: "
            f"{', '.join(_MODELS)}."
        )
    _add_tokens(backend, tokens, types)
    return backend, _facts(file, tokens, types, add_bos)


def _byte_level(file: GgufFile, tokens: list[str], rule: Any) -> Tokenizer:
    merges = [_split_merge(file, merge) for merge in file.strings("tokenizer.ggml.merges")]
    vocab = _vocab(tokens)
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    except Exception:  # the library raises plain Exception
        raise ModelError(f"{file.name}: `tokenizer.ggml.merges` names tokens that the vocabulary lacks.") from None
    if rule.nfc:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_merge(file: GgufFile, merge: str) -> tuple[str, str]:
    left, found, right = merge.partition(" ")
    if not (left and found and right) or " " in right:
        raise ModelError(f"{file.name}: `tokenizer.ggml.merges` holds {quoted(merge, 60)}, which is not two pieces.")
    return left, right


def _is_gemma(file: GgufFile) -> bool:
    return str(file.metadata.get("general.architecture", "")).startswith("gemma")


def _respell(file: GgufFile, tokens: list[str]) -> list[str]:
    """Spell tokens of spaces alone as the normalized text has them; Gemma's files keep them as real spaces."""
    if not _is_gemma(file):
        return tokens
    return [SPACE * len(token) if " " in token and not token.strip(" ") else token for token in tokens]


def _sentence_piece(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    if "tokenizer.ggml.merges" in file.metadata:
        merges = [_split_merge(file, merge) for merge in file.strings("tokenizer.ggml.merges")]
    else:
        # Gemma's scores do not follow the order of its merges; the order of the tokens does.
        scores = [-i for i in range(len(tokens))] if _is_gemma(file) else file.numbers("tokenizer.ggml.scores")
        if len(scores) != len(tokens):
            raise ModelError(f"{file.name}: {len(tokens)} tokens have {len(scores)} scores; the file is damaged.")
        if sum(len(token) ** 2 for token in tokens) > MAX_CUT_CHARS:
            raise ModelError(
                f"{file.name}: `tokenizer.ggml.tokens` holds tokens of up to {max(map(len, tokens)):,} characters, too "
                "long to find their merges; convert the model again with `tokenizer.ggml.merges`."
            )
        merges = merges_from_scores(tokens, scores, types)
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    unk_token = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    try:
        model = models.BPE(vocab=_vocab(tokens), merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    except Exception:  # the library raises plain Exception
        raise ModelError(f"{file.name}: `tokenizer.ggml.merges` names tokens that the vocabulary lacks.") from None
    backend = Tokenizer(model)
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    if not prefix:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    elif file.metadata.get("general.architecture") == "phi3":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Derive the merges that SentencePiece's scores imply: best score first, then the longest left part.

    Control, unknown and byte tokens never come out of a merge: text must not be able to spell them.
    """
    vocab = set(tokens)
    made = [index for index, kind in enumerate(types) if kind not in (_UNKNOWN, _CONTROL, _BYTE)]
    made.sort(key=scores.__getitem__, reverse=True)
    merges: list[tuple[str, str]] = []
    for _, group in groupby(made, key=scores.__getitem__):
        start = len(merges)
        num_tokens = 0
        for index in group:
            token = tokens[index]
            num_tokens += 1
            for cut in range(len(token) - 1, 0, -1):
                if (right := token[cut:]) in vocab and (left := token[:cut]) in vocab:
                    merges.append((left, right))
        if num_tokens > 1:
            merges[start:] = sorted(merges[start:], key=_lengths, reverse=True)
    return merges


def _lengths(merge: tuple[str, str]) -> tuple[int, int]:
    return len(merge[0]), len(merge[1])


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Number the tokens. Where a text appears twice its first id is the one that text is encoded to."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    return vocab


def _add_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Mark control tokens and the tokens that are always matched whole; empty ones can match nothing."""
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL and token]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    whole = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED and token]
    # A token of spaces is matched after spaces were respelled, by the merges; as a whole it could not be found.
    whole = [token for token in whole if token.strip(SPACE)]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])


def _embedding_rows(file: GgufFile) -> int:
    """How many ids the model itself has, which it may draw; 0 if the file has no such matrix, or one that is none."""
    table = file.tensors.get("token_embd.weight")
    return table.shape[0] if table is not None and len(table.shape) == 2 and table.shape[0] <= MAX_TOKENS else 0


def _facts(file: GgufFile, tokens: list[str], types: list[int], add_bos: bool) -> TokenizerFacts:
    def id_of(name: str) -> int | None:
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(tokens):
            raise ModelError(
                f"{file.name}: `tokenizer.ggml.{name}_token_id` is {quoted(value, 60)}; ids lie in "
                f"[0, {len(tokens) - 1}]."
            )
        return value

    def flag(name: str, default: bool) -> bool:
        value = file.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ModelError(f"{file.name}: `tokenizer.ggml.{name}` is {quoted(value, 60)}, but must be a bool.")
        return value

    named = {name: tokens[index] for name, key in _NAMED_IDS.items() if (index := id_of(key)) is not None}
    special = {index for index, type_ in enumerate(types) if type_ == _CONTROL}
    ends = {index for index in special if tokens[index] in _END_TEXTS}
    ends |= {index for name in ("eos", "eot", "eom") if (index := id_of(name)) is not None}
    special |= ends | {index for key in _NAMED_IDS.values() if (index := id_of(key)) is not None}
    bos, eos = id_of("bos"), id_of("eos")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and (not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARS):
        raise ModelError(f"{file.name}: `tokenizer.chat_template` is no text of up to {MAX_TEMPLATE_CHARS} characters.")
    return TokenizerFacts(
        tokens=(*tokens, *[""] * (_embedding_rows(file) - len(tokens))),
        prefix_ids=(bos,) if bos is not None and flag("add_bos_token", add_bos) else (),
        suffix_ids=(eos,) if eos is not None and flag("add_eos_token", False) else (),
        bos_id=bos,
        eos_ids=frozenset(ends),
        special_ids=frozenset(special),
        special_tokens=named,
        chat_template=template,
    )
