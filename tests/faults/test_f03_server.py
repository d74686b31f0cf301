"""F03 at the points that conversations pass, at those beside them, at the engine's socket and at other weight files."""

import asyncio
import hashlib
import logging
import shutil

import pytest
from http_support import SayingEngine, chat_body, events, serving, until

from fakes.engines import build
from fakes.socket_pair import connected_pair
from faults.in_engine import folder
from faults.kinds import DISK, KINDS
from faults.points import IN_CHAT
from sayfa.base.faults import armed
from sayfa.base.gguf import read_gguf
from sayfa.server import serve as serve_module
from sayfa.wire.sockets import DisconnectedError, FrameReader, frame

LONG = [{"role": "user", "content": "Hi " * 2000}]
BODY = {"logprobs": True, "top_logprobs": 1, "max_tokens": 3}


def boom():
    raise RuntimeError("armed")


async def ask(client, stream, messages=None):
    """(text, or the code of the error) of one conversation."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = chat_body(**BODY, **options)
    answer = await client.post("/v1/chat/completions", json={**body, "messages": messages or body["messages"]})
    if answer.status_code != 200:
        return answer.json()["error"]["code"]
    chunks = events(answer.content) if stream else [answer.json()]
    errors = [chunk["error"]["code"] for chunk in chunks if "error" in chunk]
    return errors[0] if errors else str([chunk["choices"] for chunk in chunks])


@pytest.mark.parametrize("kind", ["raise", "memory"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", IN_CHAT)
async def test_a_fault_of_one_conversation_is_its_own(name, stream, kind):
    """Three conversations at once, one fault at each pass in turn: one has the error, the others their answers."""
    messages = LONG if name == "server.thread" else None
    async with serving(SayingEngine("Hello world", max_model_len=8000, max_num_batched_tokens=64)) as (client, app):
        wanted = await ask(client, stream, messages)
        nth = 1
        while True:
            with armed(name, KINDS[kind].action, nth=nth) as point:
                answers = await asyncio.gather(*(ask(client, stream, messages) for _ in range(3)))
            if point.passes < nth:
                break
            assert sorted(answers) == sorted(["internal_error", wanted, wanted]), f"pass {nth}"
            await until(lambda: not app.state.context.streams)
            assert not app.state.context.admissions._watched
            nth += 1
        assert nth > 1 or (name == "server.event" and not stream)
        page = (await client.get("/metrics")).text
        assert 'sayfa:requests_in_flight{engine="0",model_name="tiny"} 0.0' in page


@pytest.mark.parametrize("name", ["server.metrics.render", "server.health"])
async def test_a_page_that_cannot_be_made_is_an_error_once(name):
    path = "/metrics" if name == "server.metrics.render" else "/health/ready"
    async with serving() as (client, _):
        with armed(name, boom) as point:
            codes = [(await client.get(path)).status_code for _ in range(2)]
        assert codes == [500, 200]
        assert point.passes == 2
        assert "Hello" in await ask(client, stream=False)


async def test_the_line_of_throughput_comes_again_after_a_fault(caplog):
    with caplog.at_level(logging.INFO, "sayfa"), armed("server.stats_line", boom) as point:
        async with serving(log_stats_interval=0.001) as (client, _):
            while point.passes < 2:
                await ask(client, stream=False)
    assert "could not be made" in caplog.text
    assert "Avg generation throughput" in caplog.text


async def test_a_comment_that_cannot_be_sent_ends_no_watch(caplog):
    engine = SayingEngine()
    engine.hold.clear()
    async with serving(engine, sse_keep_alive_interval=0.001) as (client, _):
        with armed("server.stream.keep_alive", boom) as point:
            asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=chat_body(stream=True)))
            await until(lambda: point.passes >= 2, 10.0)
            engine.hold.set()
            answer = (await asking).text
    assert "Hello" in answer
    assert answer.endswith("data: [DONE]\n\n")
    assert "looking after a stream failed" in caplog.text


async def test_a_tokenizer_that_cannot_be_loaded_ends_the_server_with_1():
    class Ending:
        codes = []

        def fail(self, code):
            self.codes.append(code)

    ending = Ending()
    with armed("server.load_text", boom):
        await serve_module._load(None, None, None, None, ending)
    assert ending.codes == [1]


# --------------------------------------------------------------------------------------------------- the socket


@pytest.fixture
def pair():
    with connected_pair() as both:
        yield both


@pytest.mark.parametrize("kind", ["drop", "double", "cut", "flip"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_bytes_that_reach_the_engine_otherwise_end_the_connection(pair, kind, nth):
    ours, connection = pair
    got = []

    def read():
        for number in range(6):
            ours.sendall(frame(b"message %d" % number, number))
            got.extend(connection.receive(1.0))

    with armed("wire.engine_reads", alter=KINDS[kind].alter, nth=nth) as point, pytest.raises(DisconnectedError):
        read()
    assert point.passes >= nth
    assert got == [b"message %d" % number for number in range(len(got))]


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_kernel_that_takes_a_part_at_a_time_gets_everything(pair, nth):
    ours, connection = pair
    reader, got = FrameReader(), []
    with armed("wire.engine_writes", alter=KINDS["short"].alter, nth=nth, every=True) as point:
        for number in range(3):
            connection.send(b"message %d" % number * 50)
        assert connection.flush(1.0)
    assert point.passes >= nth
    got += reader.feed(ours.recv(1 << 16))
    assert got == [b"message %d" % number * 50 for number in range(3)]


def test_a_pipe_that_breaks_while_writing_is_the_end_of_the_connection(pair):
    def broken():
        raise BrokenPipeError

    with armed("wire.engine_writes", broken), pytest.raises(DisconnectedError):
        pair[1].send(b"message")


# --------------------------------------------------------------------------------------------------- weight files


@pytest.mark.parametrize("error", DISK.values(), ids=DISK)
def test_a_checksum_that_cannot_be_read_is_an_error(tmp_path, error):
    place = shutil.copytree(folder(), tmp_path / "model")
    weights = place / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (place / "model.safetensors.sha256").write_text(digest)

    def fail():
        raise error

    with armed("load.checksum", fail), pytest.raises(OSError, match=error.strerror):
        build(place, "auto")
    build(place, "auto")


def test_a_gguf_header_that_cannot_be_read_is_an_error(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
    with armed("load.header", boom), pytest.raises(RuntimeError, match="armed"):
        read_gguf(path)
