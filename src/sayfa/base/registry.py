"""Find an object by its name: a table of our own names, and entry points of others.

A kind ("sayfa.models", "sayfa.executors", ...) has one `Registry`. Values are lazy "module:attribute" strings, so
nothing is imported until a setting names it; an entry point that merely happens to be installed never runs. Called by
the rooms that own a kind and by `sayfa plugins`; must not know what the objects do.
"""

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sayfa.base.errors import ConfigError


class Plugin(NamedTuple):
    """Where a name comes from: `target` is "module:attribute", `origin` "sayfa" or a distribution's name."""

    kind: str
    name: str
    target: str
    origin: str


class Registry:
    """Names of one kind. Names of ours win over entry points of the same name, so that nobody can replace a part
    unseen.
    """

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        """Take the kind, which is also the entry-point group, and our own table of "module:attribute" by name."""
        self.kind = kind
        self._table = dict(table)

    def plugins(self) -> list[Plugin]:
        """List every known name with its origin, ours first. Imports none of them."""
        own = [Plugin(self.kind, name, target, "sayfa") for name, target in sorted(self._table.items())]
        return own + sorted(plugin for plugin in self._foreign() if plugin.name not in self._table)

    def names(self) -> list[str]:
        """List the names that `get` takes."""
        return [plugin.name for plugin in self.plugins()]

    def get(self, name: str) -> Any:
        """Import and return the object called `name`. Raises ConfigError with the known names and the nearest."""
        target = self._table.get(name)
        if target is None:
            target = next((plugin.target for plugin in self._foreign() if plugin.name == name), None)
        if target is None:
            raise ConfigError(unknown_name(self.kind.removeprefix("sayfa."), name, self.names()))
        module_name, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.kind} {name!r} cannot be loaded from {target!r}: {error}") from error

    def _foreign(self) -> Iterator[Plugin]:
        from importlib import metadata  # 30 ms that a process which only uses our own names need not spend

        for point in metadata.entry_points(group=self.kind):
            origin = point.dist.name if point.dist is not None else "unknown"
            yield Plugin(self.kind, point.name, point.value, origin)


def unknown_name(what: str, name: str, known: list[str]) -> str:
    """Say that `name` is not known, which names are, and which one was probably meant."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}; known: {', '.join(known) or 'none'}.{hint}"
