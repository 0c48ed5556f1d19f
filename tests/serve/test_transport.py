"""Frames arrive whole or not at all, and never cost more memory than what was really sent."""

import socket
import struct
import threading

import pytest

from engine.serve import transport
from engine.serve.transport import FrameError, recv_frame, send_frame, set_send_timeout

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.mark.parametrize("size", [0, 1, 4, 65_536, 3_000_000])
def test_a_frame_arrives_as_it_was_sent(pair, size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    sender = threading.Thread(target=lambda: (send_frame(pair[0], payload), send_frame(pair[0], b"next")))
    sender.start()
    assert recv_frame(pair[1]) == payload
    assert recv_frame(pair[1]) == b"next"
    sender.join()


def test_an_end_between_frames_is_not_an_error(pair) -> None:
    send_frame(pair[0], b"last")
    pair[0].close()
    assert recv_frame(pair[1]) == b"last"
    assert recv_frame(pair[1]) is None


@pytest.mark.parametrize("data", [b"\x05", struct.pack("<I", 5), struct.pack("<I", 5) + b"abc"])
def test_an_end_inside_a_frame_is_an_error(pair, data: bytes) -> None:
    pair[0].sendall(data)
    pair[0].close()
    with pytest.raises(FrameError, match="ended"):
        recv_frame(pair[1])


def test_a_frame_that_announces_too_much_is_refused_before_it_is_read(pair) -> None:
    pair[0].sendall(struct.pack("<I", transport.MAX_FRAME + 1))
    with pytest.raises(FrameError, match=r"67,108,865.*67,108,864"):
        recv_frame(pair[1])


def test_a_payload_that_is_too_long_is_not_sent(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME", 10)
    with pytest.raises(FrameError, match="11 bytes"):
        send_frame(pair[0], b"x" * 11)
    send_frame(pair[0], b"x" * 10)
    assert recv_frame(pair[1]) == b"x" * 10


def test_a_send_that_nobody_reads_ends_in_time_and_leaves_receiving_alone(pair) -> None:
    set_send_timeout(pair[0], 0.2)
    with pytest.raises(OSError):
        send_frame(pair[0], b"x" * 50_000_000)
    threading.Timer(0.5, lambda: pair[1].sendall(struct.pack("<I", 2) + b"ok")).start()
    assert recv_frame(pair[0]) == b"ok"
