"""How a byte-level vocabulary of a GGUF file wants text cut before its merges apply.

Called by `text.gguf_tokenizer` only. A GGUF file names the rule (`tokenizer.ggml.pre`) and does not carry it, so each
known name stands here; another name is refused, since a wrong rule costs quality and no error would ever show it.
The patterns are those of the models' own published tokenizer.json files.
"""

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

from sayfa.base.errors import ModelError
from sayfa.base.quoting import quoted


class Rule(NamedTuple):
    """One way to cut text.

    patterns: each match becomes a piece of its own, one pattern after the other; none means GPT-2's own pattern.
    split_digits: each digit stands alone, before the patterns apply. nfc: text is composed (Unicode NFC) first.
    ignore_merges: a piece that is a token as a whole is taken so, whatever the merges say.
    add_bos: whether a text begins with BOS when the file does not say.
    """

    patterns: tuple[str, ...] = ()
    split_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Build the rule for the `tokenizers` library."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.split_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """Build the normalizer, or None where text is taken as it is."""
        return normalizers.NFC() if self.nfc else None


_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL


def _cased_words(digits: str, contraction: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
        + _TAIL
    )


_RULE_GPT2 = Rule()
_RULE_DIGITS = Rule(split_digits=True)
_RULE_LLAMA3 = Rule((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_RULE_QWEN2 = Rule((_words(r"\p{N}"),), nfc=True)
_RULE_TEKKEN = Rule((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True)
_RULE_GPT4O = Rule((_cased_words(r"\p{N}{1,3}", _CONTRACTION + "?"),))
# What converters wrote before names existed. Few models were trained so; the caller warns.
_RULE_DEFAULT = Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

RULES: dict[str, Rule] = {
    "gpt-2": _RULE_GPT2, "phi-2": _RULE_GPT2, "mpt": _RULE_GPT2, "olmo": _RULE_GPT2,
    "smollm": _RULE_DIGITS, "starcoder": _RULE_DIGITS, "refact": _RULE_DIGITS, "command-r": _RULE_DIGITS,
    "llama-bpe": _RULE_LLAMA3, "llama3": _RULE_LLAMA3, "llama-v3": _RULE_LLAMA3, "falcon3": _RULE_LLAMA3,
    "pixtral": _RULE_LLAMA3, "smaug-bpe": _RULE_LLAMA3,
    "qwen2": _RULE_QWEN2, "deepseek-r1-qwen": _RULE_QWEN2,
    "tekken": _RULE_TEKKEN,
    "gpt-4o": _RULE_GPT4O, "llama4": _RULE_GPT4O,
    "default": _RULE_DEFAULT,
}  # fmt: skip


def find_rule(name: object, file: str) -> Rule:
    """Give the rule of that name; raise ModelError with the known names if there is none."""
    rule = RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        said = "names no pre-tokenizer" if name is None else f"names the unknown pre-tokenizer {quoted(name, 100)}"
        raise ModelError(
            f"{file}: `tokenizer.ggml.pre` {said}, and a guess would cut text wrongly without any sign. "
            f"Known: {', '.join(sorted(RULES))}. Convert the model again, or give its Hugging Face tokenizer folder."
        )
    return rule
