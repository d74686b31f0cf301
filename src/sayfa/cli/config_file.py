"""Reads a YAML file of settings as a flat mapping of texts and lists of texts.

Called by `options`. Each value stays as it is written, as those of flags and variables do: what is a number or a switch
is known to `base.settings`. Refuses what a settings file has no use for: keys that stand twice, aliases, tags, nesting,
files over 1 MiB. Knows no setting's name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sayfa.base.errors import ConfigError
from sayfa.base.faults import fault

MAX_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """YAML's plain subset: no aliases, no tags, no keys that stand twice, and no type but text, lists and mappings."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases before they can multiply, and tags: they build what no setting is."""
        parser: Any = self  # the stubs know no types of the parser's part
        event = parser.peek_event()
        used = "aliases" if self.check_event(yaml.events.AliasEvent) else "tags" if event.tag is not None else ""
        if used:
            raise yaml.constructor.ConstructorError(None, None, f"{used} are not used here", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice; plain YAML would take the last one in silence."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key_node.value in seen:
                problem = f"key {key_node.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# YAML would make 305441741 out of the key 0x1234abcd, 1.1 out of the name 1.10 and True out of the name yes. Only an
# empty value and `~` are more than text: they are none.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_config_file(path: Path) -> Mapping[str, Any]:
    """The file's keys and values. Raises ConfigError naming the file and, where there is one, the line."""
    try:
        fault("settings.read")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # no size is asked for: a pipe or a device has none
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path.name}: larger than {MAX_BYTES >> 20} MiB; is this a settings file?")
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path.name}: not UTF-8 text") from None
    try:
        settings = _load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ConfigError(f"{path.name}, line {mark.line + 1 if mark else '?'}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path.name}: {error}") from None
    except (ValueError, OverflowError):  # of `chr`, which the library calls unguarded
        raise ConfigError(f"{path.name}: an escape in a quoted text names no character") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path.name}: holds a {type(settings).__name__}; it must hold `key: value` lines")
    return settings


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
