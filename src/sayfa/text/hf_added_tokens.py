"""Collects the added tokens that a model folder names beside tokenizer.json, as transformers collects them.

Called by `hf_tokenizer` only. Gets what tokenizer_config.json, special_tokens_map.json and added_tokens.json hold;
opens no files itself, and passes over what is not of the known form.

Rules, with the precedence of transformers 5 (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend.__init__`):
1. Where the config lists `added_tokens_decoder`, the two other files do not count. Otherwise special_tokens_map.json
   counts more than the config, and what tokenizer.json lists counts more than added_tokens.json.
2. What is listed with a number is added in the order of numbers, also where tokenizer.json has it: its flags change.
3. Named tokens (`eos_token`, any other `..._token`, `extra_special_tokens`) become control tokens if they are not among
   the added tokens yet, also where the vocabulary has their spelling.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_EXTRA, _OLD_EXTRA, _DECODER = "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"


class NamedTokens(NamedTuple):
    """by_name: the spellings of `bos_token` and so on. control: those of all tokens that are control tokens by name.

    to_add: what to add to the tokenizer, in this order; a token that it has already gets these flags.
    """

    by_name: dict[str, str]
    control: frozenset[str]
    to_add: list[AddedToken]


def named_tokens(
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    added_file: Mapping[str, Any],
    present: Mapping[int, AddedToken],
) -> NamedTokens:
    """Collect the tokens of a folder whose tokenizer.json has `present` (by id) as added tokens."""
    decoder = config.get(_DECODER)
    alone = isinstance(decoder, dict)
    named, extra = _named(config, {} if alone else special_map)
    by_name = {name: token.content for name, token in named.items()}
    control = frozenset([*by_name.values(), *(token.content for token in extra)])
    listed: dict[int, AddedToken] = {}
    if isinstance(decoder, dict):
        for number, entry in decoder.items():
            token = _token(entry) if isinstance(entry, dict) else None
            if token is not None:
                listed[_number(number)] = token
    else:
        for text, index in added_file.items():
            if text and type(index) is int:
                listed[index] = AddedToken(text, special=text in control, normalized=text not in control)
        listed |= present
    to_add = [token for _, token in sorted(listed.items(), key=lambda item: item[0])]
    known = {token.content for token in (*present.values(), *to_add)}
    for token in (*named.values(), *extra):
        if token.content not in known:
            known.add(token.content)
            to_add.append(token)
    names = frozenset(by_name.values())
    for token in to_add:
        token.special = token.special or token.content in names
    return NamedTokens(by_name, control, to_add)


def _named(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Find the tokens that have names, and the extra ones that have none."""
    values = dict(config)
    if not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_OLD_EXTRA, None)
    own = {name: values[name] for name in _other_names(values) if isinstance(values[name], str)}
    own |= _taken_dict(values)
    for name, value in special_map.items():
        if name == _EXTRA and isinstance(value, list):
            value = [*(values[_EXTRA] or []), *value]
        values[name] = {**value, "special": True} if isinstance(value, dict) and name != _EXTRA else value
    own |= _taken_dict(values)
    if values[_EXTRA] is None:
        values[_EXTRA] = values.get(_OLD_EXTRA)
    found = {name: values.get(name) for name in (*_NAMES, *_other_names(values))} | own
    extra = values[_EXTRA] if isinstance(values[_EXTRA], list) else []
    return {name: token for name, value in found.items() if (token := _token(value))}, [*_tokens(extra)]


def _other_names(values: Mapping[str, Any]) -> list[str]:
    return [name for name in values if name.endswith("_token") and name not in _NAMES]


def _taken_dict(values: dict[str, Any]) -> dict[str, Any]:
    """Take extra tokens out that are given by name."""
    if not isinstance(values[_EXTRA], dict):
        return {}
    taken: dict[str, Any] = values[_EXTRA]
    values[_EXTRA] = None
    return taken


def _tokens(values: Iterable[object]) -> Iterable[AddedToken]:
    for value in values:
        if isinstance(value, dict):
            value = {"special": True, **value}
        if (token := _token(value)) is not None:
            yield token


def _token(value: object) -> AddedToken | None:
    """Read a token given as text, which is a control token then, or as an object with `content` and flags.

    Without `normalized` the library decides when the token is added: one that is no control token is looked for in
    normalized text.
    """
    entry = {"content": value, "special": True} if isinstance(value, str) else value
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
        return None
    flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
    return AddedToken(entry["content"], **flags)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
