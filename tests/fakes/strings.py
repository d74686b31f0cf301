"""Many different strings for tests of text: scripts, emoji, code, numbers, spaces, control characters."""

import random

_WORDS_TEXT = (
    "the of and a to in is you that it he was for on are as with his they at be this from I have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she many some "
    "don't I'm we'll they've he'd it's LET'S tokenization supercalifragilistic GPU iPhone HTTPServer snake_case"
)
_TURKISH_TEXT = (
    "İstanbul'da ılık bir akşam çiğ köfte yedik şöyle güzel ağaçların gölgesinde öğrencilerimizden IĞDIR ığdır "
    "muvaffakiyetsizleştiriciler TÜRKÇE Kızılırmak'ın soğuğu ötürü"
)
_WORDS, _TURKISH = _WORDS_TEXT.split(), _TURKISH_TEXT.split()
_SCRIPTS = [
    "你好世界今天天气很好我们一起去公园吧", "こんにちは世界カタカナ漢字ひらがな", "안녕하세요세계한국어문장입니다",
    "Привет мир это русский текст", "Γειά σου κόσμε αυτό είναι", "مرحبا بالعالم هذا نص عربي", "שלום עולם זה טקסט",
    "नमस्ते दुनिया यह हिंदी है", "สวัสดีชาวโลกภาษาไทย", "Xin chào thế giới tiếng Việt", "வணக்கம் உலகம்", "გამარჯობა მსოფლიო",
    "ሰላም ልዑል", "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒮𝒸𝓇𝒾𝓅𝓉", "Zażółć gęślą jaźń", "Größe Straße ÄÖÜ", "naïve café résumé",
]  # fmt: skip
_EMOJI = ["😀", "👨‍👩‍👧‍👦", "🇹🇷", "👍🏽", "❤️", "🏳️‍🌈", "🤷‍♂️", "☃", "①", "½", "²", "٣", "Ⅷ", "€", "™", "…", "—"]
_CODE = [
    "def f(x):\n    return x ** 2\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i];\n}",
    "SELECT * FROM t WHERE a >= 10;",
    '<div class="x">&nbsp;</div>',
    '{"key": [1, 2.5e-3, null]}',
    "https://example.org/a?b=c&d=%20#e",
    "$x = $y->z();",
    "#include <vector>\r\n",
    "0x1F + 0b101 - 1_000",
    "\\begin{equation} \\alpha^{2} \\end{equation}",
    "a && !b || c ^ ~d",
]
_SPACES = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t",
    "\t\t",
    "\r\n",
    " \n",
    "\n ",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
]
_CONTROL = ["\x00", "\x01", "\x07", "\x1b[31m", "\x7f", "\x85", "\u202e", "\ufeff", "\ufffd", "\ue000", "\U0010ffff"]
_COMBINING = ["e\u0301", "a\u0308\u0323", "\u0301", "n\u0303", "\u0915\u094d\u0937", "\u1100\u1161"]


def random_string(rng: random.Random, max_parts: int = 12) -> str:
    """Make a string of random parts, some joined by spaces of all sorts, some by nothing."""
    parts: list[str] = []
    for _ in range(rng.randrange(max_parts + 1)):
        parts.append(_part(rng))
        parts.append(rng.choice(_SPACES) if rng.random() < 0.25 else rng.choice(["", " "]))
    return "".join(parts)


def _part(rng: random.Random) -> str:
    kind = rng.randrange(14)
    if kind < 3:
        return rng.choice(_WORDS)
    if kind == 3:
        return rng.choice(_TURKISH)
    if kind in (4, 5):
        script = rng.choice(_SCRIPTS)
        start = rng.randrange(len(script))
        return script[start : start + rng.randrange(1, 9)]
    if kind == 6:
        return rng.choice(_EMOJI) * rng.randrange(1, 4)
    if kind == 7:
        return rng.choice(_CODE)
    if kind == 8:
        return str(rng.randrange(10 ** rng.randrange(1, 12)))
    if kind == 9:
        return rng.choice(_SPACES) * rng.randrange(1, 8)
    if kind == 10:
        return rng.choice(_CONTROL)
    if kind == 11:
        return rng.choice(_COMBINING)
    if kind == 12:
        return "".join(rng.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") for _ in range(rng.randrange(1, 6)))
    return "".join(chr(_any_char(rng)) for _ in range(rng.randrange(1, 5)))


def _any_char(rng: random.Random) -> int:
    """Draw any character but a surrogate, low ones more often."""
    while True:
        char = rng.randrange(rng.choice([0x80, 0x800, 0x10000, 0x110000]))
        if not 0xD800 <= char < 0xE000:
            return char
