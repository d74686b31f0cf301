"""How an error quotes what somebody else wrote: short, on one line, and with both quotes.

Called by any room that refuses a name or a value. Knows no meaning.
"""


def quoted(value: object, most: int) -> str:
    """Return the value as Python writes it. Of a text at most `most` characters are quoted, of anything else as many
    of its form are shown; `…` stands for the rest, behind the closing quote.
    """
    if isinstance(value, str):
        return f"{value[:most]!r}…" if len(value) > most else repr(value)
    form = repr(value)
    return f"{form[:most]}…" if len(form) > most else form
