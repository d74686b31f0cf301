"""The laws of the world that concern its callers: what each may be told, and what the server's books must say of it.

Used by `world.play` at the end of a history; the laws are numbered there.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from fakes.runner import Rule
from world.client_side import Answer, oracle, prompts_of
from world.history import Blow, Call, History
from world.runner import PAGE_SIZE

LATER = (429, 503)
DEATH_CODES = ("engine_dead", "shutdown", "starting", "draining", "server_overloaded")


class ViolationError(AssertionError):
    """A law was broken."""


def demand(holds: bool, law: str) -> None:
    """Raise ViolationError if a law does not hold."""
    if not holds:
        raise ViolationError(law)


@dataclass
class Facts:
    """What befell the system while a history played.

    faults: points that were armed, and other harm by name. absences: [from, to] without an engine. deaths_s: of
    engines. drained_s: when the server was asked to end.
    """

    faults: list[str] = field(default_factory=list)
    absences: list[list[float]] = field(default_factory=list)
    deaths_s: list[float] = field(default_factory=list)
    drained_s: float | None = None

    def note_state(self, state: str, now_s: float) -> None:
        """Note when there is no engine: a call that meets such a time may fail for it."""
        if state == "ready":
            self.absences[-1][1] = now_s
        elif self.absences[-1][1] != math.inf:
            self.absences.append([now_s, math.inf])


class Laws:
    """Judges one history's callers."""

    def __init__(self, history: History, rule: Rule, facts: Facts) -> None:
        self._history = history
        self._rule = rule
        self._facts = facts

    def check_answer(self, answer: Answer) -> None:
        call = answer.call
        answer.understand()
        took_s = answer.ended_s - answer.started_s
        name = f"call {call.seed} ({answer.status}, {answer.code})"
        if answer.status in LATER:
            seconds = answer.headers.get("retry-after", "")
            demand(seconds.isdigit() and 1 <= int(seconds) <= 121, f"{name}: Retry-After is {seconds!r}")
        for branch, text in answer.texts.items():
            self._check_text(answer, branch, text, name)
        if answer.left:
            leaves = call.leaves_s is not None or call.leaves_after is not None or bool(call.leaves_in)
            demand(leaves, f"{name}: was left alone")
            return
        if not answer.closed:
            demand(call.stops_after is not None, f"{name}: the answer never ended")
            return
        if call.deadline_s is not None and self._is_punctual(call):
            limit_s = max(call.deadline_s, call.body_s + self._history.setting.thread_s) + self._late_s
            demand(took_s <= limit_s, f"{name}: took {took_s:.3f} s of {call.deadline_s}")
        if answer.served:
            demand(
                sorted(answer.reasons) == list(range(call.n * len(prompts_of(call)))),
                f"{name}: ended choices {answer.reasons}",
            )
        else:
            demand(self._has_cause(answer), f"{name}: there is no cause for this; {answer.message}")

    def _is_punctual(self, call: Call) -> bool:
        """Whether nothing in this history may delay the end of a call beyond its deadline."""
        kinds = {event.kind for event in self._history.events if isinstance(event, Blow)}
        slow = bool(kinds & {"freeze", "stall", "slow_link", "no_start", "hang_load", "slow_load"})
        return not slow and not call.read_s and call.stops_after is None

    @property
    def _late_s(self) -> float:
        """A deadline is seen at the next step; its news travels to the caller. A failed step is computed in halves."""
        setting = self._history.setting
        fails = any(not isinstance(e, Call) or e.spoil == "raise" for e in self._history.events)
        num_steps = 3 + (2 * setting.max_num_seqs if fails else 0)
        return num_steps * setting.step_s + 4 * setting.latency_s + 0.05

    def _check_text(self, answer: Answer, branch: int, text: str, name: str) -> None:
        call = answer.call
        tokens, wanted, reason = oracle(call, branch, self._rule, self._history.setting.max_model_len)
        if branch not in answer.reasons:
            demand(wanted.startswith(text), f"{name}/{branch}: {text!r} is no beginning of {wanted!r}")
        elif (text, answer.reasons[branch]) != (wanted, reason):
            capacity = (self._history.setting.num_pages - 1) * PAGE_SIZE
            num_prompt = len(prompts_of(call)[branch // call.n])
            filled = num_prompt + len(tokens) >= capacity and wanted.startswith(text)
            cut = filled and answer.reasons[branch] == "length"
            demand(cut, f"{name}/{branch}: {text!r} {answer.reasons[branch]}, should be {wanted!r} {reason}")

    def _has_cause(self, answer: Answer) -> bool:
        """Whether the history explains why this call was not served."""
        call, code = answer.call, answer.code or ""
        absent = any(begun <= answer.ended_s and answer.started_s <= ended for begun, ended in self._facts.absences)
        drained = self._facts.drained_s is not None and answer.ended_s >= self._facts.drained_s
        took_s = answer.ended_s - answer.started_s
        match code:
            case "deadline_exceeded":
                return call.deadline_s is not None and took_s >= call.deadline_s - 1e-6
            case "deadline_unreachable":
                return call.deadline_s is not None
            case "invalid_api_key":
                return call.tenant < 0
            case "model_not_found":
                return call.bad == "model"
            case "context_length_exceeded":
                return len(call.prompt) + call.max_tokens > self._history.setting.max_model_len
            case "exceeds_page_pool":
                return len(call.prompt) >= (self._history.setting.num_pages - 1) * PAGE_SIZE
            case "quarantined":
                return self._died_twice(call)
            case "numerical_error":
                return call.spoil == "nan"
            case "step_failed":
                return call.spoil == "raise" or any(point.startswith("runner.") for point in self._facts.faults)
            case "slow_reader":
                return bool(call.read_s) or call.stops_after is not None
            case "share_of_queue_full":
                return self._history.setting.policy == "fair"
            case "queue_full":
                return True  # the bound is checked after each turn; see also the overload test
            case "answer_lost":
                return "garble" in self._facts.faults
            case "engine_error":
                return "engine.add.before_queue" in self._facts.faults
            case "internal_error":
                return "client.before_send" in self._facts.faults
            case _ if code in DEATH_CODES:
                return absent or drained or "sigterm" in self._facts.faults
        return bool(call.bad) and answer.status == 400

    def _died_twice(self, call: Call) -> bool:
        return len(self._facts.deaths_s) >= 2

    def check_counts(self, answers: list[Answer], books: Counter[str]) -> None:
        """The server's figures against what the callers saw. Who left may be booked as anything, but once."""
        own = [answer for answer in answers if answer.call.tenant >= 0]
        draining = [answer for answer in own if answer.status == 503 and answer.code == "draining"]
        refused_early = [answer for answer in draining if answer.message.startswith("The server")]
        num_left = sum(not answer.closed for answer in own)
        seen = Counter(ending_of(answer) for answer in own if answer.closed)
        drained_s = self._facts.drained_s
        refused_nobody = [a for a in own if a.status is None and drained_s is not None and a.ended_s >= drained_s]
        low, high = len(own) - len(refused_early) - len(refused_nobody), len(own)
        demand(low <= books["received"] <= high, f"{books['received']} received, {low} to {high} were sent")
        demand(books["in_flight"] == 0, f"{books['in_flight']} are in flight at the end")
        served = books["stop"] + books["length"]
        demand(
            seen["served"] <= served <= seen["served"] + num_left,
            f"{served} served by the books, {seen['served']} by those who stayed; {books} {seen}",
        )
        demand(books["deadline"] >= seen["expired"], f"{books} {seen}: deadlines")
        demand(books["abort"] <= num_left, f"{books} {seen}: aborted without a client that left")


def ending_of(answer: Answer) -> str:
    """served, refused, expired, left or failed."""
    if not answer.closed or answer.left:
        return "left"
    if answer.code is None:
        return "served"
    if answer.code == "deadline_exceeded":
        return "expired"
    begun = any(answer.texts.values())
    refused = answer.status in (400, 401, 404, 429, 503) or (answer.status == 200 and answer.code in DEATH_CODES)
    return "refused" if refused and not begun else "failed"
