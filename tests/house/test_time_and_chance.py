"""Nobody asks the time or draws a number by himself: clock and randomness are handed in, so that one seed is one world.

The few places that may are listed with their reason; a place that is listed and does not need it any more fails too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from house import source

ALLOWED = {
    "base/clock.py": "it is where the time is asked",
    "engine/__main__.py": "times the imports, before anything of ours can be imported",
    "bench/client.py": "measures a real server from outside",
    "bench/launch.py": "waits for a real process",
    "bench/load.py": "measures a real server from outside",
    "text/chat_template.py": "a chat template may print today's date",
    "cli/show.py": "bounds how often a person's screen is written",
}
TIME = {"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "sleep"}
CHANCE = {"urandom", "getrandom", "uuid1", "uuid4", "token_hex", "token_bytes", "token_urlsafe"}
MODULES = {"time": TIME, "os": CHANCE, "uuid": CHANCE, "secrets": CHANCE}
OWN_GENERATORS = {"Random", "SystemRandom"}


def time_and_chance(path: Path, tree: ast.AST) -> Iterator[str]:
    """Uses of the machine's time or of shared randomness. A generator of one's own (random.Random) may be made."""
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            shared = owner == "random" and name not in OWN_GENERATORS
            if name in MODULES.get(owner, ()) or shared or (owner in ("datetime", "date") and name in ("now", "today")):
                found = f"{owner}.{name}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "random", "uuid", "secrets"):
            names = [alias.name for alias in node.names if alias.name not in OWN_GENERATORS]
            found = f"from {node.module} import {', '.join(names)}" if names else None
        if found is not None:
            yield f"{source.name(path)}:{node.lineno}: {found}"


def test_clock_and_randomness_are_handed_in() -> None:
    findings = [finding for path, tree in source.files() for finding in time_and_chance(path, tree)]
    strangers = [finding for finding in findings if finding.partition(":")[0] not in ALLOWED]
    assert not strangers, "hand a Clock or a random.Random in:\n" + "\n".join(strangers)
    used = {finding.partition(":")[0] for finding in findings}
    assert used == set(ALLOWED), f"no longer needed in the list: {set(ALLOWED) - used}"


@pytest.mark.parametrize(
    "code",
    ["time.time()", "time.sleep(1)", "x = time.monotonic", "random.random()", "random.shuffle(x)",
     "uuid.uuid4()", "os.urandom(8)", "secrets.token_hex()", "from time import monotonic", "from random import choice",
     "datetime.now()"],
)  # fmt: skip
def test_the_rule_finds(code: str) -> None:
    assert list(time_and_chance(Path("bad.py"), ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["random.Random(1)", "from random import Random", "clock.monotonic()", "rng.random()", "time.strftime('%H')"],
)
def test_the_rule_leaves_alone(code: str) -> None:
    assert not list(time_and_chance(Path("good.py"), ast.parse(code)))
