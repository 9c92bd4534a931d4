"""Which transport serves which scheme."""

from __future__ import annotations

from collections.abc import Callable

from pdactors.errors import ConfigError
from pdactors.transport.contracts import Transport
from pdactors.transport.inproc import InprocTransport


def transport_for(address: str) -> Transport:
    """Make the transport for an address `scheme://rest`.

    Raises:
        ConfigError: no transport has that scheme.
    """
    scheme = address.partition("://")[0]
    if scheme not in _TRANSPORTS:
        raise ConfigError(f"address {address!r}: unknown scheme {scheme!r}; known: {', '.join(_TRANSPORTS)}")
    return _TRANSPORTS[scheme]()


def _zmq() -> Transport:
    from pdactors.transport.zmq import ZmqTransport

    return ZmqTransport()


_TRANSPORTS: dict[str, Callable[[], Transport]] = {"tcp": _zmq, "inproc": InprocTransport}
