"""The line a person reads: throughput and load every few seconds, silent while nothing happens.

Runs beside the application. The wording is the one that people already search their logs for. Knows no requests.
"""

import asyncio
import logging

from sayfa.base.faults import fault
from sayfa.server.context import ServerContext

log = logging.getLogger("sayfa.server")


async def log_stats(context: ServerContext) -> None:
    """Write the line, for ever, each `log_stats_interval` seconds in which something happened."""
    interval_s = context.options.log_stats_interval
    if not interval_s:
        return
    metrics, clock = context.metrics, context.clock
    before_s, before = clock.monotonic(), (0, 0)
    while True:
        await asyncio.sleep(interval_s)
        now_s, now = clock.monotonic(), (metrics.prompt_tokens, metrics.generation_tokens)
        try:
            stats = context.client.latest
            busy = stats is not None and bool(stats.running or stats.waiting)
            if now != before or (busy and context.client.health().busy):
                span_s = now_s - before_s
                line = stats_line(context, (now[0] - before[0]) / span_s, (now[1] - before[1]) / span_s)
                log.info("%s", line)
        except Exception:  # the next line is another try
            log.exception("the line of throughput could not be made")
        before_s, before = now_s, now


def stats_line(context: ServerContext, prompt_rate: float, generation_rate: float) -> str:
    """Throughput in tokens/s, requests running and waiting, page use and prefix hits."""
    fault("server.stats_line")
    stats = context.client.latest
    running = waiting = 0
    used = hits = 0.0
    if stats is not None:
        running, waiting = stats.running, stats.waiting
        used = 100 * stats.pages_used / max(1, stats.pages_total)
        hits = 100 * stats.prefix_hits / max(1, stats.prefix_queries)
    return (
        f"Avg prompt throughput: {prompt_rate:.1f} tokens/s, "
        f"Avg generation throughput: {generation_rate:.1f} tokens/s, "
        f"Running: {running} reqs, Waiting: {waiting} reqs, "
        f"KV cache usage: {used:.1f}%, Prefix cache hit rate: {hits:.1f}%"
    )
