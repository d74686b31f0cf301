"""Frames survive any cutting of the byte stream; a frame that is too long costs nothing but itself."""

import random
import socket
import threading

import pytest

from fakes.socket_pair import connected_pair
from sayfa.wire import sockets
from sayfa.wire.sockets import BrokenStreamError, DisconnectedError, FrameReader, frame


def stream_of(payloads):
    return b"".join(frame(payload, number) for number, payload in enumerate(payloads))


@pytest.mark.parametrize("seed", range(40))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(seed):
    rng = random.Random(seed)
    payloads = [rng.randbytes(rng.choice([0, 1, 3, 4, 5, 100, 70_000])) for _ in range(rng.randint(1, 12))]
    stream = stream_of(payloads)
    reader, got, at = FrameReader(), [], 0
    while at < len(stream):
        size = rng.choice([1, 2, 3, 4, 5, 7, 1000, 1 << 17])
        got += reader.feed(stream[at : at + size])
        at += size
    assert got == payloads


@pytest.mark.parametrize("seed", range(10))
def test_a_frame_over_the_limit_is_skipped_without_being_held(seed, monkeypatch):
    rng = random.Random(seed)
    stream = stream_of([b"before", bytes(5000), b"after", bytes(5000), bytes(5000), b"end"])
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 1000)
    reader, got, held = FrameReader(), [], 0
    while stream:
        size = rng.randint(1, 700)
        got += reader.feed(stream[:size])
        held = max(held, len(reader._buffer))
        stream = stream[size:]
    assert got == [b"before", b"after", b"end"]
    assert reader.skipped == 3
    assert held <= 1012
    with pytest.raises(ValueError, match="over the limit"):
        frame(bytes(1001))


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_that_lost_doubled_or_changed_anything_is_never_understood_as_another_one(seed):
    """What is handed out before the break is a beginning of what was sent; then nothing comes any more."""
    rng = random.Random(seed)
    payloads = [rng.randbytes(rng.choice([0, 1, 20, 300])) for _ in range(6)]
    frames = [frame(payload, number) for number, payload in enumerate(payloads)]
    hit = rng.randrange(5)
    at = rng.randrange(len(frames[hit]))
    match seed % 4:
        case 0:
            frames[hit] = b""
        case 1:
            frames[hit] *= 2
        case 2:
            frames[hit] = frames[hit][:at]
        case 3:
            at = max(4, at)  # not the length itself: that would only wait for more
            frames[hit] = frames[hit][:at] + bytes([frames[hit][at] ^ (1 << rng.randrange(8))]) + frames[hit][at + 1 :]
    stream = b"".join(frames) + b"".join(frame(b"ping", 6 + number) for number in range(100_000 // 16))
    reader, got = FrameReader(), []

    def read():
        for start in range(0, len(stream), 7):
            got.extend(reader.feed(stream[start : start + 7]))

    with pytest.raises(BrokenStreamError):
        read()
    assert got == payloads[: len(got)]


@pytest.fixture
def pair():
    with connected_pair() as both:
        yield both


def test_a_slow_reader_never_blocks_the_writer_and_loses_nothing(pair):
    ours, connection = pair
    payloads = [bytes([i]) * 100_000 for i in range(50)]
    for payload in payloads:
        connection.send(payload)  # nobody reads yet: most of it must wait
    assert connection.unsent_bytes > 1_000_000
    reader, got = FrameReader(), []

    def read():
        while len(got) < len(payloads):
            got.extend(reader.feed(ours.recv(1 << 16)))

    thread = threading.Thread(target=read)
    thread.start()
    assert connection.flush(5.0)
    thread.join(5.0)
    assert got == payloads
    assert connection.unsent_bytes == 0


def test_receive_without_a_timeout_returns_at_once_when_nothing_is_there(pair):
    assert pair[1].receive(0.0) == []


def test_what_came_before_the_end_is_handed_out_before_the_end_is_told(pair):
    ours, connection = pair
    ours.sendall(frame(b"last words"))
    ours.shutdown(socket.SHUT_RDWR)
    assert connection.receive(1.0) == [b"last words"]
    with pytest.raises(DisconnectedError):
        connection.receive(1.0)


def test_sending_to_nobody_tells_so(pair):
    ours, connection = pair
    ours.close()
    with pytest.raises(DisconnectedError):
        connection.send(b"hello")
