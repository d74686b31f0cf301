"""Writes docs/settings.md and docs/metrics.md from their definitions. Run: python tools/reference.py

A test compares the pages with what this makes, so they cannot grow old.
"""

from collections.abc import Iterator
from pathlib import Path

from sayfa.base.config import PARTS
from sayfa.base.metrics import METRICS
from sayfa.base.settings import docs, fields

DOCS = Path(__file__).parents[1] / "docs"
SETTINGS_HEAD = """# Settings

Each one is a flag, a key of the file given with `--config` (the flag without its dashes) and an environment
variable (`SAYFA_` and the name in capitals). A flag wins over a variable, a variable over the file. Lists take
several flags or commas; an entry of a YAML list is taken whole. Bytes may be written `4GiB`, counts `4k` (4,000) or
`4K` (4,096); a zero in front of a number is refused. What stands in the file is read as it is written, as a flag is:
`0x1f`, `1.10` and `yes` are texts where a text is wanted.
This page is made by `tools/reference.py`."""
METRICS_HEAD = """# Metrics

`/metrics` shows each with the prefix `sayfa:` and, with `--vllm-metric-names` (on), with `vllm:` too, always with
the labels `model_name` and `engine`. Counters end in `_total` there. At every scrape `requests_received` = sum of
`request_success` + sum of `admission_rejections` + `requests_in_flight`.
This page is made by `tools/reference.py`.

| name | kind | labels | also as | |
|---|---|---|---|---|"""


def settings_page() -> str:
    """Every setting with its flag, its variable, its default and its text."""
    lines = SETTINGS_HEAD.splitlines()
    for part, cls in PARTS.items():
        lines += ["", f"## {(cls.__doc__ or part).strip().rstrip('.')}", ""]
        lines += ["| flag | values | default | |", "|---|---|---|---|"]
        for name, field in fields().items():
            if field.part == part:
                lines.append(f"| `{field.flag}` | {_values(name)} | {_default(name)} | {docs()[name]} |")
    return "\n".join(lines) + "\n"


def _values(name: str) -> str:
    field = fields()[name]
    if field.choices:
        return ", ".join(str(choice) for choice in field.choices)
    if field.unit is None:
        return {"bool": "on, off", "list": "texts"}.get(field.kind, "text")
    return f"{_short(field.unit.low)} to {_short(field.unit.high)} {field.unit.word}".strip()


def _default(name: str) -> str:
    value = fields()[name].default
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, []) else str(value)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) and number < 1e9 else f"{number:.3g}"


def metrics_page() -> str:
    """Every metric with its kind, its labels and its other names."""
    lines = METRICS_HEAD.splitlines()
    for metric in METRICS.values():
        aliases = ", ".join(f"`vllm:{alias}`" for alias in metric.aliases)
        known = ", ".join(f"`{value}`" for value in metric.known)
        doc = metric.doc + (f". Shown from the start: {known}" if known else "")
        lines.append(f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {aliases} | {doc} |")
    return "\n".join(lines) + "\n"


def pages() -> Iterator[tuple[Path, str]]:
    """The pages and their text."""
    yield DOCS / "settings.md", settings_page()
    yield DOCS / "metrics.md", metrics_page()


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text, "utf-8")
        print(f"wrote {path.name}")
