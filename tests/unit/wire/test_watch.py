"""Whether an engine gets on: slow told from stuck, a long load from one that hangs; on a clock of the test."""

import os
import subprocess
import sys

import pytest

from sayfa.base.clock import FakeClock
from sayfa.base.messages import Pong
from sayfa.wire.link import EngineProcess
from sayfa.wire.watch import (
    LEAST_CPU_S,
    LOAD_MUTE_S,
    LOAD_STALLED_S,
    LOAD_STUCK_S,
    PING_INTERVAL_S,
    Signs,
    Watch,
    judge_load,
    judge_stall,
)

HOURS = 3600


@pytest.mark.parametrize(("since_s", "busy", "expected_s", "verdict"), [
    (1e6, False, 0.01, "moving"),  # an idle engine owes nothing
    (9.0, True, 0.01, "moving"),
    (11.0, True, 0.01, "stalled"),
    (121.0, True, 0.01, "stuck"),
    (121.0, True, 5.0, "stalled"),  # a slow machine: 24 expected steps
    (90.0, True, 5.0, "moving"),
    (3599.0, True, 0.0, "stalled"),  # the first step may take an hour
    (3601.0, True, 0.0, "stuck"),
])  # fmt: skip
def test_slow_is_told_from_stuck_by_the_expected_step(since_s, busy, expected_s, verdict):
    assert judge_stall(since_s, busy, expected_s) == verdict


@pytest.mark.parametrize(("told_s", "sign_s", "verdict"), [
    (LOAD_STALLED_S, LOAD_STALLED_S, "moving"),
    (1000.0, 1.0, "moving"),  # it reads or computes
    (1.0, 1000.0, "moving"),  # it tells of phases
    (LOAD_STALLED_S + 1, LOAD_STALLED_S + 1, "stalled"),
    (LOAD_STUCK_S + 1, LOAD_STUCK_S + 1, "stuck"),
    (LOAD_MUTE_S + 1, 0.0, "stuck"),  # it computes for ever and comes to nothing
])  # fmt: skip
def test_a_load_is_judged_by_its_silence(told_s, sign_s, verdict):
    assert judge_load(told_s, sign_s) == verdict


class Load:
    """A load on a clock of its own, looked at each second as the client does."""

    def __init__(self):
        self.clock = FakeClock()
        self.watch = Watch(self.clock)
        self.watch.note_start()

    def acts_after(self, seconds, signs=lambda second: Signs(0.0, 0)):
        """Look each second; return what was to be done but waiting, up to the end of the process."""
        acts = []
        for second in range(int(seconds / PING_INTERVAL_S)):
            self.clock.advance(PING_INTERVAL_S)
            self.watch.awake.tick()
            act, self.finding = self.watch.look_at_load(signs(second))
            acts += [act] if act != "wait" else []
            if act == "end":
                break
        return acts


def test_a_load_that_does_nothing_is_stuck_after_two_minutes_and_named():
    load = Load()
    load.watch.note_phase("pack", 0.0)
    assert load.acts_after(LOAD_STUCK_S - 1) == ["ask"]
    assert load.acts_after(5) == ["end"]
    assert load.finding == "tells of no progress in loading for 121 s (in pack)"


def test_a_large_model_on_a_slow_disk_may_load_for_hours_if_phases_are_told():
    load = Load()
    for part in range(200):
        load.watch.note_phase("read", part / 200)
        assert load.acts_after(LOAD_STUCK_S - 2, lambda second: Signs(0.0, second << 16)) == []


def test_one_phase_of_which_nothing_is_told_goes_on_while_bytes_come_from_the_disk():
    load = Load()
    slow = lambda second: Signs(0.0, second // 100 * 4096)  # noqa: E731 - a page in a hundred seconds
    assert set(load.acts_after(LOAD_MUTE_S - 2, slow)) == {"ask"}


def test_computing_is_a_sign_of_life_and_polling_is_none():
    assert Load().acts_after(LOAD_MUTE_S - 2, lambda second: Signs(second * LEAST_CPU_S * 1.1, 0)) == []
    assert Load().acts_after(LOAD_STUCK_S + 5, lambda second: Signs(second * LEAST_CPU_S * 0.9, 0))[-1:] == ["end"]


def test_whoever_computes_for_ever_and_tells_nothing_is_stuck_too():
    assert Load().acts_after(LOAD_MUTE_S + 5, lambda second: Signs(float(second), 0))[-1:] == ["end"]


def test_where_the_kernel_tells_nothing_only_the_long_limit_holds():
    assert Load().acts_after(LOAD_MUTE_S - 2, lambda second: None) == []
    assert Load().acts_after(LOAD_MUTE_S + 5, lambda second: None)[-1:] == ["end"]


def test_the_same_news_again_is_no_progress():
    load = Load()
    for _ in range(int(LOAD_STUCK_S)):
        load.watch.note_phase("pack", 0.5)
        load.acts_after(1)
    assert load.acts_after(5)[-1:] == ["end"]


def test_the_silence_of_an_earlier_process_does_not_count():
    load = Load()
    assert load.acts_after(LOAD_STUCK_S + 5)[-1:] == ["end"]
    load.watch.note_start()
    assert load.acts_after(LOAD_STALLED_S) == []


def test_a_standstill_of_our_own_is_nobodys_silence():
    load = Load()
    load.acts_after(10)
    load.clock.advance(10 * HOURS)
    assert load.acts_after(5) == []


def test_a_pong_without_new_steps_is_no_progress_unless_nothing_is_owed():
    load = Load()
    for _ in range(20):
        load.acts_after(1)
        load.watch.note_pong(Pong(number=1, steps=7, since_step_s=0.0, busy=True, expected_step_s=0.1))
    assert load.watch.health(alive=True, waiting=False).since_step_s == pytest.approx(19.0)
    load.watch.note_pong(Pong(number=2, steps=7, since_step_s=50.0, busy=False, expected_step_s=0.1))
    assert load.watch.health(alive=True, waiting=False).since_step_s == 0.0


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="this system has no /proc/PID/io")
def test_the_kernel_tells_what_a_process_computes():
    program = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        process = EngineProcess(child, None)
        try:
            before = after = process.signs()
            while after.cpu_s < before.cpu_s + 2 * LEAST_CPU_S:
                after = process.signs()
            assert after.read_bytes >= before.read_bytes >= 0
        finally:
            process.kill()
            child.wait()
        assert process.signs() is None
