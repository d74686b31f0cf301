"""Named fault points: places in the code where a test can make something go wrong.

`fault("engine.step.before_compute")` does nothing unless a test has armed that name; then the armed action runs there
(it raises, ends the process, lets time pass ...). `altered("wire.client_writes", data)` gives `data` back, or what the
test makes of it: bytes that are cut, lost or doubled, numbers that are none. Nothing in the package arms a point: there
is no flag, no environment variable and no message for it. Called by any room; must not know what the actions do.

Every name stands in `POINTS`, once in the code, so that a test can fire each in turn and prove that each is reached.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

POINTS: dict[str, str] = {
    # A request on its way in: the server.
    "server.edge": "a request has come, nothing of it was looked at",
    "server.auth": "a key is about to be compared",
    "server.body.read": "a piece of a body is about to be kept",
    "server.body.parse": "a body is complete and about to be parsed",
    "server.body.validate": "a body is JSON and about to become a request's model",
    "server.books.open": "a request is about to be booked as received",
    "server.admit": "a request's cost is about to be bounded",
    "server.thread": "text work is about to go to a thread",
    "server.template": "messages are about to become text",
    "text.encode": "text is about to become token ids",
    "server.books.begin": "a request is admitted and about to be booked so",
    "server.request": "a request for the engine is about to be made",
    # On the wire, the server's side.
    "client.before_spawn": "an engine process is about to be started",
    "client.attach": "an engine process runs and is about to be connected",
    "client.before_send": "a request is about to go to the engine process",
    "client.encode": "a message to the engine process is about to become bytes",
    "client.send_abort": "the engine process is about to be told that a request's client has gone",
    "wire.client_writes": "bytes to the engine process, as they are handed to the kernel",
    "wire.client_reads": "bytes from the engine process, as the kernel gives them",
    "client.decode": "bytes from the engine process are about to become a message",
    "client.progress": "a loading engine process told how far it is",
    "client.hello": "an engine process said that it serves",
    "client.refused": "the engine process refused a request",
    "client.before_deliver": "a message from the engine process is about to be handed out",
    "client.figures": "a step's figures are about to go to who counts them",
    "client.pong": "the engine process told of its progress",
    "client.ping": "the engine process is about to be asked for its progress",
    "client.lost": "the connection to the engine process has ended",
    "client.quarantine": "who was running at an engine's death is about to be noted",
    "client.bury": "a dead engine process is about to be waited for",
    "client.restart": "the next engine process is due",
    "client.drain": "the engine process is about to be told to finish",
    # On the wire, the engine's side.
    "process.before_build": "the settings have arrived, nothing is loaded",
    "process.before_hello": "the model is loaded, the client does not know it",
    "wire.engine_reads": "bytes from the server, as the kernel gives them",
    "wire.engine_writes": "bytes to the server, as they are handed to the kernel",
    "process.decode": "bytes from the server are about to become a message",
    "process.before_handle": "a message from the server is about to be handled",
    "process.encode": "a message to the server is about to become bytes",
    "process.before_send": "a step's message is about to be sent",
    "process.while_draining": "no new requests are taken, some still run",
    # The engine.
    "engine.add.before_check": "a request has come, nothing of it was checked",
    "engine.add.before_queue": "a request was checked and is about to be queued",
    "engine.abort": "a client's wish to forget a request has arrived",
    "engine.pause": "a reader is behind, or has caught up; its request is about to stand still, or to go on",
    "engine.pong": "the server asked for progress",
    "engine.refuse_waiting": "the engine drains, who waits is about to be turned away",
    "engine.end_all": "the time to drain is up, who runs is about to be ended",
    "engine.step.before_decide": "a step begins",
    "engine.step.before_compute": "the plan is made, nothing is computed",
    "engine.step.before_update": "tokens are computed, nothing is booked",
    "engine.step.after_update": "the step is booked, its message is not sent",
    "engine.step.figures": "a step's figures are about to be made",
    "engine.blame": "a step failed, the guilty rows are about to be looked for",
    # The deciding wing.
    "core.open": "a request is accepted and about to be queued",
    "core.expire": "a request's deadline has passed",
    "core.plan": "a step's budget is about to be spent",
    "core.admit": "a waiting sequence is about to get pages and a row",
    "core.match": "the prefix cache is about to be asked",
    "core.grow": "a sequence is about to get pages",
    "core.take_page": "a page is about to be handed out",
    "core.evict": "a cached page was taken for somebody else",
    "core.fork": "a branch is about to share its sibling's pages",
    "core.preempt": "a sequence is about to give up its pages",
    "core.apply": "a row's result is about to be booked",
    "core.commit": "pages that are full are about to become findable",
    "core.finish": "a branch is about to end",
    "core.release": "a sequence's pages are about to be given back",
    # The computing wing.
    "runner.table.forget": "a row of the request table is about to be emptied",
    "runner.table.put": "a row of the request table is about to be filled",
    "runner.copy_pages": "pages are about to be copied",
    "runner.prepare": "a plan is about to become arrays",
    "runner.before_forward": "the table is changed as planned, nothing is computed",
    "runner.logits": "logits, as the model gave them",
    "runner.before_sample": "logits are computed, no token is drawn",
    "runner.score_prompt": "a prompt's log-probabilities are about to be read",
    "runner.edit": "a row's penalties, bias and masks are about to be applied",
    "runner.draw": "tokens are about to be drawn",
    "runner.note": "drawn tokens are about to be noted in the table",
    "runner.logprobs": "a token's log-probabilities are about to be told",
    # An answer on its way out: the server.
    "streams.deliver": "one answer's part of a step is about to be put into its mailbox",
    "server.output": "a part of an answer has come, no text is made of it",
    "text.detokenize": "tokens are about to become text",
    "text.stop_strings": "new text is about to be searched for stop strings",
    "server.books.note": "a part of an answer is about to be booked",
    "server.logprobs": "log-probabilities are about to become JSON",
    "server.usage": "token counts are about to become JSON",
    "server.event": "an event of a stream is about to be encoded",
    "server.stream.begin": "a stream's status line is about to be sent",
    "server.stream.send": "a stream's event is about to be sent",
    "server.stream.keep_alive": "a comment is about to be sent to a quiet stream",
    "server.sweep": "the streams are about to be looked through",
    "server.answer": "a whole answer is about to be encoded",
    "server.books.close": "a request's end is about to be booked",
    # Beside the requests.
    "server.admissions": "the engine gave a request a place, its books are about to be told",
    "server.metrics.keep": "a figure is about to be kept",
    "server.metrics.render": "the page of metrics is about to be made",
    "server.stats_line": "the line of throughput is about to be made",
    "server.health": "readiness is asked for",
    "server.drain": "the server was asked to end",
    "server.load_text": "tokenizer and template are about to be loaded",
    "log.write": "a line, as it is handed to the kernel",
    # The start.
    "settings.read": "a settings file is about to be read",
    "hub.fetch": "a model is about to be fetched from the hub",
    "load.config": "a model's facts are about to be read",
    "load.json": "a JSON file of a model is about to be read",
    "load.open": "a weight file is about to be opened",
    "load.map": "a weight file is about to be mapped",
    "load.header": "a GGUF file's header is about to be read",
    "load.safetensors_header": "a safetensors file's header is about to be read",
    "load.checksum": "a weight file is about to be compared with its digest",
    "load.tensor": "a tensor's bytes are about to be taken from the map",
    "load.program": "a model's layers are about to become a program",
    "load.pack": "weights are about to be packed",
    "load.pages": "the pages are about to be allocated",
    "load.warm_up": "the first step is about to be computed",
    # Commands.
    "progress.write": "a progress line, as it is handed to the kernel",
    "batch.read": "a file of prompts is about to be read",
    "output.write": "a file of results, as it is handed to the kernel",
}
"""Name → when it is passed."""

ALTERING = frozenset(
    {"wire.client_writes", "wire.client_reads", "wire.engine_reads", "wire.engine_writes", "runner.logits", "log.write",
     "progress.write", "output.write"}
)  # fmt: skip
"""The points that hand a value through."""

Action = Callable[[], None]
T = TypeVar("T")

# None as long as no test has armed anything: then a fault point costs one global look-up.
_armed: dict[str, "_Armed"] | None = None


class _Armed:
    def __init__(self, action: Action | None, alter: Callable[[Any], Any] | None, nth: int, every: bool) -> None:
        self.action = action
        self.alter = alter
        self.nth = nth
        self.every = every
        self.passes = 0

    def fires(self) -> bool:
        """Count a pass; tell whether it is one to act at."""
        self.passes += 1
        return self.passes == self.nth or (self.every and self.passes > self.nth)


def fault(name: str) -> None:
    """Pass the fault point `name`; run its action if a test has armed it. Raises what the action raises."""
    if _armed is not None:
        altered(name, None)


def altered(name: str, value: T) -> T:
    """Pass the fault point `name` with a value; return it, or what an armed test makes of it."""
    if _armed is None:
        return value
    point = _armed.get(name)
    if point is not None and point.fires():
        if point.action is not None:
            point.action()
        if point.alter is not None:
            changed: T = point.alter(value)
            return changed
    return value


@contextmanager
def armed(
    name: str, action: Action | None = None, *, alter: Callable[[Any], Any] | None = None, nth: int = 1,
    every: bool = False,
) -> Iterator[_Armed]:  # fmt: skip
    """Arm one fault point inside a `with` block; for tests only.

    The action runs at the `nth` pass, and with `every` at each later one; `alter` then makes another value of the one
    that is handed through. The result's `passes` tells how often the point was reached. Raises KeyError for a name that
    is not in POINTS, ValueError for `alter` where nothing is handed through.
    """
    global _armed  # noqa: PLW0603 - one switch for the process is the point
    if name not in POINTS:
        raise KeyError(f"{name!r} is not a fault point; the known ones are {', '.join(sorted(POINTS))}")
    if alter is not None and name not in ALTERING:
        raise ValueError(f"{name!r} hands no value through; those that do are {', '.join(sorted(ALTERING))}")
    point = _Armed(action, alter, nth, every)
    before = _armed
    _armed = {**(before or {}), name: point}
    try:
        yield point
    finally:
        _armed = before
