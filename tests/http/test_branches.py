"""A stop string that ends one of several answers ends that branch in the engine, too; the others go on.

The engine knows no text: the server, or the offline door, finds the stop string and names the branch.
"""

import asyncio
from pathlib import Path

import pytest
from http_support import SayingEngine, chat_body, ids_of, joined, serving, stream, text_body

from fakes.fake_engine import make_engine
from fakes.models import make_tiny
from fakes.runner import mix_rule
from sayfa.base.messages import Outputs, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.engine.inproc import InprocClient
from sayfa.llm import LLM

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def says(request: Request, branch: int) -> list[int]:
    """The first answer holds the stop string early, the second late, the third never."""
    return ids_of(["ab STOP " + "x" * 40, "cdefgh STOP" + "y" * 40, "no end of it " * 3][branch], byte_by_byte=True)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("streamed", [True, False])
async def test_the_engine_is_told_of_each_branch_that_a_stop_string_ended(path: str, streamed: bool) -> None:
    """In the order in which they ended, each once; the last one to end ends the request."""
    engine = SayingEngine(says)
    body = (chat_body if path == CHAT else text_body)(n=3, stop=["STOP"], max_tokens=200)
    async with serving(engine) as (client, _):
        if streamed:
            chunks = await stream(client, path, body)
            texts = [joined(chunks, index, chat=path == CHAT) for index in range(3)]
        else:
            choices = (await client.post(path, json=body)).json()["choices"]
            texts = [c["message"]["content"] if path == CHAT else c["text"] for c in choices]
    assert texts == ["ab ", "cdefgh ", "no end of it " * 3]
    assert engine.aborted_branches == [(engine.requests[0].id, 0), (engine.requests[0].id, 1)]


async def test_an_answer_that_the_engine_itself_ended_is_not_named() -> None:
    """Nor one whose stop string came with its last token; when a stop string ends the only answer, all is forgotten."""
    engine = SayingEngine(lambda request, branch: ids_of("abcdef"[: 2 + branch], byte_by_byte=True))
    async with serving(engine) as (client, _):
        await client.post(CHAT, json=chat_body(n=3))
        assert (engine.aborted, engine.aborted_branches) == ([], [])
        await client.post(CHAT, json=chat_body(stop=["ab"]))
        assert (len(engine.aborted), engine.aborted_branches) == (1, [])


async def test_a_real_engine_computes_no_more_of_the_named_branch() -> None:
    """Real scheduler: after the abort no step has a row of it; the iterator goes on and ends with the others."""
    client = InprocClient(make_engine(rule=mix_rule(90)))
    rows: list[int] = []
    client.on_outputs(lambda outputs: rows.append(num_rows(outputs)))
    request = Request(id="r", prompt=[1, 2, 3], params=SamplingParams(n=3, max_tokens=30, ignore_eos=True))
    ends: dict[int, str] = {}
    counts = [0, 0, 0]
    async for output in client.generate(request):
        counts[output.branch] += len(output.tokens)
        if output.finish is not None:
            ends[output.branch] = output.finish
        if output.branch == 1 and counts[1] == 5 and not ends:
            client.abort("r", [1])
    assert ends == {0: "length", 1: "abort", 2: "length"}
    assert counts[0] == counts[2] == 30
    assert counts[1] <= 6
    assert rows.count(2) >= 20
    await asyncio.sleep(0)
    await client.close()


def num_rows(outputs: Outputs) -> int:
    return outputs.stats.num_rows if outputs.stats is not None else 0


def test_the_offline_door_ends_branches_by_themselves(tmp_path: Path) -> None:
    """What a stop string ended is computed no more, and all texts are as ever."""
    llm = LLM(str(make_tiny("llama", tmp_path / "model", seed=3)))
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "n": 3, "ignore_eos": True}
    free = llm.generate("x", SamplingParams(**fields))[0]
    stop = free.outputs[1].text[4:6]
    num_rows: list[int] = []
    step = llm.engine.step

    def counted() -> Outputs:
        outputs = step()
        num_rows.append(outputs.stats.num_rows)
        return outputs

    llm.engine.step = counted  # type: ignore[method-assign]
    stopped = llm.generate("x", SamplingParams(**fields, stop=[stop]))[0]
    computed = sum(num_rows)
    kept = 0
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        at = before.text.find(stop)
        assert after.text == (before.text if at < 0 else before.text[:at])
        kept += len(after.token_ids)
    assert kept <= computed <= kept + 6
