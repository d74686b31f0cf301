"""Every answer and every event validates against OpenAI's own description of its API.

The description is found through SAYFA_OPENAI_SPEC or beside the project; without it these tests are skipped.
It is amended in two places where OpenAI's own service does not keep to it: a completion *event* has
`finish_reason: null` until its last one, and the first token of an echoed prompt has no log-probability (null).
"""

import copy
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from http_support import SayingEngine, chat_body, ids_of, serving, stream, text_body
from jsonschema import Draft202012Validator

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLACES = [Path(os.environ.get("SAYFA_OPENAI_SPEC", "")), Path(__file__).parents[3] / "shared/data/openai-openapi.yaml"]
SPEC = next((path for path in PLACES if path.is_file()), None)

pytestmark = pytest.mark.skipif(
    SPEC is None, reason="OpenAI's API description is not here; set SAYFA_OPENAI_SPEC to it"
)


@lru_cache(maxsize=1)
def schemas() -> dict[str, Any]:
    """The schemas that we need, with `nullable` put into the words of JSON Schema."""
    text = (SPEC or Path()).read_text("utf-8")
    loader = yaml.CSafeLoader(text[text.index("\ncomponents:") :])
    whole = loader.get_single_data()["components"]["schemas"]
    wanted = ["CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "CreateCompletionResponse",
              "ListModelsResponse", "Model", "ErrorResponse"]  # fmt: skip
    found: dict[str, Any] = {}
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = _plain(whole[name])
            wanted += [part.rsplit("/", 1)[1] for part in _refs(found[name])]
    return found


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _plain(value) for key, value in node.items() if key not in ("nullable", "x-oaiMeta", "example")}
    return {"anyOf": [made, {"type": "null"}]} if node.get("nullable") is True else made


def _refs(node: Any) -> list[str]:
    if isinstance(node, dict):
        here = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return here + [ref for value in node.values() for ref in _refs(value)]
    return [ref for item in node for ref in _refs(item)] if isinstance(node, list) else []


def validate(value: Any, name: str, *, is_event: bool = False) -> None:
    """Fail with the first difference from the description."""
    known = schemas()
    if name == "CreateCompletionResponse":
        known = copy.deepcopy(known)
        choice = known[name]["properties"]["choices"]["items"]["properties"]
        if is_event:
            choice["finish_reason"]["enum"].append(None)
            choice["finish_reason"]["type"] = ["string", "null"]
        values = choice["logprobs"]["anyOf"][0]["properties"]
        for field in ("token_logprobs", "top_logprobs"):
            values[field]["items"] = {"anyOf": [values[field]["items"], {"type": "null"}]}
    root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": known}}
    errors = sorted(Draft202012Validator(root).iter_errors(value), key=lambda error: len(error.path))
    assert not errors, (list(errors[0].path), errors[0].message, json.dumps(value)[:300])


CASES: list[dict[str, Any]] = [
    {}, {"n": 2}, {"max_tokens": 1}, {"stop": "world"}, {"stream_options": {"include_usage": True}},
    {"stream_options": {"continuous_usage_stats": True}},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("logprobs", [False, True])
async def test_chat(case: dict[str, Any], logprobs: bool) -> None:
    """Plain answers and events of chat."""
    extra = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    plain = {key: value for key, value in case.items() if key != "stream_options"}
    async with serving(SayingEngine(lambda r, b: ids_of("Hello wörld 👍", True))) as (client, _):
        validate((await client.post(CHAT, json=chat_body(**plain, **extra))).json(), "CreateChatCompletionResponse")
        for chunk in await stream(client, CHAT, chat_body(**case, **extra)):
            validate(chunk, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize("case", [*CASES, {"echo": True}, {"prompt": ["a", "b"], "echo": True}], ids=str)
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_completions(case: dict[str, Any], logprobs: int | None) -> None:
    """Plain answers and events of completions."""
    plain = {key: value for key, value in case.items() if key != "stream_options"}
    async with serving() as (client, _):
        answer = await client.post(TEXT, json=text_body(**plain, logprobs=logprobs))
        validate(answer.json(), "CreateCompletionResponse")
        for chunk in await stream(client, TEXT, text_body(**case, logprobs=logprobs)):
            validate(chunk, "CreateCompletionResponse", is_event=True)


async def test_models_and_errors() -> None:
    """The two short ones."""
    async with serving() as (client, _):
        validate((await client.get("/v1/models")).json(), "ListModelsResponse")
        validate((await client.get("/v1/models/tiny")).json(), "Model")
        for response in (
            await client.get("/v1/models/none"),
            await client.get("/nowhere"),
            await client.post(CHAT, json={}),
            await client.post(CHAT, content=b"{", headers={"content-type": "application/json"}),
        ):
            validate(response.json(), "ErrorResponse")
