"""Frames over a stream socket: a 4-byte little-endian length, then one message. Nothing here knows what it means."""

from __future__ import annotations

import socket
import struct
import sys

from engine.serve.protocol import MAX_FRAME

HEADER = struct.Struct("<I")
_CHUNK = 1 << 20


class FrameError(ConnectionError):
    """The byte stream can't be trusted any more: a frame is longer than allowed, or ends in the middle."""


def send_frame(sock: socket.socket, payload: bytes | bytearray | memoryview) -> None:
    """Send one frame; blocks until the system has taken all of it.

    Raises:
        FrameError: the payload is longer than ``MAX_FRAME`` bytes; nothing was sent.
        OSError: the other end is gone, or the socket's send timeout ran out.
    """
    if len(payload) > MAX_FRAME:
        raise FrameError(
            f"a message of {len(payload):,} bytes is longer than the {MAX_FRAME:,} bytes that one frame may have"
        )
    if len(payload) < _CHUNK:
        sock.sendall(HEADER.pack(len(payload)) + payload)
    else:
        sock.sendall(HEADER.pack(len(payload)))
        sock.sendall(payload)


def recv_frame(sock: socket.socket) -> bytearray | None:
    """Wait for one frame; None when the other end closed the connection between two frames.

    Raises:
        FrameError: a frame longer than ``MAX_FRAME``, or an end in the middle of one.
        OSError: the connection broke.
    """
    header = _recv_exactly(sock, HEADER.size)
    if header is None:
        return None
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise FrameError(f"a frame announces {length:,} bytes; at most {MAX_FRAME:,} are allowed")
    payload = _recv_exactly(sock, length)
    if payload is None and length:
        raise FrameError(f"the connection ended where a frame of {length:,} bytes should follow")
    return payload if payload is not None else bytearray()


def _recv_exactly(sock: socket.socket, count: int) -> bytearray | None:
    """``count`` bytes, or None at an end before the first of them. Memory grows with what really arrives."""
    data = bytearray()
    while len(data) < count:
        chunk = sock.recv(min(_CHUNK, count - len(data)))
        if not chunk:
            if data:
                raise FrameError(f"the connection ended after {len(data):,} of {count:,} bytes")
            return None
        data += chunk
    return data


def set_send_timeout(sock: socket.socket, seconds: float) -> None:
    """Limit how long a send may block, without touching receives (a socket's own timeout would limit both)."""
    if sys.platform == "win32":
        value = struct.pack("<I", int(seconds * 1000))
    else:
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
