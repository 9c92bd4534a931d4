"""How bytes travel: the contracts that every transport keeps, and the transports."""

from pdactors.transport.contracts import Busy, Channel, Listener, Peer, PeerGone, Receive, Transport
from pdactors.transport.registry import actors_transport, transport_for

__all__ = [
    "Busy",
    "Channel",
    "Listener",
    "Peer",
    "PeerGone",
    "Receive",
    "Transport",
    "actors_transport",
    "transport_for",
]
