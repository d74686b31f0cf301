"""Flags out of the settings' one definition, and the layers below them: environment and file.

Called by the commands. A command is a plain function whose first argument is the `Given` flags; `with_settings` gives
it one flag for each field of the parts it names. Values stay text here: `base.settings` parses those of all sources
alike.
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from sayfa.base.config import PARTS, Settings
from sayfa.base.errors import ConfigError, InvalidRequest
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.settings import Field, docs, fields, load
from sayfa.cli.config_file import read_config_file

Given = dict[str, Any]
"""Flags as they were typed, by field name; None where one was not given."""

ConfigFile = Annotated[
    Path | None,
    Parameter(name="--config", env_var="SAYFA_CONFIG", help="YAML file whose keys are these flags without dashes."),
]

ServerKey = Annotated[
    str | None, Parameter(env_var="SAYFA_API_KEY", help="Key of that server; where several stand, the first is sent.")
]


def first_key(given: str | None) -> str | None:
    """The key that a client sends: in the variable, which is the server's too, several may stand with commas.

    Raises ConfigError if no header can carry it.
    """
    key = given and given.split(",")[0].strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key holds characters that no HTTP header can carry")
    return key


def check_wishes(wishes: dict[str, Any]) -> None:
    """Raise ConfigError for sampling flags with which nothing could be sampled, before any work."""
    try:
        SamplingParams(**wishes).check()
    except InvalidRequest as error:
        raise ConfigError(f"--{(error.param or '').replace('_', '-')}: {error}") from None


def with_settings(run: Callable[..., int], parts: Sequence[str], *, model_first: bool = True) -> Callable[..., int]:
    """Make a command out of `run(given, ...)`: its own parameters, and a flag for each setting of `parts`.

    model_first: whether the model may be given as the first word without its flag.
    """
    own = list(inspect.signature(run).parameters.values())[1:]
    settings = [field for field in fields().values() if field.part in parts]
    flags = [_parameter(field, positional=model_first and field.name == "model") for field in settings]
    positional = [flag for flag in flags if flag.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    positional += [p for p in own if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    keyword = [p for p in [*own, *flags] if p.kind is inspect.Parameter.KEYWORD_ONLY]
    signature = inspect.Signature([*positional, *keyword])

    @functools.wraps(run)
    def command(*args: Any, **kwargs: Any) -> int:
        values = dict(signature.bind(*args, **kwargs).arguments)
        for flag in positional:
            _check_word(values.get(flag.name))
        given = {field.name: values.pop(field.name, None) for field in settings}
        return run(given, **values)

    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    del command.__wrapped__  # the library would look behind the new signature
    return command


def _check_word(word: Any) -> None:
    """Raise ConfigError if a word without a flag of its own was meant as the value of the switch before it."""
    if str(word).lower() in ("true", "false", "on", "off", "yes", "no") and not os.path.exists(word):
        raise ConfigError(
            f"{str(word)!r} is taken for a model or a file, since a flag that is on or off takes no word behind it; "
            f"write --offline or --no-offline, or --offline={word}"
        )


def _parameter(field: Field, *, positional: bool) -> inspect.Parameter:
    facts = [f"[default: {_shown(field)}]"] if _shown(field) else []
    help_text = " ".join([docs()[field.name], *facts, f"[{field.variable}]"])
    group = Group(field.part.capitalize(), help=_purpose(field.part), sort_key=1 + list(PARTS).index(field.part))
    kind: Any = {"bool": bool, "list": list[str]}.get(field.kind, str)
    parameter = Parameter(
        group=group, help=help_text, show_default=False, show_choices=False, negative_iterable="",
        metavar=_metavar(field),
    )  # fmt: skip
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if positional else inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, parameter],
    )


def _metavar(field: Field) -> str | None:
    if field.kind == "bool":
        return None
    if field.choices:
        return "|".join(map(str, field.choices))
    if field.unit is None:
        return "TEXT"
    return {"": "NUMBER", "bytes": "SIZE", "of free memory": "SHARE"}.get(field.unit.word, field.unit.word.upper())


def _shown(field: Field) -> str:
    """The default as `--help` shows it; nothing where the text already says what an empty value means."""
    if field.default in (None, "", []):
        return ""
    if field.kind == "bool":
        return "on" if field.default else "off"
    unit = field.unit.word if field.unit else ""
    return f"{field.default >> 20}MiB" if unit == "bytes" else str(field.default)


def _purpose(part: str) -> str:
    text = (PARTS[part].__doc__ or "").split(": ", 1)[1].strip()
    return text[0].upper() + text[1:]


def settings_from(given: Given, config: Path | None) -> Settings:
    """Merge flags, environment and file. Raises ConfigError."""
    file = read_config_file(config) if config else {}
    return load(given, os.environ, file, config.name if config else "file")
