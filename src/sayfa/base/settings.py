"""Reads settings from their sources: flag over environment over file over default. One parser for all of them.

Called by `cli` (all parts) and `llm` (the engine's parts). Takes plain mappings: who parsed the command line or the
YAML file is not known here. Every mistake is a ConfigError that names the source, the value and the way out.
"""

import ast
import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

from sayfa.base import config
from sayfa.base.access import check_access, check_keys
from sayfa.base.config import PARTS, EngineConfig, Secret, Settings, Unit
from sayfa.base.errors import ConfigError

PREFIX = "SAYFA_"
MAX_DIGITS = 40
"""Of a number as text; with some thousands of them `int` raises."""
# What Kubernetes injects for each Service whose name begins with "sayfa", and what belongs to building and testing.
_FOREIGN = re.compile(
    r"SAYFA_((\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_\w+)|CONFIG|SKIP_NATIVE|TEST_\w+|OPENAI_SPEC)"
)
# A zero in front is refused: some would read 010 as eight.
_NUMBER = re.compile(r"([+-]?(?:(?:0|[1-9][\d_]*)(?:\.\d+)?|\.\d+))\s*([A-Za-z]*)", re.ASCII)
_BYTES = {"": 1, "b": 1, "k": 1000, "kb": 1000, "kib": 1 << 10, "m": 10**6, "mb": 10**6, "mib": 1 << 20,
          "g": 10**9, "gb": 10**9, "gib": 1 << 30, "t": 10**12, "tb": 10**12, "tib": 1 << 40}  # fmt: skip
_COUNTS = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, as its definition in `config` says. kind: "int", "float", "bool", "text", "list" or "choice"."""

    part: str
    name: str
    kind: str
    default: Any
    optional: bool = False
    choices: tuple[Any, ...] = ()
    unit: Unit | None = None
    secret: bool = False

    @property
    def key(self) -> str:
        """The key in a file, and the flag without its dashes."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """The flag, e.g. `--max-num-seqs`."""
        return "--" + self.key

    @property
    def variable(self) -> str:
        """The environment variable, e.g. `SAYFA_MAX_NUM_SEQS`."""
        return PREFIX + self.name.upper()


@cache
def fields() -> dict[str, Field]:
    """Every setting by its name, in the order of the parts."""
    found: dict[str, Field] = {}
    for part, cls in PARTS.items():
        hints = typing.get_type_hints(cls, include_extras=True)
        for info in msgspec.structs.fields(cls):
            default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
            found[info.name] = _field(part, info.name, hints[info.name], default)
    return found


def _field(part: str, name: str, hint: Any, default: Any) -> Field:
    facts: dict[str, Any] = {}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        facts["optional"] = True
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    for extra in getattr(hint, "__metadata__", ()):
        facts.update({"unit": extra} if isinstance(extra, Unit) else {"secret": isinstance(extra, Secret)})
    hint = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    if typing.get_origin(hint) is typing.Literal:
        return Field(part=part, name=name, kind="choice", default=default, choices=typing.get_args(hint), **facts)
    kind = "list" if typing.get_origin(hint) is list else {int: "int", float: "float", bool: "bool", str: "text"}[hint]
    return Field(part=part, name=name, kind=kind, default=default, **facts)


@cache
def docs() -> dict[str, str]:
    """The text below each field in `config`, as one line; what `--help` and the docs show."""
    found: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(config)).body:
        if isinstance(node, ast.ClassDef):
            for item, below in zip(node.body, node.body[1:], strict=False):
                text = below.value if isinstance(below, ast.Expr) else None
                if (
                    isinstance(item, ast.AnnAssign)
                    and isinstance(text, ast.Constant)
                    and isinstance(item.target, ast.Name)
                ):
                    found[item.target.id] = " ".join(str(text.value).split())
    return found


def load(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any] | None = None, file_name: str = "file"
) -> Settings:
    """Merge the sources into Settings; a flag of None counts as not given.

    Raises ConfigError on an unknown name in any source, a value that does not parse or is out of range, and values that
    contradict each other.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, raw, label, origin in [
        *_from_file(file or {}, file_name), *_from_environ(environ), *_from_flags(flags)
    ]:  # fmt: skip
        values[name] = parse(fields()[name], raw, label)
        origins[name] = origin
    return _build(values, origins)


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The engine's parts from keyword arguments, as `LLM(model, max_model_len=4096)` takes them."""
    known = {name: field for name, field in fields().items() if field.part != "server"}
    values = {}
    for name, raw in options.items():
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{nearest(name, known)}")
        if raw is not None or not known[name].optional:
            values[name] = parse(known[name], raw, f"`{name}`")
    return _build(values, dict.fromkeys(values, "argument")).engine


def environ_for_child(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for a process that gets its settings from us: none of ours, since one of them holds keys."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the closest known one, if one is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


Given = Iterable[tuple[str, Any, str, str]]


def _from_flags(flags: Mapping[str, Any]) -> Given:
    for name, raw in flags.items():
        if raw is not None:
            # Each flag of a list is split at commas, as a variable is.
            joined = ",".join(raw) if isinstance(raw, list) and raw else raw
            yield name, joined, fields()[name].flag, "flag"


def _from_environ(environ: Mapping[str, str]) -> Given:
    by_variable = {field.variable: field for field in fields().values()}
    for variable, raw in environ.items():
        if not variable.startswith(PREFIX) or _FOREIGN.fullmatch(variable):
            continue
        if variable not in by_variable and variable.endswith("_PORT") and "://" in raw:
            continue  # of the same kind, and told apart by its value alone
        if variable not in by_variable:
            raise ConfigError(f"unknown environment variable {variable}{nearest(variable, by_variable)}")
        if variable == "SAYFA_PORT" and "://" in raw:
            raise ConfigError(
                f"SAYFA_PORT is {raw!r}: Kubernetes sets it so because a Service is called 'sayfa'. Rename it, "
                "or put `enableServiceLinks: false` into the pod's spec; `--port` cannot be seen behind it otherwise."
            )
        yield by_variable[variable].name, raw, variable, variable


def _from_file(file: Mapping[str, Any], file_name: str) -> Given:
    seen: set[str] = set()
    for key, raw in file.items():
        name = str(key).replace("-", "_")
        if name not in fields():
            raise ConfigError(
                f"{file_name}: unknown key {key!r}{nearest(str(key), (f.key for f in fields().values()))}"
            )
        if name in seen:
            raise ConfigError(f"{file_name}: key {key!r} stands twice (dashes and underscores are the same)")
        seen.add(name)
        yield name, raw, f"{file_name}: {key}", file_name


def parse(field: Field, raw: Any, label: str) -> Any:
    """The typed value of one setting from text, a list of texts or (of `LLM`) a value of its type.

    Raises ConfigError; `label` begins its sentence.
    """
    if raw is None or (raw == "" and field.optional):
        if field.optional:
            return None
        raise ConfigError(f"{label} is empty; it needs {_wanted(field)}")
    if field.kind == "list":
        parts = raw.split(",") if isinstance(raw, str) else raw if isinstance(raw, list | tuple) else [raw]
        texts = [item.strip() for item in parts if isinstance(item, str)]
        if len(texts) != len(parts) or not all(texts) or not all(map(_is_unicode, texts)):
            raise ConfigError(f"{label} holds an entry that is empty or no UTF-8 text; it needs {_wanted(field)}")
        return texts
    parser = {"int": _number, "float": _number, "bool": _switch, "text": _text, "choice": _choice}[field.kind]
    value = parser(field, raw)
    if value is None:
        shown = "(hidden)" if field.secret else repr(raw)
        octal = "; leave out the zero in front" if field.unit and re.match(r"\s*[+-]?0\d", str(raw)) else ""
        raise ConfigError(f"{label} is {shown}; it must be {_wanted(field)}{octal}")
    return value


def _number(field: Field, raw: Any) -> float | None:
    unit = field.unit or Unit("", float("-inf"), float("inf"))
    value: float
    if isinstance(raw, str):
        match = _NUMBER.fullmatch(raw.strip())
        scales = _BYTES if unit.word == "bytes" else _COUNTS
        suffix = (match[2].lower() if scales is _BYTES else match[2]) if match else ""
        if match is None or suffix not in scales or len(match[1]) > MAX_DIGITS:
            return None
        digits = match[1].replace("_", "")
        value = (float(digits) if "." in digits else int(digits)) * scales[suffix]
    elif isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    else:
        value = raw
    if not unit.low <= value <= unit.high or (field.kind == "int" and value != int(value)):
        return None
    return int(value) if field.kind == "int" else float(value)


def _switch(_: Field, raw: Any) -> bool | None:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _text(_: Field, raw: Any) -> str | None:
    return raw if isinstance(raw, str) and "\x00" not in raw and _is_unicode(raw) else None


def _is_unicode(text: str) -> bool:
    """Whether it can be told to the engine's process; other bytes of a command line are lone surrogates in Python."""
    return not re.search("[\ud800-\udfff]", text)


def _choice(field: Field, raw: Any) -> Any:
    return next((choice for choice in field.choices if choice == raw or str(choice) == str(raw).strip()), None)


def _wanted(field: Field) -> str:
    if field.kind == "choice":
        return "one of " + ", ".join(str(choice) for choice in field.choices)
    if field.kind == "bool":
        return "true or false"
    if field.kind == "list":
        return "one or more texts"
    if field.unit is None:
        return "text in UTF-8"
    form = {"bytes": "bytes such as 4GiB", "": "a number"}.get(field.unit.word, f"a number ({field.unit.word})")
    return f"{form} from {field.unit.low:,} to {field.unit.high:,}"


def _build(values: dict[str, Any], origins: dict[str, str]) -> Settings:
    parts = {}
    for part, cls in PARTS.items():
        parts[part] = cls(**{name: value for name, value in values.items() if fields()[name].part == part})
    settings = Settings(**parts, origins=origins)  # type: ignore[arg-type]
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    """Refuse values that contradict each other."""
    server, scheduler = settings.server, settings.scheduler
    check_keys(server.api_key)
    check_access(server)
    if bool(server.ssl_certfile) != bool(server.ssl_keyfile):
        raise ConfigError("--ssl-certfile and --ssl-keyfile belong together; one of them is missing")
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {scheduler.max_num_batched_tokens}, less than --max-num-seqs "
            f"({scheduler.max_num_seqs}): each running sequence needs one token of every step"
        )


def describe(settings: Settings) -> list[tuple[str, str, str]]:
    """(key, value, origin) of every setting in order, secrets hidden; what `--check-config` prints."""
    rows = []
    for name, field in fields().items():
        value = getattr(getattr(settings, field.part), name)
        shown = "(hidden)" if field.secret and value else ", ".join(value) if isinstance(value, list) else str(value)
        rows.append((field.key, shown if value is not None else "", settings.origins.get(name, "default")))
    return rows
