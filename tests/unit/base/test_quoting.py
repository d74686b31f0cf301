"""What others wrote is quoted short, on one line, and with both quotes."""

import ast

import pytest

from sayfa.base.quoting import quoted


@pytest.mark.parametrize("text", ["", "name", "it's", "a\nb", "\u202e", "x" * 80, "x" * 81, '"' * 500, "'\"\n" * 500])
def test_a_text_is_quoted_whole_or_from_its_beginning(text: str) -> None:
    shown = quoted(text, 80)
    assert ast.literal_eval(shown.removesuffix("…")) == text[:80]
    assert shown.endswith("…") == (len(text) > 80)
    assert shown.isprintable()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(17, "17"), (None, "None"), ([1, 2], "[1, 2]"), (10**50, "1" + 9 * "0" + "…"), ([1] * 99, "[1, 1, 1, …")],
)
def test_anything_else_is_shown_up_to_the_limit(value: object, shown: str) -> None:
    assert quoted(value, 10) == shown
