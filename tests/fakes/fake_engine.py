"""A whole engine without a model: the real scheduler and page pool over a FakeRunner. Starts in milliseconds."""

import random
from collections.abc import Iterable
from typing import Any

from fakes.client import make_info
from fakes.runner import FakeRunner, Rule
from sayfa.base.clock import Clock, SystemClock
from sayfa.core.kv_cache import KvCache
from sayfa.core.limits import Limits
from sayfa.core.page_pool import PagePool
from sayfa.core.policy import Policy, PriorityPolicy
from sayfa.core.scheduler import Scheduler
from sayfa.engine.engine import Engine

PAGE_SIZE = 4


def make_engine(
    *,
    num_pages: int = 65,
    rule: Rule | None = None,
    clock: Clock | None = None,
    seed: int = 0,
    wrap: Any = lambda runner: runner,
    policy: Policy | None = None,
    idle_work: Iterable[None] = (),
    **limits: Any,
) -> Engine:
    """Build it. wrap: puts something around the runner. limits: fields of `Limits`."""
    numbers: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128, **limits}
    cache = KvCache(PagePool(num_pages), PAGE_SIZE)
    scheduler = Scheduler(Limits(**numbers), policy or PriorityPolicy(), cache)
    info = make_info(vocab_size=1000, max_model_len=numbers["max_model_len"], max_num_seqs=numbers["max_num_seqs"])
    runner = wrap(FakeRunner(PAGE_SIZE, num_pages, rule=rule))
    return Engine(scheduler, runner, info, clock or SystemClock(), random.Random(seed), idle_work=idle_work)
