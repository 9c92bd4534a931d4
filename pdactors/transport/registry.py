"""Which transport serves which scheme."""

from __future__ import annotations

from collections.abc import Collection

from pdactors.config.keys import CurveKeys
from pdactors.errors import ConfigError
from pdactors.transport.contracts import Transport
from pdactors.transport.inproc import InprocTransport
from pdactors.transport.lossless import LosslessTransport


def transport_for(address: str, keys: CurveKeys | None = None, cores: Collection[int] = ()) -> Transport:
    """Make the transport for an address `scheme://rest`; with `keys` every socket of it speaks CURVE.

    Threads of its own run on `cores`; where their maker does, if there are none.

    Raises:
        ConfigError: no transport has that scheme.
    """
    scheme = address.partition("://")[0]
    if scheme == "inproc":
        return InprocTransport()  # within a process there is nobody to keep out
    if scheme == "tcp":
        from pdactors.transport.zmq import ZmqTransport

        return ZmqTransport(keys, cores)
    raise ConfigError(f"address {address!r}: unknown scheme {scheme!r}; known: tcp, inproc")


def actors_transport(address: str, keys: CurveKeys | None = None, cores: Collection[int] = ()) -> Transport:
    """Make the transport between actors; what `transport_for` says, and a broken connection loses no message."""
    transport = transport_for(address, keys, cores)
    return transport if isinstance(transport, InprocTransport) else LosslessTransport(transport)
