"""`Connections` with real sockets, and numbers that are used again."""

from __future__ import annotations

import socket

import pytest

from pdactors.transport.connections import Connections


def is_cut(end: socket.socket) -> bool:
    """Whether the other end was shut down."""
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            yield accepted, client


def test_a_peer_is_cut(pair):
    ours, theirs = pair
    connections = Connections(max_unread_bytes=1 << 20)
    connections.begin(ours.fileno(), 0.0)
    connections.heard(b"peer", ours.fileno(), 5, 0.0)
    assert not is_cut(theirs)
    connections.cut(b"peer")
    assert is_cut(theirs)
    connections.close()


def test_whoever_has_the_number_of_one_who_left_is_not_cut_in_its_stead(pair):
    ours, theirs = pair
    connections = Connections(max_unread_bytes=1 << 20)
    connections.begin(ours.fileno(), 0.0)
    connections.heard(b"gone", ours.fileno(), 5, 0.0)  # its last message is taken after its connection has ended
    connections.heard(b"new", ours.fileno(), 5, 0.1)
    connections.cut(b"gone")
    assert not is_cut(theirs)
    connections.cut(b"new")
    assert is_cut(theirs)
    connections.close()
