"""Which data port serves which name of `kv.transport`."""

from __future__ import annotations

from collections.abc import Callable

from pdactors.errors import ConfigError
from pdactors.transport.data_port import DataPort


def _ucx(host: str, device: str, ports: str) -> DataPort:
    from pdactors.transport.ucx import UcxPort, device_of

    return UcxPort(device or device_of(host), ports)


def _inproc(_host: str, _device: str, _ports: str) -> DataPort:
    from pdactors.transport.inproc_port import InprocPort

    return InprocPort()


PORTS: dict[str, Callable[[str, str, str], DataPort]] = {"ucx": _ucx, "inproc": _inproc}


def open_port(name: str, *, host: str, device: str, ports: str) -> DataPort:
    """Open a data port on the running event loop; `device` "" finds the network device that holds `host`.

    Raises:
        ConfigError: no transport has that name, or it cannot be had here.
    """
    if name not in PORTS:
        raise ConfigError(f"kv.transport {name!r}: no data port has that name; known: {', '.join(PORTS)}")
    return PORTS[name](host, device, ports)
