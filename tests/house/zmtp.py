"""ZeroMQ's wire protocol by hand (https://rfc.zeromq.org/spec/23), to say what its library would not."""

from __future__ import annotations

import os
import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4


class Zmtp:
    """A DEALER's connection to a ROUTER."""

    def __init__(self, address: str, *, handshake: bool = True, timeout_s: float = 10.0) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        if handshake:
            self.socket.sendall(GREETING)
            self._exactly(64)
            identity = os.urandom(8)
            ready = b"\x05READY" + _property("Socket-Type", b"DEALER") + _property("Identity", identity)
            self.socket.sendall(bytes([COMMAND, len(ready)]) + ready)
            self.frame()

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frame_of(f, more=i + 1 < len(frames)) for i, f in enumerate(frames)))

    def frame(self) -> bytes:
        """Receive one frame; b"" at the end of the connection."""
        head = self._exactly(1)
        if not head:
            return b""
        size = self._exactly(8) if head[0] & LONG else self._exactly(1)
        return self._exactly(int.from_bytes(size, "big"))

    def is_cut(self, timeout_s: float) -> bool:
        """Say whether the other side ends the connection."""
        self.socket.settimeout(timeout_s)
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (piece := self.socket.recv(size - len(data))):
            data += piece
        return data


def frame_of(data: bytes, *, more: bool = False) -> bytes:
    """Return a frame as it travels."""
    if len(data) < 256:
        return bytes([more, len(data)]) + data
    return bytes([LONG | more]) + struct.pack(">Q", len(data)) + data


def _property(name: str, value: bytes) -> bytes:
    return bytes([len(name)]) + name.encode() + struct.pack(">I", len(value)) + value
