"""A limit on how long a client may be silent, which does not count the time in which this process itself stood still.

Called by `body`. After a suspended machine wakes up all timers are due at once; who sent its bytes meanwhile must not
be told that it was too slow. Knows no requests.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sayfa.base.clock import AwakeClock


@asynccontextmanager
async def patience(limit_s: Callable[[], float], clock: AwakeClock) -> AsyncIterator[None]:
    """Raise TimeoutError in the block after `limit_s()` seconds on `clock`, as asyncio.timeout does.

    The limit is asked for again each time that it has passed: it may grow by what came meanwhile.
    """
    loop = asyncio.get_running_loop()
    begun_s = clock.monotonic()
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as scope:

        def look() -> None:
            nonlocal timer
            left_s = limit_s() - (clock.monotonic() - begun_s)
            if left_s > 0:
                timer = loop.call_later(max(left_s, 0.01), look)
            else:
                scope.reschedule(loop.time())

        timer = loop.call_later(limit_s(), look)
        try:
            yield
        finally:
            timer.cancel()
