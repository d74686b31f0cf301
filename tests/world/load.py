"""Overload and fairness on virtual time (F14, F15): the whole system under far more than it can do.

Figures are exact, as nothing is measured: a step takes STEP_S, whatever the machine that runs the test does.
"""

import random

import msgspec

from world.client_side import Answer
from world.history import Call, History, Setting, on_grid
from world.play import Outcome, play

STEP_S = 0.05
NUM_ROWS = 8
ANSWER_TOKENS = 8
PROMPT_TOKENS = 4
CAPACITY_PER_S = NUM_ROWS / (ANSWER_TOKENS * STEP_S)
"""Answers a second if every row computes in every step; prompts cost a little more."""
QUEUE = 128
SETTING = Setting(
    num_pages=100, max_num_seqs=NUM_ROWS, max_num_batched_tokens=40, max_model_len=24, max_queued_requests=QUEUE,
    policy="fair", step_s=STEP_S, latency_s=0.001, start_s=0.0,
)  # fmt: skip


def traffic(seed: int, times: float, span_s: float, *, tenant: int = 0, deadline_share: float = 0.0) -> list[Call]:
    """Calls at random moments, `times` the capacity; some with a deadline that only an empty queue could meet."""
    rnd = random.Random(f"load {seed} {tenant}")
    calls = []
    for index in range(round(times * CAPACITY_PER_S * span_s)):
        calls.append(
            Call(
                at_s=on_grid(rnd.uniform(0, span_s)),
                seed=rnd.randrange(1 << 30) * 65536 + index * 4 + tenant,
                prompt=[rnd.randrange(20) for _ in range(PROMPT_TOKENS)],
                tenant=tenant,
                max_tokens=rnd.randint(ANSWER_TOKENS - 2, ANSWER_TOKENS + 2),
                ignore_eos=True,
                deadline_s=1.0 if rnd.random() < deadline_share else None,
            )
        )
    return calls


def run(seed: int, *crowds: list[Call], **changes: object) -> Outcome:
    """Play these crowds together."""
    events = sorted((call for crowd in crowds for call in crowd), key=lambda call: call.at_s)
    setting = msgspec.structs.replace(SETTING, **changes)
    return play(History(seed=seed, setting=setting, events=list(events)))


def goodput(answers: list[Answer], begun_s: float, ended_s: float) -> float:
    """Answers served a second, of those that ended between two moments."""
    return sum(a.served and begun_s <= a.ended_s < ended_s for a in answers) / (ended_s - begun_s)


def half_queue_s(answers: list[Answer], at_s: float) -> float:
    """How long it took from a moment until half a full queue had been served."""
    later = sorted(a.ended_s for a in answers if a.served and a.ended_s > at_s)
    return later[QUEUE // 2 - 1] - at_s if len(later) >= QUEUE // 2 else float("inf")


def first_text_s(answer: Answer) -> float:
    """Seconds until the first event came."""
    return (answer.first_s or answer.ended_s) - answer.started_s
