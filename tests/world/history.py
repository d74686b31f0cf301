"""What happens in a world, as plain data: who calls when and how, and which blows fall. Made from a seed, or from JSON.

A history decides everything that is not decided by the system under test, so that the same history plays the same
way each time, and a smaller one can be tried. Times are seconds from the start, on a grid, so that things coincide.
"""

import random
from typing import Any

import msgspec

GRID_S = 0.005
NUM_TOKENS = 24
END_TOKEN = NUM_TOKENS - 1
FAULTS = (
    "engine.add.before_queue", "engine.abort", "engine.step.before_decide", "engine.step.before_compute",
    "runner.before_forward", "runner.before_sample", "engine.step.before_update", "engine.step.after_update",
    "process.before_handle", "process.before_send", "client.before_send", "client.before_deliver",
    "client.before_spawn",
)  # fmt: skip
PHASES = ("arriving", "tokenizing", "queued", "prefill", "decode", "preempted", "paused")
"""Where a call can be when its sender hangs up: its body is on its way, becomes ids, waits for its turn, is computed,
has lost its pages, or is not read."""
DECADE_S = 10 * 365.25 * 86400


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="call"):
    """One HTTP request and the behaviour of its sender.

    seed names the call: no two calls of a history share it, except that a retry repeats all of a call. more: further
    prompts of the same request. tenant: number of the key; -1 is a key that is not ours. bad: a field that is set to a
    value nobody may ask for. chat: it is a conversation, which becomes ids on a thread of the server's.
    body_s: how long the body takes to come. read_s: how long each event takes to be read; stops_after: events after
    which nothing is read any more. leaves_s, leaves_after: seconds after the start, or events, after which the sender
    hangs up. spoil: "nan" (its logits are not finite), "raise" (a step with it fails) or "die" (it kills the engine),
    once `spoil_after` tokens of a branch are there.
    """

    at_s: float
    seed: int
    prompt: list[int]
    more: list[list[int]] = []
    tenant: int = 0
    stream: bool = True
    n: int = 1
    max_tokens: int = 8
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = []
    stop_ids: list[int] = []
    priority: int = 0
    salt: str | None = None
    deadline_s: float | None = None
    bad: str = ""
    chat: bool = False
    body_s: float = 0.0
    read_s: float = 0.0
    stops_after: int | None = None
    leaves_s: float | None = None
    leaves_after: int | None = None
    leaves_in: str = ""
    spoil: str = ""
    spoil_after: int = 0


class Blow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="blow"):
    """Something that happens to the system.

    kind: kill, raise, die (at fault point `point`, at its pass number `nth` from now), freeze (the engine process
    stands still for `seconds`), stall (all stands still), wall (the calendar jumps), slow_link, reset_cache, preempt
    (`nth` of the running requests), no_start (the next `nth` engine starts die), hang_load (the engine dies and the
    next `nth` starts hang for ever), slow_load (it dies and the next start takes minutes), full_disk (for `seconds`),
    scrape, garble (the engine sends a message that nobody can read), drain (SIGTERM to the server), sigterm (to the
    engine).
    """

    at_s: float
    kind: str
    seconds: float = 0.0
    point: str = ""
    nth: int = 1


class Setting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The numbers of a world. unread_tokens: what a reader may be behind before its request is paused."""

    num_pages: int = 40
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    max_queued_requests: int = 8
    caching: bool = True
    policy: str = "priority"
    step_s: float = 0.02
    token_s: float = 0.0
    latency_s: float = 0.001
    chop: bool = False
    start_s: float = 0.5
    thread_s: float = 0.0
    unread_tokens: int = 1000


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A whole world before it plays. `seed` feeds the small accidents: where bytes are cut, how latencies vary."""

    seed: int
    setting: Setting
    events: list[Call | Blow]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def from_json(text: str | bytes) -> History:
    """Read a kept history."""
    return msgspec.json.decode(text, type=History)


def random_history(seed: int, *, most_calls: int = 10, blows: tuple[str, ...] | None = None) -> History:
    """Make a history. blows: kinds that may fall; None for all, each with its own weight."""
    rnd = random.Random(f"world {seed}")
    setting = random_setting(rnd)
    span_s = rnd.choice([0.2, 1.0, 3.0])
    calls = [random_call(rnd, index, span_s, setting) for index in range(rnd.randint(2, most_calls))]
    if rnd.random() < 0.3:  # the same question again, as clients do after an error
        first = rnd.choice(calls)
        calls.append(msgspec.structs.replace(first, at_s=first.at_s + on_grid(rnd.uniform(0.1, 4.0))))
    kinds = [kind for kind in KINDS if blows is None or kind in blows]
    falls: list[Call | Blow] = []
    if kinds:
        weights = [KINDS[kind] for kind in kinds]
        for kind in rnd.choices(kinds, weights, k=rnd.choice([0, 1, 1, 2, 3])):
            falls.append(random_blow(rnd, kind, span_s))
    for call in calls:
        if call.leaves_in == "preempted" and "preempt" in kinds:  # it happens to few by itself
            moments = [call.at_s + on_grid(rnd.uniform(0, 0.5)) for _ in range(4)]
            falls += [Blow(at_s=at_s, kind="preempt", nth=rnd.randint(0, 3)) for at_s in moments]
    return History(seed=seed, setting=setting, events=sorted([*calls, *falls], key=lambda event: event.at_s))


def random_setting(rnd: random.Random) -> Setting:
    seqs = rnd.choice([1, 2, 4, 6])
    return Setting(
        num_pages=rnd.choice([8, 12, 20, 40]),
        max_num_seqs=seqs,
        max_num_batched_tokens=rnd.choice([seqs + 2, 12, 24]),
        max_model_len=rnd.choice([28, 40]),
        max_queued_requests=rnd.choice([2, 4, 32]),
        caching=rnd.random() < 0.8,
        policy=rnd.choice(["priority", "fair", "fcfs"]),
        step_s=rnd.choice([0.005, 0.02, 0.1]),
        latency_s=rnd.choice([0.0, 0.001, 0.01]),
        chop=rnd.random() < 0.5,
        start_s=rnd.choice([0.0, 0.3]),
        thread_s=rnd.choice([0.0, 0.01, 0.1]),
        unread_tokens=rnd.choice([1000, 5, 2]),
    )


def random_call(rnd: random.Random, index: int, span_s: float, setting: Setting) -> Call:
    length = rnd.randint(1, 16)
    prompt = [(5 * i) % NUM_TOKENS for i in range(length)]
    for _ in range(rnd.choice([0, 0, 1, 2])):
        prompt[rnd.randrange(length)] = rnd.randrange(NUM_TOKENS)
    leaves = rnd.random()
    slow = rnd.random()
    spoil = rnd.random()
    chat = rnd.random() < 0.2
    return Call(
        at_s=on_grid(rnd.uniform(0, span_s)),
        seed=rnd.randrange(1 << 30) * 64 + index,
        prompt=prompt,
        more=[prompt[: rnd.randint(1, length)], [rnd.randrange(NUM_TOKENS)]]
        if rnd.random() < 0.12 and not chat
        else [],
        tenant=rnd.choice([0, 0, 0, 1, 1, 2, -1]) if rnd.random() < 0.5 else 0,
        stream=rnd.random() < 0.7,
        n=rnd.choice([1, 1, 1, 2, 3]),
        max_tokens=rnd.choice([1, 4, 8, 16, 23]),
        min_tokens=rnd.choice([0, 0, 1]),
        ignore_eos=rnd.random() < 0.3,
        stop=rnd.choice([[], [], ["ab"], ["é"], ["c", "da"]]),
        stop_ids=rnd.choice([[], [], [rnd.randrange(NUM_TOKENS)]]),
        priority=rnd.choice([0, 0, 0, 1, -1]),
        salt=rnd.choice([None, None, "other"]),
        deadline_s=on_grid(rnd.choice([0.05, 0.3, 2.0, 20.0])) if rnd.random() < 0.25 else None,
        bad=rnd.choice(["temperature", "model", "prompt", "n"]) if rnd.random() < 0.08 else "",
        chat=chat,
        body_s=on_grid(rnd.uniform(0, 0.3)) if rnd.random() < 0.1 else 0.0,
        read_s=rnd.choice([0.05, 0.3]) if slow < 0.1 else 0.0,
        stops_after=rnd.randrange(4) if slow > 0.96 else None,
        leaves_s=0.0 if leaves < 0.02 else on_grid(rnd.uniform(0.005, 0.6)) if leaves < 0.12 else None,
        leaves_after=rnd.randint(1, 8) if leaves > 0.95 else None,
        leaves_in=rnd.choice((*PHASES, "preempted")) if 0.8 < leaves <= 0.95 else "",
        spoil="nan" if spoil < 0.06 else "raise" if spoil < 0.12 else "die" if spoil < 0.15 else "",
        spoil_after=rnd.choice([0, 0, 1, 3]),
    )


KINDS: dict[str, float] = {
    "kill": 3, "raise": 3, "die": 3, "freeze": 0.5, "stall": 1, "wall": 2, "slow_link": 1, "reset_cache": 2,
    "preempt": 4, "no_start": 1.5, "full_disk": 1, "scrape": 2, "garble": 1, "drain": 1.5, "sigterm": 0.5,
    "hang_load": 0.7, "slow_load": 0.7,
}  # fmt: skip


def random_blow(rnd: random.Random, kind: str, span_s: float) -> Blow:
    seconds: dict[str, Any] = {
        "freeze": lambda: rnd.choice([0.5, 15.0, 300.0]),
        "stall": lambda: rnd.choice([5.0, 60.0, 3600.0]),
        "wall": lambda: rnd.choice([-3600.0, 3600.0, 1.0, -DECADE_S, DECADE_S, -1.8e9]),
        "slow_link": lambda: 0.2,
        "full_disk": lambda: on_grid(rnd.uniform(0.1, 2.0)),
    }
    return Blow(
        at_s=on_grid(rnd.uniform(0, span_s + 0.5)),
        kind=kind,
        seconds=seconds[kind]() if kind in seconds else 0.0,
        point=rnd.choice(FAULTS) if kind in ("raise", "die") else "",
        nth=rnd.choice([1, 1, 2, 3, 7]),
    )


def on_grid(seconds: float) -> float:
    return round(round(seconds / GRID_S) * GRID_S, 6)


# ------------------------------------------------------------------------------------------------- narrower worlds


def numbers_history(seed: int) -> History:
    """Some calls with prompts that begin alike, one of which has numbers that are not finite; nothing else happens."""
    rnd = random.Random(f"numbers {seed}")
    setting = msgspec.structs.replace(random_setting(rnd), max_queued_requests=32)
    calls = [_quiet(random_call(rnd, index, 0.3, setting)) for index in range(rnd.randint(2, 6))]
    spoiled = rnd.randrange(len(calls))
    changes = {"spoil": "nan", "spoil_after": rnd.choice([0, 0, 1, 3, 6]), "ignore_eos": True}
    calls[spoiled] = msgspec.structs.replace(calls[spoiled], stop=[], stop_ids=[], **changes)
    return History(seed=seed, setting=setting, events=sorted(calls, key=lambda call: call.at_s))


def clock_history(seed: int) -> History:
    """Calls with and without deadlines, slow bodies and slow readers, while calendar and clock jump."""
    rnd = random.Random(f"clock {seed}")
    setting = msgspec.structs.replace(random_setting(rnd), max_queued_requests=32)
    calls = []
    for index in range(rnd.randint(2, 5)):
        call = _quiet(random_call(rnd, index, 1.0, setting))
        calls.append(
            msgspec.structs.replace(
                call,
                deadline_s=on_grid(rnd.choice([0.1, 0.5, 1.0, 30.0, 7200.0])) if rnd.random() < 0.5 else None,
                body_s=on_grid(rnd.uniform(0, 1.0)) if rnd.random() < 0.3 else 0.0,
                read_s=0.2 if rnd.random() < 0.3 else 0.0,
            )
        )
    blows = []
    kinds = rnd.choice([["wall"], ["wall", "stall"]])
    for _ in range(rnd.randint(1, 4)):
        blows += [random_blow(rnd, rnd.choice(kinds), 1.0), random_blow(rnd, "scrape", 3.0)]
    events: list[Call | Blow] = [*calls, *blows]
    return History(seed=seed, setting=setting, events=sorted(events, key=lambda event: event.at_s))


def _quiet(call: Call) -> Call:
    """The same call from a patient client with a right key who makes no mistakes."""
    return msgspec.structs.replace(
        call, tenant=max(call.tenant, 0), bad="", body_s=0.0, read_s=0.0, stops_after=None, leaves_s=None,
        leaves_after=None, leaves_in="", deadline_s=None, spoil="", max_tokens=min(call.max_tokens, 10),
    )  # fmt: skip
