"""After a death: back-off and its end, and who is refused; all on a clock of the test."""

import random

import pytest

from sayfa.base.clock import FakeClock
from sayfa.base.errors import InvalidRequest
from sayfa.base.messages import Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.wire.supervisor import (
    MAX_REMEMBERED,
    MAX_RESTARTS,
    QUARANTINE_S,
    RESTART_WINDOW_S,
    Quarantine,
    RestartPolicy,
    ending_words,
)


def request(name, *prompt, **params):
    return Request(id=name, prompt=list(prompt), params=SamplingParams(**params))


def test_back_off_doubles_and_the_sixth_death_in_five_minutes_is_the_last():
    policy = RestartPolicy(FakeClock())
    assert [policy.next_delay_s() for _ in range(MAX_RESTARTS + 2)] == [0.0, 1.0, 2.0, 4.0, 8.0, None, None]


def test_deaths_further_apart_than_the_window_are_always_forgiven():
    clock = FakeClock()
    policy = RestartPolicy(clock)
    for _ in range(50):
        assert policy.next_delay_s() == 0.0
        policy.note_ready()
        clock.advance(RESTART_WINDOW_S + 1)


@pytest.mark.parametrize("seed", range(50))
def test_never_more_than_five_restarts_in_any_window(seed):
    rng = random.Random(seed)
    clock, starts = FakeClock(), []
    policy = RestartPolicy(clock)
    for _ in range(100):
        clock.advance(rng.expovariate(1 / 40))
        if policy.next_delay_s() is not None:
            starts.append(clock.monotonic())
        if rng.random() < 0.7:
            policy.note_ready()
    assert len(starts) > MAX_RESTARTS
    for index in range(len(starts) - MAX_RESTARTS):
        assert starts[index + MAX_RESTARTS] - starts[index] > RESTART_WINDOW_S


def test_the_sixth_start_in_a_row_that_serves_nobody_is_the_last_however_long_each_takes():
    clock = FakeClock()
    policy = RestartPolicy(clock)
    delays = []
    for _ in range(MAX_RESTARTS + 1):
        clock.advance(2 * RESTART_WINDOW_S)
        delays.append(policy.next_delay_s())
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, None]
    policy.note_ready()
    clock.advance(2 * RESTART_WINDOW_S)
    assert policy.next_delay_s() == 0.0


def test_the_calendar_does_not_matter():
    clock = FakeClock()
    policy = RestartPolicy(clock)
    policy.next_delay_s()
    clock.jump_wall(1e9)
    assert policy.next_delay_s() == 1.0
    clock.jump_wall(-2e9)
    assert policy.next_delay_s() == 2.0


def test_who_runs_at_two_deaths_in_a_row_is_refused_for_an_hour_under_any_id():
    clock = FakeClock()
    quarantine = Quarantine(clock)
    quarantine.note_death([request("a", 1, 2), request("b", 3)])
    assert quarantine.remaining_s(request("a", 1, 2)) == 0.0
    quarantine.note_death([request("again", 1, 2), request("c", 4)])
    assert quarantine.remaining_s(request("third", 1, 2)) == QUARANTINE_S
    for innocent in (request("b", 3), request("c", 4), request("d", 1, 2, temperature=0.5), request("e", 1)):
        assert quarantine.remaining_s(innocent) == 0.0
    clock.advance(QUARANTINE_S - 1)
    assert quarantine.remaining_s(request("third", 1, 2)) == 1.0
    clock.advance(1)
    assert quarantine.remaining_s(request("third", 1, 2)) == 0.0


def test_a_death_between_clears_the_suspicion_and_an_idle_death_does_not():
    quarantine = Quarantine(FakeClock())
    guilty = request("g", 1)
    quarantine.note_death([guilty])
    quarantine.note_death([request("other", 2)])
    quarantine.note_death([guilty])
    assert quarantine.remaining_s(guilty) == 0.0
    quarantine.note_death([])  # nothing ran: tells nothing about anybody
    quarantine.note_death([guilty])
    assert quarantine.remaining_s(guilty) > 0.0


def test_the_memory_of_deaths_is_bounded():
    quarantine = Quarantine(FakeClock())
    for start in range(0, 4 * MAX_REMEMBERED, MAX_REMEMBERED):
        crowd = [request("x", start + i) for i in range(MAX_REMEMBERED)]
        quarantine.note_death(crowd)
        quarantine.note_death(crowd)
    assert len(quarantine._refused_until) <= MAX_REMEMBERED


def test_who_is_found_guilty_again_pushes_nobody_out() -> None:
    quarantine = Quarantine(FakeClock())
    crowd = [request("x", i) for i in range(MAX_REMEMBERED)]
    for guilty in (crowd, crowd, crowd[1:2], crowd[1:2]):
        quarantine.note_death(guilty)
    assert all(quarantine.remaining_s(one) > 0 for one in crowd)


@pytest.mark.parametrize(("left_s", "told"), [(QUARANTINE_S, 60), (61.0, 2), (60.0, 1), (1.0, 1)])
def test_a_refusal_says_for_how_long_and_never_for_no_time(left_s: float, told: int) -> None:
    clock = FakeClock()
    quarantine = Quarantine(clock)
    for _ in range(2):
        quarantine.note_death([request("a", 1)])
    clock.advance(QUARANTINE_S - left_s)
    with pytest.raises(InvalidRequest, match=f"it is refused for another {told} min"):
        quarantine.check(request("b", 1))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (None, "exit code None"),
        (-9, "killed by signal 9, SIGKILL: often the system, out of memory"),
        (-11, "killed by signal 11, SIGSEGV"),
        (-40, "killed by signal 40"),
    ],
)
def test_an_ending_is_told_in_words(code, words):
    assert ending_words(code) == words
