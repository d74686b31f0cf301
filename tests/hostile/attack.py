"""Send every kind of hostile request to a port, one after another, until this process is ended.

    python tests/hostile/attack.py PORT

Prints how many were refused, a line a round. A process of its own, so that making megabytes costs no time to whoever
measures.
"""

import asyncio
import sys

from attacker import HANG_LIMIT_S, exchange, judge, statuses
from test_time_to_refuse import CASES


async def attack(port: int) -> None:
    """Go on for ever."""
    requests = [(case.make(), case.refusals) for case in CASES.values()]
    refused = 0
    while True:
        for data, refusals in requests:
            received = await exchange(port, [data], HANG_LIMIT_S, 2 * HANG_LIMIT_S)
            judge(received, data[:2000])
            if statuses(received)[:1] not in [[status] for status in refusals]:
                raise SystemExit(f"{data[:200]!r} was answered {received[:200]!r}")
            refused += 1
        print(refused, flush=True)


if __name__ == "__main__":
    asyncio.run(attack(int(sys.argv[1])))
