"""Named fault points: places in the code where a test can make something go wrong.

`fault("engine.step.before_compute")` does nothing unless a test has armed that name; then the armed action runs there
(it raises, ends the process, delays ...). Nothing in the package arms a point: there is no flag, no environment
variable and no message for it. Called by any room at its borders; must not know what the actions do.

Every name stands in `POINTS`, so that a test can fire each in turn and prove that each is reached.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

POINTS: dict[str, str] = {
    "engine.add.before_queue": "a request was checked and is about to be queued",
    "engine.abort": "a client's wish to forget a request has arrived",
    "engine.step.before_decide": "a step begins",
    "engine.step.before_compute": "the plan is made, nothing is computed",
    "runner.before_forward": "the table is changed as planned, nothing is computed",
    "runner.before_sample": "logits are computed, no token is drawn",
    "engine.step.before_update": "tokens are computed, nothing is booked",
    "engine.step.after_update": "the step is booked, its message is not sent",
    "process.before_build": "the settings have arrived, nothing is loaded",
    "process.before_hello": "the model is loaded, the client does not know it",
    "process.before_handle": "a message from the client is about to be handled",
    "process.before_send": "a step's message is about to be sent",
    "process.while_draining": "no new requests are taken, some still run",
    "client.before_send": "a request is about to go to the engine process",
    "client.before_deliver": "a message from the engine process is about to be handed out",
    "client.before_spawn": "an engine process is about to be started",
}

Action = Callable[[], None]

# None as long as no test has armed anything: then a fault point costs one global look-up.
_armed: dict[str, "_Armed"] | None = None


class _Armed:
    def __init__(self, action: Action, nth: int, every: bool) -> None:
        self.action = action
        self.nth = nth
        self.every = every
        self.passes = 0

    def passed(self) -> None:
        self.passes += 1
        if self.passes == self.nth or (self.every and self.passes > self.nth):
            self.action()


def fault(name: str) -> None:
    """Pass the fault point `name`; run its action if a test has armed it. Raises what the action raises."""
    if _armed is not None:
        point = _armed.get(name)
        if point is not None:
            point.passed()


@contextmanager
def armed(name: str, action: Action, *, nth: int = 1, every: bool = False) -> Iterator[_Armed]:
    """Arm one fault point inside a `with` block; for tests only.

    The action runs at the `nth` pass, and with `every` at each later one. The value's `passes` tells how often the
    point was reached. Raises KeyError for a name that is not in POINTS.
    """
    global _armed  # noqa: PLW0603 - one switch for the process is the point
    if name not in POINTS:
        raise KeyError(f"{name!r} is not a fault point; the known ones are {', '.join(sorted(POINTS))}")
    point = _Armed(action, nth, every)
    before = _armed
    _armed = {**(before or {}), name: point}
    try:
        yield point
    finally:
        _armed = before
