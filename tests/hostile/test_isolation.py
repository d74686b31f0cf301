"""F29, T24, T25: what one caller has sent makes nothing faster for another; what he has sent himself is found again.

A caller is what decides the contents and the owner of a page besides the tokens: key, salt, adapter, model and version
of the weights. Pairs of callers that differ in one or more of these, often by a hair, send the same prompt in turn
through the real scheduler and cache; key and salt become one salt as the server makes it. Hits are taken from what is
told and from what the runner computes. No media can be sent to this server, so there are none here.
At the end: breaks of the package that these tests must notice.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fakes.client import FakeEngineClient
from fakes.deciding import World
from sayfa.base import page_hash
from sayfa.base.config import ServerOptions
from sayfa.base.messages import Request
from sayfa.base.page_hash import root_hash
from sayfa.base.sampling_params import SamplingParams
from sayfa.core import kv_cache
from sayfa.server.auth import Keys
from sayfa.server.context import ServerContext

NUM_PAIRS = 10_000
AT_ONCE = 8
PAGE_SIZE, NUM_WHOLE = 2, 2
PROMPT_TOKENS = PAGE_SIZE * NUM_WHOLE + 1

KEYS = [f"sk-{letter * 20}" for letter in "abcd"]
SALTS = (
    None,
    "a",
    "b",
    "ab",
    "null",
    "None",
    " ",
    "a ",
    '"',
    '","',
    '["',
    "\\",
    "ä",
    "a\u0308",
    "\x00",
    "S",
    "a" * 256,
)
ADAPTERS = (None, "", "a", "ab", "null", "A", "-")
MODELS = ("", "a", "ab", "a1", "b")
VERSIONS = (0, 1, 11)


class Caller(NamedTuple):
    tenant: str
    salt: str | None
    adapter: str | None
    model: str
    version: int


def tenants() -> list[str]:
    """Names of callers as the server makes them of their keys, and of a server that asks for none."""
    keys = Keys(KEYS)
    return ["", *(keys.tenant(f"Bearer {key}") for key in KEYS)]


def random_caller(rnd: random.Random, names: list[str]) -> Caller:
    return Caller(rnd.choice(names), rnd.choice(SALTS), rnd.choice(ADAPTERS), rnd.choice(MODELS), rnd.choice(VERSIONS))


def stranger_to(caller: Caller, rnd: random.Random, names: list[str]) -> Caller:
    """Somebody else: mostly different in one field only, now and then with contents moved or nearly alike."""
    while True:
        other = random_caller(rnd, names)
        choice = rnd.random()
        if choice < 0.7:
            name = rnd.choice(Caller._fields)
            other = caller._replace(**{name: getattr(other, name)})
        elif choice < 0.8:
            other = caller._replace(salt=caller.model or None, model=caller.salt or "")
        elif choice < 0.9:
            other = caller._replace(salt=caller.adapter or None, adapter=caller.salt)
        elif choice < 0.95:
            other = caller._replace(salt="null" if caller.salt is None else caller.salt.swapcase())
        if other != caller:
            return other


class Server:
    """One scheduler and pool for all callers; `ask` lets callers send a prompt each, in the same steps."""

    def __init__(self) -> None:
        self.context = ServerContext(FakeEngineClient(), None, ServerOptions(), ["tiny"], "0")
        self.world = World(
            num_pages=200, page_size=PAGE_SIZE, max_num_seqs=AT_ONCE,
            max_num_batched_tokens=AT_ONCE * PROMPT_TOKENS, audit_every=200,
        )  # fmt: skip

    def ask(self, callers: list[Caller], prompts: list[list[int]]) -> tuple[list[int], int]:
        """How many tokens each was told to have found, and how many were computed for all of them."""
        world, first = self.world, len(self.world.requests)
        before = world.runner.num_computed
        cache = world.scheduler.cache
        for number, (caller, prompt) in enumerate(zip(callers, prompts, strict=True), first):
            cache.model_digest, cache.weight_version = caller.model, caller.version
            request = Request(
                id=str(number),
                prompt=prompt,
                params=SamplingParams(max_tokens=1, temperature=0.0, seed=1),
                salt=self.context.salt(caller.tenant, caller.salt),
                tenant=caller.tenant,
                adapter=caller.adapter,
            )
            assert world.add(request)
        world.run(max_steps=1_000_000)
        ends = [world.answers[str(number), 0].last for number in range(first, first + len(callers))]
        return [end.num_cached for end in ends if end is not None], world.runner.num_computed - before


def random_prompts(rnd: random.Random, count: int) -> list[list[int]]:
    return [[rnd.randrange(1 << 30) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def check_pairs(server: Server, pairs: list[tuple[Caller, Caller]], prompts: list[list[int]]) -> None:
    """Each first of a pair sends a prompt, then each second the same one, then both again."""
    owners, strangers = [first for first, _ in pairs], [second for _, second in pairs]
    nothing, whole = [0] * len(pairs), [PAGE_SIZE * NUM_WHOLE] * len(pairs)
    num_tokens = len(pairs) * PROMPT_TOKENS
    assert server.ask(owners, prompts) == (nothing, num_tokens), "a prompt that nobody had sent was found"
    cross, num_computed = server.ask(strangers, prompts)
    assert cross == nothing, f"cross hits: {[pair for pair, hit in zip(pairs, cross, strict=True) if hit]}"
    assert num_computed == num_tokens, f"pages of another were used, but not told, in one of {pairs}"
    for callers in (owners, strangers):
        assert server.ask(callers, prompts) == (whole, len(pairs)), f"an own prompt was not found, by one of {callers}"


@pytest.mark.parametrize("seed", range(4))
def test_f29_no_pair_of_callers_finds_the_other_s_pages(seed: int) -> None:
    """10,000 pairs in all: 0 cross hits, 100 % own hits, for both of a pair."""
    rnd, names, server = random.Random(seed), tenants(), Server()
    for _ in range(NUM_PAIRS // 4 // AT_ONCE + 1):
        owners = [random_caller(rnd, names) for _ in range(AT_ONCE)]
        pairs = [(owner, stranger_to(owner, rnd, names)) for owner in owners]
        check_pairs(server, pairs, random_prompts(rnd, AT_ONCE))


def test_f29_fields_that_read_alike_end_to_end_are_not_the_same() -> None:
    """Field after field, with the tags between them, both spell the same; only the lengths tell them apart."""
    pair = (Caller("", None, "yW1Az", "x", 0), Caller("", None, "z", "xW0Ay", 1))
    check_pairs(Server(), [pair], random_prompts(random.Random(0), 1))


Patch = Callable[[pytest.MonkeyPatch], None]


def root_without(*left_out: str) -> Patch:
    """A root that some field of the identity does not reach."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        blank: dict[str, Any] = {"model_digest": "", "weight_version": 0, "adapter": None, "salt": ""}

        def broken(model_digest: str, weight_version: int, adapter: str | None, salt: str) -> bytes:
            given: dict[str, Any] = {
                "model_digest": model_digest, "weight_version": weight_version, "adapter": adapter, "salt": salt,
            }  # fmt: skip
            return root_hash(**{name: (blank if name in left_out else given)[name] for name in given})

        monkeypatch.setattr(kv_cache, "root_hash", broken)

    return patch


def salt_of(broken: Callable[[str, str | None], str]) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(ServerContext, "salt", lambda self, *fields: broken(*fields))


def an_unnamed_adapter_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "root_hash", lambda model, version, adapter, salt: root_hash(
        model, version, adapter or None, salt))  # fmt: skip


def pages_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache.KvCache, "commit", lambda self, sequence: None)


BREAKS: dict[str, tuple[Patch, str]] = {
    "the salt is forgotten": (root_without("salt"), "crossed from salt to salt"),
    "the adapter is forgotten": (root_without("adapter"), "cross hits"),
    "models share pages": (root_without("model_digest"), "cross hits"),
    "new weights find the old ones' pages": (root_without("weight_version"), "cross hits"),
    "keys share pages": (salt_of(lambda tenant, salt: json.dumps(["", salt])), "cross hits"),
    "a caller's salt divides nothing": (salt_of(lambda tenant, salt: json.dumps([tenant, None])), "cross hits"),
    "no salt is the salt null": (salt_of(lambda tenant, salt: f"[{tenant},{salt or 'null'}]"), "cross hits"),
    "salts differ in capitals only": (salt_of(lambda tenant, salt: f"{tenant},{salt}".lower()), "cross hits"),
    "an adapter without a name is none": (an_unnamed_adapter_is_none, "cross hits"),
    "own pages are not found": (pages_are_not_stored, "an own prompt was not found"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, told = BREAKS[name]
    patch(monkeypatch)
    with pytest.raises(AssertionError, match=told):
        test_f29_no_pair_of_callers_finds_the_other_s_pages(0)


def test_lengths_left_out_of_a_root_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_hash, "_field", lambda tag, value: tag + value)
    with pytest.raises(AssertionError, match="cross hits"):
        test_f29_fields_that_read_alike_end_to_end_are_not_the_same()
