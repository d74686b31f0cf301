"""What the server tells of its engine's deaths: each start after one is counted, and its return is told."""

import logging
from types import SimpleNamespace

import pytest

from fakes.client import FakeEngineClient
from sayfa.base.clock import FakeClock
from sayfa.base.config import ServerOptions
from sayfa.base.messages import Failed
from sayfa.server.context import ServerContext
from sayfa.server.serve import Ending
from sayfa.wire.client import ClientState


class Life:
    """A server of which the engine lives and dies as it is told, on a clock of the test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.client = FakeEngineClient()
        self.context = ServerContext(self.client, None, ServerOptions(), ["m"], "0", clock=self.clock)
        server = SimpleNamespace(should_exit=False)
        self.ending = Ending(server, self.client, self.context)  # type: ignore[arg-type]

    def go_through(self, *states: ClientState, each_s: float = 1.0) -> None:
        for state in states:
            self.clock.advance(each_s)
            self.client.state = state
            self.ending.engine_changed(state)

    @property
    def restarts(self) -> float:
        lines = self.context.metrics.render().decode().splitlines()
        [line] = [line for line in lines if line.startswith("sayfa:engine_restarts_total{")]
        return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("begins", [("ready",), ()], ids=["served before", "never served"])
def test_each_start_after_a_death_is_counted(begins: tuple[ClientState, ...]) -> None:
    """A crash loop shows while it lasts, not when an engine serves again at last."""
    life = Life()
    life.go_through(*begins)
    assert life.restarts == 0
    for number in range(1, 5):
        life.go_through("dead", "starting")
        assert life.restarts == number
    life.go_through("ready")
    assert life.restarts == 4
    life.go_through("draining", "dead")
    assert life.restarts == 4


def test_a_first_start_is_no_restart() -> None:
    life = Life()
    life.go_through("starting", "ready")
    assert life.restarts == 0


def test_that_it_serves_again_is_told_with_the_time_since_the_first_death(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sayfa.server")
    life = Life()
    life.go_through("ready", "dead", "starting", "dead", "starting", "ready", each_s=1.5)
    assert caplog.messages == ["the engine serves again, 6.0 s after it ended"]
    life.go_through("dead", "starting", "ready")
    assert caplog.messages[1:] == ["the engine serves again, 2.0 s after it ended"]


def test_of_a_death_before_it_ever_served_the_report_of_the_start_tells(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sayfa.server")
    Life().go_through("dead", "starting", "ready")
    assert caplog.messages == []


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(
    "words", [("model.gguf: cut off", "model.gguf: cut off"), ("no config.json", "no tokenizer.json")]
)
def test_a_fault_that_both_sides_find_is_told_once(
    caplog: pytest.LogCaptureFixture, order: int, words: tuple[str, str]
) -> None:
    life = Life()
    life.client.failure = Failed(words[0], 2)  # type: ignore[attr-defined]
    ways = [life.ending.engine_failed, lambda: life.ending.fail(2, words[1])]
    for end in ways if order == 0 else ways[::-1]:
        end()
    assert sorted(caplog.messages) == sorted(set(words))
    assert life.ending.exit_code == 2
