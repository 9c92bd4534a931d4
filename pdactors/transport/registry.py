"""Which transport serves which scheme."""

from __future__ import annotations

from pdactors.config.keys import CurveKeys
from pdactors.errors import ConfigError
from pdactors.transport.contracts import Transport
from pdactors.transport.inproc import InprocTransport


def transport_for(address: str, keys: CurveKeys | None = None) -> Transport:
    """Make the transport for an address `scheme://rest`; with `keys` every socket of it speaks CURVE.

    Raises:
        ConfigError: no transport has that scheme.
    """
    scheme = address.partition("://")[0]
    if scheme == "inproc":
        return InprocTransport()  # within a process there is nobody to keep out
    if scheme == "tcp":
        from pdactors.transport.zmq import ZmqTransport

        return ZmqTransport(keys)
    raise ConfigError(f"address {address!r}: unknown scheme {scheme!r}; known: tcp, inproc")
