"""T33; F14, F15, F16 on live processes, in `make test-all`: what `pressure.py` finds broken, shorter than its own runs.

Figures in wall time mean something on a quiet machine only; test_world_load has the same on virtual time.
"""

import asyncio
from typing import Any

import psutil
import pytest
from pressure import drain, fairness, overload, refusals, running

TIMED = {"refusals p99 < 50 ms", "b's p99 first token <= 2x alone + a step", "readiness is red within 100 ms",
         "the end comes within a second of the last stream", "a second signal ends it within two seconds"}  # fmt: skip
"""What a busy machine breaks; `pressure.py` judges it all the same."""
MISSED = {"p99 between tokens <= 1.2x alone"}
"""Broken on a quiet machine, too, at times: 1.08 to 1.28. docs/threat-model.md says so under what is not promised."""


def judge(figures: dict[str, Any]) -> None:
    broken = set(figures["broken"]) - TIMED - MISSED
    assert not broken, figures


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_f14_r05_overload_serves_as_much_as_ever_and_refuses_truly() -> None:
    judge(asyncio.run(overload(20.0)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_f15_r06_equal_keys_have_equal_shares_and_a_flood_ends_nobody_s_service() -> None:
    judge(asyncio.run(fairness(10.0)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_f16_r08_sigterm_under_64_streams_cuts_none() -> None:
    judge(asyncio.run(drain(2)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_f13_streams_beside_hostile_requests_go_on() -> None:
    judge(asyncio.run(refusals(10.0)))


def test_t33_nothing_listens_but_the_port() -> None:
    """Of the sockets of the server and its engine process one takes connections: the one that was asked for."""
    with running() as server:
        processes = [server.process, *psutil.Process(server.process.pid).children(recursive=True)]
        inet = [(process.pid, each) for process in processes for each in process.net_connections("inet")]
        listening = [(pid, each.laddr.port) for pid, each in inet if not each.raddr]
        named = [each.laddr for process in processes for each in process.net_connections("unix") if each.laddr]
    assert len(processes) == 2
    assert listening == [(processes[0].pid, server.port)], "more listens than the port"
    assert not named, "a socket can be found by its name"
