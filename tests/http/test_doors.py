"""Laws of the doors: every route asks for a key unless named open; hosts, origins, headers and ids are bounded.

B066, B075, T16, T18, T19, T23.
"""

import asyncio
import random
import string
import time

import pytest
from http_models import Error, check
from http_support import SayingEngine, chat_body, serving, tokenizer

from sayfa.server import limits
from sayfa.server.app import ROUTES
from sayfa.server.auth import OPEN_ROUTES, Keys

KEY, OTHER = "sk-" + "a" * 30, "sk-" + "b" * 30
OPEN_PATHS = {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics"}
CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_t18_every_route_and_method_without_a_key() -> None:
    """T18: the table of the app itself; open are exactly the named ones, and every other (route, method) is 401."""
    async with serving(api_key=[KEY]) as (client, app):
        paths = {route.path: route.methods for route in app.routes}
        assert len(paths) >= 14
        for path in [*paths, "/", "/v1", "/nothing", "//metrics", "/METRICS", "/metrics/"]:
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
                response = await client.request(method, path.replace("{model:path}", "tiny"), json={})
                is_open = path in OPEN_PATHS and method in {m for r in app.routes if r.path == path for m in r.methods}
                expected = response.status_code in (200, 503) if is_open else response.status_code == 401
                assert expected, (path, method, response.status_code)
                if response.status_code == 401 and method != "HEAD":
                    check(response.json(), Error)
                    assert response.headers["www-authenticate"] == "Bearer"


async def test_the_open_routes_are_named_in_the_table() -> None:
    """Each open name is a route's name, so that a renamed route does not stay open or closed by accident."""
    assert {route.name for route in ROUTES} >= OPEN_ROUTES


@pytest.mark.parametrize(
    ("host", "wish", "status"),
    [
        ("127.0.0.1", None, 200), ("127.0.0.1", True, 401), ("0.0.0.0", None, 401), ("0.0.0.0", False, 200),
        ("localhost", False, 200), ("192.0.2.1", True, 401),
    ],
)  # fmt: skip
async def test_protect_metrics_closes_them(host: str, wish: bool | None, status: int) -> None:
    """T31: /metrics asks for the key where others can reach the address, unless the setting says what is meant."""
    async with serving(api_key=[KEY], host=host, protect_metrics=wish, allowed_hosts=["*"]) as (client, _):
        assert (await client.get("/metrics")).status_code == status
        assert (await client.get("/metrics", headers=bearer(KEY))).status_code == 200


async def test_any_of_several_keys_opens_and_nothing_else_does() -> None:
    """T23: each listed key, and no neighbour of one, in no other spelling."""
    async with serving(api_key=[KEY, OTHER]) as (client, _):
        for key in (KEY, OTHER):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        wrong = ["", KEY[:-1], KEY + "x", KEY.upper(), "Bearer", KEY + "\t" + OTHER, "é" * 20, "x" * 5000]
        for key in wrong:
            headers = [(b"authorization", b"Bearer " + key.encode())]
            assert (await client.get("/v1/models", headers=headers)).status_code == 401, key
        for header in (KEY, f"Basic {KEY}", f"Bearer{KEY}", "Bearer"):
            response = await client.get("/v1/models", headers={"authorization": header})
            assert response.status_code == 401
        assert (await client.get(f"/v1/models?api_key={KEY}")).status_code == 401


def test_t23_the_time_of_a_failure_does_not_depend_on_the_key() -> None:
    """T23: keys with a right prefix take as long as random ones (medians of many, within 15 %)."""
    keys = Keys([KEY])
    rng = random.Random(5)
    groups: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(4000):
        near = bool(turn % 2)
        body = KEY[:-1] + "x" if near else "".join(rng.choices(string.ascii_letters, k=len(KEY)))
        header = f"Bearer {body}"
        started = time.perf_counter_ns()
        with pytest.raises(Exception, match="valid API key"):
            keys.tenant(header)
        groups[near].append(time.perf_counter_ns() - started)
    near_ns, far_ns = (sorted(groups[kind])[len(groups[kind]) // 2] for kind in (True, False))
    assert abs(near_ns - far_ns) < 0.15 * far_ns


async def test_tenants_never_share_pages_and_a_salt_only_divides() -> None:
    """T24: the salt of a request comes from the key and the caller's own salt, and tells both apart."""
    engine = SayingEngine()
    async with serving(engine, api_key=[KEY, OTHER]) as (client, _):
        for key in (KEY, OTHER):
            for extra in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
                await client.post(CHAT, json=chat_body(**extra), headers=bearer(key))
        await client.post(CHAT, json=chat_body(), headers=bearer(KEY))
    salts = [request.salt for request in engine.requests]
    assert len(set(salts)) == 6
    assert salts[-1] == salts[0]
    assert KEY not in "".join(salts)


async def test_every_posting_route_is_in_the_table_of_limits() -> None:
    """T10: a route that is not in the admission table fails here."""
    posting = {route.path for route in ROUTES if route.method == "POST"}
    assert posting == set(limits.TABLE)
    for name in limits.TABLE.values():
        assert hasattr(limits, name) or " " in name


async def test_t19_only_listed_hosts_are_served() -> None:
    """T19: on a loopback address only its own names, which stops DNS rebinding; a list replaces them."""
    async with serving() as (client, _):
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
            assert (await client.get("/health", headers={"host": host})).status_code == 200
        for host in ("evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", ""):
            response = await client.get("/health", headers={"host": host})
            assert response.status_code == 403, host
            check(response.json(), Error)
    async with serving(allowed_hosts=["api.example"]) as (client, _):
        assert (await client.get("/health", headers={"host": "api.example"})).status_code == 200
        assert (await client.get("/health", headers={"host": "localhost"})).status_code == 403
    async with serving(host="0.0.0.0", insecure_no_auth=True) as (client, _):
        assert (await client.get("/health", headers={"host": "anything"})).status_code == 200


GOOD, FOREIGN = "https://app.example", "https://evil.example"


async def test_b075_preflight_needs_no_key_and_only_listed_origins_get_headers() -> None:
    """B075: preflight, plain, streamed and error answers; never credentials, never a reflected foreign origin."""
    async with serving(api_key=[KEY], cors_origins=[GOOD]) as (client, _):
        ask = {"access-control-request-method": "POST"}
        for origin in (GOOD, FOREIGN, None):
            sent = {"origin": origin} if origin else {}
            answers = [
                await client.options(CHAT, headers={**ask, **sent}),
                await client.post(CHAT, json=chat_body(), headers={**sent, **bearer(KEY)}),
                await client.post(CHAT, json=chat_body(stream=True), headers={**sent, **bearer(KEY)}),
                await client.post(CHAT, json=chat_body(), headers=sent),
                await client.get("/nothing", headers={**sent, **bearer(KEY)}),
            ]
            assert [answer.status_code for answer in answers] == [204, 200, 200, 401, 404]
            for answer in answers:
                allowed = answer.headers.get("access-control-allow-origin")
                assert allowed == (GOOD if origin == GOOD else None)
                assert "access-control-allow-credentials" not in answer.headers
                assert "origin" in answer.headers["vary"]


async def test_without_origins_there_is_no_cors() -> None:
    """Off by default."""
    async with serving() as (client, _):
        answer = await client.post(CHAT, json=chat_body(), headers={"origin": GOOD})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        preflight = await client.options(CHAT, headers={"origin": GOOD, "access-control-request-method": "POST"})
        assert preflight.status_code == 405


async def test_b066_a_callers_request_id_is_only_echoed() -> None:
    """B066: 50 requests with one X-Request-Id are told apart by our own ids; the echo is bounded, clean."""
    engine = SayingEngine(lambda request, branch: list(request.prompt[-3:]))
    async with serving(engine) as (client, _):
        bodies = [{"model": "tiny", "prompt": [i, i + 1, i + 2]} for i in range(50)]
        sent = {"x-request-id": "same-id"}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=b, headers=sent) for b in bodies))
        odd = await client.get("/health", headers=[(b"x-request-id", b"a\tb{}<script>;" + b"z" * 1000)])
        none = await client.get("/health")
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.json()["choices"][0]["text"] == tokenizer().decode(body["prompt"])
        assert answer.headers["x-request-id"] == "same-id"
    assert len({request.id for request in engine.requests}) == 50
    assert "same-id" not in {request.id for request in engine.requests}
    assert odd.headers["x-request-id"].startswith("abscriptzzz")
    assert len(odd.headers["x-request-id"]) <= 64
    assert len(none.headers["x-request-id"]) == 32


async def test_t16_header_blocks_and_lines_are_bounded() -> None:
    """T16: more than 100 fields or 32 KiB of headers is 431, a longer line than 8 KiB is 414."""
    async with serving() as (client, _):
        assert (await client.get("/health", headers={f"x-{i}": "1" for i in range(120)})).status_code == 431
        assert (await client.get("/health", headers={"x-big": "y" * 40_000})).status_code == 431
        assert (await client.get("/health?" + "q" * 9000)).status_code == 414


async def test_health_tells_starting_ready_stuck_draining_and_failed() -> None:
    """Live says whether waiting helps; ready whether work is welcome; progress decides, not time alone."""
    engine = SayingEngine()
    async with serving(engine) as (client, app):

        async def states() -> tuple[int, int]:
            return (await client.get("/health/live")).status_code, (await client.get("/health/ready")).status_code

        assert await states() == (200, 200)
        engine.state = "starting"
        assert await states() == (200, 503)
        assert (await client.post(CHAT, json=chat_body())).status_code == 503
        engine.state = "dead"
        assert await states() == (200, 503)
        engine.state = "failed"
        assert await states() == (503, 503)
        engine.state = "ready"
        engine.since_step_s = 1000.0
        assert await states() == (200, 200)  # idle, so it owes no progress
        engine.hold.clear()
        running = asyncio.create_task(client.post(CHAT, json=chat_body()))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await states() == (503, 503)
        engine.since_step_s = 60.0  # a long prompt's step beside short ones: it goes on, a restart would not help
        assert await states() == (200, 503)
        engine.since_step_s, engine.expected_step_s = 1000.0, 0.0  # of its first step nothing is known
        assert await states() == (200, 503)
        engine.since_step_s, engine.expected_step_s = 1000.0, 60.0
        assert await states() == (200, 200)  # slow steps are no standstill
        engine.hold.set()
        await running
        app.state.context.draining = True
        assert await states() == (200, 503)
        refused = await client.post(CHAT, json=chat_body())
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1


async def test_docs_ask_no_outside_address() -> None:
    """The page has all it needs, and a policy that keeps it so."""
    async with serving() as (client, _):
        page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
