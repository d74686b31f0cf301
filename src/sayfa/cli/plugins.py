"""`sayfa plugins`: what can be named in settings and checkpoints, and where each comes from. It loads none of them."""

from sayfa.base.registry import Plugin, Registry
from sayfa.hub import ALIASES, DOWNLOADERS
from sayfa.models import MODELS
from sayfa.runner.executors import EXECUTORS

KINDS: tuple[tuple[str, Registry], ...] = (
    ("model families", MODELS),
    ("executors", EXECUTORS),
    ("model sources", DOWNLOADERS),
)


def print_plugins() -> int:
    """Print the table on stdout."""
    for title, registry in KINDS:
        print(f"{title} (entry-point group {registry.kind!r})")
        for plugin in registry.plugins():
            print(_line(plugin))
    print("model aliases")
    for alias, package in ALIASES.items():
        print(f"  {alias:<14} package {package}")
    return 0


def _line(plugin: Plugin) -> str:
    return f"  {plugin.name:<14} {plugin.target:<44} {plugin.origin}"
