"""Names lead to objects; ours first, nothing is imported before it is named, unknown names are answered helpfully."""

import sys
from importlib import metadata

import pytest

from sayfa.base.errors import ConfigError
from sayfa.base.registry import Plugin, Registry


@pytest.fixture
def foreign(monkeypatch):
    """Two entry points as if another distribution were installed."""
    points = [
        metadata.EntryPoint("theirs", "fractions:Fraction", "sayfa.things"),
        metadata.EntryPoint("ours", "no.such.module:evil", "sayfa.things"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: [p for p in points if p.group == group])


def test_a_name_is_imported_only_when_it_is_asked_for():
    sys.modules.pop("colorsys", None)
    registry = Registry("sayfa.things", {"color": "colorsys:rgb_to_hsv"})
    registry.plugins()
    assert "colorsys" not in sys.modules
    assert registry.get("color")(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)


@pytest.mark.usefixtures("foreign")
def test_entry_points_are_found_and_cannot_take_the_place_of_ours():
    registry = Registry("sayfa.things", {"ours": "math:pi"})
    assert registry.names() == ["ours", "theirs"]
    assert registry.plugins()[0] == Plugin("sayfa.things", "ours", "math:pi", "sayfa")
    assert registry.get("ours") > 3
    assert registry.get("theirs")(1, 2) == 0.5


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize(("name", "hint"), [("our", "Did you mean 'ours'"), ("zzz", "known: ours, theirs")])
def test_an_unknown_name_is_answered_with_the_known_and_the_nearest(name, hint):
    with pytest.raises(ConfigError, match=hint):
        Registry("sayfa.things", {"ours": "math:pi"}).get(name)


@pytest.mark.parametrize("target", ["no.such.module:x", "math:no_such_name"])
def test_a_name_that_cannot_be_loaded_says_from_where(target):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Registry("sayfa.things", {"broken": target}).get("broken")
