"""What histories led to, counted by kind: proof that the worlds visit what they are for.

Used by `world.play`, which notes things as they happen, and by the test that fails when one of WANTED never does.
"""

from collections import Counter
from typing import Any

from sayfa.core.sequence import Sequence, Status
from world.history import PHASES, Call

WANTED = (
    *(f"left while {phase}" for phase in ("connecting", *PHASES, "leaving")),
    "calls at the same moment", "one prompt token", "a prompt over pages", "a prompt in pieces", "several prompts",
    "branches that share pages", "a cached beginning", "cached pages forgotten on demand",
    "preempted on demand", "preempted for pages",
    "paused with its pages", "paused without pages", "a reader given up",
    "a stop string", "a stop token", "a full length",
    "expired in the queue", "expired while it ran", "refused for a full queue", "refused for good", "a wrong key",
    "numbers that are not finite", "a step that failed", "a retry",
    "death while loading", "death of an idle engine", "death of a busy engine", "engine given up",
    "a load that hung", "a slow load", "an unreadable message",
    "calendar forward", "calendar back", "a standstill of all", "a standstill of the engine", "a slow link",
    "a log line lost to a full disk", "drained with work", "engine told to end",
)  # fmt: skip


class Seen(Counter[str]):
    """Counts by name; a name that is not WANTED is a mistake."""

    def note(self, name: str, times: int = 1) -> None:
        if name not in WANTED:
            raise KeyError(f"{name!r} is not among the things that worlds are for")
        if times:
            self[name] += times

    def note_call(self, call: Call) -> None:
        """What a call brings along."""
        self.note("one prompt token", len(call.prompt) == 1)
        self.note("a prompt over pages", len(call.prompt) > 8)
        self.note("several prompts", bool(call.more))
        self.note("a wrong key", call.tenant < 0)

    def note_turn(self, scheduler: Any, forced: int) -> None:
        """What an engine holds after a turn. forced: preemptions that the history asked for."""
        for sequence in scheduler._roster.running:
            self.note("a prompt in pieces", 0 < sequence.computed < sequence.num_prompt and not sequence.preempted)
        self.note("paused with its pages", len(scheduler._roster.held))
        self.note("paused without pages", len(scheduler._roster.parked))
        self.note("branches that share pages", scheduler.cache.pool.num_shares)
        self.note("a cached beginning", scheduler._planner.prefix_hits > 0)
        self.note("preempted for pages", scheduler._roster.num_preemptions > forced)

    def note_answer(self, answer: Any) -> None:
        """How a call ended."""
        code, call = answer.code, answer.call
        self.note("expired while it ran", code == "deadline_exceeded" and any(answer.texts.values()))
        self.note("expired in the queue", code == "deadline_exceeded" and not any(answer.texts.values()))
        self.note("refused for a full queue", code in ("queue_full", "share_of_queue_full"))
        self.note("refused for good", code in ("context_length_exceeded", "exceeds_page_pool"))
        self.note("numbers that are not finite", code == "numerical_error")
        self.note("a step that failed", code == "step_failed")
        self.note("an unreadable message", code == "answer_lost")
        stopped_reading = call.stops_after is not None and not answer.closed and call.leaves_s is None
        self.note("a reader given up", code == "slow_reader" or stopped_reading)
        reasons = list(answer.reasons.values())
        self.note("a full length", "length" in reasons)
        self.note("a stop string", "stop" in reasons and bool(call.stop))
        self.note("a stop token", "stop" in reasons and bool(call.stop_ids))


def phase_of(branches: list[Sequence], in_text_work: bool) -> str:
    """Say which of PHASES a request is in whose body was read, or "leaving" if the engine is done with it.

    branches: its sequences in the engine, none if it is not there.
    """
    alive = [branch for branch in branches if branch.status is not Status.FINISHED]
    if not alive:
        return "tokenizing" if in_text_work else "leaving"
    if any(branch.preempted and branch.row < 0 for branch in alive):
        return "preempted"
    if any(branch.computed >= branch.num_prompt for branch in alive):
        return "decode"
    return "prefill" if any(branch.row >= 0 for branch in alive) else "queued"
