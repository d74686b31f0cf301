"""The engine as the server sees it: a protocol that says what can be asked, wherever the engine runs.

Kept by `wire.process_client` (an engine process), `engine.inproc` (none) and the tests' fake. Called by the server;
must not know what an engine is made of, nor HTTP.
"""

from collections.abc import AsyncIterator, Callable
from typing import Literal, NamedTuple, Protocol

from sayfa.base.errors import EngineDead, Overloaded
from sayfa.base.messages import EngineInfo, EngineOutput, Outputs, Request, StepStats

ClientState = Literal["starting", "ready", "dead", "failed", "draining"]


class Health(NamedTuple):
    """alive: the process is there and has said Hello. since_step_s: seconds since it last showed progress.
    busy: whether it has work. expected_step_s: how long a step takes lately; 0 if none was made."""

    alive: bool
    since_step_s: float
    busy: bool
    expected_step_s: float


class EngineClient(Protocol):
    """What a server needs of an engine, wherever that runs."""

    @property
    def state(self) -> ClientState: ...

    @property
    def info(self) -> EngineInfo | None:
        """Facts about the engine, once it has been ready."""
        ...

    @property
    def latest(self) -> StepStats | None:
        """Figures of the last step that had any, of the engine that serves now."""
        ...

    def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        """Yield the outputs of all branches as they come. Raises InvalidRequest, Overloaded, EngineDead, EngineError.

        Leaving the iteration early (`aclose`, cancellation) aborts the request.
        """
        ...

    def abort(self, request_id: str, branches: list[int] | None = None) -> None:
        """Forget a request; its iterator ends. Unknown ids are ignored.

        branches: forget only these of its answers, which end with finish "abort"; the iterator goes on.
        """
        ...

    async def drain(self, limit_s: float) -> None:
        """Take nothing new and return when what runs has finished, or after `limit_s`."""
        ...

    async def close(self) -> None:
        """End the engine."""
        ...

    def on_outputs(self, callback: Callable[[Outputs], None]) -> None:
        """Call `callback` once for each step's message, after it was handed out."""
        ...

    def health(self) -> Health: ...


def check_serving(state: ClientState) -> None:
    """Raise what a new request is told in any state but ready: Overloaded, or EngineDead."""
    if state == "draining":
        message = "the server is shutting down; send the request to another one"
        raise Overloaded(message, code="draining", retry_after_s=5)
    if state == "starting":
        message = "the model is still being loaded; try again in a few seconds"
        raise Overloaded(message, code="starting", retry_after_s=5)
    if state != "ready":
        raise EngineDead()
