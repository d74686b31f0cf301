"""F10: a fuzzer that knows the API's description finds no 5xx, no answer of another shape, and no leaked text (T20).

Bounded here to some seconds; `make test-all` runs it longer. Bodies that no description would make (bytes) come on top.
"""

import asyncio
import json
import random
import re
from typing import Any

import pytest
import schemathesis
from http_models import Error, check
from http_support import MODEL, SayingEngine, chat_body, serving, text_body, text_tools
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sayfa.base.config import ServerOptions
from sayfa.server.app import create_app

LEAKS = re.compile(r"/(?:usr|home|work|tmp|src|opt)/|0x[0-9a-f]{6}|Traceback|sayfa\.|pydantic|starlette|Error\(")
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
app = create_app(SayingEngine(), text_tools(), ServerOptions(log_requests=False), [MODEL], "0")
schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"host": "localhost"})
LIMITS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
    "database": None,
}


def judge(case: Any) -> None:
    """Send one case; check status, shape and silence about ourselves."""
    if isinstance(case.body, dict) and case.path.startswith("/v1/") and "model" in case.body:
        case.body["model"] = MODEL  # or nearly every case would end as an unknown model
    response = case.call(headers={"host": "localhost"})
    streamed = "text/event-stream" in response.headers.get("content-type", [""])[0]
    case.validate_response(response, checks=[c for c in CHECKS if c is not response_schema_conformance or not streamed])
    if response.status_code >= 400 and not case.path.startswith(("/health", "/ping")):
        body = response.json()
        check(body, Error)
        assert not LEAKS.search(json.dumps(body))


@schema.parametrize()
@settings(max_examples=12, **LIMITS)
def test_f10_described_requests(case: Any) -> None:
    judge(case)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=2000, **LIMITS)
def test_f10_described_requests_at_length(case: Any) -> None:
    judge(case)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Damage a body: bytes flipped, cut, doubled, or put in."""
    body = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(5):
            case 0:
                body[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del body[at : at + rng.randint(1, 10)]
            case 2:
                body[at:at] = body[at : at + rng.randint(1, 30)]
            case 3:
                body[at:at] = rng.choice([b"null", b"[", b"{", b"1e400", b"\\ud800", b"-0", b"true", b'""', b"9" * 30])
            case _:
                body[at:at] = rng.randbytes(3)
    return bytes(body)


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**64, 0.5, -0.0, 1e308, "", "x", "1", "é" * 50, [], {}, [None],
    [[]], [1], ["a"], {"a": 1}, {"1": 1}, [[1]], [-1], {"type": "text"}, [{"role": "user"}], [{}],
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
async def test_f10_damaged_bytes_and_values_of_every_type(seed: int) -> None:
    """Bodies damaged at random, and each known field given each kind of value: never 5xx, always one form."""
    rng = random.Random(seed)
    fields = sorted({name for part in app.openapi()["components"]["schemas"].values() for name in part["properties"]})
    async with serving(SayingEngine(), log_requests=False) as (client, _):

        async def send(path: str, content: bytes) -> None:
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (response.status_code, content)
            if response.status_code != 200:
                check(response.json(), Error)
                assert not LEAKS.search(response.text), response.text

        for _ in range(150):
            path, body = rng.choice(
                [("/v1/chat/completions", chat_body()), ("/v1/completions", text_body()),
                 ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
            )  # fmt: skip
            await send(path, mutate(rng, json.dumps(body).encode()))
            name, value = rng.choice(fields), rng.choice(VALUES)
            await send(path, json.dumps({**body, name: value}).encode())
            await asyncio.sleep(0)
