"""The numbers the scheduler obeys, and the refusals that follow from them.

Called by the scheduler when it is made and when a request comes; must not know steps.
"""

import msgspec

from sayfa.base.errors import ConfigError, InvalidRequest, Overloaded, RateLimited
from sayfa.core.kv_cache import KvCache
from sayfa.core.roster import Roster
from sayfa.core.sequence import RequestState


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that the scheduler obeys.

    max_num_seqs: table rows. max_num_batched_tokens: tokens of one step. max_model_len: prompt + output of a sequence.
    max_queued_requests, max_queued_tokens: bounds of what has not started yet (an empty queue takes any one request).
    max_chunk: most tokens of one prompt in one step; None for no other bound than the budget.
    max_scored: most prompt positions whose log-probabilities are computed in one step (each needs a row of logits).
    short_share: part of the prompts' budget, and of `max_scored`, that is kept for others than the leading prompt.
    max_overtakes: how often a waiting sequence may be passed by one that stands behind it.
    share_queue: whether a tenant may have no more requests in the queue than there are free places.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_chunk: int | None = None
    max_scored: int | None = None
    short_share: float = 0.25
    max_overtakes: int = 16
    share_queue: bool = False

    def check(self) -> None:
        """Raise ConfigError naming the first number that cannot work."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queued_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs, which is "
                f"{self.max_num_seqs}: a step could not hold one token of each sequence; raise one or lower the other"
            )
        if self.max_chunk is not None and self.max_chunk < 1:
            raise ConfigError(f"max_chunk is {self.max_chunk}; it must be at least 1")
        if self.max_scored is not None and self.max_scored < 1:
            raise ConfigError(f"max_scored is {self.max_scored}; it must be at least 1")
        if not 0 <= self.short_share < 1:
            raise ConfigError(f"short_share is {self.short_share}; it must lie in [0, 1)")


def refuse_impossible(state: RequestState, limits: Limits, roster: Roster, cache: KvCache) -> None:
    """Raise InvalidRequest if this request can never be served, however empty the engine is."""
    request = state.request
    if request.id in roster.requests:
        raise InvalidRequest(f"a request with the id {request.id!r} is here already; use another id", param="id")
    if not request.prompt:
        raise InvalidRequest("the prompt is empty; give at least one token to continue", param="prompt")
    if state.max_tokens < 0 or (state.max_tokens == 0 and request.params.max_tokens != 0):
        raise InvalidRequest(
            f"the prompt has {state.num_prompt} tokens, but this model's context holds {limits.max_model_len}, at "
            "least one token of output included; shorten the prompt or raise --max-model-len",
            param="prompt",
            code="context_length_exceeded",
        )
    room, least = limits.max_model_len - state.num_prompt, request.params.min_tokens
    if least > room:
        raise InvalidRequest(
            f"`min_tokens` is {least}, but the context of {limits.max_model_len} tokens leaves room for {room} after a "
            f"prompt of {state.num_prompt}; lower `min_tokens` or raise --max-model-len",
            param="min_tokens",
            code="context_length_exceeded",
        )
    needed = cache.pages_for_request(state)
    if needed > cache.pool.capacity:
        raise InvalidRequest(
            f"the request needs at least {needed} pages of {cache.page_size} tokens, but the whole page pool has "
            f"{cache.pool.capacity}; shorten the prompt or raise --kv-cache-memory",
            param="prompt",
            code="exceeds_page_pool",
        )


def refuse_overload(state: RequestState, limits: Limits, roster: Roster, retry_after_s: int) -> None:
    """Raise Overloaded if the queue of requests that have not started yet is full.

    Raise RateLimited if the tenant has as many in it as are free: then one tenant's flood fills half of it at most, and
    there is always room for the others (dynamic thresholds; Choudhury, Hahne 1998).
    """
    waiting = roster.waiting
    tenant = state.request.tenant
    if limits.share_queue and tenant and waiting.num_new_of(tenant) >= limits.max_queued_requests - waiting.num_new > 0:
        raise RateLimited(
            f"{waiting.num_new_of(tenant)} requests of this key wait already, which is its share of the queue; try "
            f"again in {retry_after_s} s",
            code="share_of_queue_full",
            retry_after_s=retry_after_s,
        )
    if waiting.num_new >= limits.max_queued_requests:
        problem = f"{waiting.num_new} requests wait already (the limit is {limits.max_queued_requests})"
    elif waiting.num_new and waiting.num_new_tokens + state.num_prompt > limits.max_queued_tokens:
        problem = (
            f"{waiting.num_new_tokens} prompt tokens wait already and this request has {state.num_prompt} "
            f"(the limit is {limits.max_queued_tokens})"
        )
    else:
        return
    raise Overloaded(
        f"the server is full: {problem}; try again in {retry_after_s} s", code="queue_full", retry_after_s=retry_after_s
    )
